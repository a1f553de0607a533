//! Accepts connections: not more than may be open, and whatever accepting them meets.

use super::connection;
use super::limits::HttpLimits;
use super::tls::Tls;
use axum::Router;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Maximum number of connections over the limit that are told so at a time. Others are closed without a word.
const MAX_REFUSALS: usize = 64;

/// Maximum time until a client that is refused begins its request.
const PATIENCE: Duration = Duration::from_secs(1);

/// The pause after an error that would come again at once, such as that of no free file descriptor.
const PAUSE: Duration = Duration::from_millis(100);

/// The minimum time between two log lines about such errors.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);

/// Serves all connections, with `tls` if there is any, until `closing` becomes true, and then those that have a request.
/// Those over the limit are answered by `full`. Dropping the future closes them all.
pub(super) async fn run(
    listener: TcpListener,
    tls: Option<Tls>,
    router: Router,
    full: Router,
    limits: HttpLimits,
    mut closing: watch::Receiver<bool>,
) {
    let refusal_limits = Arc::new(HttpLimits {
        timeout_headers: PATIENCE,
        // In HTTP/2 a reply does not end the connection.
        timeout_keep_alive: PATIENCE,
        ..limits.clone()
    });
    let limits = Arc::new(limits);
    let places = Arc::new(Semaphore::new(
        limits.max_connections.min(Semaphore::MAX_PERMITS),
    ));
    let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
    let mut connections = JoinSet::new();
    let (mut failures, mut refused) = (Warnings::default(), Warnings::default());
    loop {
        let accepted = tokio::select! {
            _ = closing.wait_for(|&closing| closing) => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) if concerns_one_connection(&e) => continue,
            Err(e) => {
                failures.warn(&format!("cannot accept connections: {e}"));
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        // Chunks of a stream are small and must not wait for each other.
        if let Err(e) = stream.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY: {e}");
        }
        let (router, limits, place) = if let Ok(place) = places.clone().try_acquire_owned() {
            (&router, &limits, place)
        } else {
            let max = limits.max_connections;
            refused.warn(&format!(
                "refusing connections: {max} are open (--max-connections)"
            ));
            match refusals.clone().try_acquire_owned() {
                Ok(place) => (&full, &refusal_limits, place),
                Err(_) => continue,
            }
        };
        let (router, limits, tls) = (router.clone(), limits.clone(), tls.clone());
        let closing = closing.clone();
        connections.spawn(async move {
            connection::serve(stream, tls, router, &limits, closing).await;
            drop(place);
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

fn concerns_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    let kinds = [
        ConnectionAborted,
        ConnectionRefused,
        ConnectionReset,
        Interrupted,
    ];
    kinds.contains(&error.kind())
}

/// Log lines that would otherwise come with every connection.
#[derive(Default)]
struct Warnings {
    last: Option<Instant>,
    left_out: usize,
}

impl Warnings {
    fn warn(&mut self, line: &str) {
        if self
            .last
            .is_some_and(|last| last.elapsed() < BETWEEN_WARNINGS)
        {
            self.left_out += 1;
            return;
        }
        match std::mem::take(&mut self.left_out) {
            0 => tracing::warn!("{line}"),
            n => tracing::warn!("{line} ({n} lines like this were left out)"),
        }
        self.last = Some(Instant::now());
    }
}
