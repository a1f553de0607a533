//! Stored responses by their ids.

use super::input::InputItem;
use super::request::INCLUDABLE;
use crate::checks::wrong;
use crate::context::KeyIndex;
use crate::error::Refused;
use crate::query;
use crate::state::AppState;
use crate::stored::StoredItem;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{Uri, header};
use axum::response::{IntoResponse, Response};
use foretoken_core::error::{Error, RequestErrorKind, Result, clipped};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;
use std::sync::Arc;

/// Number of items of a page, if a client does not say it, and the most that it may ask for.
const PAGE: usize = 20;
const MAX_PAGE: usize = 100;

/// That a response was deleted.
#[derive(Serialize, JsonSchema)]
pub(crate) struct DeletedResponse {
    id: String,
    #[schemars(extend("const" = "response"))]
    object: &'static str,
    deleted: bool,
}

/// A page of the items that a response answers.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ResponseItemList")]
pub(crate) struct InputItemList<'a> {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    #[schemars(with = "Vec<InputItem>")]
    data: Vec<&'a RawValue>,
    first_id: Option<&'a str>,
    last_id: Option<&'a str>,
    has_more: bool,
}

/// Which of the items a client asks for.
struct Page {
    limit: usize,
    is_ascending: bool,
    after: Option<String>,
}

impl Page {
    fn of(uri: &Uri) -> Result<Self> {
        let mut page = Self {
            limit: PAGE,
            is_ascending: false,
            after: None,
        };
        for (name, value) in query::pairs(uri) {
            match name.as_str() {
                "limit" => match value.parse::<usize>() {
                    Ok(limit @ 1..=MAX_PAGE) => page.limit = limit,
                    _ => {
                        let what = format!("must be a whole number from 1 to {MAX_PAGE}");
                        return wrong("limit", what);
                    }
                },
                "order" => {
                    page.is_ascending = match value.as_str() {
                        "asc" => true,
                        "desc" => false,
                        _ => return wrong("order", "must be asc or desc"),
                    }
                }
                "after" => page.after = Some(value),
                "before" => return wrong("before", "is not supported: use after and order"),
                "include" | "include[]" if !INCLUDABLE.contains(&value.as_str()) => {
                    return wrong("include", "is not supported here: leave it out");
                }
                _ => {}
            }
        }
        Ok(page)
    }

    /// The page of `items`, which are in the order of the conversation.
    fn list<'a>(&self, items: &'a [Arc<StoredItem>]) -> Result<InputItemList<'a>> {
        let mut items: Vec<&'a StoredItem> = items.iter().map(Arc::as_ref).collect();
        if !self.is_ascending {
            items.reverse();
        }
        let begin = match &self.after {
            None => 0,
            // The last one of this id, so that pages end although a client may send an item twice.
            Some(after) => match items.iter().rposition(|item| item.id == *after) {
                Some(at) => at + 1,
                None => return wrong("after", "must be the id of an item of the list"),
            },
        };
        let rest = &items[begin..];
        let shown = &rest[..rest.len().min(self.limit)];
        Ok(InputItemList {
            object: "list",
            data: shown.iter().map(|item| &*item.json).collect(),
            first_id: shown.first().map(|item| item.id.as_str()),
            last_id: shown.last().map(|item| item.id.as_str()),
            has_more: shown.len() < rest.len(),
        })
    }
}

/// `GET /v1/responses/{response_id}`.
pub(crate) async fn stored(
    State(state): State<AppState>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, Refused> {
    refuse_stream(&request)?;
    let id = named(id)?;
    let object = state.responses.object(key(&state, &request), &id);
    let object = object.ok_or_else(|| unknown(&id))?;
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((json, object).into_response())
}

/// `GET /v1/responses/{response_id}/input_items`.
pub(crate) async fn input_items(
    State(state): State<AppState>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, Refused> {
    let page = Page::of(request.uri())?;
    let id = named(id)?;
    let items = state.responses.inputs(key(&state, &request), &id);
    let items = items.ok_or_else(|| unknown(&id))?;
    Ok(Json(page.list(&items)?).into_response())
}

/// `DELETE /v1/responses/{response_id}`.
pub(crate) async fn delete(
    State(state): State<AppState>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json<DeletedResponse>, Refused> {
    let id = named(id)?;
    if !state.responses.remove(key(&state, &request), &id) {
        return Err(unknown(&id).into());
    }
    Ok(Json(DeletedResponse {
        id,
        object: "response",
        deleted: true,
    }))
}

fn refuse_stream(request: &Request) -> Result<()> {
    if query::value(request.uri(), "stream").is_some_and(|value| value == "true") {
        return wrong(
            "stream",
            "is not possible for a stored response: leave it out",
        );
    }
    Ok(())
}

/// The API key of a request.
fn key<'a>(state: &'a AppState, request: &Request) -> Option<&'a str> {
    let key = request.extensions().get::<KeyIndex>().copied();
    state.context(key).api_key
}

fn named(id: Result<Path<String>, PathRejection>) -> Result<String> {
    let no_text = |e: PathRejection| not_found(e.body_text());
    let Path(id) = id.map_err(no_text)?;
    Ok(id)
}

fn unknown(id: &str) -> Error {
    let id = clipped(id);
    not_found(format!(
        "no response {id:?} is stored: it was not asked for with this key, or with store: false, or it is forgotten"
    ))
}

fn not_found(message: String) -> Error {
    Error::request(RequestErrorKind::NotFound, Some("response_id"), message)
}
