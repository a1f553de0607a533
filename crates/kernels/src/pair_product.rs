//! Products of large f32 matrices whose numbers are rounded to bf16, for training: AVX512-BF16 multiplies two pairs
//! of them where f32 has one product.
//!
//! Sums stay in f32. They take the pairs along the inner dimension in one order, so that every instruction set gives
//! the same bits (but for numbers below 1.2e-38, [`Simd::dot_pairs`]); without AVX512-BF16 this is slower than f32. Blocks fit the caches as in Goto
//! and van de Geijn 2008, "Anatomy of high-performance matrix multiplication", section 4.

#![allow(
    clippy::needless_range_loop,
    reason = "indices of registers: loops over R and C are unrolled"
)]

use super::cpu::{self, Isa};
use super::simd::{LANES, Loop, Simd, run};
use half::bf16;
use std::ops::Range;

/// Numbers of the inner dimension of a block: the strips of a pass stay in the first cache.
const DEPTH: usize = 192;
/// Lines of the first factor of a block: they stay in the second cache.
const LINES: usize = 512;
/// Strips of the second factor that are packed at once.
const STRIPS: usize = 3;
/// Numbers of a strip that are packed at once.
const GROUP: usize = 2 * LANES;

/// A factor of a product: `lines` vectors of `depth` numbers.
#[derive(Clone, Copy)]
pub struct Factor<'a> {
    numbers: &'a [f32],
    lines: usize,
    depth: usize,
    /// Whether the numbers of a line are side by side: `[lines, depth]`; otherwise `[depth, lines]`.
    is_by_line: bool,
}

impl<'a> Factor<'a> {
    /// `numbers` are `[lines, depth]`.
    ///
    /// # Panics
    /// If there are more or fewer.
    pub fn by_line(numbers: &'a [f32], lines: usize, depth: usize) -> Self {
        assert_eq!(numbers.len(), lines * depth, "numbers of a factor");
        Self {
            numbers,
            lines,
            depth,
            is_by_line: true,
        }
    }

    /// `numbers` are `[depth, lines]`.
    ///
    /// # Panics
    /// If there are more or fewer.
    pub fn by_depth(numbers: &'a [f32], lines: usize, depth: usize) -> Self {
        assert_eq!(numbers.len(), lines * depth, "numbers of a factor");
        Self {
            numbers,
            lines,
            depth,
            is_by_line: false,
        }
    }
}

/// The dot product of each line of `a` with each of `b`, `[a.lines, b.lines]`, by this thread.
///
/// # Panics
/// If the lines are of different depths.
pub fn pair_product(a: Factor<'_>, b: Factor<'_>) -> Vec<f32> {
    product_with(cpu::isa(), a, b)
}

fn product_with(isa: Isa, a: Factor<'_>, b: Factor<'_>) -> Vec<f32> {
    assert_eq!(a.depth, b.depth, "depths of the factors");
    let mut product = vec![0f32; a.lines * b.lines];
    let work = PairProduct {
        a,
        b,
        product: &mut product,
    };
    run(isa, work);
    product
}

struct PairProduct<'a> {
    a: Factor<'a>,
    b: Factor<'a>,
    /// Zeros at first.
    product: &'a mut [f32],
}

impl Loop for PairProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let strip = DEPTH / 2 * LANES;
        let blocks = self.a.lines.min(LINES).div_ceil(LANES);
        let mut of_a = vec![0f32; blocks * strip];
        let mut of_b = vec![0f32; STRIPS * strip];
        let mut depth = 0;
        while depth < self.a.depth {
            let depths = depth..(depth + DEPTH).min(self.a.depth);
            let size = depths.len().next_multiple_of(GROUP) / 2 * LANES;
            let mut line = 0;
            while line < self.a.lines {
                let lines = line..(line + LINES).min(self.a.lines);
                pack(s, self.a, lines.clone(), depths.clone(), &mut of_a);
                let mut column = 0;
                while column < self.b.lines {
                    let columns = column..(column + STRIPS * LANES).min(self.b.lines);
                    pack(s, self.b, columns.clone(), depths.clone(), &mut of_b);
                    self.add_block(s, lines.clone(), columns, (&of_a, &of_b), size);
                    column += STRIPS * LANES;
                }
                line += LINES;
            }
            depth += DEPTH;
        }
    }
}

impl PairProduct<'_> {
    /// Adds the products of packed `lines` and `columns`, whose strips have `size` pairs.
    #[inline(always)]
    fn add_block<S: Simd>(
        &mut self,
        s: S,
        lines: Range<usize>,
        columns: Range<usize>,
        (of_a, of_b): (&[f32], &[f32]),
        size: usize,
    ) {
        let mut line = lines.start;
        while line < lines.end {
            let from = line - lines.start;
            let rows = &of_a[from / LANES * size + from % LANES..];
            let count = (lines.end - line).min(8);
            let width = columns.len();
            // SAFETY: there are so many strips. Those that were not packed for these columns give sums that nobody takes.
            unsafe {
                if S::SUMS >= 24 {
                    let sums = tile::<S, 8, STRIPS>(s, rows.as_ptr(), of_b.as_ptr(), size);
                    self.add(s, (line, columns.start), (count, width), &sums);
                } else {
                    for c in 0..width.div_ceil(LANES) {
                        let of_b = of_b.as_ptr().add(c * size);
                        let at = columns.start + c * LANES;
                        let width = (width - c * LANES).min(LANES);
                        for half in [0, 4] {
                            let count = count.saturating_sub(half).min(4);
                            let sums = tile::<S, 4, 1>(s, rows.as_ptr().add(half), of_b, size);
                            self.add(s, (line + half, at), (count, width), &sums);
                        }
                    }
                }
            }
            line += 8;
        }
    }

    /// Adds the first `rows` and `width` of `sums` at the row and column `from`.
    #[inline(always)]
    fn add<S: Simd, const R: usize, const C: usize>(
        &mut self,
        s: S,
        (row, column): (usize, usize),
        (rows, width): (usize, usize),
        sums: &[[S::Vector; C]; R],
    ) {
        for r in 0..R {
            if r >= rows {
                break;
            }
            let to = &mut self.product[(row + r) * self.b.lines + column..][..width];
            if width == C * LANES {
                for (c, to) in to.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    // SAFETY: 16 numbers each.
                    unsafe { s.store(to.as_mut_ptr(), s.add(s.load(to.as_ptr()), sums[r][c])) };
                }
            } else {
                for (c, to) in to.chunks_mut(LANES).enumerate() {
                    let mut numbers = [0f32; LANES];
                    // SAFETY: 16 numbers.
                    unsafe { s.store(numbers.as_mut_ptr(), sums[r][c]) };
                    for (to, number) in to.iter_mut().zip(numbers) {
                        *to += number;
                    }
                }
            }
        }
    }
}

/// The sums over `size / 16` pairs of `R` lines of a strip with `C` strips.
///
/// # Safety
/// `R` numbers of each 16 can be read at `rows`, and `C` strips of `size` at `strips`.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize, const C: usize>(
    s: S,
    mut rows: *const f32,
    strips: *const f32,
    size: usize,
) -> [[S::Vector; C]; R] {
    let mut sums = [[s.splat(0.0); C]; R];
    let mut at = [strips; C];
    // SAFETY: the caller's contract.
    unsafe {
        for c in 1..C {
            at[c] = at[c - 1].add(size);
        }
        for _ in 0..size / LANES {
            let mut columns = [s.splat(0.0); C];
            for c in 0..C {
                columns[c] = s.load(at[c]);
                at[c] = at[c].add(LANES);
            }
            for r in 0..R {
                let row = s.splat(*rows.add(r));
                for c in 0..C {
                    sums[r][c] = s.dot_pairs(row, columns[c], sums[r][c]);
                }
            }
            rows = rows.add(LANES);
        }
    }
    sums
}

/// Rounds and packs `depths` of `lines`: strips of 16 lines, each `[pairs, 16]`, with zeros where there are fewer. Of
/// each 16 pairs the order is 0, 8, 1, 9 and so on ([`Simd::transpose`]).
#[inline(always)]
fn pack<S: Simd>(
    s: S,
    from: Factor<'_>,
    lines: Range<usize>,
    depths: Range<usize>,
    to: &mut [f32],
) {
    let size = depths.len().next_multiple_of(GROUP) / 2 * LANES;
    let mut strips = to.chunks_exact_mut(size);
    let mut line = lines.start;
    while line < lines.end {
        let count = (lines.end - line).min(LANES);
        let Some(strip) = strips.next() else {
            unreachable!("there is room for the lines of a block");
        };
        let mut depth = depths.start;
        for group in strip.as_chunks_mut::<{ LANES * LANES }>().0 {
            let numbers = (depths.end - depth).min(GROUP);
            if from.is_by_line {
                pack_lines(s, from, (line, count), (depth, numbers), group);
            } else {
                pack_depths(s, from, (line, count), (depth, numbers), group);
            }
            depth += GROUP;
        }
        line += LANES;
    }
}

/// `count` lines from `line` on, whose `numbers` from `depth` on are side by side.
#[inline(always)]
fn pack_lines<S: Simd>(
    s: S,
    from: Factor<'_>,
    (line, count): (usize, usize),
    (depth, numbers): (usize, usize),
    group: &mut [f32; LANES * LANES],
) {
    let mut pairs = [[0f32; LANES]; LANES];
    let mut rows = [std::ptr::null::<f32>(); LANES];
    for i in 0..LANES {
        if i < count {
            let row = &from.numbers[(line + i) * from.depth + depth..][..numbers];
            let mut padded = [0f32; GROUP];
            let mut row_at = row.as_ptr();
            if numbers < GROUP {
                padded[..numbers].copy_from_slice(row);
                row_at = padded.as_ptr();
            }
            let to = pairs[i].as_mut_ptr().cast::<bf16>();
            // SAFETY: 32 numbers each.
            unsafe {
                s.store_bf16(to, s.load(row_at));
                s.store_bf16(to.add(LANES), s.load(row_at.add(LANES)));
            }
        }
        rows[i] = pairs[i].as_ptr();
    }
    // SAFETY: 16 pairs of each line, and 16 vectors of the group.
    unsafe {
        let to = group.as_mut_ptr();
        s.transpose(&rows, [to, to.add(LANES)], 2 * LANES);
    }
}

/// `count` lines from `line` on, which are side by side at each of `numbers` depths from `depth` on.
#[inline(always)]
fn pack_depths<S: Simd>(
    s: S,
    from: Factor<'_>,
    (line, count): (usize, usize),
    (depth, numbers): (usize, usize),
    group: &mut [f32; LANES * LANES],
) {
    for (place, to) in group.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let pair = place % 2 * (LANES / 2) + place / 2;
        let mut halves = [s.splat(0.0); 2];
        for half in 0..2 {
            let number = 2 * pair + half;
            if number < numbers {
                let row = &from.numbers[(depth + number) * from.lines + line..][..count];
                let mut padded = [0f32; LANES];
                let mut row_at = row.as_ptr();
                if count < LANES {
                    padded[..count].copy_from_slice(row);
                    row_at = padded.as_ptr();
                }
                let mut rounded = [bf16::ZERO; LANES];
                // SAFETY: 16 numbers each.
                unsafe {
                    s.store_bf16(rounded.as_mut_ptr(), s.load(row_at));
                    halves[half] = s.load_bf16(rounded.as_ptr());
                }
            }
        }
        // SAFETY: 16 numbers.
        unsafe { s.store(to.as_mut_ptr(), s.pair(halves[0], halves[1])) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from -1 to 1 that repeat late.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|i| ((i * 7919 + seed * 104_729) % 4001) as f32 / 2000.5 - 1.0)
            .collect()
    }

    /// `[depth, lines]` from `[lines, depth]`.
    fn turned(numbers: &[f32], lines: usize, depth: usize) -> Vec<f32> {
        (0..depth)
            .flat_map(|d| (0..lines).map(move |l| numbers[l * depth + d]))
            .collect()
    }

    /// Sizes that are whole strips, groups and blocks, and others.
    const SIZES: [(usize, usize, usize); 6] = [
        (1, 1, 1),
        (8, 48, 192),
        (13, 50, 33),
        (255, 37, 193),
        (530, 16, 31),
        (5, 100, 400),
    ];

    #[test]
    fn products_are_those_of_rounded_numbers() {
        let rounded = |x: f32| f64::from(bf16::from_f32(x).to_f32());
        let isa = Isa::available().next_back().unwrap();
        for (m, n, k) in SIZES {
            let (a, b) = (numbers(m * k, 1), numbers(n * k, 2));
            let product = product_with(isa, Factor::by_line(&a, m, k), Factor::by_line(&b, n, k));
            assert_eq!(product.len(), m * n);
            for i in 0..m {
                for j in 0..n {
                    let wanted: f64 = (0..k)
                        .map(|d| rounded(a[i * k + d]) * rounded(b[j * k + d]))
                        .sum();
                    let got = f64::from(product[i * n + j]);
                    let off = (got - wanted).abs();
                    assert!(off < 1e-4, "{m} {n} {k}: {got} for {wanted} at {i}, {j}");
                }
            }
        }
    }

    #[test]
    fn layouts_and_instruction_sets_give_the_same_bits() {
        for (m, n, k) in SIZES {
            let (a, b) = (numbers(m * k, 3), numbers(n * k, 4));
            let (a_turned, b_turned) = (turned(&a, m, k), turned(&b, n, k));
            let of_a = [Factor::by_line(&a, m, k), Factor::by_depth(&a_turned, m, k)];
            let of_b = [Factor::by_line(&b, n, k), Factor::by_depth(&b_turned, n, k)];
            let wanted = product_with(Isa::Portable, of_a[0], of_b[0]);
            for isa in Isa::available() {
                for (a, b) in of_a.iter().flat_map(|&a| of_b.map(|b| (a, b))) {
                    let same = product_with(isa, a, b) == wanted;
                    assert!(same, "{m} {n} {k} with {}", isa.name());
                }
            }
        }
    }
}
