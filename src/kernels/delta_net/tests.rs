use super::*;
use crate::kernels::states::KeptState;
use candle_core::{DType, Tensor};

const SHAPE: DeltaShape = DeltaShape {
    key_heads: 2,
    value_heads: 4,
    key_dim: 6,
    value_dim: 5,
    taps: 4,
    is_tiled: false,
};

fn random(count: usize, scale: f32) -> Vec<f32> {
    let values = Tensor::randn(0f32, scale, count, &Device::Cpu).unwrap();
    values.to_vec1().unwrap()
}

fn weights() -> DeltaWeights {
    DeltaWeights {
        shape: SHAPE,
        conv: random(SHAPE.taps * SHAPE.channels(), 0.6),
        decay: random(SHAPE.value_heads, 0.5)
            .iter()
            .map(|x| -x.abs())
            .collect(),
        dt_bias: random(SHAPE.value_heads, 1.),
        norm: random(SHAPE.value_dim, 1.),
        eps: 1e-6,
    }
}

/// The rows of a text, and what the definition makes of them, in f64, one token after another.
fn defined(weights: &DeltaWeights, rows: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let (values, keys, channels) = (SHAPE.values(), SHAPE.keys(), SHAPE.channels());
    let sigmoid = |x: f64| 1. / (1. + (-x).exp());
    let mut states = vec![vec![vec![0f64; SHAPE.key_dim]; SHAPE.value_dim]; SHAPE.value_heads];
    let mut out = Vec::new();
    for t in 0..rows.len() {
        let mixed = |channel: usize| {
            let taps = 0..SHAPE.taps.min(t + 1);
            let sum: f64 = taps
                .map(|back| {
                    let weight = f64::from(weights.conv[back * channels + channel]);
                    weight * f64::from(rows[t - back][values + channel])
                })
                .sum();
            sum * sigmoid(sum)
        };
        let unit = |at: usize| {
            let x: Vec<f64> = (at..at + SHAPE.key_dim).map(mixed).collect();
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.into_iter().map(|x| x / length).collect::<Vec<_>>()
        };
        let mut row = Vec::new();
        for (head, state) in states.iter_mut().enumerate() {
            let key_head = head * SHAPE.key_heads / SHAPE.value_heads;
            let (q, k) = (
                unit(key_head * SHAPE.key_dim),
                unit(keys + key_head * SHAPE.key_dim),
            );
            let of = |i: usize| f64::from(rows[t][values + channels + i]);
            let (beta, a) = (sigmoid(of(head)), of(SHAPE.value_heads + head));
            let softplus = (1. + (a + f64::from(weights.dt_bias[head])).exp()).ln();
            let decay = (f64::from(weights.decay[head]) * softplus).exp();
            let mut read = Vec::new();
            for (j, state) in state.iter_mut().enumerate() {
                let v = mixed(2 * keys + head * SHAPE.value_dim + j);
                let known: f64 = (0..SHAPE.key_dim).map(|i| k[i] * state[i] * decay).sum();
                for i in 0..SHAPE.key_dim {
                    state[i] = state[i] * decay + k[i] * (v - known) * beta;
                }
                let sum: f64 = (0..SHAPE.key_dim).map(|i| q[i] * state[i]).sum();
                read.push(sum / (SHAPE.key_dim as f64).sqrt());
            }
            let mean = read.iter().map(|x| x * x).sum::<f64>() / SHAPE.value_dim as f64;
            for (j, x) in read.iter().enumerate() {
                let z = f64::from(rows[t][head * SHAPE.value_dim + j]);
                let norm = f64::from(weights.norm[j]);
                row.push(x / (mean + 1e-6).sqrt() * norm * z * sigmoid(z));
            }
        }
        out.push(row);
    }
    out
}

fn part(
    rows: std::ops::Range<usize>,
    parents: &[Option<u16>],
    kept: Option<KeptState>,
) -> StateRows {
    StateRows {
        rows,
        parents: parents.to_vec(),
        kept,
    }
}

fn kept(
    slot: u32,
    start: StateStart,
    accepted: &[u16],
    copies: &[(usize, u32)],
) -> Option<KeptState> {
    Some(KeptState {
        slot,
        start,
        accepted: accepted.to_vec(),
        copies: copies.to_vec(),
    })
}

/// The outputs of these rows.
fn run(
    weights: &DeltaWeights,
    rows: &[&Vec<f32>],
    parts: &[StateRows],
    pool: &mut StatePool,
) -> Vec<Vec<f32>> {
    let flat: Vec<f32> = rows.iter().flat_map(|row| row.iter().copied()).collect();
    let x = Tensor::from_vec(flat, (rows.len(), SHAPE.width()), &Device::Cpu).unwrap();
    let out = delta_net(&x, weights, parts, pool).unwrap();
    out.to_vec2().unwrap()
}

fn text(len: usize) -> Vec<Vec<f32>> {
    (0..len).map(|_| random(SHAPE.width(), 1.)).collect()
}

#[test]
fn it_computes_what_the_definition_says() {
    let (weights, text) = (weights(), text(23));
    let rows: Vec<&Vec<f32>> = text.iter().collect();
    let mut pool = StatePool::new(SHAPE.states());
    let found = run(&weights, &rows, &[part(0..23, &[], None)], &mut pool);
    for (found, want) in found
        .iter()
        .flatten()
        .zip(defined(&weights, &text).iter().flatten())
    {
        assert!(
            (f64::from(*found) - want).abs() < 1e-4 * want.abs().max(1.),
            "{found} {want}"
        );
    }
}

/// Chunks, drafts with branches of which some nodes are accepted, states from copies, and other sequences beside: all
/// give the bits of one forward.
#[test]
fn how_a_text_is_divided_changes_no_bit() {
    let (weights, text, other) = (weights(), text(14), text(3));
    let t = |i: usize| &text[i];
    let wrong = &other[0];
    let mut pool = StatePool::new(SHAPE.states());
    let rows: Vec<&Vec<f32>> = text.iter().collect();
    let want = run(&weights, &rows, &[part(0..14, &[], None)], &mut pool);
    let beside: Vec<&Vec<f32>> = other.iter().collect();
    let alone = run(&weights, &beside, &[part(0..3, &[], None)], &mut pool);

    // A chunk, of which slot 5 remembers the first two tokens, beside another sequence.
    let parts = [
        part(0..3, &[], kept(7, StateStart::Empty, &[], &[])),
        part(3..7, &[], kept(2, StateStart::Empty, &[], &[(2, 5)])),
    ];
    let rows = [beside[0], beside[1], beside[2], t(0), t(1), t(2), t(3)];
    let found = run(&weights, &rows, &parts, &mut pool);
    assert_eq!((&found[..3], &found[3..]), (&alone[..], &want[..4]));

    // Token 4, and a tree: wrong, 5 -> (wrong, 6 -> 7), of which 5 and 6 are accepted.
    let parents = [None, None, Some(1), Some(1), Some(3)];
    let tree = [part(0..6, &parents, kept(2, StateStart::Kept, &[], &[]))];
    let found = run(
        &weights,
        &[t(4), wrong, t(5), wrong, t(6), t(7)],
        &tree,
        &mut pool,
    );
    assert_eq!(
        [&found[0], &found[2], &found[4], &found[5]],
        [&want[4], &want[5], &want[6], &want[7]]
    );
    assert_ne!(found[1], want[5]);

    // They are taken in, with a copy after 5, before token 7 and a chain 8, wrong; 8 is accepted.
    let chain = [part(
        0..3,
        &[None, Some(0)],
        kept(2, StateStart::Kept, &[1, 3], &[(1, 4)]),
    )];
    let found = run(&weights, &[t(7), t(8), wrong], &chain, &mut pool);
    assert_eq!(found[..2], want[7..9]);
    let rest = [part(0..5, &[], kept(2, StateStart::Kept, &[0], &[]))];
    let rows: Vec<&Vec<f32>> = text[9..].iter().collect();
    assert_eq!(run(&weights, &rows, &rest, &mut pool), want[9..]);

    // From the copies, which stay as they are.
    for (slot, from, start) in [(0, 5, 2), (1, 4, 6), (3, 4, 6)] {
        let parts = [part(
            0..4,
            &[],
            kept(slot, StateStart::CopyOf(from), &[], &[]),
        )];
        let rows: Vec<&Vec<f32>> = text[start..start + 4].iter().collect();
        assert_eq!(
            run(&weights, &rows, &parts, &mut pool),
            want[start..start + 4]
        );
    }
}

#[test]
fn what_would_write_twice_or_read_nothing_is_refused() {
    let weights = weights();
    let x = Tensor::zeros((4, SHAPE.width()), DType::F32, &Device::Cpu).unwrap();
    let own = |accepted: &[u16]| kept(1, StateStart::Kept, accepted, &[]);
    for parts in [
        vec![part(0..3, &[], None)],
        vec![part(0..2, &[], None), part(3..4, &[], None)],
        vec![part(0..2, &[], own(&[])), part(2..4, &[], own(&[]))],
        vec![part(0..4, &[], own(&[3]))],
        vec![part(0..4, &[Some(0)], own(&[]))],
        vec![part(0..4, &[], kept(1, StateStart::Empty, &[], &[(5, 2)]))],
    ] {
        let mut pool = StatePool::new(SHAPE.states());
        delta_net(&x, &weights, &parts, &mut pool).unwrap_err();
    }
}
