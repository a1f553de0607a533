//! The place of one text in its grammar.

use super::compiled::{CompiledGrammar, StartParser, lock};
use foretoken_core::sampling::{GrammarRules, GrammarState, Mask};
use llguidance::Matcher;
use llguidance::api::StopReason;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// The state of a grammar along one text, and along the drafts that may continue it.
///
/// Tokens are pushed and truncated without work. Each place that was reached since the last
/// [`TextState::commit`] keeps its mask, so that draft and target compute it once between them.
pub struct TextState {
    grammar: Arc<CompiledGrammar>,
    /// The committed tokens.
    committed: Vec<u32>,
    /// The tree of what was pushed after them; the first node is the end of the committed tokens.
    nodes: Vec<MaskNode>,
    /// The current node.
    at: usize,
    parser: Mutex<Parser>,
}

#[derive(Default)]
struct MaskNode {
    token: u32,
    /// Without meaning for the first node.
    parent: usize,
    /// `None` inside: the parser failed.
    mask: OnceLock<Option<Mask>>,
}

/// A parser that is moved to the node whose mask is asked for.
struct Parser {
    start: StartParser,
    matcher: Matcher,
    /// The tokens that the matcher has consumed.
    consumed: Vec<u32>,
    /// Whether the text needed an unused lexer before.
    was_replaced: bool,
    /// Set if the lexer is not shared.
    own: Option<OwnLexer>,
}

/// The right of a text to a lexer that is not shared.
struct OwnLexer;

/// Number of texts that have a lexer of their own, and the maximum: each such lexer may take about 100 MB.
static OWN_LEXERS: AtomicUsize = AtomicUsize::new(0);
const MAX_OWN_LEXERS: usize = 16;

impl OwnLexer {
    fn take() -> Option<Self> {
        let more = |count| (count < MAX_OWN_LEXERS).then_some(count + 1);
        let taken = OWN_LEXERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.ok().map(|_| Self)
    }
}

impl Drop for OwnLexer {
    fn drop(&mut self) {
        OWN_LEXERS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where tokens lead.
#[derive(PartialEq)]
enum Reached {
    /// All of them are consumed.
    Place,
    /// One of them ends the text.
    End,
    /// The grammar does not allow one of them.
    Refused,
}

/// The text makes its grammar too complex, which was reported.
#[derive(Debug)]
struct Failed;

impl TextState {
    /// The state at the start of a text.
    pub fn new(grammar: Arc<CompiledGrammar>) -> Self {
        Self {
            committed: Vec::new(),
            nodes: vec![MaskNode::default()],
            at: 0,
            parser: Mutex::new(Parser::new(grammar.start_parser())),
            grammar,
        }
    }

    /// Whether the parser can read the tokens up to the current node.
    fn is_readable(&self) -> bool {
        self.read(|parser, tokens| parser.go_to(&self.grammar, tokens))
            .is_ok_and(|reached| reached != Reached::Refused)
    }

    /// Returns the result of `read` for the parser of this state, the committed tokens, and those from there to the
    /// current node.
    ///
    /// The lexer is shared by the texts of a grammar, and drafts that were rejected taught it, too. So where it
    /// reaches its limit, `read` is repeated with the lexer that texts share by now, and then with an unused one:
    /// it fails only if the tokens up to the current node alone are too complex.
    fn read<T>(
        &self,
        read: impl Fn(&mut Parser, [&[u32]; 2]) -> anyhow::Result<T>,
    ) -> Result<T, Failed> {
        let path = self.path();
        let read = |parser: &mut Parser| read(parser, [&self.committed, &path]);
        let mut parser = lock(&self.parser);
        let mut found = read(&mut parser);
        if !parser.start.has_failed() {
            self.grammar.note_size(&parser.start);
        } else {
            if let Some(newer) = self.grammar.newer_than(&parser.start) {
                parser.go_on_with(newer);
                found = read(&mut parser);
            }
            if parser.start.has_failed() {
                parser.go_on_with(self.grammar.unused());
                // If there are too many live texts for one lexer, each of them would fill the next lexer at once.
                let again = std::mem::replace(&mut parser.was_replaced, true);
                parser.own = again.then(OwnLexer::take).flatten();
                found = read(&mut parser);
                if parser.start.has_failed() {
                    // A lexer that has failed may give wrong results.
                    found = found.and(Err(anyhow::anyhow!("its lexer has reached a limit")));
                } else if parser.own.is_none() {
                    self.grammar.share(&parser.start);
                }
            }
        }
        found.map_err(|error| {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            tracing::warn!("a text made its grammar too complex: {line}");
            parser.reset();
            Failed
        })
    }

    /// Tokens from the committed ones to the current node.
    fn path(&self) -> Vec<u32> {
        let mut path = Vec::new();
        let mut at = self.at;
        while at > 0 {
            path.push(self.nodes[at].token);
            at = self.nodes[at].parent;
        }
        path.reverse();
        path
    }
}

impl GrammarRules for CompiledGrammar {
    fn eos(&self) -> &[u32] {
        &self.eos
    }

    fn start(self: Arc<Self>) -> Box<dyn GrammarState> {
        Box::new(TextState::new(self))
    }
}

impl GrammarState for TextState {
    fn eos(&self) -> &[u32] {
        &self.grammar.eos
    }

    fn push(&mut self, token: u32) {
        let at = self.at;
        let mut children = self.nodes.iter().enumerate().skip(1);
        let known = children.find(|(_, node)| node.parent == at && node.token == token);
        self.at = match known {
            Some((place, _)) => place,
            None => {
                self.nodes.push(MaskNode {
                    token,
                    parent: at,
                    mask: OnceLock::new(),
                });
                self.nodes.len() - 1
            }
        };
    }

    fn pop(&mut self, count: usize) {
        for _ in 0..count {
            self.at = self.nodes[self.at].parent;
        }
    }

    fn commit(&mut self) {
        self.committed.extend(self.path());
        self.nodes = vec![self.nodes.swap_remove(self.at)];
        self.at = 0;
    }

    fn mask(&self) -> Option<&Mask> {
        let compute = || {
            let mask = self.read(|parser, tokens| parser.mask(&self.grammar, tokens));
            mask.ok()
        };
        self.nodes[self.at].mask.get_or_init(compute).as_ref()
    }

    fn prepare(&mut self, tokens: &[u32], parents: &[Option<u16>], stop: &AtomicBool) {
        let base = self.at;
        let mut places: Vec<usize> = Vec::with_capacity(tokens.len());
        let _ = self.mask();
        for (&token, parent) in tokens.iter().zip(parents) {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            self.at = parent.map_or(base, |parent| places[usize::from(parent)]);
            self.push(token);
            places.push(self.at);
            let _ = self.mask();
        }
        self.at = base;
    }

    fn accepts(&mut self, tokens: &[u32], parents: &[Option<u16>]) -> Vec<bool> {
        let base = self.at;
        let mut places: Vec<Option<usize>> = Vec::with_capacity(tokens.len());
        for (&token, parent) in tokens.iter().zip(parents) {
            let above = parent.map_or(Some(base), |parent| places[usize::from(parent)]);
            let place = above.and_then(|above| {
                self.at = above;
                if above != base && self.eos().contains(&self.nodes[above].token) {
                    return None;
                }
                let known = self.nodes[above].mask.get();
                let allowed =
                    known.map(|mask| mask.as_ref().is_some_and(|mask| mask.allows(token)));
                self.push(token);
                allowed
                    .unwrap_or_else(|| self.is_readable())
                    .then_some(self.at)
            });
            places.push(place);
        }
        self.at = base;
        places.into_iter().map(|place| place.is_some()).collect()
    }

    fn forced(&mut self, max: usize) -> Vec<u32> {
        let mut forced = Vec::new();
        while forced.len() < max
            && let Some(token) = self.mask().and_then(Mask::only)
            && !self.eos().contains(&token)
        {
            self.push(token);
            forced.push(token);
        }
        self.pop(forced.len());
        forced
    }

    fn cloned(&self) -> Box<dyn GrammarState> {
        let mut clone = Self::new(self.grammar.clone());
        clone.committed.clone_from(&self.committed);
        self.path().into_iter().for_each(|token| clone.push(token));
        Box::new(clone)
    }
}

impl fmt::Debug for TextState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TextState({:?}, {:?})", self.committed, self.path())
    }
}

impl Parser {
    fn new(start: StartParser) -> Self {
        Self {
            matcher: start.matcher(),
            start,
            consumed: Vec::new(),
            was_replaced: false,
            own: None,
        }
    }

    /// Goes on with another lexer, from the start of the text.
    fn go_on_with(&mut self, start: StartParser) {
        self.start = start;
        self.own = None;
        self.reset();
    }

    /// Goes back to the start of the text.
    fn reset(&mut self) {
        self.matcher = self.start.matcher();
        self.consumed.clear();
    }

    /// The mask after `tokens`, two parts of a text.
    fn mask(&mut self, grammar: &CompiledGrammar, tokens: [&[u32]; 2]) -> anyhow::Result<Mask> {
        match self.go_to(grammar, tokens)? {
            Reached::Refused => Ok(Mask::of(&[])),
            Reached::End => Ok(Mask::of(&grammar.eos)),
            Reached::Place => match self.matcher.compute_mask_or_eos() {
                Err(error) if is_dead_end(&error) => {
                    self.reset();
                    Ok(Mask::of(&[]))
                }
                set => Ok(Mask::from_words(set?.as_slice(), grammar.vocab_size)),
            },
        }
    }

    /// Consumes `tokens`, two parts of a text, as far as the grammar allows them.
    fn go_to(&mut self, grammar: &CompiledGrammar, tokens: [&[u32]; 2]) -> anyhow::Result<Reached> {
        let wanted = || tokens.into_iter().flatten().copied();
        let common = wanted().zip(&self.consumed).take_while(|(a, b)| a == *b);
        let common = common.count();
        let surplus = self.consumed.len() - common;
        // Grammars whose lexemes count tokens cannot go back.
        if surplus > 0 && self.matcher.rollback(surplus).is_err() {
            self.reset();
        }
        self.consumed.truncate(common);
        let rest: Vec<u32> = wanted().skip(self.consumed.len()).collect();
        let ends = |token: &u32| grammar.eos.contains(token);
        let before_end = rest.iter().position(ends).unwrap_or(rest.len());
        let mut count = 0;
        for piece in rest[..before_end].chunks(REPLAYED_AT_ONCE) {
            if count > 0 {
                // Each mask renews what the lexer may spend, as it did when the text was written.
                match self.matcher.compute_mask_or_eos() {
                    Err(error) if is_dead_end(&error) => {
                        self.reset();
                        return Ok(Reached::Refused);
                    }
                    mask => drop(mask?),
                }
            }
            let read = self.matcher.try_consume_tokens(piece)?;
            self.consumed.extend(&piece[..read]);
            count += read;
            if read < piece.len() {
                break;
            }
        }
        Ok(match count {
            count if count < before_end => Reached::Refused,
            count if count < rest.len() => Reached::End,
            _ => Reached::Place,
        })
    }
}

/// Tokens that are consumed without a mask between them.
const REPLAYED_AT_ONCE: usize = 32;

/// Whether a parser stopped because the vocabulary has no token that goes on, and not because of a limit.
fn is_dead_end(error: &anyhow::Error) -> bool {
    let reason = StopReason::NoExtensionBias.to_string();
    error.to_string().starts_with(&reason)
}
