//! What distinguishes layers with Mamba 2 in place of attention.

use foretoken_kernels::MambaShape;

/// Maximum number of tokens that the convolution mixes.
const MAX_TAPS: usize = 16;
/// Maximum number of heads, and maximum width of one and of its state.
const MAX_HEADS: usize = 1 << 10;
const MAX_DIM: usize = 1 << 10;

/// What distinguishes layers with Mamba 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MambaSpec {
    /// The sizes of the layer.
    pub shape: MambaShape,
    /// The least and the largest step.
    pub step_limits: (f32, f32),
    /// Whether the convolution has a bias.
    pub has_conv_bias: bool,
    /// Whether the products of the input and of the output have biases.
    pub has_bias: bool,
    /// Factors of the product of the input: of its parts `z`, x, B, C and `dt`.
    pub scales: [f32; 5],
    /// Whether the output has a norm.
    pub has_norm: bool,
}

impl MambaSpec {
    /// Checks the sizes.
    ///
    /// # Errors
    /// A message that names one that is not supported.
    pub fn check(&self) -> Result<(), String> {
        let MambaShape {
            heads,
            head_dim,
            groups,
            state_dim,
            taps,
        } = self.shape;
        super::check_sizes(&[
            ("Mamba's number of heads", heads, MAX_HEADS),
            ("Mamba's head size", head_dim, MAX_DIM),
            ("Mamba's number of groups", groups, heads),
            ("Mamba's state size", state_dim, MAX_DIM),
            ("Mamba's convolution size", taps, MAX_TAPS),
        ])?;
        if !heads.is_multiple_of(groups) {
            return Err(format!(
                "{heads} Mamba heads in {groups} groups are not supported: each group must have as many"
            ));
        }
        let (least, most) = self.step_limits;
        if (0. ..=most).contains(&least) {
            return Ok(());
        }
        Err(format!(
            "a Mamba step from {least} to {most} is not supported: it must be from 0 or more"
        ))
    }
}
