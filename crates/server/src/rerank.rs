//! `/v1/rerank`, in the form of Jina and Cohere or, for `texts`, of Text Embeddings Inference, and `/v1/score`, in that of
//! vLLM.

use super::caller::Caller;
use super::content::TextOr;
use super::context::{Context, ServedModel};
use super::embeddings::PromptUsage;
use super::encoding::SentBody;
use super::error::Refused;
use super::numbers::within;
use super::object::read_body;
use super::others::NoOthers;
use super::relevance::{Pairs, RelevanceJob, RelevanceOptions};
use super::reply::{new_id, now};
use super::state::AppState;
use super::wire::{required, wrong};
use axum::Json;
use axum::extract::State;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The body of `/v1/rerank`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "RerankRequest")]
pub(super) struct RerankFields {
    model: Option<String>,
    #[schemars(required)]
    query: Option<String>,
    documents: Option<Vec<Document>>,
    /// Text Embeddings Inference's name of `documents`. The answer then has its form.
    texts: Option<Vec<Document>>,
    /// Number of results; 0 = all.
    top_n: Option<usize>,
    /// Whether results have the documents, which is the default.
    return_documents: Option<bool>,
    /// Whether results have the `texts`. They do not by default.
    return_text: Option<bool>,
    /// What makes a document relevant, for models that answer yes or no.
    instruction: Option<String>,
    /// Another name of `instruction`.
    instruct: Option<String>,
    /// Number of first tokens that are read of each document.
    max_tokens_per_doc: Option<usize>,
    /// Whether the ends of documents are cut off that are too long. Otherwise they are refused.
    truncate: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    cache_salt: Option<String>,
}

/// The body of `/v1/score`. Both sides have several names.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ScoreRequest")]
pub(super) struct ScoreFields {
    model: Option<String>,
    queries: Option<TextOr<Document>>,
    text_1: Option<TextOr<Document>>,
    data_1: Option<TextOr<Document>>,
    documents: Option<TextOr<Document>>,
    items: Option<TextOr<Document>>,
    text_2: Option<TextOr<Document>>,
    data_2: Option<TextOr<Document>>,
    /// What makes a document relevant, for models that answer yes or no.
    instruction: Option<String>,
    /// Another name of `instruction`.
    instruct: Option<String>,
    /// Number of first tokens that are read of each document.
    max_tokens_per_doc: Option<usize>,
    truncate_prompt_tokens: Option<i64>,
    cache_salt: Option<String>,
}

/// A text, alone or in an object.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a string, or an object with text alone"
)]
enum Document {
    Text(String),
    Object {
        text: String,
        #[serde(flatten)]
        #[schemars(skip)]
        _others: NoOthers,
    },
}

impl Document {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { text, .. } => text,
        }
    }
}

/// A checked request for a ranking.
pub(super) struct RerankJob {
    job: RelevanceJob,
    /// Number of results.
    top_n: usize,
    /// The documents, if the results have them.
    documents: Option<Vec<String>>,
    /// Whether the answer has the form of Text Embeddings Inference.
    is_list: bool,
}

/// The answer of `/v1/rerank`.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum RerankAnswer {
    Ranking(Ranking),
    List(Vec<RankedText>),
}

/// A text with its relevance, in the form of Text Embeddings Inference.
#[derive(Serialize, JsonSchema)]
pub(super) struct RankedText {
    /// The place of the text in the request, from 0.
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    score: f64,
}

/// The documents by their relevance.
#[derive(Serialize, JsonSchema)]
pub(super) struct Ranking {
    id: String,
    model: String,
    usage: PromptUsage,
    /// The most relevant one first.
    results: Vec<Ranked>,
}

#[derive(Serialize, JsonSchema)]
struct Ranked {
    /// The place of the document in the request, from 0.
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<RankedDocument>,
    relevance_score: f64,
}

#[derive(Serialize, JsonSchema)]
struct RankedDocument {
    text: String,
}

/// The scores of pairs.
#[derive(Serialize, JsonSchema)]
pub(super) struct ScoreList {
    id: String,
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    created: u64,
    model: String,
    /// One per pair, in their order.
    data: Vec<ScoreObject>,
    usage: PromptUsage,
}

#[derive(Serialize, JsonSchema)]
struct ScoreObject {
    index: usize,
    #[schemars(extend("const" = "score"))]
    object: &'static str,
    score: f64,
}

/// `POST /v1/rerank`.
pub(super) async fn rerank(
    State(state): State<AppState>,
    caller: Caller,
    body: SentBody,
) -> Result<Json<RerankAnswer>, Refused> {
    let read = state.read(body, |context, body| context.rerank(body));
    let job = read.await?;
    let (model, usage) = (job.job.model.clone(), PromptUsage::new(job.job.tokens));
    let scores = job.job.scores(&state, &caller.id).await?;
    let mut results: Vec<Ranked> = scores
        .into_iter()
        .enumerate()
        .map(|(index, relevance_score)| Ranked {
            index,
            document: None,
            relevance_score,
        })
        .collect();
    // Stable: of equal ones, the first of the request is first.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(job.top_n);
    if let Some(mut documents) = job.documents {
        for result in &mut results {
            let text = std::mem::take(&mut documents[result.index]);
            result.document = Some(RankedDocument { text });
        }
    }
    Ok(Json(if job.is_list {
        let of_text = |result: Ranked| RankedText {
            index: result.index,
            text: result.document.map(|document| document.text),
            score: result.relevance_score,
        };
        RerankAnswer::List(results.into_iter().map(of_text).collect())
    } else {
        RerankAnswer::Ranking(Ranking {
            id: new_id("rerank-"),
            model,
            usage,
            results,
        })
    }))
}

/// `POST /v1/score`.
pub(super) async fn score(
    State(state): State<AppState>,
    caller: Caller,
    body: SentBody,
) -> Result<Json<ScoreList>, Refused> {
    let read = state.read(body, |context, body| context.score(body));
    let job = read.await?;
    let (model, usage) = (job.model.clone(), PromptUsage::new(job.tokens));
    let scores = job.scores(&state, &caller.id).await?;
    let object = |(index, score)| ScoreObject {
        index,
        object: "score",
        score,
    };
    Ok(Json(ScoreList {
        id: new_id("score-"),
        object: "list",
        created: now(),
        model,
        data: scores.into_iter().enumerate().map(object).collect(),
        usage,
    }))
}

impl Context<'_> {
    /// Reads the body of `/v1/rerank`.
    ///
    /// # Errors
    /// `Invalid`, `NotFound` or `ContextLengthExceeded`, naming the field.
    pub(super) fn rerank(&self, body: &[u8]) -> Result<RerankJob> {
        let fields: RerankFields = read_body(body)?;
        let model = self.model(fields.model.as_deref())?;
        if fields.truncate.is_some() && fields.truncate_prompt_tokens.is_some() {
            return wrong(
                "truncate",
                "is not possible beside truncate_prompt_tokens: leave one out",
            );
        }
        let options = RelevanceOptions {
            instruction: one_of(fields.instruction, fields.instruct)?,
            max_tokens_per_doc: per_document(fields.max_tokens_per_doc)?,
            truncate: fields.truncate_prompt_tokens,
            cuts_ends: fields.truncate == Some(true),
            cache_salt: fields.cache_salt,
        };
        let (field, documents) = match (fields.documents, fields.texts) {
            (Some(_), Some(_)) => {
                return wrong("texts", "is not possible beside documents: leave one out");
            }
            (None, Some(texts)) => ("texts", texts),
            (documents, None) => ("documents", required("documents", documents)?),
        };
        let is_list = field == "texts";
        let documents: Vec<String> = documents.into_iter().map(Document::into_text).collect();
        let top_n = fields.top_n.filter(|n| *n > 0).unwrap_or(usize::MAX);
        let shown = fields.return_text.or(fields.return_documents);
        let shown = shown.unwrap_or(!is_list).then(|| documents.clone());
        let pairs = Pairs {
            queries: vec![required("query", fields.query)?],
            documents,
            fields: ["query", field],
        };
        Ok(RerankJob {
            job: self.relevance(model, pairs, &options)?,
            top_n,
            documents: shown,
            is_list,
        })
    }

    /// Reads the body of `/v1/score`.
    ///
    /// # Errors
    /// The errors of [`Context::rerank`].
    pub(super) fn score(&self, body: &[u8]) -> Result<RelevanceJob> {
        let fields: ScoreFields = read_body(body)?;
        let model: ServedModel = self.model(fields.model.as_deref())?;
        let options = RelevanceOptions {
            instruction: one_of(fields.instruction, fields.instruct)?,
            max_tokens_per_doc: per_document(fields.max_tokens_per_doc)?,
            truncate: fields.truncate_prompt_tokens,
            cuts_ends: false,
            cache_salt: fields.cache_salt,
        };
        let (query, queries) = side([
            ("text_1", fields.text_1),
            ("queries", fields.queries),
            ("data_1", fields.data_1),
        ])?;
        let (document, documents) = side([
            ("text_2", fields.text_2),
            ("documents", fields.documents),
            ("items", fields.items),
            ("data_2", fields.data_2),
        ])?;
        let pairs = Pairs {
            queries,
            documents,
            fields: [query, document],
        };
        self.relevance(model, pairs, &options)
    }
}

/// The texts of the one field that is given, with its name. The first name is the one that errors ask for.
fn side<const N: usize>(
    fields: [(&'static str, Option<TextOr<Document>>); N],
) -> Result<(&'static str, Vec<String>)> {
    let names = fields.each_ref().map(|(name, _)| *name);
    let mut given = fields
        .into_iter()
        .filter_map(|(name, texts)| Some((name, texts?)));
    let Some((name, texts)) = given.next() else {
        let message = format!("one of {} is required", names.join(", "));
        return Err(Error::request(
            RequestErrorKind::Invalid,
            Some(names[0]),
            message,
        ));
    };
    if let Some((other, _)) = given.next() {
        return wrong(
            other,
            format!("is not possible beside {name}: leave one out"),
        );
    }
    let texts = match texts {
        TextOr::Text(text) => vec![text],
        TextOr::List(texts) => texts.into_iter().map(Document::into_text).collect(),
    };
    Ok((name, texts))
}

/// The instruction under either of its names.
fn one_of(instruction: Option<String>, instruct: Option<String>) -> Result<Option<String>> {
    match (instruction, instruct) {
        (Some(_), Some(_)) => wrong(
            "instruct",
            "is not possible beside instruction: leave one out",
        ),
        (one, other) => Ok(one.or(other)),
    }
}

fn per_document(max: Option<usize>) -> Result<Option<usize>> {
    within("max_tokens_per_doc", max, 1..=usize::MAX)
}
