//! The context in which requests are validated.

use super::adapters::Adapters;
use super::defaults::SamplingDefaults;
use super::stored::ResponseStore;
use foretoken_core::error::{Error, FieldPath, RequestErrorKind, Result};
use foretoken_core::model::{Adapter, EmbeddingSpec, RerankerSpec};
use foretoken_core::sampling::{Grammar, ThoughtMarks};
use foretoken_engine::spec::CacheScope;
use foretoken_engine::{CacheKey, RequestLimits};
use foretoken_text::grammar::{ClientId, Compiler, GrammarSource, Waiter};
use foretoken_text::{LiteralText, ReasoningFormat, Text, ToolFormat};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// The tag under which Ollama's API lists names that have none, and that clients then also send elsewhere.
pub(super) const LATEST: &str = ":latest";

/// What `find` finds for a name, or else for the name without Ollama's tag.
pub(super) fn find_tagged<'n, T>(name: &'n str, find: impl Fn(&'n str) -> Option<T>) -> Option<T> {
    find(name).or_else(|| find(name.strip_suffix(LATEST)?))
}

/// The API key that a request has, by its place among those that are accepted.
#[derive(Debug, Clone, Copy, Hash)]
pub(super) struct KeyIndex(pub usize);

/// The machine, or the network, that a request comes from.
#[derive(Debug, Clone, Copy, Hash)]
pub(super) struct Peer(IpAddr);

impl Peer {
    /// The peer of `address`. For IPv6 it is the /64 network, because one client may have all addresses of such a
    /// network.
    pub fn new(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            address => address,
        })
    }
}

/// The client whose requests have this key and come from `peer`.
pub(super) fn client_id(key: Option<KeyIndex>, peer: Option<Peer>) -> ClientId {
    let mut hasher = DefaultHasher::new();
    (key, peer).hash(&mut hasher);
    ClientId(hasher.finish())
}

/// The tokenizer and template, the engine's limits, the served model names and how the model writes.
pub(super) struct Context<'a> {
    pub text: &'a Text,
    pub limits: &'a RequestLimits,
    pub model_names: &'a [String],
    /// `None` = there are none.
    pub adapters: Option<&'a Adapters>,
    /// Sampling options for requests that do not set their own.
    pub defaults: &'a SamplingDefaults,
    /// Fingerprint of the model and the program, for replies.
    pub fingerprint: Option<&'a Arc<str>>,
    /// The format in which the model writes tool calls; `None` = unknown.
    pub tool_format: Option<ToolFormat>,
    /// The format in which the model marks reasoning; `None` = its text is content as it is.
    pub reasoning_format: Option<ReasoningFormat>,
    /// How thoughts in that format are marked; `None` = no mark closes them.
    pub thoughts: Option<&'a Arc<ThoughtMarks>>,
    /// Maximum number of tokens of a thought, for requests that do not say it; `None` = no limit.
    pub reasoning_budget: Option<usize>,
    /// Reads chats in which names of special tokens are text; `None` = they are tokens.
    pub literal: Option<&'a LiteralText>,
    /// The key that the client sent.
    pub api_key: Option<&'a str>,
    /// The key of scopes, so that clients cannot find two salts of one scope.
    pub cache_key: &'a CacheKey,
    /// Compiles grammars for the tokenizer.
    pub grammars: &'a Compiler,
    /// The client that waits while grammars are compiled.
    pub waiter: Waiter<'a>,
    /// The way in which texts are embedded; `None` = they are not embedded.
    pub embeddings: Option<&'a EmbeddingSpec>,
    /// The way in which the model judges documents; `None` = it is no reranker.
    pub reranker: Option<&'a RerankerSpec>,
    /// The responses that clients may continue.
    pub responses: &'a Arc<ResponseStore>,
    /// Whether a `max_tokens` that the context has no room for is refused, and not cut to what fits.
    pub strict_max_tokens: bool,
}

impl Context<'_> {
    /// The scope of requests with this `cache_salt`: only those with the same API key and salt share
    /// what drafters learn from texts, because the time of a reply would tell others what was said.
    pub fn scope(&self, salt: Option<&str>) -> CacheScope {
        self.cache_key.scope(self.api_key, salt)
    }

    /// The grammar of `source`, which the request has in `field`.
    ///
    /// # Errors
    /// See [`Compiler::compile_for`].
    pub fn compile(&self, field: impl Into<FieldPath>, source: &GrammarSource) -> Result<Grammar> {
        self.grammars.compile_for(&self.waiter, field, source)
    }

    /// The model that requests call `wanted`, perhaps with Ollama's tag; `None` = the base model.
    ///
    /// # Errors
    /// `NotFound`, if `wanted` is not served.
    pub fn model(&self, wanted: Option<&str>) -> Result<ServedModel> {
        let Some(name) = wanted else {
            return Ok(self.base());
        };
        find_tagged(name, |name| self.known(name)).ok_or_else(|| self.not_served(name))
    }

    /// The error of a request for a model that is not served.
    pub(super) fn not_served(&self, name: &str) -> Error {
        let mut served = self.model_names.to_vec();
        let adapters = self.adapters.iter();
        for adapter in adapters.flat_map(|adapters| adapters.loaded()) {
            served.push(adapter.name().to_owned());
        }
        let served = served.join(", ");
        Error::request(
            RequestErrorKind::NotFound,
            Some("model"),
            format!("the model `{name}` does not exist; served: {served}"),
        )
    }

    /// The model of this name, as it is.
    fn known(&self, name: &str) -> Option<ServedModel> {
        if self.model_names.iter().any(|served| served == name) {
            return Some(self.base());
        }
        let loaded = self.adapters?.get(name)?;
        Some(ServedModel {
            name: name.to_owned(),
            adapter: Some(loaded.adapter),
        })
    }

    fn base(&self) -> ServedModel {
        ServedModel {
            name: self.model_names.first().cloned().unwrap_or_default(),
            adapter: None,
        }
    }
}

/// The model that a request's `model` names.
pub(super) struct ServedModel {
    /// The model's name in answers.
    pub name: String,
    /// `None` = it is the base model.
    pub adapter: Option<Arc<dyn Adapter>>,
}
