//! Stored responses by their ids.

use crate::checks::wrong;
use crate::context::KeyIndex;
use crate::error::Refused;
use crate::state::AppState;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::{Error, RequestErrorKind, Result, clipped};
use schemars::JsonSchema;
use serde::Serialize;

/// That a response was deleted.
#[derive(Serialize, JsonSchema)]
pub(crate) struct DeletedResponse {
    id: String,
    #[schemars(extend("const" = "response"))]
    object: &'static str,
    deleted: bool,
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
    let query = request.uri().query().unwrap_or_default();
    if query.split('&').any(|pair| pair == "stream=true") {
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
