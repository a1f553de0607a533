//! The models that there are. They have places that stay, so that requests find the processes of models that are gone.

use super::process::ModelSpec;
use crate::context::find_tagged;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// All models that there are or were.
pub(super) struct Catalog(RwLock<Vec<Entry>>);

struct Entry {
    spec: Arc<ModelSpec>,
    /// The adapters that clients have loaded into its process.
    loaded: Vec<String>,
    /// Whether it is gone.
    is_gone: bool,
}

/// A model that there is.
pub(super) struct Served {
    pub place: usize,
    /// The model's own name.
    pub base: String,
    /// All names: its own, and those of its adapters.
    pub names: Vec<String>,
}

impl Catalog {
    /// The catalog of `specs`, in their order.
    pub fn new(specs: Vec<ModelSpec>) -> Self {
        Self(RwLock::new(specs.into_iter().map(Entry::new).collect()))
    }

    /// Replaces the models by `specs`. One of the same name keeps its place, and a process that runs goes on. Returns of
    /// each place whether its model is gone.
    pub fn replace(&self, specs: Vec<ModelSpec>) -> Vec<bool> {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let before = entries.len();
        let mut is_there = vec![false; before];
        for spec in specs {
            let named = |entry: &Entry| entry.spec.name == spec.name;
            let Some(place) = entries.iter().position(named) else {
                tracing::info!("{} is a model now", spec.name);
                entries.push(Entry::new(spec));
                continue;
            };
            let entry = &mut entries[place];
            if entry.is_gone {
                tracing::info!("{} is a model again", spec.name);
            }
            let loaded = std::mem::take(&mut entry.loaded);
            *entry = Entry {
                loaded,
                ..Entry::new(spec)
            };
            is_there[place] = true;
        }
        for (entry, is_there) in entries.iter_mut().zip(is_there) {
            if !is_there && !entry.is_gone {
                tracing::info!("{} is no model any more", entry.spec.name);
                entry.is_gone = true;
            }
        }
        entries.iter().map(|entry| entry.is_gone).collect()
    }

    /// The models that there are, in their order.
    pub fn served(&self) -> Vec<Served> {
        let entries = self.entries();
        let served = entries.iter().enumerate().filter(|(_, e)| !e.is_gone);
        served.map(|(place, entry)| entry.served(place)).collect()
    }

    /// The names of the model at a place, which may be gone.
    pub fn at(&self, place: usize) -> Served {
        self.entries()[place].served(place)
    }

    /// Notes that clients have loaded an adapter into the process of the model at a place, or unloaded one.
    pub fn set_adapter(&self, place: usize, name: String, is_loaded: bool) {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let entry = &mut entries[place];
        entry.loaded.retain(|known| *known != name);
        if is_loaded && entry.spec.names().all(|known| known != name) {
            entry.loaded.push(name);
        }
    }

    /// Forgets the adapters that clients have loaded into a process that has ended.
    pub fn forget_adapters(&self, place: usize) {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        entries[place].loaded.clear();
    }

    /// The model at a place, which may be gone.
    pub fn spec(&self, place: usize) -> Arc<ModelSpec> {
        self.entries()[place].spec.clone()
    }

    /// The place of the model that serves `name`, which is its own or that of an adapter. An adapter that a client has
    /// loaded comes after all models, since one of its name may come later.
    pub fn place(&self, name: &str) -> Option<usize> {
        let entries = self.entries();
        let find = |is_named: &dyn Fn(&Entry) -> bool| {
            let mut entries = entries.iter();
            entries.position(|entry| !entry.is_gone && is_named(entry))
        };
        let is_loaded = |entry: &Entry| entry.loaded.iter().any(|known| known == name);
        find(&|entry| entry.spec.names().any(|known| known == name)).or_else(|| find(&is_loaded))
    }

    /// The place of the model that requests call `name`, perhaps with Ollama's tag.
    pub fn called(&self, name: &str) -> Option<usize> {
        find_tagged(name, |name| self.place(name))
    }

    /// The same.
    ///
    /// # Errors
    /// `NotFound`, with the names that there are.
    pub fn find(&self, name: &str) -> Result<usize> {
        self.called(name).ok_or_else(|| {
            Error::request(
                RequestErrorKind::NotFound,
                Some("model"),
                format!(
                    "the model `{name}` does not exist; served: {}",
                    self.names()
                ),
            )
        })
    }

    /// All names, for a message.
    pub fn names(&self) -> String {
        let served = self.served();
        let names = served.into_iter().flat_map(|model| model.names);
        names.collect::<Vec<_>>().join(", ")
    }

    fn entries(&self) -> RwLockReadGuard<'_, Vec<Entry>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn new(spec: ModelSpec) -> Self {
        Self {
            spec: Arc::new(spec),
            loaded: Vec::new(),
            is_gone: false,
        }
    }

    fn served(&self, place: usize) -> Served {
        let of_spec = self.spec.names().map(str::to_owned);
        Served {
            place,
            base: self.spec.name.clone(),
            names: of_spec.chain(self.loaded.iter().cloned()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, adapters: &[&str]) -> ModelSpec {
        ModelSpec {
            name: name.into(),
            adapters: adapters.iter().map(|&name| name.into()).collect(),
            args: Vec::new(),
        }
    }

    #[test]
    fn models_keep_their_places_while_others_come_and_go() {
        let catalog = Catalog::new(vec![spec("a", &["x"]), spec("b", &[])]);
        let places = |names: &[&str]| -> Vec<Option<usize>> {
            names.iter().map(|name| catalog.place(name)).collect()
        };
        assert_eq!(
            places(&["a", "x", "b", "c"]),
            [Some(0), Some(0), Some(1), None]
        );
        let gone = catalog.replace(vec![spec("c", &[]), spec("b", &["x"])]);
        assert_eq!(gone, [true, false, false]);
        assert_eq!(
            places(&["a", "x", "b", "c"]),
            [None, Some(1), Some(1), Some(2)]
        );
        let error = catalog.find("a").err().map(|e| e.to_string());
        let expected = "the model `a` does not exist; served: b, x, c";
        assert_eq!(error.as_deref(), Some(expected));
        assert_eq!(catalog.spec(0).name, "a");
        assert_eq!(catalog.replace(vec![spec("a", &[])]), [false, true, true]);
        assert_eq!(places(&["a", "x", "b", "c"]), [Some(0), None, None, None]);
        let served = catalog.served();
        assert_eq!((served.len(), served[0].place), (1, 0));
        assert_eq!(catalog.replace(Vec::new()), [true; 3]);
        assert_eq!(catalog.names(), "");
    }
    #[test]
    fn adapters_are_found_while_their_process_runs() {
        let catalog = Catalog::new(vec![spec("a", &["x"]), spec("b", &[])]);
        let load = |place: usize, name: &str| catalog.set_adapter(place, name.into(), true);
        load(1, "y");
        load(1, "z");
        // Loaded again in its place, and one of the start.
        load(1, "y");
        load(0, "x");
        assert_eq!(catalog.names(), "a, x, b, z, y");
        assert_eq!(catalog.place("y"), Some(1));
        catalog.set_adapter(1, "z".into(), false);
        assert_eq!(catalog.place("z"), None);
        // A model that comes later has its name.
        catalog.replace(vec![spec("b", &[]), spec("y", &[])]);
        assert_eq!(catalog.place("y"), Some(2));
        catalog.replace(vec![spec("b", &[])]);
        assert_eq!(catalog.place("y"), Some(1));
        assert_eq!(catalog.at(1).names, ["b", "y"]);
        catalog.forget_adapters(1);
        assert_eq!((catalog.place("y"), catalog.names()), (None, "b".into()));
    }
}
