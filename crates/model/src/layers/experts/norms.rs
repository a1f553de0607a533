//! The norms of experts that stand beside an MLP (Gemma 4).

use crate::layers::norm::Norm;
use crate::weights::Weights;
use candle_core::Tensor;
use foretoken_core::error::Result;

/// The norms of what experts, their router and the expert of all rows read of the residual stream, and of what they add.
#[derive(Clone)]
pub struct ExpertNorms {
    pub router: Norm,
    pub before: Norm,
    pub after: Norm,
    pub before_shared: Norm,
    pub after_shared: Norm,
}

impl ExpertNorms {
    /// Reads the norms of a layer with rows of `hidden` values; `at` names the layer's parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(weights: &mut Weights, hidden: usize, at: impl Fn(&str) -> String) -> Result<Self> {
        let router = router(weights.tensor_f32(&at("router.scale"), &[hidden])?)?;
        let router = Norm::of_weight(router.to_dtype(weights.dtypes().activations)?);
        let mut norm = |name: &str| Norm::rms(weights, &at(name), hidden);
        Ok(Self {
            router,
            before: norm("pre_feedforward_layernorm_2")?,
            after: norm("post_feedforward_layernorm_2")?,
            before_shared: norm("pre_feedforward_layernorm")?,
            after_shared: norm("post_feedforward_layernorm_1")?,
        })
    }
}

/// The weight of the router's norm, whose rows have a length of 1 before the stored `scale`.
fn router(scale: Tensor) -> Result<Tensor> {
    let root = (scale.elem_count() as f64).sqrt();
    Ok((scale / root)?)
}
