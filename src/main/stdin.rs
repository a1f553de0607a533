//! The end of stdin, with which a program that has started this one ends it, even by dying.

use crate::exit;
use foretoken::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::watch;

/// Watches stdin, if it was asked to.
pub struct StdinEnd(Option<Arc<Watched>>);

struct Watched {
    has_ended: watch::Sender<bool>,
    /// Whether somebody has begun to wait for the end, and ends the process in order.
    is_awaited: AtomicBool,
}

impl StdinEnd {
    /// Watches stdin from now on if it `is_watched`. At its end, the process ends at once, until somebody waits for it:
    /// the loading of a model cannot be ended otherwise.
    ///
    /// # Errors
    /// `Setup`, if there is no thread for it.
    pub fn watch(is_watched: bool) -> Result<Self> {
        if !is_watched {
            return Ok(Self(None));
        }
        let watched = Arc::new(Watched {
            has_ended: watch::Sender::new(false),
            is_awaited: AtomicBool::new(false),
        });
        let end = watched.clone();
        let read = move || {
            // What cannot be read has ended, too.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            end.has_ended.send_replace(true);
            if !end.is_awaited.load(Ordering::SeqCst) {
                exit::at_once(0);
            }
        };
        let thread = std::thread::Builder::new().name("stdin".into());
        let started = thread.spawn(read);
        started.map_err(|e| Error::setup(format!("cannot start a thread for stdin: {e}")))?;
        Ok(Self(Some(watched)))
    }

    /// Waits for the end; for ever, if stdin is not watched.
    pub async fn ended(self) {
        let Some(watched) = self.0 else {
            return std::future::pending().await;
        };
        // A signal may come first: the process then ends in order, too.
        watched.is_awaited.store(true, Ordering::SeqCst);
        let mut end = watched.has_ended.subscribe();
        // The sender is in `self`.
        let _ = end.wait_for(|&ended| ended).await;
    }
}
