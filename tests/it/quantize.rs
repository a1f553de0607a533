//! `--quantize`: weights of safetensors become blocks when they are loaded.

use crate::common::process::{Server, foretoken};
use crate::common::sample;
use crate::common::tiny::*;
use crate::common::tiny_folder::{byte_level, tiny_folder};
use crate::convert::convert;
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use foretoken::model::{LoadFormat, LoadOptions, ModelSource, load};
use serde_json::{Value, json};

const KINDS: [GgmlDType; 8] = [
    GgmlDType::Q8_0,
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

#[test]
fn a_model_is_that_of_a_converted_file() {
    let folder = tiny_folder(byte_level());
    let source = ModelSource::resolve(folder.path().to_str().unwrap(), None, LoadFormat::Auto);
    let source = source.unwrap();
    let tokens = short_prompt(40);
    let plain = logits(open_as(folder.path(), None).unwrap(), &tokens);
    for kind in KINDS {
        let options = LoadOptions {
            quantize: Some(kind.into()),
            ..LoadOptions::default()
        };
        let got = logits(load(&source, &options).unwrap(), &tokens);
        let file = convert(folder.path(), kind).unwrap();
        assert_eq!(
            got,
            logits(open_as(&file, None).unwrap(), &tokens),
            "{kind:?}"
        );
        assert_ne!(got, plain, "{kind:?}");
    }
    // A value that no scale of 16 bits can have.
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut all = tensors(16, DType::F32);
    all.insert(name.into(), (&all[name] * 1e9).unwrap());
    write_shards(folder.path(), &all);
    let options = LoadOptions {
        quantize: Some(GgmlDType::Q4_0.into()),
        ..LoadOptions::default()
    };
    let error = load(&source, &options).err().unwrap().to_string();
    assert!(
        error.contains(name) && error.contains("too large for Q4_0"),
        "{error}"
    );
}

/// The body of an answer, which may be sent in chunks: each has its length, in hexadecimal digits, before it.
fn body(answer: &str) -> String {
    let (head, mut rest) = answer.split_once("\r\n\r\n").unwrap();
    if !head.to_lowercase().contains("transfer-encoding: chunked") {
        return rest.to_owned();
    }
    let mut body = String::new();
    while let Some((len, after)) = rest.split_once("\r\n") {
        let len = usize::from_str_radix(len, 16).unwrap();
        body += &after[..len];
        rest = after[len..].trim_start_matches("\r\n");
    }
    body
}

/// The text of a server's answer and the log-probabilities of its tokens.
fn answer(server: &Server) -> (String, Value) {
    let request = json!({
        "prompt": "hello 12 he", "max_tokens": 24, "temperature": 0, "logprobs": 2, "ignore_eos": true
    });
    let answer = server.post("/v1/completions", &request.to_string());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let body: Value = serde_json::from_str(&body(&answer)).unwrap();
    let choice = &body["choices"][0];
    let text = choice["text"].as_str().unwrap().to_owned();
    (text, choice["logprobs"]["token_logprobs"].clone())
}

#[test]
fn a_server_answers_with_the_quantized_model_and_draft() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().display();
    let ask = |flags: &str| answer(&Server::start(flags));
    let plain = ask(&format!("--model {path}"));
    let quantized = ask(&format!("--model {path} --quantize q4_k"));
    assert_ne!(quantized.1, plain.1);
    let file = convert(folder.path(), GgmlDType::Q4K).unwrap();
    let file = file.display();
    // Its tokenizer has names for ids that the folder's lacks.
    assert_eq!(ask(&format!("--model {file}")).1, quantized.1);
    // A draft of the folder has the same weights then; one of a file is quantized already.
    for draft in [path.to_string(), file.to_string()] {
        let flags = format!("--model {path} --draft-model {draft} --quantize q4_k");
        let server = Server::start(&format!("{flags} --spec-budget fixed"));
        assert_eq!(answer(&server), quantized);
        if draft == file.to_string() {
            continue;
        }
        let metrics = server.get("/metrics");
        let metric = |name: &str| sample(&metrics, name);
        let drafted = metric("foretoken:spec_decode_num_draft_tokens_total");
        let accepted = metric("foretoken:spec_decode_num_accepted_tokens_total");
        assert!(
            0. < accepted && 2. * accepted >= drafted,
            "{accepted} of {drafted}"
        );
    }
    // The target is quantized already, and its draft changes no bit of what it says.
    let draft = format!("--model {file} --draft-model {path} --quantize q8_0");
    assert_eq!(ask(&draft).1, quantized.1);
}

#[test]
fn what_has_no_effect_is_refused() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().display().to_string();
    let file = convert(folder.path(), GgmlDType::Q8_0).unwrap();
    let file = file.to_str().unwrap();
    let run = |args: &[&str]| {
        let output = foretoken().args(args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (
            output.status.code(),
            said + &String::from_utf8(output.stdout).unwrap(),
        )
    };
    for command in [&["check"][..], &["serve", "--model"]] {
        let (code, said) = run(&[command, &[file, "--quantize", "q4_0"]].concat());
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("--quantize Q4_0 has no effect on"), "{said}");
    }
    let (code, said) = run(&["--model", &path, "--quantize", "iq4_nl"]);
    assert!(code == Some(2) && said.contains("q4_k"), "{said}");
    let (code, said) = run(&["check", &path, "--quantize", "q6_k", "--json"]);
    assert_eq!(code, Some(0), "{said}");
    let json: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(json["weights_types"], json!({"Q6_K": 15, "f32": 5}));
}
