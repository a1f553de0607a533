//! `--kv-cache-dtype fp8`: keys and values in E4M3 without scales.

use super::heads::{ITSELF, test_texts};
use super::kv_cache_dtype::{
    KV_HEADS, attention_is_that_over_values, options, refused,
    rows_have_the_same_bits_in_any_batch, written_to,
};
use super::latent::sources;
use super::{BLOCK_SIZE, BLOCKS, WITHIN, difference, gpu, loaded, logits, shape, tokens};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::{KvMoves, kv_move};
use foretoken::kv::KvCacheDtype;
use foretoken::model::LoadOptions;

/// The numbers from 0 on, without NaN: that of each byte.
fn numbers() -> Vec<f32> {
    let number = |byte: i32| match byte >> 3 {
        0 => (byte as f32) * 2f32.powi(-9),
        exponent => (1. + (byte & 7) as f32 / 8.) * 2f32.powi(exponent - 7),
    };
    (0..0x7f).map(number).collect()
}

/// What is written for `x`: the nearest number, of two the one with the even byte.
fn nearest(x: f32, numbers: &[f32]) -> f32 {
    if x.is_nan() {
        return x;
    }
    let size = f64::from(x.abs().min(448.));
    let off = |byte: &usize| (f64::from(numbers[*byte]) - size).abs();
    let best = (0..numbers.len()).min_by(|a, b| {
        let by_size = off(a).total_cmp(&off(b));
        by_size.then((a % 2).cmp(&(b % 2)))
    });
    numbers[best.unwrap()].copysign(x)
}

/// The values of a pool, by candle's reading of them.
fn values_of(pool: &Tensor) -> Tensor {
    let here = pool.to_device(&Device::Cpu).unwrap();
    here.to_dtype(DType::F32).unwrap()
}

fn flat(values: &Tensor) -> Vec<f32> {
    let values = values.to_dtype(DType::F32).unwrap();
    values.flatten_all().unwrap().to_vec1().unwrap()
}

/// Of values of every size, of those between two numbers, beyond the largest and not finite; and after moves of slots.
#[test]
fn a_gpu_writes_the_nearest_numbers_and_moves_them() {
    let gpu = gpu();
    let numbers = numbers();
    let (rows, num_slots) = (30, 40);
    let places: Vec<u32> = (0..rows as u32).map(|i| (i * 7 + 3) % num_slots).collect();
    for d in [16, 64, 80, 128, 512] {
        let all = rows * (1 + 2 * KV_HEADS) * d;
        let noise = Tensor::randn(0f32, 1., all, &Device::Cpu).unwrap();
        let mut values = noise.to_vec1::<f32>().unwrap();
        for (i, value) in values.iter_mut().enumerate() {
            let at = i * 31 % (numbers.len() - 1);
            match i % 11 {
                0 => *value = numbers[at],
                1 => *value = -numbers[at],
                2 => *value = (numbers[at] + numbers[at + 1]) / 2.,
                3 => *value *= 1000.,
                4 => *value *= 2f32.powi(-9),
                5 if i % 7 == 0 => *value = f32::NEG_INFINITY,
                5 if i % 13 == 0 => *value = f32::NAN,
                _ => *value *= 2f32.powi(i as i32 % 17 - 8),
            }
        }
        let qkv = Tensor::from_vec(values, (rows, 1 + 2 * KV_HEADS, d), &Device::Cpu).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let qkv = qkv.to_dtype(dtype).unwrap();
            let form = (DType::F8E4M3, d);
            let pools = written_to(form, &qkv, &places, num_slots as usize, &gpu);
            for (i, pool) in pools.iter().enumerate() {
                let heads = qkv.narrow(1, 1 + i * KV_HEADS, KV_HEADS).unwrap();
                let heads = flat(&heads);
                let width = KV_HEADS * d;
                let mut want = vec![0f32; num_slots as usize * width];
                for (row, &place) in places.iter().enumerate() {
                    let to = &mut want[place as usize * width..][..width];
                    for (to, &from) in to.iter_mut().zip(&heads[row * width..]) {
                        *to = nearest(from, &numbers);
                    }
                }
                let same = |got: &[f32], want: &[f32]| {
                    let mut pairs = got.iter().zip(want);
                    pairs.all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
                };
                assert!(
                    same(&flat(&values_of(pool)), &want),
                    "heads of {d} in {dtype:?}"
                );
                let moves = vec![(10, 3), (17, 10), (3, 0), (38, 39)];
                for &(from, to) in &moves {
                    let (from, to): (usize, usize) = (from as usize, to as usize);
                    want.copy_within(from * width..(from + 1) * width, to * width);
                }
                let moves = KvMoves::new(moves, num_slots as usize).unwrap();
                kv_move(&[pool], &moves).unwrap();
                assert!(same(&flat(&values_of(pool)), &want), "moved, heads of {d}");
            }
        }
    }
}

#[test]
fn attention_over_fp8_is_that_over_its_values() {
    let write = |qkv: &Tensor, slots: &[u32], num_slots: usize, device: &Device| {
        let form = (DType::F8E4M3, qkv.dim(2).unwrap());
        written_to(form, qkv, slots, num_slots, device)
    };
    let cases = [
        (false, 3, 64),
        (true, 3, 128),
        (false, 3, 16),
        (true, 1, 160),
        (true, 1, 320),
        (false, 2, 512),
    ];
    attention_is_that_over_values(&cases, write, |pool, _| values_of(pool));
}

/// A number of E4M3 is off by up to a sixteenth, a value of Q8_0 by less than half of a hundredth.
#[test]
fn fp8_changes_logits_by_a_little() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let (tokens, cuts) = (tokens(200), [150, 40, 1, 6, 1, 2]);
    for source in [
        shape(folder.path(), "llama", 64, &[]),
        shape(folder.path(), "qwen3", 128, &[]),
    ] {
        for (dtype, within) in WITHIN {
            let of = |asked| {
                let mut model = loaded(&source, options(&gpu, dtype, asked));
                logits(&mut *model, &tokens, &cuts)
            };
            let off = difference(&of(KvCacheDtype::Auto), &of(KvCacheDtype::Fp8));
            println!("{source:?}, {dtype:?}: off by {off:.1e}");
            assert!(
                off > 1e-3 && off < 0.2 + within,
                "{source:?}, {dtype:?}: {off}"
            );
        }
    }
}

/// Also, with `--batch-invariant`, chunks of prompts change none.
#[test]
fn a_row_over_fp8_has_the_same_bits_in_any_batch() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let options = options(&gpu, DType::BF16, KvCacheDtype::Fp8);
    rows_have_the_same_bits_in_any_batch(&source, &options);
    let invariant = LoadOptions {
        batch_invariant: true,
        ..options
    };
    let (mut model, tokens) = (loaded(&source, invariant), tokens(180));
    let whole = logits(&mut *model, &tokens, &[180]);
    let parts = logits(&mut *model, &tokens, &[66, 1, 63, 50]);
    assert!(parts == whole);
}

#[test]
fn texts_over_fp8_depend_on_nothing_but_the_request() {
    test_texts(&[("starcoder2", 64)], KvCacheDtype::Fp8, ITSELF);
}

#[test]
fn a_token_takes_a_byte_a_value() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let model = loaded(&source, options(&gpu, DType::BF16, KvCacheDtype::Fp8));
    // Of two layers, keys and values of two heads.
    let bytes = model.kv_shape().bytes_per_token();
    assert_eq!(bytes, 2 * 2 * 2 * 64);
    let store = model.new_kv(BLOCKS, BLOCK_SIZE).unwrap();
    let pools = store.layers.iter().flat_map(|(k, v)| [k, v]);
    let held: usize = pools.map(Tensor::elem_count).sum();
    assert_eq!(held, BLOCKS * BLOCK_SIZE * bytes);
}

#[test]
fn what_fp8_is_not_for_is_refused_in_one_line() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let latent = sources(folder.path()).swap_remove(0);
    let llama = shape(folder.path(), "llama", 64, &[]);
    let odd = shape(folder.path(), "llama", 72, &[]);
    let fp8 = |device: &Device| options(device, DType::BF16, KvCacheDtype::Fp8);
    for (source, found) in [(odd, "heads of 72 values"), (latent, "latent vectors")] {
        let named = "--kv-cache-dtype fp8 needs keys and values in heads of a multiple of 16";
        refused(
            &source,
            &fp8(&gpu),
            &[named, found, "auto and bf16 are accepted"],
        );
    }
    let on_cpu = "fp8 is not supported on the CPU: auto, f32, bf16, f16 and q8_0";
    refused(&llama, &fp8(&Device::Cpu), &[on_cpu]);
}
