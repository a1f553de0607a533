//! `--kv-cache-dtype` on a GPU: keys and values in blocks of 8 bits, which have the CPU's bytes, and what is refused.

use super::heads::{ITSELF, OFTEN_RIGHT, test_texts};
use super::latent::sources;
use super::{
    BLOCK_SIZE, BLOCKS, Log, WITHIN, difference, gpu, loaded, logits, model_by, rounds, shape,
    tokens,
};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::{
    AttentionBatch, AttentionParams, KvMoves, Pools, Slots, Span, ValueHeads, kv_move,
    paged_attention, rope_kv_write,
};
use foretoken::kv::KvCacheDtype;
use foretoken::model::{LoadOptions, ModelSource};
use half::f16;

/// Values and bytes of a block.
const BLOCK: usize = 32;
const BYTES: usize = 34;
/// Heads of keys of the tests of kernels.
pub(super) const KV_HEADS: usize = 2;

pub(super) fn options(gpu: &Device, dtype: DType, kv_cache_dtype: KvCacheDtype) -> LoadOptions {
    LoadOptions {
        dtype: Some(dtype),
        device: gpu.clone(),
        seed: 1,
        kv_cache_dtype,
        ..LoadOptions::default()
    }
}

/// The blocks of a pool, as the CPU orders them: on a GPU, the bytes of all come first.
fn blocks_of(pool: &Tensor) -> Vec<[u8; BYTES]> {
    let all = pool.to_device(&Device::Cpu).unwrap();
    let all = all.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    if pool.device().is_cpu() {
        return all.as_chunks().0.to_vec();
    }
    let (bytes, scales) = all.split_at(all.len() / BYTES * BLOCK);
    let blocks = scales.as_chunks::<2>().0.iter().zip(bytes.chunks(BLOCK));
    let joined = blocks.map(|(scale, bytes)| [&scale[..], bytes].concat());
    joined.map(|block| block.try_into().unwrap()).collect()
}

/// The values of a pool, with those of keys in heads of `d`.
fn values_of(pool: &Tensor, d: usize) -> Tensor {
    let values = blocks_of(pool).into_iter().flat_map(|block| {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        block[2..]
            .iter()
            .map(|&byte| f32::from(byte as i8) * scale)
            .collect::<Vec<f32>>()
    });
    let values: Vec<f32> = values.collect();
    Tensor::from_vec(values, ((), KV_HEADS, d), &Device::Cpu).unwrap()
}

/// Pools of `num_slots` slots, to which the heads of keys and values in `qkv` are written, after one of queries. The last rows
/// may have no slot.
fn written(qkv: &Tensor, slots: &[u32], num_slots: usize, device: &Device) -> [Tensor; 2] {
    let elements = qkv.dim(2).unwrap() / BLOCK * BYTES;
    written_to((DType::U8, elements), qkv, slots, num_slots, device)
}

/// The same for pools of any dtype that have so many elements for a head.
pub(super) fn written_to(
    (dtype, elements): (DType, usize),
    qkv: &Tensor,
    slots: &[u32],
    num_slots: usize,
    device: &Device,
) -> [Tensor; 2] {
    let rows = qkv.dim(0).unwrap();
    let pool = || Tensor::zeros((num_slots, KV_HEADS, elements), dtype, device).unwrap();
    let [k, v] = [pool(), pool()];
    let slots = Slots::padded(slots, rows, num_slots, device).unwrap();
    let pools = Pools {
        k: &k,
        v: &v,
        slots: &slots,
    };
    let qkv = qkv.to_device(device).unwrap();
    rope_kv_write(&qkv, 1, None, None, &ValueHeads::default(), pools).unwrap();
    [k, v]
}

/// Of values of every size that has a scale, of zeros and of values that are not finite; and after moves of slots.
#[test]
fn a_gpu_writes_and_moves_the_blocks_of_the_cpu() {
    let gpu = gpu();
    let (rows, num_slots, slots) = (40, 50, 39);
    let places: Vec<u32> = (0..slots).map(|i| (i * 7 + 3) % num_slots).collect();
    for d in [32, 64, 96, 128, 160, 512] {
        let all = rows * (1 + 2 * KV_HEADS);
        let noise = Tensor::randn(0f32, 1., (all * d / BLOCK, BLOCK), &Device::Cpu).unwrap();
        let mut values = noise.to_vec2::<f32>().unwrap();
        let count = values.len();
        for (i, block) in values.iter_mut().enumerate() {
            let size = (i as f32 / count as f32 * 40. - 26.).exp2();
            block.iter_mut().for_each(|value| *value *= size);
            match i % 97 {
                11 => block.fill(0.),
                23 => block[i % BLOCK] = f32::NAN,
                41 => block[i % BLOCK] = f32::NEG_INFINITY,
                59 => block[i % BLOCK] = 9e6,
                _ => {}
            }
        }
        let qkv = Tensor::new(values.concat(), &Device::Cpu).unwrap();
        let qkv = qkv.reshape((rows, 1 + 2 * KV_HEADS, d)).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let qkv = qkv.to_dtype(dtype).unwrap();
            let there = written(&qkv, &places, num_slots as usize, &gpu);
            let of_slots = qkv.narrow(0, 0, slots as usize).unwrap();
            let of_slots = of_slots.to_dtype(DType::F32).unwrap();
            let here = written(&of_slots, &places, num_slots as usize, &Device::Cpu);
            for (here, there) in here.iter().zip(&there) {
                let want = blocks_of(here);
                assert!(want.iter().any(|block| block[..2] == [0, 0x7e]), "NaN");
                assert!(blocks_of(there) == want, "heads of {d} in {dtype:?}");
                let moves = vec![(10, 3), (17, 10), (3, 0), (49, 48)];
                let moves = KvMoves::new(moves, num_slots as usize).unwrap();
                kv_move(&[here], &moves).unwrap();
                kv_move(&[there], &moves).unwrap();
                let moved = blocks_of(here);
                assert!(moved != want);
                assert!(blocks_of(there) == moved, "moved, heads of {d}");
            }
        }
    }
}

/// Rows after a context, and the masks of their tree.
type Part<'a> = (usize, usize, Option<&'a [u64]>);

/// Spans of these rows in blocks that are not adjacent, and the slots that hold their keys.
fn spans(parts: &[Part<'_>]) -> (Vec<Span>, Vec<u32>) {
    let (mut spans, mut slots, mut rows, mut used) = (Vec::new(), Vec::new(), 0, 0);
    for &(count, context, tree) in parts {
        let keys = count + context;
        let blocks = used..used + keys.div_ceil(BLOCK_SIZE);
        used = blocks.end;
        let blocks: Vec<u32> = blocks.map(|i| (i * 29 % BLOCKS) as u32).collect();
        let slot = |key: usize| blocks[key / BLOCK_SIZE] * BLOCK_SIZE as u32;
        slots.extend((0..keys).map(|key| slot(key) + (key % BLOCK_SIZE) as u32));
        spans.push(Span {
            rows: rows..rows + count,
            context,
            blocks,
            tree: tree.map(<[u64]>::to_vec),
        });
        rows += count;
    }
    (spans, slots)
}

/// Whether the rows of a test are those of prompts, too, its queries for a key, and values of a head.
pub(super) type Heads = (bool, usize, usize);

/// Decoding, trees and prompts over pools that `write` fills from heads of queries, keys and values, beside slots that hold
/// NaN: the bits of pools that hold their values, as `values_of` reads them with heads of so many values, in the dtype of the
/// queries; and what the CPU computes of these values.
pub(super) fn attention_is_that_over_values(
    cases: &[Heads],
    write: impl Fn(&Tensor, &[u32], usize, &Device) -> [Tensor; 2],
    values_of: impl Fn(&Tensor, usize) -> Tensor,
) {
    let gpu = gpu();
    let mut tree = vec![1u64];
    for node in 1..7 {
        tree.push(tree[(node - 1) / 2] | 1 << node);
    }
    let short: &[Part] = &[(1, 37, None), (40, 3, None), (7, 90, Some(&tree))];
    let long: &[Part] = &[
        (1, 200, None),
        (66, 60, None),
        (30, 90, None),
        (7, 64, Some(&tree)),
    ];
    for &(is_long, group, d) in cases {
        let parts = if is_long { long } else { short };
        let (spans, slots) = spans(parts);
        let noise = |dims| Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap();
        let (rows, num_slots) = (slots.len(), BLOCKS * BLOCK_SIZE);
        let empty = (0..num_slots as u32).filter(|slot| !slots.contains(slot));
        let places: Vec<u32> = slots.iter().copied().chain(empty).collect();
        let qkv = noise((rows, 1 + 2 * KV_HEADS, d));
        let rest = (num_slots - rows, 1 + 2 * KV_HEADS, d);
        let nan = Tensor::full(f32::NAN, rest, &Device::Cpu).unwrap();
        let qkv = Tensor::cat(&[&qkv, &nan], 0).unwrap();
        let of_gpu = write(&qkv, &places, num_slots, &gpu);
        let values = [0, 1].map(|i| values_of(&of_gpu[i], d));
        let queries: usize = parts.iter().map(|part| part.0).sum();
        let q = noise((queries, KV_HEADS * group, d));
        let batch = AttentionBatch::new(&spans, BLOCK_SIZE, num_slots).unwrap();
        let attend = |q: &Tensor, [k, v]: &[Tensor; 2]| {
            let out = paged_attention(q, k, v, &batch, AttentionParams::scaled(0.1)).unwrap();
            let out = out.to_dtype(DType::F32).unwrap().flatten_from(1).unwrap();
            out.to_vec2::<f32>().unwrap()
        };
        for (dtype, within) in WITHIN {
            let q = q.to_dtype(dtype).unwrap();
            let widened = [0, 1].map(|i| {
                let values = values[i].to_dtype(dtype).unwrap();
                values.to_device(&gpu).unwrap()
            });
            let on_gpu = q.to_device(&gpu).unwrap();
            let got = attend(&on_gpu, &of_gpu);
            let want = attend(&on_gpu, &widened);
            let what = format!("groups of {group}, heads of {d}, {dtype:?}");
            assert!(got == want, "{what}: off by {}", difference(&got, &want));
            let here = attend(&q.to_dtype(DType::F32).unwrap(), &values);
            let off = difference(&here, &got);
            assert!(off < within, "{what}: off by {off}");
        }
    }
}

/// Over blocks, the CPU rounds queries, too, so it computes of their values.
#[test]
fn attention_over_blocks_is_that_over_their_values() {
    let cases = [
        (false, 3, 64),
        (true, 1, 64),
        (true, 3, 128),
        (false, 3, 32),
        (true, 2, 96),
        (true, 1, 160),
        (false, 2, 256),
        (true, 1, 320),
        (false, 2, 512),
    ];
    attention_is_that_over_values(&cases, written, values_of);
}

/// The CPU rounds queries, too, so that logits differ from its own. But blocks change them as little as there.
#[test]
fn blocks_change_logits_as_little_as_on_the_cpu() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let shapes = [
        shape(folder.path(), "llama", 64, &[]),
        shape(folder.path(), "qwen2", 64, &[("draft_vocab_size", 200)]),
        shape(folder.path(), "qwen3", 96, &[]),
        shape(folder.path(), "qwen3", 128, &[]),
        shape(folder.path(), "llama", 256, &[]),
    ];
    let tokens = tokens(200);
    let cuts = [150, 40, 1, 6, 1, 2];
    for source in &shapes {
        for (dtype, within) in WITHIN {
            let of = |device: &Device, asked| {
                let mut model = loaded(source, options(device, dtype, asked));
                logits(&mut *model, &tokens, &cuts)
            };
            let exact = of(&Device::Cpu, KvCacheDtype::F32);
            let here = difference(&exact, &of(&Device::Cpu, KvCacheDtype::Q8_0));
            let off = difference(&exact, &of(&gpu, KvCacheDtype::Q8_0));
            println!("{source:?}, {dtype:?}: off by {off:.1e}, on the CPU by {here:.1e}");
            assert!(
                off < within + 1.5 * here && off > here / 5.,
                "{source:?}, {dtype:?}: off by {off}, on the CPU by {here}"
            );
        }
    }
}

/// Steps of several rows, launched, recorded and replayed, and of many sequences, have the bits of one row after another.
pub(super) fn rows_have_the_same_bits_in_any_batch(source: &ModelSource, options: &LoadOptions) {
    let tokens = tokens(180);
    let eager = LoadOptions {
        enforce_eager: true,
        ..options.clone()
    };
    let cuts = |rows: usize| [vec![150], vec![rows; 30 / rows]].concat();
    let plain = logits(&mut *loaded(source, eager), &tokens, &cuts(1));
    let mut model = loaded(source, options.clone());
    for rows in [1, 2, 5, 15, 30] {
        let verified = logits(&mut *model, &tokens, &cuts(rows));
        assert!(verified == plain, "{source:?}: {rows} rows");
    }
    let before = Log::of_this_thread().len();
    let round =
        |round: usize| -> Vec<usize> { (0..9).map(|i| if i == round { 1 } else { 3 }).collect() };
    let of: Vec<Vec<usize>> = (0..4).map(round).collect();
    let together = rounds(&mut *model, &of, true);
    let log = Log::of_this_thread().split_off(before).join("\n");
    assert!(log.contains("is recorded"), "{log}");
    assert!(!log.contains("not recorded"), "{log}");
    assert!(rounds(&mut *model, &of, false) == together, "{source:?}");
}

#[test]
fn a_row_over_blocks_has_the_same_bits_in_any_batch() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    for (source, dtype) in [
        (shape(folder.path(), "llama", 64, &[]), DType::BF16),
        (shape(folder.path(), "qwen3", 96, &[]), DType::F16),
    ] {
        let options = options(&gpu, dtype, KvCacheDtype::Q8_0);
        rows_have_the_same_bits_in_any_batch(&source, &options);
    }
}

/// With `--batch-invariant`, chunks of prompts change no bit, either.
#[test]
fn chunks_over_blocks_change_no_bit() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let mut model = loaded(
        &source,
        LoadOptions {
            batch_invariant: true,
            ..options(&gpu, DType::BF16, KvCacheDtype::Q8_0)
        },
    );
    let tokens = tokens(130);
    let whole = logits(&mut *model, &tokens, &[130]);
    for cuts in [vec![40, 17, 16, 15, 33, 9], vec![66, 1, 63]] {
        let parts = logits(&mut *model, &tokens, &cuts);
        assert!(parts == whole, "{cuts:?}");
    }
}

/// Heads of several sizes, of which some are wide; and attention beside recurrent states.
#[test]
fn texts_over_blocks_depend_on_nothing_but_the_request() {
    let models = [("gemma4_large", 160), ("starcoder2", 64)];
    test_texts(&models, KvCacheDtype::Q8_0, ITSELF);
    test_texts(&[("qwen3_next", 64)], KvCacheDtype::Q8_0, OFTEN_RIGHT);
}

/// A token takes the bytes of its blocks, in the plan and in memory.
#[test]
fn a_token_takes_the_bytes_of_its_blocks() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    for (dtype, of_head) in [(KvCacheDtype::Auto, 128), (KvCacheDtype::Q8_0, 68)] {
        let model = loaded(&source, options(&gpu, DType::BF16, dtype));
        // Of two layers, keys and values of two heads.
        let bytes = model.kv_shape().bytes_per_token();
        assert_eq!(bytes, 2 * 2 * 2 * of_head);
        let store = model.new_kv(BLOCKS, BLOCK_SIZE).unwrap();
        let pools = store.layers.iter().flat_map(|(k, v)| [k, v]);
        let held: usize = pools
            .map(|pool| pool.elem_count() * pool.dtype().size_in_bytes())
            .sum();
        assert_eq!(held, BLOCKS * BLOCK_SIZE * bytes);
    }
}

/// Also with pools of FP8, and of 128 values a head.
#[test]
fn steps_in_one_launch_have_the_bits_of_single_kernels() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let (tokens, cuts) = (tokens(122), [56, 1, 1, 1, 5, 5, 5, 16, 16, 16]);
    for (kind, head_dim) in [("llama", 64), ("qwen3", 128)] {
        let source = shape(folder.path(), kind, head_dim, &[]);
        for (dtype, kv) in [
            (DType::BF16, KvCacheDtype::Q8_0),
            (DType::F16, KvCacheDtype::Fp8),
        ] {
            let run = |one_launch: bool| {
                let options = LoadOptions {
                    one_launch,
                    ..options(&gpu, dtype, kv)
                };
                let before = Log::of_this_thread().len();
                let logits = logits(&mut *loaded(&source, options), &tokens, &cuts);
                (logits, Log::of_this_thread().split_off(before).join("\n"))
            };
            let ((want, _), (got, log)) = (run(false), run(true));
            assert!(log.contains("in_one: true"), "{kind}, {kv:?}: {log}");
            assert!(got == want, "{kind}, {kv:?}");
        }
    }
}

/// The type that a GPU computes in is accepted by its name, and is what auto is; others are refused in one line that says
/// what is accepted.
#[test]
fn a_gpu_takes_the_type_that_it_computes_in() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let (tokens, cuts) = (tokens(30), [20, 1, 9]);
    let all = [
        (DType::F32, KvCacheDtype::F32),
        (DType::F16, KvCacheDtype::F16),
        (DType::BF16, KvCacheDtype::Bf16),
    ];
    for (dtype, own) in all {
        let of = |asked| {
            let mut model = loaded(&source, options(&gpu, dtype, asked));
            assert_eq!(model.kv_shape().dtype, dtype);
            logits(&mut *model, &tokens, &cuts)
        };
        assert!(of(own) == of(KvCacheDtype::Auto), "{own:?}");
        for (other, asked) in all.into_iter().filter(|&(other, _)| other != dtype) {
            let asked = options(&gpu, dtype, asked);
            let named = format!("--kv-cache-dtype {}", other.as_str());
            let accepted = format!("auto, {}, q8_0 and fp8 are accepted", dtype.as_str());
            refused(&source, &asked, &[&named, &accepted]);
        }
    }
}

pub(super) fn refused(source: &ModelSource, options: &LoadOptions, parts: &[&str]) {
    let error = model_by(source, options).err().unwrap().to_string();
    for part in parts {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn what_is_no_whole_blocks_is_refused_in_one_line() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let latent = sources(folder.path()).swap_remove(0);
    for (source, found) in [
        (shape(folder.path(), "llama", 80, &[]), "heads of 80 values"),
        (latent, "latent vectors"),
    ] {
        let q8_0 = options(&gpu, DType::BF16, KvCacheDtype::Q8_0);
        refused(
            &source,
            &q8_0,
            &["--kv-cache-dtype q8_0", found, "auto and bf16 are accepted"],
        );
        loaded(&source, options(&gpu, DType::BF16, KvCacheDtype::Bf16));
    }
}
