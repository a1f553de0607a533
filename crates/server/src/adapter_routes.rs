//! Loading and unloading adapters while the server runs, as in vLLM.

use super::adapters::{Adapters, NAME, PATH};
use super::context::find_tagged;
use super::encoding::SentBody;
use super::object::read_body;
use super::state::AppState;
use super::wire::required;
use crate::error::Refused;
use axum::extract::State;
use foretoken_core::error::{Error, RequestErrorKind, Result, clipped};
use schemars::JsonSchema;
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;

/// The body of `/v1/load_lora_adapter`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "LoadLoraAdapterRequest")]
pub(super) struct LoadAdapter {
    /// The name of the base model, which a router of several needs.
    pub model: Option<String>,
    /// What requests will call it.
    #[schemars(required)]
    pub lora_name: Option<String>,
    /// A folder of the server's machine, as PEFT writes it.
    #[schemars(required)]
    pub lora_path: Option<String>,
    /// Whether it replaces one of the same name.
    pub load_inplace: Option<bool>,
}

/// The body of `/v1/unload_lora_adapter`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "UnloadLoraAdapterRequest")]
pub(super) struct UnloadAdapter {
    /// The name of the base model, which a router of several needs.
    pub model: Option<String>,
    #[schemars(required)]
    pub lora_name: Option<String>,
}

/// `POST /v1/load_lora_adapter`.
pub(super) async fn load(State(state): State<AppState>, body: SentBody) -> Result<String, Refused> {
    let adapters = updatable(&state)?;
    let read = state.read(body, |_, body| read_body::<LoadAdapter>(body));
    let fields = read.await?;
    check_model(&state, fields.model.as_deref())?;
    let name = required(NAME, fields.lora_name)?;
    let folder = PathBuf::from(required(PATH, fields.lora_path)?);
    let in_place = fields.load_inplace.unwrap_or(false);
    // One at a time, so that no more memory is taken than the limits say, also if the client leaves.
    let turn = adapters.turn.clone().lock_owned().await;
    let names = state.model_names.clone();
    let done = format!("Success: LoRA adapter '{name}' added successfully.");
    let load = move || {
        let loaded = adapters.load(&name, &folder, in_place, &names);
        drop(turn);
        loaded
    };
    let loaded = tokio::task::spawn_blocking(load).await;
    loaded.map_err(|e| Error::internal(format!("loading the adapter failed: {e}")))??;
    Ok(done)
}

/// `POST /v1/unload_lora_adapter`.
pub(super) async fn unload(
    State(state): State<AppState>,
    body: SentBody,
) -> Result<String, Refused> {
    let adapters = updatable(&state)?;
    let read = state.read(body, |_, body| read_body::<UnloadAdapter>(body));
    let fields = read.await?;
    check_model(&state, fields.model.as_deref())?;
    let name = required(NAME, fields.lora_name)?;
    adapters.unload(&name)?;
    Ok(format!(
        "Success: LoRA adapter '{name}' removed successfully."
    ))
}

/// Checks that `model`, if it is given, is a name of the base model.
fn check_model(state: &AppState, model: Option<&str>) -> Result<()> {
    let names = &state.model_names;
    let base = |model| names.iter().find(|name| *name == model);
    let Some(other) = model.filter(|&model| find_tagged(model, base).is_none()) else {
        return Ok(());
    };
    let message = format!(
        "the base model is not `{}`; its names are {}",
        clipped(other),
        names.join(", ")
    );
    let kind = RequestErrorKind::NotFound;
    Err(Error::request(kind, Some("model"), message))
}

/// The adapters, if clients may load and unload them.
fn updatable(state: &AppState) -> Result<Arc<Adapters>> {
    let adapters = state.adapters.as_ref();
    let adapters = adapters.filter(|adapters| adapters.limits.may_update);
    adapters.cloned().ok_or_else(|| {
        let message = "adapters are not loaded or unloaded while this server runs: start it with --enable-lora --allow-runtime-lora-updating";
        Error::request(RequestErrorKind::NotFound, None, message)
    })
}
