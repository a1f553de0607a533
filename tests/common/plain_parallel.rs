//! A parallel head in plain f64, row by row, as the paper describes it (DFlash, arXiv 2602.06036).

use super::plain::{Matrix, Weights, add, attend, linear, mlp, rms_norm, rope};

/// What the weights do not say.
#[derive(Clone, Copy)]
pub struct PlainHead {
    pub layers: usize,
    pub head_dim: usize,
    /// Heads of Q that share one of K and V.
    pub group: usize,
    pub eps: f64,
    pub theta: f64,
}

impl PlainHead {
    /// The logits of the masks of a block with the tokens `block`, the last one and masks, after `states`.
    /// `weights` are the checkpoint's, and the `embedding` and `lm_head` of the target if they are shared.
    pub fn logits(&self, weights: &Weights, states: &[Vec<f64>], block: &[u32]) -> Matrix {
        let normed = |name: &str, x: &[f64]| rms_norm(x, &weights[name][0], self.eps);
        let fused = |state: &Vec<f64>| normed("hidden_norm", &linear(&weights["fc"], state));
        let context: Matrix = states.iter().map(fused).collect();
        let embed = |&id: &u32| weights["embedding"][id as usize].clone();
        let mut x: Matrix = block.iter().map(embed).collect();
        for layer in 0..self.layers {
            let layer = format!("layers.{layer}");
            let at = |part: &str| format!("{layer}.{part}");
            let product = |part: &str, x: &[f64]| linear(&weights[&at(part)], x);
            let heads = |part: &str, x: &[f64], position: usize| {
                let heads = product(&projection(part), x);
                let norm = weights.get(&at(&format!("self_attn.{part}_norm")));
                self.rotated(&heads, norm, position)
            };
            let input = |x: &Vec<f64>| normed(&at("input_layernorm"), x);
            let inputs: Matrix = x.iter().map(input).collect();
            // The context and then the block: positions without a gap.
            let all = context.iter().chain(&inputs);
            let keys = all.clone().enumerate();
            let keys: Matrix = keys.map(|(at, row)| heads("k", row, at)).collect();
            let values: Matrix = all.map(|row| product(&projection("v"), row)).collect();
            for (row, input) in inputs.iter().enumerate() {
                let q = heads("q", input, context.len() + row);
                let y = attend(&q, self.head_dim, self.group, &keys, &values);
                let stream = add(&x[row], &product(&projection("o"), &y));
                x[row] = mlp(weights, &layer, &stream, self.eps);
            }
        }
        let logits = |x: &Vec<f64>| linear(&weights["lm_head"], &normed("norm", x));
        x[1..].iter().map(logits).collect()
    }

    /// The heads of a query or key, normed if the layer does so, and rotated to `position`.
    fn rotated(&self, heads: &[f64], norm: Option<&Matrix>, position: usize) -> Vec<f64> {
        let normed: Vec<f64> = match norm {
            None => heads.to_vec(),
            Some(norm) => (heads.chunks(self.head_dim))
                .flat_map(|head| rms_norm(head, &norm[0], self.eps))
                .collect(),
        };
        rope(&normed, self.head_dim, self.theta, position)
    }
}

fn projection(part: &str) -> String {
    format!("self_attn.{part}_proj")
}
