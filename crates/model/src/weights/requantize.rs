//! Converts unquantized weights to blocks while they are loaded.

use crate::checkpoint::finite;
use crate::packed::mxfp4;
use candle_core::quantized::QTensor;
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::quant::BlockType;
use rayon::prelude::*;

/// Rows that are converted together: they are f32 meanwhile.
const ROWS: usize = 64;

/// Whether there are [`blocks`] of `kind`.
pub fn can_make(kind: BlockType) -> bool {
    kind.candles().is_some() || kind == BlockType::Mxfp4
}

/// The blocks of `kind` for a weight `[outputs, inputs]`, as candle rounds them, or to the nearest value. A row's blocks depend only on
/// that row.
///
/// # Errors
/// A setup error if [`can_make`] says no, or a scale of them would be infinite.
pub fn blocks(weight: &Tensor, kind: BlockType) -> Result<Vec<u8>> {
    if !can_make(kind) {
        return Err(Error::setup(format!("weights cannot become {kind}")));
    }
    // By this thread: others have no order with its work on a GPU.
    let weight = weight.to_device(&Device::Cpu)?;
    let outputs = weight.dim(0)?;
    let groups: Vec<usize> = (0..outputs).step_by(ROWS).collect();
    let parts = groups.into_par_iter().map(|start| {
        let rows = weight.narrow(0, start, ROWS.min(outputs - start))?;
        let values = rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let Some(candles) = kind.candles() else {
            return Ok(mxfp4::rounded(&values));
        };
        // candle quantizes all of a tensor's storage, so it gets one of its own.
        let rows = Tensor::from_vec(values, rows.dims(), &Device::Cpu)?;
        let quantized = QTensor::quantize(&rows, candles)?;
        Ok(quantized.data()?.into_owned())
    });
    let blocks = parts.collect::<Result<Vec<_>>>()?.concat();
    if finite::blocks(kind, &blocks) {
        Ok(blocks)
    } else {
        Err(Error::setup(format!("its values are too large for {kind}")))
    }
}
