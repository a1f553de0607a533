//! The experts of a layer on the CPU.

use super::routing::choose;
use super::{Biases, ExactProduct, Linear, Matrices, ReadExperts};
use crate::matrix::forward_chosen;
use crate::spec::ExpertsSpec;
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_kernels::glu;

/// The experts that rows choose, and their router.
#[derive(Clone)]
pub struct HostExperts {
    spec: ExpertsSpec,
    router: Linear,
    /// See [`ReadExperts`].
    gate_up: Vec<Matrices>,
    down: Matrices,
    biases: Option<Biases>,
    correction: Option<Vec<f32>>,
    factors: Option<Vec<f32>>,
    shared_factor: Option<Linear>,
}

impl HostExperts {
    /// The experts that were read.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(read: ReadExperts) -> Result<Self> {
        let correction = read.correction.map(|correction| correction.to_vec1());
        let factors = read.factors.map(|factors| factors.to_vec1());
        Ok(Self {
            spec: read.spec,
            router: read.router.linear()?,
            gate_up: read.gate_up,
            down: read.down,
            biases: read.biases,
            correction: correction.transpose()?,
            factors: factors.transpose()?,
            shared_factor: read.shared_factor.map(ExactProduct::linear).transpose()?,
        })
    }

    /// The products that all rows use.
    pub fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.router]
            .into_iter()
            .chain(&mut self.shared_factor)
            .collect()
    }

    /// The output of the experts, `[rows, hidden]`, for `x` of the same shape, whose router reads `routed`, and `shared`,
    /// that of the expert of all rows, if there is one; and the number of experts that some row chose.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(
        &self,
        x: &Tensor,
        routed: &Tensor,
        shared: Option<&Tensor>,
    ) -> Result<(Tensor, usize)> {
        let (rows, hidden) = x.dims2()?;
        let mut uses = Vec::with_capacity(rows * self.spec.per_token);
        let factors = self.factors.as_ref();
        let factor = |expert: u32| factors.map_or(1., |factors| factors[expert as usize]);
        for (row, logits) in (0..).zip(self.router.forward(routed)?.to_vec2::<f32>()?) {
            let of_row = choose(&logits, self.correction.as_deref(), &self.spec);
            uses.extend(of_row.into_iter().map(|(expert, weight)| Use {
                expert,
                row,
                weight: weight * factor(expert),
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
        if let Some(shared) = shared {
            let y = shared.flatten_all()?.to_vec1::<f32>()?;
            let factors = match &self.shared_factor {
                Some(factor) => {
                    let factors = factor.forward(x)?.flatten_all()?.to_vec1::<f32>()?;
                    (factors.iter())
                        .map(|factor| 1. / (1. + (-factor).exp()))
                        .collect()
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

/// `y` and its biases, if there are any.
fn plus(y: Tensor, biases: Option<Tensor>) -> Result<Tensor> {
    match biases {
        Some(biases) => Ok((y + biases)?),
        None => Ok(y),
    }
}

/// An expert of a row.
struct Use {
    expert: u32,
    row: u32,
    weight: f32,
}

#[cfg(test)]
mod tests {
    use super::super::testing::SPEC;
    use super::*;
    use crate::matrix::{Matrix, Unread, unquantized};
    use crate::weights::dummy;
    use std::sync::Arc;

    /// Noise of variance `1 / inputs`.
    fn noise(name: &str, shape: (usize, usize)) -> Tensor {
        dummy::tensor(7, name, &[shape.0, shape.1]).unwrap()
    }

    fn matrix(name: &str, shape: (usize, usize)) -> Arc<dyn Matrix> {
        unquantized(&noise(name, shape), None).unwrap()
    }

    /// Experts of width 24 with 32 inputs. Those that are not in `read` have no values.
    fn random(spec: ExpertsSpec, read: &[usize]) -> HostExperts {
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
        HostExperts {
            router: Linear::new(matrix("router", (spec.count, 32)), None),
            gate_up: vec![each("gate and up", (48, 32))],
            down: each("down", (32, 24)),
            biases: None,
            correction: None,
            factors: None,
            shared_factor: None,
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

    fn outputs(experts: &HostExperts, x: &Tensor) -> Vec<Vec<f32>> {
        experts.forward(x, x, None).unwrap().0.to_vec2().unwrap()
    }

    #[test]
    fn an_expert_that_several_rows_chose_counts_once() {
        let experts = random(MANY, &(0..MANY.count).collect::<Vec<_>>());
        let read = |x: &Tensor| experts.forward(x, x, None).unwrap().1;
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
        assert!(random(MANY, &used).forward(&x, &x, None).is_err());
    }
}
