//! The structs of `plan.cuh`, written field by field, and checks of what they describe.

use super::{ForwardLayer, ForwardLinear, ForwardModel, ForwardWeight};
use crate::AttentionParams;
use crate::gpu::{STRIP, address, warps};
use crate::paged_attention::MAX_GPU_HEADS_PER_KV_HEAD;
use crate::q8_blocks;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{DType, Result, Tensor};
use half::f16;

/// Weights that a phase multiplies, at most.
const MAX_PARTS: usize = 3;
/// 64-bit words of a `Part` and of a `Phase`.
const PART: usize = 7;
const PHASE: usize = MAX_PARTS * PART + 15;
/// Units of a half of a slot, and those that share a part.
const HALF_UNITS: usize = 16;
const SHARING: usize = 4;
/// The format of dense weights, the inputs of its units, and bytes of an output in a half of a slot.
const DENSE: u32 = 0;
const DENSE_INPUTS: usize = 32;
const DENSE_ROW: usize = HALF_UNITS * 2 * DENSE_INPUTS + 64;
/// The widest row that the kernel for norms keeps in registers.
const MAX_HIDDEN: usize = 16_384;
/// Values of a head that the kernel is built for.
const HEAD_DIMS: [usize; 2] = [64, 128];

/// The kinds of phases, in the order of `Kind`.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Qkv,
    Attention,
    AttentionOut,
    Down,
    GateUp,
    Logits,
    Norm,
}

/// What pools are, in the order of `PoolKind`.
#[derive(Clone, Copy, Default)]
enum PoolKind {
    #[default]
    Numbers,
    Blocks,
    Float8,
}

/// The phases of a model, and what they need.
pub(super) struct Phases {
    /// [`PHASE`] words for each.
    pub words: Vec<u64>,
    /// Bytes of a half of a slot of the ring.
    pub half_bytes: usize,
    /// Width of the widest MLP.
    pub wide: usize,
    /// Everything whose address is in `words`.
    pub held: Vec<Tensor>,
}

/// A part of a product: strips `first..first + strips` of a weight.
struct Part<'a> {
    weight: ForwardWeight<'a>,
    first: usize,
    outputs: usize,
    column: usize,
}

impl Phases {
    /// The number of phases.
    pub fn len(&self) -> usize {
        self.words.len() / PHASE
    }

    /// The phases of `model`, whose memory is used on `stream`.
    ///
    /// # Errors
    /// What of the model has no such forward.
    pub fn of(model: &ForwardModel<'_>, stream: &CudaStream) -> Result<Self> {
        check(model)?;
        let mut all = Writer {
            model,
            stream,
            phases: Self {
                words: Vec::new(),
                half_bytes: 0,
                wide: 0,
                held: Vec::new(),
            },
        };
        for (i, layer) in model.layers.iter().enumerate() {
            all.layer(layer, i == 0)?;
        }
        all.output()?;
        Ok(all.phases)
    }
}

impl PoolKind {
    /// That of pools in this dtype.
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::U8 => Self::Blocks,
            DType::F8E4M3 => Self::Float8,
            _ => Self::Numbers,
        }
    }
}

/// Two 32-bit fields.
fn pair(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

fn check(model: &ForwardModel<'_>) -> Result<()> {
    let ForwardModel {
        hidden,
        heads,
        kv_heads,
        head_dim,
        ..
    } = *model;
    if !matches!(model.dtype, DType::F16 | DType::BF16) {
        candle_core::bail!("activations in {:?}", model.dtype);
    }
    if model.layers.is_empty() || hidden == 0 || hidden % 32 > 0 || hidden > MAX_HIDDEN {
        candle_core::bail!("{} layers of width {hidden}", model.layers.len());
    }
    if kv_heads == 0 || heads % kv_heads > 0 || heads / kv_heads > MAX_GPU_HEADS_PER_KV_HEAD {
        candle_core::bail!("{heads} query heads for {kv_heads} heads of keys");
    }
    if !HEAD_DIMS.contains(&head_dim) {
        candle_core::bail!("heads of {head_dim} values");
    }
    Ok(())
}

struct Writer<'a, 'm> {
    model: &'a ForwardModel<'m>,
    stream: &'a CudaStream,
    phases: Phases,
}

/// The fields of a phase besides its parts; what a kind does not have is 0.
#[derive(Default)]
struct Fields {
    inputs: usize,
    width: usize,
    norm: u64,
    is_first: bool,
    activation: u32,
    attention: [u64; 7],
    half: usize,
    is_whole: bool,
    head_eps: f32,
    scale: f32,
    cap: f32,
    window: u32,
    pools: PoolKind,
}

impl Writer<'_, '_> {
    /// The address of a tensor of `len` values in `dtype`, which is kept.
    fn hold(&mut self, tensor: &Tensor, dtype: DType, len: usize) -> Result<u64> {
        if tensor.dtype() != dtype || tensor.elem_count() != len {
            candle_core::bail!("{tensor:?} in the place of {len} values in {dtype:?}");
        }
        self.phases.held.push(tensor.clone());
        address(tensor, self.stream)
    }

    /// The address of a vector of the model's dtype.
    fn vector(&mut self, tensor: &Tensor, len: usize) -> Result<u64> {
        self.hold(tensor, self.model.dtype, len)
    }

    fn layer(&mut self, layer: &ForwardLayer<'_>, is_first: bool) -> Result<()> {
        let ForwardModel {
            hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self.model;
        let (q, all) = (heads * head_dim, (heads + 2 * kv_heads) * head_dim);
        let qkv = Fields {
            inputs: hidden,
            width: all,
            norm: self.vector(layer.norm, hidden)?,
            is_first,
            ..Fields::default()
        };
        self.products(Kind::Qkv, &layer.qkv, qkv)?;
        self.attention(layer)?;
        let out = Fields {
            inputs: q,
            width: hidden,
            is_first,
            ..Fields::default()
        };
        self.products(Kind::AttentionOut, &layer.out, out)?;
        let outputs = layer.gate_up.weights.iter().map(ForwardWeight::shape);
        let outputs = outputs.map(|shape| shape.map(|(outputs, _)| outputs));
        let wide = outputs.sum::<Result<usize>>()? / 2;
        self.phases.wide = self.phases.wide.max(wide);
        let gate_up = Fields {
            inputs: hidden,
            width: wide,
            norm: self.vector(layer.mlp_norm, hidden)?,
            activation: match layer.activation.fused() {
                Some(number) => number as u32,
                None => candle_core::bail!("a gate of {:?}", layer.activation),
            },
            ..Fields::default()
        };
        self.gate_up(&layer.gate_up, gate_up)?;
        let down = Fields {
            inputs: wide,
            width: hidden,
            ..Fields::default()
        };
        self.products(Kind::Down, &layer.down, down)
    }

    fn attention(&mut self, layer: &ForwardLayer<'_>) -> Result<()> {
        let ForwardModel {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self.model;
        let AttentionParams {
            scale,
            window,
            bidirectional,
            soft_cap,
            sinks,
        } = layer.attention;
        layer.attention.check(heads)?;
        if bidirectional {
            candle_core::bail!("attention to later rows");
        }
        let slots = layer.pool.0.dim(0)?;
        let len = slots * kv_heads * head_dim;
        let pools = PoolKind::of(layer.pool.0.dtype());
        let [k, k_scales] = self.pool(&layer.pool.0, pools, len)?;
        let [v, v_scales] = self.pool(&layer.pool.1, pools, len)?;
        let mut fields = Fields {
            attention: [k, v, 0, 0, 0, k_scales, v_scales],
            pools,
            half: layer.pairs,
            scale,
            cap: soft_cap.unwrap_or(0.),
            window: window.map_or(i32::MAX as usize, |window| window.min(i32::MAX as usize)) as u32,
            ..Fields::default()
        };
        if 2 * layer.pairs > head_dim {
            candle_core::bail!("{} pairs in heads of {head_dim} values", layer.pairs);
        }
        if let Some(norms) = layer.head_norms {
            if norms.after_rotation {
                candle_core::bail!("norms of heads after the rotation");
            }
            fields.is_whole = norms.are_whole((heads, kv_heads), head_dim)?;
            fields.head_eps = norms.eps;
            fields.attention[2] = self.vector(&norms.q, norms.q.elem_count())?;
            fields.attention[3] = self.vector(&norms.k, norms.k.elem_count())?;
        }
        if let Some(sinks) = sinks {
            fields.attention[4] = self.hold(sinks, DType::F32, heads)?;
        }
        self.phase(Kind::Attention, &[], None, &fields)
    }

    /// The addresses of a pool of `len` values, and of the scales of one in blocks.
    fn pool(&mut self, pool: &Tensor, kind: PoolKind, len: usize) -> Result<[u64; 2]> {
        match kind {
            PoolKind::Numbers => Ok([self.vector(pool, len)?, 0]),
            PoolKind::Float8 => Ok([self.hold(pool, DType::F8E4M3, len)?, 0]),
            PoolKind::Blocks => {
                let [bytes, scales] = q8_blocks::parts(pool)?;
                let of_scales = len / q8_blocks::BLOCK * size_of::<f16>();
                let bytes = self.hold(&bytes, DType::U8, len)?;
                Ok([bytes, self.hold(&scales, DType::U8, of_scales)?])
            }
        }
    }

    fn output(&mut self) -> Result<()> {
        let hidden = self.model.hidden;
        let mut fields = Fields {
            inputs: hidden,
            width: hidden,
            norm: self.vector(self.model.norm, hidden)?,
            ..Fields::default()
        };
        let Some(output) = self.model.output else {
            return self.phase(Kind::Norm, &[], None, &fields);
        };
        fields.width = output.shape()?.0;
        let linear = ForwardLinear {
            weights: vec![output],
            bias: None,
        };
        self.products(Kind::Logits, &linear, fields)
    }

    /// A phase whose parts are the weights of `linear`, side by side.
    fn products(&mut self, kind: Kind, linear: &ForwardLinear<'_>, fields: Fields) -> Result<()> {
        let mut column = 0;
        let mut parts = Vec::new();
        for &weight in &linear.weights {
            let (outputs, _) = weight.shape()?;
            parts.push(Part {
                weight,
                first: 0,
                outputs,
                column,
            });
            column += outputs;
        }
        if column != fields.width {
            candle_core::bail!("{column} outputs of a product, not {}", fields.width);
        }
        self.phase(kind, &parts, linear.bias, &fields)
    }

    /// The phase of gate and up, whose strips are computed in pairs.
    fn gate_up(&mut self, linear: &ForwardLinear<'_>, fields: Fields) -> Result<()> {
        let outputs = fields.width;
        let part = |weight, first| Part {
            weight,
            first,
            outputs,
            column: 0,
        };
        let is_dense = |weight: &ForwardWeight| matches!(weight, ForwardWeight::Dense(_));
        let parts = match linear.weights[..] {
            [gate, up] if gate.shape()? == up.shape()? && is_dense(&gate) == is_dense(&up) => {
                [part(gate, 0), part(up, 0)]
            }
            [both] if both.shape()?.0 % (2 * STRIP) == 0 => {
                [part(both, 0), part(both, outputs / STRIP)]
            }
            _ => candle_core::bail!("gate and up of {outputs} outputs together"),
        };
        if linear.bias.is_some() {
            candle_core::bail!("a bias of gate and up");
        }
        self.phase(Kind::GateUp, &parts, None, &fields)
    }

    fn phase(
        &mut self,
        kind: Kind,
        parts: &[Part<'_>],
        bias: Option<&Tensor>,
        fields: &Fields,
    ) -> Result<()> {
        if parts.len() > MAX_PARTS {
            candle_core::bail!("{} weights with one input", parts.len());
        }
        let bias = match bias {
            Some(bias) => self.vector(bias, fields.width)?,
            None => 0,
        };
        for part in parts {
            self.part(part, fields.inputs, bias)?;
        }
        let words = &mut self.phases.words;
        words.resize(words.len() + (MAX_PARTS - parts.len()) * PART, 0);
        words.push(fields.norm);
        words.extend(fields.attention);
        words.extend([
            pair(kind as u32, parts.len() as u32),
            pair(fields.inputs as u32, fields.width as u32),
            pair(u32::from(fields.is_first), fields.activation),
            pair(fields.half as u32, u32::from(fields.is_whole)),
            pair(fields.head_eps.to_bits(), fields.scale.to_bits()),
            pair(fields.cap.to_bits(), fields.window),
            pair(fields.pools as u32, 0),
        ]);
        Ok(())
    }

    fn part(&mut self, part: &Part<'_>, inputs: usize, bias: u64) -> Result<()> {
        let Part {
            weight,
            first,
            outputs,
            column,
        } = *part;
        let (all, given) = weight.shape()?;
        if given != inputs {
            candle_core::bail!("a weight of {given} inputs, not {inputs}");
        }
        // Where it is and where its shared parts are, its format, bytes of a unit and of a shared part, of a half.
        let (at, shared_at, format, sizes, half) = match weight {
            ForwardWeight::Quantized(weight) => {
                let memory = weight.memory();
                let at = self.hold(memory.tiles, DType::U8, memory.tiles.elem_count())?;
                let half = HALF_UNITS * memory.unit + HALF_UNITS / SHARING * memory.shared;
                let sizes = (memory.unit, memory.shared);
                let shared_at = at + memory.shared_from as u64;
                (at, shared_at, weight.kind().number(), sizes, half)
            }
            ForwardWeight::Dense(weight) => {
                if !inputs.is_multiple_of(DENSE_INPUTS) || !weight.is_contiguous() {
                    candle_core::bail!("a dense weight of {inputs} inputs");
                }
                let at = self.vector(weight, all * inputs)?;
                (at, 0, DENSE, (0, 0), STRIP * DENSE_ROW)
            }
        };
        let bias = match bias {
            0 => 0,
            bias => bias + (column * self.model.dtype.size_in_bytes()) as u64,
        };
        // The order of additions depends on the weight alone.
        let warps = warps(all);
        let phases = &mut self.phases;
        phases.half_bytes = phases.half_bytes.max(half.next_multiple_of(128));
        phases.words.extend([
            at,
            shared_at,
            bias,
            pair(format, warps as u32),
            pair(sizes.0 as u32, sizes.1 as u32),
            pair(first as u32, outputs.div_ceil(STRIP) as u32),
            pair(outputs as u32, column as u32),
        ]);
        Ok(())
    }
}
