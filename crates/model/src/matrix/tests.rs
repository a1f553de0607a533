//! Every format on the CPU (dense ones too, whose code is the same on a GPU) does what the trait says.

use super::*;
use candle_core::quantized::{GgmlDType, QTensor};
use foretoken_kernels::quant::QuantMatrix;

const INPUTS: usize = 256;

/// Whole numbers from -8 to 8, so that sums of unquantized weights are exact.
fn numbers(seed: u64, rows: usize, width: usize) -> Tensor {
    let values = (0..(rows * width) as u64).map(|i| {
        let bits = foretoken_core::sampling::mix(seed << 32 ^ i);
        (bits % 17) as f32 - 8.
    });
    Tensor::from_vec(values.collect::<Vec<_>>(), (rows, width), &Device::Cpu).unwrap()
}

fn bits(t: &Tensor) -> Vec<Vec<f32>> {
    t.to_vec2().unwrap()
}

/// A way to store a weight.
#[derive(Clone, Copy, Debug)]
enum WeightKind {
    Dense,
    Packed(DType),
    Tiled(GgmlDType),
    Quantized(GgmlDType),
}

const KINDS: [WeightKind; 9] = [
    WeightKind::Dense,
    WeightKind::Packed(DType::F32),
    WeightKind::Packed(DType::F16),
    WeightKind::Packed(DType::BF16),
    WeightKind::Tiled(GgmlDType::Q8_0),
    WeightKind::Tiled(GgmlDType::Q4_1),
    WeightKind::Tiled(GgmlDType::Q6K),
    WeightKind::Quantized(GgmlDType::Q4_0),
    WeightKind::Quantized(GgmlDType::Q6K),
];

impl WeightKind {
    /// A weight of this kind with `outputs` outputs, and its values.
    fn matrix(self, seed: u64, outputs: usize) -> (Arc<dyn Matrix>, Tensor) {
        let floats = numbers(seed, outputs, INPUTS);
        let blocks = |kind| {
            let blocks = QTensor::quantize(&floats, kind).unwrap();
            let values = blocks.dequantize(&Device::Cpu).unwrap();
            (blocks, values)
        };
        match self {
            Self::Dense => (Arc::new(Dense::new(floats.clone()).unwrap()), floats),
            Self::Packed(dtype) => (unquantized(&floats, Some(dtype)).unwrap(), floats),
            Self::Tiled(kind) => {
                let (blocks, values) = blocks(kind);
                let data = blocks.data().unwrap();
                let tiles = QuantMatrix::from_blocks(kind, &data, outputs, INPUTS).unwrap();
                (Arc::new(Packed::new(tiles)), values)
            }
            Self::Quantized(kind) => {
                let (blocks, values) = blocks(kind);
                (Arc::new(Quantized::new(blocks).unwrap()), values)
            }
        }
    }

    /// The part of an activation that its rounding may change.
    fn rounding(self) -> f64 {
        match self {
            Self::Dense | Self::Packed(_) => 0.,
            Self::Tiled(_) | Self::Quantized(_) => 0.51 / 127.,
        }
    }
}

#[test]
fn every_format_multiplies_and_gives_its_values_back() {
    for kind in KINDS {
        let (matrix, values) = kind.matrix(1, 21);
        assert_eq!(matrix.shape(), (21, INPUTS), "{kind:?}");
        let values = bits(&values);
        let x = numbers(2, 35, INPUTS);
        let got = bits(&matrix.forward(&x).unwrap());
        for (row, (x, got)) in bits(&x).iter().zip(&got).enumerate() {
            for (w, &got) in values.iter().zip(got) {
                let (mut want, mut size) = (0f64, 0f64);
                for (&x, &w) in x.iter().zip(w) {
                    want += f64::from(x) * f64::from(w);
                    size += f64::from(w).abs();
                }
                let far = (f64::from(got) - want).abs();
                let allowed = size * 8. * (kind.rounding() + 1e-6);
                assert!(far <= allowed, "{kind:?} row {row}: {got} is not {want}");
            }
        }
        let all = bits(&matrix.dequantize().unwrap());
        for (got, want) in all.iter().flatten().zip(values.iter().flatten()) {
            assert!((got - want).abs() <= 1e-6 * want.abs(), "{kind:?}");
        }
        let ids = Tensor::new(&[20u32, 0, 7, 7], &Device::Cpu).unwrap();
        let rows = bits(&matrix.rows(&ids, DType::F32).unwrap());
        assert_eq!(rows, [20, 0, 7, 7].map(|id| all[id].clone()), "{kind:?}");
        let beyond = Tensor::new(&[21u32], &Device::Cpu).unwrap();
        assert!(matrix.rows(&beyond, DType::F32).is_err(), "{kind:?}");
        assert!(matrix.forward(&numbers(3, 2, INPUTS - 32)).is_err());
    }
}

#[test]
fn formats_are_named() {
    let formats = KINDS.map(|kind| kind.matrix(1, 2).0.format());
    let quantized = ["Q8_0", "Q4_1", "Q6_K", "Q4_0", "Q6_K"];
    assert_eq!(formats[..4], ["f32", "f32", "f16", "bf16"]);
    assert_eq!(formats[4..], quantized);
}

/// Several matrices in a row are joined, too. Rows and values keep their order.
#[test]
fn joined_matrices_are_as_each_alone() {
    let x = numbers(4, 9, INPUTS);
    for kind in KINDS {
        let apart = [(1, 13), (2, 16), (3, 5)].map(|(seed, outputs)| kind.matrix(seed, outputs).0);
        let joined = join(apart.to_vec()).unwrap();
        if let WeightKind::Quantized(_) = kind {
            assert_eq!(joined.len(), 3, "candle has no call for several");
            continue;
        }
        assert_eq!(joined.len(), 1, "{kind:?}");
        assert_eq!(joined[0].shape(), (34, INPUTS));
        let cat = |parts: [Tensor; 3], dim| bits(&Tensor::cat(&parts, dim).unwrap());
        let products = apart.each_ref().map(|matrix| matrix.forward(&x).unwrap());
        assert_eq!(bits(&joined[0].forward(&x).unwrap()), cat(products, 1));
        let all = cat(apart.map(|matrix| matrix.dequantize().unwrap()), 0);
        assert_eq!(bits(&joined[0].dequantize().unwrap()), all);
        let ids = Tensor::new(&[33u32, 12, 13, 28, 29], &Device::Cpu).unwrap();
        let rows = [33, 12, 13, 28, 29].map(|id| all[id].clone());
        assert_eq!(bits(&joined[0].rows(&ids, DType::F32).unwrap()), rows);
    }
}

#[test]
fn only_neighbours_of_one_kind_are_joined() {
    use GgmlDType::{Q4_1, Q6K, Q8_0};
    let kinds = [
        WeightKind::Packed(DType::BF16),
        WeightKind::Tiled(Q4_1),
        WeightKind::Tiled(Q6K),
        WeightKind::Quantized(Q8_0),
        WeightKind::Packed(DType::F32),
        WeightKind::Packed(DType::F16),
        WeightKind::Tiled(Q8_0),
    ];
    let apart: Vec<_> = (10..)
        .zip(kinds)
        .map(|(seed, kind)| kind.matrix(seed, 11).0)
        .collect();
    let joined = join(apart.clone()).unwrap();
    let formats: Vec<String> = joined.iter().map(|matrix| matrix.format()).collect();
    assert_eq!(formats, ["bf16", "Q4_1, Q6_K", "Q8_0", "f32, f16", "Q8_0"]);
    let x = numbers(5, 3, INPUTS);
    let products = |matrices: &[Arc<dyn Matrix>]| {
        let parts = matrices.iter().map(|matrix| matrix.forward(&x).unwrap());
        bits(&Tensor::cat(&parts.collect::<Vec<_>>(), 1).unwrap())
    };
    assert_eq!(products(&joined), products(&apart));
}

/// Experts of which each is two joined weights, as gate and up are; runs of one row and of more rows than
/// a kernel takes at a time, experts that nobody chose, and ones that are chosen again later.
#[test]
fn chosen_experts_give_a_row_the_bits_of_a_product_of_its_own() {
    let expert = |(seed, &kind): (u64, &WeightKind)| match kind {
        WeightKind::Quantized(_) => kind.matrix(seed, 39).0,
        _ => {
            let (gate, up) = (kind.matrix(seed, 20).0, kind.matrix(seed + 50, 19).0);
            join(vec![gate, up]).unwrap().remove(0)
        }
    };
    let mut lists = KINDS.map(|kind| vec![kind]).to_vec();
    lists.push(KINDS.to_vec());
    lists.push(vec![
        WeightKind::Tiled(GgmlDType::Q6K),
        WeightKind::Tiled(GgmlDType::Q4_1),
    ]);
    lists.push(vec![
        WeightKind::Packed(DType::F16),
        WeightKind::Packed(DType::F32),
    ]);
    for kinds in lists {
        let experts: Vec<_> = (0..6).zip(kinds.iter().cycle()).map(expert).collect();
        let runs = [(0, 1), (2, 70), (3, 13), (0, 2), (5, 9)];
        let runs = runs.map(|(expert, rows)| vec![expert; rows]).concat();
        for chosen in [vec![4], vec![3, 0, 0, 5, 1, 0, 5, 5], runs] {
            let x = numbers(6, chosen.len(), INPUTS);
            let got = bits(&forward_chosen(&experts, &x, &chosen).unwrap());
            assert_eq!(got.len(), chosen.len());
            for (row, (got, &expert)) in got.iter().zip(&chosen).enumerate() {
                let x = x.narrow(0, row, 1).unwrap().contiguous().unwrap();
                let want = bits(&experts[expert as usize].forward(&x).unwrap());
                assert!(*got == want[0], "{kinds:?}: row {row} of {}", chosen.len());
            }
        }
    }
}

#[test]
fn choices_that_do_not_fit_are_refused() {
    for kind in KINDS {
        let experts = [1, 2].map(|seed| kind.matrix(seed, 5).0);
        let x = numbers(7, 3, INPUTS);
        for chosen in [&[0, 1][..], &[0, 1, 1, 1], &[0, 2, 0], &[]] {
            assert!(forward_chosen(&experts, &x, chosen).is_err(), "{kind:?}");
        }
        let other = [kind.matrix(1, 5).0, kind.matrix(2, 6).0];
        assert!(forward_chosen(&other, &x, &[0, 1, 1]).is_err(), "{kind:?}");
    }
}

/// On the CPU all are, except that candle's own products, on which dense weights are only in tests, have
/// no such kernel.
#[test]
fn what_is_batch_invariant_stays_and_what_cannot_be_is_refused() {
    for kind in KINDS {
        let matrix = kind.matrix(1, 5).0;
        match (kind, matrix.make_batch_invariant()) {
            (WeightKind::Dense, Err(error)) => {
                let error = error.to_string();
                assert!(error.ends_with("one is [5, 256] in f32"), "{error}");
            }
            (_, other) => assert!(matches!(other, Ok(None)), "{kind:?}"),
        }
    }
}
