//! Forwards of a decoder in one launch, for GPUs and models that have them ([`ForwardPlan`]).

use super::Decoder;
use crate::layers::Step;
use crate::layers::inputs::Inputs;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::KvStore;
use foretoken_core::model::{Batch, ForwardOutput};
use foretoken_kernels::{
    AttentionBatch, ForwardModel, ForwardPlan, ForwardRows, ForwardWeight, MAX_FORWARD_ROWS,
    TableCapacity,
};

/// The forwards of a decoder with one pool.
pub(crate) struct OneLaunch {
    plan: ForwardPlan,
    /// The place of the layers' position embedding.
    rope: Option<usize>,
}

impl OneLaunch {
    /// Whether a forward of `batch`, whose tables have this capacity, can be in one launch.
    pub fn takes(&self, batch: &Batch, capacity: TableCapacity) -> bool {
        let rows = batch.tokens.len();
        let is_plain = batch.taps.is_none() && batch.last_hidden.is_empty();
        rows <= MAX_FORWARD_ROWS
            && is_plain
            && batch.adapters.is_empty()
            && !batch.logits.is_empty()
            && self.plan.check(rows, capacity.chunks).is_ok()
    }
}

impl Decoder {
    /// The output layer, if it is a single weight.
    fn output_weight(&self) -> Option<ForwardWeight<'_>> {
        let linear = self.output.as_ref()?.linear.in_one_launch()?;
        match (&linear.weights[..], linear.bias) {
            (&[weight], None) => Some(weight),
            _ => None,
        }
    }

    /// What forwards in one launch need, with K and V in `kv`.
    ///
    /// # Errors
    /// In one line, why there are none.
    pub(crate) fn one_launch(&self, kv: &KvStore) -> std::result::Result<OneLaunch, String> {
        let config = &self.config;
        if self.layer_inputs.is_some() || self.output.is_none() {
            return Err("layers have inputs of their own, or there is no output layer".into());
        }
        let norm = self.norm.plain();
        let norm = norm.ok_or("norms are not RMSNorms without biases")?;
        let (mut layers, mut heads, mut ropes) = (Vec::new(), Vec::new(), Vec::new());
        for (layer, place) in self.layers.iter().zip(config.spec.pool_places()) {
            let pool = kv.pool(place).and_then(|pool| pool.tokens());
            let pool = pool.map_err(|e| e.to_string())?;
            let (layer, own, rope) = layer.in_one_launch(&self.ropes, pool)?;
            layers.push(layer);
            heads.push(own);
            ropes.extend(rope);
        }
        let first = *heads.first().ok_or("there are no layers")?;
        if heads.iter().any(|own| *own != first) || ropes.windows(2).any(|two| two[0] != two[1]) {
            return Err("layers have different heads or position embeddings".into());
        }
        let plan = ForwardPlan::new(&ForwardModel {
            dtype: self.dtypes.activations,
            device: &self.device,
            hidden: config.hidden_size,
            heads: config.num_heads,
            kv_heads: first.count,
            head_dim: first.dim,
            eps: config.rms_norm_eps as f32,
            block_size: kv.block_size,
            layers,
            norm,
            output: self.output_weight(),
        });
        Ok(OneLaunch {
            plan: plan.map_err(|e| e.to_string())?,
            rope: ropes.first().copied(),
        })
    }

    /// As [`Decoder::run`], in one launch for all layers. `inputs` and `spans` are those of a batch that `one` takes.
    ///
    /// # Errors
    /// If they are not, or the device fails.
    pub(crate) fn run_in_one_launch(
        &self,
        one: &OneLaunch,
        inputs: &Inputs,
        spans: &AttentionBatch<'_>,
    ) -> Result<ForwardOutput> {
        let missing = || Error::internal("a forward in one launch has logits");
        let (wanted, output) = (inputs.wanted.as_ref())
            .zip(self.output.as_ref())
            .ok_or_else(missing)?;
        let x = self.embedding.forward(&inputs.tokens)?;
        let step = Step::new(&self.config, inputs, spans)?;
        let angles = one.rope.map(|rope| &step.angles[rope]);
        let result = one.plan.run(&ForwardRows {
            x: &x,
            angles: angles.map(|angles| (&angles.cos, &angles.sin)),
            slots: &inputs.slots,
            batch: spans,
            wanted,
        })?;
        let to = inputs.logits.as_ref();
        let logits = match self.output_weight() {
            Some(_) => output.finish_to(result, to)?,
            None => output.forward_to(&result, to)?,
        };
        Ok(ForwardOutput::of(logits))
    }
}
