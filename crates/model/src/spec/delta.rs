//! What distinguishes layers with the gated delta rule in place of attention.

use foretoken_kernels::DeltaShape;

/// Maximum number of tokens that the convolution mixes.
const MAX_TAPS: usize = 16;
/// Maximum number of heads, and maximum width of one.
const MAX_HEADS: usize = 1 << 10;
const MAX_DIM: usize = 1 << 10;

/// What distinguishes layers with the gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaSpec {
    /// The sizes of the layer.
    pub shape: DeltaShape,
    /// How the checkpoint has the products of the input.
    pub layout: DeltaLayout,
}

/// How a checkpoint has the products of a layer's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaLayout {
    /// Qwen3-Next: q, k, v and z of a head of keys, head after head, in one; b and a likewise.
    ByHead,
    /// Qwen3.5: q, k and v of all heads in one; z, b and a each alone.
    Apart,
    /// As [`DeltaLayout::Apart`], in files of llama.cpp. The first heads of values of all heads of keys come first,
    /// then the second ones.
    ApartTiled,
    /// Qwen3-Next in files of llama.cpp: b and a as in `ByHead`, the others as in `Apart`.
    GatesByHead,
}

impl DeltaSpec {
    /// Checks the sizes.
    ///
    /// # Errors
    /// A message that names one that is not supported.
    pub fn check(&self) -> Result<(), String> {
        let DeltaShape {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            taps,
            is_tiled: _,
        } = self.shape;
        super::check_sizes(&[
            ("linear_num_key_heads", key_heads, MAX_HEADS),
            ("linear_num_value_heads", value_heads, MAX_HEADS),
            ("linear_key_head_dim", key_dim, MAX_DIM),
            ("linear_value_head_dim", value_dim, MAX_DIM),
            ("linear_conv_kernel_dim", taps, MAX_TAPS),
        ])?;
        if value_heads.is_multiple_of(key_heads) {
            return Ok(());
        }
        Err(format!(
            "linear_num_value_heads {value_heads} is not supported: only a multiple of linear_num_key_heads {key_heads} is"
        ))
    }
}
