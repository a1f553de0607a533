//! Matrices that are packed, as [`PackedConfig`] says.

use super::{Stack, StackForm, TensorSource, Weights, in_order, ordered_shape};
use super::{dummy, inventory, requantize};
use crate::checkpoint::gguf;
use crate::checkpoint::raw_tensors::{RawTensor, RawTensors};
use crate::matrix::{self, Matrix, Reordered, Unread, WeightForm};
use crate::packed::stacked::{self, ExpertTensors};
use crate::packed::{
    Blocks, FloatFormat, Opened, PackedConfig, Parts, Scheme, Unpacked, fp8, mxfp4,
};
use candle_core::{DType, Device, Tensor, WithDType};
use foretoken_core::error::{Error, Result, clipped};
use foretoken_kernels::dense::Float8;
use foretoken_kernels::quant::{BLOCK, BlockType, DeviceQuantMatrix, Nvfp4, QuantMatrix};
use half::{bf16, f16};
use rayon::prelude::*;
use std::sync::Arc;

/// How matrices are packed, and the dtype of those that no blocks hold.
#[derive(Clone)]
pub(super) struct Packing {
    config: Arc<PackedConfig>,
    dtype: DType,
}

/// Outputs and inputs.
type Shape = (usize, usize);

impl Weights {
    /// Sets that the checkpoint is packed as `config` says. Matrices that no blocks hold exactly become `dtype`, if no
    /// other dtype is asked for.
    pub fn packed(self, config: Option<PackedConfig>, dtype: DType) -> Self {
        let packing = config.map(|config| Packing {
            config: Arc::new(config),
            dtype,
        });
        Self { packing, ..self }
    }

    /// The name in the checkpoint of the matrix that the code calls `name`, both without `.weight`.
    fn stored_matrix_name(&self, name: &str) -> String {
        const END: &str = ".weight";
        let mut stored = self.stored_name(&format!("{name}{END}"));
        stored.truncate(stored.len() - END.len());
        stored
    }

    /// Whether the matrix `name` (without `.weight`) is packed.
    pub(super) fn has_packed(&self, name: &str) -> bool {
        let stored = self.stored_matrix_name(name);
        let parts = Parts::new(&self.source, &stored);
        let packing = self.packing.as_ref();
        packing.is_some_and(|packing| packing.config.scheme([name, &stored], &parts).is_some())
    }

    /// The matrix `name` (without `.weight`) of `shape`, with its outputs in this order; `None` if it is not packed.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub(super) fn packed_matrix(
        &mut self,
        name: &str,
        shape: Shape,
        order: Option<&[u32]>,
    ) -> Result<Option<Arc<dyn Matrix>>> {
        let Some(packing) = self.packing.clone() else {
            return Ok(None);
        };
        if let TensorSource::Dummy(seed) = self.source {
            let scheme = packing.config.scheme_of_random(name);
            let scheme = scheme.map_err(Error::setup)?;
            let random = scheme.map(|scheme| self.random(scheme, (seed, name), shape, order));
            return random.transpose();
        }
        let stored = self.stored_matrix_name(name);
        let mut parts = Parts::new(&self.source, &stored);
        let Some(scheme) = packing.config.scheme([name, &stored], &parts) else {
            return Ok(None);
        };
        let opened = scheme.open(&mut parts, shape)?;
        self.read.extend(parts.read);
        if self.inventory.is_some() {
            // A GPU has no kernel for inputs in another order.
            let blocks = opened
                .blocks
                .filter(|_| !self.dtypes.on_gpu || !opened.may_reorder);
            let stored = (scheme.label(), parts.bytes);
            let shape = ordered_shape(shape, order);
            let form = self.form_of(blocks, scheme.floats(shape), shape);
            return Ok(Some(self.unread(name, stored, shape, form)));
        }
        self.of_opened(opened, &stored, shape, order).map(Some)
    }

    /// The matrices of `stack`, if its tensor is FP8; `None` = it is not. Other packed experts have matrices of their own.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub(super) fn packed_stack(
        &mut self,
        stack: &Stack<'_>,
    ) -> Result<Option<Vec<Arc<dyn Matrix>>>> {
        let stored = self.stored_name(stack.name);
        let packing = self.packing.clone().filter(|_| {
            let is_float8 = |raw: RawTensor<'_>| raw.dtype == fp8::E4M3;
            stack.form != StackForm::Mxfp4 && self.source.raw(&stored).is_ok_and(is_float8)
        });
        let Some(packing) = packing else {
            return Ok(None);
        };
        self.read.extend(stacked::names(&stored));
        let (module, count) = (stacked::module(&stored), stack.count);
        let expert = |index: usize| {
            let is_transposed = stack.form == StackForm::Columns;
            ExpertTensors::new(&self.source, &stored, (index, count), is_transposed)
        };
        let scheme_of = |parts: &Parts<'_>| {
            let scheme = packing.config.scheme([stack.name, module], parts);
            scheme.ok_or_else(|| {
                let name = clipped(&stored);
                Error::setup(format!(
                    "tensor {name} is FP8, which quantization_config does not say"
                ))
            })
        };
        if self.inventory.is_some() {
            let own = expert(0)?;
            let mut parts = Parts::new(&own, module);
            let scheme = scheme_of(&parts)?;
            let blocks = scheme.open(&mut parts, stack.shape)?.blocks;
            let shape = ordered_shape(stack.shape, stack.order);
            let form = self.form_of(blocks, scheme.floats(shape), shape);
            let stored_as = (scheme.label(), parts.bytes * count as u64);
            let dims = [count, stack.shape.0, stack.shape.1];
            self.list(stored.clone(), &dims, stored_as, form);
            return Ok(Some(Unread::matrices(count, stack.shape, &form.name())));
        }
        let one = |index: usize| {
            let own = expert(index)?;
            let mut parts = Parts::new(&own, module);
            let opened = scheme_of(&parts)?.open(&mut parts, stack.shape)?;
            self.of_opened(opened, module, stack.shape, stack.order)
        };
        (0..count).map(one).collect::<Result<_>>().map(Some)
    }

    /// The matrix that `opened` is when it is loaded; `stored` is its name in the checkpoint, without `.weight`.
    fn of_opened(
        &self,
        opened: Opened<'_>,
        stored: &str,
        shape: Shape,
        order: Option<&[u32]>,
    ) -> Result<Arc<dyn Matrix>> {
        let unpacked = (opened.unpack)()?;
        let name = format!("{stored}.weight");
        if let Some(float8) = unpacked.float8().filter(|own| self.keeps_float8(own)) {
            let place = (&self.device, self.dtypes.on_gpu);
            return match order {
                Some(order) => in_order_float8(&float8, order, place),
                None => matrix::float8(&float8, place.0, place.1),
            };
        }
        if let Some(nvfp4) = unpacked.nvfp4().filter(|own| self.keeps_nvfp4(own)) {
            let place = (&self.device, self.dtypes.on_gpu);
            return match order {
                Some(order) => in_order_nvfp4(&nvfp4, order, place),
                None => matrix::nvfp4(&nvfp4, place.0, place.1),
            };
        }
        self.matrix_of_packed(&*unpacked, &name, shape, order)
    }

    /// Adds the packed matrix `name` (without `.weight`) to the inventory, as one that is unpacked when it is loaded, and
    /// returns its format then; `None` if it is not packed.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub(super) fn list_unpacked(&mut self, name: &str, shape: Shape) -> Result<Option<String>> {
        if self.packed_matrix(name, shape, None)?.is_none() {
            return Ok(None);
        }
        let dims = [shape.0, shape.1];
        let form = self.dtypes.form(DType::F32, &dims);
        if let Some(shared) = &self.inventory {
            inventory::lock(shared).last_becomes(&dims, form);
        }
        Ok(Some(form.name()))
    }

    /// The form that a matrix gets when it is loaded. `blocks` are those that hold it exactly; `None` = no blocks do. `floats`
    /// are what it is otherwise, if products take it.
    fn form_of(
        &self,
        blocks: Option<BlockType>,
        floats: Option<FloatFormat>,
        (outputs, inputs): Shape,
    ) -> WeightForm {
        let kept = match floats {
            Some(FloatFormat::Float8(run)) => self.form_of_float8(inputs, run),
            Some(FloatFormat::Nvfp4) => self.form_of_nvfp4(inputs),
            None => None,
        };
        if let Some(form) = kept {
            return form;
        }
        let form = blocks.map(|kind| self.form_of_blocks(kind, inputs));
        let form = form.filter(|form| form.blocks() == blocks);
        form.unwrap_or_else(|| self.dtypes.form(self.own_dtype(), &[outputs, inputs]))
    }

    /// The form of these blocks with so many inputs.
    pub(super) fn form_of_blocks(&self, kind: BlockType, inputs: usize) -> WeightForm {
        WeightForm::of_gguf(kind, inputs, self.dtypes.matrices, self.dtypes.on_gpu)
    }

    /// The form of FP8 whose scales are those of `run` inputs each, if it stays FP8: where a product takes it, if no blocks
    /// are asked for.
    fn form_of_float8(&self, inputs: usize, run: usize) -> Option<WeightForm> {
        if self.dtypes.blocks.is_some() {
            None
        } else if self.dtypes.on_gpu {
            let is_kept = DeviceQuantMatrix::keeps_float8(inputs, run, self.dtypes.activations);
            is_kept.then_some(WeightForm::DeviceFloat8)
        } else {
            Some(WeightForm::Float8(run))
        }
    }

    /// The form of NVFP4, if it stays so: where a product takes it, if no blocks are asked for.
    fn form_of_nvfp4(&self, inputs: usize) -> Option<WeightForm> {
        let (is_taken, form) = if self.dtypes.on_gpu {
            let is_taken = DeviceQuantMatrix::keeps_nvfp4(inputs, self.dtypes.activations);
            (is_taken, WeightForm::DeviceNvfp4)
        } else {
            (QuantMatrix::keeps_nvfp4(inputs), WeightForm::Nvfp4)
        };
        (is_taken && self.dtypes.blocks.is_none()).then_some(form)
    }

    /// Whether the matrix stays FP8.
    fn keeps_float8(&self, matrix: &Float8<'_>) -> bool {
        let form = self.form_of_float8(matrix.shape.1, matrix.block.1);
        let mut largest = matrix.scales.iter().map(|scale| scale.abs() * fp8::MAX);
        form.is_some() && largest.all(|value| self.dtypes.holds(value))
    }

    /// Whether the matrix stays NVFP4.
    fn keeps_nvfp4(&self, matrix: &Nvfp4<'_>) -> bool {
        let largest = fp8::MAX * matrix.factor * mxfp4::MAX;
        self.form_of_nvfp4(matrix.shape.1).is_some() && self.dtypes.holds(largest)
    }

    /// Adds a matrix to the inventory that is loaded in this form.
    fn unread(
        &self,
        name: &str,
        stored: (String, u64),
        shape: Shape,
        form: WeightForm,
    ) -> Arc<dyn Matrix> {
        let name = self.stored_matrix_name(name) + ".weight";
        self.list(name, &[shape.0, shape.1], stored, form);
        let format = form.name();
        Arc::new(Unread { shape, format })
    }

    fn matrix_of_packed(
        &self,
        unpacked: &dyn Unpacked,
        name: &str,
        shape: Shape,
        order: Option<&[u32]>,
    ) -> Result<Arc<dyn Matrix>> {
        let kept = |blocks: &Blocks| {
            let form = self.form_of(Some(blocks.kind), None, shape);
            let fits = form.blocks() == Some(blocks.kind);
            fits && (!self.dtypes.on_gpu || blocks.inputs.is_none())
        };
        let Some(blocks) = unpacked.blocks().filter(kept) else {
            tracing::debug!("{name}: no blocks hold its values exactly");
            let dense = self.dense_of_packed(unpacked, name, shape, order)?;
            return self.matrix_of(&dense.to_device(&self.device)?, name);
        };
        if blocks.kind == BlockType::Mxfp4 {
            self.dtypes.check_mxfp4(&blocks.data, name)?;
        }
        let form = self.form_of(Some(blocks.kind), None, shape);
        let data = match order {
            Some(order) => gguf::in_order(&blocks.data, shape.0, order),
            None => blocks.data,
        };
        let matrix = matrix::quantized(form, data, ordered_shape(shape, order), &self.device)?;
        match blocks.inputs {
            Some(inputs) => Ok(Arc::new(Reordered::new(matrix, &inputs)?)),
            None => Ok(matrix),
        }
    }

    /// All values, on the CPU.
    fn dense_of_packed(
        &self,
        unpacked: &dyn Unpacked,
        name: &str,
        shape: Shape,
        order: Option<&[u32]>,
    ) -> Result<Tensor> {
        let own = self.own_dtype();
        let dtype = match self.dtypes.blocks {
            // Rounded once.
            Some(_) => DType::F32,
            None => self.dtypes.matrices.unwrap_or(own),
        };
        match dtype {
            DType::F16 => rows(unpacked, name, shape, order, f16::from_f32),
            DType::BF16 => rows(unpacked, name, shape, order, bf16::from_f32),
            _ => rows(unpacked, name, shape, order, |value| value),
        }
    }

    /// The dtype of matrices that no blocks hold, if no other is asked for.
    fn own_dtype(&self) -> DType {
        let packing = self.packing.as_ref();
        packing.map_or(DType::F32, |packing| packing.dtype)
    }

    /// Random weights in the form of packed ones.
    fn random(
        &self,
        scheme: &dyn Scheme,
        (seed, name): (u64, &str),
        shape: Shape,
        order: Option<&[u32]>,
    ) -> Result<Arc<dyn Matrix>> {
        // Others are left to files.
        let can_be_made =
            |kind: &BlockType| shape.1.is_multiple_of(BLOCK) && requantize::can_make(*kind);
        let blocks = scheme.usual_blocks().filter(can_be_made);
        let form = self.form_of(blocks, scheme.floats(shape), shape);
        if self.inventory.is_some() {
            let bytes = form.bytes(&[shape.0, shape.1]);
            let shape = ordered_shape(shape, order);
            return Ok(self.unread(name, (scheme.label(), bytes), shape, form));
        }
        let name = format!("{name}.weight");
        let noise = in_order(dummy::tensor(seed, &name, &[shape.0, shape.1])?, order)?;
        if matches!(form, WeightForm::Float8(_) | WeightForm::DeviceFloat8) {
            let run = match scheme.floats(shape) {
                Some(FloatFormat::Float8(run)) => run,
                _ => shape.1,
            };
            return random_float8(&noise, run, (&self.device, self.dtypes.on_gpu));
        }
        if matches!(form, WeightForm::Nvfp4 | WeightForm::DeviceNvfp4) {
            return random_nvfp4(&noise, (&self.device, self.dtypes.on_gpu));
        }
        match blocks.filter(|_| form.blocks() == blocks) {
            Some(kind) => {
                let data = requantize::blocks(&noise, kind)?;
                matrix::quantized(form, data, ordered_shape(shape, order), &self.device)
            }
            None => self.matrix_of(&noise.to_device(&self.device)?, &name),
        }
    }
}

/// The FP8 that is nearest to `weight`, with one scale but as many as there are runs of so many inputs.
fn random_float8(
    weight: &Tensor,
    run: usize,
    (device, on_gpu): (&Device, bool),
) -> Result<Arc<dyn Matrix>> {
    let (shape, values) = (weight.dims2()?, floats(weight)?);
    let most = largest(&values);
    let scale = (most / fp8::MAX).max(f32::MIN_POSITIVE);
    let float8 = Float8 {
        shape,
        numbers: &fp8::rounded(&values, scale),
        scales: &vec![scale; shape.1.div_ceil(run)],
        block: (shape.0, run),
    };
    matrix::float8(&float8, device, on_gpu)
}

/// NVFP4 near to `weight`, with a scale for each group that holds its largest value.
fn random_nvfp4(weight: &Tensor, (device, on_gpu): (&Device, bool)) -> Result<Arc<dyn Matrix>> {
    let (shape, values) = (weight.dims2()?, floats(weight)?);
    let factor = (largest(&values) / (fp8::MAX * mxfp4::MAX)).max(f32::MIN_POSITIVE);
    let groups = values.chunks_exact(Nvfp4::GROUP);
    let of_groups: Vec<f32> = groups.map(|group| largest(group) / mxfp4::MAX).collect();
    let (scales, table) = (fp8::rounded(&of_groups, factor), fp8::table());
    let number = |(i, value): (usize, &f32)| {
        let scale = factor * table[usize::from(scales[i / Nvfp4::GROUP])];
        mxfp4::nearest(value / scale.max(f32::MIN_POSITIVE))
    };
    let numbers: Vec<u8> = values.iter().enumerate().map(number).collect();
    let (pairs, _) = numbers.as_chunks::<2>();
    let nvfp4 = Nvfp4 {
        shape,
        numbers: &pairs
            .iter()
            .map(|[low, high]| low | high << 4)
            .collect::<Vec<_>>(),
        scales: &scales,
        factor,
    };
    matrix::nvfp4(&nvfp4, device, on_gpu)
}

/// All values of a tensor.
fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// The size of the largest value.
fn largest(values: &[f32]) -> f32 {
    (values.iter()).fold(0f32, |most, value| most.max(value.abs()))
}

/// The matrix with its outputs in this order.
fn in_order_nvfp4(
    matrix: &Nvfp4<'_>,
    order: &[u32],
    (device, on_gpu): (&Device, bool),
) -> Result<Arc<dyn Matrix>> {
    let (outputs, inputs) = matrix.shape;
    let ordered = Nvfp4 {
        shape: (order.len(), inputs),
        numbers: &gguf::in_order(matrix.numbers, outputs, order),
        scales: &gguf::in_order(matrix.scales, outputs, order),
        factor: matrix.factor,
    };
    matrix::nvfp4(&ordered, device, on_gpu)
}

/// The matrix with its outputs in this order.
fn in_order_float8(
    matrix: &Float8<'_>,
    order: &[u32],
    (device, on_gpu): (&Device, bool),
) -> Result<Arc<dyn Matrix>> {
    let ((_, inputs), (_, run)) = (matrix.shape, matrix.block);
    let (mut numbers, mut scales) = (Vec::new(), Vec::new());
    for &output in order {
        let output = output as usize;
        numbers.extend_from_slice(&matrix.numbers[output * inputs..][..inputs]);
        scales.extend_from_slice(matrix.scales_of(output));
    }
    let ordered = Float8 {
        shape: (order.len(), inputs),
        numbers: &numbers,
        scales: &scales,
        block: (1, run),
    };
    matrix::float8(&ordered, device, on_gpu)
}

/// All values, each made of f32 by `from`, with the rows in this order.
///
/// # Errors
/// A setup error that names the matrix if it does not fit in memory, or a value is not finite.
fn rows<T: WithDType + Send + Sync>(
    unpacked: &dyn Unpacked,
    name: &str,
    shape: Shape,
    order: Option<&[u32]>,
    from: impl Fn(f32) -> T + Sync,
) -> Result<Tensor> {
    let (outputs, inputs) = ordered_shape(shape, order);
    let mut values = Vec::new();
    let failed = |_| {
        Error::setup(format!(
            "tensor {name} of [{outputs}, {inputs}] does not fit in memory"
        ))
    };
    values.try_reserve_exact(outputs * inputs).map_err(failed)?;
    values.resize(outputs * inputs, T::zero());
    let chunks = values.par_chunks_exact_mut(inputs).enumerate();
    let are_finite = chunks.map_init(
        || vec![0f32; inputs],
        |row, (output, out)| {
            unpacked.row(order.map_or(output, |order| order[output] as usize), row);
            for (out, &value) in out.iter_mut().zip(&*row) {
                *out = from(value);
            }
            out.iter().all(|value| value.to_f64().is_finite())
        },
    );
    // Factors that are finite may have a product that is not, and f16 ends at 65504.
    if !are_finite.reduce(|| true, |all, row| all && row) {
        return Err(Error::setup(format!(
            "tensor {name} contains NaN or infinity as {}",
            T::DTYPE.as_str()
        )));
    }
    Ok(Tensor::from_vec(values, (outputs, inputs), &Device::Cpu)?)
}

#[cfg(test)]
mod tests;
