//! How deep a model drafts for each sequence of a step, before it drafts.

use super::nodes::{BudgetNode, RankedPrefix, best, chain, ranked};
use super::{Base, Budget, DraftForecast};

impl Budget {
    /// The depth to draft to for each sequence, before a model drafts. A level is one forward of the draft
    /// model over all sequences that are drafted for that deep, or a row of its only forward for each of them
    /// ([`DraftForecast::at_once`]). The depth is 0 where drafting does not pay, except for a look now and then. The
    /// outcome of a look of depth 1 is known even if [`Budget::select`] prunes the node.
    ///
    /// Call it at most once per step, with all sequences that may draft.
    pub fn depths(&mut self, forecasts: &[DraftForecast<'_>], base: Base) -> Vec<usize> {
        if self.is_fixed() {
            return forecasts.iter().map(|one| one.max_length).collect();
        }
        let mut depths = self.best_depths(forecasts, base, base.rows == base.sequences);
        if depths.contains(&0) {
            self.look(&mut depths, forecasts, base);
        }
        depths
    }

    /// The depths that pay best; with `explores`, in some steps others nearby.
    fn best_depths(
        &self,
        forecasts: &[DraftForecast<'_>],
        base: Base,
        explores: bool,
    ) -> Vec<usize> {
        let (nodes, offers) = self.plan(forecasts, base);
        let mut best = best(&offers);
        if explores {
            best = self.explore(best, &offers, base.rows);
        }
        let mut depths = vec![0; forecasts.len()];
        let nodes = nodes.iter().take(best);
        nodes.for_each(|node| depths[node.sequence] += 1);
        depths
    }

    /// Lets sequences that shall not draft do so after all, as far as time is saved for it: to the depth that would pay
    /// if the first token were as probable as it may be, or else to depth 1.
    fn look(&mut self, depths: &mut [usize], forecasts: &[DraftForecast<'_>], base: Base) {
        let mut hoped = vec![0; depths.len()];
        if self.exploration.most() >= self.draft_seconds(1) {
            let paths: Vec<_> = forecasts.iter().map(DraftForecast::hoped_path).collect();
            let forecasts = forecasts.iter().zip(&paths);
            let forecasts: Vec<_> = forecasts
                .map(|(one, path)| DraftForecast { path, ..*one })
                .collect();
            hoped = self.best_depths(&forecasts, base, false);
        }
        let busy = depths.iter().zip(forecasts);
        let rows = busy.map(|(&depth, one)| (1..=depth).map(move |depth| one.rows_of(depth)));
        let first = rows.flatten().filter(|(forward, _)| *forward == 0);
        let mut rows: usize = first.map(|(_, rows)| rows).sum();
        // Another sequence has the first turn in each step.
        let turn = self.steps as usize % depths.len();
        for at in (turn..depths.len()).chain(0..turn) {
            let one = &forecasts[at];
            if depths[at] > 0 || one.max_length == 0 {
                continue;
            }
            let (depth, is_hopeful) = (hoped[at].max(1), hoped[at] > 0);
            let (mut with, mut cost) = (rows + one.pending.max(1), 0.0);
            if one.at_once {
                with += depth;
            } else {
                cost += (depth - 1) as f64 * self.draft_seconds(1);
            }
            cost += self.draft_seconds(with) - self.draft_seconds(rows);
            if is_hopeful {
                cost += self.verify_seconds(base, depth)[depth];
            }
            if self.exploration.take(cost, is_hopeful) {
                (depths[at], rows) = (depth, with);
            }
        }
    }

    /// Seconds that drafts of a model are expected to save each sequence of a step, at the depth that pays best; 0 if
    /// none pays.
    pub fn saved_seconds(&self, forecast: DraftForecast<'_>, base: Base) -> f64 {
        let forecasts = vec![forecast; base.sequences];
        let (_, offers) = self.plan(&forecasts, base);
        offers[best(&offers)].value() / self.price(base) / base.sequences.max(1) as f64
    }

    /// The nodes that a draft model may draft, best first, down to the depth that is worth most, and what
    /// the first 0, 1, ... of them are worth.
    fn plan(
        &self,
        forecasts: &[DraftForecast<'_>],
        base: Base,
    ) -> (Vec<BudgetNode>, Vec<RankedPrefix>) {
        let price = self.price(base);
        let deepest = forecasts.iter().map(|one| one.path.len()).max();
        let verify = self.verify_seconds(base, deepest.unwrap_or(0));
        let nodes = forecasts.iter().enumerate();
        // Nodes are ranked by what they gain: one with a long backlog would stand before cheaper ones.
        let nodes = nodes.filter(|(_, one)| self.backlog_pays(one, price, &verify));
        let mut nodes = ranked(nodes.flat_map(|(at, one)| chain(at, one)).collect());
        let verify = self.verify_seconds(base, nodes.len());
        let deepest = nodes.iter().map(|node| node.depth).max().unwrap_or(0);
        let (mut chosen, mut depth) = (vec![RankedPrefix::default()], 1);
        let mut known = Vec::new();
        let mut draft_seconds = |rows: usize| {
            let next = known.len();
            known.extend((next..=rows).map(|rows| self.draft_seconds(rows)));
            known[rows]
        };
        // A deep node that comes before shallow ones may open a level that does not pay.
        for limit in 1..=deepest {
            // Rows and seconds of each forward of the draft model.
            let mut forwards = vec![(0, 0.0); limit];
            let mut drafting = 0.0;
            let mut offers = vec![RankedPrefix::default()];
            let allowed = nodes.iter().filter(|node| node.depth <= limit);
            for (node, seconds) in allowed.zip(&verify[1..]) {
                let (forward, added) = forecasts[node.sequence].rows_of(node.depth);
                let (rows, before) = &mut forwards[forward];
                *rows += added;
                let after = draft_seconds(*rows);
                drafting += after - std::mem::replace(before, after);
                offers.push(RankedPrefix {
                    gain: offers[offers.len() - 1].gain + node.score,
                    cost: price * (seconds + drafting),
                });
            }
            if limit == 1 || offers[best(&offers)].value() > chosen[best(&chosen)].value() {
                (chosen, depth) = (offers, limit);
            }
        }
        nodes.retain(|node| node.depth <= depth);
        (nodes, chosen)
    }

    /// Whether a sequence's draft can gain what its rows and its backlog cost, where others pay for the rest
    /// of the draft model's forwards. `verify` has the seconds of 0, 1, ... nodes.
    fn backlog_pays(&self, forecast: &DraftForecast<'_>, price: f64, verify: &[f64]) -> bool {
        let (_, first) = forecast.rows_of(1);
        if forecast.at_once || first <= 1 {
            return true;
        }
        let backlog = self.draft_seconds(first) - self.draft_seconds(1);
        let mut gain = 0.0;
        chain(0, forecast).any(|node| {
            gain += node.score;
            gain > price * (backlog + verify[node.depth])
        })
    }

    /// Seconds of a forward of the draft model. Free while either curve is unknown: only a step
    /// with a draft teaches both.
    fn draft_seconds(&self, rows: usize) -> f64 {
        if self.target.is_known() && self.draft.is_known() {
            self.draft.seconds(rows)
        } else {
            0.0
        }
    }
}
