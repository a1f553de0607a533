//! Which rows of a forward have which adapters, and what these add.

use super::LoraAdapter;
use super::place::AdapterWeights;
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::model::AdapterRows;
use foretoken_kernels::{LoraRows, RowsOfLora, Writes};
use std::any::Any;

/// The adapters of the rows of a forward.
pub(crate) enum RowAdapters {
    /// Of rows on the CPU, or of none.
    Host(Vec<AdapterRows>),
    /// Of rows on a GPU.
    Device(LoraRows),
}

impl RowAdapters {
    /// Those of a forward of `count` rows on `device`.
    ///
    /// # Errors
    /// If an adapter is of another model or device, or the device fails.
    pub fn new(adapters: &[AdapterRows], count: usize, device: &Device) -> Result<Self> {
        if device.is_cpu() || adapters.is_empty() {
            return Ok(Self::Host(adapters.to_vec()));
        }
        let rows = on_device(adapters, Some(device))?;
        if rows.is_empty() {
            return Ok(Self::none());
        }
        Ok(Self::Device(LoraRows::new(&rows, count, device)?))
    }

    /// Of rows without any.
    pub fn none() -> Self {
        Self::Host(Vec::new())
    }

    /// Whether no row has one.
    pub fn are_none(&self) -> bool {
        matches!(self, Self::Host(all) if all.is_empty())
    }

    /// What graphs of forwards with these adapters must have room for; 0 on the CPU, and without adapters.
    ///
    /// # Errors
    /// If an adapter is of another model.
    pub fn room(adapters: &[AdapterRows]) -> Result<usize> {
        let is_on_device = |one: &AdapterRows| {
            let of = adapter(one)?;
            Ok::<_, Error>(matches!(of.weights, AdapterWeights::Device(_)))
        };
        match adapters.first().map(is_on_device).transpose()? {
            Some(true) => Ok(LoraRows::room(&on_device(adapters, None)?)),
            _ => Ok(0),
        }
    }

    /// Adds to `writes` those of another forward of as many rows, in the place of these.
    ///
    /// # Errors
    /// If there were none, or an adapter needs more room or is of another model.
    pub fn replace(&self, adapters: &[AdapterRows], writes: &mut Writes) -> Result<()> {
        match self {
            Self::Device(rows) => {
                rows.replace(&on_device(adapters, None)?, writes)?;
                Ok(())
            }
            Self::Host(own) if own.is_empty() && adapters.is_empty() => Ok(()),
            Self::Host(_) => Err(Error::internal("rows with adapters are not replaced")),
        }
    }

    /// Adds to `y`, `[rows, outputs]`, which nobody else holds, what the adapters of the rows add to the outputs of the
    /// linear layer `site` for `x`, `[rows, inputs]`.
    ///
    /// # Errors
    /// If a shape differs from that of the layer, or an adapter is of another kind of model.
    pub fn add(&self, site: usize, x: &Tensor, y: &Tensor) -> Result<()> {
        match self {
            Self::Host(all) => add_on_host(all, site, x, y),
            Self::Device(rows) => {
                let x = x.contiguous()?;
                // SAFETY: the batch of this forward has the adapters. `LoraTarget` frees them on the thread that computes.
                unsafe { rows.add(site, &x, y) }?;
                Ok(())
            }
        }
    }
}

fn adapter(rows: &AdapterRows) -> Result<&LoraAdapter> {
    let adapter: &dyn Any = &*rows.adapter;
    let adapter = adapter.downcast_ref::<LoraAdapter>();
    adapter.ok_or_else(|| Error::internal("an adapter of another model"))
}

/// What the adapters add to layers on `device`, one of the GPUs of their model; `None` = on its only one. Those that
/// add nothing there are not among them.
fn on_device<'a>(
    adapters: &'a [AdapterRows],
    device: Option<&Device>,
) -> Result<Vec<RowsOfLora<'a>>> {
    let mut found = Vec::with_capacity(adapters.len());
    for one in adapters {
        let AdapterWeights::Device(own) = &adapter(one)?.weights else {
            return Err(Error::internal("an adapter on the CPU"));
        };
        let lora = device.map_or_else(|| own.lora(), |device| own.on(device));
        found.extend(lora.map(|lora| (one.rows.clone(), lora)));
    }
    Ok(found)
}

fn add_on_host(all: &[AdapterRows], site: usize, x: &Tensor, y: &Tensor) -> Result<()> {
    for one in all {
        let AdapterWeights::Host(sites) = &adapter(one)?.weights else {
            return Err(Error::internal("an adapter on a GPU"));
        };
        let Some(Some(low_rank)) = sites.get(site) else {
            continue;
        };
        let rows = &one.rows;
        let of_rows = |all: &Tensor| all.narrow(0, rows.start, rows.len());
        let added = low_rank.forward(&of_rows(x)?.contiguous()?)?;
        y.slice_set(&(of_rows(y)? + added)?, 0, rows.start)?;
    }
    Ok(())
}
