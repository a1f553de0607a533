//! Short convolutions over the rows of a block, around attention and MLP (DFlash 2): each row is mixed with those
//! just before it in its block, by factors of which a part depends on the row.

use super::linear::Linear;
use crate::weights::Weights;
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::Span;

/// The convolutions of the input and of the output of one part of a layer.
#[derive(Clone)]
pub(crate) struct BlockConv {
    /// `[2, taps, groups, channels of a group]`.
    base: Tensor,
    /// The product that makes what is added to the factors of each group: first of the input, then of the output.
    projection: Linear,
    shape: ConvShape,
}

/// The shape of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvShape {
    /// Number of rows that are mixed: itself and those before it.
    pub taps: usize,
    /// Number of channels that share what a row adds to the factors.
    pub group: usize,
}

/// Where the rows of a step are in their blocks.
pub(crate) struct BlockPlaces {
    /// One entry for each distance, from 1. For each row, the first tensor has the row so far before it, u32, or row 0
    /// if there is none. The second tensor, `[rows, 1, 1]`, says whether that row is in the same block.
    before: Vec<(Tensor, Tensor)>,
}

impl BlockPlaces {
    /// The places of the rows of blocks with these `spans`, for convolutions with so many `taps`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(spans: &[Span], taps: usize, dtype: DType, device: &Device) -> Result<Self> {
        let rows = spans.iter().map(|span| span.rows.end).max().unwrap_or(0);
        let mut place = vec![0; rows];
        for span in spans {
            (0..)
                .zip(span.rows.clone())
                .for_each(|(i, row)| place[row] = i);
        }
        let at = |distance: usize| -> Result<(Tensor, Tensor)> {
            let row_before = |row: usize| row.saturating_sub(distance) as u32;
            let rows_before: Vec<u32> = (0..rows).map(row_before).collect();
            let is_there = |&place: &usize| f32::from(place >= distance);
            let are_there: Vec<f32> = place.iter().map(is_there).collect();
            let are_there = Tensor::from_vec(are_there, (rows, 1, 1), device)?;
            Ok((
                Tensor::new(rows_before, device)?,
                are_there.to_dtype(dtype)?,
            ))
        };
        Ok(Self {
            before: (1..taps).map(at).collect::<Result<_>>()?,
        })
    }
}

impl BlockConv {
    /// Reads the convolutions `name` of rows with `hidden` channels.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        weights: &mut Weights,
        name: &str,
        hidden: usize,
        shape: ConvShape,
    ) -> Result<Self> {
        let ConvShape { taps, group } = shape;
        let groups = hidden / group;
        let base = weights.tensor(&format!("{name}.base_kernel"), &[2, taps, hidden])?;
        let projection = format!("{name}.kernel_projection");
        Ok(Self {
            base: base.reshape((2, taps, groups, group))?,
            projection: weights.linear(&projection, (2 * taps * groups, hidden), false)?,
            shape,
        })
    }

    /// The convolution of the inputs `x`, `[rows, hidden]`, and the factors for [`BlockConv::finish`].
    ///
    /// # Errors
    /// If the device fails.
    pub fn prepare(&self, x: &Tensor, places: &BlockPlaces) -> Result<(Tensor, Tensor)> {
        let (rows, hidden) = x.dims2()?;
        let groups = hidden / self.shape.group;
        let factors = self.projection.forward(x)?;
        let factors = factors.reshape((rows, 2, self.shape.taps, groups))?;
        let of_input = self.mix(x, &factors.narrow(1, 0, 1)?.squeeze(1)?, 0, places)?;
        Ok((of_input, factors.narrow(1, 1, 1)?.squeeze(1)?))
    }

    /// The convolution of the outputs `y` with those factors.
    ///
    /// # Errors
    /// If the device fails.
    pub fn finish(&self, y: &Tensor, factors: &Tensor, places: &BlockPlaces) -> Result<Tensor> {
        self.mix(y, factors, 1, places)
    }

    /// The sum over taps of a row before, times the tap's factors, `[rows, taps, groups]`.
    fn mix(
        &self,
        x: &Tensor,
        factors: &Tensor,
        side: usize,
        places: &BlockPlaces,
    ) -> Result<Tensor> {
        let (rows, hidden) = x.dims2()?;
        let ConvShape { taps, group } = self.shape;
        if places.before.len() + 1 != taps {
            return Err(Error::internal(
                "the places of a block are of other convolutions",
            ));
        }
        let x = x.reshape((rows, hidden / group, group))?;
        let term = |tap: usize, x: &Tensor| -> Result<Tensor> {
            let base = self
                .base
                .narrow(0, side, 1)?
                .narrow(1, tap, 1)?
                .squeeze(0)?;
            let own = factors.narrow(1, tap, 1)?.squeeze(1)?.unsqueeze(2)?;
            Ok((own.broadcast_add(&base)? * x)?)
        };
        let mut sum = term(0, &x)?;
        for (tap, (rows_before, are_there)) in (1..).zip(&places.before) {
            let before = x.index_select(rows_before, 0)?.broadcast_mul(are_there)?;
            sum = (sum + term(tap, &before)?)?;
        }
        Ok(sum.reshape((rows, hidden))?)
    }
}
