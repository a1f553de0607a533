//! The MLP of a layer, as its [`MlpSpec`] says.

use super::linear::Linear;
use crate::config::ModelConfig;
use crate::lora::RowAdapters;
use crate::spec::{LayerSpec, MlpSpec};
use crate::weights::Weights;
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_kernels::{Activation, Xielu};

/// An MLP.
#[derive(Clone)]
pub(crate) struct Mlp {
    activation: Activation,
    /// Gate, then up; without a gate only up.
    gate_up: Linear,
    is_gated: bool,
    down: Linear,
}

impl Mlp {
    /// Reads the MLP of a layer like `spec`; `at` names the layer's parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        config: &ModelConfig,
        spec: &LayerSpec,
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        let width = spec.mlp_width.unwrap_or(config.intermediate_size);
        let [gate, up] = spec
            .mlp_scales
            .map(|scale| weights.scales(&[(scale, width)]));
        let mut linear = |part: &str, shape| weights.linear(&at(part), shape, spec.mlp_bias);
        Ok(match spec.mlp {
            MlpSpec::Experts(_) | MlpSpec::None => {
                return Err(Error::internal("a layer does not have one MLP"));
            }
            MlpSpec::Plain {
                activation,
                up,
                down,
            } => Self {
                activation,
                gate_up: linear(up, (width, hidden))?,
                is_gated: false,
                down: linear(down, (hidden, width))?,
            },
            MlpSpec::Gated(activation) => Self {
                activation,
                gate_up: Linear::join(vec![
                    linear("mlp.gate_proj", (width, hidden))?.scaled(gate?),
                    linear("mlp.up_proj", (width, hidden))?.scaled(up?),
                ])?,
                is_gated: true,
                down: linear("mlp.down_proj", (hidden, width))?,
            },
            MlpSpec::Fused {
                activation,
                gate_up,
                down,
            } => Self {
                activation,
                gate_up: linear(gate_up, (2 * width, hidden))?,
                is_gated: true,
                down: linear(down, (hidden, width))?,
            },
            MlpSpec::Xielu(given) => Self {
                gate_up: linear("mlp.up_proj", (width, hidden))?,
                is_gated: false,
                down: linear("mlp.down_proj", (hidden, width))?,
                activation: Activation::Xielu(match given {
                    Some(given) => given,
                    None => xielu(weights, &at("mlp.act_fn"))?,
                }),
            },
        })
    }

    /// All products of the MLP.
    pub fn linears(&mut self) -> [&mut Linear; 2] {
        [&mut self.gate_up, &mut self.down]
    }

    /// The products of gate and up and of down, and the function of the gate; `None` without a gate.
    pub fn gated(&self) -> Option<(&Linear, &Linear, Activation)> {
        (self.is_gated).then_some((&self.gate_up, &self.down, self.activation))
    }

    /// The MLP's output, `[rows, hidden]`, for `x` of the same shape, some of whose rows have adapters.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(&self, x: &Tensor, adapters: &RowAdapters) -> Result<Tensor> {
        let wide = if self.is_gated {
            (self.gate_up).forward_gated(x, adapters, self.activation)?
        } else {
            let wide = self.gate_up.forward_adapted(x, adapters)?;
            self.activation.apply(&wide)?
        };
        self.down.forward_adapted(&wide, adapters)
    }
}

/// The activation `name` of a checkpoint.
fn xielu(weights: &mut Weights, name: &str) -> Result<Xielu> {
    let mut number = |part: &str, dims: &[usize]| weights.scalar(&format!("{name}.{part}"), dims);
    let (alpha_p, alpha_n) = (number("alpha_p", &[1])?, number("alpha_n", &[1])?);
    let (beta, eps) = (number("beta", &[])?, number("eps", &[])?);
    Ok(Xielu::of_stored(alpha_p, alpha_n, beta, eps))
}
