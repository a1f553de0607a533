//! EAGLE heads: the published layouts against an independent implementation, their drafts, and texts
//! that do not change.

use crate::common::process::foretoken;
use crate::common::tiny::{
    self, HEADS, HIDDEN, KV_HEADS, MLP, Tensors, VOCAB, noise, short_prompt,
};
use crate::common::*;
use crate::taps::plain;
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, EngineHandle, EngineOptions, Request, SpecLimits};
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::{Batch, HeadKind, LoadOptions, Model, ModelSource, load_head};
use foretoken::sampling::{Acceptance, Sampler, SamplingParams};
use foretoken::spec::{
    BudgetMode, Committed, Draft, DraftContext, DraftModel, DraftRequest, Drafter,
};
use serde_json::{Value as Json, json};

const HEAD_DIM: usize = 16;
const EPS: f64 = 1e-5;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// SafeAI Lab's EAGLE-3, with a reduced vocabulary.
    Eagle3,
    /// The speculators library's EAGLE-3, with an embedding of its own.
    Speculators,
    /// EAGLE-1 and 2.
    Eagle1,
}

const LAYOUTS: [Layout; 3] = [Layout::Eagle3, Layout::Speculators, Layout::Eagle1];

/// A head's checkpoint, and what the reference computes with.
struct Head {
    layout: Layout,
    config: Json,
    tensors: Tensors,
    /// Ids of the output layer.
    ids: Vec<u32>,
}

impl Head {
    fn new(layout: Layout) -> Self {
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
            "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "rope_theta": 10000.0,
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

    fn write(&self) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        tiny::write_config(folder.path(), &self.config);
        candle_core::safetensors::save(&self.tensors, folder.path().join("model.safetensors"))
            .unwrap();
        folder
    }

    /// The head as the server loads it.
    fn load(&self) -> Box<dyn Model> {
        let folder = self.write();
        open_head(folder.path(), &*target()).unwrap()
    }

    fn taps(&self) -> Vec<usize> {
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
                rms_norm(&hidden, &matrix(norm)[0])
            }
            _ => linear(&self.weight("fc"), &hidden),
        }
    }

    /// The reference: logits over the vocabulary and the outputs of all rows, each with its token and
    /// features. Row 0 is at position 0.
    fn forward(&self, rows: &[(u32, Vec<f64>)]) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
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
                    let norm = |x: &[f64], name: &str| rms_norm(x, &self.weight(name)[0]);
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
            let q = rope(&part("q_proj"), position);
            keys.push(rope(&part("k_proj"), position));
            values.push(part("v_proj"));
            let attended = attend(&q, &keys, &values);
            let x = add(
                &residual,
                &linear(&self.weight("LAYER.self_attn.o_proj"), &attended),
            );
            let normed = rms_norm(&x, &self.weight("LAYER.post_attention_layernorm")[0]);
            let gate = linear(&self.weight("LAYER.mlp.gate_proj"), &normed);
            let up = linear(&self.weight("LAYER.mlp.up_proj"), &normed);
            let wide: Vec<f64> = gate
                .iter()
                .zip(up)
                .map(|(g, u)| g / (1. + (-g).exp()) * u)
                .collect();
            let x = add(&x, &linear(&self.weight("LAYER.mlp.down_proj"), &wide));
            let row = match self.layout {
                Layout::Eagle1 => linear(&matrix(&target["model.embed_tokens.weight"]), &x),
                _ => linear(
                    &self.weight("lm_head"),
                    &rms_norm(&x, &self.weight("norm")[0]),
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

/// Rows of a matrix; a vector is one row.
fn matrix(tensor: &Tensor) -> Vec<Vec<f64>> {
    let wide = tensor.to_dtype(DType::F64).unwrap();
    match wide.rank() {
        1 => vec![wide.to_vec1().unwrap()],
        _ => wide.to_vec2().unwrap(),
    }
}

fn linear(weight: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    let dot = |row: &Vec<f64>| row.iter().zip(x).map(|(w, x)| w * x).sum();
    weight.iter().map(dot).collect()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn rms_norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1. / (mean + EPS).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn rope(x: &[f64], position: usize) -> Vec<f64> {
    let half = HEAD_DIM / 2;
    let mut out = x.to_vec();
    for head in out.chunks_mut(HEAD_DIM) {
        for i in 0..half {
            let angle = position as f64 * 10000f64.powf(-(i as f64) / half as f64);
            let (a, b) = (head[i], head[i + half]);
            head[i] = a * angle.cos() - b * angle.sin();
            head[i + half] = b * angle.cos() + a * angle.sin();
        }
    }
    out
}

fn attend(q: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>]) -> Vec<f64> {
    let group = HEADS / KV_HEADS;
    let heads = q.chunks(HEAD_DIM).enumerate();
    heads
        .flat_map(|(head, q)| {
            let at = head / group * HEAD_DIM..(head / group + 1) * HEAD_DIM;
            let score = |k: &Vec<f64>| {
                let dot: f64 = q.iter().zip(&k[at.clone()]).map(|(q, k)| q * k).sum();
                dot / (HEAD_DIM as f64).sqrt()
            };
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut out = vec![0.; HEAD_DIM];
            for (weight, value) in weights.iter().zip(values) {
                for (out, v) in out.iter_mut().zip(&value[at.clone()]) {
                    *out += weight / sum * v;
                }
            }
            out
        })
        .collect()
}

fn target_tensors() -> Tensors {
    tiny::tensors(HEAD_DIM, DType::F32)
}

fn target() -> Box<dyn Model> {
    let folder = tempfile::tempdir().unwrap();
    tiny::write_config(folder.path(), &tiny::llama_config(HEAD_DIM));
    tiny::write_shards(folder.path(), &target_tensors());
    tiny::open(folder.path()).unwrap()
}

fn open_head(
    folder: &std::path::Path,
    target: &dyn Model,
) -> Result<Box<dyn Model>, foretoken::error::Error> {
    let source = ModelSource::Folder(folder.to_owned());
    let kind = HeadKind::of(&source)?.expect("a head is recognized");
    let options = LoadOptions {
        dtype: Some(DType::F32),
        ..LoadOptions::default()
    };
    load_head(&source, kind, &options, target)
}

fn hidden_states(head: &Head, tokens: &[u32]) -> Vec<Vec<f32>> {
    plain(target(), tokens, &head.taps()).0
}

fn argmax(logits: &[f64]) -> u32 {
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
        let mut rows: Vec<(u32, Vec<f64>)> = (tokens[1..].iter().zip(&hidden))
            .map(|(&token, hidden)| (token, head.fuse(hidden)))
            .collect();

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
            let hidden = output.hidden.unwrap();
            features = hidden.narrow(0, new.len() - 1, 1).unwrap();
            context += new.len();
            rows.push((argmax(&logits[context - 1]), outputs[context - 1].clone()));
        }
    }
}

/// A GGUF file has the same head, and a smaller one that is nearly the same.
#[test]
fn a_head_becomes_a_gguf_file() {
    for layout in [Layout::Eagle3, Layout::Speculators] {
        let head = Head::new(layout);
        let folder = head.write();
        let tokens = short_prompt(7);
        let logits = |mut model: Box<dyn Model>| {
            assert_eq!(model.reads(), head.taps());
            let hidden = hidden_states(&head, &tokens);
            let hidden = Tensor::new(hidden[..6].to_vec(), &Device::Cpu).unwrap();
            let (mut kv, mut table) = (model.new_kv(8, 4).unwrap(), BlockTable::default());
            BlockAllocator::new(8, 4).reserve(&mut table, 6).unwrap();
            let mut batch = Batch::default();
            batch.push_span(&tokens[1..], &[], 0, &table, 4);
            batch.features = Some(model.fuse(&hidden).unwrap());
            batch.logits = (0..6).collect();
            let output = model.forward(&batch, &mut kv).unwrap();
            output.logits.to_vec2::<f32>().unwrap()
        };
        let wanted = logits(head.load());
        for (kind, tolerance) in [("f32", 0.0), ("q8_0", 0.05)] {
            let file = folder.path().join(format!("{kind}.gguf"));
            let converted = foretoken()
                .args(["convert", "--type", kind, "--model"])
                .arg(folder.path())
                .arg("--out")
                .arg(&file)
                .output()
                .unwrap();
            let stderr = String::from_utf8_lossy(&converted.stderr);
            assert!(converted.status.success(), "{stderr}");
            let source = ModelSource::Gguf(file.into());
            assert_eq!(HeadKind::of(&source).unwrap(), Some(HeadKind::Eagle3));
            let options = LoadOptions {
                dtype: Some(DType::F32),
                ..LoadOptions::default()
            };
            let found = logits(load_head(&source, HeadKind::Eagle3, &options, &*target()).unwrap());
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

fn drafter(head: &Head, chunk: usize) -> DraftModel {
    DraftModel::new(head.load(), 64, 4, chunk).unwrap()
}

/// A draft of up to 4 tokens in depth.
fn propose(drafter: &mut DraftModel, tokens: &[u32], width: usize, temperature: f32) -> Draft {
    let params = SamplingParams {
        temperature,
        seed: 5,
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(params, tokens);
    let request = DraftRequest {
        id: 1,
        tokens,
        length: 4,
        model_depth: 4,
        nodes: if width == 1 { 4 } else { 10 },
        width,
        min_score: 0.0,
        is_fixed: false,
        position: tokens.len(),
        sampler: &mut sampler,
        acceptance: Acceptance::Coupled,
        context: &DraftContext::default(),
    };
    drafter.propose(&mut [request]).unwrap().remove(0)
}

/// Tells the drafter that the target computed the positions `new` of `tokens`.
fn observe(drafter: &mut DraftModel, head: &Head, tokens: &[u32], new: std::ops::Range<usize>) {
    let states = hidden_states(head, &tokens[..new.end]);
    let hidden = Tensor::new(states[new.clone()].to_vec(), &Device::Cpu).unwrap();
    drafter.observe(&[Committed {
        id: 1,
        tokens,
        prompt_len: 3,
        new,
        hidden: Some(hidden),
        candidates: &[],
        context: &DraftContext::default(),
    }]);
    assert_eq!(drafter.check_invariants(), Ok(()));
}

#[test]
fn a_draft_is_what_the_reference_would_say() {
    for layout in LAYOUTS {
        let head = Head::new(layout);
        let tokens = short_prompt(12);
        let mut drafter = drafter(&head, 64);
        observe(&mut drafter, &head, &tokens, 0..11);
        let found = propose(&mut drafter, &tokens, 1, 0.0).tokens;

        let hidden = hidden_states(&head, &tokens);
        let mut rows: Vec<(u32, Vec<f64>)> = (tokens[1..].iter().zip(&hidden))
            .map(|(&token, hidden)| (token, head.fuse(hidden)))
            .collect();
        let mut wanted = Vec::new();
        for _ in 0..4 {
            let (logits, outputs) = head.forward(&rows);
            let (logits, output) = (logits.last().unwrap(), outputs.last().unwrap());
            wanted.push(argmax(logits));
            rows.push((argmax(logits), output.clone()));
        }
        assert_eq!(found, wanted, "{layout:?}");
    }
}

/// Whether two drafts have the same guesses after every path that both have, as far as both go on: how
/// many they keep depends on what a drafter learned.
fn assert_same_guesses(a: &Draft, b: &Draft, context: &str) {
    let mut pairs = vec![(None, None)];
    let mut compared = 0;
    while let Some((at, other)) = pairs.pop() {
        for (child, match_of) in a.children(at).zip(b.children(other)) {
            assert_eq!(a.tokens[child], b.tokens[match_of], "{context}");
            pairs.push((Some(child), Some(match_of)));
            compared += 1;
        }
    }
    assert!(compared >= 4, "{context}: {compared} compared");
}

/// However its text was observed and whatever it drafted before, a drafter drafts what a fresh one does:
/// chains and trees, greedy and sampled.
#[test]
fn a_draft_depends_on_the_committed_text_alone() {
    let head = Head::new(Layout::Eagle3);
    for (width, temperature, chunk) in [(1, 0.0, 4), (3, 0.0, 64), (1, 1.0, 64), (2, 1.0, 4)] {
        let mut tokens = short_prompt(11);
        let mut used = drafter(&head, chunk);
        // The prompt in two chunks.
        observe(&mut used, &head, &tokens, 0..6);
        observe(&mut used, &head, &tokens, 6..10);
        for round in 0..6 {
            let known = tokens.len() - 1;
            let draft = propose(&mut used, &tokens, width, temperature);
            let mut fresh = drafter(&head, 64);
            observe(&mut fresh, &head, &tokens, 0..known);
            let wanted = propose(&mut fresh, &tokens, width, temperature);
            assert!(!draft.is_empty());
            let context = format!("{width} {temperature} {round}");
            assert_same_guesses(&draft, &wanted, &context);
            // Some of its first branch is accepted, then the target says something else.
            let mut branch = vec![0];
            while let Some(child) = draft.children(branch.last().copied()).next() {
                branch.push(child);
            }
            let accepted = branch
                .iter()
                .take(round % 4)
                .map(|&node| draft.tokens[node]);
            tokens.extend(accepted);
            tokens.push((tokens.len() as u32 * 7) % VOCAB as u32);
            let new = known..tokens.len() - 1;
            observe(&mut used, &head, &tokens, new);
        }
        used.end(1);
        assert_eq!((used.check_invariants(), used.kv_usage()), (Ok(()), 0.0));
    }
}

fn start(head: Option<&Head>, num_blocks: usize, spec: SpecLimits) -> EngineHandle {
    let drafter = head.map(|head| {
        let drafter = DraftModel::new(head.load(), num_blocks, 4, 16).unwrap();
        Box::new(drafter) as Box<dyn Drafter>
    });
    let options = EngineOptions {
        max_num_batched_tokens: 24,
        max_num_seqs: 4,
        spec,
        spec_budget: BudgetMode::Fixed,
        ..EngineOptions::default()
    };
    engine::spawn(target(), drafter, num_blocks, 4, options).unwrap()
}

/// With chunked prompts, batches, chains and trees, and preemption.
#[test]
fn texts_do_not_change() {
    let requests: Vec<Request> = [3, 30, 50, 11, 20, 40]
        .into_iter()
        .flat_map(|len| {
            let prompt = short_prompt(len);
            [greedy(&prompt, 25), sampled(&prompt, 25, len as u64)]
        })
        .collect();
    let texts = |head: Option<&Head>, blocks: usize, spec: SpecLimits| {
        let engine = start(head, blocks, spec);
        let all = engine.submit_all(requests.clone()).unwrap();
        let texts: Vec<Vec<u32>> = all
            .into_iter()
            .map(|events| collect(events).ids())
            .collect();
        assert_idle(&engine);
        let stats = engine.stats();
        (
            texts,
            stats.spec_draft_tokens.get(),
            stats.preemptions.get(),
        )
    };
    let (wanted, drafted, _) = texts(None, 256, chains(4));
    assert_eq!(drafted, 0);
    let tree = SpecLimits {
        length: 3,
        nodes: 9,
        topk: 3,
    };
    for layout in LAYOUTS {
        let head = Head::new(layout);
        for (blocks, spec) in [(256, chains(4)), (40, chains(4)), (256, tree)] {
            let (found, drafted, preempted) = texts(Some(&head), blocks, spec);
            assert_eq!(found, wanted, "{layout:?} {blocks}");
            assert!(drafted > 100, "{drafted}");
            assert_eq!(preempted > 0, blocks == 40);
        }
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
        (
            &|h| h.config["num_hidden_layers"] = 2.into(),
            "num_hidden_layers 2",
        ),
        (
            &|h| h.config["norm_before_fc"] = true.into(),
            "norm_before_fc",
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
