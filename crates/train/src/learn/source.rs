//! The heads that can learn: EAGLE-3's, as `distill --method eagle3` trains them.

use crate::Method;
use crate::head_weights::{first_layer, of_shape, output_ids, untrained};
use crate::optimizer::ByName;
use crate::shape::{eagle3_json, head_json};
use crate::spec::{EAGLE_LAYER, shapes};
use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::quant::BlockType;
use foretoken_model::{HeadKind, HeadTarget, ModelConfig, ModelSource, open_head};
use serde_json::Value;

/// A head's file, as training reads it.
pub struct HeadFile {
    pub config: ModelConfig,
    pub taps: Vec<usize>,
    /// The target's ids of the output rows.
    pub ids: Vec<u32>,
    /// The weights in f32, by the names of the published layout.
    pub weights: ByName<Tensor>,
    /// The dtype of the file's matrices; f32 if they are quantized.
    pub dtype: DType,
    /// The type of the blocks of the file's matrices; `None` = they are not quantized.
    pub blocks: Option<BlockType>,
}

impl HeadFile {
    /// Reads the head in `source`, which drafts for `target`.
    ///
    /// # Errors
    /// `Setup`: it cannot be read, or is no such head.
    pub fn read(source: &ModelSource, target: &HeadTarget) -> Result<Self> {
        let kind = HeadKind::of(source)?;
        if kind != Some(HeadKind::Eagle3) {
            return Err(unsuited("it is no EAGLE-3 head"));
        }
        let (head, mut weights) = open_head(source, HeadKind::Eagle3)?;
        let layers = head.shape.num_layers();
        if layers != 1 {
            return Err(unsuited(&format!("it has {layers} layers, not one")));
        }
        if let Some(what) = untrained(&head, &mut weights)? {
            return Err(unsuited(&format!("it has {what}")));
        }
        let layer = first_layer(&weights);
        let taps = head.taps_of(&target.config).map_err(Error::setup)?;
        let ids = output_ids(&head, &mut weights)?;
        let config = head.shape;
        let (dtype, blocks) = weights.stored_as("lm_head.weight")?;
        let read = |(name, dims): (String, Vec<usize>)| {
            let weight = weights.dense(&name.replace(EAGLE_LAYER, layer))?;
            let weight = of_shape(weight, &name, &dims)?;
            Ok((name, weight))
        };
        let all = shapes(Method::Eagle3, &config, taps.len(), 0).into_iter();
        let weights = all.map(read).collect::<Result<_>>()?;
        Ok(Self {
            config,
            taps,
            ids,
            weights,
            dtype,
            blocks,
        })
    }

    /// Returns the head's `config.json`.
    ///
    /// # Errors
    /// If the head's layer is not like Llama's.
    pub fn json(&self) -> Result<Value> {
        let mut json = head_json(&self.config, eagle3_json(&self.taps))?;
        json["torch_dtype"] = match self.dtype {
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            _ => "float32",
        }
        .into();
        Ok(json)
    }

    /// Names what differs, if `other` cannot take the place of this head; otherwise `None`.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if self.taps != other.taps {
            return Some(format!(
                "it reads the layers {:?}, not {:?}",
                other.taps, self.taps
            ));
        }
        if self.ids != other.ids {
            return Some("it predicts other ids".into());
        }
        let dims = |file: &Self| -> Vec<Vec<usize>> {
            file.weights.values().map(|w| w.dims().to_vec()).collect()
        };
        (dims(self) != dims(other)).then(|| "it has another shape".into())
    }
}

fn unsuited(what: &str) -> Error {
    Error::setup(format!(
        "--learn trains EAGLE-3 heads of the layout that distill --method eagle3 writes, but {what}: give such a head with --draft-model, or leave out --learn"
    ))
}
