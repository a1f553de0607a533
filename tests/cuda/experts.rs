//! Layers with experts on a GPU: choices and products by our own kernels.

use super::quantized::blocks;
use super::{float8, gpu};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::quant::{BlockType, DeviceQuantMatrix};
use foretoken::kernels::{
    Activation, ChosenGroups, DeviceExperts, EXACT_ROWS, ExpertChoice, ExpertWeights, ForwardWeight,
};

const COUNT: usize = 12;
const HIDDEN: usize = 256;

const CHOICE: ExpertChoice = ExpertChoice {
    count: COUNT,
    per_token: 3,
    is_softmax: true,
    groups: None,
    is_normalized: true,
    min_sum: 0.,
    scale: 1.,
};

/// How the weights of experts are stored.
#[derive(Debug, Clone, Copy)]
enum Form {
    Dense,
    /// With gates and ups in matrices of their own.
    Float8,
    Nvfp4,
    /// With gates and ups in tensors of their own.
    Blocks(BlockType),
}

/// What the experts of a test differ by.
#[derive(Debug, Clone, Copy)]
struct Case {
    form: Form,
    dtype: DType,
    width: usize,
    activation: Activation,
    is_gated: bool,
    has_biases: bool,
}

const CASE: Case = Case {
    form: Form::Dense,
    dtype: DType::BF16,
    width: 96,
    activation: Activation::Silu,
    is_gated: true,
    has_biases: false,
};

fn noise(dims: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap()
}

/// Values of about 1 after a product with values of 1.
fn weight(dims: &[usize]) -> Tensor {
    (noise(dims) / (dims[dims.len() - 1] as f64).sqrt()).unwrap()
}

fn values(tensor: &Tensor) -> Vec<Vec<f32>> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    tensor.to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

/// A weight of each expert on the GPU, and its values.
enum Stored {
    Dense(Vec<Tensor>),
    Blocks(Vec<DeviceQuantMatrix>),
}

impl Stored {
    fn new(case: &Case, shape: (usize, usize), gpu: &Device) -> (Self, Vec<Vec<Vec<f32>>>) {
        let floats: Vec<Tensor> = (0..COUNT).map(|_| weight(&[shape.0, shape.1])).collect();
        let stored = match case.form {
            Form::Dense => {
                let put = |t: &Tensor| t.to_dtype(case.dtype)?.to_device(gpu);
                let all: candle_core::Result<_> = floats.iter().map(put).collect();
                Self::Dense(all.unwrap())
            }
            Form::Float8 => {
                let all = (0..COUNT).map(|_| float8::weight(shape, (32, 128), gpu));
                let (all, exact): (_, Vec<Tensor>) = all.unzip();
                return (Self::Blocks(all), exact.iter().map(values).collect());
            }
            Form::Nvfp4 => {
                let all = (0..COUNT).map(|_| float8::nvfp4(shape, gpu));
                let (all, exact): (_, Vec<Tensor>) = all.unzip();
                return (Self::Blocks(all), exact.iter().map(values).collect());
            }
            Form::Blocks(kind) => {
                let blocks = floats.iter().map(|floats| {
                    let data = blocks(kind, floats);
                    DeviceQuantMatrix::from_blocks(kind, &data, shape, gpu).unwrap()
                });
                Self::Blocks(blocks.collect())
            }
        };
        let exact = match &stored {
            Self::Dense(all) => all.iter().map(values).collect(),
            Self::Blocks(all) => (all.iter())
                .map(|one| values(&one.dequantize(DType::F32).unwrap()))
                .collect(),
        };
        (stored, exact)
    }

    fn weights(&self) -> Vec<ForwardWeight<'_>> {
        match self {
            Self::Dense(all) => all.iter().map(ForwardWeight::Dense).collect(),
            Self::Blocks(all) => all.iter().map(ForwardWeight::Quantized).collect(),
        }
    }
}

/// Experts on the GPU, and what they are made of.
struct Made {
    experts: DeviceExperts,
    case: Case,
    gate_up: Vec<Vec<Vec<Vec<f32>>>>,
    down: Vec<Vec<Vec<f32>>>,
    biases: Option<[Vec<Vec<f32>>; 2]>,
}

fn made(case: Case, choice: ExpertChoice, gpu: &Device) -> Made {
    let width = case.width;
    let wide = if case.is_gated { 2 * width } else { width };
    let shapes = match (case.form, case.is_gated) {
        (Form::Blocks(_) | Form::Float8 | Form::Nvfp4, true) => vec![width; 2],
        _ => vec![wide],
    };
    let parts = shapes.iter();
    let parts = parts.map(|&outputs| Stored::new(&case, (outputs, HIDDEN), gpu));
    let (gate_up, exact): (Vec<Stored>, Vec<_>) = parts.unzip();
    let (down, exact_down) = Stored::new(&case, (HIDDEN, width), gpu);
    let put = |t: Tensor, dtype| t.to_dtype(dtype).unwrap().to_device(gpu).unwrap();
    let router = put(weight(&[COUNT, HIDDEN]), DType::F32);
    let biases = (case.has_biases)
        .then(|| [wide, HIDDEN].map(|width| put(noise(&[COUNT, width]), case.dtype)));
    let weights = ExpertWeights {
        dtype: case.dtype,
        router: &router,
        router_bias: None,
        correction: None,
        factors: None,
        shared_factor: None,
        gate_up: gate_up.iter().map(Stored::weights).collect(),
        down: down.weights(),
        biases: biases.as_ref().map(|[wider, last]| (wider, last)),
        activation: case.activation,
        is_gated: case.is_gated,
    };
    Made {
        experts: DeviceExperts::new(choice, &weights).unwrap(),
        case,
        gate_up: exact,
        down: exact_down,
        biases: biases.map(|both| both.map(|bias| values(&bias))),
    }
}

fn product(weight: &[Vec<f32>], x: &[f64]) -> Vec<f64> {
    let dot = |w: &Vec<f32>| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
    weight.iter().map(dot).collect()
}

fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1. + (-x).exp()),
        Activation::Relu2 => x.max(0.).powi(2),
        Activation::ClampedSwish => x.min(7.) / (1. + (-1.702 * x.min(7.)).exp()),
        other => panic!("{other:?}"),
    }
}

impl Made {
    /// What the experts of a row add up to.
    fn sum(&self, x: &[f32], chosen: &[(u32, f32)]) -> Vec<f64> {
        let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
        let mut sum = vec![0.; HIDDEN];
        for &(expert, weight) in chosen {
            let expert = expert as usize;
            let parts = self.gate_up.iter();
            let mut wide: Vec<f64> = parts.flat_map(|part| product(&part[expert], &x)).collect();
            let plus = |values: &mut Vec<f64>, which: usize| {
                let biases = self.biases.iter().flat_map(|both| &both[which][expert]);
                let pairs = values.iter_mut().zip(biases);
                pairs.for_each(|(x, by)| *x += f64::from(*by));
            };
            plus(&mut wide, 0);
            let (gate, up) = wide.split_at(self.case.width);
            let by = |i: usize| match (up.get(i), self.case.activation) {
                (Some(up), Activation::ClampedSwish) => up.clamp(-7., 7.) + 1.,
                (up, _) => up.copied().unwrap_or(1.),
            };
            let gate = gate.iter().enumerate();
            let narrow = gate.map(|(i, x)| activated(self.case.activation, *x) * by(i));
            let mut y = product(&self.down[expert], &narrow.collect::<Vec<f64>>());
            plus(&mut y, 1);
            for (sum, y) in sum.iter_mut().zip(y) {
                *sum += f64::from(weight) * y;
            }
        }
        sum
    }
}

/// Each format, activation and dtype. Experts have few rows each, or many, of which those of the first experts do not
/// divide into whole groups.
#[test]
fn experts_are_right_and_a_row_has_the_same_bits_in_any_number_of_rows() {
    let gpu = gpu();
    let kinds = [
        BlockType::Q4_0,
        BlockType::Q4_1,
        BlockType::Q4K,
        BlockType::Q2K,
        BlockType::Q5K,
        BlockType::Q6K,
        BlockType::Q8_0,
        BlockType::Iq4Nl,
        BlockType::Iq4Xs,
        BlockType::Iq3Xxs,
        BlockType::Iq2S,
        BlockType::Mxfp4,
    ];
    let blocks = kinds.into_iter().flat_map(|kind| {
        [DType::F16, DType::BF16].map(|dtype| Case {
            form: Form::Blocks(kind),
            width: 256,
            dtype,
            ..CASE
        })
    });
    let float8 = [DType::F16, DType::BF16].map(|dtype| Case {
        form: Form::Float8,
        dtype,
        ..CASE
    });
    let nvfp4 = Case {
        form: Form::Nvfp4,
        ..CASE
    };
    let dense = [DType::F32, DType::F16, DType::BF16].map(|dtype| Case { dtype, ..CASE });
    let others = [
        // Too narrow for tensor cores.
        Case { width: 40, ..CASE },
        Case {
            activation: Activation::ClampedSwish,
            has_biases: true,
            ..CASE
        },
        Case {
            activation: Activation::Relu2,
            is_gated: false,
            dtype: DType::F16,
            ..CASE
        },
    ];
    let floats = float8.into_iter().chain([nvfp4]);
    for case in blocks.chain(floats).chain(dense).chain(others) {
        let made = made(case, CHOICE, &gpu);
        let x = noise(&[EXACT_ROWS, HIDDEN]).to_dtype(case.dtype).unwrap();
        let x = x.to_device(&gpu).unwrap();
        let forward = |first, rows| {
            let x = x.narrow(0, first, rows).unwrap();
            values(&made.experts.forward(&x, &x, None).unwrap())
        };
        let whole = forward(0, EXACT_ROWS);
        let chosen = made.experts.choose(&x).unwrap();
        let within = match case.dtype {
            DType::F32 => 1e-5,
            DType::F16 => 3e-3,
            _ => 2e-2,
        };
        for (i, x) in values(&x).iter().enumerate().step_by(5) {
            let want = made.sum(x, &chosen[i]);
            let size = want.iter().fold(1f64, |size, x| size.max(x.abs()));
            let pairs = want.iter().zip(&whole[i]);
            let off = pairs.map(|(want, got)| (want - f64::from(*got)).abs());
            let off = off.fold(0., f64::max) / size;
            assert!(off < within, "{case:?}: row {i} is off by {off}");
        }
        for (first, rows) in [(0, 1), (7, 1), (200, 2), (3, 8), (30, 33), (100, 100)] {
            let same = forward(first, rows) == whole[first..first + rows];
            assert!(same, "{case:?}: {rows} rows from {first}");
        }
    }
}

/// More rows than a pass has, all with the same experts.
#[test]
fn many_rows_are_computed_in_passes() {
    let gpu = gpu();
    let made = made(CASE, CHOICE, &gpu);
    let x = noise(&[1, HIDDEN]).to_dtype(CASE.dtype).unwrap();
    let x = x.to_device(&gpu).unwrap();
    let one = values(&made.experts.forward(&x, &x, None).unwrap());
    let many = Tensor::cat(&vec![&x; 1100], 0).unwrap();
    let many = values(&made.experts.forward(&many, &many, None).unwrap());
    assert_eq!(many.len(), 1100);
    assert!(many.iter().all(|row| *row == one[0]));
}

/// The choice of a row, in f64, by the definitions.
fn reference(logits: &[f64], correction: &[f32], by: &ExpertChoice) -> Vec<(usize, f64)> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = exps.iter().sum();
    let scores: Vec<f64> = if by.is_softmax {
        exps.iter().map(|x| x / sum).collect()
    } else {
        logits.iter().map(|x| 1. / (1. + (-x).exp())).collect()
    };
    let pairs = scores.iter().zip(correction);
    let mut ranks: Vec<f64> = pairs.map(|(x, by)| x + f64::from(*by)).collect();
    let order = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order
    };
    if let Some(groups) = by.groups {
        let size = by.count / groups.count;
        let sums = ranks.chunks(size).map(|group| {
            let best = order(group).into_iter().take(groups.best);
            best.map(|i| group[i]).sum()
        });
        let sums: Vec<f64> = sums.collect();
        for &group in &order(&sums)[groups.per_token..] {
            ranks[group * size..][..size].fill(f64::NEG_INFINITY);
        }
    }
    let chosen = &order(&ranks)[..by.per_token];
    let sum: f64 = chosen.iter().map(|&i| scores[i]).sum();
    let divisor = if by.is_normalized {
        sum.max(f64::from(by.min_sum))
    } else {
        1.
    };
    let weight = |&i: &usize| (i, scores[i] / divisor * f64::from(by.scale));
    chosen.iter().map(weight).collect()
}

#[test]
fn choices_are_those_of_the_definitions() {
    let gpu = gpu();
    let groups = |count, per_token, best| {
        Some(ChosenGroups {
            count,
            per_token,
            best,
        })
    };
    let sigmoid = ExpertChoice {
        is_softmax: false,
        scale: 2.5,
        ..CHOICE
    };
    let choices = [
        CHOICE,
        ExpertChoice {
            is_normalized: false,
            per_token: 1,
            ..CHOICE
        },
        ExpertChoice {
            min_sum: 0.9,
            ..CHOICE
        },
        ExpertChoice {
            groups: groups(4, 2, 2),
            ..sigmoid
        },
        ExpertChoice {
            groups: groups(3, 1, 4),
            ..sigmoid
        },
        ExpertChoice {
            groups: groups(6, 3, 1),
            is_normalized: false,
            ..CHOICE
        },
        // More experts than a block has threads.
        ExpertChoice {
            count: 300,
            per_token: 20,
            groups: groups(10, 4, 2),
            ..sigmoid
        },
        ExpertChoice {
            per_token: COUNT,
            ..CHOICE
        },
    ];
    for choice in choices {
        let put = |t: &Tensor| t.to_device(&gpu).unwrap();
        let router = weight(&[choice.count, 32]);
        let [bias, correction, factors] = [(); 3].map(|()| noise(&[choice.count]));
        let dense = put(&weight(&[32, 32]));
        let there = [&router, &bias, &correction, &factors].map(put);
        let [on_gpu, bias_there, correction_there, factors_there] = there;
        let weights = ExpertWeights {
            dtype: DType::F32,
            router: &on_gpu,
            router_bias: Some(&bias_there),
            correction: Some(&correction_there),
            factors: Some(&factors_there),
            shared_factor: None,
            gate_up: vec![vec![ForwardWeight::Dense(&dense); choice.count]],
            down: vec![ForwardWeight::Dense(&dense); choice.count],
            biases: None,
            activation: Activation::Silu,
            is_gated: false,
        };
        let experts = DeviceExperts::new(choice, &weights).unwrap();
        let x = noise(&[21, 32]);
        let found = experts.choose(&put(&x)).unwrap();
        let bias = bias.to_vec1::<f32>().unwrap();
        let correction = correction.to_vec1::<f32>().unwrap();
        let factors = factors.to_vec1::<f32>().unwrap();
        for (x, found) in values(&x).iter().zip(found) {
            let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
            let logits = product(&values(&router), &x);
            let logits: Vec<f64> = (logits.iter().zip(&bias))
                .map(|(x, by)| x + f64::from(*by))
                .collect();
            let want = reference(&logits, &correction, &choice);
            assert_eq!(found.len(), want.len());
            for ((expert, weight), (want, of_want)) in found.into_iter().zip(want) {
                assert_eq!(expert as usize, want, "{choice:?}");
                let of_want = of_want * f64::from(factors[want]);
                let off = (f64::from(weight) - of_want).abs();
                assert!(off < 1e-5 * of_want.abs().max(1.), "{choice:?}: {off}");
            }
        }
    }
}

#[test]
fn weights_that_do_not_fit_are_an_error() {
    let gpu = gpu();
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &gpu).unwrap();
    let (router, square, wide) = (zeros(&[COUNT, 32]), zeros(&[32, 32]), zeros(&[64, 32]));
    let make = |gate_up: &Tensor, count: usize, choice| {
        let weights = ExpertWeights {
            dtype: DType::F32,
            router: &router,
            router_bias: None,
            correction: None,
            factors: None,
            shared_factor: None,
            gate_up: vec![vec![ForwardWeight::Dense(gate_up); count]],
            down: vec![ForwardWeight::Dense(&square); COUNT],
            biases: None,
            activation: Activation::Silu,
            is_gated: true,
        };
        DeviceExperts::new(choice, &weights)
    };
    let experts = make(&wide, COUNT, CHOICE).unwrap();
    let wider = zeros(&[2, 64]);
    assert!(experts.forward(&wider, &wider, None).is_err());
    let x = zeros(&[2, 32]);
    assert!(experts.forward(&x, &zeros(&[1, 32]), None).is_err());
    assert!(experts.forward(&x, &x, Some(&zeros(&[1, 32]))).is_err());
    let other = x.to_dtype(DType::BF16).unwrap();
    assert!(experts.forward(&other, &other, None).is_err());
    assert!(make(&square, COUNT, CHOICE).is_err());
    assert!(make(&wide, COUNT - 1, CHOICE).is_err());
    let per_token = COUNT + 1;
    assert!(
        make(
            &wide,
            COUNT,
            ExpertChoice {
                per_token,
                ..CHOICE
            }
        )
        .is_err()
    );
}
