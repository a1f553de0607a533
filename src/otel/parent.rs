//! The span that a request belongs to, as its headers say (W3C Trace Context, level 1).

use crate::http::RequestRecord;
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry_sdk::propagation::TraceContextPropagator;

/// The context of the client's span; an empty one if the headers are missing or malformed.
pub fn of(request: &RequestRecord) -> Context {
    let parent = request.traceparent.as_deref().map(str::trim);
    match parent.filter(|parent| is_well_formed(parent)) {
        Some(_) => {
            let headers = Headers(request);
            TraceContextPropagator::new().extract_with_context(&Context::new(), &headers)
        }
        None => Context::new(),
    }
}

/// Whether `parent` is `version-trace_id-parent_id-flags` in lowercase digits of the right lengths. A later
/// version may have more after another dash; version ff is none. The propagator does not look at lengths.
fn is_well_formed(parent: &str) -> bool {
    let mut parts = parent.split('-');
    let lengths = [2, 32, 16, 2];
    let is_hex = |part: &str| part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let well_formed = lengths
        .iter()
        .all(|&len| (parts.next()).is_some_and(|part| part.len() == len && is_hex(part)));
    well_formed
        && !parent.starts_with("ff")
        && (!parent.starts_with("00") || parts.next().is_none())
}

struct Headers<'a>(&'a RequestRecord);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => self.0.traceparent.as_deref(),
            "tracestate" => self.0.tracestate.as_deref(),
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_parents_are_recognized() {
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        for good in [
            format!("00-{trace}-{span}-01"),
            format!("00-{trace}-{span}-ff"),
            format!("01-{trace}-{span}-00-more"),
            format!("cc-{trace}-{span}-00"),
        ] {
            assert!(is_well_formed(&good), "{good}");
        }
        for bad in [
            String::new(),
            "00".into(),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-{span}-01-more"),
            format!("00-{trace}-{span}-1"),
            format!("ff-{trace}-{span}-01"),
            format!("+0-{trace}-{span}-01"),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{}-{span}-01", &trace[1..]),
            format!("00-{trace}-{}-01", &span[1..]),
            format!("00-{trace}-{span}-0g"),
        ] {
            assert!(!is_well_formed(&bad), "{bad}");
        }
    }
}
