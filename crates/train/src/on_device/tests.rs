//! The chains compute what the ops for the CPU do, and have the same gradients.

use super::super::attention::attend as attend_on_cpu;
use super::super::block_attention::attend as attend_blocks_on_cpu;
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

#[test]
fn attention_of_an_unrolled_head() {
    let heads = heads();
    let some = Some(Arc::new(vec![0, 3, 6, 1, 2, 5]));
    for (passes, starts) in [(1, None), (2, None), (4, None), (3, some)] {
        let (rows, len) = (ROWS, LEN);
        let drafts = Drafts { rows, len, starts };
        let qkv = var(3, &[drafts.places(passes).start, heads.width()]);
        let ours = attend_causally(&qkv, &heads, &drafts, passes);
        compare(&[&qkv], ours, attend_on_cpu(&qkv, &heads, &drafts, passes));
    }
}

#[test]
fn attention_of_masked_blocks() {
    let heads = heads();
    // The blocks of the two rows begin at different places.
    let shape = BlockLayout {
        len: LEN,
        size: 3,
        anchors: vec![1, 5, 2, 6],
    };
    let context = var(4, &[ROWS * LEN, 2 * heads.keys * heads.head_dim]);
    let blocks = var(5, &[shape.anchors.len() * shape.size, heads.width()]);
    let ours = attend_in_blocks(&context, &blocks, &heads, &shape);
    let theirs = attend_blocks_on_cpu(&context, &blocks, &heads, &shape);
    compare(&[&context, &blocks], ours, theirs);
}
