//! NF4 (Dettmers et al. 2023, "QLoRA") as bitsandbytes stores it: 16 values that the checkpoint lists, two in a byte,
//! the first in its upper half, with a scale for each block of the values of all rows one after another. The scales may
//! be quantized in the same way, to 8 bits.

use super::parts::{FLOATS, Part, Parts};
use super::scheme::{Opened, Scheme, Unpacked};
use crate::config::keys::Keys;
use foretoken_core::error::Result;
use foretoken_kernels::quant::BlockType;
use serde_json::Value;

const STATE: &str = "weight.quant_state.bitsandbytes__nf4";
/// Maximum bytes of the text that describes a matrix.
const MAX_STATE_BYTES: usize = 1 << 16;

/// Keys that say nothing about the weights, or what the text beside them says.
const HARMLESS: &str = "
    _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
    bnb_4bit_target_parameters bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload
    llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold modules_to_not_convert
    quant_method";

/// bitsandbytes' NF4.
#[derive(Debug)]
pub struct Nf4;

impl Nf4 {
    /// Reads the keys of a `quantization_config` for NF4.
    ///
    /// # Errors
    /// A message, if a key asks for something that is not supported.
    pub fn take(keys: &mut Keys) -> Result<Self, String> {
        keys.only("load_in_8bit", false)?;
        keys.only("load_in_4bit", true)?;
        keys.only("bnb_4bit_quant_type", "nf4")?;
        let given = keys.peek("bnb_4bit_quant_storage");
        if given.as_str().is_some_and(|storage| storage != "uint8") {
            return Err(keys.refused("bnb_4bit_quant_storage", &given, "only uint8 is"));
        }
        keys.ignore(HARMLESS);
        Ok(Self)
    }
}

impl Scheme for Nf4 {
    fn label(&self) -> String {
        "NF4".into()
    }

    fn is_in(&self, parts: &Parts<'_>) -> bool {
        parts.has(STATE)
    }

    fn open<'a>(&self, parts: &mut Parts<'a>, shape: (usize, usize)) -> Result<Opened<'a>> {
        let values = shape.0 * shape.1;
        let numbers = parts.get("weight", &[values.div_ceil(2), 1], &["U8"])?;
        let table = parts.get("weight.quant_map", &[16], &["F32"])?;
        let state = parts.any(STATE)?;
        let scales = parts.any("weight.absmax")?;
        let is_nested = scales.dtype == "U8";
        if !is_nested {
            scales.check_dtype(FLOATS)?;
        }
        let nested = is_nested.then(|| -> Result<_> {
            let table = parts.get("weight.nested_quant_map", &[256], &["F32"])?;
            Ok((table, parts.any("weight.nested_absmax")?))
        });
        let nested = nested.transpose()?;
        let unpack = move || {
            let state = State::read(&state, shape)?;
            let scales = match &nested {
                None => sized(&scales, values.div_ceil(state.block))?.scales()?,
                Some((table, outer)) => {
                    let numbers = sized(&scales, values.div_ceil(state.block))?.data()?;
                    let outer = sized(outer, numbers.len().div_ceil(state.nested_block))?;
                    outer.check_dtype(&["F32"])?;
                    let (table, outer) = (table.scales()?, outer.scales()?);
                    let scale = |(i, &number): (usize, &u8)| {
                        let product = table[usize::from(number)] * outer[i / state.nested_block];
                        product + state.offset
                    };
                    numbers.iter().enumerate().map(scale).collect()
                }
            };
            Ok(Floats {
                table: table.scales()?,
                numbers: numbers.data()?,
                inputs: shape.1,
                scales,
                block: state.block,
            })
        };
        Ok(Opened::new(None, unpack))
    }

    fn usual_blocks(&self) -> Option<BlockType> {
        None
    }
}

/// The part, checked to have `len` values.
fn sized<'p, 'a>(part: &'p Part<'a>, len: usize) -> Result<&'p Part<'a>> {
    if part.dims.iter().product::<usize>() == len {
        return Ok(part);
    }
    let what = format!("has shape {:?}, its matrix needs {len} values", part.dims);
    Err(part.error(&what))
}

/// The settings that the text beside a matrix says.
struct State {
    block: usize,
    nested_block: usize,
    offset: f32,
}

impl State {
    fn read(part: &Part<'_>, (outputs, inputs): (usize, usize)) -> Result<Self> {
        let data = part.data()?;
        let read = || -> Result<Self, String> {
            if data.len() > MAX_STATE_BYTES {
                return Err(format!(
                    "has {} bytes; up to {MAX_STATE_BYTES} are supported",
                    data.len()
                ));
            }
            let json: Value =
                serde_json::from_slice(data).map_err(|e| format!("is not readable: {e}"))?;
            let mut keys = Keys::of_json(json)?;
            keys.only("quant_type", "nf4")?;
            keys.only("shape", vec![outputs, inputs])?;
            let size = |keys: &mut Keys, key: &str, usual| {
                let size = keys.size(key)?.unwrap_or(usual);
                (size > 0)
                    .then_some(size)
                    .ok_or_else(|| format!("has a {key} of 0"))
            };
            let offset = keys.number("nested_offset")?.unwrap_or(0.) as f32;
            if !offset.is_finite() {
                return Err("has a nested_offset that is infinite".into());
            }
            Ok(Self {
                block: size(&mut keys, "blocksize", 64)?,
                nested_block: size(&mut keys, "nested_blocksize", 256)?,
                offset,
            })
        };
        read().map_err(|what| part.error(&format!("is not supported: {what}")))
    }
}

struct Floats<'a> {
    table: Vec<f32>,
    numbers: &'a [u8],
    inputs: usize,
    scales: Vec<f32>,
    /// Values that share a scale.
    block: usize,
}

impl Unpacked for Floats<'_> {
    fn row(&self, output: usize, row: &mut [f32]) {
        for (at, value) in (output * self.inputs..).zip(row) {
            let number = self.numbers[at / 2] >> (4 - at % 2 * 4) & 15;
            *value = self.scales[at / self.block] * self.table[usize::from(number)];
        }
    }
}
