//! LoRA adapters that are served beside the base model: their names, and loading and unloading while the server runs.

use super::encoding::SentBody;
use super::object::JsonObject;
use super::reply;
use super::state::AppState;
use super::wire::{self, required};
use crate::error::{Error, RequestErrorKind, Result, clipped};
use crate::files;
use crate::model::{LoraAdapter, LoraTarget};
use axum::extract::State;
use schemars::JsonSchema;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use tokio::sync::Mutex;

/// Limits of adapters.
#[derive(Debug, Clone, Copy)]
pub struct AdapterLimits {
    /// Maximum number that are loaded at a time.
    pub max_loras: usize,
    pub max_rank: usize,
    /// Whether clients may load and unload them.
    pub may_update: bool,
}

/// The adapters that are loaded.
#[derive(Debug)]
pub struct Adapters {
    target: LoraTarget,
    limits: AdapterLimits,
    /// In the order in which they were loaded.
    loaded: RwLock<Vec<Loaded>>,
    /// The right to load one.
    turn: Arc<Mutex<()>>,
}

#[derive(Debug, Clone)]
pub(super) struct Loaded {
    pub adapter: Arc<LoraAdapter>,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
}

impl Adapters {
    /// None so far, for the model that `target` is of.
    pub fn new(target: LoraTarget, limits: AdapterLimits) -> Self {
        Self {
            target,
            limits,
            loaded: RwLock::default(),
            turn: Arc::default(),
        }
    }

    /// Loads the adapter in `folder` as `name`, which is none of `taken`; with `in_place` in the place of the one of
    /// that name, if there is one. Requests that use that go on with it.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn load(&self, name: &str, folder: &Path, in_place: bool, taken: &[String]) -> Result<()> {
        check_name(name)?;
        if taken.iter().any(|taken| taken == name) {
            let what = format!("the name `{}` is the base model's", clipped(name));
            return Err(Error::invalid(NAME, what));
        }
        self.check_room(name, in_place)?;
        let adapter = self.target.load(name, folder, self.limits.max_rank);
        let adapter = adapter.map_err(|e| Error::invalid(PATH, e.to_string()))?;
        tracing::info!(
            "adapter {name}: rank {}, {} bytes, from {}",
            adapter.rank(),
            adapter.bytes(),
            clipped(&folder.to_string_lossy())
        );
        let mut all = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.adapter.name() != name);
        all.push(Loaded {
            adapter: Arc::new(adapter),
            created: reply::now(),
        });
        Ok(())
    }

    /// Forgets the adapter `name`. Requests that use it go on.
    ///
    /// # Errors
    /// `NotFound`, if there is none.
    fn unload(&self, name: &str) -> Result<()> {
        let mut all = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let count = all.len();
        all.retain(|one| one.adapter.name() != name);
        if all.len() < count {
            tracing::info!("adapter {}: unloaded", clipped(name));
            return Ok(());
        }
        let message = format!("The lora adapter '{}' cannot be found.", clipped(name));
        Err(Error::request(
            RequestErrorKind::NotFound,
            Some(NAME),
            message,
        ))
    }

    fn check_room(&self, name: &str, in_place: bool) -> Result<()> {
        let all = self.all();
        let max = self.limits.max_loras;
        if all.iter().any(|one| one.adapter.name() == name) {
            let message = format!(
                "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
            );
            return in_place
                .then_some(())
                .ok_or_else(|| Error::invalid(NAME, message));
        }
        if all.len() >= max {
            return Err(Error::invalid(
                NAME,
                format!(
                    "as many adapters are loaded as --max-loras allows, which is {max}: unload one, or raise it"
                ),
            ));
        }
        Ok(())
    }

    /// The adapter `name`, if it is loaded.
    pub(super) fn get(&self, name: &str) -> Option<Loaded> {
        let all = self.all();
        all.iter().find(|one| one.adapter.name() == name).cloned()
    }

    /// All that are loaded.
    pub(super) fn all(&self) -> RwLockReadGuard<'_, Vec<Loaded>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fields that errors name.
const NAME: &str = "lora_name";
const PATH: &str = "lora_path";

/// Checks that a name can be a model's: lists of names have commas, and a path in the API must stay one.
fn check_name(name: &str) -> Result<()> {
    const MAX_BYTES: usize = 200;
    let is_odd = |c: char| c == ',' || c.is_control();
    if files::is_inside(name) && !name.contains(is_odd) && name.len() <= MAX_BYTES {
        return Ok(());
    }
    Err(Error::invalid(
        NAME,
        format!(
            "{NAME} must have 1 to {MAX_BYTES} bytes, without commas, backslashes and control characters, and with slashes only between parts that are not . or ..; it is {:?}",
            clipped(name)
        ),
    ))
}

/// The body of `/v1/load_lora_adapter`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "LoadLoraAdapterRequest")]
pub(super) struct LoadAdapter {
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
    #[schemars(required)]
    pub lora_name: Option<String>,
}

/// `POST /v1/load_lora_adapter`.
pub(super) async fn load(State(state): State<AppState>, body: SentBody) -> Result<String> {
    let adapters = updatable(&state)?;
    let read = state.read(body, |_, body| read_body::<LoadAdapter>(body));
    let fields = read.await?;
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
pub(super) async fn unload(State(state): State<AppState>, body: SentBody) -> Result<String> {
    let adapters = updatable(&state)?;
    let read = state.read(body, |_, body| read_body::<UnloadAdapter>(body));
    let fields = read.await?;
    let name = required(NAME, fields.lora_name)?;
    adapters.unload(&name)?;
    Ok(format!(
        "Success: LoRA adapter '{name}' removed successfully."
    ))
}

fn read_body<F: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<F> {
    let read = [wire::names::<F>()];
    let body = JsonObject::parse(body, &read)?;
    body.check_others(&read)?;
    body.fields()
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
