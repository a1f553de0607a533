//! The client of a request, and the headers that every response has about it.

use super::error::Refusal;
use super::request_id::{REQUEST_ID, RequestId, X_REQUEST_ID};
use super::trace::{Observer, RequestRecord, Trace};
use super::{anthropic, paths};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use foretoken_core::error::clipped;
use std::convert::Infallible;
use std::sync::Arc;

/// The client of a request: the id of the request, and its record.
pub(super) struct Caller {
    pub id: RequestId,
    /// `None` if nobody wants to know.
    pub trace: Option<Trace>,
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let id = parts.extensions.get().cloned();
        Ok(Self {
            id: id.unwrap_or_else(RequestId::random),
            trace: parts.extensions.get().cloned(),
        })
    }
}

/// Comes before all routes: brings the path into its usual form, gives the request its id, and says in one
/// line why a request was refused.
pub(super) async fn identify(
    State(observer): State<Option<Arc<dyn Observer>>>,
    mut request: Request,
    next: Next,
) -> Response {
    paths::normalize(request.uri_mut());
    let id = RequestId::of(request.headers());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    request.extensions_mut().insert(id.clone());
    let trace = observer.and_then(|observer| trace(observer, &id, &request));
    if let Some(trace) = &trace {
        request.extensions_mut().insert(trace.clone());
    }
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    let refusal = response.extensions_mut().remove();
    if let Some(trace) = trace {
        trace.answered(status, refusal.as_ref());
    }
    if let Some(Refusal { code, param, cause }) = refusal {
        let (request_id, path) = (&*id.0, clipped(&path));
        let param = param.as_deref().map(clipped);
        match cause {
            // What clients can cause is no warning.
            None => tracing::info!(
                request_id, %method, path, status, code, param, "request refused"
            ),
            Some(cause) => tracing::warn!(
                request_id, %method, path, status, code, "request failed: {cause}"
            ),
        }
    }
    if anthropic::has_route(&path) {
        id.mark(response.headers_mut(), REQUEST_ID);
    }
    id.mark(response.headers_mut(), X_REQUEST_ID);
    response
}

/// The record of the request, if this is one for text.
fn trace(observer: Arc<dyn Observer>, id: &RequestId, request: &Request) -> Option<Trace> {
    let (method, path) = (request.method().as_str(), request.uri().path());
    let mut record = RequestRecord::new(&id.0, method, path)?;
    let all = |name: &str| {
        let values = request.headers().get_all(name).iter();
        let values: Option<Vec<&str>> = values.map(|value| value.to_str().ok()).collect();
        values.filter(|values| !values.is_empty())
    };
    // Of several nobody knows which is right.
    let parent = all("traceparent").filter(|values| values.len() == 1);
    record.traceparent = parent.map(|values| values.concat());
    record.tracestate = all("tracestate").map(|values| values.join(","));
    Some(Trace::new(observer, record))
}
