//! Models that compute what others do, under other names.

use crate::architectures::{TOLERANCE, fixture};
use crate::common::read_json;
use crate::common::rig::distance;
use crate::common::tiny::*;
use candle_core::{DType, Device, Tensor};
use foretoken::model::{AdapterLoader, ModelSource, load};
use serde_json::{Value as Json, json};
use std::collections::HashMap;

/// In GGUF files, too, also in those that are older than the keys of the factors.
#[test]
fn minicpm_computes_what_granite_does() {
    let fixture = fixture("granite");
    let json = |name: &str| read_json(fixture.folder.join(name));
    let folder = tempfile::tempdir().unwrap();
    let of_folder = |config: &Json| {
        write_config(folder.path(), config);
        let file = "model.safetensors";
        std::fs::copy(fixture.folder.join(file), folder.path().join(file)).unwrap();
        logits(open(folder.path()).unwrap(), &fixture.prompt).concat()
    };
    let mut granite = json("config.json");
    let (layers, width) = (
        granite["num_hidden_layers"].as_f64(),
        granite["hidden_size"].as_f64(),
    );
    let residual = 1.4 / layers.unwrap().sqrt();
    for (key, value) in [
        ("attention_multiplier", 1. / 8f64.sqrt()),
        ("embedding_multiplier", 12.),
        ("logits_scaling", width.unwrap() / 256.),
        ("residual_multiplier", residual),
    ] {
        granite[key] = json!(value);
    }
    let expected = of_folder(&granite);
    let mut minicpm = granite.clone();
    let keys = minicpm.as_object_mut().unwrap();
    keys.retain(|key, _| !key.ends_with("_multiplier") && key != "logits_scaling");
    for (key, value) in [
        ("dim_model_base", 256.),
        ("scale_depth", 1.4),
        ("scale_emb", 12.),
    ] {
        minicpm[key] = json!(value);
    }
    minicpm["architectures"] = json!(["MiniCPMForCausalLM"]);
    minicpm["model_type"] = json!("minicpm");
    let far = distance(&of_folder(&minicpm), &expected);
    assert!(far < TOLERANCE, "{far}");

    let how = json("gguf.json").to_string().replace("granite", "minicpm");
    let mut how: Json = serde_json::from_str(&how).unwrap();
    let metadata = how["metadata"].as_object_mut().unwrap();
    let said = metadata.len();
    metadata.retain(|key, _| !key.ends_with("_scale") && !key.ends_with(".scale"));
    assert_eq!(metadata.len(), said - 4);
    let (_folder, file) = fixture.converted(&how);
    let far = distance(
        &logits(open(&file).unwrap(), &fixture.prompt).concat(),
        &expected,
    );
    assert!(far < TOLERANCE, "{far}");
}

/// It has other names in safetensors, and in GGUF files its rows are not reordered.
#[test]
fn exaone_3_5_computes_what_llama_does() {
    let fixture = fixture("llama");
    let json = |name: &str| read_json(fixture.folder.join(name));
    let folder = tempfile::tempdir().unwrap();
    let write = |config: &Json, tensors: &HashMap<String, Tensor>| {
        write_config(folder.path(), config);
        let file = folder.path().join("model.safetensors");
        candle_core::safetensors::save(tensors, file).unwrap();
        logits(open(folder.path()).unwrap(), &fixture.prompt).concat()
    };
    let has_bias = |name: &str| name.ends_with(".bias");
    let stored = fixture
        .stored()
        .into_iter()
        .filter(|(name, _)| !has_bias(name));
    let stored: HashMap<String, Tensor> = stored.collect();
    let mut llama = json("config.json");
    for key in ["attention_bias", "mlp_bias"] {
        llama[key] = json!(false);
    }
    let expected = write(&llama, &stored);

    let mut exaone = llama.clone();
    let keys = exaone.as_object_mut().unwrap();
    for (theirs, ours) in [
        ("hidden_act", "activation_function"),
        ("num_hidden_layers", "num_layers"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ] {
        let value = keys.remove(theirs).unwrap();
        keys.insert(ours.into(), value);
    }
    exaone["architectures"] = json!(["ExaoneForCausalLM"]);
    exaone["model_type"] = json!("exaone");
    let names = [
        ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
        ("model.layers", "transformer.h"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        ("self_attn.o_proj", "attn.attention.out_proj"),
        ("self_attn", "attn.attention"),
        ("gate_proj", "c_fc_0"),
        ("up_proj", "c_fc_1"),
        ("down_proj", "c_proj"),
    ];
    let renamed = stored.into_iter().map(|(name, tensor)| {
        let of = |name: String, (old, new): &(&str, &str)| name.replace(old, new);
        (names.iter().fold(name, of), tensor)
    });
    assert_eq!(write(&exaone, &renamed.collect()), expected);

    let how = json("gguf.json").to_string().replace("llama", "exaone");
    let mut how: Json = serde_json::from_str(&how).unwrap();
    let tensors = how["tensors"].as_object_mut().unwrap();
    tensors.retain(|name, _| !has_bias(name));
    for how in tensors.values_mut() {
        how["interleaved_heads"] = json!(0);
    }
    let (_folder, file) = fixture.converted(&how);
    let found = logits(open(&file).unwrap(), &fixture.prompt).concat();
    let far = distance(&found, &expected);
    assert!(far < TOLERANCE, "{far}");
}

/// The modules of an adapter have the names of the class.
#[test]
fn adapters_of_exaone_3_5_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "architectures": ["ExaoneForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2
    });
    write_config(folder.path(), &config);
    let source = ModelSource::Folder(folder.path().to_owned());
    let options = dummy();
    let model = load(&source, &options).unwrap();
    let adapter =
        json!({ "peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["out_proj"] });
    let file = folder.path().join("adapter_config.json");
    std::fs::write(file, adapter.to_string()).unwrap();
    let module = "base_model.model.transformer.h.1.attn.attention.out_proj";
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let tensors = HashMap::from([
        (format!("{module}.lora_A.weight"), zeros(&[2, 256])),
        (format!("{module}.lora_B.weight"), zeros(&[256, 2])),
    ]);
    let file = folder.path().join("adapter_model.safetensors");
    candle_core::safetensors::save(&tensors, file).unwrap();
    let target = model.lora_target().unwrap();
    assert!(target.load("x", folder.path(), 2).is_ok());
}

#[test]
fn solar_open_has_experts_in_all_layers_and_no_norms_of_heads() {
    let folder = tempfile::tempdir().unwrap();
    let solar = read_json(fixture("solar_open").folder.join("config.json"));
    for (key, value) in [
        ("first_k_dense_replace", json!(1)),
        ("use_qk_norm", json!(true)),
    ] {
        let mut other = solar.clone();
        other[key] = value;
        write_config(folder.path(), &other);
        let error = open(folder.path()).map(drop).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}

/// Its layers for further tokens are not read.
#[test]
fn mimo_computes_what_qwen2_does() {
    let fixture = fixture("qwen2");
    let folder = tempfile::tempdir().unwrap();
    let mut stored = fixture.stored();
    let mut of = |config: &Json, more: &[&str]| {
        for name in more {
            let other = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
            stored.insert((*name).to_owned(), other);
        }
        write_config(folder.path(), config);
        let file = folder.path().join("model.safetensors");
        candle_core::safetensors::save(&stored, file).unwrap();
        let model = open(folder.path()).map_err(|e| e.to_string())?;
        Ok::<_, String>(logits(model, &fixture.prompt))
    };
    let mut config = read_json(fixture.folder.join("config.json"));
    let expected = of(&config, &[]).unwrap();
    config["architectures"] = json!(["MiMoForCausalLM"]);
    config["model_type"] = json!("mimo");
    config["attention_bias"] = json!(true);
    config["num_nextn_predict_layers"] = json!(1);
    config["use_mrope"] = json!(false);
    let further = "model.mtp_layers.0.input_proj.weight";
    assert_eq!(of(&config, &[further]), Ok(expected));
    let error = of(&config, &["model.other.weight"]).unwrap_err();
    assert!(error.contains("model.other.weight"), "{error}");
    config["attention_bias"] = json!(false);
    let error = of(&config, &[]).unwrap_err();
    assert!(error.contains("attention_bias false"), "{error}");
}
