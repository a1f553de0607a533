//! Stands for traces in a program that was built without them.

use crate::error::Result;
use crate::http::Observer;
use prometheus::Registry;
use std::sync::Arc;

/// None.
pub struct Traces;

impl Traces {
    /// Warns if the environment asks for traces. The flag is refused when it is parsed.
    ///
    /// # Errors
    /// None.
    pub fn start(_endpoint: Option<&str>, _metrics: &Registry) -> Result<Self> {
        let names = [
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "OTEL_EXPORTER_OTLP_ENDPOINT",
        ];
        let is_set = |name: &&&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if let Some(name) = names.iter().find(is_set) {
            tracing::warn!(
                "{name} is set, but this program was built without traces: build it with --features otel"
            );
        }
        Ok(Self)
    }

    /// Nobody.
    pub fn observer(&self) -> Option<Arc<dyn Observer>> {
        None
    }

    /// Does nothing.
    pub fn shut_down(&self) {}
}
