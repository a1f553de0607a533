//! Matrices of whole numbers, of which each group of inputs has a scale and a zero point: what AWQ, GPTQ and
//! compressed-tensors pack in different orders. A weight is `scale * (number - zero)`.

use super::scheme::{Blocks, Unpacked};
use foretoken_kernels::quant::{BLOCK, BlockType};
use half::f16;
use rayon::prelude::*;

/// Outputs that a thread unpacks at a time: as many as a line of the cache has in the layouts whose words are those of
/// one input.
const STRIP: usize = 128;

/// A matrix of whole numbers.
pub struct Integers {
    /// Outputs and inputs.
    pub shape: (usize, usize),
    pub bits: u32,
    /// `[outputs, inputs]`, from 0.
    pub numbers: Vec<u8>,
    /// `[outputs, groups]`.
    pub scales: Vec<f32>,
    pub zeros: Vec<u8>,
    pub groups: Groups,
}

/// The group of each input.
pub enum Groups {
    /// Groups of so many inputs each, one after another. The last group may have fewer inputs.
    Of(usize),
    /// The number of the group of each input.
    Listed(Vec<u32>),
}

impl Groups {
    /// The group of an input.
    pub fn of(&self, input: usize) -> usize {
        match self {
            Self::Of(size) => input / size,
            Self::Listed(groups) => groups[input] as usize,
        }
    }
}

/// `[outputs, columns]` of what `number` says about an output and a column.
pub fn unpacked(
    (outputs, columns): (usize, usize),
    number: impl Fn(usize, usize) -> u8 + Sync,
) -> Vec<u8> {
    let mut out = vec![0; outputs * columns];
    let strips = out.par_chunks_mut((STRIP * columns).max(1)).enumerate();
    strips.for_each(|(strip, out)| {
        let outputs = out.len() / columns;
        for column in 0..columns {
            for i in 0..outputs {
                out[i * columns + column] = number(strip * STRIP + i, column);
            }
        }
    });
    out
}

/// `[outputs, groups]` of `[groups, outputs]`.
pub fn transposed(values: &[f32], outputs: usize) -> Vec<f32> {
    let groups = values.len() / outputs.max(1);
    let at = |i: usize| values[i % groups * outputs + i / groups];
    (0..values.len()).map(at).collect()
}

/// The blocks of numbers of `bits` bits; `None` if there are none for all zero points. In front of them, a matrix has
/// `inputs` inputs in groups of `group` with scales in `dtype`.
pub fn expected_blocks(
    (bits, is_symmetric): (u32, bool),
    (inputs, group): (usize, usize),
    dtype: &str,
) -> Option<BlockType> {
    let is_whole = group >= inputs || group.is_multiple_of(BLOCK);
    // Scales of f32 are seldom those of f16.
    let fits = inputs.is_multiple_of(BLOCK) && is_whole && dtype != "F32";
    usual_blocks(bits, is_symmetric).filter(|_| fits)
}

/// The blocks of numbers of `bits` bits whose zero point is the middle if `is_symmetric`, and any zero point otherwise.
/// `None` = there are no such blocks.
pub fn usual_blocks(bits: u32, is_symmetric: bool) -> Option<BlockType> {
    let middle = 1 << (bits - 1);
    let any = (1 << bits) - 1;
    let zeros = if is_symmetric {
        (middle, middle)
    } else {
        (0, any)
    };
    blocks_of(bits, zeros)
}

/// The blocks that hold every number of `bits` bits less zero points from `min` to `max`.
fn blocks_of(bits: u32, (min, max): (i32, i32)) -> Option<BlockType> {
    let (low, high) = (-max, (1 << bits) - 1 - min);
    let kinds = [
        (BlockType::Q4_0, 8),
        (BlockType::Q5_0, 16),
        (BlockType::Q8_0, 128),
    ];
    let mut fitting = kinds
        .iter()
        .filter(|(_, limit)| -limit <= low && high < *limit);
    fitting.next().map(|(kind, _)| *kind)
}

impl Integers {
    fn groups_of_row(&self) -> usize {
        self.scales.len() / self.shape.0.max(1)
    }

    /// The inputs in an order in which those of each block are of one group, if there is one: `None` in it is the
    /// order that they have.
    fn order(&self) -> Option<Option<Vec<u32>>> {
        let inputs = self.shape.1;
        match &self.groups {
            Groups::Of(size) => {
                let is_whole = *size >= inputs || size.is_multiple_of(BLOCK);
                is_whole.then_some(None)
            }
            Groups::Listed(groups) => {
                let mut order: Vec<u32> = (0..inputs as u32).collect();
                order.sort_by_key(|&input| groups[input as usize]);
                let group = |&input: &u32| groups[input as usize];
                let mut blocks = order.chunks(BLOCK);
                let is_whole =
                    blocks.all(|block| block.first().map(group) == block.last().map(group));
                is_whole.then_some(Some(order))
            }
        }
    }

    fn write_blocks(&self, kind: BlockType, order: Option<&[u32]>) -> Vec<u8> {
        let ((outputs, inputs), groups) = (self.shape, self.groups_of_row());
        let row_bytes = inputs / BLOCK * kind.type_size();
        let mut data = vec![0; outputs * row_bytes];
        let rows = data.par_chunks_exact_mut(row_bytes.max(1)).enumerate();
        rows.for_each(|(output, row)| {
            let numbers = &self.numbers[output * inputs..][..inputs];
            let blocks = row.chunks_exact_mut(kind.type_size());
            for (at, block) in blocks.enumerate() {
                let input = |k: usize| match order {
                    Some(order) => order[at * BLOCK + k] as usize,
                    None => at * BLOCK + k,
                };
                let group = output * groups + self.groups.of(input(0));
                let zero = i16::from(self.zeros[group]);
                let values = std::array::from_fn(|k| i16::from(numbers[input(k)]) - zero);
                write_block(kind, f16::from_f32(self.scales[group]), &values, block);
            }
        });
        data
    }
}

/// Whether blocks of `kind` are finite with this scale: Q5_0 is held with 16 times it as an offset.
fn fits(kind: BlockType, scale: f32) -> bool {
    let factor = if kind == BlockType::Q5_0 { 16. } else { 1. };
    f16::from_f32(factor * scale).is_finite()
}

/// Writes a block of `kind` with this scale and these values, which it can hold.
fn write_block(kind: BlockType, scale: f16, values: &[i16; BLOCK], block: &mut [u8]) {
    let (head, body) = block.split_at_mut(2);
    head.copy_from_slice(&scale.to_le_bytes());
    if kind == BlockType::Q8_0 {
        for (byte, &value) in body.iter_mut().zip(values) {
            *byte = value as u8;
        }
        return;
    }
    let is_five_bits = kind == BlockType::Q5_0;
    let bias = if is_five_bits { 16 } else { 8 };
    let numbers = values.map(|value| (value + bias) as u32);
    let (high, low) = body.split_at_mut(if is_five_bits { 4 } else { 0 });
    if is_five_bits {
        let bits = numbers.iter().rev();
        let bits = bits.fold(0u32, |bits, number| bits << 1 | number >> 4);
        high.copy_from_slice(&bits.to_le_bytes());
    }
    for (k, byte) in low.iter_mut().enumerate() {
        *byte = (numbers[k] & 15 | (numbers[k + BLOCK / 2] & 15) << 4) as u8;
    }
}

impl Unpacked for Integers {
    fn row(&self, output: usize, row: &mut [f32]) {
        let (inputs, groups) = (self.shape.1, self.groups_of_row());
        let numbers = &self.numbers[output * inputs..][..inputs];
        for (input, (value, &number)) in row.iter_mut().zip(numbers).enumerate() {
            let group = output * groups + self.groups.of(input);
            let number = i16::from(number) - i16::from(self.zeros[group]);
            *value = self.scales[group] * f32::from(number);
        }
    }

    fn blocks(&self) -> Option<Blocks> {
        let is_exact = |&scale: &f32| f16::from_f32(scale).to_f32() == scale;
        if !self.shape.1.is_multiple_of(BLOCK) || !self.scales.iter().all(is_exact) {
            return None;
        }
        let zeros = self.zeros.iter().map(|&zero| i32::from(zero));
        let kind = blocks_of(self.bits, (zeros.clone().min()?, zeros.max()?))?;
        if self.scales.iter().any(|&scale| !fits(kind, scale)) {
            return None;
        }
        let inputs = self.order()?;
        let data = self.write_blocks(kind, inputs.as_deref());
        Some(Blocks { kind, data, inputs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretoken_kernels::quant::QuantMatrix;

    type Shape = (usize, usize);

    fn noise(seed: u32) -> impl Iterator<Item = u32> {
        let mut state = seed | 1;
        std::iter::repeat_with(move || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state >> 3
        })
    }

    /// `zero` of all groups, or any.
    fn random(bits: u32, zero: Option<u8>, groups: Groups) -> Integers {
        let (outputs, inputs): Shape = (19, 192);
        let mask = (1u32 << bits) - 1;
        let count = match &groups {
            Groups::Of(size) => inputs.div_ceil(*size),
            Groups::Listed(groups) => *groups.iter().max().unwrap() as usize + 1,
        };
        let scale = |n: u32| f16::from_f32((n % 4001) as f32 / 3000. - 0.5).to_f32();
        Integers {
            shape: (outputs, inputs),
            bits,
            numbers: noise(3)
                .map(|n| (n & mask) as u8)
                .take(outputs * inputs)
                .collect(),
            scales: noise(5).map(scale).take(outputs * count).collect(),
            zeros: noise(7)
                .map(|n| zero.unwrap_or((n & mask) as u8))
                .take(outputs * count)
                .collect(),
            groups,
        }
    }

    /// The values of blocks are those of rows, bit for bit.
    #[test]
    fn blocks_hold_every_value() {
        let listed: Vec<u32> = (0..192).map(|input| input * 5 % 6).collect();
        let cases = [
            (4, Some(8), Groups::Of(64), BlockType::Q4_0),
            (4, None, Groups::Of(32), BlockType::Q5_0),
            (4, None, Groups::Of(128), BlockType::Q5_0),
            (8, Some(128), Groups::Of(192), BlockType::Q8_0),
            (4, Some(8), Groups::Listed(listed.clone()), BlockType::Q4_0),
            (4, None, Groups::Listed(listed), BlockType::Q5_0),
        ];
        for (bits, zero, groups, kind) in cases {
            let integers = random(bits, zero, groups);
            let (outputs, inputs) = integers.shape;
            let blocks = integers.blocks().unwrap();
            assert_eq!(blocks.kind, kind);
            let matrix = QuantMatrix::from_blocks(kind, &blocks.data, outputs, inputs).unwrap();
            let found = matrix.dequantize();
            let mut row = vec![0.; inputs];
            for output in 0..outputs {
                integers.row(output, &mut row);
                for (i, found) in found[output * inputs..][..inputs].iter().enumerate() {
                    let input = blocks.inputs.as_ref().map_or(i, |order| order[i] as usize);
                    assert_eq!(*found, row[input], "{kind}: {output}, {i}");
                }
            }
        }
    }

    #[test]
    fn what_no_block_holds_stays_as_it_is() {
        // Zero points that leave more than 8 bits, and groups that end within a block.
        assert!(random(8, None, Groups::Of(64)).blocks().is_none());
        assert!(random(4, None, Groups::Of(48)).blocks().is_none());
        let uneven = (0..192).map(|input| u32::from(input > 40)).collect();
        assert!(random(4, None, Groups::Listed(uneven)).blocks().is_none());
        let mut inexact = random(4, None, Groups::Of(64));
        inexact.scales[3] = 0.1;
        assert!(inexact.blocks().is_none());
        assert_eq!(
            expected_blocks((4, true), (64, 32), "F16"),
            Some(BlockType::Q4_0)
        );
        assert_eq!(
            expected_blocks((4, false), (64, 64), "BF16"),
            Some(BlockType::Q5_0)
        );
        assert_eq!(
            expected_blocks((8, true), (96, 96), "F16"),
            Some(BlockType::Q8_0)
        );
        assert_eq!(expected_blocks((8, false), (64, 64), "F16"), None);
        assert_eq!(expected_blocks((4, true), (64, 16), "F16"), None);
        assert_eq!(expected_blocks((4, true), (48, 48), "F16"), None);
    }
}
