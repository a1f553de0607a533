//! A certificate that is renewed on disk is taken while the server runs.

use foretoken::error::Result;
use foretoken::http::Tls;
use foretoken::signals::{self, HangUp};
use std::future::pending;
use std::io::IsTerminal;
use std::time::Duration;

/// How often the files are read.
const PERIOD: Duration = Duration::from_secs(60);
/// The time after which files that do not go together are read once more: whoever renews them writes one after the other.
const WHILE_WRITTEN: Duration = Duration::from_secs(1);

/// Reads the certificate's files again once a minute, and at each SIGHUP, unless the server has a terminal, whose end that
/// signal is then. Needs a runtime.
///
/// # Errors
/// `Setup`, if the system refuses to tell of the signal.
pub fn follow(tls: Option<&Tls>) -> Result<()> {
    if let Some(tls) = tls {
        let has_terminal = std::io::stdin().is_terminal();
        let hang_up = (!has_terminal).then(signals::hang_up).transpose()?;
        tokio::spawn(refresh(tls.clone(), hang_up, PERIOD));
    }
    Ok(())
}

async fn refresh(tls: Tls, mut hang_up: Option<HangUp>, period: Duration) {
    let mut told = None;
    loop {
        let asked = async {
            match &mut hang_up {
                Some(signal) => signal.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = asked => told = None,
            () = tokio::time::sleep(period) => {}
        }
        let mut read = again(&tls).await;
        if read.is_err() {
            tokio::time::sleep(WHILE_WRITTEN).await;
            read = again(&tls).await;
        }
        let problem = match read {
            Ok(is_other) => {
                if is_other {
                    let file = tls.certificate().display();
                    tracing::info!("new connections have the new certificate of {file}");
                }
                None
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = problem
            .as_ref()
            .filter(|error| told.as_ref() != Some(*error))
        {
            tracing::warn!("the certificate stays as it was: {error}");
        }
        told = problem;
    }
}

/// Reads the files on a thread that may wait for a disk.
async fn again(tls: &Tls) -> Result<bool> {
    let tls = tls.clone();
    let read = tokio::task::spawn_blocking(move || tls.refresh());
    // It fails only when the runtime ends.
    read.await.unwrap_or(Ok(false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::Instant;

    #[tokio::test]
    async fn files_are_read_again_without_a_signal() {
        let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls");
        let folder = tempfile::tempdir().unwrap();
        let [cert, key] = ["cert.pem", "key.pem"].map(|name| {
            let file = folder.path().join(name);
            std::fs::copy(stored.join(name), &file).unwrap();
            file
        });
        let tls = Tls::from_files(&cert, &key).unwrap();
        let before = tls.chain();
        let period = Duration::from_millis(20);
        let reading = tokio::spawn(refresh(tls.clone(), None, period));
        // The new certificate has the old key for a while.
        std::fs::copy(stored.join("other-cert.pem"), &cert).unwrap();
        tokio::time::sleep(10 * period).await;
        assert_eq!(tls.chain(), before);
        std::fs::copy(stored.join("other-key.pem"), &key).unwrap();
        let begun = Instant::now();
        while tls.chain() == before {
            assert!(begun.elapsed() < Duration::from_secs(30));
            tokio::time::sleep(period).await;
        }
        reading.abort();
    }
}
