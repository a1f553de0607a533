//! TLS of connections: the certificate, the handshake, and which HTTP follows.

use foretoken_core::error::{Error, Result};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// Maximum size of a file of certificates or of a key.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The protocols that are offered (ALPN), the preferred one first.
const HTTP_2: &[u8] = b"h2";
const HTTP_1_1: &[u8] = b"http/1.1";

/// The first byte of a TLS connection: a record of its handshake (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;

/// The certificate and the key with which a listener speaks TLS. Clones share them.
#[derive(Clone)]
pub struct Tls {
    files: Arc<Files>,
    current: Arc<RwLock<Identity>>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish()
    }
}

impl Tls {
    /// Reads a chain of certificates, the server's own first, and the key of the first one. Both are PEM files.
    ///
    /// # Errors
    /// `Setup`, naming the file: it cannot be read, or has no certificate or key; or the key is another certificate's.
    pub fn from_files(certificates: &Path, key: &Path) -> Result<Self> {
        let files = Files {
            certificates: certificates.to_owned(),
            key: key.to_owned(),
        };
        Ok(Self {
            current: Arc::new(RwLock::new(files.read()?)),
            files: Arc::new(files),
        })
    }

    /// Reads the files again. If they have another certificate, handshakes from now on have that one; open connections
    /// go on. Whether there is another one.
    ///
    /// # Errors
    /// Those of [`Tls::from_files`]; the certificate stays as it is.
    pub fn refresh(&self) -> Result<bool> {
        let read = self.files.read()?;
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let is_other = read.chain != current.chain;
        if is_other {
            *current = read;
        }
        Ok(is_other)
    }

    /// The file of the certificate.
    pub fn certificate(&self) -> &Path {
        &self.files.certificates
    }

    /// The certificates that a handshake has now, in DER, the server's own first.
    pub fn chain(&self) -> Vec<Vec<u8>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        (current.chain.iter()).map(|one| one.to_vec()).collect()
    }

    fn acceptor(&self) -> TlsAcceptor {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.acceptor.clone()
    }

    /// The handshake with a client. Of one that speaks something else than TLS, nothing is read.
    ///
    /// # Errors
    /// The handshake fails, or the connection.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<Accepted> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first != [HANDSHAKE] {
            return Ok(Accepted::Plain(stream));
        }
        let stream = Box::new(self.acceptor().accept(stream).await?);
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(HTTP_2);
        Ok(if is_http2 {
            Accepted::Http2(stream)
        } else {
            Accepted::Http1(stream)
        })
    }
}

/// The PEM files of a certificate and its key.
#[derive(Debug)]
struct Files {
    certificates: PathBuf,
    key: PathBuf,
}

/// What the files had when they were read.
struct Identity {
    chain: Vec<CertificateDer<'static>>,
    acceptor: TlsAcceptor,
}

impl Files {
    fn read(&self) -> Result<Identity> {
        let (certificates, key) = (&self.certificates, &self.key);
        let chain = CertificateDer::pem_slice_iter(&read(certificates)?)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| Error::in_file(certificates, e))?;
        if chain.is_empty() {
            return Err(Error::in_file(
                certificates,
                "there is no certificate in PEM",
            ));
        }
        let secret = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|e| match e {
            pem::Error::NoItemsFound => Error::in_file(key, "there is no private key in PEM"),
            e => Error::in_file(key, e),
        })?;
        let versions = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions();
        let versions = versions.map_err(|e| Error::internal(format!("TLS: {e}")))?;
        let config = versions
            .with_no_client_auth()
            .with_single_cert(chain.clone(), secret);
        let mut config = config.map_err(|e| {
            let key = key.display();
            Error::in_file(certificates, format!("it does not go with {key}: {e}"))
        })?;
        config.alpn_protocols = [HTTP_2, HTTP_1_1].map(<[u8]>::to_vec).to_vec();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Ok(Identity { chain, acceptor })
    }
}

/// A connection of which it is known what it speaks.
pub(super) enum Accepted {
    Http1(Box<TlsStream<TcpStream>>),
    Http2(Box<TlsStream<TcpStream>>),
    /// No TLS.
    Plain(TcpStream),
}

/// The bytes of a file that may have so many.
fn read(file: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(file)
        .and_then(|opened| opened.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|e| Error::in_file(file, e))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::in_file(file, "it has more than 1 MiB"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_a_certificate_or_a_key_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tls");
        let path = |name: &str| match stored.join(name) {
            found if found.exists() => found,
            _ => folder.path().join(name),
        };
        std::fs::write(path("empty.pem"), "").unwrap();
        std::fs::write(path("large.pem"), vec![b'a'; (1 << 20) + 1]).unwrap();
        Tls::from_files(&path("cert.pem"), &path("key.pem")).unwrap();
        for (cert, key, needle) in [
            ("none.pem", "key.pem", "none.pem"),
            ("cert.pem", "none.pem", "none.pem"),
            ("empty.pem", "key.pem", "empty.pem: there is no certificate"),
            (
                "cert.pem",
                "empty.pem",
                "empty.pem: there is no private key",
            ),
            ("cert.pem", "cert.pem", "cert.pem: there is no private key"),
            ("large.pem", "key.pem", "large.pem: it has more than 1 MiB"),
            ("cert.pem", "other-key.pem", "it does not go with"),
        ] {
            let error = Tls::from_files(&path(cert), &path(key)).unwrap_err();
            assert!(matches!(error, Error::Setup(_)), "{error}");
            let error = error.to_string();
            assert!(
                error.contains(needle) && error.lines().count() == 1,
                "{error}"
            );
        }
    }
}
