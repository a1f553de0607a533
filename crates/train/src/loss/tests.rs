use super::*;

const VOCAB: usize = 11;
const K: usize = 3;

fn softmax(logits: &[f32]) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|&z| f64::from(z).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// The formula of the loss, in f64.
fn reference(logits: &[f32], ids: &[u32], probs: &[f32], tail: f32) -> f64 {
    let q = softmax(logits);
    let top: f64 = (ids.iter().zip(probs))
        .map(|(&id, &p)| f64::from(p) * (f64::from(p) / q[id as usize]).ln())
        .sum();
    let q_tail: f64 = (0..VOCAB)
        .filter(|&id| !ids.contains(&(id as u32)))
        .map(|id| q[id])
        .sum();
    let tail = f64::from(tail);
    top + if tail > 0.0 {
        tail * (tail / q_tail).ln()
    } else {
        0.0
    }
}

fn logits(shift: f32) -> Vec<f32> {
    let wave = |i: usize| ((i * 7 + 3) as f32).sin() * 2.5 + shift;
    (0..2 * VOCAB).map(wave).collect()
}

fn soft() -> (Soft, [u32; 2 * K], [f32; 2 * K], [f32; 2]) {
    let ids = [4, 0, 9, 2, 10, 1];
    let probs = [0.5, 0.2, 0.1, 0.7, 0.2, 0.1];
    let tail = [0.2, 0.0];
    let cpu = &Device::Cpu;
    let soft = Soft {
        ids: Tensor::new(&ids, cpu).unwrap().reshape((2, K)).unwrap(),
        probs: Tensor::new(&probs, cpu).unwrap().reshape((2, K)).unwrap(),
        tail: Tensor::new(&tail, cpu).unwrap().reshape((2, 1)).unwrap(),
    };
    (soft, ids, probs, tail)
}

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, (values.len() / VOCAB, VOCAB), &Device::Cpu).unwrap()
}

#[test]
fn loss_and_gradient_are_those_of_an_f64_reference() {
    // In the last case the draft's vocabulary covers only a part of the mass.
    for (shift, covered) in [(0.0, 1.0), (80.0, 1.0), (-80.0, 1.0), (0.0, 0.6)] {
        let (mut soft, ids, mut probs, mut tail) = soft();
        soft.probs = (soft.probs * f64::from(covered)).unwrap();
        soft.tail = (soft.tail * f64::from(covered)).unwrap();
        let masses = probs.iter_mut().chain(tail.iter_mut());
        masses.for_each(|mass| *mass *= covered);
        let z = logits(shift);
        let compared = tensor(&z);
        let compared = Comparison::new(&compared, &soft).unwrap();
        let loss = compared.loss().unwrap().to_vec1::<f32>().unwrap();
        let gradient = compared.gradient().unwrap().to_vec2::<f32>().unwrap();
        for at in 0..2 {
            let (rows, top) = (at * VOCAB..(at + 1) * VOCAB, at * K..(at + 1) * K);
            let loss_of =
                |z: &[f32]| reference(z, &ids[top.clone()], &probs[top.clone()], tail[at]);
            let row = &z[rows];
            assert!((f64::from(loss[at]) - loss_of(row)).abs() < 1e-5);
            for id in 0..VOCAB {
                let step = 1e-2;
                let nudged = |by: f32| {
                    let mut z: Vec<f32> = row.iter().map(|z| z - shift).collect();
                    z[id] += by;
                    loss_of(&z)
                };
                let slope = (nudged(step) - nudged(-step)) / f64::from(2.0 * step);
                let found = f64::from(gradient[at][id]);
                assert!((found - slope).abs() < 1e-3, "{at} {id}: {found} {slope}");
            }
        }
    }
}

#[test]
fn the_gradient_of_the_overlap_is_its_slope() {
    let (soft, ids, probs, tail) = soft();
    for scale in [1.0, 0.3] {
        let z: Vec<f32> = logits(0.0).iter().map(|z| z * scale).collect();
        let all = tensor(&z);
        let gradient = Comparison::new(&all, &soft).unwrap().overlap_gradient();
        let gradient = gradient.unwrap().to_vec2::<f32>().unwrap();
        for at in 0..2 {
            let top = at * K..(at + 1) * K;
            let rejected = |z: &[f32]| {
                let q = softmax(z);
                let mass: f64 = ids[top.clone()].iter().map(|&id| q[id as usize]).sum();
                let both = ids[top.clone()].iter().zip(&probs[top.clone()]);
                let shared: f64 = both.map(|(&id, &p)| f64::from(p).min(q[id as usize])).sum();
                1.0 - shared - f64::from(tail[at]).min(1.0 - mass)
            };
            let row = &z[at * VOCAB..(at + 1) * VOCAB];
            for id in 0..VOCAB {
                let nudged = |by: f32| {
                    let mut z = row.to_vec();
                    z[id] += by;
                    rejected(&z)
                };
                let slope = (nudged(1e-3) - nudged(-1e-3)) / 2e-3;
                let found = f64::from(gradient[at][id]);
                assert!((found - slope).abs() < 1e-3, "{at} {id}: {found} {slope}");
            }
        }
    }
}

/// The fused pass gives what the ops give, in a vocabulary with and without all ids.
#[test]
fn one_pass_measures_what_the_ops_measure() {
    let (mut soft, ..) = soft();
    for covered in [1f32, 0.6, 0.0] {
        let masses = Tensor::new(&[[covered], [1.0]], &Device::Cpu).unwrap();
        soft.probs = soft.probs.broadcast_mul(&masses).unwrap();
        soft.tail = (&soft.tail * &masses).unwrap();
        for shift in [0.0, 80.0] {
            let z = tensor(&logits(shift));
            let compared = Comparison::new(&z, &soft).unwrap();
            let weights = LossWeights {
                positions: &[0.5, 2.0],
                overlap: 0.3,
            };
            let (fused, slope) = measure(&z, &soft, Some(weights)).unwrap();
            let (ops, wanted) = measure_on_device(&z, &soft, Some(weights)).unwrap();
            let (alone, none) = measure(&z, &soft, None).unwrap();
            assert_eq!(alone, fused);
            assert!(none.is_none() && compared.loss().is_ok());
            for (fused, ops) in fused.iter().zip(&ops) {
                let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
                assert!(near(fused.loss, ops.loss), "{fused:?} {ops:?}");
                assert!(near(fused.overlap[0], ops.overlap[0]));
                assert!(near(fused.overlap[1], ops.overlap[1]));
                assert!(fused.agrees == ops.agrees || fused.overlap == [0.0; 2]);
            }
            let slopes = [slope.unwrap(), wanted.unwrap()];
            let [slope, wanted] = slopes.map(|t| t.flatten_all().unwrap());
            let far = (slope - wanted).unwrap().abs().unwrap().max_all().unwrap();
            assert!(far.to_scalar::<f32>().unwrap() < 1e-5, "{far}");
        }
    }
    // An id without a column has no mass, and is never the most probable one.
    let soft = Soft {
        ids: Tensor::new(&[[VOCAB as u32, 2, 1]], &Device::Cpu).unwrap(),
        probs: Tensor::new(&[[0f32, 0.3, 0.2]], &Device::Cpu).unwrap(),
        tail: Tensor::new(&[[0.1f32]], &Device::Cpu).unwrap(),
    };
    let z = tensor(&logits(0.0)[..VOCAB]);
    let weights = LossWeights {
        positions: &[1.0],
        overlap: 0.5,
    };
    let (figures, slope) = measure(&z, &soft, Some(weights)).unwrap();
    assert_eq!(figures[0].agrees, 0.0);
    let sum = slope
        .unwrap()
        .sum_all()
        .unwrap()
        .to_scalar::<f32>()
        .unwrap();
    assert!(sum.abs() < 1e-6, "{sum}");
}

#[test]
fn overlap_and_agreement() {
    let (soft, ids, probs, tail) = soft();
    let z = logits(0.0);
    let compared = tensor(&z);
    let compared = Comparison::new(&compared, &soft).unwrap();
    let [lower, upper] = compared.overlap().unwrap();
    let [lower, upper] = [lower, upper].map(|t| t.to_vec1::<f32>().unwrap());
    for at in 0..2 {
        let q = softmax(&z[at * VOCAB..(at + 1) * VOCAB]);
        let (ids, probs) = (&ids[at * K..][..K], &probs[at * K..][..K]);
        let top: f64 = ids.iter().map(|&id| q[id as usize]).sum();
        let shared: f64 = (ids.iter().zip(probs))
            .map(|(&id, &p)| f64::from(p).min(q[id as usize]))
            .sum();
        let expected = shared + f64::from(tail[at]).min(1.0 - top);
        assert!((f64::from(lower[at]) - shared).abs() < 1e-5);
        assert!((f64::from(upper[at]) - expected).abs() < 1e-5);
    }
    // Equal distributions overlap completely, agree, and have no loss and no gradient.
    let p = [[0.5f32, 0.3, 0.2]];
    let known = Soft {
        ids: Tensor::new(&[[0u32, 1, 2]], &Device::Cpu).unwrap(),
        probs: Tensor::new(&p, &Device::Cpu).unwrap(),
        tail: Tensor::new(&[[0f32]], &Device::Cpu).unwrap(),
    };
    let z = known.probs.log().unwrap();
    let same = Comparison::new(&z, &known).unwrap();
    let scalar = |t: Result<Tensor>| t.unwrap().to_vec1::<f32>().unwrap()[0];
    for bound in same.overlap().unwrap() {
        assert!((scalar(Ok(bound)) - 1.0).abs() < 1e-6);
    }
    assert_eq!(scalar(same.agrees()), 1.0);
    assert!(scalar(same.loss()).abs() < 1e-6);
    let gradient = same.gradient().unwrap().to_vec2::<f32>().unwrap();
    assert!(gradient[0].iter().all(|g| g.abs() < 1e-6));
}

#[test]
fn a_draft_without_any_mass_on_the_tail_stays_finite() {
    let (soft, ..) = soft();
    let mut z = vec![-200f32; 2 * VOCAB];
    (z[4], z[VOCAB + 2]) = (200.0, 200.0);
    let z = tensor(&z);
    let compared = Comparison::new(&z, &soft).unwrap();
    let finite = |t: Tensor| {
        let values = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(values.iter().all(|v| v.is_finite()), "{values:?}");
    };
    finite(compared.loss().unwrap());
    finite(compared.gradient().unwrap());
}

#[test]
fn a_draft_whose_logits_are_no_numbers_has_no_merit() {
    let (soft, ..) = soft();
    for wrong in [f32::NAN, f32::INFINITY] {
        let mut z = logits(0.0);
        z[3] = wrong;
        let z = tensor(&z);
        let fused = measure(&z, &soft, None).unwrap().0;
        let ops = measure_on_device(&z, &soft, None).unwrap().0;
        for figures in [fused, ops] {
            let (broken, sound) = (figures[0], figures[1]);
            assert!(!broken.loss.is_finite(), "{broken:?}");
            assert_eq!((broken.overlap, broken.agrees), ([0.0; 2], 0.0));
            assert_eq!(broken.rank, usize::MAX);
            assert!(sound.loss.is_finite() && sound.overlap[0] > 0.0);
        }
    }
}
