//! EAGLE heads: the published layouts, computed as an independent implementation does, in every kind of file.

use crate::common::plain::{add, attend, linear, matrix, rms_norm, rope, swiglu};
use crate::common::process::{foretoken, stdout_of};
use crate::common::tiny::{
    self, HEADS, HIDDEN, KV_HEADS, MLP, Tensors, VOCAB, noise, short_prompt,
};
use crate::taps::plain;
use candle_core::{DType, Device, Tensor};
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::LoadedModel;
use foretoken::model::{Batch, Head as DraftHead, HeadKind, LoadOptions, ModelSource, load_head};
use serde_json::{Value as Json, json};
use std::path::Path;

const HEAD_DIM: usize = 16;
const EPS: f64 = 1e-5;
const THETA: f64 = 10000.0;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Layout {
    /// SafeAI Lab's EAGLE-3, with a reduced vocabulary.
    Eagle3,
    /// The speculators library's EAGLE-3, with an embedding of its own.
    Speculators,
    /// EAGLE-1 and 2.
    Eagle1,
}

pub const LAYOUTS: [Layout; 3] = [Layout::Eagle3, Layout::Speculators, Layout::Eagle1];

/// A head's checkpoint, and what the reference computes with.
pub struct Head {
    layout: Layout,
    config: Json,
    tensors: Tensors,
    /// Ids of the output layer.
    ids: Vec<u32>,
}

impl Head {
    pub fn new(layout: Layout) -> Self {
        let mut tensors = Tensors::new();
        let mut add = |name: &str, dims: &[usize]| {
            tensors.insert(name.into(), noise(&format!("head.{name}"), dims));
        };
        let at = |part: &str| match layout {
            Layout::Eagle3 => format!("midlayer.{part}.weight"),
            _ => format!("layers.0.{part}.weight"),
        };
        let inputs = match layout {
            Layout::Eagle1 => HIDDEN,
            _ => 2 * HIDDEN,
        };
        add(&at("self_attn.q_proj"), &[HEADS * HEAD_DIM, inputs]);
        add(&at("self_attn.k_proj"), &[KV_HEADS * HEAD_DIM, inputs]);
        add(&at("self_attn.v_proj"), &[KV_HEADS * HEAD_DIM, inputs]);
        add(&at("self_attn.o_proj"), &[HIDDEN, HEADS * HEAD_DIM]);
        add(&at("post_attention_layernorm"), &[HIDDEN]);
        add(&at("mlp.gate_proj"), &[MLP, HIDDEN]);
        add(&at("mlp.up_proj"), &[MLP, HIDDEN]);
        add(&at("mlp.down_proj"), &[HIDDEN, MLP]);
        let mut ids: Vec<u32> = (0..VOCAB as u32).collect();
        if layout == Layout::Eagle1 {
            add("fc.weight", &[HIDDEN, 2 * HIDDEN]);
            add("fc.bias", &[HIDDEN]);
        } else {
            ids.retain(|id| id % 3 != 1);
            add("fc.weight", &[HIDDEN, 3 * HIDDEN]);
            add(&at("input_layernorm"), &[HIDDEN]);
            add(&at("hidden_norm"), &[HIDDEN]);
            add("norm.weight", &[HIDDEN]);
            add("lm_head.weight", &[ids.len(), HIDDEN]);
            let offsets: Vec<i64> = (0..).zip(&ids).map(|(i, &id)| i64::from(id) - i).collect();
            let known: Vec<u8> = (0..VOCAB as u32).map(|id| u8::from(id % 3 != 1)).collect();
            tensors.insert("d2t".into(), Tensor::new(offsets, &Device::Cpu).unwrap());
            tensors.insert("t2d".into(), Tensor::new(known, &Device::Cpu).unwrap());
        }
        if layout == Layout::Speculators {
            let own = noise("head.embed_tokens", &[VOCAB, HIDDEN]);
            tensors.insert("embed_tokens.weight".into(), own);
        }
        let shape = json!({
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": MLP,
            "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "rope_theta": THETA,
            "max_position_embeddings": 64, "model_type": "llama", "hidden_act": "silu"
        });
        let config = match layout {
            Layout::Eagle3 => {
                let mut config = shape;
                config["architectures"] = json!(["LlamaForCausalLMEagle3"]);
                config["draft_vocab_size"] = ids.len().into();
                config["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]});
                config
            }
            Layout::Speculators => json!({
                "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
                "draft_vocab_size": ids.len(), "norm_before_residual": true,
                "target_hidden_size": null, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
                "transformer_layer_config": shape
            }),
            Layout::Eagle1 => {
                let mut config = shape;
                config["architectures"] = json!(["LlamaForCausalLM"]);
                config
            }
        };
        Self {
            layout,
            config,
            tensors,
            ids,
        }
    }

    /// Its files in a folder.
    pub fn write(&self) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        tiny::write_config(folder.path(), &self.config);
        candle_core::safetensors::save(&self.tensors, folder.path().join("model.safetensors"))
            .unwrap();
        folder
    }

    /// The head as the server loads it.
    pub fn load(&self) -> Box<dyn DraftHead> {
        let folder = self.write();
        open_head(folder.path(), &*target()).unwrap()
    }

    pub fn taps(&self) -> Vec<usize> {
        match self.layout {
            Layout::Eagle1 => vec![2],
            _ => vec![0, 1, 2],
        }
    }

    fn weight(&self, name: &str) -> Vec<Vec<f64>> {
        let layer = match self.layout {
            Layout::Eagle3 => "midlayer",
            _ => "layers.0",
        };
        let tensor = &self.tensors[&format!("{}.weight", name.replace("LAYER", layer))];
        matrix(tensor)
    }

    /// The reference: features from the target's hidden states of one position.
    fn fuse(&self, hidden: &[f32]) -> Vec<f64> {
        let hidden: Vec<f64> = hidden.iter().map(|&x| f64::from(x)).collect();
        match self.layout {
            Layout::Eagle1 => {
                let norm = &target_tensors()["model.norm.weight"];
                rms_norm(&hidden, &matrix(norm)[0], EPS)
            }
            _ => linear(&self.weight("fc"), &hidden),
        }
    }

    /// The reference: the rows of `tokens`, whose hidden states but the last's are `hidden`: each has a token
    /// and the features of the position before it.
    pub fn rows(&self, tokens: &[u32], hidden: &[Vec<f32>]) -> Vec<(u32, Vec<f64>)> {
        let rows = tokens[1..].iter().zip(hidden);
        rows.map(|(&token, hidden)| (token, self.fuse(hidden)))
            .collect()
    }

    /// The reference: logits over the vocabulary and the outputs of all rows, each with its token and
    /// features. Row 0 is at position 0.
    pub fn forward(&self, rows: &[(u32, Vec<f64>)]) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let target = target_tensors();
        let embeddings = match self.layout {
            Layout::Speculators => self.weight("embed_tokens"),
            _ => matrix(&target["model.embed_tokens.weight"]),
        };
        let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = Default::default();
        let (mut logits, mut outputs) = (Vec::new(), Vec::new());
        for (position, (token, features)) in rows.iter().enumerate() {
            let embedded = &embeddings[*token as usize];
            let (residual, read) = match self.layout {
                Layout::Eagle1 => {
                    let both = [&embedded[..], features].concat();
                    let bias = &matrix(&self.tensors["fc.bias"])[0];
                    let x = add(&linear(&self.weight("fc"), &both), bias);
                    (x.clone(), x)
                }
                _ => {
                    let norm = |x: &[f64], name: &str| rms_norm(x, &self.weight(name)[0], EPS);
                    let embedded = norm(embedded, "LAYER.input_layernorm");
                    let normed = norm(features, "LAYER.hidden_norm");
                    let residual = match self.layout {
                        Layout::Speculators => normed.clone(),
                        _ => features.clone(),
                    };
                    (residual, [embedded, normed].concat())
                }
            };
            let part = |name: &str| linear(&self.weight(&format!("LAYER.self_attn.{name}")), &read);
            let q = rope(&part("q_proj"), HEAD_DIM, THETA, position);
            keys.push(rope(&part("k_proj"), HEAD_DIM, THETA, position));
            values.push(part("v_proj"));
            let attended = attend(&q, HEAD_DIM, HEADS / KV_HEADS, &keys, &values);
            let x = add(
                &residual,
                &linear(&self.weight("LAYER.self_attn.o_proj"), &attended),
            );
            let normed = rms_norm(&x, &self.weight("LAYER.post_attention_layernorm")[0], EPS);
            let gate = linear(&self.weight("LAYER.mlp.gate_proj"), &normed);
            let up = linear(&self.weight("LAYER.mlp.up_proj"), &normed);
            let wide = swiglu(&gate, &up);
            let x = add(&x, &linear(&self.weight("LAYER.mlp.down_proj"), &wide));
            let row = match self.layout {
                Layout::Eagle1 => linear(&matrix(&target["model.embed_tokens.weight"]), &x),
                _ => linear(
                    &self.weight("lm_head"),
                    &rms_norm(&x, &self.weight("norm")[0], EPS),
                ),
            };
            let mut over_all = vec![f64::NEG_INFINITY; VOCAB];
            for (&id, logit) in self.ids.iter().zip(row) {
                over_all[id as usize] = logit;
            }
            logits.push(over_all);
            outputs.push(x);
        }
        (logits, outputs)
    }
}

fn target_tensors() -> Tensors {
    tiny::tensors(HEAD_DIM, DType::F32)
}

pub fn target() -> Box<dyn LoadedModel> {
    let folder = tempfile::tempdir().unwrap();
    tiny::write_config(folder.path(), &tiny::llama_config(HEAD_DIM));
    tiny::write_shards(folder.path(), &target_tensors());
    tiny::open(folder.path()).unwrap()
}

fn open_head(
    folder: &Path,
    target: &dyn LoadedModel,
) -> Result<Box<dyn DraftHead>, foretoken::error::Error> {
    let source = ModelSource::Folder(folder.to_owned());
    let kind = HeadKind::of(&source)?.expect("a head is recognized");
    let options = LoadOptions::of(DType::F32);
    load_head(&source, kind, &options, target)
}

pub fn hidden_states(head: &Head, tokens: &[u32]) -> Vec<Vec<f32>> {
    plain(target(), tokens, &head.taps()).0
}

pub fn argmax(logits: &[f64]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap() as u32
}

/// Rows of the target's tokens, then rows that continue with the head's own outputs.
#[test]
fn every_layout_computes_what_its_paper_says() {
    for layout in LAYOUTS {
        let head = Head::new(layout);
        let tokens = short_prompt(9);
        let hidden = hidden_states(&head, &tokens);
        let mut rows = head.rows(&tokens, &hidden);

        let mut model = head.load();
        assert_eq!(model.reads(), head.taps());
        let (mut kv, mut table) = (model.new_kv(8, 4).unwrap(), BlockTable::default());
        BlockAllocator::new(8, 4).reserve(&mut table, 20).unwrap();
        let taps = Tensor::new(hidden[..8].to_vec(), &Device::Cpu).unwrap();
        let mut features = model.fuse(&taps).unwrap();
        let mut context = 0;
        for _ in 0..4 {
            let new: Vec<u32> = rows[context..].iter().map(|row| row.0).collect();
            let mut batch = Batch::default();
            batch.push_span(&new, &[], context, &table, 4);
            batch.features = Some(features);
            batch.logits = (0..new.len() as u32).collect();
            let output = model.forward(&batch, &mut kv).unwrap();
            let (logits, outputs) = head.forward(&rows);
            let found = output.logits.to_vec2::<f32>().unwrap();
            for (found, wanted) in found.iter().zip(&logits[context..]) {
                let finite = wanted.iter().filter(|logit| logit.is_finite());
                let scale = finite.fold(1.0, |max: f64, logit| max.max(logit.abs()));
                for (&found, &wanted) in found.iter().zip(wanted) {
                    let is_near = (f64::from(found) - wanted).abs() < 1e-4 * scale;
                    assert!(
                        is_near || f64::from(found) == wanted,
                        "{layout:?}: {found} {wanted}"
                    );
                }
            }
            let own = output.features.unwrap();
            features = own.narrow(0, new.len() - 1, 1).unwrap();
            context += new.len();
            rows.push((argmax(&logits[context - 1]), outputs[context - 1].clone()));
        }
    }
}

/// The logits of `model`, a copy of `head`, after all but the first of some tokens.
fn logits_of(head: &Head, mut model: Box<dyn DraftHead>) -> Vec<Vec<f32>> {
    assert_eq!(model.reads(), head.taps());
    let tokens = short_prompt(7);
    let hidden = hidden_states(head, &tokens);
    let hidden = Tensor::new(hidden[..6].to_vec(), &Device::Cpu).unwrap();
    let (mut kv, mut table) = (model.new_kv(8, 4).unwrap(), BlockTable::default());
    BlockAllocator::new(8, 4).reserve(&mut table, 6).unwrap();
    let mut batch = Batch::default();
    batch.push_span(&tokens[1..], &[], 0, &table, 4);
    batch.features = Some(model.fuse(&hidden).unwrap());
    batch.logits = (0..6).collect();
    let output = model.forward(&batch, &mut kv).unwrap();
    output.logits.to_vec2::<f32>().unwrap()
}

/// A GGUF file has the same head, and a smaller one that is nearly the same.
#[test]
fn a_head_becomes_a_gguf_file() {
    for layout in [Layout::Eagle3, Layout::Speculators] {
        let head = Head::new(layout);
        let folder = head.write();
        let wanted = logits_of(&head, head.load());
        for (kind, tolerance) in [("f32", 0.0), ("q8_0", 0.05)] {
            let file = folder.path().join(format!("{kind}.gguf"));
            let converted = foretoken()
                .args(["convert", "--type", kind, "--model"])
                .arg(folder.path())
                .arg("--out")
                .arg(&file)
                .output()
                .unwrap();
            stdout_of(&converted);
            let source = ModelSource::Gguf(file.into());
            assert_eq!(HeadKind::of(&source).unwrap(), Some(HeadKind::Eagle3));
            let options = LoadOptions::of(DType::F32);
            let model = load_head(&source, HeadKind::Eagle3, &options, &*target()).unwrap();
            let found = logits_of(&head, model);
            let both = found.iter().flatten().zip(wanted.iter().flatten());
            for (found, wanted) in both.filter(|(_, wanted)| wanted.is_finite()) {
                let scale = wanted.abs().max(100.0);
                assert!(
                    (found - wanted).abs() <= tolerance * scale,
                    "{kind} {found} {wanted}"
                );
            }
            let error = foretoken::model::load(&source, &options).err().unwrap();
            assert!(error.to_string().contains("--draft-model"), "{error}");
        }
    }
}

/// Writes `tensors` as `torch.save` does: a zip file with `data.pkl` and the tensors' bytes.
pub fn write_pytorch(file: &Path, tensors: &Tensors, change: impl Fn(&mut Vec<u8>)) {
    use std::io::Write;
    use zip::write::SimpleFileOptions;
    let mut zip = zip::ZipWriter::new(std::fs::File::create(file).unwrap());
    let options = SimpleFileOptions::default();
    let string = |pickle: &mut Vec<u8>, text: &str| {
        pickle.push(b'X');
        pickle.extend((text.len() as u32).to_le_bytes());
        pickle.extend(text.as_bytes());
    };
    let number = |pickle: &mut Vec<u8>, n: usize| {
        pickle.push(b'J');
        pickle.extend((n as u32).to_le_bytes());
    };
    let mut pickle = b"\x80\x02}(".to_vec();
    for (i, (name, tensor)) in tensors.iter().enumerate() {
        let kind = match tensor.dtype() {
            DType::F32 => "FloatStorage",
            DType::I64 => "LongStorage",
            _ => "BoolStorage",
        };
        string(&mut pickle, name);
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        string(&mut pickle, "storage");
        pickle.extend(format!("ctorch\n{kind}\n").bytes());
        string(&mut pickle, &i.to_string());
        string(&mut pickle, "cpu");
        number(&mut pickle, tensor.elem_count());
        pickle.extend(b"tQ");
        number(&mut pickle, 0);
        let (dims, strides) = (tensor.dims(), tensor.stride());
        for sizes in [dims, strides] {
            pickle.push(b'(');
            sizes.iter().for_each(|&n| number(&mut pickle, n));
            pickle.push(b't');
        }
        pickle.extend(b"\x89ccollections\nOrderedDict\n)RtR");
        zip.start_file(format!("model/data/{i}"), options).unwrap();
        let flat = tensor.flatten_all().unwrap();
        let bytes: Vec<u8> = match tensor.dtype() {
            DType::F32 => (flat.to_vec1::<f32>().unwrap().iter())
                .flat_map(|x| x.to_le_bytes())
                .collect(),
            DType::I64 => (flat.to_vec1::<i64>().unwrap().iter())
                .flat_map(|x| x.to_le_bytes())
                .collect(),
            _ => flat.to_vec1::<u8>().unwrap(),
        };
        zip.write_all(&bytes).unwrap();
    }
    pickle.extend(b"u.");
    change(&mut pickle);
    zip.start_file("model/data.pkl", options).unwrap();
    zip.write_all(&pickle).unwrap();
    zip.finish().unwrap();
}

/// SafeAI Lab's repositories have no safetensors.
#[test]
fn a_pytorch_file_is_the_same_head() {
    let head = Head::new(Layout::Eagle3);
    let folder = head.write();
    let (safe, pickled) = ["model.safetensors", "pytorch_model.bin"]
        .map(|name| folder.path().join(name))
        .into();
    let open = || open_head(folder.path(), &*target());
    let wanted = logits_of(&head, open().unwrap());
    std::fs::remove_file(&safe).unwrap();
    write_pytorch(&pickled, &head.tensors, |_| ());
    assert_eq!(logits_of(&head, open().unwrap()), wanted);

    type Change = &'static dyn Fn(&mut Vec<u8>);
    let changes: [(Change, &str); 3] = [
        (&|pickle| pickle.resize(2 << 20, b'N'), "over the limit"),
        (&|pickle| pickle.truncate(40), "pytorch_model.bin"),
        (
            // A tensor made of nothing.
            &|pickle| {
                *pickle = b"\x80\x02}(X\x01\0\0\0actorch._utils\n_rebuild_parameter\n)Ru.".to_vec()
            },
            "pytorch_model.bin",
        ),
    ];
    for (change, wanted) in changes {
        write_pytorch(&pickled, &head.tensors, change);
        let Err(error) = open() else {
            panic!("it was loaded: {wanted}");
        };
        let error = error.to_string();
        assert!(
            error.contains(wanted) && error.lines().count() == 1,
            "{error}"
        );
    }
}

/// One line that says what differs, or what is not supported.
#[test]
fn a_head_that_does_not_fit_is_refused() {
    let refusal = |change: &dyn Fn(&mut Head)| {
        let mut head = Head::new(Layout::Eagle3);
        change(&mut head);
        let error = match open_head(head.write().path(), &*target()) {
            Ok(_) => panic!("it was loaded"),
            Err(error) => error.to_string(),
        };
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    };
    type Change = &'static dyn Fn(&mut Head);
    let cases: [(Change, &str); 7] = [
        (
            &|h| h.config["vocab_size"] = 70.into(),
            "vocab_size is 70, but 67",
        ),
        (
            &|h| h.config["hidden_size"] = 512.into(),
            "hidden_size is 512, but 256",
        ),
        (&|h| h.config["num_hidden_layers"] = 2.into(), "layers.1."),
        (
            &|h| h.config["norm_before_fc"] = true.into(),
            "input_norm.weight",
        ),
        (
            &|h| h.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([1, 2, 9]),
            "[1, 2, 9], but the target has 2",
        ),
        (&|h| drop(h.tensors.remove("norm.weight")), "norm.weight"),
        (
            &|h| {
                drop(
                    h.tensors
                        .insert("fc.weight".into(), noise("fc", &[HIDDEN, HIDDEN])),
                )
            },
            "fc.weight",
        ),
    ];
    for (change, wanted) in cases {
        let error = refusal(change);
        assert!(error.contains(wanted), "{error}");
    }
}
