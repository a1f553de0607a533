//! What the budget's decisions gain on a GPU, from one request at a time to many: with what steps of Llama-3.2-3B in bf16
//! were measured to cost on an H100 (docs/cuda.md), and its drafts by Llama-3.2-1B.

use super::super::calibration::rows_on_gpu;
use super::super::cost::tests::Noise;
use super::super::target_cost::TargetCost;
use super::super::target_cost::tests::dense;
use super::tests::{chain_parents, forecasts, kept, plain};
use super::*;

/// Milliseconds of the 3B's forwards of up to 16 rows, replayed as graphs.
const GRAPHS: [(usize, f64); 6] = [
    (1, 2.78),
    (2, 2.77),
    (4, 2.83),
    (6, 2.91),
    (8, 2.96),
    (16, 3.21),
];
/// More rows without graphs and with other kernels, as measured with 64 and 128 streams; 17 rows are assumed.
const WITHOUT_GRAPHS: [(usize, f64); 3] = [(17, 5.0), (64, 6.2), (128, 7.45)];
/// More rows with graphs, as planned: 64 rows at 1.25 times one row.
const MORE_GRAPHS: [(usize, f64); 3] = [(16, 3.21), (64, 3.48), (256, 5.4)];
/// The host's milliseconds for each further sequence of a step that is replayed: with 16 streams a step was measured to take
/// 3.8 ms, and with 128 it would take 7.4 with graphs.
const HOST: [f64; 2] = [0.04, 0.025];
/// Standard deviation of a step's time.
const DEVIATION: f64 = 0.03;
/// Steps of a simulation, and the first of them that count as a warm-up.
pub(in crate::spec) const STEPS: u64 = 1500;
pub(in crate::spec) const WARM_UP: u64 = 100;
/// Draft rows of a step, as in [`StepLimits`](crate::StepLimits).
const DRAFT_ROWS: usize = 256;
pub(in crate::spec) const STREAMS: [usize; 5] = [1, 4, 16, 64, 128];
pub(in crate::spec) const ACCEPTANCE: [f64; 4] = [0.3, 0.5, 0.7, 0.9];

/// A GPU and its target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::spec) enum Gpu {
    /// Graphs for up to 16 rows.
    FewGraphs,
    /// Rows are rounded up to graphs of up to 256 rows.
    ManyGraphs,
}

impl Gpu {
    pub const ALL: [Self; 2] = [Self::FewGraphs, Self::ManyGraphs];

    /// The numbers of rows that forwards are rounded up to.
    pub fn edges(self) -> Vec<usize> {
        let more = (24..=64).step_by(8).chain((96..=256).step_by(32));
        match self {
            Self::FewGraphs => Vec::new(),
            Self::ManyGraphs => (1..=16).chain(more).collect(),
        }
    }

    /// Seconds of a forward.
    pub fn forward(self, rows: usize) -> f64 {
        let edge = self.edges().into_iter().find(|&edge| edge >= rows);
        let rows = edge.unwrap_or(rows);
        let known: &[_] = match self {
            _ if rows <= 16 => &GRAPHS,
            Self::FewGraphs => &WITHOUT_GRAPHS,
            Self::ManyGraphs => &MORE_GRAPHS,
        };
        let after = known.partition_point(|&(other, _)| other < rows);
        let after = after.clamp(1, known.len() - 1);
        let ((few, low), (many, high)) = (known[after - 1], known[after]);
        1e-3 * (low + (high - low) * (rows as f64 - few as f64) / (many - few) as f64)
    }

    /// Seconds of a step of so many sequences, their rows and drafts together `rows`.
    pub fn step(self, sequences: usize, rows: usize) -> f64 {
        let host = match self {
            Self::FewGraphs if rows <= 16 => HOST[0],
            // What was measured contains it.
            Self::FewGraphs => 0.0,
            Self::ManyGraphs => HOST[1],
        };
        self.forward(rows) + 1e-3 * host * (sequences - 1) as f64
    }

    /// The cost that is measured at start.
    pub fn calibrated(self, streams: usize, noise: &mut Noise) -> TargetCost {
        let edges = self.edges();
        let measured = rows_on_gpu(&edges, streams + DRAFT_ROWS.min(15 * streams));
        let seconds = |rows| (rows, self.forward(rows) * noise.factor(DEVIATION));
        let measured: Vec<_> = measured.into_iter().map(seconds).collect();
        let mut cost = TargetCost::new([]).with_edges(edges);
        cost.calibrate(&dense(&measured));
        cost
    }
}

/// Tokens and seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::spec) struct Rate {
    tokens: f64,
    seconds: f64,
}

impl Rate {
    /// Adds a step of so many streams that verifies chains of these depths, each token of which is accepted at the
    /// rate, after so many seconds of drafting. Returns the step as it is measured.
    pub fn verify(
        &mut self,
        gpu: Gpu,
        (streams, rate): (usize, f64),
        depths: impl Iterator<Item = usize>,
        drafting: f64,
        noise: &mut Noise,
    ) -> StepCost {
        let (mut nodes, mut tokens, mut likely) = (0, streams, streams as f64);
        for depth in depths {
            nodes += depth;
            likely += expected(rate, depth);
            tokens += (0..depth).take_while(|_| noise.unit() < rate).count();
        }
        let target = gpu.step(streams, streams + nodes);
        self.tokens += likely;
        self.seconds += target + drafting;
        StepCost {
            sequences: streams,
            base_rows: streams,
            draft_nodes: nodes,
            tokens,
            target_seconds: target * noise.factor(DEVIATION),
            draft_seconds: drafting * noise.factor(DEVIATION),
            ..StepCost::default()
        }
    }

    fn per_second(self) -> f64 {
        self.tokens / self.seconds
    }
}

/// Tokens that a draft of this depth is expected to add, if each is accepted at this rate.
fn expected(rate: f64, depth: usize) -> f64 {
    (1..=depth as i32).map(|depth| rate.powi(depth)).sum()
}

/// Maximum depth of drafts in a step of so many streams.
pub(in crate::spec) fn max_depth(streams: usize) -> usize {
    8.min(DRAFT_ROWS / streams)
}

/// Checks the rate of a simulation, during the warm-up and after it, against those of fixed depths, of which `drafting`
/// has the seconds of drafting. A few thousandths of plain decoding are for looking whether drafts pay. Returns the rate
/// over that of the best depth: in a few cases that is far beyond an edge, or the host takes half of the
/// time, which looks like a slower GPU.
pub(in crate::spec) fn check(
    gpu: Gpu,
    streams: usize,
    rate: f64,
    [first, later]: [Rate; 2],
    drafting: impl Fn(usize) -> f64,
) -> f64 {
    let fixed = |depth| {
        let tokens = streams as f64 * (1.0 + expected(rate, depth));
        tokens / (gpu.step(streams, streams * (1 + depth)) + drafting(depth))
    };
    let best = (0..=max_depth(streams)).map(fixed).fold(0.0, f64::max);
    let [first, later] = [first, later].map(Rate::per_second);
    let case = format!("{gpu:?}, {streams} streams at {rate}");
    let (early, plain, of_best) = (first / fixed(0), later / fixed(0), later / best);
    assert!(early >= 0.95, "{case}: {early} of plain at first");
    assert!(plain >= 0.995, "{case}: {plain} of plain");
    assert!(of_best >= 0.75, "{case}: {of_best} of the best fixed depth");
    of_best
}

/// Tokens and seconds with a draft model whose forwards take `draft_seconds`, during the warm-up and after it.
fn with_model(gpu: Gpu, streams: usize, rate: f64, draft_seconds: f64) -> [Rate; 2] {
    let noise = &mut Noise(streams as u64);
    let target = gpu.calibrated(streams, noise);
    let mut budget = Budget::new(BudgetMode::Adaptive).with_target(target);
    let measured = [1, 16, DRAFT_ROWS].map(|rows| (rows, draft_seconds));
    budget.draft_cost().calibrate(&measured);
    let depth = max_depth(streams);
    let path: Vec<f32> = (1..=depth as i32)
        .map(|depth| rate.powi(depth) as f32)
        .collect();
    let (paths, parents) = (vec![path.clone(); streams], chain_parents(depth));
    let mut rates = [Rate::default(); 2];
    for step in 0..STEPS {
        let depths = budget.depths(&forecasts(&paths, depth), plain(streams));
        let mut drafting = 0.0;
        for level in 0..depths.iter().copied().max().unwrap_or(0) {
            let rows = depths.iter().filter(|&&depth| depth > level).count();
            let took = draft_seconds * noise.factor(DEVIATION);
            budget.draft_cost().note(rows, took);
            drafting += draft_seconds;
        }
        let drafts = depths.iter().map(|&depth| Candidates {
            scores: &path[..depth],
            parents: &parents[..depth],
        });
        let drafts: Vec<_> = drafts.collect();
        let keep = budget.select(&drafts, plain(streams)).keep;
        let kept = keep.iter().map(|keep| keep.iter().filter(|&&k| k).count());
        let phase = &mut rates[usize::from(step >= WARM_UP)];
        budget.observe(&phase.verify(gpu, (streams, rate), kept, drafting, noise));
    }
    rates
}

/// The 1B in bf16 and in 4 bits.
#[test]
fn a_draft_model_is_never_slower_at_any_load() {
    let mut of_best = Vec::new();
    for gpu in Gpu::ALL {
        for draft_seconds in [1.28e-3, 0.86e-3] {
            for streams in STREAMS {
                for rate in ACCEPTANCE {
                    let rates = with_model(gpu, streams, rate, draft_seconds);
                    let drafting = |depth| depth as f64 * draft_seconds;
                    of_best.push(check(gpu, streams, rate, rates, drafting));
                }
            }
        }
    }
    let mean = of_best.iter().sum::<f64>() / of_best.len() as f64;
    assert!(mean > 0.98, "{mean} of the best fixed depth");
}

/// Unlikely tokens fill the rows up to a graph's edge, and open no further graph.
#[test]
fn rows_up_to_an_edge_are_filled() {
    let of = |sequences: usize| {
        let target = Gpu::ManyGraphs.calibrated(sequences, &mut Noise(1));
        let mut budget = Budget::new(BudgetMode::Adaptive).with_target(target);
        kept(&mut budget, &[0.05], sequences)
    };
    let many = [60, 64, 90].map(of);
    assert_eq!(many, [4, 0, 6]);
}
