//! GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it: numbers of 4 or 8 bits in words of inputs of one
//! output.

use super::integers::{Groups, Integers, expected_blocks, transposed, unpacked, usual_blocks};
use super::listed::{groups_of, listed_groups};
use super::parts::{FLOATS, Part, Parts, WORDS, numbers_of_word};
use super::scheme::{Opened, Scheme};
use super::settings::group_size;
use crate::config::keys::Keys;
use foretoken_core::error::Result;
use foretoken_kernels::quant::BlockType;

/// Keys that say nothing about the weights, or what their tensors say.
const HARMLESS: &str = "
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs
    damp_auto_increment damp_percent dataset disable_exllama exllama_config hyb_act lm_head
    max_input_length meta method model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_not_convert mse
    offload_to_disk pad_token_id quant_method quantizer static_groups tokenizer true_sequential
    use_cuda_fp16 use_exllama version";

/// GPTQ.
#[derive(Debug)]
pub struct Gptq {
    bits: u32,
    /// Inputs of a group; `None` = all.
    group: Option<usize>,
    is_symmetric: bool,
    /// Whether inputs were quantized in another order than their own.
    has_order: bool,
    /// The number that is added to stored zero points: those of the first format are less by one.
    zero_offset: u8,
}

impl Gptq {
    /// Reads the keys of a `quantization_config` for GPTQ.
    ///
    /// # Errors
    /// A message, if a key asks for something that is not supported.
    pub fn take(keys: &mut Keys) -> Result<Self, String> {
        let given = keys.peek("bits");
        let bits = match keys.size("bits")? {
            Some(bits @ (4 | 8)) => bits as u32,
            _ => return Err(keys.refused("bits", &given, "only 4 and 8 are")),
        };
        keys.rename("format", "checkpoint_format");
        let given = keys.peek("checkpoint_format");
        let zero_offset = match keys.text("checkpoint_format")?.as_deref() {
            None | Some("gptq") => 1,
            Some("gptq_v2") => 0,
            Some(_) => {
                return Err(keys.refused("checkpoint_format", &given, "only gptq and gptq_v2 are"));
            }
        };
        keys.only("pack_dtype", "int32")?;
        let group = group_size(keys)?;
        let is_symmetric = keys.flag("sym")?.unwrap_or(true);
        let has_order = keys.flag("desc_act")?.unwrap_or(false);
        keys.ignore(HARMLESS);
        Ok(Self {
            bits,
            group,
            is_symmetric,
            has_order,
            zero_offset,
        })
    }

    /// `[outputs, groups]` of stored zero points, which wrap: one less than 0 is stored as the largest.
    fn zeros(&self, part: &Part<'_>, (outputs, groups): (usize, usize)) -> Result<Vec<u8>> {
        let (words, pack, bits) = (part.words()?, numbers_of_word(self.bits), self.bits);
        let largest = u8::MAX >> (8 - bits);
        Ok(unpacked((outputs, groups), |output, group| {
            let at = group * (outputs / pack) + output / pack;
            let stored = words.number(at, output % pack, bits);
            stored.wrapping_add(self.zero_offset) & largest
        }))
    }
}

impl Scheme for Gptq {
    fn label(&self) -> String {
        format!("GPTQ{}", self.bits)
    }

    fn is_in(&self, parts: &Parts<'_>) -> bool {
        parts.has("qweight") || parts.has("qzeros")
    }

    fn open<'a>(&self, parts: &mut Parts<'a>, shape: (usize, usize)) -> Result<Opened<'a>> {
        let (outputs, inputs) = shape;
        let (bits, pack) = (self.bits, numbers_of_word(self.bits));
        if !outputs.is_multiple_of(pack) || !inputs.is_multiple_of(pack) {
            let what = format!("needs inputs and outputs that are multiples of {pack}");
            return Err(parts.error("qweight", &what));
        }
        let group = self.group.unwrap_or(inputs);
        let groups = inputs.div_ceil(group);
        let numbers = parts.get("qweight", &[inputs / pack, outputs], WORDS)?;
        let zeros = parts.get("qzeros", &[groups, outputs / pack], WORDS)?;
        let scales = parts.get("scales", &[groups, outputs], FLOATS)?;
        let listed = listed_groups(parts, "g_idx", inputs)?;
        skip_empty_bias(parts)?;
        let (zeros_of, symmetric) = (Self { ..*self }, self.is_symmetric);
        let blocks = expected_blocks((bits, symmetric), (inputs, group), &scales.dtype);
        let opened = Opened::new(blocks, move || {
            let words = numbers.words()?;
            let number = |output: usize, input: usize| {
                words.number(input / pack * outputs + output, input % pack, bits)
            };
            Ok(Integers {
                shape,
                bits,
                numbers: unpacked(shape, number),
                zeros: zeros_of.zeros(&zeros, (outputs, groups))?,
                scales: transposed(&scales.scales()?, outputs),
                groups: groups_of(listed.as_ref(), Groups::Of(group), groups)?,
            })
        });
        Ok(Opened {
            may_reorder: self.has_order,
            ..opened
        })
    }

    fn usual_blocks(&self) -> Option<BlockType> {
        usual_blocks(self.bits, self.is_symmetric)
    }
}

/// Some programs store a bias of zeros for every matrix, also where the architecture has none: it counts as read.
fn skip_empty_bias(parts: &mut Parts<'_>) -> Result<()> {
    if !parts.has("bias") {
        return Ok(());
    }
    let bias = parts.peek("bias")?;
    let is_empty = bias
        .data()
        .map_or(true, |data| data.iter().all(|&byte| byte == 0));
    if is_empty {
        parts.skip("bias");
    }
    Ok(())
}
