//! What distinguishes layers with a short convolution in place of attention.

/// Maximum number of tokens that are mixed.
const MAX_TAPS: usize = 16;
/// Maximum number of channels: two heads of the largest size.
const MAX_CHANNELS: usize = 1 << 13;

/// What distinguishes layers with a short convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvSpec {
    /// Number of tokens that are mixed, the row's own included.
    pub taps: usize,
    /// Whether the convolution and the products around it have biases.
    pub has_bias: bool,
}

impl ShortConvSpec {
    /// Checks it for rows of `hidden` values.
    pub(crate) fn check(&self, hidden: usize) -> Result<(), String> {
        if !(1..=MAX_TAPS).contains(&self.taps) {
            return Err(format!(
                "a convolution over {} tokens is not supported: over 1 to {MAX_TAPS} is",
                self.taps
            ));
        }
        if !hidden.is_multiple_of(4) || hidden > MAX_CHANNELS {
            return Err(format!(
                "hidden_size {hidden} is not supported beside convolutions: only a multiple of 4 up to {MAX_CHANNELS} is"
            ));
        }
        Ok(())
    }
}
