//! From GGUF blocks, or from floats, to tiles.

use super::{BLOCK, QuantMatrix, Tile4, Tile8, Tiles, WIDTH};
use candle_core::Result;
use candle_core::quantized::GgmlDType;
use half::f16;

impl QuantMatrix {
    /// The block types that [`QuantMatrix::from_blocks`] takes as they are.
    pub fn keeps(dtype: GgmlDType) -> bool {
        matches!(dtype, GgmlDType::Q8_0 | GgmlDType::Q4_0 | GgmlDType::Q4_1)
    }

    /// Takes the blocks of a GGUF tensor `[outputs, inputs]`, without loss.
    ///
    /// # Errors
    /// For a type that [`QuantMatrix::keeps`] denies, and where `data` is not that many blocks.
    pub fn from_blocks(
        dtype: GgmlDType,
        data: &[u8],
        outputs: usize,
        inputs: usize,
    ) -> Result<Self> {
        let blocks = inputs / BLOCK;
        if !inputs.is_multiple_of(BLOCK) || data.len() != outputs * blocks * dtype.type_size() {
            candle_core::bail!(
                "{} bytes are no [{outputs}, {inputs}] of {dtype:?}",
                data.len()
            );
        }
        let block = |output: usize, b: usize| {
            &data[(output * blocks + b) * dtype.type_size()..][..dtype.type_size()]
        };
        let tiles = match dtype {
            GgmlDType::Q8_0 => Tiles::Q8(tiles(outputs, blocks, |tile: &mut Tile8, c, o, b| {
                let (d, q) = block(o, b).split_at(2);
                tile.set(c, half_at(d), |k| q[k] as i8);
            })),
            GgmlDType::Q4_0 => Tiles::Q4(tiles(outputs, blocks, |tile: &mut Tile4, c, o, b| {
                let (d, q) = block(o, b).split_at(2);
                let d = half_at(d);
                // d * (q - 8): a multiple of 8 is exact in f16.
                tile.set(c, d, f16::from_f32(d.to_f32() * -8.), q);
            })),
            GgmlDType::Q4_1 => Tiles::Q4(tiles(outputs, blocks, |tile: &mut Tile4, c, o, b| {
                let (scales, q) = block(o, b).split_at(4);
                tile.set(c, half_at(scales), half_at(&scales[2..]), q);
            })),
            _ => candle_core::bail!("no tiles for {dtype:?}"),
        };
        Ok(Self {
            outputs,
            inputs,
            tiles,
        })
    }

    /// Quantizes `[outputs, inputs]` floats to 8 bits.
    ///
    /// # Errors
    /// Where `inputs` is no multiple of 32, or `data` has another size.
    pub fn from_floats(data: &[f32], outputs: usize, inputs: usize) -> Result<Self> {
        if !inputs.is_multiple_of(BLOCK) || data.len() != outputs * inputs {
            candle_core::bail!("{} floats are no [{outputs}, {inputs}] blocks", data.len());
        }
        let blocks = inputs / BLOCK;
        let tiles = tiles(outputs, blocks, |tile: &mut Tile8, c, o, b| {
            let x = &data[o * inputs + b * BLOCK..][..BLOCK];
            let max = x.iter().fold(0f32, |max, x| max.max(x.abs()));
            let d = f16::from_f32(max / 127.);
            let inverse = if d > f16::ZERO {
                d.to_f32().recip()
            } else {
                0.
            };
            tile.set(c, d, |k| (x[k] * inverse).round().clamp(-127., 127.) as i8);
        });
        Ok(Self {
            outputs,
            inputs,
            tiles: Tiles::Q8(tiles),
        })
    }

    /// Writes row `output` of the weight to `row` (`inputs` floats): an embedding lookup.
    pub fn dequantize_row(&self, output: usize, row: &mut [f32]) {
        let (group, c) = (output / WIDTH, output % WIDTH);
        let blocks = self.inputs / BLOCK;
        for (b, row) in row.chunks_exact_mut(BLOCK).enumerate() {
            let at = group * blocks + b;
            for (k, x) in row.iter_mut().enumerate() {
                *x = match &self.tiles {
                    Tiles::Q8(all) => all[at].value(c, k),
                    Tiles::Q4(all) => all[at].value(c, k),
                };
            }
        }
    }
}

fn half_at(bytes: &[u8]) -> f16 {
    f16::from_le_bytes([bytes[0], bytes[1]])
}

/// Tiles filled by `fill(tile, column in the tile, output, block)`; missing outputs stay zero.
fn tiles<T: Copy + Default>(
    outputs: usize,
    blocks: usize,
    fill: impl Fn(&mut T, usize, usize, usize),
) -> Vec<T> {
    let mut all = vec![T::default(); outputs.div_ceil(WIDTH) * blocks];
    for output in 0..outputs {
        for b in 0..blocks {
            let tile = &mut all[output / WIDTH * blocks + b];
            fill(tile, output % WIDTH, output, b);
        }
    }
    all
}

/// Place of input `k` of output `c`, counting four inputs of eight outputs at a time.
fn place(c: usize, k: usize) -> usize {
    4 * (WIDTH * (k / 4) + c) + k % 4
}

impl Default for Tile8 {
    fn default() -> Self {
        Self {
            d: [f16::ZERO; WIDTH],
            q: [0; BLOCK * WIDTH],
        }
    }
}

impl Tile8 {
    fn set(&mut self, c: usize, d: f16, q: impl Fn(usize) -> i8) {
        self.d[c] = d;
        for k in 0..BLOCK {
            self.q[place(c, k)] = q(k);
        }
    }

    fn value(&self, c: usize, k: usize) -> f32 {
        self.d[c].to_f32() * f32::from(self.q[place(c, k)])
    }
}

impl Default for Tile4 {
    fn default() -> Self {
        Self {
            d: [f16::ZERO; WIDTH],
            m: [f16::ZERO; WIDTH],
            q: [0; BLOCK * WIDTH / 2],
        }
    }
}

impl Tile4 {
    /// GGUF keeps inputs 0..16 in the low halves of 16 bytes and 16..32 in the high ones.
    fn set(&mut self, c: usize, d: f16, m: f16, q: &[u8]) {
        (self.d[c], self.m[c]) = (d, m);
        for (k, &byte) in q.iter().enumerate() {
            self.q[place(c, k)] = byte;
        }
    }

    fn value(&self, c: usize, k: usize) -> f32 {
        let byte = self.q[place(c, k % (BLOCK / 2))];
        let q = if k < BLOCK / 2 { byte & 15 } else { byte >> 4 };
        self.d[c].to_f32() * f32::from(q) + self.m[c].to_f32()
    }
}
