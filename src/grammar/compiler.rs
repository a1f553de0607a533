//! Compiles grammars and keeps those that were used last.

use super::compiled::{Grammar, lock};
use super::place;
use super::source::GrammarSource;
use super::state::GrammarState;
use super::vocabulary::{Tokens, vocabulary};
use crate::error::{Error, Result, caught_here};
use llguidance::ParserFactory;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock};

/// Maximum number of compiled grammars that are kept.
const MAX_KEPT: usize = 64;
/// Maximum bytes of the lexers of the grammars that are kept, approximately. They grow with use.
const MAX_KEPT_BYTES: usize = 256 << 20;
/// Stack of the thread that compiles: what a source can nest is bounded, and a frame takes up to some KiB.
const STACK_BYTES: usize = 64 << 20;

/// Compiles grammars for one tokenizer. What it needs of the vocabulary is built with the first grammar.
pub struct Compiler {
    tokens: Arc<dyn Tokens>,
    factory: OnceLock<Option<ParserFactory>>,
    /// The sources and their grammars, those used last at the end.
    kept: Mutex<VecDeque<(String, Grammar)>>,
    /// Held while a grammar is compiled: one at a time, so that strangers' grammars take one core at most.
    compiling: Mutex<()>,
}

impl Compiler {
    /// A compiler for the vocabulary of `tokens`.
    pub fn new(tokens: Arc<dyn Tokens>) -> Self {
        Self {
            tokens,
            factory: OnceLock::new(),
            kept: Mutex::default(),
            compiling: Mutex::default(),
        }
    }

    /// The grammar of `source`, which the request has in `field`. May take some hundred milliseconds: call
    /// it on a thread that may block.
    ///
    /// # Errors
    /// `Invalid`, naming the field, and the place in it if the source is wrong, not supported, too large, or
    /// matches no text.
    pub fn compile(&self, field: &str, source: &GrammarSource) -> Result<Grammar> {
        let top = source.top_level(field)?;
        let key = serde_json::to_string(&top)
            .map_err(|e| Error::internal(format!("a grammar cannot be written: {e}")))?;
        if let Some(grammar) = self.kept(&key) {
            return Ok(grammar);
        }
        place::check_numbers(field, source)?;
        let _one = lock(&self.compiling);
        // Another request may have compiled it meanwhile.
        if let Some(grammar) = self.kept(&key) {
            return Ok(grammar);
        }
        let built = on_own_stack(|| caught_here(|| self.build(field, source, top)))?;
        let grammar = built
            .map_err(|why| Error::invalid(field, format!("{field} is not supported: {why}")))??;
        self.keep(key, grammar.clone());
        Ok(grammar)
    }

    fn build(&self, field: &str, source: &GrammarSource, top: TopLevelGrammar) -> Result<Grammar> {
        let factory = self.factory()?;
        let parser = factory.create_parser(top).map_err(|error| {
            let env = factory.tok_env().clone();
            let check = |top| GrammarInit::Serialized(top).to_internal(Some(env.clone()), limits());
            // Where the parser panics, it is not the parts that are checked, but the whole.
            place::error(field, source, &error, |top| {
                caught_here(|| check(top).err()).unwrap_or_default()
            })
        })?;
        let grammar = Grammar::new(parser);
        let refused = |what: &str| Err(Error::invalid(field, format!("{field} {what}")));
        match GrammarState::new(grammar.clone()).mask() {
            None => refused("is too complex"),
            Some(mask) if mask.is_within(&[]) => refused("matches no text"),
            Some(_) => Ok(grammar),
        }
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

    fn kept(&self, key: &str) -> Option<Grammar> {
        let mut kept = lock(&self.kept);
        let place = kept.iter().position(|(source, _)| source == key)?;
        let entry = kept.remove(place)?;
        if entry.1.has_failed() {
            return None;
        }
        let grammar = entry.1.clone();
        kept.push_back(entry);
        Some(grammar)
    }

    fn keep(&self, key: String, grammar: Grammar) {
        let mut kept = lock(&self.kept);
        kept.retain(|(_, grammar)| !grammar.has_failed());
        kept.push_back((key, grammar));
        let mut bytes: usize = kept.iter().map(|(_, grammar)| grammar.bytes()).sum();
        while kept.len() > 1 && (kept.len() > MAX_KEPT || bytes > MAX_KEPT_BYTES) {
            let oldest = kept.pop_front();
            bytes -= oldest.map_or(0, |(_, grammar)| grammar.bytes()).min(bytes);
        }
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
