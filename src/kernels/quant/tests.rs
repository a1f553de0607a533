//! The tiles against plain arithmetic, and the vector path against the portable one.

use super::*;
use candle_core::quantized::QTensor;
use candle_core::{DType, Device};

const KINDS: [GgmlDType; 3] = [GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::Q4_1];

fn blocks(dtype: GgmlDType, outputs: usize, inputs: usize) -> (QTensor, QuantMatrix) {
    let floats = Tensor::randn(0f32, 1., (outputs, inputs), &Device::Cpu).unwrap();
    let blocks = QTensor::quantize(&floats, dtype).unwrap();
    let data = blocks.data().unwrap();
    let matrix = QuantMatrix::from_blocks(dtype, &data, outputs, inputs).unwrap();
    drop(data);
    (blocks, matrix)
}

#[test]
fn rows_come_back_as_candle_dequantizes_them() {
    for kind in KINDS {
        let (blocks, matrix) = blocks(kind, 21, 96);
        let want = blocks
            .dequantize(&Device::Cpu)
            .unwrap()
            .to_vec2::<f32>()
            .unwrap();
        for (output, want) in want.iter().enumerate() {
            let mut row = vec![0f32; 96];
            matrix.dequantize_row(output, &mut row);
            for (got, want) in row.iter().zip(want) {
                assert!((got - want).abs() <= 1e-6 * want.abs().max(1.), "{kind:?}");
            }
        }
    }
}

#[test]
fn products_agree_with_f64_on_the_same_8_bit_activations() {
    for kind in KINDS {
        for (rows, outputs, inputs) in [(1, 1, 32), (3, 8, 64), (5, 21, 96), (9, 40, 576)] {
            let (blocks, matrix) = blocks(kind, outputs, inputs);
            let weight = blocks
                .dequantize(&Device::Cpu)
                .unwrap()
                .to_vec2::<f32>()
                .unwrap();
            let x = Tensor::randn(0f32, 2., (rows, inputs), &Device::Cpu).unwrap();
            let got = matrix.matmul(&x).unwrap().to_vec2::<f32>().unwrap();
            let x = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let rounded = Activations::quantize(&x, inputs);
            for (r, got) in got.iter().enumerate() {
                for (o, got) in got.iter().enumerate() {
                    let (mut want, mut size) = (0f64, 0f64);
                    for (k, w) in weight[o].iter().enumerate() {
                        let scale = f64::from(rounded.scale[rounded.at(r, k / BLOCK)]);
                        let x8 = scale * f64::from(rounded.q[r * inputs + k]);
                        assert!((x8 - f64::from(x[r * inputs + k])).abs() <= scale * 0.5001);
                        want += x8 * f64::from(*w);
                        size += (x8 * f64::from(*w)).abs();
                    }
                    let far = (f64::from(*got) - want).abs();
                    assert!(
                        far <= 1e-5 * size.max(1e-3),
                        "{kind:?} [{r}, {o}]: {got} {want}"
                    );
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn the_vector_path_has_the_bits_of_the_portable_one() {
    if !avx2::available() {
        return; // Then the portable path is the only one.
    }
    for kind in KINDS {
        let (_, matrix) = blocks(kind, 8, 160);
        let x = Tensor::randn(0f32, 2., (4, 160), &Device::Cpu).unwrap();
        let x = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let x = Activations::quantize(&x, 160);
        for count in 1..=ROWS {
            // SAFETY: the features are there.
            let (fast, plain) = match &matrix.tiles {
                Tiles::Q8(t) => (
                    unsafe { avx2::product8(t, &x, 0, count) },
                    portable::product8(t, &x, 0, count),
                ),
                Tiles::Q4(t) => (
                    unsafe { avx2::product4(t, &x, 0, count) },
                    portable::product4(t, &x, 0, count),
                ),
            };
            assert_eq!(fast[..count], plain[..count], "{kind:?}, {count} rows");
        }
    }
}

#[test]
fn extreme_values_do_not_overflow() {
    // -128 weights against activations of one sign: the largest sums a block can have.
    let mut data = Vec::new();
    for _ in 0..8 {
        data.extend_from_slice(&f16::ONE.to_le_bytes());
        data.extend_from_slice(&[0x80u8; BLOCK]);
    }
    let matrix = QuantMatrix::from_blocks(GgmlDType::Q8_0, &data, 8, BLOCK).unwrap();
    let x = Tensor::full(-3f32, (2, BLOCK), &Device::Cpu).unwrap();
    let got = matrix.matmul(&x).unwrap().to_vec2::<f32>().unwrap();
    assert!((got[1][7] - 3. * 128. * 32.).abs() < 0.01, "{}", got[1][7]);
}

#[test]
fn floats_are_rounded_to_8_bits() {
    let floats = Tensor::randn(0f32, 1., (5, 64), &Device::Cpu).unwrap();
    let floats = floats.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let matrix = QuantMatrix::from_floats(&floats, 5, 64).unwrap();
    for output in 0..5 {
        let mut row = vec![0f32; 64];
        matrix.dequantize_row(output, &mut row);
        for (got, want) in row.iter().zip(&floats[output * 64..]) {
            assert!((got - want).abs() < 4.5 / 127. * 0.52, "{got} {want}");
        }
    }
    assert!(QuantMatrix::from_floats(&floats, 10, 31).is_err());
    assert!(QuantMatrix::from_blocks(GgmlDType::Q6K, &[], 1, 32).is_err());
    let wrong = Tensor::zeros((1, 32), DType::F32, &Device::Cpu).unwrap();
    assert!(matrix.matmul(&wrong).is_err());
}
