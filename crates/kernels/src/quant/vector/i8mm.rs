//! The products with the matrix instructions of ARMv8.6 (`i8mm`), of which one multiplies eight inputs of two outputs with
//! those of two rows.

use super::lanes::Lanes;
use super::multiply::{RecordWeights, each};
use super::neon::Quad;
use super::vectors::{VectorFormat, VectorScales, quants};
use super::{Activations, Ahead, Strip, Turn, WIDTH};
use crate::cpu::I8mm;
use crate::quant::PANEL;
use crate::quant::activations::PAIRED_ROWS;
use crate::quant::block_sums::PairSums;
use crate::quant::formats::{BLOCK, ScaleLayout, VECTOR};
use std::arch::aarch64::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Parts of a block that an instruction multiplies.
const PARTS: usize = 4;

/// Pairs of a turn, at most.
const MAX_PAIRS: usize = PAIRED_ROWS / 2;
/// Vectors of four outputs.
const VECTORS_OF_STRIP: usize = WIDTH / Quad::COUNT;
/// Blocks whose unpacked weights, and a turn's rows, fit into the first cache together.
const SEGMENT: usize = 16;

/// What belongs to four outputs: to the first two, and to the others.
type Outputs<T> = [T; 2];
/// The sums of a turn's pairs, for each vector. Of both outputs, the first row's comes first.
type Totals = [[Outputs<float32x4_t>; MAX_PAIRS]; VECTORS_OF_STRIP];
/// Blocks of a strip, for each vector.
type Unpacked<F> = [[MaybeUninit<Block<F>>; SEGMENT]; VECTORS_OF_STRIP];

/// Where a block of activations is, for consecutive pairs of rows.
#[derive(Clone, Copy)]
struct Pairs {
    q: *const i8,
    sums: *const PairSums,
}

impl Pairs {
    /// The first block of a turn, which has so many.
    fn of(x: &Activations, turn: &Turn, blocks: usize) -> Self {
        let (q, sums) = (x.q(turn.pass), x.pair_sums(turn.pass));
        let values = turn.rows.div_ceil(2) * blocks;
        assert!(turn.rows == turn.pass.rows && turn.rows <= PAIRED_ROWS);
        assert!(q.len() == 2 * values * BLOCK && sums.len() == values);
        let (q, sums) = (q.as_ptr(), sums.as_ptr());
        Self { q, sums }
    }

    /// The same pairs in block `first` of a turn.
    fn at_block(self, first: usize, turn: &Turn) -> Self {
        let pairs = turn.rows.div_ceil(2) * first;
        Self {
            q: self.q.wrapping_add(pairs * 2 * BLOCK),
            sums: self.sums.wrapping_add(pairs),
        }
    }

    /// Those of the next block, of `P` pairs.
    #[inline(always)]
    fn after<const P: usize>(self) -> Self {
        Self {
            q: self.q.wrapping_add(P * 2 * BLOCK),
            sums: self.sums.wrapping_add(P),
        }
    }
}

/// Groups of four bytes, one of each vector after the other.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn zip(a: uint8x16_t, b: uint8x16_t) -> Outputs<uint8x16_t> {
    // SAFETY: the caller's contract.
    unsafe {
        let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
        [vzip1q_u32(a, b), vzip2q_u32(a, b)].map(|both| vreinterpretq_u8_u32(both))
    }
}

/// Each number twice.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn twice(a: float32x4_t) -> Outputs<float32x4_t> {
    // SAFETY: the caller's contract.
    unsafe { [vzip1q_f32(a, a), vzip2q_f32(a, a)] }
}

/// Unsigned quants or values of a block for four outputs, as [`quants`], with eight inputs of an output side by side.
///
/// # Safety
/// As [`quants`].
#[inline(always)]
unsafe fn weights<F: VectorFormat>(tile: *const u8) -> [Outputs<uint8x16_t>; PARTS] {
    // SAFETY: by the caller's contract.
    unsafe {
        let mut weights = [[Quad::zero(); 2]; PARTS];
        if F::BITS != 4 {
            each!(part in 0 1 2 3 => {
                let quants = |v| quants::<F, Quad>(tile, v);
                weights[part] = zip(quants(2 * part), quants(2 * part + 1));
            });
            return weights;
        }
        // Both halves of bytes are moved at once.
        let value = |nibbles| match F::TABLE {
            Some(_) => Quad::look_up(const { &F::BIASED }, nibbles),
            None => nibbles,
        };
        each!(part in 0 1 => {
            let load = |v: usize| Quad::load(tile.add(v * VECTOR));
            let [first, second] = zip(load(2 * part), load(2 * part + 1));
            let low = |bytes| value(Quad::and(bytes, Quad::bytes(15)));
            let high = |bytes| value(Quad::right::<4>(bytes));
            weights[part] = [low(first), low(second)];
            weights[part + 2] = [high(first), high(second)];
        });
        weights
    }
}

/// What the sums of half a block begin with: the negative of what the bias of its quants adds.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn unbiased<F: VectorFormat>(sums: &PairSums, half: usize) -> int32x4_t {
    // SAFETY: by the caller's contract.
    unsafe {
        let less = match F::VALUE_BITS {
            8 if half == 0 => &sums.less_128,
            6 => &sums.less_32[half],
            4 if F::BIAS != 0 && half == 0 => &sums.less_8,
            _ => return vdupq_n_s32(0),
        };
        vld1q_s32(less.as_ptr())
    }
}

/// Adds to a pair's exact sums for four outputs the products of 16 inputs, which are `AT` bytes after `q`. The intrinsics for
/// it are not stable. One piece, because the compiler would mix the products of several pairs until registers do not suffice.
///
/// # Safety
/// The CPU has the instruction; there are 32 values.
#[target_feature(enable = "neon,i8mm")]
#[inline]
unsafe fn products<const AT: usize>(
    [first, second]: &mut Outputs<int32x4_t>,
    [w, next]: [Outputs<uint8x16_t>; 2],
    q: *const i8,
) {
    // SAFETY: the CPU has the instruction and values can be read, by the caller's contract.
    unsafe {
        std::arch::asm!(
            "ldp {x:q}, {y:q}, [{q}, {at}]",
            "usmmla {first:v}.4s, {a:v}.16b, {x:v}.16b",
            "usmmla {second:v}.4s, {b:v}.16b, {x:v}.16b",
            "usmmla {first:v}.4s, {c:v}.16b, {y:v}.16b",
            "usmmla {second:v}.4s, {d:v}.16b, {y:v}.16b",
            first = inout(vreg) *first,
            second = inout(vreg) *second,
            a = in(vreg) w[0],
            b = in(vreg) w[1],
            c = in(vreg) next[0],
            d = in(vreg) next[1],
            x = out(vreg) _,
            y = out(vreg) _,
            q = in(reg) q,
            at = const AT,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
}

/// A block of weights for four outputs.
struct Block<F> {
    weights: [Outputs<uint8x16_t>; PARTS],
    scales: Outputs<float32x4_t>,
    offsets: Outputs<float32x4_t>,
    /// Those of each half of the block.
    factors: [Outputs<uint8x16_t>; 2],
    format: PhantomData<F>,
}

impl<F: VectorFormat> Block<F> {
    /// # Safety
    /// The CPU has the instructions; the tile and its scales are in range.
    #[inline(always)]
    unsafe fn new(w: &RecordWeights) -> Self {
        // SAFETY: by the caller's contract.
        unsafe {
            let mut offsets = [Quad::float_zero(); 2];
            if F::Scales::OFFSET {
                offsets = twice(F::Scales::offsets::<Quad>(w.scales, w.sub, w.first));
            }
            let mut factors = [[Quad::zero(); 2]; 2];
            if F::BITS == 6 {
                each!(half in 0 1 => {
                    let four = F::Scales::factors::<Quad>(w.scales, w.sub, w.first, half);
                    factors[half] = zip(four, four);
                });
            }
            Self {
                weights: weights::<F>(w.tile),
                scales: twice(F::Scales::scales::<Quad>(w.scales, w.sub, w.first)),
                offsets,
                factors,
                format: PhantomData,
            }
        }
    }

    /// Adds the products with `P` pairs of rows to their sums.
    ///
    /// # Safety
    /// The CPU has the instructions; there are so many pairs.
    #[inline(always)]
    unsafe fn add<const P: usize>(&self, x: Pairs, sums: &mut [Outputs<float32x4_t>; P]) {
        macro_rules! add {
            ($($i:literal)*) => {$(
                if $i < P {
                    // SAFETY: by the caller's contract.
                    unsafe {
                        let sums_of_x = &*x.sums.add($i);
                        let mut halves = [[unbiased::<F>(sums_of_x, 0); 2], [unbiased::<F>(sums_of_x, 1); 2]];
                        let [a, b, c, d] = self.weights;
                        products::<{ $i * 2 * BLOCK }>(&mut halves[0], [a, b], x.q);
                        // One sum if no half has a factor.
                        let high = if F::BITS == 6 { &mut halves[1] } else { &mut halves[0] };
                        products::<{ $i * 2 * BLOCK + BLOCK }>(high, [c, d], x.q);
                        self.scale(halves, sums_of_x, &mut sums[$i]);
                    }
                }
            )*};
        }
        // A loop would keep the sums in memory.
        add!(0 1 2 3);
    }

    /// Scales a pair's sums of each half of the block, and adds them to its sums.
    ///
    /// # Safety
    /// The CPU has NEON.
    #[inline(always)]
    unsafe fn scale(
        &self,
        [low, high]: [Outputs<int32x4_t>; 2],
        x: &PairSums,
        sums: &mut Outputs<float32x4_t>,
    ) {
        // SAFETY: by the caller's contract.
        unsafe {
            let (scale, sum) = (vld1q_f32(x.scale.as_ptr()), vld1q_f32(x.sum.as_ptr()));
            each!(o in 0 1 => {
                let mut dots = vreinterpretq_u8_s32(low[o]);
                if F::BITS == 6 {
                    let high = Quad::mul(vreinterpretq_u8_s32(high[o]), self.factors[1][o]);
                    dots = Quad::add(Quad::mul(dots, self.factors[0][o]), high);
                }
                let scale = Quad::float_mul(self.scales[o], scale);
                sums[o] = Quad::fma(Quad::floats(dots), scale, sums[o]);
                if F::Scales::OFFSET {
                    sums[o] = Quad::fma(self.offsets[o], sum, sums[o]);
                }
            });
        }
    }
}

/// Multiplies the `P` pairs of rows of a turn with the outputs of `V` vectors of a strip, from output `from`, unpacking
/// blocks for them alone.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn unpacked_once<F: VectorFormat, const P: usize, const V: usize>(
    strip: Strip<'_, F>,
    from: usize,
    mut x: Pairs,
    mut ahead: Ahead,
    totals: &mut Totals,
) {
    assert!(from + V <= VECTORS_OF_STRIP);
    // SAFETY: blocks are in range of the strip; the rest by the caller's contract.
    unsafe {
        let mut record = strip.bytes().as_ptr();
        let mut sums = [[[Quad::float_zero(); 2]; P]; V];
        let mut left = strip.blocks();
        while left > 0 {
            let blocks = left.min(F::SPAN);
            for sub in 0..blocks {
                ahead.share::<F>(const { VECTORS_OF_STRIP / V });
                each!(v in 0 1 => {
                    if v < V {
                        Block::<F>::new(&weights_at::<F>(record, sub, from + v)).add(x, &mut sums[v]);
                    }
                });
                x = x.after::<P>();
            }
            record = record.wrapping_add(F::RECORD);
            left -= blocks;
        }
        for (v, sums) in sums.into_iter().enumerate() {
            totals[from + v][..P].copy_from_slice(&sums);
        }
    }
}

/// Where block `sub` of a record is for the outputs of vector `v`.
#[inline(always)]
fn weights_at<F: VectorFormat>(record: *const u8, sub: usize, v: usize) -> RecordWeights {
    RecordWeights {
        scales: record,
        sub,
        first: v * Quad::COUNT,
        tile: record.wrapping_add(F::SCALES + sub * F::TILE + 4 * v * Quad::COUNT),
    }
}

/// Unpacks blocks of a strip from `first` on, which a record begins with.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn unpack<F: VectorFormat>(
    strip: Strip<'_, F>,
    first: usize,
    count: usize,
    ahead: &mut Ahead,
    to: &mut Unpacked<F>,
) {
    const { assert!(SEGMENT.is_multiple_of(F::SPAN)) };
    assert!(first + count <= strip.blocks() && count <= SEGMENT);
    let start = strip.bytes().as_ptr();
    for i in 0..count {
        let block = first + i;
        let record = start.wrapping_add(block / F::SPAN * F::RECORD);
        ahead.share::<F>(1);
        for (v, to) in to.iter_mut().enumerate() {
            // SAFETY: the block is in range, as asserted; the CPU has the instructions by the caller's contract.
            let block = unsafe { Block::new(&weights_at::<F>(record, block % F::SPAN, v)) };
            to[i].write(block);
        }
    }
}

/// Adds the products of unpacked blocks to the totals of a turn of `P` pairs.
///
/// # Safety
/// The CPU has the instructions; the first `count` blocks are unpacked, and there are so many of the pairs.
#[inline(always)]
unsafe fn add_unpacked<F: VectorFormat, const P: usize>(
    blocks: &Unpacked<F>,
    count: usize,
    x: Pairs,
    totals: &mut Totals,
) {
    for (blocks, totals) in blocks.iter().zip(totals) {
        let mut x = x;
        let totals: &mut [_; P] = (&mut totals[..P]).try_into().expect("so many pairs");
        let mut sums = *totals;
        for block in &blocks[..count] {
            // SAFETY: by the caller's contract.
            unsafe { block.assume_init_ref().add(x, &mut sums) };
            x = x.after::<P>();
        }
        *totals = sums;
    }
}

/// Passes the results of a turn to `store`.
#[inline(always)]
fn store_totals(turn: &Turn, totals: &Totals, store: &mut impl FnMut(usize, &[f32; WIDTH])) {
    let mut out = [[0f32; WIDTH]; PAIRED_ROWS];
    for (v, totals) in totals.iter().enumerate() {
        for (rows, [a, b]) in out.chunks_exact_mut(2).zip(totals) {
            // SAFETY: the CPU has NEON, and rows have four numbers for each vector.
            unsafe {
                let at = v * Quad::COUNT;
                Quad::store(rows[0].as_mut_ptr().add(at), vuzp1q_f32(*a, *b));
                Quad::store(rows[1].as_mut_ptr().add(at), vuzp2q_f32(*a, *b));
            }
        }
    }
    for (i, out) in out[..turn.rows].iter().enumerate() {
        store(turn.pass.first + i, out);
    }
}

/// The products of one turn.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn product_of_one<F: VectorFormat>(
    strip: Strip<'_, F>,
    x: &Activations,
    turn: &Turn,
    totals: &mut Totals,
) {
    let x = Pairs::of(x, turn, strip.blocks());
    // Pairs, and the vectors of a tile that they are multiplied with at a time.
    macro_rules! product {
        ($([$pairs:literal x $vectors:literal])*) => {
            match turn.rows.div_ceil(2) {
                $($pairs => for from in (0..VECTORS_OF_STRIP).step_by($vectors) {
                    let passes = VECTORS_OF_STRIP / $vectors;
                    let ahead = Ahead::new(strip, from / $vectors, passes);
                    // SAFETY: the strip's blocks have such pairs; the CPU has the instructions by the caller's contract.
                    unsafe { unpacked_once::<F, $pairs, $vectors>(strip, from, x, ahead, totals) };
                })*
                _ => unreachable!("no turn has so many rows"),
            }
        };
    }
    product!([2 x 2] [3 x 1] [4 x 1]);
}

/// The products of several turns, for which blocks are unpacked once.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn product_of_several<F: VectorFormat>(
    strip: Strip<'_, F>,
    x: &Activations,
    turns: &[Turn],
    totals: &mut [Totals; PANEL],
) {
    assert!(turns.len() <= PANEL);
    let mut unpacked: Unpacked<F> =
        [const { [const { MaybeUninit::uninit() }; SEGMENT] }; VECTORS_OF_STRIP];
    let mut ahead = Ahead::new(strip, 0, 1);
    for first in (0..strip.blocks()).step_by(SEGMENT) {
        let count = SEGMENT.min(strip.blocks() - first);
        // SAFETY: by the caller's contract.
        unsafe { unpack(strip, first, count, &mut ahead, &mut unpacked) };
        for (turn, totals) in turns.iter().zip(&mut *totals) {
            let x = Pairs::of(x, turn, strip.blocks()).at_block(first, turn);
            macro_rules! add {
                ($($pairs:literal)*) => {
                    match turn.rows.div_ceil(2) {
                        // SAFETY: these blocks are unpacked and have such pairs; the rest by the caller's contract.
                        $($pairs => unsafe { add_unpacked::<F, $pairs>(&unpacked, count, x, totals) },)*
                        _ => unreachable!("more rows than a pass has are divided evenly"),
                    }
                };
            }
            add!(2 3 4);
        }
    }
}

/// As [`super::neon::product_neon`], for turns that are whole passes, whose rows are in pairs.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(in super::super) fn product_i8mm<F: VectorFormat>(
    _: I8mm,
    strip: Strip<'_, F>,
    x: &Activations,
    turns: &[Turn],
    mut store: impl FnMut(usize, &[f32; WIDTH]),
) {
    // SAFETY: the CPU has the instructions: a caller needs them, or has to show the proof.
    unsafe {
        let zero: Totals = [[[Quad::float_zero(); 2]; MAX_PAIRS]; VECTORS_OF_STRIP];
        if let [turn] = turns {
            let mut totals = zero;
            product_of_one(strip, x, turn, &mut totals);
            return store_totals(turn, &totals, &mut store);
        }
        let mut totals = [zero; PANEL];
        product_of_several(strip, x, turns, &mut totals);
        for (turn, totals) in turns.iter().zip(&totals) {
            store_totals(turn, totals, &mut store);
        }
    }
}
