//! Launches the kernels of layers with experts.

use super::host_memory::HostMemory;
use super::plan::{Plan, Widths};
use super::{ExpertChoice, ExpertWeights};
use crate::gpu::Groups;
use crate::quant::DeviceQuantMatrix;
use crate::{Activation, ForwardWeight, dense, gpu, quant};
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{CudaDevice, DType, Device, Result, Tensor};
use std::sync::Arc;

/// Warps of a block that computes an output in each, and the rows of scores that it computes.
const WARPS: usize = 8;
const SCORED_ROWS: usize = 4;
/// Threads of blocks that compute a value in each.
const THREADS: usize = 256;
/// Threads of the block that sorts.
const SORTING_THREADS: usize = 1024;
/// Maximum number of rows of a pass: more would take much memory, and gain little.
const MAX_ROWS: usize = 1024;

/// The kernel `name` of `experts.cu`.
fn kernel(device: &CudaDevice, name: &str) -> Result<gpu::Kernel> {
    gpu::function(device, "experts", gpu::EXPERTS, name)
}

/// See [`DeviceExperts`](super::DeviceExperts).
#[derive(Clone)]
pub(super) struct Experts {
    choice: ExpertChoice,
    router: Tensor,
    router_bias: Option<Tensor>,
    correction: Option<Tensor>,
    factors: Option<Tensor>,
    shared_factor: Option<Tensor>,
    /// One, or gates and ups.
    gate_up: Vec<GroupedWeights>,
    down: GroupedWeights,
    biases: Option<(Tensor, Tensor)>,
    /// The number of the activation in `experts.cu`.
    activation: usize,
    is_gated: bool,
    device: Device,
    dtype: DType,
    hidden: usize,
    width: usize,
}

impl Experts {
    /// See [`DeviceExperts::new`](super::DeviceExperts::new).
    pub fn new(choice: ExpertChoice, weights: &ExpertWeights<'_>) -> Result<Self> {
        let (device, dtype) = (weights.router.device(), weights.dtype);
        let gate_up = weights.gate_up.iter();
        let gate_up = gate_up.map(|part| GroupedWeights::new(part, device, dtype));
        let gate_up = gate_up.collect::<Result<Vec<_>>>()?;
        let down = GroupedWeights::new(&weights.down, device, dtype)?;
        let (hidden, width) = (down.outputs, down.inputs);
        let wide = if weights.is_gated { 2 * width } else { width };
        let outputs: Vec<usize> = gate_up.iter().map(|part| part.outputs).collect();
        let fits = (outputs == [wide] || outputs == [width, width] && weights.is_gated)
            && gate_up.iter().all(|part| part.inputs == hidden)
            && gate_up
                .iter()
                .chain([&down])
                .all(|part| part.count() == choice.count)
            && choice.fits();
        let f32s = |tensor: Option<&Tensor>, dims: &[usize]| {
            tensor.is_none_or(|t| t.dtype() == DType::F32 && t.dims() == dims)
        };
        let count = choice.count;
        let biases_fit = weights.biases.is_none_or(|(wider, last)| {
            wider.dims() == [count, wide]
                && last.dims() == [count, hidden]
                && [wider, last].map(Tensor::dtype) == [dtype; 2]
        });
        let fits = fits
            && f32s(Some(weights.router), &[count, hidden])
            && f32s(weights.router_bias, &[count])
            && f32s(weights.correction, &[count])
            && f32s(weights.factors, &[count])
            && f32s(weights.shared_factor, &[1, hidden])
            && biases_fit;
        if !fits {
            candle_core::bail!("experts: the weights of {choice:?} do not fit each other");
        }
        Ok(Self {
            choice,
            router: weights.router.contiguous()?,
            router_bias: weights.router_bias.cloned(),
            correction: weights.correction.cloned(),
            factors: weights.factors.cloned(),
            shared_factor: weights.shared_factor.cloned(),
            biases: match weights.biases {
                Some((wider, last)) => Some((wider.contiguous()?, last.contiguous()?)),
                None => None,
            },
            activation: number_of(weights.activation)?,
            is_gated: weights.is_gated,
            device: device.clone(),
            gate_up,
            down,
            dtype,
            hidden,
            width,
        })
    }

    /// See [`DeviceExperts::forward`](super::DeviceExperts::forward).
    pub fn forward(&self, x: &Tensor, routed: &Tensor, shared: Option<&Tensor>) -> Result<Tensor> {
        let all = self.check(x)?;
        if self.check(routed)? != all {
            candle_core::bail!("experts: {routed:?} does not match {x:?}");
        }
        if shared.is_some_and(|y| y.dims() != [all, self.hidden] || y.dtype() != self.dtype) {
            candle_core::bail!("experts: {shared:?} does not match {x:?}");
        }
        let out = gpu::output(
            self.device.as_cuda_device()?,
            self.dtype,
            (all, self.hidden),
        )?;
        for first in (0..all).step_by(MAX_ROWS) {
            let rows = MAX_ROWS.min(all - first);
            let part = |of: &Tensor| of.narrow(0, first, rows);
            self.pass(
                (&part(x)?, &part(routed)?),
                shared.map(part).transpose()?.as_ref(),
                &part(&out)?,
            )?;
        }
        Ok(out)
    }

    /// See [`DeviceExperts::choose`](super::DeviceExperts::choose).
    pub fn choose(&self, x: &Tensor) -> Result<Vec<Vec<(u32, f32)>>> {
        let plan = self.plan(self.check(x)?);
        let memory = gpu::scratch(self.device.as_cuda_device()?, plan.words)?;
        self.route(&plan, &memory, x)?;
        let ids = plan.ids.of(&memory)?.to_vec1::<f32>()?;
        let weights = plan.weights.of(&memory)?.to_vec1::<f32>()?;
        let chosen = ids.iter().zip(weights);
        let chosen = chosen.map(|(id, weight)| (id.to_bits(), weight));
        let chosen: Vec<(u32, f32)> = chosen.collect();
        let rows = chosen.chunks(self.choice.per_token);
        Ok(rows.map(<[_]>::to_vec).collect())
    }

    fn plan(&self, rows: usize) -> Plan {
        let wide: Vec<usize> = self.gate_up.iter().map(|part| part.outputs).collect();
        let widths = Widths {
            hidden: self.hidden,
            wide: &wide,
            narrow: self.width,
            bytes: self.dtype.size_in_bytes(),
        };
        Plan::new(&self.choice, rows, &widths)
    }

    /// The rows of `x`, if it fits.
    fn check(&self, x: &Tensor) -> Result<usize> {
        let (rows, width) = x.dims2()?;
        if width != self.hidden || x.dtype() != self.dtype || rows == 0 {
            candle_core::bail!(
                "experts: {x:?} does not have rows of {} values",
                self.hidden
            );
        }
        Ok(rows)
    }

    /// Computes the rows of `out`, up to [`MAX_ROWS`].
    fn pass(
        &self,
        (x, routed): (&Tensor, &Tensor),
        shared: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        let plan = self.plan(x.dim(0)?);
        let memory = gpu::scratch(self.device.as_cuda_device()?, plan.words)?;
        self.route(&plan, &memory, routed)?;
        let (uses, table) = (plan.uses.of(&memory)?, plan.table.of(&memory)?);
        let groups = Groups {
            table: &table,
            max: plan.max_groups,
            rows: plan.group_rows,
            dtype: self.dtype,
        };
        let inputs = plan.inputs.of(&memory)?;
        let wide = plan.wide.iter().map(|part| part.of(&memory));
        let wide = wide.collect::<Result<Vec<_>>>()?;
        let (narrow, last) = (plan.narrow.of(&memory)?, plan.last.of(&memory)?);
        self.gather(x, &uses, &inputs)?;
        for (part, wide) in self.gate_up.iter().zip(&wide) {
            part.multiply(&groups, &inputs, wide)?;
        }
        self.activate(&wide, &uses, &plan.ids.of(&memory)?, &narrow)?;
        self.down.multiply(&groups, &narrow, &last)?;
        self.combine(&plan, &memory, shared, out)
    }

    /// Chooses the experts of the rows of `x`, and sorts their uses.
    fn route(&self, plan: &Plan, memory: &Tensor, x: &Tensor) -> Result<()> {
        let device = self.device.as_cuda_device()?;
        let choice = &self.choice;
        let (logits, ids) = (plan.logits.of(memory)?, plan.ids.of(memory)?);
        self.score(&self.router, self.router_bias.as_ref(), x, &logits)?;
        if let Some(factor) = &self.shared_factor {
            self.score(factor, None, x, &plan.factors.of(memory)?)?;
        }
        // The order of a softmax's additions depends on the number of threads.
        let threads = choice.count.next_multiple_of(32).min(THREADS);
        let shared = (3 * choice.count + 32) * size_of::<f32>();
        let kernel_of_choice = kernel(device, "choose_experts")?.with_shared(shared)?;
        let launch = kernel_of_choice.launch().tensor(&logits)?;
        let launch = launch.optional(self.correction.as_ref())?;
        let launch = launch.optional(self.factors.as_ref())?.tensor(&ids)?;
        let launch = launch.tensor(&plan.weights.of(memory)?)?;
        let launch = launch.int(choice.count).int(choice.per_token);
        let launch = launch.int(usize::from(choice.is_softmax));
        let groups = choice
            .groups
            .map(|groups| [groups.count, groups.per_token, groups.best]);
        let [groups, of_row, best] = groups.unwrap_or_default();
        let launch = launch.int(groups).int(of_row).int(best);
        let launch = launch.int(usize::from(choice.is_normalized));
        let launch = launch.float(choice.min_sum).float(choice.scale);
        let grid = gpu::grid((x.dim(0)?, 1, 1), threads, shared);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
        unsafe { launch.run(grid)? };

        let shared = (choice.count + 1) * size_of::<u32>();
        let kernel_of_sort = kernel(device, "sort_experts")?.with_shared(shared)?;
        let launch = kernel_of_sort.launch().tensor(&ids)?;
        let launch = launch.tensor(&plan.uses.of(memory)?)?;
        let launch = launch.tensor(&plan.places.of(memory)?)?;
        let launch = launch.tensor(&plan.table.of(memory)?)?;
        let launch = launch.int(plan.count).int(choice.count);
        let launch = launch.int(plan.group_rows).int(plan.max_groups);
        let grid = gpu::grid((1, 1, 1), SORTING_THREADS, shared);
        // SAFETY: as above; the ids are below the number of experts, whose uses take no more groups than there is room.
        unsafe { launch.run(grid) }
    }

    /// `y = x @ w^T + bias` in f32.
    fn score(&self, w: &Tensor, bias: Option<&Tensor>, x: &Tensor, y: &Tensor) -> Result<()> {
        let name = format!("score_experts_{}", gpu::suffix(self.dtype));
        let kernel = kernel(self.device.as_cuda_device()?, &name)?;
        let ((outputs, inputs), rows) = (w.dims2()?, x.dim(0)?);
        let launch = kernel.launch().tensor(w)?.optional(bias)?;
        let launch = launch.tensor(x)?.tensor(y)?;
        let launch = launch.int(outputs).int(inputs).int(rows);
        let grid = (outputs.div_ceil(WARPS), rows.div_ceil(SCORED_ROWS), 1);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
        unsafe { launch.run(gpu::grid(grid, WARPS * 32, 0)) }
    }

    /// The rows of the sorted uses.
    fn gather(&self, x: &Tensor, uses: &Tensor, y: &Tensor) -> Result<()> {
        let name = format!("gather_experts_{}", gpu::suffix(self.dtype));
        let kernel = kernel(self.device.as_cuda_device()?, &name)?;
        let launch = kernel.launch().tensor(x)?.tensor(uses)?.tensor(y)?;
        let launch = launch.int(self.hidden).int(self.choice.per_token);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes; uses are
        // numbers below those of the rows' choices.
        unsafe { launch.run(gpu::grid((uses.dim(0)?, 1, 1), THREADS, 0)) }
    }

    fn activate(&self, wide: &[Tensor], uses: &Tensor, ids: &Tensor, y: &Tensor) -> Result<()> {
        let name = format!("activate_experts_{}", gpu::suffix(self.dtype));
        let kernel = kernel(self.device.as_cuda_device()?, &name)?;
        let (gate, up, stride) = match wide {
            [gate, up] => (gate, Some(up), self.width),
            [both] if self.is_gated => (both, None, 2 * self.width),
            [up] => (up, None, self.width),
            _ => candle_core::bail!("experts: {} products before an activation", wide.len()),
        };
        let launch = kernel.launch().tensor(gate)?.optional(up)?;
        let bias = self.biases.as_ref().map(|(wider, _)| wider);
        let launch = launch
            .optional(bias)?
            .tensor(uses)?
            .tensor(ids)?
            .tensor(y)?;
        let launch = launch.int(self.width).int(stride).int(self.activation);
        let grid = self.values(uses.dim(0)?, self.width)?;
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
        unsafe { launch.run(grid) }
    }

    /// Adds the products of the experts to `out`.
    fn combine(
        &self,
        plan: &Plan,
        memory: &Tensor,
        shared: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        let name = format!("combine_experts_{}", gpu::suffix(self.dtype));
        let kernel = kernel(self.device.as_cuda_device()?, &name)?;
        let launch = kernel
            .launch()
            .tensor(&plan.last.of(memory)?)?
            .tensor(&plan.places.of(memory)?)?;
        let launch = launch.tensor(&plan.ids.of(memory)?)?;
        let launch = launch.tensor(&plan.weights.of(memory)?)?;
        let launch = launch.optional(self.biases.as_ref().map(|(_, last)| last))?;
        let factors = self.shared_factor.as_ref().map(|_| plan.factors.of(memory));
        let launch = launch
            .optional(shared)?
            .optional(factors.transpose()?.as_ref())?;
        let launch = launch
            .tensor(out)?
            .int(self.hidden)
            .int(self.choice.per_token);
        let grid = self.values(out.dim(0)?, self.hidden)?;
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
        unsafe { launch.run(grid) }
    }

    /// A grid with a thread for each of `width` values of `rows` rows.
    fn values(&self, rows: usize, width: usize) -> Result<LaunchConfig> {
        let blocks = width.div_ceil(THREADS);
        gpu::check_blocks(blocks)?;
        Ok(gpu::grid((rows, blocks, 1), THREADS, 0))
    }
}

/// The number of an activation in `experts.cu`.
fn number_of(activation: Activation) -> Result<usize> {
    match activation {
        Activation::Silu => Ok(0),
        Activation::Gelu => Ok(1),
        Activation::GeluTanh => Ok(2),
        Activation::Relu2 => Ok(3),
        Activation::ClampedSwish => Ok(4),
        Activation::Xielu(_) => candle_core::bail!("experts: no CUDA kernel for {activation:?}"),
    }
}

/// The memory of weights.
#[derive(Clone)]
enum Held {
    Device { _weights: Vec<Tensor> },
    Host { _memory: Arc<HostMemory> },
}

/// A weight of each expert, of one shape and format.
#[derive(Clone)]
struct GroupedWeights {
    /// `[experts]` i64: where they are.
    addresses: Tensor,
    /// What keeps the weights there.
    _held: Held,
    count: usize,
    /// The form of one of them, if they are quantized.
    quantized: Option<DeviceQuantMatrix>,
    outputs: usize,
    inputs: usize,
}

impl GroupedWeights {
    /// # Errors
    /// If they differ in shape or format, or dense ones have another dtype or device.
    fn new(weights: &[ForwardWeight<'_>], device: &Device, dtype: DType) -> Result<Self> {
        let [first, ..] = weights else {
            candle_core::bail!("experts: there are no weights");
        };
        let shape = first.shape()?;
        let mut held = Vec::with_capacity(weights.len());
        for weight in weights {
            let fits = match (weight, first) {
                (ForwardWeight::Dense(weight), ForwardWeight::Dense(_)) => {
                    held.push(weight.contiguous()?);
                    weight.dtype() == dtype
                }
                (ForwardWeight::Quantized(weight), ForwardWeight::Quantized(first)) => {
                    held.push(weight.memory().tiles.clone());
                    weight.kind() == first.kind() && dtype != DType::F32
                }
                _ => false,
            };
            if !fits || weight.shape()? != shape {
                candle_core::bail!("experts: their weights have different shapes or formats");
            }
        }
        let count = held.len();
        let (held, addresses) = hold(held, device.as_cuda_device()?)?;
        Ok(Self {
            addresses: Tensor::new(addresses, device)?,
            _held: held,
            count,
            quantized: match first {
                ForwardWeight::Quantized(first) => Some(first.without_memory()?),
                ForwardWeight::Dense(_) => None,
            },
            outputs: shape.0,
            inputs: shape.1,
        })
    }

    /// Number of experts.
    fn count(&self) -> usize {
        self.count
    }

    /// Multiplies groups of the rows of `x` with the weights of their experts.
    fn multiply(&self, groups: &Groups<'_>, x: &Tensor, y: &Tensor) -> Result<()> {
        let (dtype, shape) = (groups.dtype, (self.outputs, self.inputs));
        if let Some(like) = &self.quantized {
            return quant::multiply_groups(like, &self.addresses, groups, x, y);
        }
        if dense::takes(self.inputs, dtype) {
            return dense::multiply_groups(shape, &self.addresses, groups, x, y);
        }
        let name = format!("experts_any_{}", gpu::suffix(dtype));
        let kernel = kernel(x.device().as_cuda_device()?, &name)?;
        let launch = kernel.launch().tensor(&self.addresses)?;
        let launch = launch.tensor(groups.table)?.tensor(x)?.tensor(y)?;
        let launch = launch.int(self.outputs).int(self.inputs);
        let blocks = self.outputs.div_ceil(WARPS);
        gpu::check_blocks(blocks)?;
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes; groups
        // have rows of `x`, and numbers of experts.
        unsafe { launch.run(gpu::grid((groups.max, blocks, 1), WARPS * 32, 0)) }
    }
}

/// Keeps `weights` where kernels read them, and returns their addresses: in the memory of `device`, or if they are on the
/// CPU, in the host's.
fn hold(weights: Vec<Tensor>, device: &CudaDevice) -> Result<(Held, Vec<i64>)> {
    if weights.iter().all(|weight| weight.device().is_cpu()) {
        let (memory, addresses) = HostMemory::with(&weights, device)?;
        let memory = Arc::new(memory);
        return Ok((Held::Host { _memory: memory }, addresses));
    }
    let stream = device.cuda_stream();
    let addresses = weights.iter().map(|weight| gpu::address(weight, &stream));
    let addresses = addresses.map(|address| Ok(address? as i64));
    let addresses = addresses.collect::<Result<_>>()?;
    Ok((Held::Device { _weights: weights }, addresses))
}
