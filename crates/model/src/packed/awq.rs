//! AWQ (Lin et al. 2023, "Activation-aware Weight Quantization") as AutoAWQ's GEMM layout has it: numbers of 4 bits in
//! words of eight outputs of one input, whose order is not that of the outputs.

use super::integers::{Groups, Integers, expected_blocks, transposed, unpacked, usual_blocks};
use super::parts::{FLOATS, Part, Parts, WORDS};
use super::scheme::{Opened, Scheme};
use super::settings::group_size;
use crate::config::keys::Keys;
use foretoken_core::error::Result;
use foretoken_kernels::quant::BlockType;

const BITS: u32 = 4;
/// Numbers of a word.
const PACK: usize = 8;
/// The place in a word of each of its outputs.
const PLACES: [usize; PACK] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Keys that say nothing about the weights.
const HARMLESS: &str = "
    backend do_fuse exllama_config fuse_max_seq_len modules modules_to_fuse modules_to_not_convert
    quant_method";

/// AWQ, with a zero point of each group.
#[derive(Debug)]
pub struct Awq {
    /// Inputs of a group; `None` = all.
    group: Option<usize>,
}

impl Awq {
    /// Reads the keys of a `quantization_config` for AWQ.
    ///
    /// # Errors
    /// A message, if a key asks for something that is not supported.
    pub fn take(keys: &mut Keys) -> Result<Self, String> {
        keys.rename("w_bit", "bits");
        keys.rename("q_group_size", "group_size");
        keys.rename("format", "version");
        keys.only("bits", BITS)?;
        keys.only("zero_point", true)?;
        let version = keys.peek("version");
        // The others are programs that read the same layout.
        let known = ["gemm", "exllama", "ipex"];
        if let Some(name) = keys.text("version")?
            && !known.contains(&name.to_lowercase().as_str())
        {
            return Err(keys.refused("version", &version, "only gemm is"));
        }
        let group = group_size(keys)?;
        keys.ignore(HARMLESS);
        Ok(Self { group })
    }
}

impl Scheme for Awq {
    fn label(&self) -> String {
        "AWQ".into()
    }

    fn is_in(&self, parts: &Parts<'_>) -> bool {
        parts.has("qweight") || parts.has("qzeros")
    }

    fn open<'a>(&self, parts: &mut Parts<'a>, shape: (usize, usize)) -> Result<Opened<'a>> {
        let (outputs, inputs) = shape;
        let words = outputs.div_ceil(PACK);
        if !outputs.is_multiple_of(PACK) {
            return Err(parts.error("qweight", "needs a multiple of 8 outputs"));
        }
        let group = self.group.unwrap_or(inputs);
        let groups = inputs.div_ceil(group);
        let numbers = parts.get("qweight", &[inputs, words], WORDS)?;
        let zeros = parts.get("qzeros", &[groups, words], WORDS)?;
        let scales = parts.get("scales", &[groups, outputs], FLOATS)?;
        let blocks = expected_blocks((BITS, false), (inputs, group), &scales.dtype);
        Ok(Opened::new(blocks, move || {
            Ok(Integers {
                shape,
                bits: BITS,
                numbers: ordered(&numbers, shape)?,
                zeros: ordered(&zeros, (outputs, groups))?,
                scales: transposed(&scales.scales()?, outputs),
                groups: Groups::Of(group),
            })
        }))
    }

    fn usual_blocks(&self) -> Option<BlockType> {
        usual_blocks(BITS, false)
    }
}

/// `[outputs, columns]` of the words of a part, `[columns, outputs / 8]`.
fn ordered(part: &Part<'_>, (outputs, columns): (usize, usize)) -> Result<Vec<u8>> {
    let words = part.words()?;
    Ok(unpacked((outputs, columns), |output, column| {
        let at = column * (outputs / PACK) + output / PACK;
        words.number(at, PLACES[output % PACK], BITS)
    }))
}
