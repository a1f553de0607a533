//! One layer of a decoder: attention over a paged pool, and an MLP, as a [`LayerSpec`] says.

pub(crate) mod block_conv;
mod experts;
mod feed_forward;
pub(crate) mod input;
pub(crate) mod inputs;
pub(crate) mod linear;
mod mlp;
pub(crate) mod norm;
pub(crate) mod output;
pub(crate) mod rope;
pub(crate) mod step;

use crate::config::ModelConfig;
use crate::lora::RowAdapters;
use crate::mixers;
use crate::mixers::mixer::{MixerLayer, MixerParts};
use crate::spec::{LayerSpec, NormSpec};
use crate::weights::Weights;
use block_conv::{BlockConv, BlockPlaces, ConvShape};
use candle_core::Tensor;
use feed_forward::FeedForward;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvHeads, LayerPool};
use foretoken_kernels::{AttentionBatch, ForwardLayer};
use input::LayerInput;
use linear::Linear;
use norm::Norm;
use rope::RopeTables;
pub(crate) use step::Step;

/// A layer of a decoder.
#[derive(Clone)]
pub(crate) struct Layer {
    spec: LayerSpec,
    before_attention: Option<Norm>,
    mixer: Option<MixerLayer>,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    mlp: Option<FeedForward>,
    after_mlp: Option<Norm>,
    input: Option<LayerInput>,
    /// Factor of the residual stream after the layer.
    scalar: Option<f64>,
    /// The convolutions around attention and around the MLP.
    convs: Option<(BlockConv, BlockConv)>,
}

/// The sum of `x` and `delta`, and its norm, if there is one.
pub(crate) fn add(
    x: &Tensor,
    delta: &Tensor,
    norm: Option<&Norm>,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    match norm {
        Some(norm) => norm.add(x, delta, eps),
        None => {
            let sum = (x + delta)?;
            Ok((sum.clone(), sum))
        }
    }
}

/// The error of a layer that lacks a half that it needs.
fn without() -> Error {
    Error::internal("a layer has only one half")
}

impl Layer {
    /// Reads layer `index` of `config`, with one of `ropes`; `at` names its parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        config: &ModelConfig,
        index: usize,
        ropes: &RopeTables,
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let (spec, hidden) = (&config.spec.layers[index], config.hidden_size);
        let load_norm = |weights: &mut Weights, name: Option<&'static str>, norm: NormSpec| {
            name.map(|name| Norm::load(weights, &at(name), hidden, norm))
                .transpose()
        };
        let (norms, of_inputs) = (&spec.norms, config.spec.norm);
        let of_outputs = config.spec.output_norm.unwrap_or(of_inputs);
        let before_attention = load_norm(weights, norms.before_attention, of_inputs)?;
        let parts = MixerParts {
            config,
            spec,
            ropes,
            inputs: spec.inputs.unwrap_or(hidden),
            at: &at,
        };
        let mixer = mixers::load(&parts, weights)?;
        let scalar = (spec.has_scalar).then(|| weights.scalar(&at("layer_scalar"), &[1]));
        let scalar = scalar.transpose()?.map(f64::from);
        Ok(Self {
            before_attention,
            mixer,
            convs: None,
            scalar,
            spec: spec.clone(),
            after_attention: load_norm(weights, norms.after_attention, of_outputs)?,
            before_mlp: load_norm(weights, norms.before_mlp, of_inputs)?,
            after_mlp: load_norm(weights, norms.after_mlp, of_outputs)?,
            mlp: FeedForward::load(config, spec, weights, &at)?,
            input: (config.spec.layer_input_width)
                .map(|width| LayerInput::load(config, (index, width), weights, &at))
                .transpose()?,
        })
    }

    /// Reads the convolutions around its attention and its MLP, whose names begin with `name`.
    ///
    /// # Errors
    /// Returns the errors of [`Layer::load`].
    pub fn load_convs(
        &mut self,
        weights: &mut Weights,
        name: &str,
        hidden: usize,
        shape: ConvShape,
    ) -> Result<()> {
        let mut of =
            |part: &str| BlockConv::load(weights, &format!("{name}.{part}_conv"), hidden, shape);
        self.convs = Some((of("attention")?, of("mlp")?));
        Ok(())
    }

    /// All products of the layer.
    pub fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let Self {
            mixer, mlp, input, ..
        } = self;
        let mixer = mixer.iter_mut().flat_map(MixerLayer::linears);
        let mlp = mlp.iter_mut().flat_map(FeedForward::linears);
        let input = input.iter_mut().flat_map(LayerInput::linears);
        mixer.chain(mlp).chain(input)
    }

    /// The products of the layer that adapters can change.
    pub fn adapted_linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let Self { mixer, mlp, .. } = self;
        let mixer = mixer.iter_mut().flat_map(MixerLayer::adapted_linears);
        mixer.chain(mlp.iter_mut().flat_map(FeedForward::adapted_linears))
    }

    /// The layer as a part of a forward in one launch, with its K and V in `pool`, and the place of its position
    /// embedding; `ropes` are those of the model.
    ///
    /// # Errors
    /// What of it has no such forward.
    pub fn in_one_launch<'a>(
        &'a self,
        ropes: &RopeTables,
        pool: &'a (Tensor, Tensor),
    ) -> std::result::Result<(ForwardLayer<'a>, KvHeads, Option<usize>), &'static str> {
        let Self {
            spec,
            before_attention: Some(norm),
            mixer: Some(mixer),
            after_attention: None,
            before_mlp: Some(mlp_norm),
            mlp: Some(mlp),
            after_mlp: None,
            input: None,
            scalar: None,
            convs: None,
        } = self
        else {
            return Err("layers have other parts than norm, attention, norm and MLP");
        };
        if spec.parallel || spec.residual_scale != 1. {
            return Err("attention and MLP are parallel or scaled");
        }
        let norms = norm.plain().zip(mlp_norm.plain());
        let (norm, mlp_norm) = norms.ok_or("norms are not RMSNorms without biases")?;
        let attention = mixer.attention();
        let (qkv, parts, out) = attention.ok_or("a layer has no plain attention")?;
        let mlp = mlp.mlp().and_then(|mlp| mlp.gated());
        let (gate_up, down, activation) = mlp.ok_or("a layer has no gated MLP")?;
        let product = |linear: &'a Linear| {
            let linear = linear.in_one_launch();
            linear.ok_or("a weight has a format of its own")
        };
        let rope = parts.rope.and_then(|rope| ropes.tables().get(rope));
        if rope.is_some_and(|rope| rope.query_scaling.is_some()) {
            return Err("queries are scaled by their positions");
        }
        let layer = ForwardLayer {
            norm,
            qkv: product(qkv)?,
            head_norms: parts.head_norms,
            pairs: rope.map_or(0, |rope| rope.frequencies.len()),
            attention: parts.params,
            pool,
            out: product(out)?,
            mlp_norm,
            gate_up: product(gate_up)?,
            activation,
            down: product(down)?,
        };
        Ok((layer, parts.kv_heads, parts.rope))
    }

    /// Takes the residual stream and the `delta` still to be added to it, `[rows, hidden]` each;
    /// returns both as they are after the layer.
    pub fn forward(
        &self,
        x: &Tensor,
        delta: &Tensor,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (x, normed) = self.attention_input(x, delta, step)?;
        self.forward_read(&x, &normed, step, pool)
    }

    /// The sum of the residual stream and the `delta` still to be added to it, and what the attention reads of it.
    pub fn attention_input(
        &self,
        x: &Tensor,
        delta: &Tensor,
        step: &Step<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (norm, eps) = (self.before_attention.as_ref(), step.eps());
        if let (true, Some(norm)) = (self.spec.is_beside_last, norm) {
            // The layer before has read `x`, to which only `delta` comes.
            return Ok(((x + delta)?, norm.forward(x, eps)?));
        }
        add(x, delta, norm, eps)
    }

    /// Like [`Layer::forward`], but returns only `rows`, u32, with these spans and adapters: of the others, only K and
    /// V are computed.
    pub fn forward_rows(
        &self,
        (rows, spans, adapters): (&Tensor, &AttentionBatch<'_>, &RowAdapters),
        (x, delta): (&Tensor, &Tensor),
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (x, normed) = self.attention_input(x, delta, step)?;
        let (x, step) = (
            x.index_select(rows, 0)?,
            step.of_rows(rows, spans, adapters),
        );
        self.forward_read(&x, &normed, &step, pool)
    }

    /// The part of [`Layer::forward`] that writes K and V.
    pub fn forward_none(
        &self,
        (x, delta): (&Tensor, &Tensor),
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<()> {
        let (_, normed) = self.attention_input(x, delta, step)?;
        self.write(&normed, step, pool)
    }

    /// Takes the residual stream `x`, `[rows, hidden]`, and the attention's input `normed`,
    /// `[rows, inputs]`; returns the stream after the attention and the `delta` still to be added to it.
    /// `normed` may have more rows: of those that do not attend, only K and V are computed.
    pub fn forward_read(
        &self,
        x: &Tensor,
        normed: &Tensor,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        if let (Some(convs), Some(places)) = (&self.convs, step.places) {
            return self.forward_convs(convs, places, (x, normed), step, pool);
        }
        let eps = step.eps();
        let rows = x.dim(0)?;
        if self.spec.parallel {
            let delta = self.parallel_delta(normed, rows, step, pool)?;
            return Ok((x.clone(), delta));
        }
        let attended = self.mixer()?.attend(normed, rows, step, pool)?;
        let attended = self.delta(attended, self.after_attention.as_ref(), eps)?;
        let (mut x, normed) = add(x, &attended, self.before_mlp.as_ref(), eps)?;
        let delta = self.feed(&normed, step)?;
        let mut delta = self.delta(delta, self.after_mlp.as_ref(), eps)?;
        if let (Some(input), Some(all)) = (&self.input, &step.layer_inputs) {
            x = (x + delta)?;
            delta = input.forward(&x, &step.pick(&input.of(all)?, rows)?, eps)?;
        }
        match self.scalar {
            None => Ok((x, delta)),
            Some(scalar) => Ok(((x * scalar)?, (delta * scalar)?)),
        }
    }

    /// What is added to the residual stream if both halves read `normed`. A layer may have only one half.
    fn parallel_delta(
        &self,
        normed: &Tensor,
        rows: usize,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<Tensor> {
        let eps = step.eps();
        let attended = self.mixer.as_ref().map(|mixer| {
            let attended = mixer.attend(normed, rows, step, pool)?;
            self.delta(attended, self.after_attention.as_ref(), eps)
        });
        let attended = attended.transpose()?;
        let fed = self.mlp.as_ref().map(|mlp| {
            let own = step.pick(normed, rows)?.contiguous()?;
            self.delta(mlp.forward(&own, step)?, self.after_mlp.as_ref(), eps)
        });
        match (attended, fed.transpose()?) {
            (Some(attended), Some(fed)) => Ok((attended + fed)?),
            (one, other) => one.or(other).ok_or_else(without),
        }
    }

    /// The first half of a layer that must have one.
    fn mixer(&self) -> Result<&MixerLayer> {
        self.mixer.as_ref().ok_or_else(without)
    }

    /// The output of the MLP of a layer that has both halves.
    fn feed(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let mlp = self.mlp.as_ref().ok_or_else(without)?;
        mlp.forward(x, step)
    }

    /// Writes K and V of rows whose inputs of the attention are `x`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn write(&self, x: &Tensor, step: &Step<'_>, pool: LayerPool<'_>) -> Result<()> {
        self.mixer()?.write_kv(x, step, pool)
    }

    /// A forward of a layer with convolutions of the inputs and outputs of attention and MLP. Only the rows of a block
    /// have them.
    fn forward_convs(
        &self,
        (of_attention, of_mlp): &(BlockConv, BlockConv),
        places: &BlockPlaces,
        (x, normed): (&Tensor, &Tensor),
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (rows, all) = (x.dim(0)?, normed.dim(0)?);
        let own = normed.narrow(0, all - rows, rows)?.contiguous()?;
        let (own, factors) = of_attention.prepare(&own, places)?;
        let read = Tensor::cat(&[&normed.narrow(0, 0, all - rows)?, &own], 0)?;
        let attended = self.mixer()?.attend(&read, rows, step, pool)?;
        let attended = of_attention.finish(&attended, &factors, places)?;
        let eps = step.eps();
        let (x, normed) = add(x, &attended, self.before_mlp.as_ref(), eps)?;
        let (read, factors) = of_mlp.prepare(&normed, places)?;
        let delta = self.feed(&read, step)?;
        Ok((x, of_mlp.finish(&delta, &factors, places)?))
    }

    /// What is added to the residual stream for the output `y` of attention or MLP. `norm` is the norm of `y`, if it
    /// has one.
    fn delta(&self, y: Tensor, norm: Option<&Norm>, eps: f32) -> Result<Tensor> {
        let y = match norm {
            Some(norm) => norm.forward(&y, eps)?,
            None => y,
        };
        match self.spec.residual_scale {
            1. => Ok(y),
            scale => Ok((y * f64::from(scale))?),
        }
    }
}
