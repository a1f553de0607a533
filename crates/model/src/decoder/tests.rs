//! Layers of many kinds against an implementation in plain f64, one token after the other.

use super::*;
use crate::layers::rope::RopeSpec;
use crate::spec::{LayerSpec, MlpSpec, Norms, QkNorm};
use candle_core::DType;
use foretoken_core::kv::{BlockAllocator, BlockTable};
use foretoken_core::sampling::mix;
use foretoken_kernels::Activation;
use std::collections::HashMap;

const VOCAB: usize = 19;
const HIDDEN: usize = 24;
const MLP: usize = 20;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const D: usize = 16;
const EPS: f64 = 1e-5;
const BLOCK_SIZE: usize = 4;

fn rope(width: usize, theta: f32) -> Option<RopeSpec> {
    Some(RopeSpec::plain(width, theta))
}

/// A layer of Llama, and some that differ from it in everything that a layer can say.
fn layers() -> Vec<LayerSpec> {
    let llama = LayerSpec::llama(rope(D, 10000.).unwrap(), D);
    let gated = |activation| MlpSpec::Gated(activation);
    vec![
        LayerSpec {
            window: Some(5),
            ..llama.clone()
        },
        LayerSpec {
            rope: rope(6, 100.),
            qk_norm: Some(QkNorm::Head),
            soft_cap: Some(0.8),
            norms: Norms {
                before_attention: Some("a"),
                after_attention: Some("b"),
                before_mlp: Some("c"),
                after_mlp: Some("d"),
            },
            mlp: gated(Activation::GeluTanh),
            residual_scale: 0.5,
            ..llama.clone()
        },
        LayerSpec {
            rope: None,
            qk_norm: Some(QkNorm::Whole),
            attention_scale: 0.4,
            sinks: true,
            norms: Norms {
                before_attention: None,
                after_attention: Some("b"),
                before_mlp: None,
                after_mlp: Some("d"),
            },
            mlp: gated(Activation::Gelu),
            qkv_bias: true,
            o_bias: true,
            mlp_bias: true,
            ..llama.clone()
        },
        LayerSpec {
            rope: rope(D, 500.),
            window: Some(3),
            soft_cap: Some(1.5),
            sinks: true,
            qkv_bias: true,
            residual_scale: 1.5,
            ..llama.clone()
        },
        llama,
    ]
}

fn config(layers: Vec<LayerSpec>) -> ModelConfig {
    ModelConfig {
        architecture: "test".into(),
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: MLP,
        spec: layers.into(),
        num_heads: HEADS,
        num_kv_heads: KV_HEADS,
        head_dim: D,
        rms_norm_eps: EPS,
        max_position_embeddings: 64,
        ..ModelConfig::default()
    }
}

type Tensors = HashMap<String, Tensor>;

/// Random tensors of all names that such a model has: values near 1 for norms, and large enough for attention
/// to prefer some positions.
fn tensors(config: &ModelConfig) -> Tensors {
    let mut all = Tensors::new();
    let mut add = |name: String, dims: &[usize], middle: f32, width: f32| {
        let seed = name
            .bytes()
            .fold(7, |hash, byte| mix(hash ^ u64::from(byte)));
        let value = |i| (mix(seed.wrapping_add(i)) >> 40) as f32 / (1u32 << 23) as f32 - 1.;
        let count = dims.iter().product::<usize>() as u64;
        let values: Vec<f32> = (0..count).map(|i| middle + width * value(i)).collect();
        let tensor = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
        all.insert(name, tensor);
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN], 0., 1.);
    add("model.norm.weight".into(), &[HIDDEN], 1., 0.3);
    add("lm_head.weight".into(), &[VOCAB, HIDDEN], 0., 0.5);
    for (i, layer) in config.spec.layers.iter().enumerate() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let mut linear = |name: &str, (outputs, inputs): (usize, usize), bias: bool| {
            add(at(&format!("{name}.weight")), &[outputs, inputs], 0., 0.5);
            if bias {
                add(at(&format!("{name}.bias")), &[outputs], 0., 0.5);
            }
        };
        let (q, kv) = (HEADS * D, KV_HEADS * D);
        linear("self_attn.q_proj", (q, HIDDEN), layer.qkv_bias);
        linear("self_attn.k_proj", (kv, HIDDEN), layer.qkv_bias);
        linear("self_attn.v_proj", (kv, HIDDEN), layer.qkv_bias);
        linear("self_attn.o_proj", (HIDDEN, q), layer.o_bias);
        linear("mlp.gate_proj", (MLP, HIDDEN), layer.mlp_bias);
        linear("mlp.up_proj", (MLP, HIDDEN), layer.mlp_bias);
        linear("mlp.down_proj", (HIDDEN, MLP), layer.mlp_bias);
        let norms = &layer.norms;
        let names = [
            norms.before_attention,
            norms.after_attention,
            norms.before_mlp,
            norms.after_mlp,
        ];
        for name in names.into_iter().flatten() {
            add(at(&format!("{name}.weight")), &[HIDDEN], 1., 0.3);
        }
        let widths = match layer.qk_norm {
            None | Some(QkNorm::HeadWithoutWeights) => None,
            Some(QkNorm::Head) => Some((D, D)),
            Some(QkNorm::Whole) => Some((q, kv)),
            Some(QkNorm::RotatedHead) => panic!("the names of its weights are others"),
        };
        if let Some((q, k)) = widths {
            add(at("self_attn.q_norm.weight"), &[q], 1., 0.3);
            add(at("self_attn.k_norm.weight"), &[k], 1., 0.3);
        }
        if layer.sinks {
            add(at("self_attn.sinks"), &[HEADS], 0.5, 1.);
        }
    }
    all
}

fn decoder(config: &ModelConfig, tensors: &Tensors) -> Decoder {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    candle_core::safetensors::save(tensors, file).unwrap();
    let dtypes = Dtypes::all(DType::F32);
    let weights = Weights::safetensors(folder.path(), dtypes, &Device::Cpu).unwrap();
    Decoder::load(config.clone(), weights, || ()).unwrap()
}

/// The model in f64.
struct Plain<'a> {
    config: &'a ModelConfig,
    tensors: HashMap<&'a str, Vec<f64>>,
    /// K and V of the tokens so far, for each layer.
    kv: Vec<[Vec<Vec<f64>>; 2]>,
}

impl<'a> Plain<'a> {
    fn new(config: &'a ModelConfig, tensors: &'a Tensors) -> Self {
        let wide = |t: &Tensor| {
            let flat = t.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
            flat.to_vec1::<f64>().unwrap()
        };
        Self {
            config,
            tensors: tensors
                .iter()
                .map(|(name, t)| (name.as_str(), wide(t)))
                .collect(),
            kv: vec![[vec![], vec![]]; config.spec.layers.len()],
        }
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.tensors[format!("{name}.weight").as_str()];
        let bias = self.tensors.get(format!("{name}.bias").as_str());
        let rows = weight.chunks(x.len()).enumerate();
        let dot = |(i, row): (usize, &[f64])| {
            let dot: f64 = row.iter().zip(x).map(|(w, x)| w * x).sum();
            dot + bias.map_or(0., |bias| bias[i])
        };
        rows.map(dot).collect()
    }

    /// Each `weight.len()` values of `x` have a norm.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.tensors[format!("{name}.weight").as_str()];
        let parts = x.chunks(weight.len()).flat_map(|part| {
            let mean = part.iter().map(|x| x * x).sum::<f64>() / part.len() as f64;
            let scale = 1. / (mean + EPS).sqrt();
            part.iter().zip(weight).map(move |(x, w)| x * scale * w)
        });
        parts.collect()
    }

    fn norm_if_any(&self, layer: usize, name: Option<&str>, x: Vec<f64>) -> Vec<f64> {
        match name {
            Some(name) => self.norm(&format!("model.layers.{layer}.{name}"), &x),
            None => x,
        }
    }

    /// The logits after one more token.
    fn step(&mut self, token: u32) -> Vec<f64> {
        let embedding = &self.tensors["model.embed_tokens.weight"];
        let mut x = embedding[token as usize * HIDDEN..][..HIDDEN].to_vec();
        let config = self.config;
        for (i, layer) in config.spec.layers.iter().enumerate() {
            let norms = layer.norms;
            let add = |x: &mut [f64], more: &[f64]| {
                for (x, more) in x.iter_mut().zip(more) {
                    *x += f64::from(layer.residual_scale) * more;
                }
            };
            let normed = self.norm_if_any(i, norms.before_attention, x.clone());
            let attended = self.attend(i, &normed);
            add(
                &mut x,
                &self.norm_if_any(i, norms.after_attention, attended),
            );
            let normed = self.norm_if_any(i, norms.before_mlp, x.clone());
            let at = |part: &str| format!("model.layers.{i}.mlp.{part}");
            let gate = self.linear(&at("gate_proj"), &normed);
            let up = self.linear(&at("up_proj"), &normed);
            let MlpSpec::Gated(activation) = layer.mlp else {
                panic!("{:?}", layer.mlp);
            };
            let wide: Vec<f64> = (gate.iter().zip(&up))
                .map(|(&gate, up)| activate(activation, gate) * up)
                .collect();
            let y = self.linear(&at("down_proj"), &wide);
            add(&mut x, &self.norm_if_any(i, norms.after_mlp, y));
        }
        self.linear("lm_head", &self.norm("model.norm", &x))
    }

    fn attend(&mut self, i: usize, x: &[f64]) -> Vec<f64> {
        let config = self.config;
        let layer = &config.spec.layers[i];
        let at = |part: &str| format!("model.layers.{i}.self_attn.{part}");
        let mut q = self.linear(&at("q_proj"), x);
        let mut k = self.linear(&at("k_proj"), x);
        if layer.qk_norm.is_some() {
            q = self.norm(&at("q_norm"), &q);
            k = self.norm(&at("k_norm"), &k);
        }
        let position = self.kv[i][0].len();
        if let Some(rope) = &layer.rope {
            for head in q.chunks_mut(D).chain(k.chunks_mut(D)) {
                let half = rope.width / 2;
                for pair in 0..half {
                    let power = -2. * pair as f64 / rope.width as f64;
                    let angle = position as f64 * f64::from(rope.theta).powf(power);
                    let (a, b) = (head[pair], head[pair + half]);
                    head[pair] = a * angle.cos() - b * angle.sin();
                    head[pair + half] = a * angle.sin() + b * angle.cos();
                }
            }
        }
        let v = self.linear(&at("v_proj"), x);
        self.kv[i][0].push(k);
        self.kv[i][1].push(v);
        let [keys, values] = &self.kv[i];
        let first = (position + 1).saturating_sub(layer.window.unwrap_or(usize::MAX));
        let mut out = Vec::new();
        for (head, q) in q.chunks(D).enumerate() {
            let own = head / (HEADS / KV_HEADS) * D..(head / (HEADS / KV_HEADS) + 1) * D;
            let weight = |key: &Vec<f64>| {
                let dot: f64 = q.iter().zip(&key[own.clone()]).map(|(q, k)| q * k).sum();
                let score = dot * f64::from(layer.attention_scale);
                let capped = layer.soft_cap.map(f64::from);
                capped.map_or(score, |cap| cap * (score / cap).tanh()).exp()
            };
            let weights: Vec<f64> = keys[first..].iter().map(weight).collect();
            let mut sum: f64 = weights.iter().sum();
            if layer.sinks {
                sum += self.tensors[at("sinks").as_str()][head].exp();
            }
            for value in own {
                let values = weights.iter().zip(&values[first..]);
                out.push(values.map(|(weight, v)| weight * v[value]).sum::<f64>() / sum);
            }
        }
        self.linear(&at("o_proj"), &out)
    }
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1. + (-x).exp()),
        Activation::Relu2 => x.max(0.).powi(2),
        Activation::Xielu(_) => panic!("it has no gate"),
        Activation::ClampedSwish => panic!("it changes what the gate multiplies"),
        Activation::Gelu => x / 2. * (1. + candle_core::cpu::erf::erf_f64(x / 2f64.sqrt())),
        Activation::GeluTanh => {
            let inner = (2. / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            x / 2. * (1. + inner.tanh())
        }
    }
}

/// A sequence over a pool of its own.
struct SequenceRun<'a> {
    decoder: &'a mut Decoder,
    kv: KvStore,
    blocks: BlockAllocator,
    table: BlockTable,
    len: usize,
}

impl<'a> SequenceRun<'a> {
    fn new(decoder: &'a mut Decoder) -> Self {
        Self {
            kv: decoder.new_kv(64, BLOCK_SIZE).unwrap(),
            decoder,
            blocks: BlockAllocator::new(64, BLOCK_SIZE),
            table: BlockTable::default(),
            len: 0,
        }
    }

    /// The logits of more tokens, of which the last are nodes of a tree.
    fn feed(&mut self, tokens: &[u32], parents: &[Option<u16>]) -> Vec<Vec<f32>> {
        let all: Vec<u32> = (0..tokens.len() as u32).collect();
        self.feed_for(&all, tokens, parents)
    }

    /// The logits of these rows of more tokens.
    fn feed_for(&mut self, rows: &[u32], tokens: &[u32], parents: &[Option<u16>]) -> Vec<Vec<f32>> {
        let context = self.len;
        self.len += tokens.len();
        self.blocks.reserve(&mut self.table, self.len).unwrap();
        let mut batch = Batch::default();
        batch.push_span(tokens, parents, context, &self.table, BLOCK_SIZE);
        batch.logits = rows.to_vec();
        let out = self.decoder.forward(&batch, &mut self.kv).unwrap();
        out.logits.to_vec2().unwrap()
    }
}

fn text(len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i + 3 * i) % VOCAB) as u32).collect()
}

#[test]
fn every_kind_of_layer_agrees_with_f64() {
    // Each alone, so that an error is not hidden, and all together.
    let all = layers();
    let alone = all.iter().map(|layer| vec![layer.clone()]);
    for layers in alone.chain([all.clone()]) {
        let config = config(layers);
        let tensors = tensors(&config);
        let mut decoder = decoder(&config, &tensors);
        let ours = SequenceRun::new(&mut decoder).feed(&text(40), &[]);
        let mut plain = Plain::new(&config, &tensors);
        for (position, (&token, ours)) in text(40).iter().zip(&ours).enumerate() {
            for (&ours, want) in ours.iter().zip(plain.step(token)) {
                let off = (f64::from(ours) - want).abs();
                assert!(
                    off < 2e-4,
                    "logit {ours} at {position} should be {want}: {:?}",
                    config.spec.layers
                );
            }
        }
    }
}

/// Forwards run in pieces of a prompt, token by token, as nodes of a tree, and with logits of few rows or of none.
#[test]
fn a_row_has_the_same_bits_in_every_forward() {
    let config = config(layers());
    let mut decoder = decoder(&config, &tensors(&config));
    let text = text(60);
    let whole = SequenceRun::new(&mut decoder).feed(&text, &[]);
    for sizes in [[1; 60].as_slice(), &[7, 30, 23], &[2, 1, 57]] {
        let mut run = SequenceRun::new(&mut decoder);
        for &size in sizes {
            let start = run.len;
            let got = run.feed(&text[start..start + size], &[]);
            assert_eq!(got, whole[start..start + size], "{size} rows from {start}");
        }
    }
    for rows in [&[][..], &[6], &[0, 3, 4, 6]] {
        let mut run = SequenceRun::new(&mut decoder);
        for start in (0..56).step_by(7) {
            let got = run.feed_for(rows, &text[start..start + 7], &[]);
            for (row, got) in rows.iter().zip(got) {
                assert_eq!(got, whole[start + *row as usize], "row {row} after {start}");
            }
        }
        // What the rows without logits wrote to the pool.
        assert_eq!(run.feed(&text[56..], &[]), whole[56..]);
    }
    // Two branches: one is the text, the other is not.
    let parents = [None, None, Some(0), Some(1), Some(2), Some(4), Some(3)];
    for context in [1, 4, 30, 40] {
        let mut run = SequenceRun::new(&mut decoder);
        run.feed(&text[..context], &[]);
        let t = &text[context..];
        let rows = [t[0], t[1], 5, t[2], 6, t[3], t[4], 7];
        let got = run.feed(&rows, &parents);
        for (row, at) in [(0, 0), (1, 1), (3, 2), (5, 3), (6, 4)] {
            assert_eq!(got[row], whole[context + at], "node {row} after {context}");
        }
        let other = [&text[..=context], &[5, 6, 7]].concat();
        let other = SequenceRun::new(&mut decoder).feed(&other, &[]);
        for (row, at) in [(2, 1), (4, 2), (7, 3)] {
            assert_eq!(got[row], other[context + at], "node {row} after {context}");
        }
    }
}
