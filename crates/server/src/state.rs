//! The state that all handlers share.

use super::adapters::{Adapters, Loaded};
use super::bodies::Bodies;
use super::context::{Context, KeyIndex, find_tagged};
use super::defaults::SamplingDefaults;
use super::embedding_turns::Turns;
use super::encoding::SentBody;
use super::limits::HttpLimits;
use super::load::RequestsInFlight;
use super::origin::{OriginOptions, Origins};
use super::reply;
use super::server_info::ServerInfo;
use super::stored::ResponseStore;
use super::tls::Tls;
use super::trace::Observer;
use foretoken_core::error::{Error, Result};
use foretoken_core::model::{EmbeddingSpec, RerankerSpec};
use foretoken_core::sampling::ThoughtMarks;
use foretoken_engine::EngineHandle;
use foretoken_text::grammar::{Compiler, Waiter};
use foretoken_text::{LiteralText, ReasoningFormat, Text, ToolFormat, thought_marks};
use schemars::JsonSchema;
use serde::Serialize;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

/// The state that all handlers share.
#[derive(Clone)]
pub struct AppState {
    pub(super) engine: EngineHandle,
    pub(super) text: Arc<Text>,
    pub(super) model_names: Arc<[String]>,
    /// `None` = there are none.
    pub(super) adapters: Option<Arc<Adapters>>,
    /// Any of which is accepted; empty = none is needed.
    pub(super) api_keys: Arc<[String]>,
    pub(super) limits: HttpLimits,
    pub(super) tls: Option<Tls>,
    pub(super) origins: Arc<Origins>,
    pub(super) info: Arc<ServerInfo>,
    pub(super) load: RequestsInFlight,
    /// The observer that is told of requests that have ended.
    pub(super) observer: Option<Arc<dyn Observer>>,
    bodies: Arc<Bodies>,
    /// Whether the server has the page.
    pub(super) ui: bool,
    strict_max_tokens: bool,
    /// What the names of metrics that vLLM has, too, begin with.
    pub(super) metrics_prefix: Arc<str>,
    pub(super) defaults: Arc<SamplingDefaults>,
    grammars: Arc<Compiler>,
    /// The way in which texts are embedded; `None` = they are not embedded.
    embeddings: Option<EmbeddingSpec>,
    /// The way in which the model judges documents; `None` = it is no reranker.
    reranker: Option<RerankerSpec>,
    pub(super) embedding_turns: Arc<Turns>,
    pub(super) responses: Arc<ResponseStore>,
    tool_format: Option<ToolFormat>,
    reasoning_format: Option<ReasoningFormat>,
    /// How thoughts in that format are marked.
    thoughts: Option<Arc<ThoughtMarks>>,
    reasoning_budget: Option<usize>,
    /// Reads chats in which names of special tokens are text; `None` = they are tokens.
    literal: Option<Arc<LiteralText>>,
    created: u64,
}

impl fmt::Debug for AppState {
    /// Without keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppState({})", self.model_names.join(", "))
    }
}

impl AppState {
    /// Serves `engine` under `model_names`, of which the first is used in answers.
    /// No API key is required unless one is set.
    pub fn new(engine: EngineHandle, text: Arc<Text>, model_names: Vec<String>) -> Self {
        let limits = HttpLimits::default();
        Self {
            embedding_turns: Arc::new(Turns::new(engine.limits(), &limits)),
            thoughts: marks(&text, &engine, text.channels()),
            engine,
            grammars: Arc::new(Compiler::new(text.clone())),
            tool_format: text.tool_format(),
            reasoning_format: text.channels(),
            reasoning_budget: None,
            literal: None,
            text,
            embeddings: None,
            reranker: None,
            responses: Arc::default(),
            model_names: model_names.into(),
            adapters: None,
            info: Arc::default(),
            load: RequestsInFlight::default(),
            observer: None,
            api_keys: Arc::default(),
            defaults: Arc::default(),
            bodies: Arc::new(Bodies::new(&limits)),
            limits,
            tls: None,
            origins: Arc::default(),
            ui: true,
            strict_max_tokens: false,
            metrics_prefix: "foretoken".into(),
            created: reply::now(),
        }
    }

    /// Requires `Authorization: Bearer <key>` with one of `keys`, if there are any, on all routes except `/health`,
    /// `/healthz`, `/livez`, `/readyz`, `/ping`, `/load`, `/version`, `/metrics`, `/api/version` and the page.
    pub fn with_api_keys(mut self, keys: Vec<String>) -> Self {
        self.api_keys = keys.into();
        self
    }

    /// Sets the adapters that are served beside the model; `None`, the default = there are none.
    pub fn with_adapters(mut self, adapters: Option<Arc<Adapters>>) -> Self {
        self.adapters = adapters;
        self
    }

    /// Sets what requests that do not say otherwise are sampled with.
    pub fn with_sampling_defaults(mut self, defaults: SamplingDefaults) -> Self {
        self.defaults = Arc::new(defaults);
        self
    }

    /// Says what is served, and how.
    pub fn with_info(mut self, info: ServerInfo) -> Self {
        self.info = Arc::new(info);
        self
    }

    /// Sets how the model writes tool calls; `None` = as its chat template says.
    pub fn with_tool_call_parser(mut self, format: Option<ToolFormat>) -> Self {
        let named = format.map(|format| self.text.meant_tool_format(format));
        self.tool_format = named.or(self.tool_format);
        self
    }

    /// Sets how the model marks what it thinks; `None` = in channels, if its chat template has them, or else its text is
    /// content as it is.
    pub fn with_reasoning_parser(mut self, format: Option<ReasoningFormat>) -> Self {
        self.reasoning_format = format.or(self.reasoning_format);
        self.thoughts = marks(&self.text, &self.engine, self.reasoning_format);
        self
    }

    /// Sets how many tokens a model may think before its thought is closed, in answers to requests that do not say it;
    /// `None`, the default = no limit. Call it after [`AppState::with_reasoning_parser`].
    ///
    /// # Errors
    /// `Setup`, if the model does not mark its thoughts, or no mark closes them.
    pub fn with_reasoning_budget(mut self, budget: Option<usize>) -> Result<Self> {
        if budget.is_some() && self.thoughts.is_none() {
            let why = match self.reasoning_format {
                None => "needs --reasoning-parser, which says how thoughts are marked",
                Some(_) => "is not possible with this model: no mark closes all of its thoughts",
            };
            return Err(Error::setup(format!("--reasoning-budget {why}")));
        }
        self.reasoning_budget = budget;
        Ok(self)
    }

    /// Sets whether names of special tokens in what clients write in chats are tokens, the default, or text.
    ///
    /// # Errors
    /// `Setup`, if the tokenizer cannot tell them apart.
    pub fn with_special_parsed(mut self, parsed: bool) -> Result<Self> {
        let literal = || LiteralText::new(self.text.clone()).map(Arc::new);
        self.literal = (!parsed).then(literal).transpose()?;
        Ok(self)
    }

    /// Sets how texts are embedded; `None`, the default = they are not.
    pub fn with_embeddings(mut self, spec: Option<EmbeddingSpec>) -> Self {
        self.embeddings = spec;
        self
    }

    /// Sets how the model judges whether a document answers a query; `None`, the default = it does not.
    pub fn with_reranker(mut self, spec: Option<RerankerSpec>) -> Self {
        self.reranker = spec;
        self
    }

    /// Sets with what clients speak TLS; `None`, the default = without.
    pub fn with_tls(mut self, tls: Option<Tls>) -> Self {
        self.tls = tls;
        self
    }

    /// Sets the limits of connections and request bodies.
    pub fn with_limits(mut self, limits: HttpLimits) -> Self {
        self.bodies = Arc::new(Bodies::new(&limits));
        self.embedding_turns = Arc::new(Turns::new(self.engine.limits(), &limits));
        self.limits = limits;
        self
    }

    /// Sets which hosts and origins are allowed, and the host that the operator chose to listen on.
    pub fn with_origins(mut self, options: OriginOptions, host: &str) -> Self {
        self.origins = Arc::new(Origins::new(options, host));
        self
    }

    /// Sets who is told of requests that have ended.
    pub fn with_observer(mut self, observer: Option<Arc<dyn Observer>>) -> Self {
        self.observer = observer;
        self
    }

    /// Sets whether `/` is the page that shows speculation at work.
    pub fn with_ui(mut self, ui: bool) -> Self {
        self.ui = ui;
        self
    }

    /// Sets whether a `max_tokens` that the context has no room for is refused. It is else cut to what fits.
    pub fn with_strict_max_tokens(mut self, strict: bool) -> Self {
        self.strict_max_tokens = strict;
        self
    }

    /// Sets how many responses are stored at most; 1000, the default. With 0, requests to store one are refused.
    pub fn with_max_stored_responses(mut self, max: usize) -> Self {
        self.responses = Arc::new(ResponseStore::new(max));
        self
    }

    /// Sets what the names of metrics that vLLM has, too, begin with; `foretoken`, the default.
    pub fn with_metrics_prefix(mut self, prefix: &str) -> Self {
        self.metrics_prefix = prefix.into();
        self
    }

    /// Says whether the listener is on a loopback address.
    pub(super) fn on_loopback(mut self, loopback: bool) -> Self {
        let origins = Origins::clone(&self.origins).on_loopback(loopback);
        self.origins = Arc::new(origins);
        self
    }

    /// Receives `body`, and runs `read` on it on a thread for blocking work, because tokenizing a long
    /// prompt takes a while. Few bodies are read at a time, in the order of their arrival. One that waits for a
    /// grammar lets the next one be read.
    ///
    /// # Errors
    /// The errors of `read`, or that the body could not be received.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        body: SentBody,
        read: impl FnOnce(&Context<'_>, &[u8]) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (key, client) = (body.key, body.client);
        let body = self.bodies.receive(body).await?;
        let turn = self.bodies.turn(body.bytes.len()).await?;
        let state = self.clone();
        let read = move || {
            let turn = Cell::new(Some(turn));
            let waiter = Waiter {
                client,
                begins: &|| drop(turn.take()),
            };
            let context = Context {
                waiter,
                ..state.context(key)
            };
            let result = read(&context, &body.bytes);
            // Even if the client is gone, not earlier.
            drop((body, turn));
            result
        };
        tokio::task::spawn_blocking(read)
            .await
            .map_err(|e| Error::internal(format!("reading the request failed: {e}")))?
    }

    /// The context in which requests with this key are validated.
    pub(super) fn context(&self, key: Option<KeyIndex>) -> Context<'_> {
        Context {
            text: &self.text,
            limits: self.engine.limits(),
            model_names: &self.model_names,
            adapters: self.adapters.as_deref(),
            defaults: &self.defaults,
            fingerprint: self.info.fingerprint.as_ref(),
            grammars: &self.grammars,
            waiter: Waiter::default(),
            embeddings: self.embeddings.as_ref(),
            reranker: self.reranker.as_ref(),
            responses: &self.responses,
            tool_format: self.tool_format,
            reasoning_format: self.reasoning_format,
            thoughts: self.thoughts.as_ref(),
            reasoning_budget: self.reasoning_budget,
            literal: self.literal.as_deref(),
            api_key: key.and_then(|KeyIndex(at)| Some(self.api_keys.get(at)?.as_str())),
            cache_key: self.engine.cache_key(),
            strict_max_tokens: self.strict_max_tokens,
        }
    }

    /// Checks that new requests are accepted.
    ///
    /// # Errors
    /// `ShuttingDown`, if they are not.
    pub(super) fn ready(&self) -> Result<()> {
        if self.engine.is_draining() || self.engine.has_ended() {
            return Err(Error::shutting_down());
        }
        Ok(())
    }

    /// All models as `/v1/models` describes them: the names of the base model, then the adapters.
    pub(super) fn models(&self) -> Vec<ModelObject> {
        let base = self.model_names.iter().map(|name| self.model(name));
        let adapters = self.adapters.iter();
        let adapters = adapters.flat_map(|adapters| adapters.all().clone());
        base.chain(adapters.map(|one| self.adapter(&one))).collect()
    }

    /// The model that requests call `wanted`, perhaps with Ollama's tag, as `/v1/models` describes it.
    ///
    /// # Errors
    /// The errors of [`Context::model`].
    pub(super) fn listed(&self, wanted: &str) -> Result<ModelObject> {
        let find = |name: &str| self.models().into_iter().find(|model| model.id == name);
        find_tagged(wanted, find).ok_or_else(|| self.context(None).not_served(wanted))
    }

    /// An adapter as `/v1/models` describes it.
    pub(super) fn adapter(&self, loaded: &Loaded) -> ModelObject {
        let adapter = &loaded.adapter;
        ModelObject {
            created: loaded.created,
            root: adapter.folder().to_string_lossy().into_owned(),
            parent: self.model_names.first().cloned(),
            ..self.model(adapter.name())
        }
    }

    /// A name of the base model as `/v1/models` describes it.
    fn model(&self, name: &str) -> ModelObject {
        let own = Some(self.info.model.as_str()).filter(|own| !own.is_empty());
        ModelObject {
            id: name.to_owned(),
            object: "model",
            created: self.created,
            owned_by: "foretoken",
            root: own.unwrap_or(name).to_owned(),
            parent: None,
            max_model_len: self.engine.limits().max_model_len,
        }
    }
}

/// How thoughts in `format` are marked, if the model of `engine` can close them.
fn marks(
    text: &Arc<Text>,
    engine: &EngineHandle,
    format: Option<ReasoningFormat>,
) -> Option<Arc<ThoughtMarks>> {
    let marks = thought_marks(text, format?)?;
    let may_come = |id: &u32| (*id as usize) < engine.limits().vocab_size;
    let can_close = marks.closing().iter().all(may_come);
    can_close.then(|| Arc::new(marks))
}

/// A name of the model, or an adapter.
#[derive(Serialize, JsonSchema)]
pub(super) struct ModelObject {
    pub(super) id: String,
    #[schemars(extend("const" = "model"))]
    object: &'static str,
    pub(super) created: u64,
    owned_by: &'static str,
    /// The folder of an adapter; otherwise the operator's name of the model, whose tokenizer clients may load by it.
    pub(super) root: String,
    /// The base model of an adapter.
    pub(super) parent: Option<String>,
    /// Tokens of a prompt and its answer together.
    pub(super) max_model_len: usize,
}
