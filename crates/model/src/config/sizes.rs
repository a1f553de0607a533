//! Checks of the sizes of a configuration, so that no product of them overflows.

use super::ModelConfig;
use foretoken_core::kv::KvHeads;

impl ModelConfig {
    /// Checks the sizes that all layers share.
    pub(super) fn validate(&self, num_layers: usize) -> Result<(), String> {
        if self.output_size() > self.vocab_size {
            return Err(format!(
                "draft_vocab_size {} is more than vocab_size {}",
                self.output_size(),
                self.vocab_size
            ));
        }
        // With these limits no product of sizes overflows, and every position fits in u32.
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 24),
            ("draft_vocab_size", self.output_size(), 1 << 24),
            ("hidden_size", self.hidden_size, 1 << 20),
            ("intermediate_size", self.intermediate_size, 1 << 22),
            ("num_hidden_layers", num_layers, 1 << 12),
            ("num_attention_heads", self.num_heads, 1 << 12),
            (
                "max_position_embeddings",
                self.max_position_embeddings,
                1 << 30,
            ),
        ];
        check_sizes(&sizes)?;
        if !(self.rms_norm_eps.is_finite() && (0. ..1.).contains(&self.rms_norm_eps)) {
            return Err(format!(
                "rms_norm_eps {} must be from 0 to below 1",
                self.rms_norm_eps
            ));
        }
        self.check_heads(self.kv_heads())
    }

    /// Checks the sizes that layers have of their own.
    pub(super) fn validate_layers(&self) -> Result<(), String> {
        for layer in &self.spec.layers {
            layer
                .kv_heads
                .map_or(Ok(()), |heads| self.check_heads(heads))?;
            let width = layer.mlp_width.unwrap_or(self.intermediate_size);
            check_sizes(&[("the width of an MLP", width, 1 << 23)])?;
        }
        let width = self.spec.layer_input_width.unwrap_or(1);
        check_sizes(&[("hidden_size_per_layer_input", width, 1 << 16)])
    }

    fn check_heads(&self, KvHeads { count, dim, .. }: KvHeads) -> Result<(), String> {
        check_sizes(&[
            ("num_key_value_heads", count, 1 << 12),
            ("head_dim", dim, 1 << 12),
        ])?;
        if !self.num_heads.is_multiple_of(count) {
            return Err(format!(
                "{} attention heads are not divisible by {count} key/value heads",
                self.num_heads
            ));
        }
        if !dim.is_multiple_of(2) {
            return Err(format!("head_dim {dim} is odd"));
        }
        Ok(())
    }
}

/// Checks that all of these are from 1 to their maximum.
fn check_sizes(sizes: &[(&str, usize, usize)]) -> Result<(), String> {
    for &(name, size, max) in sizes {
        if size == 0 {
            return Err(format!("{name} is 0"));
        }
        if size > max {
            return Err(format!("{name} {size} is over the limit of {max}"));
        }
    }
    Ok(())
}
