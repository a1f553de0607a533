//! The API as a part of another axum app: `cargo run --release --example router`, then
//! `curl http://127.0.0.1:8001/llm/v1/models`

use axum::Router;
use axum::routing::get;
use foretoken::error::{Error, Result};
use foretoken::{Foretoken, http};
use tokio::net::TcpListener;

/// Serves on `listener` until `shutdown` completes.
pub async fn serve(
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let running = Foretoken::load("foretoken-demo").start()?;
    let (state, _thread) = running.into_api()?;
    let app = Router::new()
        .route("/", get(|| async { "an app of your own" }))
        .nest("/llm", http::router(state));
    let served = axum::serve(listener, app).with_graceful_shutdown(shutdown);
    served.await.map_err(|e| Error::internal(e.to_string()))
}

#[tokio::main]
async fn main() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:8001").await;
    let listener = listener.map_err(|e| Error::setup(e.to_string()))?;
    serve(listener, std::future::pending()).await
}
