//! Compares the tiles with plain arithmetic, and every instruction set with the portable code.

use super::activations::{Pass, ROWS};
use super::block_sums::BlockSums;
use super::*;
use crate::matmul::matmul;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};

/// What tiles hold.
fn kinds() -> impl Iterator<Item = QuantKind> {
    let types = BlockType::all().filter(|kind| TileFormat::of(*kind).is_some());
    types.map(QuantKind::Blocks).chain([QuantKind::Nvfp4])
}

/// A number of inputs that the format allows: `blocks` of its blocks, or units.
fn inputs(kind: QuantKind, blocks: usize) -> usize {
    let size = match kind {
        QuantKind::Blocks(kind) => kind.block_size().max(BLOCK),
        _ => 2 * BLOCK,
    };
    blocks * size
}

fn noise(rows: usize, width: usize, size: f32) -> Vec<f32> {
    let x = Tensor::randn(0f32, size, (rows, width), &Device::Cpu).unwrap();
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// `[rows, outputs]` for `x` `[rows, inputs]`.
fn products(isa: Isa, weights: &[&QuantMatrix], x: &[f32], inputs: usize) -> Vec<f32> {
    let (rows, weights) = (x.len() / inputs, weights.to_vec());
    let groups = [Group {
        rows: 0..rows,
        weights,
    }];
    let product = Product::new(&groups, x, (rows, inputs)).unwrap();
    QuantMatrix::multiply(&product, isa)
}

/// A random weight as tiles, and its values as candle reads them from the same blocks. Types that candle does
/// not have are read by the tiles, which the test of reference values checks.
fn weight(
    kind: impl Into<BlockType>,
    outputs: usize,
    inputs: usize,
) -> (QuantMatrix, Vec<Vec<f32>>) {
    let kind = kind.into();
    let Some(candles) = kind.candles() else {
        let data = random_blocks(kind, outputs * inputs / kind.block_size());
        let matrix = QuantMatrix::from_blocks(kind, &data, outputs, inputs).unwrap();
        let values = matrix.dequantize();
        let values = values.chunks_exact(inputs).map(<[f32]>::to_vec).collect();
        return (matrix, values);
    };
    let floats = Tensor::randn(0.3f32, 1., (outputs, inputs), &Device::Cpu).unwrap();
    let blocks = QTensor::quantize(&floats, candles).unwrap();
    let data = blocks.data().unwrap();
    let matrix = QuantMatrix::from_blocks(kind, &data, outputs, inputs).unwrap();
    let values = blocks.dequantize(&Device::Cpu).unwrap().to_vec2();
    (matrix, values.unwrap())
}

/// The same of any format.
fn weight_of(kind: QuantKind, outputs: usize, inputs: usize) -> (QuantMatrix, Vec<Vec<f32>>) {
    match kind {
        QuantKind::Blocks(kind) => weight(kind, outputs, inputs),
        _ => nvfp4(outputs, inputs),
    }
}

/// A random weight of NVFP4 with all scales that there are, and the values that its floats define.
fn nvfp4(outputs: usize, inputs: usize) -> (QuantMatrix, Vec<Vec<f32>>) {
    const SIZES: [f32; 8] = [0., 0.5, 1., 1.5, 2., 3., 4., 6.];
    let mut state = 11u64;
    let mut bytes = |count: usize, most: u64| -> Vec<u8> {
        let next = (0..count).map(|_| {
            state = crate::mix(state);
            ((state >> 40) % most) as u8
        });
        next.collect()
    };
    let numbers = bytes(outputs * inputs / 2, 256);
    let scales = bytes(outputs * inputs / Nvfp4::GROUP, 0x7f);
    let factor = 0.0123;
    let value = |i: usize| {
        let (number, scale) = (numbers[i / 2] >> (i % 2 * 4) & 15, scales[i / Nvfp4::GROUP]);
        let (exponent, fraction) = (i32::from(scale >> 3), f32::from(scale & 7));
        let scale = match exponent {
            0 => fraction * 2f32.powi(-9),
            _ => (8. + fraction) * 2f32.powi(exponent - 10),
        };
        let sign = if number < 8 { 1. } else { -1. };
        scale * factor * sign * SIZES[usize::from(number & 7)]
    };
    let values: Vec<f32> = (0..outputs * inputs).map(value).collect();
    let matrix = QuantMatrix::from_nvfp4(&Nvfp4 {
        shape: (outputs, inputs),
        numbers: &numbers,
        scales: &scales,
        factor,
    });
    let values = values.chunks_exact(inputs).map(<[f32]>::to_vec).collect();
    (matrix.unwrap(), values)
}

/// Weights of NVFP4 have exactly the values that their floats define.
#[test]
fn nvfp4_is_held_without_loss() {
    let (matrix, values) = nvfp4(37, 288);
    assert_eq!(matrix.dequantize(), values.concat());
    // Three strips of two records, each with the factor and 16 numbers for each half of eight blocks.
    let record = 64 + 8 * (32 + 256);
    assert_eq!(QuantMatrix::nvfp4_bytes(37, 288), 3 * 2 * record);
    assert_eq!(size_of_val(&matrix.lines[..]), 3 * 2 * record);
}

/// Puts an f16 scale into a block of a type that candle does not have.
fn put_scale(kind: BlockType, block: &mut [u8], bits: u16) {
    let Floats::Nibbles(places) = kind.floats() else {
        return block[..2].copy_from_slice(&bits.to_le_bytes());
    };
    for (i, at) in places.into_iter().enumerate() {
        block[at] = block[at] & 15 | ((bits >> (4 * i)) as u8) << 4;
    }
}

/// Blocks of random bytes with scales near 1/64.
fn random_blocks(kind: BlockType, count: usize) -> Vec<u8> {
    let mut state = 7u64;
    let mut next = move || {
        state = crate::mix(state);
        (state >> 40) as u8
    };
    let blocks = (0..count).flat_map(|_| {
        let mut block: Vec<u8> = (0..kind.type_size()).map(|_| next()).collect();
        match kind {
            BlockType::Mxfp4 => block[0] = 120 + block[0] % 4,
            _ => {
                let scale = half::f16::from_f32(f32::from(block[0]) / 256. / 64.);
                put_scale(kind, &mut block, scale.to_bits());
            }
        }
        block
    });
    blocks.collect()
}

/// Of random blocks that the package `gguf` read (`scripts/make-block-fixtures.py`), bit for bit.
#[test]
fn values_are_those_of_another_implementation() {
    let file = include_str!("../../../../tests/data/block-types.json");
    let file: serde_json::Value = serde_json::from_str(file).unwrap();
    let kinds = BlockType::all().filter(|kind| kind.candles().is_none());
    for kind in kinds {
        let found = &file[kind.name()];
        let hex = found["blocks"].as_str().unwrap();
        let byte = |at: usize| u8::from_str_radix(&hex[2 * at..][..2], 16).unwrap();
        let data: Vec<u8> = (0..hex.len() / 2).map(byte).collect();
        let wanted = found["values"].as_array().unwrap().iter();
        let wanted: Vec<f32> = wanted
            .map(|bits| f32::from_bits(bits.as_u64().unwrap() as u32))
            .collect();
        let outputs = data.len() / kind.type_size();
        // Each block is a row, and all are one row.
        for outputs in [outputs, 1] {
            let inputs = wanted.len() / outputs;
            let matrix = QuantMatrix::from_blocks(kind, &data, outputs, inputs).unwrap();
            assert_eq!(matrix.dequantize(), wanted, "{kind}");
        }
    }
}

#[test]
fn rows_come_back_as_candle_dequantizes_them() {
    for kind in kinds() {
        let inputs = inputs(kind, 3);
        let (matrix, values) = weight_of(kind, 21, inputs);
        for (output, want) in values.iter().enumerate() {
            let mut row = vec![0f32; inputs];
            matrix.dequantize_row(output, &mut row);
            for (got, want) in row.iter().zip(want) {
                assert!((got - want).abs() <= 1e-6 * want.abs().max(1.), "{kind:?}");
            }
        }
    }
}

/// The pass of a row, and the row's number in it.
fn place(x: &Activations, row: usize) -> (Pass, usize) {
    let within = |pass: &&Pass| (pass.first..pass.first + pass.rows).contains(&row);
    let pass = *x.passes().iter().find(within).unwrap();
    (pass, row - pass.first)
}

/// The blocks of a row.
fn blocks_of(x: &Activations, row: usize) -> Vec<([i8; BLOCK], BlockSums)> {
    let (pass, row) = place(x, row);
    let sums = x.sums(pass).iter().skip(row).step_by(x.stored(pass));
    let block = |(i, sums): (usize, &BlockSums)| match x.pairs() {
        None => (*x.block(pass, row, i), *sums),
        Some(_) => {
            let (pairs, _) = x.q(pass).as_chunks::<{ 2 * BLOCK }>();
            let pair = &pairs[(i * x.stored(pass) + row) / 2];
            let value = |k: usize| pair[k / 8 * 16 + row % 2 * 8 + k % 8];
            (std::array::from_fn(value), *sums)
        }
    };
    sums.enumerate().map(block).collect()
}

/// Random shapes with incomplete tiles, every type, every instruction set.
#[test]
fn products_agree_with_f64_on_the_same_8_bit_activations() {
    for kind in kinds() {
        for (rows, outputs, blocks) in [(1, 1, 1), (3, 8, 2), (5, 21, 3), (9, 40, 4), (70, 9, 2)] {
            let inputs = inputs(kind, blocks);
            let (matrix, values) = weight_of(kind, outputs, inputs);
            let x = noise(rows, inputs, 2.);
            let rounded = Activations::quantize(Isa::Portable, &x, inputs);
            for isa in Isa::available() {
                let got = products(isa, &[&matrix], &x, inputs);
                for (at, got) in got.iter().enumerate() {
                    let (r, o) = (at / outputs, at % outputs);
                    let (mut want, mut size) = (0f64, 0f64);
                    for (k, w) in values[o].iter().enumerate() {
                        let (pass, row) = place(&rounded, r);
                        let block = k / BLOCK;
                        let scale = rounded.sums(pass)[block * pass.rows + row].scale;
                        let scale = f64::from(scale);
                        let x8 = rounded.block(pass, row, block)[k % BLOCK];
                        let x8 = scale * f64::from(x8);
                        assert!((x8 - f64::from(x[r * inputs + k])).abs() <= scale * 0.5001);
                        want += x8 * f64::from(*w);
                        size += (x8 * f64::from(*w)).abs();
                    }
                    let far = (f64::from(*got) - want).abs();
                    assert!(
                        far <= 1e-5 * size.max(1e-3),
                        "{kind:?} on {isa:?} [{r}, {o}]: {got} {want}"
                    );
                }
            }
        }
    }
}

/// Checks quantized activations, and results for any number of rows: all sizes of a pass, several passes and
/// several panels, and numbers of blocks that fill a scale record or do not.
#[test]
fn all_isas_and_any_number_of_rows_give_the_same_bits() {
    let panels = [ROWS, TILE_ROWS].map(|rows| PANEL * rows);
    let most = panels[1] + TILE_ROWS + 1;
    for kind in kinds() {
        for blocks in [4, 5] {
            let inputs = inputs(kind, blocks);
            let (matrix, _) = weight_of(kind, 20, inputs);
            let x = noise(most, inputs, 2.);
            let plain = Activations::quantize(Isa::Portable, &x, inputs);
            let want = products(Isa::Portable, &[&matrix], &x, inputs);
            for isa in Isa::available() {
                let quantized = Activations::quantize(isa, &x, inputs);
                for row in 0..most {
                    assert_eq!(blocks_of(&quantized, row), blocks_of(&plain, row));
                }
                for rows in (1..=3 * TILE_ROWS)
                    .chain(panels)
                    .chain([panels[0] + 1, most])
                {
                    let some = products(isa, &[&matrix], &x[..rows * inputs], inputs);
                    assert_eq!(some, want[..rows * 20], "{kind:?} on {isa:?}, {rows} rows");
                }
            }
        }
    }
}

/// A value that is not finite spoils the products of its row, as in a product of floats, and no other row. Whatever
/// stands beside it, and at each place of a vector.
#[test]
fn what_is_not_finite_stays_so() {
    for kind in kinds() {
        let inputs = inputs(kind, 2);
        let (matrix, _) = weight_of(kind, 20, inputs);
        let finite = noise(5, inputs, 2.);
        let want = products(Isa::Portable, &[&matrix], &finite, inputs);
        for (place, value) in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
            .into_iter()
            .flat_map(|value| [0, 7, 13, 16, 24, 31, inputs - 1].map(|place| (place, value)))
        {
            let mut x = finite.clone();
            x[inputs + place] = value;
            // Beside it as large a value as there is, or nothing but NaN.
            x[inputs + (place ^ 1)] = if value.is_nan() { value } else { f32::MAX };
            let plain = Activations::quantize(Isa::Portable, &x, inputs);
            for isa in Isa::available() {
                let got = products(isa, &[&matrix], &x, inputs);
                let shown = format!("{kind:?} on {isa:?}: {value} at {place}");
                assert_eq!(
                    (&got[..20], &got[40..]),
                    (&want[..20], &want[40..]),
                    "{shown}"
                );
                assert!(
                    got[20..40].iter().all(|y| y.is_nan()),
                    "{shown}: {:?}",
                    &got[20..40]
                );
                let quantized = Activations::quantize(isa, &x, inputs);
                for row in 0..5 {
                    let values = |x| blocks_of(x, row).into_iter().map(|(values, _)| values);
                    assert!(values(&quantized).eq(values(&plain)), "{shown}, row {row}");
                }
            }
        }
    }
}

/// The inverse of such a scale is infinite.
#[test]
fn the_smallest_values_do_not_overflow() {
    let (matrix, _) = weight(BlockType::Q8_0, 20, 64);
    for size in [3.7e-37, 1e-38, 1e-45] {
        let x: Vec<f32> = noise(5, 64, 1.).iter().map(|x| x * size).collect();
        let want = products(Isa::Portable, &[&matrix], &x, 64);
        assert!(want.iter().all(|y| y.abs() < 1e-34), "{size}");
        for isa in Isa::available() {
            let got = products(isa, &[&matrix], &x, 64);
            assert_eq!(got, want, "{size} on {isa:?}");
        }
    }
}

/// CPUs with AVX-VNNI are rare here, so its code also runs with the instruction of AVX-512.
#[cfg(target_arch = "x86_64")]
#[test]
fn avx_vnni_gives_the_same_bits_with_the_instruction_of_avx_512() {
    fn product<F: VectorFormat>(
        proof: crate::cpu::Avx512Vnni,
        strip: Strip<'_, F>,
        x: &Activations,
        store: impl FnMut(usize, &[f32; WIDTH]),
    ) {
        let turns = turns(x.passes(), vector::x86::max_rows_avx_vnni::<F>());
        // SAFETY: `proof` proves that the CPU has the instructions.
        unsafe { vector::x86::product_avx512_ymm(proof, strip, x, &turns, store) };
    }
    let Some(proof) = Isa::detect("avx512vnni").and_then(Isa::avx512) else {
        return;
    };
    for kind in kinds() {
        let inputs = inputs(kind, 3);
        let (matrix, _) = weight_of(kind, WIDTH, inputs);
        let x = noise(2 * ROWS, inputs, 2.);
        for rows in 1..=2 * ROWS {
            let x = &x[..rows * inputs];
            let want = products(Isa::Portable, &[&matrix], x, inputs);
            let x = Activations::quantize(Isa::Portable, x, inputs);
            let mut got = vec![0f32; rows * WIDTH];
            let store = |row: usize, sums: &[f32; WIDTH]| {
                got[row * WIDTH..][..WIDTH].copy_from_slice(sums);
            };
            with_format!(matrix.format, F => product::<F>(proof, matrix.strip(0), &x, store));
            assert_eq!(got, want, "{kind:?}, {rows} rows");
        }
    }
}

#[test]
fn several_weights_in_one_call_are_as_each_alone() {
    let (a, _) = weight(GgmlDType::Q4K, 13, 256);
    let (b, _) = weight(GgmlDType::Q6K, 7, 256);
    let (c, _) = weight(GgmlDType::Q8_0, 16, 256);
    let x = Tensor::randn(0f32, 2., (5, 256), &Device::Cpu).unwrap();
    let (rows, weights) = (0..5, vec![&a, &b, &c]);
    let together = matmul(&[Group { rows, weights }], &x).unwrap();
    let apart = [&a, &b, &c].map(|w| w.matmul(&x).unwrap());
    let apart = Tensor::cat(&apart, 1).unwrap();
    let values = |t: Tensor| t.to_vec2::<f32>().unwrap();
    assert_eq!(values(together), values(apart));
}

/// The largest sums that a block of each width can have.
#[test]
fn extreme_values_do_not_overflow() {
    let half = half::f16::ONE.to_le_bytes();
    let zero = [0u8; 2];
    let of = |kind, parts: &[&[u8]], value: f32| (kind, parts.concat(), value);
    let kinds = [
        of(BlockType::Iq4Nl, &[&half, &[0; 16]], -127.),
        // The last entry of a grid is eight times the largest magnitude. All signs are set, or none.
        of(
            BlockType::Iq2Xs,
            &[&half, &[0xFF; 64], &[0xFF; 8]],
            43. * 31. / -8.,
        ),
        of(
            BlockType::Iq2S,
            &[&half, &[0xFF; 32], &[0; 32], &[0xFF; 16]],
            43. * 31. / 8.,
        ),
        of(BlockType::Q8_0, &[&half, &[0x80; 32]], -128.),
        of(BlockType::Q4_0, &[&half, &[0xFF; 16]], 7.),
        of(BlockType::Q4_1, &[&half, &zero, &[0xFF; 16]], 15.),
        of(BlockType::Q5_1, &[&half, &zero, &[0xFF; 20]], 31.),
        of(
            BlockType::Q2K,
            &[&[0x0F; 16], &[0xFF; 64], &half, &zero],
            45.,
        ),
        of(
            BlockType::Q2K,
            &[&[0xF0; 16], &[0xFF; 64], &half, &half],
            -15.,
        ),
        of(
            BlockType::Q6K,
            &[&[0xFF; 192], &[0x80; 16], &half],
            31. * -128.,
        ),
    ];
    for (kind, block, value) in kinds {
        let inputs = kind.block_size();
        let matrix = QuantMatrix::from_blocks(kind, &block.repeat(8), 8, inputs).unwrap();
        for isa in Isa::available() {
            // Sums of large values are over those of 16 bits.
            for x in [-1e4f32, -3., 3., 1e4] {
                let got = products(isa, &[&matrix], &vec![x; 5 * inputs], inputs);
                let want = value * x * inputs as f32;
                let far = (got[15] - want).abs() / want.abs();
                assert!(far < 1e-5, "{kind:?} on {isa:?}: {} {want}", got[15]);
            }
        }
    }
}

#[test]
fn floats_are_rounded_to_8_bits() {
    let floats = noise(5, 64, 1.);
    let matrix = QuantMatrix::from_floats(&floats, 5, 64).unwrap();
    for output in 0..5 {
        let mut row = vec![0f32; 64];
        matrix.dequantize_row(output, &mut row);
        for (got, want) in row.iter().zip(&floats[output * 64..]) {
            assert!((got - want).abs() < 4.5 / 127. * 0.52, "{got} {want}");
        }
    }
    assert!(QuantMatrix::from_floats(&floats, 10, 31).is_err());
    for value in [f32::NAN, f32::INFINITY] {
        let floats = [&[value][..], &floats[1..]].concat();
        let values = QuantMatrix::from_floats(&floats, 5, 64)
            .unwrap()
            .dequantize();
        assert!(!values[0].is_finite() && values[32..].iter().all(|x| x.is_finite()));
    }
    assert!(QuantMatrix::from_blocks(GgmlDType::Q6K, &[], 1, 32).is_err());
    assert!(QuantMatrix::from_blocks(GgmlDType::Q8K, &[0; 292], 1, 256).is_err());
    let wrong = Tensor::zeros((1, 32), DType::F32, &Device::Cpu).unwrap();
    assert!(matrix.matmul(&wrong).is_err());
}
