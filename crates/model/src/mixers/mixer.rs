//! The first half of a layer: attention over a paged pool, or what the layer has in its place, between two products.

use crate::config::ModelConfig;
use crate::layers::linear::Linear;
use crate::layers::rope::RopeTables;
use crate::layers::step::Step;
use crate::spec::LayerSpec;
use crate::weights::Weights;
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvHeads, LayerPool};
use foretoken_kernels::{AttentionParams, HeadNorms};

/// What a kind of mixer computes between its two products.
pub(crate) trait Mixer: CloneMixer + Send + Sync {
    /// Writes what other rows read, of all rows; returns what the layer's output is a product of, of those that attend:
    /// `[attending, width]`.
    ///
    /// # Errors
    /// If the device fails, or a sequence has no state.
    fn attend(&self, rows: &MixerRows<'_>) -> Result<Tensor>;

    /// Only writes what other rows read. A layer with a state computes its output on the way.
    ///
    /// # Errors
    /// Returns the errors of [`Mixer::attend`].
    fn write_kv(&self, rows: &MixerRows<'_>) -> Result<()> {
        self.attend(rows).map(drop)
    }

    /// What attention has between its products, if it is attention over its own K and V and nothing else.
    fn attention(&self) -> Option<AttentionParts<'_>> {
        None
    }

    /// The products beside those with the input and the output of the layer.
    fn linears(&mut self) -> Vec<&mut Linear> {
        Vec::new()
    }

    /// Whether adapters can change the products.
    fn takes_adapters(&self) -> bool {
        true
    }
}

/// Attention over K and V of heads, between its two products.
pub(crate) struct AttentionParts<'a> {
    /// The heads of K and V.
    pub kv_heads: KvHeads,
    /// The place of its position embedding in [`RopeTables`], if it has one.
    pub rope: Option<usize>,
    pub head_norms: Option<&'a HeadNorms>,
    pub params: AttentionParams<'a>,
}

/// Clones a mixer of any kind.
pub(crate) trait CloneMixer {
    fn boxed(&self) -> Box<dyn Mixer>;
}

impl<T: Mixer + Clone + 'static> CloneMixer for T {
    fn boxed(&self) -> Box<dyn Mixer> {
        Box::new(self.clone())
    }
}

/// The rows of a forward at a mixer.
pub(crate) struct MixerRows<'a> {
    /// The product of all rows with the layer's input, `[rows, width]`.
    pub products: Tensor,
    /// Number of rows that attend.
    pub attending: usize,
    pub step: &'a Step<'a>,
    pub pool: LayerPool<'a>,
}

impl MixerRows<'_> {
    /// The rows of `all` that attend.
    ///
    /// # Errors
    /// If the device fails.
    pub fn pick(&self, all: &Tensor) -> Result<Tensor> {
        self.step.pick(all, self.attending)
    }
}

/// The first half of a layer.
pub(crate) struct MixerLayer {
    /// The product with the layer's input, of which the mixer says what it has.
    in_proj: Linear,
    mixer: Box<dyn Mixer>,
    out_proj: Linear,
}

impl Clone for MixerLayer {
    fn clone(&self) -> Self {
        Self {
            in_proj: self.in_proj.clone(),
            mixer: self.mixer.boxed(),
            out_proj: self.out_proj.clone(),
        }
    }
}

impl MixerLayer {
    /// The products of the layer.
    pub fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let outer = [&mut self.in_proj, &mut self.out_proj];
        outer.into_iter().chain(self.mixer.linears())
    }

    /// The product with the layer's input, what is between, and the product that makes the output, if it is plain
    /// attention.
    pub fn attention(&self) -> Option<(&Linear, AttentionParts<'_>, &Linear)> {
        Some((&self.in_proj, self.mixer.attention()?, &self.out_proj))
    }

    /// The products that adapters can change.
    pub fn adapted_linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let takes_adapters = self.mixer.takes_adapters();
        self.linears().filter(move |_| takes_adapters)
    }

    /// The output, `[attending, hidden]`, for those rows of `x`, `[rows, inputs]`, that attend.
    ///
    /// # Errors
    /// If the device fails.
    pub fn attend(
        &self,
        x: &Tensor,
        attending: usize,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<Tensor> {
        let rows = self.rows(x, attending, step, pool)?;
        let y = self.mixer.attend(&rows)?;
        self.out_proj.forward_adapted(&y, step.attending_adapters)
    }

    /// Writes K and V of all rows of `x`, `[rows, inputs]`, or what the layer keeps in their place.
    ///
    /// # Errors
    /// If the device fails.
    pub fn write_kv(&self, x: &Tensor, step: &Step<'_>, pool: LayerPool<'_>) -> Result<()> {
        let rows = self.rows(x, x.dim(0)?, step, pool)?;
        self.mixer.write_kv(&rows)
    }

    fn rows<'a>(
        &self,
        x: &Tensor,
        attending: usize,
        step: &'a Step<'a>,
        pool: LayerPool<'a>,
    ) -> Result<MixerRows<'a>> {
        Ok(MixerRows {
            products: self.in_proj.forward_adapted(x, step.adapters)?,
            attending,
            step,
            pool,
        })
    }
}

/// What decides how the first half of a layer is read.
pub(crate) struct MixerParts<'a> {
    pub config: &'a ModelConfig,
    pub spec: &'a LayerSpec,
    pub ropes: &'a RopeTables,
    /// Width of the layer's input.
    pub inputs: usize,
    /// Names the parts of the layer.
    pub at: &'a dyn Fn(&str) -> String,
}

impl MixerParts<'_> {
    /// The name of a part of the layer.
    pub fn at(&self, part: &str) -> String {
        (self.at)(part)
    }

    /// The place of the layer's position embedding in [`RopeTables`].
    ///
    /// # Errors
    /// If there is no table for it.
    pub fn rope(&self) -> Result<Option<usize>> {
        let rope = self.spec.rope.as_ref().map(|rope| {
            let index = self.ropes.index_of(rope);
            index.ok_or_else(|| Error::internal("a layer has a RoPE without a table"))
        });
        rope.transpose()
    }

    /// `mixer` between `in_proj` and the product that makes the output, which is read: its name, its number of inputs,
    /// and whether it has a bias.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn layer(
        &self,
        weights: &mut Weights,
        (in_proj, mixer): (Linear, impl Mixer + 'static),
        (out_proj, width, bias): (&str, usize, bool),
    ) -> Result<MixerLayer> {
        let shape = (self.config.hidden_size, width);
        Ok(MixerLayer {
            in_proj,
            mixer: Box::new(mixer),
            out_proj: weights.linear(&self.at(out_proj), shape, bias)?,
        })
    }
}
