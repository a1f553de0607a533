//! The draft heads of Gemma 4, which their authors call assistants: small decoders whose layers only have queries. They
//! read K and V of layers of the target, the last one with a window and the last one without.
//!
//! A head of EAGLE's kind: a row has a token, and the target's hidden states before it, or the head's own output for the
//! row before. But all tokens of a draft are drafted in the place of the last committed row, with the position of the
//! token after it. What the head drafts has neither K nor V. Here the head has a pool of its own, in which the target's
//! layers write K and V again: their inputs are among the hidden states that the head reads.
//!
//! As in transformers (`Gemma4AssistantForCausalLM`), logits have no cap, and a layer with a window of `n` sees the
//! last `n + 1` committed positions.

mod config;

use super::candidates::most_probable;
use super::input::{Fusion, features_of};
use crate::config::ModelConfig;
use crate::layers::inputs::{Inputs, rows_of};
use crate::layers::linear::{Embedding, Linear};
use crate::layers::norm::Norm;
use crate::layers::rope::RopeTables;
use crate::layers::{Layer, Step};
use crate::loaded::HeadTarget;
use crate::names;
use crate::spec::KvSource;
use crate::weights::Weights;
use crate::weights::dtypes::Dtypes;
use candle_core::{DType, Device, Tensor};
pub(crate) use config::AssistantConfig;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvHeads, KvShape, KvStore, LayerPool};
use foretoken_core::model::{Batch, ForwardOutput, Head, Model, ModelInfo};
use foretoken_kernels::{AttentionBatch, Span, widened};

/// A loaded head.
pub(crate) struct AssistantHead {
    /// The configuration of the head's layers.
    shape: ModelConfig,
    info: ModelInfo,
    /// The target's layers whose K and V it reads, and the number of the target's layers, after the last one.
    reads: Vec<usize>,
    target: ModelConfig,
    /// The layers of the target that write K and V, in the order of the pool.
    owners: Vec<Layer>,
    target_ropes: RopeTables,
    /// The norm of the target's last hidden states.
    fusion: Fusion,
    /// The target's embedding.
    embedding: Embedding,
    /// Projects embedding and hidden states of the target to the head's width.
    before: Linear,
    /// The head's layers, and the places of their K and V in the pool.
    layers: Vec<(Layer, usize)>,
    norm: Norm,
    /// Projects the head's hidden states to the target's width.
    after: Linear,
    /// The output layer, as rows and as a product.
    output: (Embedding, Linear),
    centroids: Option<Centroids>,
    ropes: RopeTables,
    dtypes: Dtypes,
    device: Device,
}

/// Groups of ids, of which only the most probable ones have logits.
struct Centroids {
    /// Projects hidden states to the scores of the groups.
    scores: Linear,
    /// `[groups, ids of a group]` u32.
    ids: Tensor,
    top_k: usize,
}

impl Centroids {
    /// The logits of the ids in the most probable groups for `hidden`, `[rows, hidden_size]`; minus infinity for the
    /// others. `output` has a row for each id.
    fn logits(&self, hidden: &Tensor, output: &Embedding) -> Result<Tensor> {
        let (rows, device) = (hidden.dim(0)?, hidden.device());
        let scores = widened(&self.scores.forward(hidden)?)?.to_vec2::<f32>()?;
        let best: Vec<u32> = (scores.iter())
            .flat_map(|row| most_probable(row, self.top_k))
            .collect();
        let ids = self.ids.index_select(&Tensor::new(best, device)?, 0)?;
        let ids = ids.reshape((rows, ()))?;
        let embedded = output.forward(&ids.flatten_all()?)?;
        let embedded = embedded.reshape((rows, ids.dim(1)?, ()))?;
        let logits = embedded.broadcast_mul(&hidden.unsqueeze(1)?)?.sum(2)?;
        let dims = (rows, self.ids.elem_count());
        let never = Tensor::full(f32::NEG_INFINITY, dims, device)?;
        Ok(never.scatter(&ids, &logits.to_dtype(DType::F32)?, 1)?)
    }
}

impl AssistantHead {
    /// Reads the weights of a head like `head`, which drafts for `target`.
    ///
    /// # Errors
    /// What does not fit the target, or a setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(head: AssistantConfig, mut weights: Weights, target: &HeadTarget) -> Result<Self> {
        let of_layers = head.owners(&target.config).map_err(Error::setup)?;
        let AssistantConfig {
            mut shape,
            centroids,
            ..
        } = head;
        let mut reads = of_layers.clone();
        reads.sort_unstable();
        reads.dedup();
        if reads
            .iter()
            .any(|&read| !target.layers.split.is_on_first(read))
        {
            return Err(Error::setup(
                "an assistant of Gemma 4 is not supported with several GPUs: it reads with layers of the target that are on another GPU; leave out --draft-model, and tables draft",
            ));
        }
        let places: Vec<usize> = (of_layers.iter())
            .map(|owner| reads.partition_point(|read| read < owner))
            .collect();
        let has_scalars = weights.has(&names::layer(0, "layer_scalar"));
        for (layer, &place) in shape.spec.layers.iter_mut().zip(&places) {
            layer.kv = KvSource::Layer(place);
            layer.has_scalar = has_scalars;
        }
        let (hidden, vocab_size) = (shape.hidden_size, shape.vocab_size);
        let width = target.config.hidden_size;
        let ropes = RopeTables::new(shape.ropes(), None);
        let layers = places.into_iter().enumerate().map(|(i, place)| {
            let at = |part: &str| names::layer(i, part);
            Ok((Layer::load(&shape, i, &ropes, &mut weights, at)?, place))
        });
        let layers = layers.collect::<Result<_>>()?;
        let before = weights.linear("pre_projection", (hidden, 2 * width), false)?;
        let after = weights.linear("post_projection", (width, hidden), false)?;
        let norm = Norm::load(&mut weights, names::NORM, hidden, shape.spec.norm)?;
        let (name, unread) = if shape.tie_word_embeddings {
            (names::EMBEDDING, names::HEAD)
        } else {
            (names::HEAD, names::EMBEDDING)
        };
        let output = weights.embedding(name, (vocab_size, hidden))?;
        weights.skip(&format!("{unread}.weight"));
        let centroids = centroids.map(|(count, top_k)| -> Result<Centroids> {
            let ids = weights.ids(names::GROUPED_IDS, vocab_size, vocab_size)?;
            Ok(Centroids {
                scores: weights.linear("masked_embedding.centroids", (count, hidden), false)?,
                ids: ids.reshape((count, ()))?,
                top_k,
            })
        });
        let centroids = centroids.transpose()?;
        weights.finish(|_| false)?;
        let owners = reads.iter().map(|&read| target.layers.all[read].clone());
        let owners = owners.collect();
        reads.push(target.config.num_layers());
        let own = shape.info();
        let context = (shape.max_position_embeddings).max(target.config.max_position_embeddings);
        Ok(Self {
            // Rows go on with as many values as they read.
            info: ModelInfo {
                hidden_size: reads.len() * width,
                max_position_embeddings: context,
                row_values: own.row_values.max(target.config.info().row_values)
                    + 2 * reads.len() * width,
                ..own
            },
            reads,
            target: target.config.clone(),
            owners,
            target_ropes: target.layers.ropes.clone(),
            fusion: Fusion::of_last(&weights, &target.config, &target.ends),
            embedding: target.ends.embedding.clone(),
            before,
            layers,
            norm,
            after,
            output: (output.clone(), output.tied_head()),
            centroids,
            ropes,
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
            shape,
        })
    }

    /// The number of values of a row that the target's layers read; what follows are the states of its end, or the
    /// head's own.
    fn inputs_width(&self) -> usize {
        self.owners.len() * self.target.hidden_size
    }

    /// Writes K and V of the rows that have none in the pool.
    fn write(&self, batch: &Batch, features: &Tensor, kv: &KvStore) -> Result<()> {
        let rows = 0..batch.tokens.len() as u32;
        let fresh: Vec<u32> = rows
            .filter(|row| batch.written.binary_search(row).is_err())
            .collect();
        if fresh.is_empty() {
            return Ok(());
        }
        let own = Batch {
            tokens: vec![0; fresh.len()],
            positions: picked(&batch.positions, &fresh),
            slots: picked(&batch.slots, &fresh),
            ..Batch::default()
        };
        let (vocab_size, slots) = (self.target.vocab_size, kv.num_slots());
        let ropes = (self.target_ropes.tables(), self.dtypes.activations);
        let inputs = Inputs::new(&own, ropes, vocab_size, slots, &self.device)?;
        let attention = AttentionBatch::new(&[], kv.block_size, slots)?;
        let step = Step::new(&self.target, &inputs, &attention)?;
        let features = features.index_select(&Tensor::new(fresh, &self.device)?, 0)?;
        let width = self.target.hidden_size;
        for (place, (layer, pool)) in self.owners.iter().zip(&kv.layers).enumerate() {
            let x = features.narrow(1, place * width, width)?.contiguous()?;
            layer.forward_none((&x, &x.zeros_like()?), &step, LayerPool::Tokens(pool))?;
        }
        Ok(())
    }

    /// The output of the rows with logits.
    fn draft(&self, batch: &Batch, features: &Tensor, kv: &KvStore) -> Result<ForwardOutput> {
        let spans = Span::of_rows(&batch.spans, &batch.logits);
        let spans = spans.as_deref().unwrap_or(&batch.spans);
        let (count, slots) = (batch.logits.len(), kv.num_slots());
        let attention = AttentionBatch::new(spans, kv.block_size, slots)?
            .with_max_group(self.shape.max_query_heads_a_key());
        if attention.rows() != count || !batch.logits.is_sorted_by(|a, b| a < b) {
            return Err(Error::internal(
                "a head that drafts in place has rows in order, and no trees",
            ));
        }
        let wanted = Tensor::new(batch.logits.as_slice(), &self.device)?;
        let drawn = batch.drawn.as_ref();
        let asked = Batch {
            tokens: picked(&batch.tokens, &batch.logits),
            drawn: (drawn.map(|ids| rows_of(ids, &wanted))).transpose()?,
            // Those of the tokens, which come after the rows' hidden states.
            positions: (picked(&batch.positions, &batch.logits).iter())
                .map(|position| position + 1)
                .collect(),
            slots: picked(&batch.slots, &batch.logits),
            ..Batch::default()
        };
        let (shape, dtype) = (&self.shape, self.dtypes.activations);
        let ropes = (self.ropes.tables(), dtype);
        let inputs = Inputs::new(&asked, ropes, shape.vocab_size, slots, &self.device)?;
        let step = Step::new(shape, &inputs, &attention)?;
        let (before, width) = (self.inputs_width(), self.target.hidden_size);
        let states = rows_of(features, &wanted)?;
        let states = states.narrow(1, before, width)?;
        let embedded = self.embedding.forward(&inputs.tokens)?;
        let both = Tensor::cat(&[&embedded, &states], 1)?;
        let mut x = self.before.forward(&both)?;
        let mut delta = x.zeros_like()?;
        for (layer, place) in &self.layers {
            let pool = LayerPool::Tokens(&kv.layers[*place]);
            (x, delta) = layer.forward(&x, &delta, &step, pool)?;
        }
        let (_, normed) = self.norm.add(&x, &delta, step.eps())?;
        let logits = match &self.centroids {
            Some(centroids) => centroids.logits(&normed, &self.output.0)?,
            None => widened(&self.output.1.forward(&normed)?)?,
        };
        let none = Tensor::zeros((count, before), dtype, &self.device)?;
        let states = Tensor::cat(&[none, self.after.forward(&normed)?], 1)?;
        Ok(ForwardOutput {
            features: Some(states),
            ..ForwardOutput::of(logits)
        })
    }
}

/// The values of `rows`.
fn picked(all: &[u32], rows: &[u32]) -> Vec<u32> {
    rows.iter().map(|&row| all[row as usize]).collect()
}

impl Model for AssistantHead {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn kv_shape(&self) -> KvShape {
        let of = |&read: &usize| {
            let layer = &self.target.spec.layers[read];
            KvHeads {
                form: self.dtypes.kv_form,
                ..layer.kv_heads.unwrap_or(self.target.kv_heads())
            }
        };
        let owners = &self.reads[..self.owners.len()];
        KvShape::new(owners.iter().map(of).collect(), self.dtypes.kv)
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        let dims = [batch.tokens.len(), self.info.hidden_size];
        let features = batch.features.as_ref();
        let features = features_of(features, dims, self.dtypes.activations, &self.device)?;
        self.write(batch, &features, kv)?;
        if batch.logits.is_empty() {
            return ForwardOutput::none(self.shape.vocab_size);
        }
        self.draft(batch, &features, kv)
    }
}

impl Head for AssistantHead {
    fn reads(&self) -> &[usize] {
        &self.reads
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        let before = self.inputs_width();
        let hidden = hidden.to_dtype(self.dtypes.activations)?;
        let inputs = hidden.narrow(1, 0, before)?;
        let last = hidden.narrow(1, before, self.target.hidden_size)?;
        Ok(Tensor::cat(&[inputs, self.fusion.forward(&last)?], 1)?)
    }

    fn drafts_in_place(&self) -> bool {
        true
    }

    fn layout(&self) -> String {
        let layers = self.layers.len();
        let name = format!("Gemma 4's assistant of {layers} layers");
        match &self.centroids {
            None => name,
            Some(of) => format!("{name}, {} of {} groups of ids", of.top_k, of.ids.dims()[0]),
        }
    }
}
