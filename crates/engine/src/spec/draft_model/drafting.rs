//! One sequence for which a draft is being made.

use crate::spec::acceptance_model::{AcceptanceModel, AcceptanceView};
use crate::spec::draft::{Draft, DraftDist, DraftRequest};
use crate::spec::growth::{Growth, GrowthLimits, TreeRows};
use crate::spec::pool::DraftSequence;
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_core::model::{Batch, Head};
use foretoken_core::sampling::{Acceptance, Guess};
use foretoken_kernels::sample::TokenChoice;
use std::collections::HashMap;

/// A sequence, its request and its growing draft.
pub struct Drafting<'a, 'b> {
    /// Index of the request.
    pub place: usize,
    pub request: &'a mut DraftRequest<'b>,
    /// The tokens that the model continues.
    tokens: &'b [u32],
    pub fed: &'a mut DraftSequence,
    acceptance: &'a AcceptanceModel,
    growth: Growth,
    limits: GrowthLimits,
    /// Number of levels of the draft.
    depth: usize,
    /// Number of levels that a GPU has drawn after the draft and the host has not read.
    pub unread: usize,
    /// Whether the first forward can feed all tokens.
    may_draft: bool,
    /// Whether the first forward has run.
    is_fed: bool,
    /// Whether the draft has ended because the model's logits are not finite.
    pub ended: bool,
    /// The outputs of the head that drafts; `None` if a model drafts.
    outputs: Option<HeadOutputs>,
    /// Whether a head [drafts in place](Head::drafts_in_place).
    in_place: bool,
    /// Number of ids that the model knows, if the first forward may verify the request's staged chain; `None`
    /// if it may not.
    stages: Option<usize>,
    /// The request's staged chain, while the logits after its tokens come.
    staged: Vec<u32>,
}

/// The features of a head's rows in a forward.
pub enum HeadInput {
    /// The target's hidden states, which are not fused yet.
    Target(Tensor),
    /// Outputs of the head.
    Own(Tensor),
}

/// The outputs of a head for the rows that it fed, `[1, hidden_size]` each.
#[derive(Default)]
struct HeadOutputs {
    last: Option<Tensor>,
    /// Outputs by node; `None` = the sequence's last token.
    of: HashMap<Option<u16>, Tensor>,
}

/// Maximum number of nodes that answer a request.
pub fn max_nodes(request: &DraftRequest<'_>) -> usize {
    match request.max_siblings() {
        1 => request.nodes.min(request.model_length),
        _ => request.nodes,
    }
}

/// Maximum number of nodes that are fed: the last one of a chain is not.
pub fn max_fed(request: &DraftRequest<'_>) -> usize {
    max_nodes(request) - usize::from(request.max_siblings() == 1)
}

impl<'a, 'b> Drafting<'a, 'b> {
    /// The beginning of a draft; the pool has room for it. A forward takes at most `chunk` of its
    /// rows.
    pub fn new(
        place: usize,
        request: &'a mut DraftRequest<'b>,
        tokens: &'b [u32],
        fed: &'a mut DraftSequence,
        acceptance: &'a AcceptanceModel,
        chunk: usize,
    ) -> Self {
        Self {
            place,
            may_draft: tokens.len() - fed.tokens.len() <= chunk,
            limits: GrowthLimits {
                nodes: max_nodes(request),
                width: request.max_siblings(),
                min_score: request.min_score,
            },
            request,
            tokens,
            fed,
            acceptance,
            growth: Growth::default(),
            depth: 0,
            unread: 0,
            is_fed: false,
            ended: false,
            outputs: None,
            in_place: false,
            stages: None,
            staged: Vec::new(),
        }
    }

    /// Sets the head that drafts, if no model does.
    pub fn of_a_head(mut self, head: Option<&dyn Head>) -> Self {
        self.outputs = head.map(|_| HeadOutputs::default());
        self.in_place = head.is_some_and(Head::drafts_in_place);
        self
    }

    /// Sets whether the first forward verifies the request's staged chain: if the draft is a chain and `stages`
    /// has the number of ids that the model knows.
    pub fn staged(mut self, stages: Option<usize>) -> Self {
        self.stages = stages.filter(|_| self.is_chain());
        self
    }

    /// Rows of the last forward that are of the staged chain.
    pub fn num_staged(&self) -> usize {
        self.staged.len()
    }

    /// Whether another forward has something to do for it.
    pub fn is_open(&self) -> bool {
        if !self.is_fed {
            return true;
        }
        let grows = self.unread > 0 || !self.growth.open().is_empty();
        let depth = self.depth + self.unread;
        self.may_draft && !self.ended && grows && depth < self.max_depth()
    }

    /// Whether the first forward can feed all tokens.
    pub fn may_draft(&self) -> bool {
        self.may_draft
    }

    /// Whether its tokens must be chosen on the host.
    pub fn needs_host(&self) -> bool {
        self.may_draft && self.request.sampler.needs_host()
    }

    /// Whether its next row needs only the token that a GPU drew last, and of it nothing that only the host can compute.
    pub fn goes_on_unread(&self) -> bool {
        self.unread > 0 && self.is_chain() && !self.request.sampler.depends_on_tokens()
    }

    /// Number of levels that its draft may still get; 0 = the tokens before it come first.
    pub fn levels_left(&self) -> usize {
        match self.may_draft {
            true => self.max_depth().saturating_sub(self.depth),
            false => 0,
        }
    }

    /// Whether no node has siblings.
    pub fn is_chain(&self) -> bool {
        self.limits.width == 1
    }

    fn max_depth(&self) -> usize {
        match self.limits.width {
            1 => self.limits.nodes,
            _ => self.request.model_length,
        }
    }

    /// Number of nodes for which the last fed rows ask: the root, or those that are open.
    pub fn asked(&self) -> usize {
        self.growth.open().len().max(1) + self.staged.len()
    }

    /// The features of the rows that [`Drafting::feed`] adds next.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&self, chunk: usize) -> Result<HeadInput> {
        let (base, seen) = (self.tokens.len(), self.fed.tokens.len());
        if seen < base {
            let rows = seen..base.min(seen + chunk);
            return Ok(HeadInput::Target(self.fed.features.of_rows(rows)?));
        }
        let missing = || Error::internal("a head's draft goes on without its features");
        let outputs = self.outputs.as_ref().ok_or_else(missing)?;
        if self.is_chain() {
            return Ok(HeadInput::Own(outputs.last.clone().ok_or_else(missing)?));
        }
        let parents = self.growth.fed_parents();
        let features = parents.map(|parent| outputs.of.get(&parent).ok_or_else(missing));
        Ok(HeadInput::Own(Tensor::cat(
            &features.collect::<Result<Vec<_>>>()?,
            0,
        )?))
    }

    /// Keeps a head's outputs for the [`parents`](Self::parents), `[parents, hidden_size]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn note_outputs(&mut self, hidden: Tensor) -> Result<()> {
        let parents = self.parents();
        let is_chain = self.is_chain();
        let Some(outputs) = &mut self.outputs else {
            return Ok(());
        };
        outputs.last = Some(hidden.narrow(0, parents.len() - 1, 1)?);
        if !is_chain {
            for (row, parent) in parents.into_iter().enumerate() {
                outputs.of.insert(parent, hidden.narrow(0, row, 1)?);
            }
        }
        Ok(())
    }

    /// Adds the rows that it has not fed, at most `chunk` of them. Returns the number of logits rows
    /// that it asks for.
    pub fn feed(&mut self, batch: &mut Batch, chunk: usize, block_size: usize) -> usize {
        let base = self.tokens.len();
        self.is_fed = true;
        let seen = self.fed.tokens.len();
        if seen < base {
            let new = &self.tokens[seen..base.min(seen + chunk)];
            if let Some(vocab_size) = self.stages.filter(|_| self.may_draft) {
                let room = max_fed(self.request).min(chunk - new.len());
                let staged = self.request.staged.iter().copied();
                let known = staged.take_while(|&id| (id as usize) < vocab_size);
                self.staged = known.take(room).collect();
            }
            let rows = [new, &self.staged].concat();
            batch.push_span(&rows, &[], seen, &self.fed.table, block_size);
            self.fed.tokens.extend(new);
        } else if self.unread > 0 {
            let unread = TreeRows {
                tokens: vec![0],
                parents: Vec::new(),
            };
            self.push_draft(batch, &unread, block_size);
            self.fed.tokens.push(0);
        } else {
            let rows = self.growth.rows();
            self.keep_trunk();
            self.push_draft(batch, &rows, block_size);
            if rows.tokens.len() == 1 {
                self.growth.extend_trunk();
                self.fed.tokens.extend(rows.tokens);
            }
        }
        if !self.may_draft {
            return 0;
        }
        let asked = self.asked();
        let end = batch.tokens.len();
        batch
            .logits
            .extend((end - asked..end).map(|row| row as u32));
        asked
    }

    /// Adds rows of draft tokens: after what is in the pool, or each in the place of the last committed row.
    fn push_draft(&self, batch: &mut Batch, rows: &TreeRows, block_size: usize) {
        let (context, table) = (self.fed.tokens.len(), &self.fed.table);
        if !self.in_place {
            batch.push_span(&rows.tokens, &rows.parents, context, table, block_size);
            return;
        }
        let last = self.tokens.len() - 1;
        for &token in &rows.tokens {
            batch.written.push(batch.tokens.len() as u32);
            batch.push_span(&[token], &[], last, table, block_size);
        }
    }

    /// Notes which tokens are in the pool, one after the other.
    fn keep_trunk(&mut self) {
        let trunk = self
            .growth
            .trunk()
            .iter()
            .map(|&node| self.growth.token(node));
        self.fed.tokens.truncate(self.tokens.len());
        self.fed.tokens.extend(trunk);
    }

    /// How the next level's tokens are drawn.
    pub fn choice(&self) -> TokenChoice {
        self.request.choice(self.depth + self.unread)
    }

    /// Maximum number of tokens after one row of logits.
    pub fn width(&self) -> usize {
        self.limits.width
    }

    fn view(&self) -> AcceptanceView<'a> {
        self.acceptance
            .view(&self.fed.history, self.request.is_sampled())
    }

    /// Adds the levels of the rows of logits that were asked for: one, and one for each token of a staged chain
    /// that is the draft's own.
    pub fn expand<'c>(&mut self, mut rows: impl Iterator<Item = &'c [f32]>) {
        let staged = std::mem::take(&mut self.staged);
        let asked = self.asked();
        self.expand_level(rows.by_ref().take(asked));
        for (token, row) in staged.into_iter().zip(rows) {
            if !self.is_open() || self.growth.rows().tokens != [token] {
                break;
            }
            self.keep_trunk();
            self.growth.extend_trunk();
            self.fed.tokens.push(token);
            self.expand_level(std::iter::once(row));
        }
    }

    /// Adds a level: the guesses of each of its rows of logits.
    fn expand_level<'c>(&mut self, rows: impl Iterator<Item = &'c [f32]>) {
        let (choice, width) = (self.choice(), self.limits.width);
        let parents = self.parents().into_iter().zip(rows);
        let guess = |(parent, row)| {
            let sampler = &mut *self.request.sampler;
            (self.growth).guess(parent, row, sampler, choice, width)
        };
        let guesses: Vec<Vec<Guess>> = parents.map(guess).collect();
        self.add_level(guesses);
    }

    /// Tokens from the first level down to `node`.
    pub fn path(&self, node: Option<u16>) -> Vec<u32> {
        self.growth.path(node)
    }

    /// Adds a level: the guesses after each of [`Drafting::parents`].
    pub fn add_level(&mut self, guesses: impl IntoIterator<Item = Vec<Guess>>) {
        let first = self.growth.draft.len();
        for (parent, guesses) in self.parents().into_iter().zip(guesses) {
            self.growth.add(parent, &guesses, &self.view());
        }
        self.end_level(first);
    }

    /// The nodes that the last fed rows ask for, in their order.
    pub fn parents(&self) -> Vec<Option<u16>> {
        self.growth.parents()
    }

    fn end_level(&mut self, first: usize) {
        self.ended = self.growth.draft.len() == first;
        self.depth += 1;
        // What is opened will be fed.
        let last = self.growth.draft.len();
        let deeper = self.depth < self.max_depth();
        self.growth
            .open_level(if deeper { first } else { last }, &self.limits);
    }

    /// Adds a token that a GPU drew to the end of a chain.
    pub fn push(&mut self, guess: Guess, dist: Option<DraftDist>) {
        // Its row was computed while the host did not know it, or it is the next to feed.
        let at = self.tokens.len() + self.depth;
        let fed = self.fed.tokens.get_mut(at);
        let is_fed = fed.map(|fed| *fed = guess.token).is_some();
        self.growth.push(guess, &self.view(), is_fed);
        if self.request.acceptance == Acceptance::Rejection {
            self.growth.draft.dists.extend(dist);
        }
        self.depth += 1;
        self.request.sampler.resolve(guess.token);
    }

    /// The draft, which the sequence's history remembers.
    pub fn finish(mut self) -> Draft {
        self.keep_trunk();
        let grown = self.growth.finish(&self.limits);
        let is_sampled = self.request.is_sampled();
        if self.outputs.is_some() {
            // A head's rows are right only for what it read of the target.
            let base = self.tokens.len().min(self.fed.tokens.len());
            self.fed.tokens.truncate(base);
            self.fed.features.drop_before(base.saturating_sub(1));
        }
        let history = &mut self.fed.history;
        history.propose(self.tokens, is_sampled, grown.all, grown.estimates);
        grown.draft
    }
}
