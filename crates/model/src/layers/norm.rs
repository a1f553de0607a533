//! Norms with their weights.

use crate::spec::NormSpec;
use crate::weights::Weights;
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::{add_layer_norm, add_norm, layer_norm, rms_norm};

/// A norm of rows: RMSNorm or LayerNorm.
#[derive(Clone)]
pub struct Norm {
    /// `[width]`.
    weight: Tensor,
    bias: Option<Tensor>,
    is_centered: bool,
    /// What it adds to the mean square, whatever its caller says.
    eps: Option<f32>,
}

impl Norm {
    /// The RMSNorm `name`.
    ///
    /// # Errors
    /// Returns the errors of [`Norm::load`].
    pub fn rms(weights: &mut Weights, name: &str, width: usize) -> Result<Self> {
        Self::load(weights, name, width, NormSpec::default())
    }

    /// The norm `name` (without `.weight`) of rows of `width` values.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(weights: &mut Weights, name: &str, width: usize, spec: NormSpec) -> Result<Self> {
        Ok(Self {
            weight: weights.norm(name, width, spec.offset)?,
            bias: weights.bias(name, width, spec.has_bias)?,
            is_centered: spec.is_centered,
            eps: spec.eps,
        })
    }

    /// The RMSNorm with this `weight`.
    pub(crate) fn of_weight(weight: Tensor) -> Self {
        Self {
            weight,
            bias: None,
            is_centered: false,
            eps: None,
        }
    }

    /// The dtype of rows.
    pub fn dtype(&self) -> DType {
        self.weight.dtype()
    }

    /// The weight of an RMSNorm without bias and without an eps of its own; `None` if it is another norm.
    pub(crate) fn plain(&self) -> Option<&Tensor> {
        let is_plain = !self.is_centered && self.bias.is_none() && self.eps.is_none();
        is_plain.then_some(&self.weight)
    }

    /// The norm of `x`, `[rows, width]`.
    ///
    /// # Errors
    /// If the shapes or dtypes do not match.
    pub fn forward(&self, x: &Tensor, eps: f32) -> Result<Tensor> {
        let (bias, eps) = (self.bias.as_ref(), self.eps.unwrap_or(eps));
        if self.is_centered {
            return Ok(layer_norm(x, &self.weight, bias, eps)?);
        }
        let normed = rms_norm(x, &self.weight, eps)?;
        match bias {
            Some(bias) => Ok(normed.broadcast_add(bias)?),
            None => Ok(normed),
        }
    }

    /// The sum of `x` and `delta`, `[rows, width]` each, and its norm. A GPU reads `x` while the kernel before may still
    /// run: make `delta` after `x`.
    ///
    /// # Errors
    /// Returns the errors of [`Norm::forward`].
    pub fn add(&self, x: &Tensor, delta: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
        let (bias, eps) = (self.bias.as_ref(), self.eps.unwrap_or(eps));
        if self.is_centered {
            return Ok(add_layer_norm(x, delta, &self.weight, bias, eps)?);
        }
        let (sum, normed) = add_norm(x, delta, &self.weight, eps)?;
        match bias {
            Some(bias) => Ok((sum, normed.broadcast_add(bias)?)),
            None => Ok((sum, normed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn layer_norm_agrees_with_f64_and_does_not_know_its_neighbours() {
        let random =
            |middle: f32, dims: &[usize]| Tensor::randn(middle, 1.5, dims, &Device::Cpu).unwrap();
        for width in [7, 64, 576, 1001] {
            let (x, delta) = (random(2., &[19, width]), random(0., &[19, width]));
            let norm = Norm {
                weight: random(1., &[width]),
                bias: Some(random(0., &[width])),
                is_centered: true,
                eps: None,
            };
            let values = |t: &Tensor| t.to_vec2::<f32>().unwrap();
            let (sums, normed) = norm.add(&x, &delta, 1e-5).unwrap();
            let (sums, normed) = (values(&sums), values(&normed));
            let weight = norm.weight.to_vec1::<f32>().unwrap();
            let bias = norm.bias.as_ref().unwrap().to_vec1::<f32>().unwrap();
            for (row, (sum, normed)) in sums.iter().zip(&normed).enumerate() {
                let n = width as f64;
                let mean = sum.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
                let square = |&x: &f32| (f64::from(x) - mean).powi(2);
                let scale = 1. / (sum.iter().map(square).sum::<f64>() / n + 1e-5).sqrt();
                for i in 0..width {
                    let want = (f64::from(sum[i]) - mean) * scale * f64::from(weight[i])
                        + f64::from(bias[i]);
                    assert!((f64::from(normed[i]) - want).abs() < 2e-5 * want.abs().max(1.));
                }
                let one = |t: &Tensor| t.narrow(0, row, 1).unwrap().copy().unwrap();
                let alone = norm.add(&one(&x), &one(&delta), 1e-5).unwrap();
                assert_eq!(&values(&alone.1)[0], normed);
            }
        }
    }
}
