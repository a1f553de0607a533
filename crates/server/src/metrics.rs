//! Metrics in Prometheus' text format.

use super::state::AppState;
use crate::error::Refused;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use foretoken_core::error::{Error, Result};
use prometheus::TextEncoder;

/// `GET /metrics`.
pub(super) async fn metrics(State(state): State<AppState>) -> Result<impl IntoResponse, Refused> {
    let mut families = state.engine.stats().registry.gather();
    for family in &mut families {
        let name = family.name().strip_prefix("foretoken:");
        if let Some(name) = name.map(|name| format!("{}:{name}", state.metrics_prefix)) {
            family.set_name(name);
        }
    }
    let text = TextEncoder::new()
        .encode_to_string(&families)
        .map_err(|e| Error::internal(format!("metrics: {e}")))?;
    Ok(([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text))
}
