//! AdamW with moments that can be saved, the norm of gradients, and the learning rate schedule.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use foretoken_core::error::Result;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Tensors by Hugging Face's names, in a fixed order, so that sums over them are the same in every run.
pub type ByName<T> = BTreeMap<String, T>;

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.95;
const EPSILON: f64 = 1e-8;
/// The rate falls to this fraction of its highest value.
const LAST_RATE: f64 = 0.1;

/// Adam with decoupled weight decay (Loshchilov and Hutter 2019, Algorithm 2). candle's own does not give
/// access to its moments, which are needed to resume a run exactly.
pub struct AdamW {
    /// Number of steps made.
    pub steps: usize,
    /// The first and second moment of each variable, in its shape.
    pub moments: ByName<(Tensor, Tensor)>,
    /// Applied to matrices only, as is usual, not to norms.
    weight_decay: f64,
}

impl AdamW {
    /// An optimizer of `vars`, with moments of zero.
    pub fn new(vars: &ByName<Var>, weight_decay: f64) -> Result<Self> {
        let zeros = |var: &Var| -> Result<_> {
            let zero = var.as_detached_tensor().zeros_like()?;
            Ok((zero.clone(), zero))
        };
        let moments = vars
            .iter()
            .map(|(name, var)| Ok((name.clone(), zeros(var)?)))
            .collect::<Result<_>>()?;
        Ok(Self {
            steps: 0,
            moments,
            weight_decay,
        })
    }

    /// Makes one step along `gradients`, with learning rate `rate`. Variables without a gradient do not
    /// change.
    pub fn step(
        &mut self,
        vars: &ByName<Var>,
        gradients: &ByName<Tensor>,
        rate: f64,
    ) -> Result<()> {
        self.steps += 1;
        let unbias = |beta: f64| 1.0 / (1.0 - beta.powi(self.steps as i32));
        let weight_decay = self.weight_decay;
        let (unbias1, unbias2) = (unbias(BETA1), unbias(BETA2));
        let moments: Vec<_> = self.moments.iter_mut().collect();
        each(
            on_cpu(gradients.values()),
            moments,
            |(name, (first, second))| {
                let (Some(var), Some(gradient)) = (vars.get(name), gradients.get(name)) else {
                    return Ok(());
                };
                *first = ((&*first * BETA1)? + (gradient * (1.0 - BETA1))?)?;
                *second = ((&*second * BETA2)? + (gradient.sqr()? * (1.0 - BETA2))?)?;
                let scale = ((&*second * unbias2)?.sqrt()? + EPSILON)?;
                let update = ((&*first * (unbias1 * rate))? / scale)?;
                let decay = match var.rank() {
                    0 | 1 => 0.0,
                    _ => rate * weight_decay,
                };
                let value = var.as_detached_tensor();
                Ok(var.set(&((value * (1.0 - decay))? - update)?)?)
            },
        )?;
        Ok(())
    }
}

fn on_cpu<'a>(mut tensors: impl Iterator<Item = &'a Tensor>) -> bool {
    tensors.all(|tensor| tensor.device().is_cpu())
}

/// Returns the results of `work` for each of `items`, in order. All threads work, or this thread alone, because
/// others would have streams of their own on a GPU.
fn each<T: Send, R: Send>(
    by_all_threads: bool,
    items: Vec<T>,
    work: impl Fn(T) -> Result<R> + Sync + Send,
) -> Result<Vec<R>> {
    if by_all_threads {
        items.into_par_iter().map(work).collect()
    } else {
        items.into_iter().map(work).collect()
    }
}

/// Adds the gradients of one backward pass to `sum`.
pub fn accumulate(
    sum: &mut ByName<Tensor>,
    vars: &ByName<Var>,
    mut gradients: GradStore,
) -> Result<()> {
    // Detached, because a gradient keeps its graph alive, and with it all activations.
    let found = vars.iter().filter_map(|(name, var)| {
        let gradient = gradients.remove(var)?.detach();
        Some((name.clone(), gradient))
    });
    let found: Vec<_> = found.collect();
    let total = |(name, gradient): (String, Tensor)| -> Result<_> {
        Ok(match sum.get(&name) {
            Some(before) => (name, (before + gradient)?),
            None => (name, gradient),
        })
    };
    let cpu = on_cpu(found.iter().map(|(_, gradient)| gradient));
    sum.extend(each(cpu, found, total)?);
    Ok(())
}

/// The Euclidean norm over all gradients together.
pub fn global_norm(gradients: &ByName<Tensor>) -> Result<f64> {
    let square = |gradient: &Tensor| -> Result<f64> {
        Ok(f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?))
    };
    let all: Vec<&Tensor> = gradients.values().collect();
    let squares = each(on_cpu(gradients.values()), all, square)?;
    Ok(squares.iter().sum::<f64>().sqrt())
}

/// Scales gradients of norm `norm` down to `limit` (Pascanu et al. 2013, Algorithm 1).
pub fn clip(gradients: &mut ByName<Tensor>, norm: f64, limit: f64) -> Result<()> {
    if norm > limit {
        for gradient in gradients.values_mut() {
            *gradient = (&*gradient * (limit / norm))?;
        }
    }
    Ok(())
}

/// The learning rate of `step` (from 0) of `steps`: rises linearly over `warmup` steps, then falls to a
/// tenth along half a cosine (Loshchilov and Hutter 2017, Equation 5, without restarts).
pub fn learning_rate(highest: f64, step: usize, warmup: usize, steps: usize) -> f64 {
    if step < warmup {
        return highest * (step + 1) as f64 / warmup as f64;
    }
    let course = (step - warmup) as f64 / (steps.saturating_sub(warmup + 1)).max(1) as f64;
    let cosine = (1.0 + (std::f64::consts::PI * course.min(1.0)).cos()) / 2.0;
    highest * (LAST_RATE + (1.0 - LAST_RATE) * cosine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_nn::optim::{AdamW as Candles, Optimizer, ParamsAdamW};

    #[test]
    fn the_rate_rises_linearly_and_falls_along_a_cosine() {
        let rate = |step| learning_rate(2.0, step, 4, 25);
        assert_eq!((rate(0), rate(1), rate(3), rate(4)), (0.5, 1.0, 2.0, 2.0));
        assert!((rate(14) - 2.0 * 0.55).abs() < 1e-12);
        assert!((rate(24) - 0.2).abs() < 1e-12);
        assert!((rate(99) - 0.2).abs() < 1e-12);
        assert_eq!(learning_rate(1.0, 0, 0, 1), 1.0);
    }

    #[test]
    fn steps_are_those_of_candles_adamw() {
        let start = Tensor::new(&[[1f32, -2.0, 3.0]], &Device::Cpu).unwrap();
        let ours = Var::from_tensor(&start).unwrap();
        let theirs = Var::from_tensor(&start.copy().unwrap()).unwrap();
        let vars = ByName::from([("w".to_owned(), ours.clone())]);
        let mut adam = AdamW::new(&vars, 0.1).unwrap();
        let rules = ParamsAdamW {
            lr: 0.0,
            beta1: BETA1,
            beta2: BETA2,
            eps: EPSILON,
            weight_decay: 0.1,
        };
        let mut candles = Candles::new(vec![theirs.clone()], rules).unwrap();
        for step in 0..5 {
            let rate = 0.1 / (step + 1) as f64;
            let loss = |var: &Var| var.powf(4.0).unwrap().sum_all().unwrap();
            let mut gradients = ByName::new();
            accumulate(&mut gradients, &vars, loss(&ours).backward().unwrap()).unwrap();
            adam.step(&vars, &gradients, rate).unwrap();
            candles.set_learning_rate(rate);
            candles.backward_step(&loss(&theirs)).unwrap();
        }
        let values = |var: &Var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (a, b) in values(&ours).iter().zip(values(&theirs)) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        assert_ne!(values(&ours)[0], 1.0);
    }

    #[test]
    fn clipping_keeps_the_direction() {
        let tensor = |v: f32| Tensor::new(&[v], &Device::Cpu).unwrap();
        let mut gradients = ByName::from([("a".into(), tensor(3.0)), ("b".into(), tensor(-4.0))]);
        let norm = global_norm(&gradients).unwrap();
        assert_eq!(norm, 5.0);
        clip(&mut gradients, norm, 10.0).unwrap();
        assert_eq!(global_norm(&gradients).unwrap(), 5.0);
        clip(&mut gradients, norm, 1.0).unwrap();
        let values: Vec<f32> = gradients
            .values()
            .map(|g| g.to_vec1::<f32>().unwrap()[0])
            .collect();
        assert!((values[0] - 0.6).abs() < 1e-6 && (values[1] + 0.8).abs() < 1e-6);
    }
}
