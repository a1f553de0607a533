//! Compiles grammars.

use super::compiled::{CompiledGrammar, lock};
use super::kept::{Kept, Outcome, overloaded};
use super::lane::{ClientId, Lane, Places};
use super::place;
use super::prepare::prepare;
use super::source::GrammarSource;
use super::state::TextState;
use super::vocabulary::{GrammarTokens, vocabulary};
use foretoken_core::error::{Error, FieldPath, Result, caught_here};
use foretoken_core::sampling::{Grammar, GrammarState};
use llguidance::ParserFactory;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use std::sync::{Arc, Mutex, OnceLock};

/// Compiles grammars for one tokenizer. What it needs of the vocabulary is built with the first grammar.
pub struct Compiler {
    builder: Arc<Builder>,
    lane: Arc<Lane>,
    kept: Mutex<Kept>,
    waiting: Places,
}

/// The client that waits for a grammar.
pub struct Waiter<'a> {
    /// Clients take turns, and few grammars of each are compiled at once.
    pub client: ClientId,
    /// Called before the client waits.
    pub begins: &'a dyn Fn(),
}

impl Default for Waiter<'_> {
    fn default() -> Self {
        Self {
            client: ClientId::default(),
            begins: &|| (),
        }
    }
}

impl Compiler {
    /// A compiler for the vocabulary of `tokens`.
    pub fn new(tokens: Arc<dyn GrammarTokens>) -> Self {
        Self {
            builder: Arc::new(Builder {
                tokens,
                factory: OnceLock::new(),
            }),
            lane: Arc::default(),
            kept: Mutex::default(),
            waiting: Places::default(),
        }
    }

    /// Compiles `source` for no client in particular; see [`Compiler::compile_for`].
    pub fn compile(&self, field: impl Into<FieldPath>, source: &GrammarSource) -> Result<Grammar> {
        self.compile_for(&Waiter::default(), field, source)
    }

    /// The grammar of `source`, which the request of `waiter` has in `field`. It may take seconds: call it on a thread
    /// that may block. Equal sources are compiled once, and clients take turns.
    ///
    /// # Errors
    /// `Invalid`, naming the field, and the place in it if the source is wrong, not supported, too large, takes
    /// too long, or matches no text. `Overloaded`, if too many wait.
    pub fn compile_for(
        &self,
        waiter: &Waiter<'_>,
        field: impl Into<FieldPath>,
        source: &GrammarSource,
    ) -> Result<Grammar> {
        let field = &field.into();
        let top = source.top_level(field)?;
        let key = serde_json::to_string(&top)
            .map_err(|e| Error::internal(format!("a grammar cannot be written: {e}")))?;
        let pending = lock(&self.kept).entry(key)?;
        if let Some(promise) = pending.promise(waiter.client) {
            let (builder, source) = (self.builder.clone(), source.clone());
            let job = move || promise.keep(|| builder.build(&source, top));
            // A job that is not taken breaks its promise.
            self.lane.submit(waiter.client, job);
        }
        let begins = || {
            let place = self.waiting.enter(waiter.client);
            (waiter.begins)();
            place.ok_or_else(|| overloaded("too many requests wait for grammars"))
        };
        let refused = |what| Error::field(field, format!(" {what}"));
        pending.outcome(begins)?.map(Grammar::new).map_err(refused)
    }
}

/// Builds parsers.
struct Builder {
    tokens: Arc<dyn GrammarTokens>,
    factory: OnceLock<Option<ParserFactory>>,
}

impl Builder {
    fn build(&self, source: &GrammarSource, mut top: TopLevelGrammar) -> Outcome {
        if let Err(what) = prepare(&mut top) {
            return Ok(Err(what));
        }
        let factory = self.factory()?;
        let parser = match factory.create_parser(top) {
            Ok(parser) => parser,
            Err(error) => {
                let env = factory.tok_env().clone();
                let check =
                    |top| GrammarInit::Serialized(top).to_internal(Some(env.clone()), limits());
                // If the parser panics on a part, that part counts as correct.
                let check = |top| caught_here(|| check(top).err()).unwrap_or_default();
                return Ok(Err(place::describe(source, &error, check)));
            }
        };
        let grammar = Arc::new(CompiledGrammar::new(parser));
        Ok(match TextState::new(grammar.clone()).mask() {
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
}

/// Returns the limits of a grammar's cost: about 20 ms to compile its lexemes, and 15 ms for the worst mask.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 50_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
