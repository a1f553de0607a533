//! The chains compute what the ops for the CPU do, and have the same gradients.

use super::super::attention::attend as attend_on_cpu;
use super::super::{ops, reference};
use super::*;
use candle_core::Var;
use std::sync::Arc;

const ROWS: usize = 2;
const LEN: usize = 7;

fn var(seed: usize, dims: &[usize]) -> Var {
    Var::from_tensor(&reference::tensor(seed, dims)).unwrap()
}

fn heads() -> Heads {
    let angles = (0..32 * 3).map(|i| (i % 3 + 1) as f32 * (i / 3) as f32 * 0.3);
    let table = |turn: fn(f32) -> f32| Arc::new(angles.clone().map(turn).collect());
    Heads {
        queries: 4,
        keys: 2,
        head_dim: 6,
        cos: table(f32::cos),
        sin: table(f32::sin),
    }
}

/// Compares two results and their gradients by `vars`.
fn compare(vars: &[&Var], ours: Result<Tensor>, theirs: Result<Tensor>) {
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    assert_eq!(ours.dims(), theirs.dims());
    let slope = reference::tensor(99, ours.dims());
    let gradients = |y: &Tensor| (y * &slope).unwrap().sum_all().unwrap().backward().unwrap();
    let close = |a: &Tensor, b: &Tensor, what: &str| {
        let off = (a - b).unwrap().abs().unwrap().max_all().unwrap();
        let off = off.to_scalar::<f32>().unwrap();
        let size = b.abs().unwrap().max_all().unwrap();
        let size = size.to_scalar::<f32>().unwrap();
        assert!(
            size > 0. && off < 1e-5 * size.max(1.),
            "{what}: off by {off} of {size}"
        );
    };
    close(&ours, &theirs, "result");
    let (ours, theirs) = (gradients(&ours), gradients(&theirs));
    for (number, var) in vars.iter().enumerate() {
        let of = |gradients: &candle_core::backprop::GradStore| gradients.get(var).unwrap().clone();
        close(&of(&ours), &of(&theirs), &format!("gradient {number}"));
    }
}

#[test]
fn activations() {
    let x = var(1, &[5, 8]);
    compare(&[&x], swiglu(&x), ops::swiglu(&x));
}

/// Compares the two attentions of `own` rows and a text with columns of `text_heads` heads.
fn compare_attention(layout: &KeyLayout, text_heads: usize) {
    let heads = heads();
    let text = var(4, &[ROWS * LEN, text_heads * heads.head_dim]);
    let own = var(5, &[layout.positions.len(), heads.width()]);
    let ours = attend(&text, &own, &heads, layout);
    compare(
        &[&text, &own],
        ours,
        attend_on_cpu(&text, &own, &heads, layout),
    );
}

#[test]
fn attention_of_an_unrolled_head() {
    let all: Vec<usize> = (0..LEN).collect();
    let all = [all.clone(), all];
    let some = [vec![0, 3, 6], vec![1, 2, 5]];
    for (passes, positions) in [(0, &all[..]), (1, &all), (3, &all), (2, &some)] {
        compare_attention(&KeyLayout::of_pass(passes, positions, LEN), 8);
    }
}

#[test]
fn attention_of_masked_blocks() {
    // The blocks of the two rows begin at different places.
    let layout = KeyLayout::of_blocks(3, &[vec![1, 5], vec![2, 6]], LEN);
    compare_attention(&layout, 4);
}
