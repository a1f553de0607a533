//! Reads request bodies as the routes do, up to the engine.

use super::context::Context;
use super::defaults::SamplingDefaults;
use foretoken_core::error::Result;
use foretoken_core::model::{EmbeddingSpec, Pooling};
use foretoken_engine::{CacheKey, RequestLimits};
use foretoken_text::grammar::Compiler;
use foretoken_text::{Text, ToolFormat};
use std::sync::{Arc, LazyLock};

/// The APIs that read bodies.
#[derive(Debug, Clone, Copy)]
pub enum FuzzedApi {
    /// Chats of a model that writes calls in this format.
    Chat(ToolFormat),
    /// `/v1/completions`.
    Completion,
    /// `/v1/responses`.
    Response,
    /// `/v1/messages`.
    Message,
    /// `/api/chat`.
    OllamaChat,
    /// `/api/generate`.
    OllamaGenerate,
    /// `/tokenize`.
    Tokenize,
    /// `/detokenize`.
    Detokenize,
    /// `/v1/embeddings`.
    Embedding,
    /// `/v1/rerank`.
    Rerank,
    /// `/v1/score`.
    Score,
    /// `/infill`.
    Infill,
}

/// Reads `body` as one of `api`.
///
/// # Errors
/// The caller's, or an internal one, which would be ours.
pub fn read(text: &Arc<Text>, body: &[u8], api: FuzzedApi) -> Result<()> {
    static CACHE_KEY: LazyLock<CacheKey> = LazyLock::new(CacheKey::random);
    let limits = RequestLimits {
        max_model_len: 4096,
        vocab_size: text.vocab_size(),
        max_logprobs: 20,
        max_waiting: 64,
        max_prompt_tokens: 1 << 17,
        spec_length: 4,
        generates: true,
        embedding_size: 8,
        takes_adapters: false,
    };
    let embeddings = EmbeddingSpec::new(Pooling::Last, true);
    let context = Context {
        text,
        limits: &limits,
        model_names: &["model".into()],
        adapters: None,
        defaults: &SamplingDefaults::default(),
        fingerprint: None,
        tool_format: Some(match api {
            FuzzedApi::Chat(format) => format,
            _ => ToolFormat::Hermes,
        }),
        reasoning_format: None,
        thoughts: None,
        reasoning_budget: None,
        literal: None,
        api_key: None,
        cache_key: &CACHE_KEY,
        strict_max_tokens: false,
        grammars: &Compiler::new(text.clone()),
        waiter: foretoken_text::grammar::Waiter::default(),
        embeddings: Some(&embeddings),
        reranker: None,
        responses: &Arc::default(),
    };
    match api {
        FuzzedApi::Chat(_) => context.chat(body).map(drop),
        FuzzedApi::Completion => context.completion(body).map(drop),
        FuzzedApi::Response => context.response(body).map(drop),
        FuzzedApi::Message => context.message(body).map(drop),
        FuzzedApi::OllamaChat => context.ollama_chat(body).map(drop),
        FuzzedApi::OllamaGenerate => context.ollama_generate(body).map(drop),
        FuzzedApi::Tokenize => context.tokenize(body).map(drop),
        FuzzedApi::Detokenize => context.detokenize(body).map(drop),
        FuzzedApi::Embedding => context.embedding(body).map(drop),
        FuzzedApi::Rerank => context.rerank(body).map(drop),
        FuzzedApi::Score => context.score(body).map(drop),
        FuzzedApi::Infill => context.infill(body).map(drop),
    }
}
