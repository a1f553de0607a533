//! The blocks of the formats `IQ1` to `IQ3`, without loss as codes of 4 bits.
//!
//! Their quants are eighths of at most 16 integers, times an f16 scale and a factor of 16 or 32 inputs. A block of 256 becomes
//! the scale, a factor for each 16 inputs, and codes: places in the tables of `formats`, in the order of `IQ4_XS`.

use super::block_type::{BlockType, Floats};
use super::formats::BLOCK;
use super::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use rayon::prelude::*;
use std::array::from_fn;

/// Bytes of a block of codes.
pub(super) const SIZE: usize = CODES + 128;
/// Where factors and codes begin.
const FACTORS: usize = 2;
const CODES: usize = FACTORS + 16;

/// What a block has for a group of inputs, by the group's number.
type OfGroup<T> = fn(&[u8], usize) -> T;

/// How blocks of a type are read.
struct Codebook {
    kind: BlockType,
    /// The stored number `s` of the factor `2 s + 1` of inputs `16 i .. 16 i + 16`.
    scale: OfGroup<u8>,
    /// The codes of inputs `8 i .. 8 i + 8`.
    codes: OfGroup<[u8; 8]>,
}

/// The blocks as codes; `None` if the type has no codebook.
pub(super) fn coded(kind: BlockType, data: &[u8]) -> Option<Vec<u8>> {
    let codebook = Codebook::of(kind)?;
    let size = kind.type_size();
    let mut coded = vec![0u8; data.len() / size * SIZE];
    let pairs = coded
        .par_chunks_exact_mut(SIZE)
        .zip(data.par_chunks_exact(size));
    pairs.for_each(|(to, block)| codebook.write(block, to));
    Some(coded)
}

impl Codebook {
    fn of(kind: BlockType) -> Option<Self> {
        let (scale, codes): (OfGroup<u8>, OfGroup<[u8; 8]>) = match kind {
            BlockType::Iq3S => (|block, i| nibble(&block[106..], i / 2), iq3_s),
            BlockType::Iq3Xxs => (|block, i| upper_four(&block[66 + i / 2 * 4..]), iq3_xxs),
            BlockType::Iq2S => (|block, i| nibble(&block[74..], i), iq2_s),
            BlockType::Iq2Xs => (|block, i| nibble(&block[66..], i), iq2_xs),
            BlockType::Iq2Xxs => (|block, i| upper_four(&block[6 + i / 2 * 8..]), iq2_xxs),
            BlockType::Iq1S => (
                |block, i| (short(&block[34 + i / 2 * 2..]) >> 12 & 7) as u8,
                iq1_s,
            ),
            BlockType::Iq1M => (iq1_m_scale, iq1_m),
            _ => return None,
        };
        Some(Self { kind, scale, codes })
    }

    /// Writes a block as codes to bytes that are zero.
    fn write(&self, block: &[u8], to: &mut [u8]) {
        let scale = match self.kind.floats() {
            Floats::Nibbles(places) => Floats::of_nibbles(block, places),
            _ => [block[0], block[1]],
        };
        to[..FACTORS].copy_from_slice(&scale);
        for (i, factor) in to[FACTORS..CODES].iter_mut().enumerate() {
            *factor = 2 * (self.scale)(block, i) + 1;
        }
        for group in 0..32 {
            for (j, code) in (self.codes)(block, group).into_iter().enumerate() {
                let (sub, k) = (group / 4, group % 4 * 8 + j);
                to[CODES + sub * BLOCK / 2 + k % 16] |= code << (k / 16 * 4);
            }
        }
    }
}

/// A scale, 64 bytes of places, their ninth bits, signs, and scales of 32 inputs.
fn iq3_s(block: &[u8], group: usize) -> [u8; 8] {
    let magnitudes = fours(|i| {
        let at = 2 * group + i;
        IQ3_S[usize::from(block[2 + at]) | bits(block[66 + at / 8], at % 8, 1) << 8]
    });
    signed(magnitudes, block[74 + group])
}

/// A scale, 64 bytes of places, then words of signs and a scale for each 32 inputs.
fn iq3_xxs(block: &[u8], group: usize) -> [u8; 8] {
    let magnitudes = fours(|i| IQ3_XXS[usize::from(block[2 + 2 * group + i])]);
    let word = long(&block[66 + group / 4 * 4..]);
    signed(magnitudes, even(word >> (group % 4 * 7)))
}

/// A scale, 32 bytes of places, signs, the upper two bits of places, and scales of 16 inputs.
fn iq2_s(block: &[u8], group: usize) -> [u8; 8] {
    let upper = bits(block[66 + group / 4], group % 4 * 2, 3);
    let place = usize::from(block[2 + group]) | upper << 8;
    signed(eights(IQ2_S[place]), block[34 + group])
}

/// A scale, numbers of nine bits of a place and seven of signs, and scales of 16 inputs.
fn iq2_xs(block: &[u8], group: usize) -> [u8; 8] {
    let both = short(&block[2 + 2 * group..]);
    signed(
        eights(IQ2_XS[usize::from(both & 511)]),
        even(u32::from(both >> 9)),
    )
}

/// A scale, then for each 32 inputs four bytes of places, and a word of signs and a scale.
fn iq2_xxs(block: &[u8], group: usize) -> [u8; 8] {
    let part = &block[2 + group / 4 * 8..];
    let word = long(&part[4..]);
    signed(
        eights(IQ2_XXS[usize::from(part[group % 4])]),
        even(word >> (group % 4 * 7)),
    )
}

/// A scale, 32 bytes of places, and for each 32 inputs the upper three bits of four places, a scale, and whether the shift is
/// down.
fn iq1_s(block: &[u8], group: usize) -> [u8; 8] {
    let rest = short(&block[34 + group / 4 * 2..]);
    let upper = usize::from(rest >> (group % 4 * 3) & 7);
    shifted(
        IQ1[usize::from(block[group + 2]) | upper << 8],
        rest >> 15 != 0,
    )
}

/// 32 bytes of places, four bits for each with the upper three bits and whether the shift is down, and scales of three bits.
fn iq1_m(block: &[u8], group: usize) -> [u8; 8] {
    let rest = nibble(&block[32..], group);
    let place = usize::from(block[group]) | bits(rest, 0, 7) << 8;
    shifted(IQ1[place], rest & 8 != 0)
}

/// Scales of 16 inputs, four in the lower bits of 16.
fn iq1_m_scale(block: &[u8], i: usize) -> u8 {
    (short(&block[48 + i / 4 * 2..]) >> (i % 4 * 3) & 7) as u8
}

/// Numbers of eight magnitudes, of two bits each.
fn eights(entry: u16) -> [u8; 8] {
    from_fn(|j| (entry >> (2 * j) & 3) as u8)
}

/// Numbers of eight magnitudes by two entries, of four bits each.
fn fours(entry: impl Fn(usize) -> u16) -> [u8; 8] {
    let entries = [entry(0), entry(1)];
    from_fn(|j| (entries[j / 4] >> (j % 4 * 4) & 15) as u8)
}

/// Codes of magnitudes with signs, of which a set bit is a minus.
fn signed(magnitudes: [u8; 8], signs: u8) -> [u8; 8] {
    from_fn(|j| magnitudes[j] | (signs >> j & 1) << 3)
}

/// Eight signs of which an even number is set, by the lowest seven bits.
fn even(bits: u32) -> u8 {
    let seven = (bits & 127) as u8;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Codes of -1, 0 and 1, shifted by an eighth.
fn shifted(entry: u16, is_down: bool) -> [u8; 8] {
    // -9, -1 and 7, or -7, 1 and 9.
    let codes = if is_down { [13, 11, 4] } else { [12, 3, 5] };
    from_fn(|j| codes[usize::from(entry >> (2 * j) & 3)])
}

/// Bits of a byte.
fn bits(byte: u8, from: usize, mask: u8) -> usize {
    usize::from(byte >> from & mask)
}

/// Four bits of bytes that have two numbers each, the first in the lower half.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (i % 2 * 4) & 15
}

/// The upper four bits of a word.
fn upper_four(word: &[u8]) -> u8 {
    word[3] >> 4
}

fn short(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

fn long(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
