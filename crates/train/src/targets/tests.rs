//! Packing, and that the number of rows in a forward changes no bit.

use super::*;
use crate::features::{FeatureShape, Precision};
use candle_core::DType;
use foretoken_core::kv::{BlockAllocator, BlockTable};
use foretoken_core::model::{Batch, Taps};
use foretoken_kernels::sample::top_logits;
use foretoken_model::{LoadFormat, LoadOptions, LoadedModel, ModelSource, load};

/// The distribution of `logits`, packed.
fn packed(logits: &[f32], k: usize) -> Vec<u8> {
    let logits = Tensor::from_slice(logits, (1, logits.len()), &Device::Cpu).unwrap();
    pack(&top_logits(&logits, k).unwrap().read().unwrap()[0])
}

#[test]
fn a_position_survives_packing() {
    let logits: Vec<f32> = (0..50)
        .map(|i| ((i * 13 % 50) as f32).sqrt() * 2.0)
        .collect();
    let sum: f64 = logits.iter().map(|&z| f64::from(z).exp()).sum();
    for k in [1, 7, 50] {
        let bytes = packed(&logits, k);
        assert_eq!(bytes.len(), 6 * k + 4);
        let (mut ids, mut probs) = (Vec::new(), Vec::new());
        let tail = unpack(&bytes, k, &mut ids, &mut probs);
        assert!(ids.is_sorted_by_key(|&id| -logits[id as usize]));
        let mut mass = f64::from(tail);
        for (&id, &p) in ids.iter().zip(&probs) {
            let exact = f64::from(logits[id as usize]).exp() / sum;
            // f16 stores logarithms down to -16 with an error of up to 1/256.
            assert!((f64::from(p) - exact).abs() < 5e-3 * exact, "{p} {exact}");
            mass += f64::from(p);
        }
        assert!((mass - 1.0).abs() < 1e-5, "{mass}");
        assert!(k < 50 || tail == 0.0);
    }
}

#[test]
fn the_lower_of_equally_probable_ids_is_first() {
    let bytes = packed(&[1.0, 2.0, 2.0, 2.0], 2);
    let (mut ids, mut probs) = (Vec::new(), Vec::new());
    unpack(&bytes, 2, &mut ids, &mut probs);
    assert_eq!(ids, [1, 2]);
}

const VOCAB: usize = 90;
const LEN: usize = 21;
const TAPS: [usize; 2] = [0, 2];

/// A Llama with random weights.
fn target(folder: &Path) -> Box<dyn LoadedModel> {
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let options = LoadOptions {
        format: LoadFormat::Dummy,
        seed: 7,
        ..LoadOptions::default()
    };
    load(&ModelSource::Folder(folder.to_owned()), &options).unwrap()
}

fn rows() -> Vec<Row> {
    let row = |n: usize| Row {
        tokens: (0..=LEN)
            .map(|i| ((i * i * 7 + i * n * 5 + n) % VOCAB) as u32)
            .collect(),
        counted: vec![true; LEN],
    };
    (0..11).map(row).collect()
}

/// The logits and hidden states of one row, token by token: each in a forward of its own.
fn token_by_token(target: &mut dyn Model, row: &Row) -> (Vec<Vec<f32>>, Vec<f32>) {
    const BLOCK: usize = 16;
    let blocks = LEN.div_ceil(BLOCK);
    let mut kv = target.new_kv(blocks, BLOCK).unwrap();
    let mut table = BlockTable::default();
    let mut free = BlockAllocator::new(blocks, BLOCK);
    free.reserve(&mut table, LEN).unwrap();
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    for at in 0..LEN {
        let mut batch = Batch::default();
        batch.push_span(&row.tokens[at..=at], &[], at, &table, BLOCK);
        batch.logits = vec![0];
        batch.taps = Some(Taps {
            layers: TAPS.to_vec(),
            rows: vec![0],
        });
        let output = target.forward(&batch, &mut kv).unwrap();
        logits.push(output.read(<[f32]>::to_vec).unwrap());
        let states = output.tapped.unwrap().to_dtype(DType::F32).unwrap();
        hidden.extend(states.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    }
    (logits, hidden)
}

#[test]
fn rows_in_a_forward_change_no_bit_of_what_is_stored() {
    const K: usize = 5;
    let folder = tempfile::tempdir().unwrap();
    let mut target = target(folder.path());
    let rows = rows();
    let identity = Identity {
        model: "m".into(),
        revision: None,
        vocab_size: VOCAB,
        corpus: 1,
        rows: rows.len(),
        seq_len: LEN,
        top_k: K,
    };
    let shape = FeatureShape {
        rows: identity.clone(),
        taps: TAPS.to_vec(),
        hidden_size: 32,
        precision: Precision::F16,
    };
    let stored = |folder: &Path| {
        let bytes = |name| std::fs::read(folder.join(name)).unwrap();
        (bytes("targets.bin"), bytes("features-00000.bin"))
    };

    let alone = tempfile::tempdir().unwrap();
    let mut features = FeatureStore::open(alone.path(), shape.clone(), false).unwrap();
    let mut targets = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        let (logits, hidden) = token_by_token(&mut *target, row);
        targets.extend(logits.iter().flat_map(|logits| packed(logits, K)));
        features.write(number, &hidden).unwrap();
    }
    std::fs::write(alone.path().join("targets.bin"), targets).unwrap();

    // Parts of a row, one row, some rows with fewer in the last forward, and all. The second time the first rows are
    // there already.
    for tokens in [5, LEN, 3 * LEN + 4, 1000] {
        let together = tempfile::tempdir().unwrap();
        for known in [0, 2] {
            if known > 0 {
                let file = together.path().join("targets.bin");
                let file = std::fs::OpenOptions::new().write(true).open(file);
                let len = known * identity.row_bytes() + 3;
                file.unwrap().set_len(len as u64).unwrap();
            }
            let (folder, reuse) = (together.path(), known > 0);
            let mut features = FeatureStore::open(folder, shape.clone(), reuse).unwrap();
            let mut soft = SoftTargets::open(folder, identity.clone(), reuse).unwrap();
            let missing = &rows[rows.len() - soft.missing(Some(&features))..];
            let wanted = Wanted {
                top_k: K,
                taps: TAPS.to_vec(),
            };
            let sizes = (missing.len(), LEN);
            let pass = TargetPass::new(&mut *target, sizes, tokens, wanted).unwrap();
            let mut done = known;
            soft.store(pass, missing, Some(&mut features), || done += 1)
                .unwrap();
            assert_eq!(done, rows.len());
            assert!(stored(folder) == stored(alone.path()), "{tokens} tokens");
        }
    }
    // As many as there are on the CPU.
    let together = tempfile::tempdir().unwrap();
    let mut features = FeatureStore::open(together.path(), shape, false).unwrap();
    let mut soft = SoftTargets::open(together.path(), identity, false).unwrap();
    soft.compute(&mut *target, &rows, Some(&mut features), || ())
        .unwrap();
    assert!(stored(together.path()) == stored(alone.path()));
}
