//! Loading and unloading adapters through the router, which then routes by their names as long as their process runs.

use super::fleet::Fleet;
use super::proxy::{self, Forwarded};
use super::selector::Selector;
use super::{Refusal, RouterState, receive};
use crate::adapters::NAME;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use foretoken_core::error::{Error, Result, clipped};
use serde::Deserialize;
use std::sync::Arc;

/// What a request does with an adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Change {
    Load,
    Unload,
}

/// The field that the router reads besides `model`. Others are the process's.
#[derive(Default, Deserialize)]
struct Fields {
    lora_name: Option<String>,
}

/// `POST /v1/load_lora_adapter`: for the model that the request names, or the only one.
pub(super) async fn load(
    State(state): State<RouterState>,
    request: Request,
) -> Result<Response, Refusal> {
    change(&state, request, Change::Load).await
}

/// `POST /v1/unload_lora_adapter`: for the model of the adapter, unless the request names another.
pub(super) async fn unload(
    State(state): State<RouterState>,
    request: Request,
) -> Result<Response, Refusal> {
    change(&state, request, Change::Unload).await
}

async fn change(
    state: &RouterState,
    request: Request,
    change: Change,
) -> Result<Response, Refusal> {
    let path = request.uri().path().to_owned();
    let done = async {
        let (parts, mut received) = receive(state, request).await?;
        let body = Bytes::from(std::mem::take(&mut received.bytes));
        let (model, name) = chosen(&state.fleet, &parts, &body, change).await?;
        let fleet = state.fleet.clone();
        // Also if the client leaves, so that the names stay those of the processes.
        let task = tokio::spawn(async move {
            let _memory = received;
            carried_out(&fleet, model, name, change, Forwarded::new(&parts), body).await
        });
        let failed = |e| Error::internal(format!("changing adapters failed: {e}"));
        task.await.map_err(failed)?
    };
    done.await.map_err(|error| Refusal { path, error })
}

/// The place of the model that a request is for, and the name of its adapter. What is wrong with the name, the process
/// says.
async fn chosen(
    fleet: &Arc<Fleet>,
    parts: &Parts,
    body: &Bytes,
    change: Change,
) -> Result<(usize, String)> {
    let selector = Selector::of(parts, body)?;
    let fields: Fields = serde_json::from_slice(body).unwrap_or_default();
    let name = fields.lora_name.unwrap_or_default();
    let of_adapter = fleet.catalog.place(&name);
    let model = match of_adapter.filter(|_| change == Change::Unload && !selector.names_model()) {
        Some(place) => place,
        None => selector.choose(fleet).await?,
    };
    Ok((model, name))
}

/// Asks the process of `model`, which is started if there is none, and notes what it did.
async fn carried_out(
    fleet: &Arc<Fleet>,
    model: usize,
    name: String,
    change: Change,
    forwarded: Forwarded,
    body: Bytes,
) -> Result<Response<Body>> {
    // One at a time, so that two models get no adapter of one name.
    let _turn = fleet.adapter_turn.lock().await;
    let of_other = |place: &usize| *place != model;
    if change == Change::Load && fleet.catalog.place(&name).filter(of_other).is_some() {
        let what = format!("the name `{}` is that of another model", clipped(&name));
        return Err(Error::invalid(NAME, what));
    }
    let lease = fleet.acquire(model).await?;
    let generation = lease.generation();
    let answer = proxy::forward(lease, forwarded, body).await?;
    if answer.status() == StatusCode::OK {
        fleet.note_adapter(model, generation, name, change == Change::Load);
    }
    Ok(answer)
}
