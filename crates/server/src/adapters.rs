//! The LoRA adapters that are served beside the base model.

use super::reply;
use foretoken_core::error::{Error, RequestErrorKind, Result, clipped};
use foretoken_core::files;
use foretoken_core::model::{Adapter, AdapterLoader};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};
use tokio::sync::Mutex;

/// Limits of adapters.
#[derive(Debug, Clone, Copy)]
pub struct AdapterLimits {
    /// Maximum number that are loaded at a time.
    pub max_loras: usize,
    /// Maximum rank of an adapter.
    pub max_rank: usize,
    /// Whether clients may load and unload them.
    pub may_update: bool,
}

/// The adapters that are loaded.
#[derive(Debug)]
pub struct Adapters {
    loader: Arc<dyn AdapterLoader>,
    pub(super) limits: AdapterLimits,
    /// The loaded adapters, in the order in which they were loaded.
    loaded: RwLock<Vec<Loaded>>,
    /// All adapters that were loaded and may still be in memory: requests go on with one that is unloaded or
    /// replaced.
    in_memory: std::sync::Mutex<Vec<Weak<dyn Adapter>>>,
    /// The right to load one.
    pub(super) turn: Arc<Mutex<()>>,
}

#[derive(Debug, Clone)]
pub(super) struct Loaded {
    pub adapter: Arc<dyn Adapter>,
    /// Time of the loading, in seconds since 1970.
    pub created: u64,
}

impl Adapters {
    /// Makes an empty set of adapters, for the model that `loader` is of.
    pub fn new(loader: Arc<dyn AdapterLoader>, limits: AdapterLimits) -> Self {
        Self {
            loader,
            limits,
            loaded: RwLock::default(),
            in_memory: std::sync::Mutex::default(),
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
        let adapter = self.loader.load(name, folder, self.limits.max_rank);
        let adapter = adapter.map_err(|e| Error::invalid(PATH, e.to_string()))?;
        tracing::info!(
            "adapter {name}: rank {}, {} bytes, from {}",
            adapter.rank(),
            adapter.bytes(),
            clipped(&folder.to_string_lossy())
        );
        let mut in_memory = (self.in_memory.lock()).unwrap_or_else(PoisonError::into_inner);
        in_memory.push(Arc::downgrade(&adapter));
        let mut all = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.adapter.name() != name);
        all.push(Loaded {
            adapter,
            created: reply::now(),
        });
        Ok(())
    }

    /// Forgets the adapter `name`. Requests that use it go on.
    ///
    /// # Errors
    /// `NotFound`, if there is none.
    pub(super) fn unload(&self, name: &str) -> Result<()> {
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
        let is_loaded = self.get(name).is_some();
        if is_loaded && !in_place {
            let message = format!(
                "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
            );
            return Err(Error::invalid(NAME, message));
        }
        let mut in_memory = (self.in_memory.lock()).unwrap_or_else(PoisonError::into_inner);
        in_memory.retain(|adapter| adapter.strong_count() > 0);
        let max = self.limits.max_loras;
        // The one that is replaced leaves once no request uses it.
        if in_memory.len() >= max + usize::from(is_loaded) {
            return Err(Error::invalid(
                NAME,
                format!(
                    "as many adapters are in memory as --max-loras allows, which is {max}: unload one, wait for the requests that use one that was unloaded, or raise it"
                ),
            ));
        }
        Ok(())
    }

    /// Returns the loaded adapters, in the order in which they were loaded.
    pub fn loaded(&self) -> Vec<Arc<dyn Adapter>> {
        self.all().iter().map(|one| one.adapter.clone()).collect()
    }

    /// The adapter `name`, if it is loaded.
    pub(super) fn get(&self, name: &str) -> Option<Loaded> {
        let all = self.all();
        all.iter().find(|one| one.adapter.name() == name).cloned()
    }

    /// Returns all loaded adapters.
    pub(super) fn all(&self) -> RwLockReadGuard<'_, Vec<Loaded>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fields that errors name.
pub(super) const NAME: &str = "lora_name";
pub(super) const PATH: &str = "lora_path";

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
