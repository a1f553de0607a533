//! The experts of a layer, as an [`ExpertsSpec`] says.
//!
//! What a row gets depends on the row alone: the host chooses its experts from its own router logits, rows are grouped
//! by expert only to share a pass over the weights, and the outputs of a row's experts are added in the order of the
//! experts, that of all rows last. Experts that no row chose are not read.

mod layout;
mod routing;

use super::linear::Linear;
use super::mlp::Mlp;
use super::rope::halves_from_pairs;
use crate::config::ModelConfig;
use crate::matrix::{Matrix, forward_chosen, join, unquantized};
use crate::spec::{ExpertsSpec, LayerSpec, MlpSpec, SharedExpert};
use crate::weights::{Stack, Weights};
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_core::model::AdapterRows;
use foretoken_kernels::glu;
use layout::Layout;
use routing::choose;
use std::sync::Arc;

/// A matrix of each expert.
type Matrices = Vec<Arc<dyn Matrix>>;

/// The experts of a layer and their router.
#[derive(Clone)]
pub(crate) struct Experts {
    spec: ExpertsSpec,
    router: Linear,
    /// Gate and up of each expert as one matrix; or gates, then ups, if their formats cannot be joined; or ups without
    /// gates.
    gate_up: Vec<Matrices>,
    down: Matrices,
    biases: Option<Biases>,
    /// Values that are added to the scores of the router where the scores are compared.
    correction: Option<Vec<f32>>,
    /// The expert of all rows. If it has a factor, the factor is the sigmoid of the second product.
    shared: Option<(Mlp, Option<Linear>)>,
}

impl Experts {
    /// Reads the experts of a layer; `at` names the layer's parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
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
        let mut read =
            |name: &str, shape, order| read(weights, (layout, &spec), &at, name, shape, order);
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
            .map(|name| correction(weights, &at(name), spec.count));
        let shared =
            (spec.shared).map(|shared| load_shared(config, (layer, &spec, shared), weights, &at));
        Ok(Self {
            router,
            gate_up,
            down,
            biases: biases.transpose()?,
            correction: correction.transpose()?,
            shared: shared.transpose()?,
            spec,
        })
    }

    /// The products that all rows use: the router and the shared expert.
    pub fn linears(&mut self) -> Vec<&mut Linear> {
        let shared = self.shared.iter_mut();
        let shared = shared.flat_map(|(mlp, gate)| mlp.linears().into_iter().chain(gate));
        [&mut self.router].into_iter().chain(shared).collect()
    }

    /// The products that adapters can change: those of the shared expert.
    pub fn adapted_linears(&mut self) -> Vec<&mut Linear> {
        let shared = self.shared.iter_mut();
        shared.flat_map(|(mlp, _)| mlp.linears()).collect()
    }

    /// The output of the experts, `[rows, hidden]`, for `x` of the same shape, some of whose rows have adapters; and
    /// the number of experts that some row chose.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(&self, x: &Tensor, adapters: &[AdapterRows]) -> Result<(Tensor, usize)> {
        let (rows, hidden) = x.dims2()?;
        if rows == 0 {
            return Ok((x.clone(), 0));
        }
        let mut uses = Vec::with_capacity(rows * self.spec.per_token);
        for (row, logits) in (0..).zip(self.router.forward(x)?.to_vec2::<f32>()?) {
            let of_row = choose(&logits, self.correction.as_deref(), &self.spec);
            uses.extend(of_row.into_iter().map(|(expert, weight)| Use {
                expert,
                row,
                weight,
            }));
        }
        uses.sort_by_key(|used| (used.expert, used.row));
        let y = self.outputs(x, &uses)?;
        let mut sums = vec![0f32; rows * hidden];
        for (used, y) in uses.iter().zip(y.chunks_exact(hidden)) {
            let sum = &mut sums[used.row as usize * hidden..][..hidden];
            for (sum, y) in sum.iter_mut().zip(y) {
                *sum += used.weight * y;
            }
        }
        if let Some((mlp, gate)) = &self.shared {
            let y = mlp.forward(x, adapters)?.flatten_all()?.to_vec1::<f32>()?;
            let factors = match gate {
                Some(gate) => {
                    let gates = gate.forward(x)?.flatten_all()?.to_vec1::<f32>()?;
                    gates.iter().map(|gate| 1. / (1. + (-gate).exp())).collect()
                }
                None => vec![1.; rows],
            };
            let rows = sums.chunks_exact_mut(hidden).zip(y.chunks_exact(hidden));
            for ((sums, y), factor) in rows.zip(factors) {
                for (sum, y) in sums.iter_mut().zip(y) {
                    *sum += factor * y;
                }
            }
        }
        let read = uses.chunk_by(|a, b| a.expert == b.expert).count();
        Ok((Tensor::from_vec(sums, (rows, hidden), x.device())?, read))
    }

    /// The output of the expert of each of `uses`, one after another.
    fn outputs(&self, x: &Tensor, uses: &[Use]) -> Result<Vec<f32>> {
        let rows: Vec<u32> = uses.iter().map(|used| used.row).collect();
        let chosen: Vec<u32> = uses.iter().map(|used| used.expert).collect();
        let x = x.index_select(&Tensor::new(rows, x.device())?, 0)?;
        let parts = self.gate_up.iter();
        let parts = parts.map(|experts| forward_chosen(experts, &x, &chosen));
        let wide = Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 1)?;
        let biases = |of: fn(&Biases) -> &Tensor| {
            let ids = Tensor::new(&*chosen, x.device())?;
            (self.biases.as_ref())
                .map(|biases| of(biases).index_select(&ids, 0))
                .transpose()
        };
        let wide = plus(wide, biases(|biases| &biases.gate_up)?)?;
        let wide = if self.spec.is_gated {
            glu(&wide, self.spec.activation)?
        } else {
            self.spec.activation.apply(&wide)?
        };
        let y = forward_chosen(&self.down, &wide, &chosen)?;
        let y = plus(y, biases(|biases| &biases.down)?)?;
        Ok(y.flatten_all()?.to_vec1()?)
    }
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

/// `y` and its biases, if there are any.
fn plus(y: Tensor, biases: Option<Tensor>) -> Result<Tensor> {
    match biases {
        Some(biases) => Ok((y + biases)?),
        None => Ok(y),
    }
}

/// The tensor `name` of a value for each expert, which may be a matrix of one row, in f32.
fn correction(weights: &mut Weights, name: &str, count: usize) -> Result<Vec<f32>> {
    let is_matrix = name.contains("moe_statics") && !weights.are_gguf();
    let dims = [1, count];
    let stored = if is_matrix { &dims[..] } else { &dims[1..] };
    let values = weights.tensor(name, stored)?.to_dtype(DType::F32)?;
    Ok(values.flatten_all()?.to_vec1()?)
}

/// Reads the expert of all rows of a layer, and what its factor is the sigmoid of.
fn load_shared(
    config: &ModelConfig,
    (layer, spec, shared): (&LayerSpec, &ExpertsSpec, SharedExpert),
    weights: &mut Weights,
    at: impl Fn(&str) -> String,
) -> Result<(Mlp, Option<Linear>)> {
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

/// The product `name` (without `.weight`) in f32, whatever the other weights become: an error of a router would give
/// rows other experts.
fn exact(
    weights: &mut Weights,
    name: &str,
    shape: (usize, usize),
    has_bias: bool,
) -> Result<Linear> {
    let dims = [shape.0, shape.1];
    // llama.cpp's conversion makes a vector of a matrix of one row.
    let is_vector = shape.0 == 1 && weights.are_gguf();
    let stored = if is_vector { &dims[1..] } else { &dims };
    let weight = weights.tensor(&format!("{name}.weight"), stored)?;
    let bias = weights.bias(name, shape.0, has_bias)?;
    let matrix = unquantized(&weight.reshape(shape)?, None)?;
    Ok(Linear::new(matrix, bias))
}

/// An expert of a row.
struct Use {
    expert: u32,
    row: u32,
    weight: f32,
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
mod tests {
    use super::*;
    use crate::matrix::Unread;
    use crate::spec::RouterScores;
    use crate::weights::dummy;
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
        shared: None,
    };

    /// Noise of variance `1 / inputs`.
    fn noise(name: &str, shape: (usize, usize)) -> Tensor {
        dummy::tensor(7, name, &[shape.0, shape.1]).unwrap()
    }

    fn matrix(name: &str, shape: (usize, usize)) -> Arc<dyn Matrix> {
        unquantized(&noise(name, shape), None).unwrap()
    }

    /// Experts of width 24 with 32 inputs. Those that are not in `read` have no values.
    fn random(spec: ExpertsSpec, read: &[usize]) -> Experts {
        let each = |part: &str, shape| -> Matrices {
            let one = |i: usize| -> Arc<dyn Matrix> {
                if read.contains(&i) {
                    matrix(&format!("{part} {i}"), shape)
                } else {
                    let format = "f32".into();
                    Arc::new(Unread { shape, format })
                }
            };
            (0..spec.count).map(one).collect()
        };
        Experts {
            router: Linear::new(matrix("router", (spec.count, 32)), None),
            gate_up: vec![each("gate and up", (48, 32))],
            down: each("down", (32, 24)),
            biases: None,
            correction: None,
            shared: None,
            spec,
        }
    }

    const MANY: ExpertsSpec = ExpertsSpec {
        count: 16,
        per_token: 4,
        width: 24,
        is_normalized: true,
        ..SPEC
    };

    fn outputs(experts: &Experts, x: &Tensor) -> Vec<Vec<f32>> {
        experts.forward(x, &[]).unwrap().0.to_vec2().unwrap()
    }

    #[test]
    fn an_expert_that_several_rows_chose_counts_once() {
        let experts = random(MANY, &(0..MANY.count).collect::<Vec<_>>());
        let read = |x: &Tensor| experts.forward(x, &[]).unwrap().1;
        let x = noise("x", (6, 32));
        let first = x.narrow(0, 0, 1).unwrap();
        assert_eq!(read(&first), MANY.per_token);
        assert_eq!(read(&Tensor::cat(&[&first; 5], 0).unwrap()), MANY.per_token);
        let logits = experts
            .router
            .forward(&x)
            .unwrap()
            .to_vec2::<f32>()
            .unwrap();
        let chosen = logits.iter().flat_map(|row| choose(row, None, &MANY));
        let distinct: std::collections::HashSet<u32> = chosen.map(|(expert, _)| expert).collect();
        assert!(distinct.len() > MANY.per_token);
        assert_eq!(read(&x), distinct.len());
    }

    /// Whatever the other rows chose.
    #[test]
    fn a_row_has_the_bits_that_it_has_alone() {
        let all: Vec<usize> = (0..MANY.count).collect();
        let experts = random(MANY, &all);
        for rows in [2, 5, 17, 40] {
            let x = noise("x", (rows, 32));
            let together = outputs(&experts, &x);
            for (i, row) in together.iter().enumerate() {
                let own = x.narrow(0, i, 1).unwrap().contiguous().unwrap();
                let alone = outputs(&experts, &own);
                assert_eq!(*row, alone[0], "row {i} of {rows}");
            }
        }
    }

    #[test]
    fn only_experts_in_use_are_read() {
        let all: Vec<usize> = (0..MANY.count).collect();
        let full = random(MANY, &all);
        let x = noise("x", (1, 32));
        let logits = full.router.forward(&x).unwrap().to_vec2::<f32>().unwrap();
        let used = choose(&logits[0], None, &MANY).into_iter();
        let mut used: Vec<usize> = used.map(|(expert, _)| expert as usize).collect();
        assert_eq!(outputs(&random(MANY, &used), &x), outputs(&full, &x));
        used.pop();
        assert!(random(MANY, &used).forward(&x, &[]).is_err());
    }
}
