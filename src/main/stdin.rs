//! The end of stdin, with which a program that has started this one ends it, even by dying.

use crate::exit;
use foretoken::error::{Error, Result};
use std::sync::Arc;
use tokio::sync::watch;

/// Watches stdin, if it was asked to.
pub struct StdinEnd(Option<Arc<watch::Sender<bool>>>);

impl StdinEnd {
    /// Watches stdin from now on if it is `watched`. At its end, the process ends at once, until somebody waits for it:
    /// the loading of a model cannot be ended otherwise.
    ///
    /// # Errors
    /// `Setup`, if there is no thread for it.
    pub fn watch(watched: bool) -> Result<Self> {
        if !watched {
            return Ok(Self(None));
        }
        let end = Arc::new(watch::Sender::new(false));
        let ended = end.clone();
        let read = move || {
            // What cannot be read has ended, too.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            ended.send_replace(true);
            if ended.receiver_count() == 0 {
                exit::at_once(0);
            }
        };
        let thread = std::thread::Builder::new().name("stdin".into());
        let started = thread.spawn(read);
        started.map_err(|e| Error::setup(format!("cannot start a thread for stdin: {e}")))?;
        Ok(Self(Some(end)))
    }

    /// Waits for the end; for ever, if stdin is not watched.
    pub async fn ended(self) {
        let Some(end) = self.0 else {
            return std::future::pending().await;
        };
        // The sender is in `self`.
        let _ = end.subscribe().wait_for(|&ended| ended).await;
    }
}
