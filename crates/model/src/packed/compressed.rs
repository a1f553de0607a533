//! compressed-tensors, which llm-compressor writes: whole numbers in words or bytes, and FP8.

use super::fp8::{self, E4M3};
use super::integers::{Groups, Integers, expected_blocks, unpacked, usual_blocks};
use super::listed::{groups_of, listed_groups};
use super::parts::{FLOATS, Part, Parts, WORDS, numbers_of_word};
use super::scheme::{FloatFormat, Opened, Scheme};
use crate::config::keys::{Keys, ModelShape};
use foretoken_core::error::Result;
use foretoken_kernels::quant::BlockType;

/// Numbers of bytes are stored less this, and words have it added.
const MIDDLE: u8 = 128;

/// Keys of weights that say nothing about what is stored, or what the tensors say.
const HARMLESS: &str = "observer observer_kwargs scale_dtype zp_dtype";

/// How numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Storage {
    /// Several in a word.
    Words,
    /// Each in a byte.
    Bytes,
    Fp8,
}

/// The weights that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strategy {
    Tensor,
    Channel,
    /// So many inputs of an output.
    Group(usize),
    /// Outputs and inputs.
    Block(usize, usize),
}

/// Weights of one of the `config_groups`.
#[derive(Debug, Clone, Copy)]
pub struct Compressed {
    storage: Storage,
    bits: u32,
    is_symmetric: bool,
    strategy: Strategy,
    /// Whether inputs were quantized in another order than their own.
    has_order: bool,
}

impl Compressed {
    /// FP8 with a scale for each output, as other programs pack it, too.
    pub const FLOAT8_OF_OUTPUTS: Self = Self {
        storage: Storage::Fp8,
        bits: 8,
        is_symmetric: true,
        strategy: Strategy::Channel,
        has_order: false,
    };

    /// Reads the keys `weights` of a group with this `format`.
    ///
    /// # Errors
    /// A message that names what is not supported.
    pub fn take(mut keys: Keys, format: &str) -> Result<Self, String> {
        let (kind, given) = (keys.text("type")?, keys.peek("num_bits"));
        let bits = keys.size("num_bits")?.unwrap_or(8);
        let kind = kind.as_deref().unwrap_or("int");
        let storage = match (format, kind, bits) {
            ("pack-quantized", "int", 4 | 8) => Storage::Words,
            ("int-quantized" | "naive-quantized", "int", 4 | 8) => Storage::Bytes,
            ("float-quantized" | "naive-quantized", "float", 8) => Storage::Fp8,
            _ => {
                let what = format!("not with type {kind} and format {format}");
                return Err(keys.refused("num_bits", &given, &what));
            }
        };
        let is_symmetric = keys.flag("symmetric")?.unwrap_or(true);
        let strategy = strategy(&mut keys)?;
        keys.only("dynamic", false)?;
        // "static" and "weight" are orders whose groups are those of the inputs' own.
        let has_order = ["group", "dynamic"]
            .iter()
            .any(|order| keys.peek("actorder") == *order);
        keys.ignore("actorder");
        keys.ignore(HARMLESS);
        keys.finish(&ModelShape::default())?;
        Ok(Self {
            storage,
            bits: bits as u32,
            is_symmetric,
            strategy,
            has_order,
        })
    }

    /// Outputs and inputs that share a scale.
    fn tile(&self, (outputs, inputs): (usize, usize)) -> (usize, usize) {
        match self.strategy {
            Strategy::Tensor => (outputs, inputs),
            Strategy::Channel => (1, inputs),
            Strategy::Group(size) => (1, size),
            Strategy::Block(outputs, inputs) => (outputs, inputs),
        }
    }

    /// Checks whole numbers.
    fn open_integers<'a>(
        &self,
        parts: &mut Parts<'a>,
        shape: (usize, usize),
    ) -> Result<Opened<'a>> {
        let (own, (outputs, inputs)) = (*self, shape);
        let tile = self.tile(shape);
        let grid = [outputs.div_ceil(tile.0), inputs.div_ceil(tile.1)];
        let numbers = match own.storage {
            Storage::Words => {
                let words = inputs.div_ceil(numbers_of_word(own.bits));
                parts.get("weight_packed", &[outputs, words], WORDS)?
            }
            _ => parts.get("weight", &[outputs, inputs], &["I8"])?,
        };
        let declared = declared_shape(parts)?;
        let scales = parts.scales("weight_scale", &grid, FLOATS)?;
        let dtype = scales.dtype.clone();
        let zeros = self.open_zeros(parts, &grid)?;
        let listed = listed_groups(parts, "weight_g_idx", inputs)?;
        let bits = own.bits_in_blocks();
        let symmetric = own.is_symmetric || zeros.is_none();
        let unpack = move || {
            check_declared(declared.as_ref(), shape)?;
            let spread = |at: usize| at / grid[1] / tile.0 * grid[1] + at % grid[1];
            let scales = scales.scales()?;
            let zeros = match &zeros {
                Some(zeros) => own.zeros(zeros, grid)?,
                None => vec![own.middle(); grid[0] * grid[1]],
            };
            let count = outputs * grid[1];
            Ok(Integers {
                shape,
                bits,
                numbers: own.numbers(&numbers, shape)?,
                scales: (0..count).map(|at| scales[spread(at)]).collect(),
                zeros: (0..count).map(|at| zeros[spread(at)]).collect(),
                groups: groups_of(listed.as_ref(), Groups::Of(tile.1), grid[1])?,
            })
        };
        let blocks = expected_blocks((bits, symmetric), (inputs, tile.1), &dtype);
        Ok(Opened {
            may_reorder: self.has_order,
            ..Opened::new(blocks, unpack)
        })
    }

    /// Bits of numbers as they are unpacked.
    fn bits_in_blocks(&self) -> u32 {
        match self.storage {
            Storage::Words => self.bits,
            _ => 8,
        }
    }

    /// The zero point of symmetric numbers.
    fn middle(&self) -> u8 {
        match self.storage {
            Storage::Words => 1 << (self.bits - 1),
            _ => MIDDLE,
        }
    }

    fn numbers(&self, part: &Part<'_>, (outputs, inputs): (usize, usize)) -> Result<Vec<u8>> {
        if self.storage != Storage::Words {
            return Ok(part.data()?.iter().map(|byte| byte ^ MIDDLE).collect());
        }
        let (words, pack, bits) = (part.words()?, numbers_of_word(self.bits), self.bits);
        let row = inputs.div_ceil(pack);
        Ok(unpacked((outputs, inputs), |output, input| {
            words.number(output * row + input / pack, input % pack, bits)
        }))
    }

    /// The part with zero points, if there is one: in words of outputs, or in bytes.
    fn open_zeros<'a>(&self, parts: &mut Parts<'a>, grid: &[usize; 2]) -> Result<Option<Part<'a>>> {
        let end = "weight_zero_point";
        if !parts.has(end) {
            let error = || parts.error(end, "is missing");
            return self.is_symmetric.then_some(None).ok_or_else(error);
        }
        if self.storage == Storage::Words && parts.has_dtype(end, WORDS[0]) {
            let words = grid[0].div_ceil(numbers_of_word(self.bits));
            return parts.get(end, &[words, grid[1]], WORDS).map(Some);
        }
        parts.scales(end, grid, &["I8"]).map(Some)
    }

    /// `[outputs, groups]` of the zero points of a part.
    fn zeros(&self, part: &Part<'_>, [outputs, groups]: [usize; 2]) -> Result<Vec<u8>> {
        if part.dtype != WORDS[0] {
            let middle = self.middle();
            let zero = |byte: &u8| byte.wrapping_add(middle);
            return Ok(part.data()?.iter().map(zero).collect());
        }
        let (words, pack, bits) = (part.words()?, numbers_of_word(self.bits), self.bits);
        Ok(unpacked((outputs, groups), |output, group| {
            words.number(output / pack * groups + group, output % pack, bits)
        }))
    }
}

impl Scheme for Compressed {
    fn label(&self) -> String {
        match self.storage {
            Storage::Fp8 => "FP8".into(),
            _ => format!("INT{}", self.bits),
        }
    }

    fn is_in(&self, parts: &Parts<'_>) -> bool {
        match self.storage {
            Storage::Words => parts.has("weight_packed") || parts.has("weight_shape"),
            Storage::Bytes => parts.has_dtype("weight", "I8"),
            Storage::Fp8 => parts.has_dtype("weight", E4M3),
        }
    }

    fn open<'a>(&self, parts: &mut Parts<'a>, shape: (usize, usize)) -> Result<Opened<'a>> {
        // Parts for activations, which are not quantized here.
        for end in ["input_scale", "input_zero_point"] {
            parts.skip(end);
        }
        match self.storage {
            Storage::Fp8 => fp8::open(parts, shape, "weight_scale", self.tile(shape)),
            _ => self.open_integers(parts, shape),
        }
    }

    fn usual_blocks(&self) -> Option<BlockType> {
        match self.storage {
            Storage::Fp8 => None,
            _ => usual_blocks(self.bits_in_blocks(), self.is_symmetric),
        }
    }

    fn floats(&self, shape: (usize, usize)) -> Option<FloatFormat> {
        let run = self.tile(shape).1;
        matches!(self.storage, Storage::Fp8).then_some(FloatFormat::Float8(run))
    }
}

/// Takes what shares a scale.
fn strategy(keys: &mut Keys) -> Result<Strategy, String> {
    let (name, group) = (keys.text("strategy")?, super::settings::group_size(keys)?);
    let given = keys.peek("block_structure");
    let strategy = match (name.as_deref(), group) {
        (Some("tensor"), _) => Some(Strategy::Tensor),
        (Some("group"), Some(size)) | (None, Some(size)) => Some(Strategy::Group(size)),
        (Some("channel"), _) => Some(Strategy::Channel),
        (Some("block"), _) => match keys.sizes("block_structure")?.as_deref() {
            Some(&[outputs, inputs]) if outputs > 0 && inputs > 0 => {
                Some(Strategy::Block(outputs, inputs))
            }
            _ => return Err(keys.refused("block_structure", &given, "it must be two sizes")),
        },
        (None, None) => Some(Strategy::Tensor),
        _ => None,
    };
    let known = "only tensor, channel, group and block are";
    keys.ignore("block_structure");
    strategy.ok_or_else(|| keys.refused("strategy", &name.unwrap_or_default().into(), known))
}

/// The part that tells the shape of numbers in words, if there is one.
fn declared_shape<'a>(parts: &mut Parts<'a>) -> Result<Option<Part<'a>>> {
    let end = "weight_shape";
    let has = parts.has(end);
    has.then(|| parts.get(end, &[2], &["I64", "I32"]))
        .transpose()
}

fn check_declared(part: Option<&Part<'_>>, (outputs, inputs): (usize, usize)) -> Result<()> {
    let Some(part) = part else {
        return Ok(());
    };
    let data = part.data()?;
    let sizes: Vec<i64> = match part.dtype.as_str() {
        "I64" => (data
            .as_chunks::<8>()
            .0
            .iter()
            .map(|b| i64::from_le_bytes(*b)))
        .collect(),
        _ => {
            let words = data.as_chunks::<4>().0.iter();
            words.map(|b| i64::from(i32::from_le_bytes(*b))).collect()
        }
    };
    if sizes == [outputs as i64, inputs as i64] {
        return Ok(());
    }
    let what = format!("says {sizes:?}, the config asks for [{outputs}, {inputs}]");
    Err(part.error(&what))
}
