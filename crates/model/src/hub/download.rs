//! The HTTP client of the Hugging Face Hub: describes and downloads files of a repository.

use super::error::HubError;
use super::partial::Partial;
use super::remote::{RemoteFile, header};
use foretoken_core::error::clipped;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;
use ureq::config::RedirectAuthHeaders;
use ureq::http::Response;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::typestate::WithoutBody;
use ureq::{Agent, Body, RequestBuilder, ResponseExt};

/// Maximum number of redirects when a file is described.
const MAX_REDIRECTS: usize = 5;
/// Attempts to get an answer before the Hub counts as unreachable.
const MAX_TRIES: usize = 3;
/// Attempts without new bytes before a download is given up. The pauses between them add up to 9 s.
const MAX_DOWNLOAD_TRIES: u32 = 6;
/// Bytes of a repository's list of files.
const MAX_LIST_BYTES: u64 = 16 << 20;
/// The first pause between two attempts.
const PAUSE: Duration = Duration::from_millis(300);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without a byte after which a connection counts as broken.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// A client of one Hub, with the token that it sends.
pub struct HubClient {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

impl HubClient {
    /// A client of the Hub at `endpoint`, such as `https://host`. Certificates are verified against the
    /// platform's root certificates.
    pub fn new(endpoint: &str, token: Option<String>) -> Self {
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier);
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .tls_config(tls.build())
            // The token is for the Hub only, not for the target of a redirect. Redirects within the Hub
            // are followed by [`HubClient::describe`].
            .redirect_auth_headers(RedirectAuthHeaders::Never)
            .user_agent(concat!("foretoken/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(READ_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT));
        Self {
            agent: config.build().into(),
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token,
        }
    }

    /// Describes the file `name` of model `id` at `revision`.
    ///
    /// # Errors
    /// Returns one of the errors that [`HubError`] lists.
    pub fn describe(&self, id: &str, revision: &str, name: &str) -> Result<RemoteFile, HubError> {
        let revision = escape(revision).replace('/', "%2F");
        let path = format!("{id}/resolve/{revision}/{}", escape(name));
        let mut file = RemoteFile::at(format!("{}/{path}", self.endpoint));
        for _ in 0..MAX_REDIRECTS {
            let answer = self.head(&file.url)?;
            file.read(answer.headers(), answer.status().is_success());
            let next = header(answer.headers(), "location");
            match next.and_then(|next| self.own_url(&next)) {
                // A renamed model, or the Hub's own cache. A redirect to a store elsewhere is followed
                // only by the download.
                Some(next) if answer.status().is_redirection() => file.url = next,
                _ => return Ok(file),
            }
        }
        Err(HubError::Other(format!("{path}: too many redirects")))
    }

    /// The commit that `revision` of model `id` points to, and the names of its files. Neither is validated.
    ///
    /// # Errors
    /// Returns one of the errors that [`HubError`] lists.
    pub fn list(
        &self,
        id: &str,
        revision: &str,
    ) -> Result<(Option<String>, Vec<String>), HubError> {
        #[derive(serde::Deserialize)]
        struct Listing {
            sha: Option<String>,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(serde::Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let revision = escape(revision).replace('/', "%2F");
        let url = format!("{}/api/models/{id}/revision/{revision}", self.endpoint);
        let answer = self.retry(|| self.agent.get(&url))?;
        let mut text = String::new();
        let body = answer.into_body().into_reader();
        body.take(MAX_LIST_BYTES)
            .read_to_string(&mut text)
            .map_err(|e| HubError::Unreachable(e.to_string()))?;
        let listing: Listing = serde_json::from_str(&text)
            .map_err(|e| HubError::Other(format!("the Hub's list of files: {e}")))?;
        let names = listing.siblings.into_iter().map(|file| file.rfilename);
        Ok((listing.sha, names.collect()))
    }

    /// Downloads `file` to `part`, and resumes if `part` already has bytes. Calls
    /// `progress(done, total)`, in bytes, as they arrive. `limit` is the maximum size in bytes.
    ///
    /// # Errors
    /// Returns one of the errors that [`HubError`] lists. The bytes received so far stay in `part`, unless they are not
    /// those of `file`, or too many.
    pub fn download(
        &self,
        file: &RemoteFile,
        part: &Path,
        limit: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), HubError> {
        let mut out = Partial::open(part, file)?;
        // A server that sends whole files only begins anew each time: what counts is how far it has ever come.
        let (mut most, mut tries) = (out.len(), 0);
        loop {
            let Err(error) = self.resume(file, &mut out, limit, progress) else {
                return out.finish();
            };
            if out.len() > most {
                (most, tries) = (out.len(), 0);
            }
            tries += 1;
            match error {
                HubError::Unreachable(why) if tries < MAX_DOWNLOAD_TRIES => {
                    tracing::info!("{why}: trying again, {} bytes are here", out.len());
                    std::thread::sleep(PAUSE * (1 << (tries - 1)));
                }
                HubError::Unreachable(why) if most > 0 => {
                    let why = format!("{why}; what has arrived is kept for the next try");
                    return Err(HubError::Unreachable(why));
                }
                HubError::Changed(_) => {
                    out.discard();
                    return Err(error);
                }
                error => return Err(error),
            }
        }
    }

    /// The `len` bytes of `file` from byte `from` on.
    ///
    /// # Errors
    /// Returns one of the errors that [`HubError`] lists. A server that sends whole files only is an error, too.
    pub fn range(&self, file: &RemoteFile, from: u64, len: u64) -> Result<Vec<u8>, HubError> {
        retried(|| self.range_once(file, from, len))
    }

    fn range_once(&self, file: &RemoteFile, from: u64, len: u64) -> Result<Vec<u8>, HubError> {
        let place = format!("{from}-{}", from.saturating_add(len) - 1);
        let request = self.agent.get(&file.url);
        let answer = self.send(request.header("range", format!("bytes={place}")))?;
        if answer.status() != 206 {
            return Err(HubError::Other(
                "the server sends whole files only (it ignores HTTP ranges), so the header cannot be read without the weights: download the model to check it".into(),
            ));
        }
        let sent = header(answer.headers(), "content-range").unwrap_or_default();
        if !sent.starts_with(&format!("bytes {place}/")) {
            let sent = clipped(&sent);
            return Err(HubError::Other(format!(
                "the server was asked for the bytes {place} of a file, but sent {sent:?}"
            )));
        }
        let mut bytes = Vec::new();
        let body = answer.into_body().into_reader();
        body.take(len)
            .read_to_end(&mut bytes)
            .map_err(|e| HubError::Unreachable(e.to_string()))?;
        if (bytes.len() as u64) < len {
            let sent = bytes.len();
            return Err(HubError::Unreachable(format!(
                "the connection ended after {sent} of {len} bytes"
            )));
        }
        Ok(bytes)
    }

    /// Sends one request for the bytes that `out` does not have yet.
    fn resume(
        &self,
        file: &RemoteFile,
        out: &mut Partial<'_>,
        limit: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), HubError> {
        if file.size == Some(out.len()) {
            return Ok(());
        }
        let mut request = self.with_token(self.agent.get(&file.url));
        if out.len() > 0 {
            request = request.header("range", format!("bytes={}-", out.len()));
        }
        let answer = request.call().map_err(unreachable)?;
        if answer.status() == 416 {
            out.clear()?;
            return Err(HubError::Unreachable(
                "the Hub refuses to resume the download".into(),
            ));
        }
        let answer = accept(answer)?;
        let total = total(file, out, &answer)?;
        let over = HubError::Other(format!("{} is over the limit of {limit} bytes", file.url));
        // What an earlier download of these bytes, as another file, has left may be over the limit.
        if total.is_some_and(|total| total > limit) || out.len() > limit {
            out.clear()?;
            return Err(over);
        }
        let has_end = total.is_some() || header(answer.headers(), "transfer-encoding").is_some();
        if !has_end && !out.has_hash() {
            let url = &file.url;
            return Err(HubError::Other(format!(
                "the Hub says neither how large {url} is nor what its hash is, so a part of it would be taken for the whole"
            )));
        }
        let mut body = answer.into_body().into_reader();
        let mut buffer = vec![0; 1 << 16];
        loop {
            progress(out.len(), total.unwrap_or(out.len()));
            let read = body.read(&mut buffer).map_err(|e| broken(out, &e))?;
            if read == 0 {
                break;
            }
            if out.len() + read as u64 > total.unwrap_or(limit) {
                out.clear()?;
                return Err(over);
            }
            out.write(&buffer[..read])?;
        }
        match total {
            Some(total) if out.len() < total => Err(HubError::Unreachable(format!(
                "the connection ended after {} of {total} bytes",
                out.len()
            ))),
            _ => Ok(()),
        }
    }

    fn head(&self, url: &str) -> Result<Response<Body>, HubError> {
        self.retry(|| self.agent.head(url).config().max_redirects(0).build())
    }

    /// Sends a request, with the token, until there is an answer.
    fn retry(
        &self,
        request: impl Fn() -> RequestBuilder<WithoutBody>,
    ) -> Result<Response<Body>, HubError> {
        retried(|| self.send(request()))
    }

    /// Sends a request, with the token.
    fn send(&self, request: RequestBuilder<WithoutBody>) -> Result<Response<Body>, HubError> {
        let answer = self.with_token(request).call();
        answer.map_err(unreachable).and_then(accept)
    }

    fn with_token(&self, request: RequestBuilder<WithoutBody>) -> RequestBuilder<WithoutBody> {
        match &self.token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        }
    }

    /// The URL that `location` names, if it is at this Hub.
    fn own_url(&self, location: &str) -> Option<String> {
        let scheme = self.endpoint.find("://")? + 3;
        let host_end = self.endpoint[scheme..].find('/').map(|end| scheme + end);
        let origin = &self.endpoint[..host_end.unwrap_or(self.endpoint.len())];
        let path = location.strip_prefix(origin).unwrap_or(location);
        let is_here = path.starts_with('/') && !path.starts_with("//");
        is_here.then(|| format!("{origin}{path}"))
    }
}

/// The size of `file` according to an `answer` that sends the bytes that `out` does not have; all of them, if it must be.
/// `None` = it ends by itself.
fn total(
    file: &RemoteFile,
    out: &mut Partial<'_>,
    answer: &Response<Body>,
) -> Result<Option<u64>, HubError> {
    let status = answer.status().as_u16();
    let sent = header(answer.headers(), "content-range").filter(|_| status == 206);
    let rest = format!("bytes {}-", out.len());
    let is_rest = out.len() > 0 && (sent.as_ref()).is_some_and(|sent| sent.starts_with(&rest));
    if !is_rest && out.len() > 0 {
        out.clear()?;
    }
    if !is_rest && status != 200 {
        let why = format!("the Hub does not send the bytes asked for (status {status})");
        return Err(HubError::Unreachable(why));
    }
    let total = match &sent {
        Some(sent) => sent.rsplit('/').next().and_then(|total| total.parse().ok()),
        None => answer.body().content_length(),
    };
    file.confirm(answer.headers(), answer.get_uri(), total)?;
    Ok(file.size.or(total))
}

/// The error of a connection that breaks off.
fn broken(out: &Partial<'_>, error: &io::Error) -> HubError {
    let done = out.len();
    HubError::Unreachable(format!("the connection broke after {done} bytes: {error}"))
}

/// What `ask` gives, which is called again while the Hub cannot be reached.
fn retried<T>(mut ask: impl FnMut() -> Result<T, HubError>) -> Result<T, HubError> {
    for _ in 1..MAX_TRIES {
        match ask() {
            Err(HubError::Unreachable(_)) => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
    ask()
}

/// An answer that is a success or a redirect.
fn accept(answer: Response<Body>) -> Result<Response<Body>, HubError> {
    match answer.status().as_u16() {
        200..=399 => Ok(answer),
        401 | 403 => Err(HubError::Denied),
        404 => Err(HubError::NotFound),
        status @ (408 | 429 | 500..) => Err(HubError::Unreachable(format!("status {status}"))),
        status => Err(HubError::Other(format!(
            "the Hub answered with status {status}"
        ))),
    }
}

fn unreachable(error: ureq::Error) -> HubError {
    match error {
        // A request is made of these, which are the user's.
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => HubError::Other(format!(
            "no request can be made of HF_ENDPOINT, which must be an address such as https://huggingface.co, and HF_TOKEN ({error})"
        )),
        error => HubError::Unreachable(error.to_string()),
    }
}

/// Percent-encodes `path` for a URL.
fn escape(path: &str) -> String {
    path.bytes()
        .map(|byte| match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}
