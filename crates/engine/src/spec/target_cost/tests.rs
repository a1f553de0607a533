use super::super::cost::tests::Noise;
use super::*;

/// Forwards of a model without experts, from rows and seconds.
pub fn dense(forwards: &[(usize, f64)]) -> Vec<MeasuredForward> {
    let forward = |&(rows, seconds): &(usize, f64)| MeasuredForward {
        rows,
        context: 0,
        experts_read: 0,
        seconds,
    };
    forwards.iter().map(forward).collect()
}

/// The layers of Qwen3-30B-A3B.
const LAYERS: usize = 48;
const EXPERTS: usize = 128;
const PER_ROW: usize = 8;

fn qwen() -> TargetCost {
    TargetCost::new([(EXPERTS, PER_ROW); LAYERS])
}

/// Expected distinct experts of rows with nothing in common.
fn law(rows: f64) -> f64 {
    let miss = 1.0 - PER_ROW as f64 / EXPERTS as f64;
    (LAYERS * EXPERTS) as f64 * (1.0 - miss.powf(rows))
}

/// A machine: an expert takes 1/600, rows 1/3 and a 30th for each.
fn seconds(rows: usize, experts: f64) -> f64 {
    (9.0 + rows as f64) / 30.0 + experts / 600.0
}

/// Forwards of rows that are all alike, and of rows that have nothing in common.
fn measured(noise: &mut Noise, deviation: f64) -> Vec<MeasuredForward> {
    let mut forwards = Vec::new();
    for rows in [1, 2, 4, 6, 8, 16] {
        for independent in [1, rows] {
            let experts_read = law(independent as f64).round() as usize;
            let seconds = seconds(rows, experts_read as f64) * noise.factor(deviation);
            forwards.push(MeasuredForward {
                rows,
                context: 0,
                experts_read,
                seconds,
            });
        }
    }
    forwards
}

#[test]
fn without_experts_it_is_the_curve() {
    let (mut cost, mut curve) = (TargetCost::new([]), CostCurve::default());
    let mut noise = Noise(1);
    for step in 0..500 {
        let (rows, nodes) = (1 + noise.below(5), noise.below(9));
        let took = 0.1 * (1.0 + 0.2 * (rows + nodes) as f64) * noise.factor(0.2);
        cost.note(rows, nodes, 0, 0, took);
        curve.note(rows + nodes, took);
        assert_eq!(cost.seconds(rows, nodes), curve.seconds(rows + nodes));
        assert_eq!(cost.seconds_of(9, 0), curve.seconds(9), "step {step}");
    }
    assert_eq!(cost.seconds(0, 0), 0.0);
    let forwards = [(1, 0.1), (2, 0.15), (8, 0.4)];
    curve.calibrate(&forwards);
    cost.calibrate(&dense(&forwards));
    for rows in 0..40 {
        assert_eq!(cost.seconds(1, rows), curve.seconds(1 + rows));
    }
}

#[test]
fn a_few_noisy_forwards_tell_what_an_expert_costs() {
    for seed in 0..20 {
        let mut cost = qwen();
        cost.calibrate(&measured(&mut Noise(seed), 0.05));
        let ratio = cost.expert_seconds() * 600.0;
        assert!((0.8..1.25).contains(&ratio), "{ratio} with seed {seed}");
        for rows in [1, 3, 8, 16] {
            for independent in [1.0, rows as f64] {
                let experts = law(independent);
                let ratio =
                    cost.seconds_of(rows, experts as usize) / seconds(rows, experts.floor());
                assert!((0.8..1.2).contains(&ratio), "{ratio} of {rows} rows");
            }
        }
    }
}

#[test]
fn experts_that_seem_to_cost_less_than_nothing_cost_nothing() {
    let forward = |rows, experts_read, seconds| MeasuredForward {
        rows,
        context: 0,
        experts_read,
        seconds,
    };
    let mut cost = qwen();
    cost.calibrate(&[
        forward(1, 384, 1.0),
        forward(4, 384, 2.0),
        forward(4, 1300, 1.5),
    ]);
    assert_eq!(cost.expert_seconds(), 0.0);
    assert_eq!(cost.seconds_of(4, 1300), 1.75);
    // Or all of the time: then the curve keeps a little.
    cost.calibrate(&[
        forward(1, 384, 0.1),
        forward(4, 384, 0.1),
        forward(4, 1300, 9.0),
    ]);
    assert!(cost.seconds_of(1, 0) > 0.0 && cost.expert_seconds() > 0.0);
    // What was not measured in pairs says nothing of experts.
    cost.calibrate(&[forward(1, 384, 1.0), forward(4, 1300, 2.0)]);
    assert_eq!((cost.expert_seconds(), cost.seconds_of(4, 0)), (0.0, 2.0));
}

/// Steps of request rows and draft nodes together show what the rows have in common. The times of these
/// steps are noise, and their machine is slower than the calibrated one.
#[test]
fn what_rows_have_in_common_is_learned() {
    for (row, node) in [(1.0, 1.0), (0.9, 0.3), (0.5, 0.6), (0.2, 0.1)] {
        let (mut cost, mut noise) = (qwen(), Noise(3));
        cost.calibrate(&measured(&mut noise, 0.0));
        let truth =
            |rows: usize, nodes: usize| law(1.0 + row * (rows as f64 - 1.0) + node * nodes as f64);
        for _ in 0..1000 {
            let (rows, nodes) = (1 + noise.below(4), noise.below(7));
            let experts = truth(rows, nodes) * noise.factor(0.1);
            let took = 2.0 * seconds(rows + nodes, experts) * noise.factor(0.1);
            cost.note(rows, nodes, 0, experts as usize, took);
        }
        for (rows, nodes) in [(1, 0), (1, 4), (4, 0), (3, 5)] {
            let expected = cost.expected_experts(rows, nodes) / truth(rows, nodes);
            assert!(
                (0.9..1.1).contains(&expected),
                "{expected} of {rows}, {nodes}"
            );
            let truth = 2.0 * seconds(rows + nodes, truth(rows, nodes));
            let ratio = cost.seconds(rows, nodes) / truth;
            assert!((0.85..1.15).contains(&ratio), "{ratio} of {rows}, {nodes}");
        }
    }
}

#[test]
fn what_draft_nodes_have_in_common_is_forgotten_without_drafts() {
    let mut cost = qwen();
    for _ in 0..200 {
        cost.note(1, 4, 0, law(5.0) as usize, 1.0);
    }
    let dear = cost.expected_experts(1, 4);
    assert!((dear / law(5.0) - 1.0).abs() < 0.01);
    for _ in 0..2000 {
        cost.note(1, 0, 0, law(1.0) as usize, 1.0);
    }
    assert!((cost.expected_experts(1, 4) / law(1.0 + 4.0 * FIRST_NODE) - 1.0).abs() < 0.01);
}

#[test]
fn nothing_that_is_noted_makes_a_cost_that_is_no_number() {
    let mut noise = Noise(5);
    for layers in [
        vec![],
        vec![(4, 4)],
        vec![(1, 1), (128, 8)],
        vec![(4096, 1); 3],
    ] {
        let all: usize = layers.iter().map(|&(experts, _)| experts).sum();
        let mut cost = TargetCost::new(layers);
        // Rows take 1, and all experts together as much.
        let both = [0, all].map(|experts_read| MeasuredForward {
            rows: 2,
            context: 0,
            experts_read,
            seconds: 1.0 + f64::from(u8::from(experts_read > 0)),
        });
        cost.calibrate(&both);
        assert_eq!(cost.expert_seconds() > 0.0, all > 0);
        for _ in 0..500 {
            let (rows, nodes) = (noise.below(300), noise.below(3) * noise.below(60));
            let magnitude = noise.below(14);
            let experts = noise.below(1 << magnitude);
            let took = [0.0, f64::NAN, -1.0, 1e9].get(noise.below(9)).copied();
            let context = noise.below(2) * noise.below(100_000);
            let took = took.unwrap_or_else(|| noise.unit());
            cost.note(rows, nodes, context, experts, took);
            let expected = cost.seconds(1 + rows, nodes);
            assert!(expected.is_finite() && expected > 0.0);
            assert!(cost.seconds(1 + rows, nodes + 1) >= expected * (1.0 - 1e-9));
            let read = |nodes| cost.expected_experts(1 + rows, nodes);
            assert!(read(nodes) <= read(nodes + 1) && read(nodes + 1) <= all as f64 + 1e-6);
            assert!(cost.seconds_of(9, all) >= cost.seconds_of(9, 0));
        }
    }
}

/// A machine whose attention costs 2 for a token of a sequence and 1 for a token of a row, beside 1,000 for a row
/// and 50 for each further one.
#[test]
fn attention_is_measured_and_follows_the_machine() {
    let truth = |rows: usize, context: usize| {
        950.0 + 50.0 * rows as f64 + (2.0 + rows as f64) * context as f64
    };
    let forward = |rows, context| MeasuredForward {
        rows,
        context,
        experts_read: 0,
        seconds: truth(rows, context),
    };
    let mut cost = TargetCost::new([]);
    let start = [1, 2, 4, 8].map(|rows| forward(rows, 0));
    cost.calibrate(&[&start[..], &[forward(1, 512), forward(8, 512)]].concat());
    let expected = |cost: &TargetCost, rows: usize, context| {
        let of = Attending {
            sequences: 1,
            rows,
            context,
        };
        cost.seconds(1, rows - 1) + cost.attention(of)
    };
    for (rows, context) in [(1, 0), (1, 256), (4, 256), (8, 2000)] {
        let ratio = expected(&cost, rows, context) / truth(rows, context);
        assert!((ratio - 1.0).abs() < 1e-6, "{rows}, {context}: {ratio}");
    }
    let mut noise = Noise(4);
    for step in 0..2000 {
        let (rows, context) = (1 + noise.below(6), 100 + step % 300);
        let took = 2.0 * truth(rows, context) * noise.factor(0.1);
        cost.note(1, rows - 1, context, 0, took);
    }
    for (rows, context) in [(1, 256), (4, 256), (6, 400)] {
        let ratio = expected(&cost, rows, context) / truth(rows, context) / 2.0;
        assert!((0.85..1.15).contains(&ratio), "{rows}, {context}: {ratio}");
    }
    // What was measured without tokens before it says nothing of them.
    cost.calibrate(&start);
    assert_eq!(expected(&cost, 4, 1000), cost.seconds(1, 3));
}
