use super::*;
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::weights::dtypes::Dtypes;
use crate::weights::inventory::SharedInventory;
use crate::weights::{Stack, StackForm};
use candle_core::safetensors::MmapedSafetensors;
use foretoken_core::kv::{BlockAllocator, BlockTable};
use foretoken_core::model::{Batch, Model};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The checkpoints of scripts/make-packed-fixtures.py.
fn fixtures() -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/packed");
    let folders = std::fs::read_dir(all).unwrap();
    let mut folders: Vec<_> = folders.map(|folder| folder.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() > 15);
    folders
}

fn open(folder: &Path, matrices: Option<DType>) -> (ModelConfig, Weights) {
    let dtypes = Dtypes {
        matrices,
        ..Dtypes::all(DType::F32)
    };
    let config = ModelConfig::from_json(folder).unwrap();
    let weights = Weights::safetensors(folder, dtypes, &Device::Cpu).unwrap();
    let weights = weights.packed(config.packed.clone(), DType::BF16);
    (config, weights)
}

/// Outputs and inputs of a matrix, of which the outputs are known.
fn shape_of(config: &ModelConfig, name: &str, outputs: usize) -> (usize, usize) {
    let experts = config.spec.layers[0].experts();
    let width = experts.map_or(config.intermediate_size, |experts| experts.width);
    let inputs = match name.rsplit('.').next().unwrap() {
        "down_proj" => width,
        "o_proj" => config.num_heads * config.head_dim,
        _ => config.hidden_size,
    };
    (outputs, inputs)
}

/// The matrices that are packed, and the products that they have with the vector of the script.
fn checks(folder: &Path) -> BTreeMap<String, Vec<f64>> {
    let file = folder.join("expected.safetensors");
    let all = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let checks = all.into_iter().filter_map(|(name, product)| {
        let name = name.strip_suffix(".check")?.to_owned();
        Some((name, product.to_vec1().unwrap()))
    });
    checks.collect()
}

/// All values, whatever the format: no weight is rounded, neither in blocks nor in f32. Only NVFP4 has a factor of its scales
/// that is rounded, the reciprocal of the stored one.
#[test]
fn every_matrix_has_the_values_that_its_format_defines() {
    for folder in fixtures() {
        let (config, mut weights) = open(&folder, Some(DType::F32));
        for (name, want) in checks(&folder) {
            let shape = shape_of(&config, &name, want.len());
            let matrix = weights.packed_matrix(&name, shape, None).unwrap().unwrap();
            let rows = matrix.dequantize().unwrap().to_vec2::<f32>().unwrap();
            for (row, want) in rows.iter().zip(want) {
                let product = row
                    .iter()
                    .enumerate()
                    .map(|(i, &value)| f64::from(value) * (((i * 37 + 11) % 101) as f64 - 50.));
                let found: f64 = product.sum();
                let what = folder.display();
                let allowed = match &*matrix.format() {
                    "NVFP4" => 1e-5,
                    _ => 1e-10,
                };
                assert!(
                    (found - want).abs() < allowed,
                    "{what}: {name}: {found}, {want}"
                );
            }
        }
    }
}

/// Every matrix is loaded in the form that `check` forecasts.
#[test]
fn headers_tell_the_form_of_every_matrix() {
    let mut forms = BTreeMap::new();
    for folder in fixtures() {
        let (config, mut weights) = open(&folder, None);
        let shared = SharedInventory::default();
        let mut headers = open(&folder, None).1.headers_only(Some(&shared));
        let mut own = Vec::new();
        for (name, product) in checks(&folder) {
            let shape = shape_of(&config, &name, product.len());
            let matrix = weights.packed_matrix(&name, shape, None).unwrap().unwrap();
            let unread = headers.packed_matrix(&name, shape, None).unwrap().unwrap();
            // The tiles of Q5_0 are those of Q5_1.
            let forecast = unread.format().replace("Q5_0", "Q5_1");
            assert_eq!(matrix.format(), forecast, "{}: {name}", folder.display());
            own.push(matrix.format());
        }
        own.sort();
        own.dedup();
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        forms.insert(name, own.join(", "));
    }
    let form = |name: &str| forms[name].as_str();
    for (name, want) in [
        ("awq", "Q5_0"),
        ("awq_groups_of_16", "bf16"),
        ("fp8_blocks", "f8e4m3"),
        ("gptq", "Q4_0"),
        ("gptq_8_bits", "Q8_0"),
        ("gptq_asymmetric", "Q5_0"),
        ("gptq_ordered", "Q4_0"),
        ("mxfp4", "MXFP4"),
        ("nf4", "bf16"),
        ("nvfp4", "NVFP4"),
        ("w4a16", "Q4_0"),
        ("w8a16", "Q8_0"),
        ("w8a16_asymmetric", "bf16"),
        ("w8a8", "Q8_0"),
    ] {
        assert_eq!(form(name).replace("Q5_1", "Q5_0"), want, "{name}");
    }
}

/// Outputs in another order have the rows of the order.
#[test]
fn outputs_may_be_in_another_order() {
    for folder in fixtures() {
        let (config, mut weights) = open(&folder, Some(DType::F32));
        let (name, product) = checks(&folder).pop_last().unwrap();
        let shape = shape_of(&config, &name, product.len());
        let order: Vec<u32> = (0..shape.0 as u32).rev().collect();
        let mut read = |order: Option<&[u32]>| {
            let matrix = weights.packed_matrix(&name, shape, order).unwrap().unwrap();
            matrix.dequantize().unwrap().to_vec2::<f32>().unwrap()
        };
        let (mut rows, reversed) = (read(None), read(Some(&order)));
        rows.reverse();
        assert_eq!(rows, reversed, "{}", folder.display());
    }
}

/// The checkpoint with every matrix as it is unpacked, in f32, whose products round nothing to 8 bits.
fn dense(folder: &Path) -> (ModelConfig, Weights) {
    let (mut config, mut weights) = open(folder, Some(DType::F32));
    let mut tensors = HashMap::new();
    let checks = checks(folder);
    // SAFETY: nobody writes fixtures while tests run.
    let files = unsafe { MmapedSafetensors::new(folder.join("model.safetensors")) }.unwrap();
    for (name, stored) in files.tensors() {
        let is_part = checks
            .keys()
            .any(|module| name.starts_with(&format!("{module}.")));
        let is_plain = format!("{:?}", stored.dtype()) == "BF16";
        if is_plain && (!is_part || name.ends_with(".bias")) {
            tensors.insert(name.clone(), files.load(&name, &Device::Cpu).unwrap());
        }
    }
    for (name, product) in &checks {
        let shape = shape_of(&config, name, product.len());
        let matrix = weights.packed_matrix(name, shape, None).unwrap().unwrap();
        tensors.insert(format!("{name}.weight"), matrix.dequantize().unwrap());
    }
    let other = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(&tensors, other.path().join("model.safetensors")).unwrap();
    config.packed = None;
    let dtypes = weights.dtypes();
    let weights = Weights::safetensors(other.path(), dtypes, &Device::Cpu).unwrap();
    (config, weights)
}

/// Unpacked matrices compute what transformers computes. Blocks differ from it only by their activations.
#[test]
fn unpacked_matrices_have_the_log_probabilities_of_transformers() {
    for folder in fixtures() {
        let (config, weights) = dense(&folder);
        let mut decoder = Decoder::load(config, weights, || ()).unwrap();
        let file = folder.join("expected.safetensors");
        let expected = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        let ids = |name: &str| {
            let ids = expected[name].to_dtype(DType::U32).unwrap();
            ids.to_vec1::<u32>().unwrap()
        };
        let prompt = ids("prompt");
        let (mut kv, mut blocks) = (decoder.new_kv(8, 16).unwrap(), BlockAllocator::new(8, 16));
        let (mut table, mut batch) = (BlockTable::default(), Batch::default());
        blocks.reserve(&mut table, prompt.len()).unwrap();
        batch.push_span(&prompt, &[], 0, &table, 16);
        batch.logits = ids("rows");
        let logits = decoder.forward(&batch, &mut kv).unwrap().logits;
        let logits = logits.to_vec2::<f32>().unwrap();
        let wanted = expected["logprobs"].to_vec2::<f32>().unwrap();
        for (logits, wanted) in logits.iter().zip(wanted) {
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            for (&logit, want) in logits.iter().zip(wanted) {
                let far = f64::from(logit) - sum.ln() - f64::from(want);
                assert!(far.abs() < 1e-4, "{}: {far}", folder.display());
            }
        }
    }
}

/// On a GPU with `--dtype f16`, where products of many rows would have infinite weights.
#[test]
fn mxfp4_that_f16_does_not_have_is_refused_by_name() {
    let dtypes = |dtype| Dtypes {
        on_gpu: true,
        ..Dtypes::all(dtype)
    };
    let mxfp4 = fixtures()
        .into_iter()
        .find(|folder| folder.ends_with("mxfp4"));
    let config = ModelConfig::from_json(&mxfp4.unwrap()).unwrap();
    let (packed, stacked) = (
        "model.layers.0.mlp.up_proj",
        "model.layers.0.experts.up_proj",
    );
    let name = |module: &str, end: &str| format!("{module}{end}");
    let bytes = |value: u8, dims: &[usize]| {
        let values = vec![value; dims.iter().product()];
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    };
    // 6 times 2 to the power of 13 and of 14.
    for (exponent, dtype, is_taken) in [
        (140, DType::F16, true),
        (141, DType::F16, false),
        (141, DType::BF16, true),
    ] {
        let sixes = 0x77;
        let tensors = HashMap::from([
            (name(packed, ".weight_packed"), bytes(sixes, &[16, 32])),
            (name(packed, ".weight_scale"), bytes(exponent, &[16, 2])),
            (name(stacked, "_blocks"), bytes(sixes, &[2, 16, 2, 16])),
            (name(stacked, "_scales"), bytes(exponent, &[2, 16, 2])),
        ]);
        let folder = tempfile::tempdir().unwrap();
        candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
        let weights = Weights::safetensors(folder.path(), dtypes(dtype), &Device::Cpu).unwrap();
        let mut weights = weights.packed(config.packed.clone(), DType::BF16);
        let matrix = weights.packed_matrix(packed, (16, 64), None);
        let matrices = weights.matrices(&Stack {
            name: stacked,
            count: 2,
            shape: (16, 64),
            form: StackForm::Mxfp4,
            order: None,
        });
        let errors = [matrix.err(), matrices.err()].map(|error| error.map(|e| e.to_string()));
        let wanted = [name(packed, ".weight"), name(stacked, "_blocks")];
        for (error, name) in errors.into_iter().zip(wanted) {
            let want = format!(
                "tensor {name} has values above 65504, which f16 does not have: --dtype bf16 takes them"
            );
            assert_eq!(error, (!is_taken).then_some(want), "{exponent} {dtype:?}");
        }
    }
}
