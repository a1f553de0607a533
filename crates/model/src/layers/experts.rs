//! The experts of a layer, as an [`ExpertsSpec`] says.
//!
//! What a row gets depends on the row alone: its experts are chosen from its own router logits, rows are grouped by
//! expert only to share a pass over the weights, and the outputs of a row's experts are added in one order, that of all
//! rows last. Experts that no row chose are not read.

mod layout;
mod norms;
mod on_host;
mod routing;

use super::linear::Linear;
use super::mlp::Mlp;
use super::rope::halves_from_pairs;
use crate::config::ModelConfig;
use crate::lora::RowAdapters;
use crate::matrix::{Matrix, device_weights, join, unquantized};
use crate::spec::{ExpertsSpec, LayerSpec, MlpSpec, RouterScores, SharedExpert};
use crate::weights::{Stack, Weights};
use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::{ChosenGroups, DeviceExperts, ExpertChoice, ExpertWeights, ForwardWeight};
use layout::Layout;
use norms::ExpertNorms;
use on_host::HostExperts;
use std::sync::Arc;

/// A matrix of each expert.
type Matrices = Vec<Arc<dyn Matrix>>;

/// The experts of a layer and their router.
#[derive(Clone)]
pub(crate) struct Experts {
    chosen: ChosenExperts,
    /// The expert of all rows.
    shared: Option<Mlp>,
    norms: Option<Box<ExpertNorms>>,
}

/// The experts that rows choose.
#[derive(Clone)]
enum ChosenExperts {
    /// Those of the CPU. Of a GPU if only headers were read, which nothing is multiplied with.
    Host(Box<HostExperts>),
    /// Those of a GPU, on which also the choices are made.
    Device(Box<DeviceExperts>),
}

/// What is read of the experts of a layer.
struct ReadExperts {
    spec: ExpertsSpec,
    router: ExactProduct,
    /// Gate and up of each expert as one matrix; or gates, then ups, if their formats cannot be joined; or ups without
    /// gates.
    gate_up: Vec<Matrices>,
    down: Matrices,
    biases: Option<Biases>,
    /// Values that are added to the scores of the router where the scores are compared.
    correction: Option<Tensor>,
    /// Factors of the weights of each expert.
    factors: Option<Tensor>,
    /// The factor of what the expert of all rows adds is the sigmoid of this product.
    shared_factor: Option<ExactProduct>,
}

impl Experts {
    /// Reads the experts of a layer; `at` names the layer's parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape, or says that a GPU has no kernels for
    /// them.
    pub fn load(
        config: &ModelConfig,
        (layer, spec): (&LayerSpec, ExpertsSpec),
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let layout = Layout::of(weights, &spec, &at);
        let (hidden, width) = (config.hidden_size, spec.width);
        let shape = (spec.count, hidden);
        let router = exact(weights, &at(layout.router), shape, spec.has_bias)?;
        // The order of the rows of gate and up in one tensor.
        let order = (layout.alternates).then(|| halves_from_pairs(1, 2 * width, 2 * width));
        let order = order.as_deref();
        let mut read = |name: &str, shape, order| {
            weights.of_experts(|weights| read(weights, (layout, &spec), &at, name, shape, order))
        };
        let gate_up = match layout.gate_up {
            [.., up] if !spec.is_gated => vec![read(up, (width, hidden), None)?],
            [gate, up] => {
                let gates = read(gate, (width, hidden), None)?;
                joined(gates, read(up, (width, hidden), None)?)?
            }
            all => (all.iter())
                .map(|name| read(name, (2 * width, hidden), order))
                .collect::<Result<_>>()?,
        };
        let down = read(layout.down, (hidden, width), None)?;
        let biases =
            (spec.has_bias).then(|| Biases::load(weights, (layout, &spec), hidden, order, &at));
        let correction = spec
            .correction
            .map(|name| correction(weights, &at(&layout.part(name)), spec.count));
        let factors = (spec.has_norms)
            .then(|| weights.tensor_f32(&at("router.per_expert_scale"), &[spec.count]));
        let norms = (spec.has_norms).then(|| ExpertNorms::load(weights, hidden, &at));
        let shared =
            (spec.shared).map(|shared| load_shared(config, (layer, &spec, shared), weights, &at));
        let (shared, shared_factor) = shared.transpose()?.unzip();
        let read = ReadExperts {
            router,
            gate_up,
            down,
            biases: biases.transpose()?,
            correction: correction.transpose()?,
            factors: factors.transpose()?,
            shared_factor: shared_factor.flatten(),
            spec,
        };
        let is_on_device = weights.device().is_cuda() && !weights.are_headers();
        let chosen = if is_on_device {
            ChosenExperts::Device(Box::new(read.on_device(weights.dtypes().activations)?))
        } else {
            ChosenExperts::Host(Box::new(HostExperts::new(read)?))
        };
        Ok(Self {
            chosen,
            shared,
            norms: norms.transpose()?.map(Box::new),
        })
    }

    /// The products that all rows use: the router and the shared expert. On a GPU the router has one order of additions
    /// for any number of rows.
    pub fn linears(&mut self) -> Vec<&mut Linear> {
        let shared = self.shared.iter_mut().flat_map(Mlp::linears);
        let router = match &mut self.chosen {
            ChosenExperts::Host(experts) => experts.linears(),
            ChosenExperts::Device(_) => Vec::new(),
        };
        router.into_iter().chain(shared).collect()
    }

    /// The products that adapters can change: those of the shared expert.
    pub fn adapted_linears(&mut self) -> Vec<&mut Linear> {
        self.shared.iter_mut().flat_map(Mlp::linears).collect()
    }

    /// The output of the experts, `[rows, hidden]`, for `x` of the same shape, some of whose rows have adapters; and
    /// the number of experts that some row chose, 0 if only a GPU knows it. `eps` is that of norms.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(&self, x: &Tensor, adapters: &RowAdapters, eps: f32) -> Result<(Tensor, usize)> {
        if x.dim(0)? == 0 {
            return Ok((x.clone(), 0));
        }
        let Some(norms) = &self.norms else {
            let shared = self.shared.as_ref().map(|mlp| mlp.forward(x, adapters));
            return self.chosen.forward(x, x, shared.transpose()?.as_ref());
        };
        let (own, routed) = (norms.before.forward(x, eps)?, norms.router.forward(x, eps)?);
        let (y, read) = self.chosen.forward(&own, &routed, None)?;
        let y = norms.after.forward(&y, eps)?;
        let Some(mlp) = &self.shared else {
            return Ok((y, read));
        };
        let shared = mlp.forward(&norms.before_shared.forward(x, eps)?, adapters)?;
        let shared = norms.after_shared.forward(&shared, eps)?;
        Ok(((shared + y)?, read))
    }
}

impl ChosenExperts {
    /// What the experts of each row of `x` add up to, which the router chooses by the same rows of `routed`, with the
    /// output `shared` of the expert of all rows; and the number of experts that some row chose, 0 if only a GPU knows it.
    fn forward(
        &self,
        x: &Tensor,
        routed: &Tensor,
        shared: Option<&Tensor>,
    ) -> Result<(Tensor, usize)> {
        match self {
            Self::Host(experts) => experts.forward(x, routed, shared),
            Self::Device(experts) => Ok((experts.forward(x, routed, shared)?, 0)),
        }
    }
}

impl ReadExperts {
    /// The experts on their GPU, with activations in `dtype`.
    fn on_device(&self, dtype: DType) -> Result<DeviceExperts> {
        let spec = &self.spec;
        let no_kernel = || Error::setup("experts in this format are not supported on a GPU");
        let gate_up = self.gate_up.iter().map(sides);
        let gate_up = gate_up.collect::<Option<Vec<_>>>();
        let down = sides(&self.down).filter(|sides| sides.len() == 1);
        let choice = ExpertChoice {
            count: spec.count,
            per_token: spec.per_token,
            is_softmax: spec.scores == RouterScores::Softmax,
            groups: spec.groups.map(|groups| ChosenGroups {
                count: groups.count,
                per_token: groups.per_token,
                best: groups.best,
            }),
            is_normalized: spec.is_normalized,
            min_sum: spec.min_sum,
            scale: spec.scale,
        };
        let biases = self.biases.as_ref();
        let weights = ExpertWeights {
            dtype,
            router: &self.router.weight,
            router_bias: self.router.bias.as_ref(),
            correction: self.correction.as_ref(),
            factors: self.factors.as_ref(),
            shared_factor: self.shared_factor.as_ref().map(|factor| &factor.weight),
            gate_up: gate_up.ok_or_else(no_kernel)?.concat(),
            down: down.ok_or_else(no_kernel)?.concat(),
            biases: biases.map(|biases| (&biases.gate_up, &biases.down)),
            activation: spec.activation,
            is_gated: spec.is_gated,
        };
        Ok(DeviceExperts::new(choice, &weights)?)
    }
}

/// The weights of experts on a GPU: those that are first in the outputs of each, then those that are next to them; `None`
/// if there are no kernels for them.
fn sides(experts: &Matrices) -> Option<Vec<Vec<ForwardWeight<'_>>>> {
    let experts = experts.iter().map(|matrix| device_weights(&**matrix));
    let experts = experts.collect::<Option<Vec<_>>>()?;
    let count = experts.first()?.len();
    let is_even = experts.iter().all(|expert| expert.len() == count);
    let side = |i: usize| experts.iter().map(|expert| expert[i]).collect();
    is_even.then(|| (0..count).map(side).collect())
}

/// The biases of the products of experts, a row for each expert.
#[derive(Clone)]
struct Biases {
    gate_up: Tensor,
    down: Tensor,
}

impl Biases {
    /// Reads the biases of a layer, with the columns of gate and up in one tensor in this order.
    fn load(
        weights: &mut Weights,
        (layout, spec): (&Layout, &ExpertsSpec),
        hidden: usize,
        order: Option<&[u32]>,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let mut read =
            |name: &str, len| weights.tensor(&at(&Layout::bias(name)), &[spec.count, len]);
        let len = 2 * spec.width / layout.gate_up.len();
        let gate_up = layout.gate_up.iter().map(|name| read(name, len));
        let gate_up = Tensor::cat(&gate_up.collect::<Result<Vec<_>>>()?, 1)?;
        Ok(Self {
            gate_up: match order {
                Some(order) => gate_up.index_select(&Tensor::new(order, gate_up.device())?, 1)?,
                None => gate_up,
            },
            down: read(layout.down, hidden)?,
        })
    }
}

/// The tensor `name` of a value for each expert, which may be a matrix of one row, in f32.
fn correction(weights: &mut Weights, name: &str, count: usize) -> Result<Tensor> {
    let is_matrix = name.contains("moe_statics") && !weights.are_gguf();
    let dims = [1, count];
    let stored = if is_matrix { &dims[..] } else { &dims[1..] };
    Ok(weights.tensor_f32(name, stored)?.flatten_all()?)
}

/// Reads the expert of all rows of a layer, and what its factor is the sigmoid of.
fn load_shared(
    config: &ModelConfig,
    (layer, spec, shared): (&LayerSpec, &ExpertsSpec, SharedExpert),
    weights: &mut Weights,
    at: impl Fn(&str) -> String,
) -> Result<(Mlp, Option<ExactProduct>)> {
    let activation = spec.activation;
    let mlp = match (spec.is_gated, shared.is_fused) {
        (true, true) => MlpSpec::fused(activation),
        (true, false) => MlpSpec::Gated(activation),
        (false, _) => MlpSpec::Plain {
            activation,
            up: "mlp.up_proj",
            down: "mlp.down_proj",
        },
    };
    let like = LayerSpec {
        mlp,
        mlp_width: Some(shared.width),
        ..layer.clone()
    };
    let part = |part: &str| at(&part.replacen("mlp", shared.name, 1));
    let mlp = Mlp::load(config, &like, weights, part)?;
    let name = at(&format!("{}_gate", shared.name));
    let gate = (shared.has_gate).then(|| exact(weights, &name, (1, config.hidden_size), false));
    Ok((mlp, gate.transpose()?))
}

/// The matrices `name` of a layer's experts, each of `shape`, with their outputs in this order.
fn read(
    weights: &mut Weights,
    (layout, spec): (&Layout, &ExpertsSpec),
    at: impl Fn(&str) -> String,
    name: &str,
    shape: (usize, usize),
    order: Option<&[u32]>,
) -> Result<Matrices> {
    if !name.contains("{}") {
        return weights.matrices(&Stack {
            name: &at(name),
            count: spec.count,
            shape,
            form: layout.form,
            order,
        });
    }
    let one = |i: usize| at(&name.replace("{}", &i.to_string()));
    (0..spec.count)
        .map(|i| weights.matrix(&one(i), shape, order))
        .collect()
}

/// A product in f32, whatever the other weights become: an error of a router would give rows other experts.
struct ExactProduct {
    /// `[outputs, inputs]`.
    weight: Tensor,
    /// `[outputs]`.
    bias: Option<Tensor>,
}

impl ExactProduct {
    /// The product on the CPU.
    fn linear(self) -> Result<Linear> {
        Ok(Linear::new(unquantized(&self.weight, None)?, self.bias))
    }
}

/// The product `name` (without `.weight`).
fn exact(
    weights: &mut Weights,
    name: &str,
    shape: (usize, usize),
    has_bias: bool,
) -> Result<ExactProduct> {
    let dims = [shape.0, shape.1];
    // llama.cpp's conversion makes a vector of a matrix of one row.
    let is_vector = shape.0 == 1 && weights.are_gguf();
    let stored = if is_vector { &dims[1..] } else { &dims };
    let weight = weights.tensor_f32(&format!("{name}.weight"), stored)?;
    let bias = has_bias.then(|| weights.tensor_f32(&format!("{name}.bias"), &dims[..1]));
    Ok(ExactProduct {
        weight: weight.reshape(shape)?,
        bias: bias.transpose()?,
    })
}

/// Gate and up of each expert as one matrix, if all can be joined.
fn joined(gates: Matrices, ups: Matrices) -> Result<Vec<Matrices>> {
    let pairs = gates.iter().zip(&ups);
    let pairs = pairs.map(|(gate, up)| join(vec![gate.clone(), up.clone()]));
    let pairs = pairs.collect::<Result<Vec<_>>>()?;
    if pairs.iter().all(|pair| pair.len() == 1) {
        Ok(vec![pairs.concat()])
    } else {
        Ok(vec![gates, ups])
    }
}

#[cfg(test)]
mod testing {
    use super::*;
    use foretoken_kernels::Activation;

    pub(crate) const SPEC: ExpertsSpec = ExpertsSpec {
        activation: Activation::Silu,
        is_gated: true,
        count: 4,
        per_token: 2,
        width: 1,
        scores: RouterScores::Softmax,
        correction: None,
        groups: None,
        is_normalized: false,
        min_sum: 0.,
        scale: 1.,
        has_bias: false,
        is_transposed: false,
        is_mxfp4: false,
        has_norms: false,
        shared: None,
    };
}
