//! Layers with experts on a GPU: which experts a row gets, their products, and their sum.
//!
//! Nothing is copied to the host, so that steps can be recorded as graphs. A kernel chooses the experts of each row, and
//! another one sorts the uses of experts (an expert of a row is one) by expert and divides those of an expert into groups.
//! A group shares passes over the weights of its expert. Grids have room for as many groups as there may be.
//!
//! A row has the same bits whatever others it is with: products have the additions of `dense/gemv.cu` and
//! `quant/cuda/product.cuh` for any number of rows, and the outputs of a row's experts are added in the order of its
//! choices. Unlike those products, this holds for any number of rows.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod host_memory;
#[cfg(feature = "cuda")]
mod plan;

use crate::{Activation, ForwardWeight};
use candle_core::{DType, Result, Tensor};

/// How rows get experts, and what experts are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertChoice {
    /// Number of experts.
    pub count: usize,
    /// Number of experts of a row.
    pub per_token: usize,
    /// Whether the scores are the softmax over the logits of the router, instead of the sigmoid of each.
    pub is_softmax: bool,
    /// The groups that are chosen before experts.
    pub groups: Option<ChosenGroups>,
    /// Whether the weights of a row's experts are divided by their sum, or by `min_sum`, if that is more.
    pub is_normalized: bool,
    /// The least divisor of the weights.
    pub min_sum: f32,
    /// Factor of the weights.
    pub scale: f32,
}

/// Groups of as many experts one after another. A row has experts of those whose best have the highest sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChosenGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups of a row.
    pub per_token: usize,
    /// Number of experts whose scores are added for a group.
    pub best: usize,
}

impl ExpertChoice {
    /// Whether each row can have its experts.
    #[cfg(feature = "cuda")]
    fn fits(&self) -> bool {
        let groups = self.groups.unwrap_or(ChosenGroups {
            count: 1,
            per_token: 1,
            best: 1,
        });
        (1..=self.count).contains(&self.per_token)
            && (1..=self.count).contains(&groups.count)
            && self.count.is_multiple_of(groups.count)
            && groups.best <= self.count / groups.count
    }
}

/// The weights of a layer's experts, on one GPU. Those of `gate_up` or of `down` may be on the CPU instead: the GPU then reads
/// them in the host's memory.
pub struct ExpertWeights<'a> {
    /// The dtype of activations, and of weights that are not quantized.
    pub dtype: DType,
    /// `[count, hidden]` f32.
    pub router: &'a Tensor,
    /// `[count]` f32.
    pub router_bias: Option<&'a Tensor>,
    /// `[count]` f32: what is added to scores where they are compared.
    pub correction: Option<&'a Tensor>,
    /// `[count]` f32: factors of the weights of each expert.
    pub factors: Option<&'a Tensor>,
    /// `[1, hidden]` f32: the factor of what the expert of all rows adds is the sigmoid of this product.
    pub shared_factor: Option<&'a Tensor>,
    /// A weight of each expert: gates and ups as one weight each; or gates, then ups; or ups of experts without gates.
    pub gate_up: Vec<Vec<ForwardWeight<'a>>>,
    /// A weight `[hidden, width]` of each expert.
    pub down: Vec<ForwardWeight<'a>>,
    /// The biases of gates and ups, and of the products after them, a row for each expert.
    pub biases: Option<(&'a Tensor, &'a Tensor)>,
    /// The function of gates, or of ups without gates.
    pub activation: Activation,
    /// Whether the experts have gates.
    pub is_gated: bool,
}

/// The experts of a layer on a GPU. A clone shares the weights.
#[derive(Clone)]
pub struct DeviceExperts {
    #[cfg(feature = "cuda")]
    inner: cuda::Experts,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

impl DeviceExperts {
    /// The experts with these weights, which it holds.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not match, or there is no kernel for the activation.
    pub fn new(choice: ExpertChoice, weights: &ExpertWeights<'_>) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Ok(Self {
            inner: cuda::Experts::new(choice, weights)?,
        });
        #[cfg(not(feature = "cuda"))]
        {
            let _ = choice;
            candle_core::bail!(
                "this build has no kernels for {:?}",
                weights.router.device()
            )
        }
    }

    /// The sum of the experts of each row, `[rows, hidden]`, and of the output of the expert of all rows, `shared`, if
    /// there is one; for `x` of the same shape in the dtype of activations. The router reads `routed`, which is like `x`.
    /// Copies nothing between host and device.
    ///
    /// # Errors
    /// If shapes or dtypes do not match, or the device fails.
    pub fn forward(&self, x: &Tensor, routed: &Tensor, shared: Option<&Tensor>) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        return self.inner.forward(x, routed, shared);
        #[cfg(not(feature = "cuda"))]
        match (self.never, x, routed, shared) {}
    }

    /// The experts of each row of `x` and their weights, `[rows][per_token]`, as [`forward`](Self::forward) chooses them.
    ///
    /// # Errors
    /// Returns the errors of [`forward`](Self::forward).
    pub fn choose(&self, x: &Tensor) -> Result<Vec<Vec<(u32, f32)>>> {
        #[cfg(feature = "cuda")]
        return self.inner.choose(x);
        #[cfg(not(feature = "cuda"))]
        match (self.never, x) {}
    }
}

/// Whether a GPU has a kernel for experts with this activation.
pub fn has_expert_gpu_kernel(activation: Activation) -> bool {
    !matches!(activation, Activation::Xielu(_))
}
