//! Requests of the process itself, answered as those that come over HTTP.

use super::request_id::X_REQUEST_ID;
use axum::Router;
use axum::body::Body;
use axum::http::{Request, header};
use foretoken_core::error::{Error, Result};
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

/// A router for requests of its own process.
#[derive(Debug, Clone)]
pub struct InProcess(TowerToHyperService<Router>);

/// The answer to a request of the process itself.
#[derive(Debug)]
pub struct WholeAnswer {
    /// The status in HTTP.
    pub status: u16,
    /// The id of the request.
    pub request_id: String,
    /// Whether the request is to be sent again later, because others take all places.
    pub is_busy: bool,
    /// The body, which is JSON text.
    pub body: String,
}

impl InProcess {
    /// Sends requests to `router`.
    pub fn new(router: Router) -> Self {
        Self(TowerToHyperService::new(router))
    }

    /// Sends `body`, which is JSON text, to `path`, and waits for the whole answer.
    ///
    /// # Errors
    /// `Internal`, if `path` is no path, or the answer breaks off.
    pub async fn post(&self, path: &str, body: String) -> Result<WholeAnswer> {
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body))
            .map_err(|e| Error::internal(format!("a request: {e}")))?;
        let Ok(response) = self.0.call(request).await;
        let (head, body) = response.into_parts();
        let id = head.headers.get(X_REQUEST_ID);
        let id = id.and_then(|id| id.to_str().ok());
        let broken = |e| Error::internal(format!("an answer: {e}"));
        let body = body.collect().await.map_err(broken)?.to_bytes();
        Ok(WholeAnswer {
            status: head.status.as_u16(),
            request_id: id.unwrap_or_default().to_owned(),
            is_busy: head.headers.contains_key(header::RETRY_AFTER),
            body: String::from_utf8_lossy(&body).into_owned(),
        })
    }
}
