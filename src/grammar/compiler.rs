//! Compiles grammars and keeps those that were used last, and what was wrong with sources.

use super::compiled::{Grammar, lock};
use super::place;
use super::source::GrammarSource;
use super::state::GrammarState;
use super::vocabulary::{GrammarTokens, vocabulary};
use crate::error::{Error, FieldPath, Result, caught_here};
use llguidance::ParserFactory;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock};

/// Maximum number of sources whose outcome is kept.
const MAX_KEPT: usize = 64;
/// Maximum bytes of the lexers of the grammars that are kept, approximately. They grow with use.
const MAX_KEPT_BYTES: usize = 256 << 20;
/// Stack of the thread that compiles: what a source can nest is bounded, and a frame takes up to some KiB.
const STACK_BYTES: usize = 64 << 20;

/// Compiles grammars for one tokenizer. What it needs of the vocabulary is built with the first grammar.
pub struct Compiler {
    tokens: Arc<dyn GrammarTokens>,
    factory: OnceLock<Option<ParserFactory>>,
    /// Those used last at the end.
    kept: Mutex<VecDeque<CachedOutcome>>,
}

/// A source that was asked for.
struct CachedOutcome {
    /// The source as llguidance reads it.
    key: String,
    /// Set by the first request that asks for it. Equal ones wait, others do not.
    outcome: Arc<OnceLock<Outcome>>,
}

/// A grammar, or what is wrong with its source, in words that follow the name of its field; an error if the
/// fault is ours.
type Outcome = Result<Result<Grammar, String>>;

impl CachedOutcome {
    fn grammar(&self) -> Option<&Grammar> {
        self.outcome.get()?.as_ref().ok()?.as_ref().ok()
    }

    /// Whether the next request gets this outcome.
    fn is_good(&self) -> bool {
        match self.outcome.get() {
            Some(Ok(Ok(grammar))) => !grammar.has_failed(),
            Some(Err(_)) => false,
            Some(Ok(Err(_))) | None => true,
        }
    }
}

impl Compiler {
    /// A compiler for the vocabulary of `tokens`.
    pub fn new(tokens: Arc<dyn GrammarTokens>) -> Self {
        Self {
            tokens,
            factory: OnceLock::new(),
            kept: Mutex::default(),
        }
    }

    /// The grammar of `source`, which the request has in `field`. May take some hundred milliseconds: call
    /// it on a thread that may block. Callers bound how many sources are compiled at once.
    ///
    /// # Errors
    /// `Invalid`, naming the field, and the place in it if the source is wrong, not supported, too large, or
    /// matches no text.
    pub fn compile(&self, field: impl Into<FieldPath>, source: &GrammarSource) -> Result<Grammar> {
        let field = &field.into();
        let top = source.top_level(field)?;
        let key = serde_json::to_string(&top)
            .map_err(|e| Error::internal(format!("a grammar cannot be written: {e}")))?;
        let outcome = self.outcome(key);
        let outcome = outcome.get_or_init(|| {
            on_own_stack(|| {
                let built = caught_here(|| self.build(source, top));
                built.unwrap_or_else(|why| Ok(Err(format!("is not supported: {why}"))))
            })?
        });
        let refused = |what| Error::field(field, format!(" {what}"));
        outcome.clone()?.map_err(refused)
    }

    fn build(&self, source: &GrammarSource, top: TopLevelGrammar) -> Outcome {
        if let Err(what) = place::check_numbers(source) {
            return Ok(Err(what));
        }
        let factory = self.factory()?;
        let parser = match factory.create_parser(top) {
            Ok(parser) => parser,
            Err(error) => {
                let env = factory.tok_env().clone();
                let check =
                    |top| GrammarInit::Serialized(top).to_internal(Some(env.clone()), limits());
                // Where the parser panics, it is not the parts that are checked, but the whole.
                let check = |top| caught_here(|| check(top).err()).unwrap_or_default();
                return Ok(Err(place::describe(source, &error, check)));
            }
        };
        let grammar = Grammar::new(parser);
        Ok(match GrammarState::new(grammar.clone()).mask() {
            None => Err("is too complex".into()),
            Some(mask) if mask.is_within(&[]) => Err("matches no text".into()),
            Some(_) => Ok(grammar),
        })
    }

    fn factory(&self) -> Result<&ParserFactory> {
        let build = || {
            let env = vocabulary(self.tokens.clone())?;
            let capabilities = InferenceCapabilities {
                ff_tokens: true,
                ..InferenceCapabilities::default()
            };
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            let mut factory = ParserFactory::new(&env, capabilities, &slices).ok()?;
            factory.quiet();
            *factory.limits_mut() = limits();
            Some(factory)
        };
        let factory = self.factory.get_or_init(build).as_ref();
        factory.ok_or_else(|| {
            Error::internal(
                "structured output is not possible: the tokenizer has no token that ends a text",
            )
        })
    }

    /// Where the outcome of a source is, or will be.
    fn outcome(&self, key: String) -> Arc<OnceLock<Outcome>> {
        let mut kept = lock(&self.kept);
        kept.retain(CachedOutcome::is_good);
        let known = kept.iter().position(|entry| entry.key == key);
        if let Some(entry) = known.and_then(|place| kept.remove(place)) {
            let outcome = entry.outcome.clone();
            kept.push_back(entry);
            return outcome;
        }
        let bytes = |entry: &CachedOutcome| entry.grammar().map_or(0, Grammar::bytes);
        let mut total: usize = kept.iter().map(bytes).sum();
        while kept.len() >= MAX_KEPT || total > MAX_KEPT_BYTES {
            let oldest = kept.pop_front();
            total -= oldest.map_or(0, |entry| bytes(&entry)).min(total);
        }
        let outcome: Arc<OnceLock<Outcome>> = Arc::default();
        kept.push_back(CachedOutcome {
            key,
            outcome: outcome.clone(),
        });
        outcome
    }
}

/// What a grammar may cost: about 20 ms to compile its lexemes, and 15 ms for the worst mask.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 50_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Runs `work` on a thread with a large stack: the parsers of sources are recursive.
fn on_own_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T> {
    let failed = |what: String| Error::internal(format!("compiling a grammar failed: {what}"));
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("grammar".into())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)
            .map_err(|e| failed(e.to_string()))?
            .join()
            .map_err(|_| failed("it panicked".into()))
    })
}
