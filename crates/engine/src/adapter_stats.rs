//! Which adapters requests use, as vLLM's `lora_requests_info` tells it.

use foretoken_core::model::Adapter;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, Opts};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

const NAME: &str = "foretoken:lora_requests_info";
const HELP: &str =
    "Adapters of requests that run and that wait, as labels; the value is the time in seconds";

/// A gauge with one sample, whose labels are the names and whose value is when they were so.
#[derive(Debug, Clone)]
pub(super) struct AdapterStats {
    desc: Desc,
    max: usize,
    used: Arc<Mutex<AdaptersInUse>>,
}

/// The names of adapters, joined by commas, and when they were noted, in seconds since 1970.
#[derive(Debug, Default)]
struct AdaptersInUse {
    running: String,
    waiting: String,
    seconds: f64,
}

impl AdapterStats {
    /// The gauge of an engine whose requests have at most `max` different adapters.
    ///
    /// # Errors
    /// Never: the names are constants and valid.
    pub fn new(max: usize) -> prometheus::Result<Self> {
        Ok(Self {
            desc: Desc::new(NAME.into(), HELP.into(), Vec::new(), HashMap::new())?,
            max,
            used: Arc::default(),
        })
    }

    /// Notes the adapters of requests that run and that wait.
    pub fn note<'a>(
        &self,
        running: impl Iterator<Item = &'a Arc<dyn Adapter>>,
        waiting: impl Iterator<Item = &'a Arc<dyn Adapter>>,
    ) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let noted = AdaptersInUse {
            running: names(running),
            waiting: names(waiting),
            seconds: now.unwrap_or_default().as_secs_f64(),
        };
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = noted;
    }
}

fn names<'a>(adapters: impl Iterator<Item = &'a Arc<dyn Adapter>>) -> String {
    let names: BTreeSet<&str> = adapters.map(|adapter| adapter.name()).collect();
    let names: Vec<&str> = names.into_iter().collect();
    names.join(",")
}

impl Collector for AdapterStats {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let options = Opts::new(NAME, HELP)
            .const_label("max_lora", self.max.to_string())
            .const_label("running_lora_adapters", &*used.running)
            .const_label("waiting_lora_adapters", &*used.waiting);
        let gauge = Gauge::with_opts(options);
        gauge.map_or_else(
            |_| Vec::new(),
            |gauge| {
                gauge.set(used.seconds);
                gauge.collect()
            },
        )
    }
}
