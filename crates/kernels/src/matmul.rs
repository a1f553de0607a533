//! Products of rows with weights in layouts of our own, on the CPU. Whatever the layout, all products of a
//! call share one parallel loop.

use super::cpu::{self, Isa};
use super::storage::contiguous;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use std::ops::Range;
use tracing::trace_span;

/// A weight `[outputs, inputs]` in a layout that has a kernel.
pub trait CpuMatrix: Send + Sync + Sized + 'static {
    /// The kernel's name in error messages.
    const NAME: &'static str;

    /// Outputs and inputs.
    fn shape(&self) -> (usize, usize);

    /// How the weights are stored: `bf16` or `Q4_1`.
    fn format(&self) -> String;

    /// Writes row `output` of the weight to `row` (`inputs` floats): an embedding lookup.
    ///
    /// # Panics
    /// If there is no such output, or `row` has another length.
    fn read_row(&self, output: usize, row: &mut [f32]);

    /// The product, `[rows, outputs]`. A row's bits depend only on that row and its group's weights.
    fn multiply(product: &Product<'_, Self>, isa: Isa) -> Vec<f32>;

    /// `x @ self^T` for `x` `[rows, inputs]` f32 on the CPU: `[rows, outputs]` f32.
    ///
    /// # Errors
    /// See [`matmul`].
    fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, weights) = (0..x.dim(0)?, vec![self]);
        matmul(&[Group { rows, weights }], x)
    }
}

/// Consecutive rows, and the weights that they are multiplied with.
pub struct Group<'a, M> {
    /// The rows of `x` that belong to the group.
    pub rows: Range<usize>,
    /// Their outputs are side by side in the result.
    pub weights: Vec<&'a M>,
}

impl<M: CpuMatrix> Group<'_, M> {
    fn outputs(&self) -> usize {
        self.weights.iter().map(|w| w.shape().0).sum()
    }
}

/// `[rows, outputs]` f32 for `x` `[rows, inputs]` f32 on the CPU: the rows of each group times all of its
/// weights.
///
/// # Errors
/// If the groups do not cover the rows in order, the weights differ in inputs, the groups in outputs, or
/// `x` has another width, dtype or device, or is not contiguous.
pub fn matmul<M: CpuMatrix>(groups: &[Group<'_, M>], x: &Tensor) -> Result<Tensor> {
    x.apply_op1_no_bwd(&MatMul(groups))
}

/// A product whose shapes are checked.
pub struct Product<'a, M> {
    /// They cover the rows in order, and each has `outputs` outputs.
    pub(super) groups: &'a [Group<'a, M>],
    /// `[rows, inputs]`
    pub(super) x: &'a [f32],
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl<'a, M: CpuMatrix> Product<'a, M> {
    /// # Errors
    /// As [`matmul`].
    pub(super) fn new(
        groups: &'a [Group<'a, M>],
        x: &'a [f32],
        dims: (usize, usize),
    ) -> Result<Self> {
        let (rows, inputs) = dims;
        let outputs = groups.first().map_or(0, Group::outputs);
        let mut end = 0;
        for group in groups {
            if group.rows.start != end || group.rows.end < end || group.outputs() != outputs {
                candle_core::bail!("{}: groups do not match", M::NAME);
            }
            if let Some(other) = group.weights.iter().find(|w| w.shape().1 != inputs) {
                candle_core::bail!(
                    "{}: {inputs} values per row, but the weight takes {}",
                    M::NAME,
                    other.shape().1
                );
            }
            end = group.rows.end;
        }
        if end != rows || x.len() != rows * inputs {
            candle_core::bail!("{}: groups of {end} rows, but there are {rows}", M::NAME);
        }
        Ok(Self {
            groups,
            x,
            inputs,
            outputs,
        })
    }

    /// Rows of all groups.
    pub(super) fn rows(&self) -> usize {
        self.groups.last().map_or(0, |group| group.rows.end)
    }
}

struct MatMul<'a, M>(&'a [Group<'a, M>]);

impl<M: CpuMatrix> CustomOp1 for MatMul<'_, M> {
    fn name(&self) -> &'static str {
        M::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dims = layout.shape().dims2()?;
        let product = Product::new(self.0, contiguous::<f32>(M::NAME, x, layout)?, dims)?;
        let out = trace_span!("matmul").in_scope(|| M::multiply(&product, cpu::isa()));
        Ok((CpuStorage::F32(out), (dims.0, product.outputs).into()))
    }
}
