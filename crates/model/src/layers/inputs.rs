//! The part of a batch that a forward reads, in device memory.

use super::rope::RopeTable;
use crate::lora::RowAdapters;
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::model::{AdapterRows, Batch, Draw, ForwardOutput, Taps};
use foretoken_kernels::graph::Values;
use foretoken_kernels::{Slots, StateBatch, Writes, pick_rows};
use std::cell::Cell;

/// See the module; every value that indexes memory was checked on the host.
pub(crate) struct Inputs {
    /// `[rows]` u32, below the size of the vocabulary.
    pub tokens: Tensor,
    pub slots: Slots,
    /// The angles of the rows, one entry for each position embedding.
    pub angles: Vec<SentAngles>,
    /// Rows whose logits are requested, u32; `None` = no row.
    pub wanted: Option<Tensor>,
    /// Where the logits go, `[rows or more, vocab_size]` f32; `None` = to new memory.
    pub logits: Option<Tensor>,
    /// Rows whose last hidden states are requested, u32; `None` = no row.
    pub last_hidden: Option<Tensor>,
    /// Layers and rows whose hidden states are requested; the rows are u32.
    taps: Option<(Vec<usize>, Tensor)>,
    /// All rows by their sequences, if layers have states.
    pub states: StateBatch,
    /// The adapters of all rows.
    pub adapters: RowAdapters,
    /// The adapters of the rows in `wanted`, on the CPU. The last layers of a GPU compute all rows.
    pub wanted_adapters: RowAdapters,
    /// Counts what [`ForwardOutput::experts_read`](foretoken_core::model::ForwardOutput::experts_read) says.
    pub experts_read: Cell<usize>,
    vocab_size: usize,
}

/// What a position embedding rotates the rows by.
pub(crate) struct SentAngles {
    /// `[2, rows, width / 2]` in the compute dtype: cosines, then sines.
    pub both: Tensor,
    /// `[rows, 1, 1]` f32: the factor of a row's queries, if there is one.
    pub query_scale: Option<Tensor>,
}

impl Inputs {
    /// Sends the inputs of `batch` to `device`; `ropes` are the model's position embeddings, whose angles are in the compute
    /// dtype; slots are below `num_slots`.
    ///
    /// # Errors
    /// If the parts of the batch do not fit together, a token, a slot or a row does not exist, or the
    /// device fails.
    pub fn new(
        batch: &Batch,
        ropes: (&[RopeTable], DType),
        vocab_size: usize,
        num_slots: usize,
        device: &Device,
    ) -> Result<Self> {
        let (sizes, mut writes) = ((vocab_size, num_slots), Writes::default());
        // SAFETY: they are written here.
        let inputs = unsafe { Self::new_with(batch, ropes, sizes, device, &mut writes)? };
        writes.write()?;
        Ok(inputs)
    }

    /// As [`Inputs::new`], but a GPU has the inputs once `writes` are written.
    ///
    /// # Errors
    /// See [`Inputs::new`].
    ///
    /// # Safety
    /// No kernel reads them before.
    pub unsafe fn new_with(
        batch: &Batch,
        (ropes, dtype): (&[RopeTable], DType),
        (vocab_size, num_slots): (usize, usize),
        device: &Device,
        writes: &mut Writes,
    ) -> Result<Self> {
        check(batch, vocab_size)?;
        let rows = batch.positions.len();
        // SAFETY: the caller promises it.
        let slots = unsafe { Slots::padded_with(&batch.slots, rows, num_slots, device, writes)? };
        let mut send = |dtype: DType, values: Values<'_>, dims: &[usize]| {
            // SAFETY: the caller promises it.
            unsafe { writes.tensor_in(dtype, values, dims, device) }
        };
        let of_rope = |rope: &RopeTable| -> Result<SentAngles> {
            let dims = [2, rows, rope.frequencies.len()];
            let scales = query_scales(batch, rope);
            let scales = scales.map(|scales| send(DType::F32, Values::F32(&scales), &[rows, 1, 1]));
            Ok(SentAngles {
                both: send(dtype, Values::F32(&angles(batch, rope)), &dims)?,
                query_scale: scales.transpose()?,
            })
        };
        let angles = ropes.iter().map(of_rope).collect::<Result<_>>()?;
        let mut rows_of = |rows: &[u32]| match rows {
            [] => Ok(None),
            rows => send(DType::U32, Values::U32(rows), &[rows.len()]).map(Some),
        };
        let wanted_adapters = if device.is_cpu() {
            RowAdapters::Host(AdapterRows::of_picked(&batch.adapters, &batch.logits))
        } else {
            RowAdapters::none()
        };
        let (wanted, last_hidden) = (rows_of(&batch.logits)?, rows_of(&batch.last_hidden)?);
        Ok(Self {
            tokens: match &batch.drawn {
                None => send(DType::U32, Values::U32(&batch.tokens), &[rows])?,
                // A copy: others hold `drawn`, and replaying a graph overwrites these tokens.
                Some(drawn) => drawn.copy()?,
            },
            slots,
            angles,
            wanted,
            logits: None,
            last_hidden,
            taps: None,
            states: StateBatch::new(Vec::new()),
            adapters: RowAdapters::new(&batch.adapters, rows, device)?,
            wanted_adapters,
            experts_read: Cell::new(0),
            vocab_size,
        })
    }

    /// Adds the requested hidden states, of a model with `num_layers` layers.
    ///
    /// # Errors
    /// If a layer or a row does not exist, or they are not in ascending order.
    pub fn with_taps(mut self, taps: Option<&Taps>, num_layers: usize) -> Result<Self> {
        let wanted = taps.filter(|taps| !taps.layers.is_empty() && !taps.rows.is_empty());
        let Some(Taps { layers, rows }) = wanted else {
            return Ok(self);
        };
        let exist = layers.iter().all(|&layer| layer <= num_layers)
            && rows.iter().all(|&row| (row as usize) < self.slots.len());
        if !exist || !layers.is_sorted_by(|a, b| a < b) || !rows.is_sorted_by(|a, b| a < b) {
            return Err(Error::internal(format!(
                "hidden states of layers {layers:?} of {num_layers} for rows {rows:?} of {}",
                self.slots.len()
            )));
        }
        let rows = Tensor::new(rows.as_slice(), self.slots.device())?;
        self.taps = Some((layers.clone(), rows));
        Ok(self)
    }

    /// Adds the hidden states of layer `layer` to `tapped`, if they are requested: the sum of `x` and
    /// `delta`, both `[rows, hidden_size]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn tap(
        &self,
        layer: usize,
        x: &Tensor,
        delta: &Tensor,
        tapped: &mut Vec<Tensor>,
    ) -> Result<()> {
        if let Some((layers, rows)) = &self.taps
            && layers.contains(&layer)
        {
            tapped.push((rows_of(x, rows)? + rows_of(delta, rows)?)?);
        }
        Ok(())
    }

    /// Lets a forward with these inputs write neither K and V nor states: all rows are padding, until they are replaced.
    ///
    /// # Errors
    /// If the device fails, or is the CPU.
    pub fn write_nothing(&self) -> Result<()> {
        let mut writes = Writes::default();
        self.slots.replace(&[], &mut writes)?;
        self.states.replace(&[], &mut writes)?;
        Ok(writes.write()?)
    }

    /// Adds to `writes` the inputs of another batch of the same size, in the place of these. Tokens that a GPU
    /// [drew](Batch::drawn) are not among them: the caller puts them there.
    ///
    /// # Errors
    /// Returns the errors of [`Inputs::new`]. A batch of another size is an error, too.
    pub fn replace(&self, batch: &Batch, ropes: &[RopeTable], writes: &mut Writes) -> Result<()> {
        check(batch, self.vocab_size)?;
        if self.last_hidden.is_some() || !batch.last_hidden.is_empty() {
            return Err(Error::internal("last hidden states are not replaced"));
        }
        let wanted = self.wanted.as_ref().map_or(0, Tensor::elem_count);
        if batch.tokens.len() != self.slots.len() || batch.logits.len() != wanted {
            return Err(Error::internal(format!(
                "{} rows and {} logits in the place of {} and {wanted}",
                batch.tokens.len(),
                batch.logits.len(),
                self.slots.len()
            )));
        }
        if let Some((_, rows)) = &self.taps {
            let new = batch.taps.as_ref().map_or(&[][..], |taps| &taps.rows);
            let exist = new.iter().all(|&row| (row as usize) < self.slots.len());
            if new.len() != rows.elem_count() || !exist {
                return Err(Error::internal(format!(
                    "hidden states of rows {new:?} in the place of {} of {}",
                    rows.elem_count(),
                    self.slots.len()
                )));
            }
            writes.push(rows, Values::U32(new))?;
        }
        self.adapters.replace(&batch.adapters, writes)?;
        self.slots.replace(&batch.slots, writes)?;
        self.states.replace(&batch.states, writes)?;
        if batch.drawn.is_none() {
            writes.push(&self.tokens, Values::U32(&batch.tokens))?;
        }
        for (to, rope) in self.angles.iter().zip(ropes) {
            writes.push(&to.both, Values::F32(&angles(batch, rope)))?;
            if let (Some(to), Some(scales)) = (&to.query_scale, query_scales(batch, rope)) {
                writes.push(to, Values::F32(&scales))?;
            }
        }
        if let Some(wanted) = &self.wanted {
            writes.push(wanted, Values::U32(&batch.logits))?;
        }
        Ok(())
    }
}

/// `rows`, `[n]` u32 in ascending order, of `all`. If they are all rows, nothing is copied.
///
/// # Errors
/// If the device fails.
pub(crate) fn rows_of(all: &Tensor, rows: &Tensor) -> candle_core::Result<Tensor> {
    if rows.elem_count() == all.dim(0)? {
        return Ok(all.clone());
    }
    pick_rows(all, rows)
}

/// Draws the tokens of the batch `next`, `[rows]` u32, from the `output` of the forward before it. They are written to
/// `place`, if there is one.
///
/// # Errors
/// If the device fails.
pub(crate) fn drawn_for(
    next: &Batch,
    output: &ForwardOutput,
    place: Option<&Tensor>,
    draw: &mut Draw<'_>,
) -> Result<Tensor> {
    let rows = next.tokens.len();
    let fits = |place: &&Tensor| place.elem_count() >= output.logits.dims()[0];
    let ids = draw(output, place.filter(fits))?.narrow(0, 0, rows)?;
    if let Some(place) = place.filter(|place| !fits(place)) {
        place.slice_set(&ids, 0, 0)?;
    }
    Ok(ids)
}

/// The cosines of the angles by which each row is rotated, then the sines.
fn angles(batch: &Batch, rope: &RopeTable) -> Vec<f32> {
    let factor = rope.attention_factor;
    let of = |turn: fn(f32) -> f32| {
        let positions = batch.positions.iter().map(|&position| position as f32);
        positions.flat_map(move |position| {
            let frequencies = rope.frequencies.iter();
            frequencies.map(move |f| turn(position * f) * factor)
        })
    };
    of(f32::cos).chain(of(f32::sin)).collect()
}

/// The factor of each row's queries, if there are any.
fn query_scales(batch: &Batch, rope: &RopeTable) -> Option<Vec<f32>> {
    let scaling = rope.query_scaling?;
    Some(batch.positions.iter().map(|&p| scaling.at(p)).collect())
}

/// Checks that the parts of a batch fit together; if not, the caller has a bug.
fn check(batch: &Batch, vocab_size: usize) -> Result<()> {
    let rows = batch.tokens.len();
    let (slots, padding) = (batch.slots.len(), batch.padding);
    if rows == 0 || batch.positions.len() != rows || slots + padding != rows {
        return Err(Error::internal(format!(
            "batch of {rows} tokens, {} positions, {slots} slots and {padding} rows of padding",
            batch.positions.len(),
        )));
    }
    for asked in [&batch.logits, &batch.last_hidden] {
        let exist = asked.last().is_none_or(|&row| (row as usize) < rows);
        // Then as many as there are rows are all of them.
        if !exist || !asked.is_sorted_by(|a, b| a < b) {
            return Err(Error::internal(format!(
                "logits or hidden states of rows {asked:?} of {rows}"
            )));
        }
    }
    AdapterRows::check(&batch.adapters, rows)?;
    match &batch.drawn {
        Some(drawn) if drawn.dims() != [rows] || drawn.dtype() != DType::U32 => Err(
            Error::internal(format!("{:?} drawn for {rows} rows", drawn.dims())),
        ),
        // A sampler drew them from logits over the vocabulary.
        Some(_) => Ok(()),
        None => match batch.tokens.iter().find(|&&id| id as usize >= vocab_size) {
            None => Ok(()),
            Some(id) => Err(Error::internal(format!(
                "token {id} is outside the vocabulary of {vocab_size}"
            ))),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(frequencies: &[f32]) -> RopeTable {
        RopeTable {
            frequencies: frequencies.to_vec(),
            attention_factor: 1.,
            query_scaling: None,
        }
    }

    fn batch(tokens: &[u32], slots: &[u32], logits: &[u32]) -> Batch {
        Batch {
            tokens: tokens.to_vec(),
            positions: (0..tokens.len() as u32).collect(),
            slots: slots.to_vec(),
            logits: logits.to_vec(),
            ..Batch::default()
        }
    }

    fn replace(inputs: &Inputs, batch: &Batch, ropes: &[RopeTable]) -> Result<()> {
        let mut writes = Writes::default();
        inputs.replace(batch, ropes, &mut writes)?;
        Ok(writes.write()?)
    }

    /// Both `Inputs::new` and `Inputs::replace` refuse it.
    #[test]
    fn what_leads_out_of_memory_is_refused() {
        let cpu = Device::Cpu;
        let good = batch(&[3, 4], &[0, 7], &[1]);
        let ropes = [rope(&[1.0, 0.1]), rope(&[0.5])];
        let new = |batch: &Batch| Inputs::new(batch, (&ropes, DType::F32), 5, 8, &cpu);
        let inputs = new(&good).unwrap();
        let drawn = |ids: Tensor| Batch {
            drawn: Some(ids),
            ..good.clone()
        };
        let ids = |count| Tensor::zeros(count, DType::U32, &cpu).unwrap();
        for wrong in [
            batch(&[3, 5], &[0, 7], &[1]),
            batch(&[3, 4], &[0, 8], &[1]),
            batch(&[3, 4], &[0, 7], &[2]),
            batch(&[3, 4], &[0], &[1]),
            batch(&[], &[], &[]),
            drawn(ids(1)),
            drawn(ids(3)),
            drawn(ids(2).to_dtype(DType::F32).unwrap()),
        ] {
            assert!(new(&wrong).is_err(), "{wrong:?}");
            assert!(replace(&inputs, &wrong, &ropes).is_err(), "{wrong:?}");
            assert_eq!(inputs.tokens.to_vec1::<u32>().unwrap(), [3, 4]);
        }
        // Others put the tokens there that a GPU drew.
        replace(&inputs, &drawn(ids(2)), &ropes).unwrap();
        assert_eq!(inputs.tokens.to_vec1::<u32>().unwrap(), [3, 4]);
        replace(&inputs, &batch(&[1, 2], &[0, 7], &[1]), &ropes).unwrap();
        assert_eq!(inputs.tokens.to_vec1::<u32>().unwrap(), [1, 2]);
        for other_size in [batch(&[1], &[0], &[0]), batch(&[1, 1], &[0, 1], &[0, 1])] {
            assert!(replace(&inputs, &other_size, &ropes).is_err());
        }
    }

    #[test]
    fn taps_that_do_not_exist_are_refused() {
        let batch = batch(&[3, 4], &[0, 7], &[1]);
        let with = |layers: &[usize], rows: &[u32]| {
            let (layers, rows) = (layers.to_vec(), rows.to_vec());
            let ropes = [rope(&[1.0])];
            let inputs = Inputs::new(&batch, (&ropes, DType::F32), 5, 8, &Device::Cpu).unwrap();
            let inputs = inputs.with_taps(Some(&Taps { layers, rows }), 3);
            inputs.map(|inputs| inputs.taps.is_some())
        };
        assert!(with(&[0, 3], &[0, 1]).unwrap());
        assert!(!with(&[], &[0]).unwrap() && !with(&[0], &[]).unwrap());
        for (layers, rows) in [
            (&[4][..], &[0][..]),
            (&[0], &[2]),
            (&[1, 0], &[0]),
            (&[0], &[1, 1]),
        ] {
            with(layers, rows).unwrap_err();
        }
    }
}
