//! How relevant documents are to queries: by their embeddings, or by the answer of a model that says yes or no.

use super::context::{Context, ServedModel};
use super::embedding_turns::Turns;
use super::embeddings::InputOptions;
use super::openai::salt;
use super::prompt::WantedTokens;
use super::request_id::RequestId;
use super::state::AppState;
use super::wire::{CutOff, PromptInput, wrong};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_core::model::{Classifier, EmbeddingSpec, Pooling, RerankerSpec};
use foretoken_core::sampling::{Mask, SamplingParams};
use foretoken_engine::spec::DraftContext;
use foretoken_engine::{CollectedEvents, Request, Series};
use serde_json::{Value, json};
use std::sync::Arc;

/// Maximum number of documents of a request.
pub(super) const MAX_DOCUMENTS: usize = 2048;
/// Maximum number of tokens of all prompts of a request.
const MAX_TOKENS: usize = 1_000_000;
/// Number of the most probable tokens among which the other answer is looked for.
const TOP: usize = 20;
/// The smallest log-probability that counts, because a difference of infinities is no number.
const MIN_LOGPROB: f32 = -9999.0;

/// The task that Qwen3-Reranker has without an instruction.
const INSTRUCTION: &str =
    "Given a web search query, retrieve relevant passages that answer the query";

/// Queries and documents. One query is that of all documents; otherwise each document has its own.
pub(super) struct Pairs {
    pub queries: Vec<String>,
    pub documents: Vec<String>,
    /// The names of their fields.
    pub fields: [&'static str; 2],
}

/// The options of a request.
#[derive(Debug, Default)]
pub(super) struct RelevanceOptions {
    /// What makes a document relevant.
    pub instruction: Option<String>,
    pub max_tokens_per_doc: Option<usize>,
    /// The value of `truncate_prompt_tokens`.
    pub truncate: Option<i64>,
    /// Whether the ends of documents are cut off that are too long, where `truncate` is not given.
    pub cuts_ends: bool,
    pub cache_salt: Option<String>,
}

/// A checked request.
pub(super) struct RelevanceJob {
    /// The model's name in the answer.
    pub model: String,
    /// Number of tokens of all prompts together.
    pub tokens: usize,
    requests: Vec<Request>,
    measure: Measure,
}

/// What the requests are for.
enum Measure {
    /// Embeddings of so many queries, and then of the documents.
    Cosine { queries: usize, spec: EmbeddingSpec },
    /// The next token of each pair: yes or no.
    Answer([u32; 2]),
    /// The last hidden state of each pair.
    Classifier(Arc<Classifier>),
}

impl RelevanceJob {
    /// The relevance of each document.
    ///
    /// # Errors
    /// The errors of the engine.
    pub async fn scores(self, state: &AppState, id: &RequestId) -> Result<Vec<f64>> {
        let _in_flight = state.load.enter();
        let mut series = Series::begin(&state.engine)?;
        let kept = match &self.measure {
            Measure::Cosine { queries, spec } => {
                let size = spec.size(state.engine.limits().embedding_size);
                queries * size * size_of::<f32>()
            }
            Measure::Answer(_) | Measure::Classifier(_) => 0,
        };
        let (turns, series, requests) = (&state.embedding_turns, &mut series, self.requests);
        let _room = turns.room(kept).await?;
        match self.measure {
            Measure::Cosine { queries, spec } => {
                cosines(turns, series, id, requests, (queries, &spec)).await
            }
            Measure::Answer(tokens) => answers(turns, series, id, requests, tokens).await,
            Measure::Classifier(classifier) => {
                classified(turns, series, id, requests, &classifier).await
            }
        }
    }
}

/// The cosines of the documents' embeddings with those of their queries. The first `queries` requests are for the
/// queries.
async fn cosines(
    turns: &Turns,
    series: &mut Series,
    id: &RequestId,
    requests: Vec<Request>,
    (queries, spec): (usize, &EmbeddingSpec),
) -> Result<Vec<f64>> {
    let mut all: Vec<Vec<f32>> = Vec::with_capacity(queries);
    let mut scores = Vec::with_capacity(requests.len() - queries);
    let note = |computed: CollectedEvents| {
        let embedding = spec.project(computed.embedding);
        if all.len() < queries {
            all.push(embedding);
        } else {
            let query = &all[scores.len() % queries];
            scores.push(cosine(query, &embedding));
        }
        Ok(())
    };
    turns.run(series, requests, &id.0, note).await?;
    Ok(scores)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    // As torch does it.
    let lengths = (dot(a, a).sqrt() * dot(b, b).sqrt()).max(1e-8);
    dot(a, b) / lengths
}

/// The score of each pair by its last hidden state.
async fn classified(
    turns: &Turns,
    series: &mut Series,
    id: &RequestId,
    requests: Vec<Request>,
    classifier: &Classifier,
) -> Result<Vec<f64>> {
    let mut scores = Vec::with_capacity(requests.len());
    let note = |computed: CollectedEvents| {
        scores.push(classifier.score(&computed.embedding));
        Ok(())
    };
    turns.run(series, requests, &id.0, note).await?;
    Ok(scores)
}

/// The probability of yes for each pair. The answer has its log-probability, and mostly the other one is among the most
/// probable tokens. Where it is not, it is asked for alone, after a prompt that is cached then.
async fn answers(
    turns: &Turns,
    series: &mut Series,
    id: &RequestId,
    requests: Vec<Request>,
    [yes, no]: [u32; 2],
) -> Result<Vec<f64>> {
    let mut found = Vec::with_capacity(requests.len());
    let note = |computed: CollectedEvents| {
        found.push([yes, no].map(|token| logprob(&computed, token)));
        Ok(())
    };
    turns.run(series, requests.clone(), &id.0, note).await?;
    let mut missing = Vec::new();
    let mut again = Vec::new();
    for (at, (pair, request)) in found.iter().zip(requests).enumerate() {
        let Some(which) = pair.iter().position(Option::is_none) else {
            continue;
        };
        let mut request = request;
        request.params.allowed = Some(Arc::new(Mask::of(&[[yes, no][which]])));
        missing.push((at, which));
        again.push(request);
    }
    let mut places = missing.into_iter();
    let note = |computed: CollectedEvents| {
        if let Some((at, which)) = places.next() {
            found[at][which] = logprob(&computed, [yes, no][which]);
        }
        Ok(())
    };
    turns.run(series, again, &id.0, note).await?;
    let score = |[yes, no]: [Option<f32>; 2]| {
        let (yes, no) = yes.zip(no)?;
        Some(probability(yes, no))
    };
    let scores: Option<Vec<f64>> = found.into_iter().map(score).collect();
    scores.ok_or_else(|| Error::internal("an answer has no log-probability"))
}

/// The log-probability of `token` as the first of the answer, if the answer tells it.
fn logprob(answer: &CollectedEvents, token: u32) -> Option<f32> {
    let first = answer.tokens.first()?;
    let logprobs = first.logprobs.as_ref()?;
    if first.id == token {
        return Some(logprobs.logprob);
    }
    let other = logprobs.top.iter().find(|(id, _)| *id == token);
    other.map(|(_, logprob)| *logprob)
}

/// The softmax of two logits. Their log-probabilities differ as the logits do.
fn probability(yes: f32, no: f32) -> f64 {
    let [yes, no] = [yes, no].map(|x| f64::from(x.max(MIN_LOGPROB)));
    1.0 / (1.0 + (no - yes).exp())
}

impl Context<'_> {
    /// What computes the relevance of `pairs`.
    ///
    /// # Errors
    /// `Invalid` or `ContextLengthExceeded`, naming the field.
    pub(super) fn relevance(
        &self,
        model: ServedModel,
        pairs: Pairs,
        options: &RelevanceOptions,
    ) -> Result<RelevanceJob> {
        let [query_field, document_field] = pairs.fields;
        let (queries, documents) = (pairs.queries.len(), pairs.documents.len());
        if !(1..=MAX_DOCUMENTS).contains(&documents) {
            return wrong(
                document_field,
                format!("must have 1 to {MAX_DOCUMENTS} documents, not {documents}"),
            );
        }
        if queries != 1 && queries != documents {
            return wrong(
                query_field,
                format!(
                    "must be one text, or as many as there are in {document_field} ({documents}), not {queries}"
                ),
            );
        }
        match (self.reranker, self.embeddings) {
            (Some(spec), _) => self.judgements(spec, model, &pairs, options),
            (None, Some(spec)) => self.similarities(spec, model, pairs, options),
            (None, None) => {
                let message = "this model ranks no documents: serve an embedding model (--pooling last or --pooling mean makes one of any model), or one that answers yes or no as Qwen3-Reranker does (--reranker)";
                Err(Error::request(RequestErrorKind::Invalid, None, message))
            }
        }
    }

    fn similarities(
        &self,
        spec: &EmbeddingSpec,
        model: ServedModel,
        pairs: Pairs,
        options: &RelevanceOptions,
    ) -> Result<RelevanceJob> {
        if options.instruction.is_some() {
            return wrong(
                "instruction",
                "is for models that answer yes or no; for an embedding model, write it into the query",
            );
        }
        let [query_field, document_field] = pairs.fields;
        let input = InputOptions {
            prompt: spec.prompt.as_deref(),
            add_special_tokens: true,
            truncate: options.truncate,
            cut_off: if options.cuts_ends {
                CutOff::End
            } else {
                CutOff::None
            },
            cache_salt: options.cache_salt.as_deref(),
        };
        let embed = |texts: Vec<String>, field: &'static str| {
            let input = self.embedding_requests(spec, &model, PromptInput::Texts(texts), input);
            input.map_err(|e| e.renamed(&[("input", field)]))
        };
        let queries = pairs.queries.len();
        let mut documents = pairs.documents;
        if let Some(max) = options.max_tokens_per_doc {
            for document in &mut documents {
                self.cut_text(document, max)?;
            }
        }
        let mut requests = embed(pairs.queries, query_field)?;
        requests.extend(embed(documents, document_field)?);
        Ok(RelevanceJob {
            model: model.name,
            tokens: requests.iter().map(|request| request.prompt.len()).sum(),
            requests,
            measure: Measure::Cosine {
                queries,
                spec: spec.clone(),
            },
        })
    }

    fn judgements(
        &self,
        spec: &RerankerSpec,
        model: ServedModel,
        pairs: &Pairs,
        options: &RelevanceOptions,
    ) -> Result<RelevanceJob> {
        let (asked, measure) = match spec {
            RerankerSpec::Answer { yes, no } => {
                let tokens = [*yes, *no];
                let params = SamplingParams {
                    temperature: 0.0,
                    allowed: Some(Arc::new(Mask::of(&tokens))),
                    ..SamplingParams::default()
                };
                let asked = Request {
                    params,
                    max_tokens: Some(1),
                    logprobs: Some(TOP.min(self.limits.max_logprobs)),
                    spec_length: Some(0),
                    ..Request::default()
                };
                (asked, Measure::Answer(tokens))
            }
            RerankerSpec::Classifier(classifier) => {
                let asked = Request::embedding(Vec::new(), Pooling::Last);
                (asked, Measure::Classifier(classifier.clone()))
            }
        };
        let template = Request {
            adapter: model.adapter,
            draft_context: DraftContext {
                scope: self.scope(salt(options.cache_salt.as_deref())?),
                prediction: Arc::default(),
                may_persist: false,
            },
            ..asked
        };
        let field = pairs.fields[1];
        let mut requests = Vec::with_capacity(pairs.documents.len());
        let mut tokens = 0;
        for (at, document) in pairs.documents.iter().enumerate() {
            let query = &pairs.queries[at % pairs.queries.len()];
            let request = Request {
                prompt: self.judged(query, document, options, field)?,
                ..template.clone()
            };
            self.limits
                .check(&request, field)
                .map_err(|e| e.renamed(&[("max_tokens", field)]))?;
            tokens += request.prompt.len();
            if tokens > MAX_TOKENS {
                return wrong(
                    field,
                    format!(
                        "may make prompts of at most {MAX_TOKENS} tokens in all, with their queries"
                    ),
                );
            }
            requests.push(request);
        }
        Ok(RelevanceJob {
            model: model.name,
            tokens,
            requests,
            measure,
        })
    }

    /// The tokens after which the model says whether `document` answers `query`. If the request truncates prompts, the end
    /// of the document is cut off, so that the question stays.
    fn judged(
        &self,
        query: &str,
        document: &str,
        options: &RelevanceOptions,
        field: &str,
    ) -> Result<Vec<u32>> {
        let instruction = options.instruction.as_deref();
        let fitting = options.cuts_ends.then_some(-1);
        let max = self.kept(options.truncate.or(fitting), Some(1))?;
        let mut document = document.to_owned();
        let longest = max.into_iter().chain(options.max_tokens_per_doc).min();
        let mut left = match longest {
            Some(longest) => self.cut_text(&mut document, longest)?,
            None => 0,
        };
        loop {
            let prompt = self.judgement_prompt(query, &document, instruction)?;
            let ids = self
                .encode_chat(&prompt, false, WantedTokens::Fitting)
                .map_err(|e| e.renamed(&[("messages", field)]))?;
            let over = ids.len().saturating_sub(max.unwrap_or(usize::MAX));
            if over == 0 {
                return Ok(ids);
            }
            if left == 0 && options.cuts_ends {
                let what = format!(
                    "is too long: the prompt has {} tokens even without the document",
                    ids.len()
                );
                return wrong("query", what);
            }
            if left == 0 {
                return wrong(
                    "truncate_prompt_tokens",
                    format!(
                        "must leave room for the query and the question, which have {} tokens",
                        ids.len()
                    ),
                );
            }
            left = left.saturating_sub(over);
            self.cut_text(&mut document, left)?;
        }
    }

    /// Cuts `text` to its first `max` tokens, and returns how many it has then.
    fn cut_text(&self, text: &mut String, max: usize) -> Result<usize> {
        let start = self.text.prefix_within(text, max);
        let mut ids = self.text.encode(start, false)?;
        if ids.len() > max || start.len() < text.len() {
            ids.truncate(max);
            *text = self.text.decode(&ids, false);
            // A character may have been cut in two.
            text.truncate(text.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        }
        Ok(ids.len())
    }

    /// The text after which the model answers. It is that of the reranker's own template, or else a chat template's, if
    /// that knows the roles of a query and a document, or else that of Qwen3-Reranker.
    fn judgement_prompt(
        &self,
        query: &str,
        document: &str,
        instruction: Option<&str>,
    ) -> Result<String> {
        let own = self.text.rerank_template();
        let is_fixed = own.is_some_and(|template| !template.contains(INSTRUCTION));
        if is_fixed && instruction.is_some() {
            return wrong(
                "instruction",
                "is not possible: the prompt of this model has a fixed one; leave it out",
            );
        }
        let knows_pairs = self.text.knows_pairs();
        let has_default = own.is_some() || !knows_pairs;
        let instruction = instruction.or(has_default.then_some(INSTRUCTION));
        let texts = [
            ("system", instruction),
            ("query", Some(query)),
            ("document", Some(document)),
        ];
        let mut messages = Vec::with_capacity(texts.len());
        for (role, text) in texts {
            let Some(text) = text else { continue };
            let mut text = Value::from(text);
            if let Some(literal) = self.literal {
                literal.mark(role, &mut text)?;
            }
            messages.push(json!({"role": role, "content": text}));
        }
        if knows_pairs && own.is_none() {
            return self.text.render_pair(&messages);
        }
        let text = |at: usize| messages[at]["content"].as_str().unwrap_or_default();
        let texts = [text(0), text(1), text(2)];
        Ok(filled(own.unwrap_or(QWEN), texts))
    }
}

/// The prompt that Qwen3-Reranker was trained with.
const QWEN: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

/// `template` with these texts in the places of [`INSTRUCTION`], `{query}` and `{document}`.
fn filled(template: &str, texts: [&str; 3]) -> String {
    let (mut prompt, mut rest) = (String::new(), template);
    let places = [INSTRUCTION, "{query}", "{document}"];
    let next = |rest: &str| {
        let found = places.iter().zip(texts);
        let found = found.filter_map(|(place, text)| Some((rest.find(place)?, place.len(), text)));
        found.min()
    };
    while let Some((at, len, text)) = next(rest) {
        prompt.push_str(&rest[..at]);
        prompt.push_str(text);
        rest = &rest[at + len..];
    }
    prompt + rest
}

#[cfg(test)]
mod tests;
