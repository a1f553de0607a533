//! Compares the tiles with plain arithmetic, the vector code with the portable code, and a row alone
//! with the same row in a batch.

use super::*;
use crate::cpu;
use crate::matmul::{Group, matmul};
use candle_core::{DType, Device};
use half::{bf16, f16};

const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3];
const OUTPUTS: [usize; 5] = [1, 7, 31, 33, 100];
const INPUTS: [usize; 5] = [1, 5, 64, 333, 576];

fn noise(dims: (usize, usize)) -> Tensor {
    Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap()
}

fn floats(t: &Tensor) -> Vec<f32> {
    let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    t.to_vec1().unwrap()
}

fn matrix(outputs: usize, inputs: usize, dtype: DType) -> (Vec<f32>, DenseMatrix) {
    if dtype == DType::F8E4M3 {
        let parts = Float8Parts::random(outputs, inputs, (13, 150));
        return (parts.values(), parts.matrix());
    }
    let weight = noise((outputs, inputs)).to_dtype(dtype).unwrap();
    (floats(&weight), DenseMatrix::new(&weight).unwrap())
}

/// From the definition: 3 bits of a fraction, an exponent with a bias of 7, and numbers below the smallest power.
fn of_byte(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match exponent {
        0 => fraction / 8. * 2f32.powi(-6),
        _ => (1. + fraction / 8.) * 2f32.powi(exponent - 7),
    };
    if byte < 128 { size } else { -size }
}

/// A matrix of FP8 whose blocks have scales with all bits of an f32.
struct Float8Parts {
    shape: (usize, usize),
    numbers: Vec<u8>,
    scales: Vec<f32>,
    block: (usize, usize),
}

impl Float8Parts {
    fn random(outputs: usize, inputs: usize, block: (usize, usize)) -> Self {
        let random = |count: usize| floats(&noise((1, count.max(1))))[..count].to_vec();
        let byte = |x: f32| Some((x * 1e4) as i32 as u8).filter(|byte| byte & 0x7f != 0x7f);
        let numbers = random(outputs * inputs).into_iter();
        Self {
            shape: (outputs, inputs),
            numbers: numbers.map(|x| byte(x).unwrap_or(0x7e)).collect(),
            scales: random(outputs.div_ceil(block.0) * inputs.div_ceil(block.1)),
            block,
        }
    }

    fn matrix(&self) -> DenseMatrix {
        let float8 = Float8 {
            shape: self.shape,
            numbers: &self.numbers,
            scales: &self.scales,
            block: self.block,
        };
        DenseMatrix::of_float8(&float8).unwrap()
    }

    fn scale(&self, output: usize, input: usize) -> f32 {
        let runs = self.shape.1.div_ceil(self.block.1);
        self.scales[output / self.block.0 * runs + input / self.block.1]
    }

    /// All weights, each rounded once.
    fn values(&self) -> Vec<f32> {
        let inputs = self.shape.1;
        let value = |(i, &byte): (usize, &u8)| of_byte(byte) * self.scale(i / inputs, i % inputs);
        self.numbers.iter().enumerate().map(value).collect()
    }

    /// The product of a row and an output: the chains of blocks, and one of these times their scales.
    fn product(&self, output: usize, x: &[f32]) -> f32 {
        let inputs = self.shape.1;
        let numbers = &self.numbers[output * inputs..][..inputs];
        let mut sum = 0f32;
        for run in (0..inputs).step_by(self.block.1) {
            let end = inputs.min(run + self.block.1);
            let mut at = run;
            while at < end {
                // Blocks are counted from where the last one ended.
                let to = end.min(at + BLOCK);
                let weights = numbers[at..to].iter().map(|&byte| of_byte(byte));
                sum = self
                    .scale(output, at)
                    .mul_add(chain(0., weights, &x[at..to]), sum);
                at = to;
            }
        }
        sum
    }
}

fn product(matrix: &DenseMatrix, x: &[f32]) -> Vec<f32> {
    product_with(cpu::isa(), matrix, x)
}

fn product_with(isa: Isa, matrix: &DenseMatrix, x: &[f32]) -> Vec<f32> {
    let inputs = matrix.shape().1;
    let rows = x.len() / inputs;
    let weights = vec![matrix];
    let groups = [Group {
        rows: 0..rows,
        weights,
    }];
    let product = Product::new(&groups, x, (rows, inputs)).unwrap();
    DenseMatrix::multiply(&product, isa)
}

/// The sum in f64, and the sum of magnitudes, to which rounding errors are relative.
fn exact(weight: &[f32], x: &[f32]) -> (f64, f64) {
    let terms = weight.iter().zip(x);
    let terms = terms.map(|(&w, &x)| f64::from(w) * f64::from(x));
    terms.fold((0., 0.), |(sum, size), term| {
        (sum + term, size + term.abs())
    })
}

#[test]
fn rows_come_back() {
    for dtype in DTYPES {
        for (outputs, inputs) in [(1, 1), (33, 5), (40, 333)] {
            let (weight, matrix) = matrix(outputs, inputs, dtype);
            assert_eq!((matrix.shape(), matrix.dtype()), ((outputs, inputs), dtype));
            for (output, want) in weight.chunks_exact(inputs).enumerate() {
                let mut row = vec![0f32; inputs];
                matrix.row(output, &mut row);
                assert_eq!(row, want, "{dtype:?}");
            }
        }
    }
}

#[test]
fn products_agree_with_f64() {
    for dtype in DTYPES {
        for (outputs, inputs) in OUTPUTS.iter().flat_map(|&o| INPUTS.map(|i| (o, i))) {
            let (weight, matrix) = matrix(outputs, inputs, dtype);
            for rows in 1..=40 {
                let x = noise((rows, inputs));
                let got = floats(&matrix.matmul(&x).unwrap());
                for (i, got) in got.iter().enumerate() {
                    let (row, output) = (i / outputs, i % outputs);
                    let x = &floats(&x.get(row).unwrap());
                    let (want, size) = exact(&weight[output * inputs..][..inputs], x);
                    let far = (f64::from(*got) - want).abs();
                    assert!(
                        far <= 1e-6 * size,
                        "{dtype:?} {outputs}x{inputs} [{row}, {output}] of {rows}: {got} {want}"
                    );
                }
            }
        }
    }
}

/// The longest chains that models have, with sums near zero and, worse, with sums that only grow.
#[test]
fn one_chain_is_exact_enough() {
    let (outputs, inputs) = (32, 16384);
    for mean in [0., 3.] {
        let weight = (noise((outputs, inputs)) + mean).unwrap();
        let x = floats(&(noise((4, inputs)) + mean).unwrap());
        let got = product(&DenseMatrix::new(&weight).unwrap(), &x);
        let weight = floats(&weight);
        for (i, got) in got.iter().enumerate() {
            let (row, output) = (i / outputs, i % outputs);
            let weight = &weight[output * inputs..][..inputs];
            let (want, size) = exact(weight, &x[row * inputs..][..inputs]);
            let far = (f64::from(*got) - want).abs() / size;
            assert!(far < 1e-5, "mean {mean} [{row}, {output}]: {far} of {size}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_a_batch() {
    for dtype in DTYPES {
        // More inputs than a block, so that partial sums are stored in memory.
        for (outputs, inputs) in [(1, 5), (33, 333), (100, 576), (200, 2 * BLOCK + 3)] {
            let (_, matrix) = matrix(outputs, inputs, dtype);
            let x = floats(&noise((70, inputs)));
            let all_rows = product(&matrix, &x);
            for rows in 1..=40 {
                let first = rows * 13 % 30;
                let got = product(&matrix, &x[first * inputs..][..rows * inputs]);
                assert!(
                    got == all_rows[first * outputs..][..rows * outputs],
                    "{dtype:?} {outputs}x{inputs}: {rows} rows from {first} have different bits"
                );
            }
        }
    }
}

/// The chain of all results, after `sum`.
fn chain(sum: f32, weights: impl Iterator<Item = f32>, x: &[f32]) -> f32 {
    let terms = weights.zip(x);
    terms.fold(sum, |sum, (w, &x)| w.mul_add(x, sum))
}

/// Every instruction set computes one chain in ascending order.
#[test]
fn every_isa_has_the_bits_of_one_chain() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (outputs, inputs) = (81, 2 * BLOCK + 3);
        let (weight, matrix) = matrix(outputs, inputs, dtype);
        for rows in 1..=2 * ROWS + 2 {
            let x = floats(&noise((rows, inputs)));
            let want = (0..rows * outputs).map(|i| {
                let weight = weight[i % outputs * inputs..][..inputs].iter();
                chain(0., weight.copied(), &x[i / outputs * inputs..])
            });
            let want: Vec<f32> = want.collect();
            for isa in Isa::available() {
                let got = product_with(isa, &matrix, &x);
                assert!(got == want, "{dtype:?} {rows} rows, {isa:?}");
            }
        }
    }
}

#[test]
fn vector_code_has_the_bits_of_portable_code() {
    fn check<V: Value>(isa: Isa, weights: &[TileRow<V>], inputs: usize) {
        let tiles: Vec<&[TileRow<V>]> = weights.chunks_exact(inputs).collect();
        let factors: [f32; WIDTH] = std::array::from_fn(|c| 0.7 + c as f32);
        let x = floats(&noise((max_rows(isa), inputs)));
        let x: Vec<&[f32]> = x.chunks_exact(inputs).collect();
        for rows in 1..=max_rows(isa) {
            for left in [1, TILES] {
                let count = at_once(rows, left);
                let mut fast = [[[0.25; WIDTH]; ROWS]; TILES];
                let mut plain = fast;
                pass(
                    isa,
                    &tiles[..count],
                    &[&factors; TILES][..count],
                    &x[..rows],
                    &mut fast,
                );
                for (tile, sums) in tiles[..count].iter().zip(&mut plain) {
                    for (x, sums) in x[..rows].iter().zip(sums) {
                        for (c, sum) in sums.iter_mut().enumerate() {
                            let weights = tile.iter().map(|row| row.0[V::place(c)].to_f32());
                            *sum = match V::IS_SCALED {
                                true => factors[c].mul_add(chain(0., weights, x), *sum),
                                false => chain(*sum, weights, x),
                            };
                        }
                    }
                }
                assert!(fast == plain, "{isa:?}: {rows} rows by {count} tiles");
            }
        }
    }
    for (dtype, isa) in Isa::available().flat_map(|isa| DTYPES.map(|dtype| (dtype, isa))) {
        for inputs in INPUTS {
            match matrix(TILES * WIDTH, inputs, dtype).1.tiles {
                Tiles::F32(weights) => check(isa, &weights, inputs),
                Tiles::F16(weights) => check(isa, &weights, inputs),
                Tiles::BF16(weights) => check(isa, &weights, inputs),
                Tiles::F8(weights, _) => check(isa, &weights, inputs),
            }
        }
    }
}

/// f32 can represent every value of f16, subnormals included, and of bf16.
#[test]
fn every_finite_half_is_widened_exactly() {
    for dtype in [DType::F16, DType::BF16] {
        let all: Vec<f32> = (0..=u16::MAX)
            .map(|bits| match dtype {
                DType::F16 => f16::from_bits(bits).to_f32(),
                _ => bf16::from_bits(bits).to_f32(),
            })
            .map(|x| if x.is_finite() { x } else { 0. })
            .collect();
        let weight = Tensor::from_slice(&all, (all.len(), 1), &Device::Cpu).unwrap();
        let matrix = DenseMatrix::new(&weight.to_dtype(dtype).unwrap()).unwrap();
        assert_eq!(product(&matrix, &[1.]), all, "{dtype:?}");
    }
}

/// Blocks that end within tiles of outputs and within the inputs that passes read at a time.
#[test]
fn every_isa_has_the_bits_of_float8s_chains() {
    for block in [(1, 5000), (5000, 5000), (128, 128), (3, 700), (40, 1)] {
        let (outputs, inputs) = (145, 1300);
        let parts = Float8Parts::random(outputs, inputs, block);
        let (matrix, mut row) = (parts.matrix(), vec![0f32; inputs]);
        for (output, want) in parts.values().chunks_exact(inputs).enumerate() {
            matrix.row(output, &mut row);
            assert_eq!(row, want, "{block:?}");
        }
        for rows in [1, 2, 5, 30] {
            // Small and large inputs, whose products with the smallest numbers keep their bits.
            for size in [1., 1e-12, 1e9] {
                let x = floats(&(noise((rows, inputs)) * size).unwrap());
                let want = (0..rows * outputs)
                    .map(|i| parts.product(i % outputs, &x[i / outputs * inputs..][..inputs]));
                let want: Vec<f32> = want.collect();
                for isa in Isa::available() {
                    let got = product_with(isa, &matrix, &x);
                    assert!(got == want, "{block:?}: {rows} rows of {size}, {isa:?}");
                }
            }
        }
    }
}

#[test]
fn wrong_float8_is_refused() {
    let numbers = [1u8, 2, 3, 4, 5, 6];
    let of = |numbers, scales, block| {
        let shape = (2, 3);
        DenseMatrix::of_float8(&Float8 {
            shape,
            numbers,
            scales,
            block,
        })
    };
    assert!(of(&numbers, &[1.0, 2.0], (1, 3)).is_ok());
    assert!(of(&numbers, &[1.0], (1, 3)).is_err());
    assert!(of(&numbers[1..], &[1.0, 2.0], (1, 3)).is_err());
    assert!(of(&numbers, &[], (0, 3)).is_err());
    assert!(of(&numbers, &[1.0, f32::NAN], (1, 3)).is_err());
    assert!(of(&numbers, &[1.0, 1e38], (1, 3)).is_err());
    assert!(of(&[1, 2, 0xff, 4, 5, 6], &[1.0, 2.0], (1, 3)).is_err());
}

#[test]
fn a_joined_product_equals_the_separate_ones() {
    let matrices = [(100, DType::F32), (7, DType::BF16), (64, DType::F16)];
    let matrices = matrices.map(|(outputs, dtype)| matrix(outputs, 333, dtype).1);
    for rows in [1, 3, 17] {
        let x = noise((rows, 333));
        let weights: Vec<&DenseMatrix> = matrices.iter().collect();
        let parts: Vec<Tensor> = weights.iter().map(|m| m.matmul(&x).unwrap()).collect();
        let want = Tensor::cat(&parts, 1).unwrap();
        let rows = 0..rows;
        let got = matmul(&[Group { rows, weights }], &x).unwrap();
        assert_eq!(floats(&got), floats(&want));
    }
}

#[test]
fn inputs_that_do_not_match_are_refused() {
    let (_, matrix) = matrix(5, 32, DType::F32);
    let cpu = Device::Cpu;
    assert!(matrix.matmul(&noise((1, 31))).is_err());
    assert!(matrix.matmul(&noise((32, 1)).t().unwrap()).is_ok());
    assert!(matrix.matmul(&noise((32, 2)).t().unwrap()).is_err());
    let of = |rows, weights| Group { rows, weights };
    let other = DenseMatrix::new(&noise((4, 32))).unwrap();
    let (two, three) = (vec![&matrix, &matrix], vec![&matrix, &matrix, &matrix]);
    for groups in [
        vec![],
        vec![of(0..2, two.clone())],
        vec![of(0..2, two.clone()), of(3..4, two.clone())],
        vec![of(0..2, two.clone()), of(2..5, two.clone())],
        vec![of(0..4, two.clone()), of(1..4, two.clone())],
        vec![of(0..2, two.clone()), of(2..4, three)],
        vec![of(0..2, two.clone()), of(2..4, vec![&other, &other])],
    ] {
        assert!(matmul(&groups, &noise((4, 32))).is_err());
    }
    let halves = [of(0..2, two.clone()), of(2..2, two.clone()), of(2..4, two)];
    assert!(matmul(&halves, &noise((4, 32))).is_ok());
    let half = noise((1, 32)).to_dtype(DType::F16).unwrap();
    assert!(matrix.matmul(&half).is_err());
    assert_eq!(
        matrix.matmul(&noise((0, 32))).unwrap().dims(),
        [0, 5],
        "an input without rows is valid"
    );
    for weight in [
        Tensor::zeros((5, 32), DType::F64, &cpu),
        Tensor::zeros(32, DType::F32, &cpu),
    ] {
        assert!(DenseMatrix::new(&weight.unwrap()).is_err());
    }
    // A weight that is not contiguous is accepted.
    let weight = noise((6, 9));
    let turned = DenseMatrix::new(&weight.t().unwrap()).unwrap();
    let want = weight.t().unwrap().contiguous().unwrap();
    let x = noise((2, 6));
    let got = floats(&turned.matmul(&x).unwrap());
    assert_eq!(got, product(&DenseMatrix::new(&want).unwrap(), &floats(&x)));
}
