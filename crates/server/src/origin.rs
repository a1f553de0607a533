//! The names that the server answers to, and the web pages that may use it.
//!
//! A browser lets any page send requests to this machine. Two checks keep pages out that nobody allowed: the
//! host must be one of ours, because a page can let its own name point to this machine (DNS rebinding), and
//! a request that changes or costs something must not come from a page of another origin.

use super::headers::{MAX_TOKENS, WARNING};
use super::request_id::{REQUEST_ID, X_REQUEST_ID};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use std::net::IpAddr;
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

const ANY: &str = "*";

/// Maximum time for which a browser may remember that a page is allowed.
const MAX_AGE: Duration = Duration::from_secs(600);

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Allowed hosts and origins.
#[derive(Debug, Clone, Default)]
#[cfg_attr(
    feature = "clap",
    derive(clap::Args),
    command(next_help_heading = "HTTP")
)]
pub struct OriginOptions {
    /// Names, separated by commas, that the Host header may have besides localhost, the addresses of this
    /// machine's loopback and --host; * = any. Without this flag, hosts are checked only if --host is a
    /// loopback address.
    #[cfg_attr(feature = "clap", arg(long, value_name = "HOSTS", value_delimiter = ',', value_parser = Self::host))]
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages, separated by commas, that may use the server from a browser, such as
    /// https://chat.example.com; * = any.
    // It is the text of a flag's help, too.
    #[allow(rustdoc::bare_urls)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "ORIGINS", value_delimiter = ',', value_parser = Self::origin))]
    pub allowed_origins: Vec<String>,
}

impl OriginOptions {
    /// Parses a name for [`OriginOptions::allowed_hosts`].
    ///
    /// # Errors
    /// What it accepts.
    pub fn host(text: &str) -> Result<String, String> {
        match text.trim() {
            "" => Err("must be a host name, or *".into()),
            host if host.contains('/') => Err(format!(
                "must be a host name without scheme and path, or *, not {host}"
            )),
            host => Ok(host.to_owned()),
        }
    }

    /// Parses an origin for [`OriginOptions::allowed_origins`].
    ///
    /// # Errors
    /// What it accepts.
    pub fn origin(text: &str) -> Result<String, String> {
        let text = text.trim().trim_end_matches('/');
        let is_origin = text.split_once("://").is_some_and(|(scheme, host)| {
            !scheme.is_empty() && !host.is_empty() && !host.contains('/')
        });
        if text == ANY || text == "null" || is_origin {
            Ok(text.to_owned())
        } else {
            Err("must be an origin such as https://chat.example.com, or *".into())
        }
    }
}

/// Checks requests against [`OriginOptions`].
#[derive(Debug, Clone, Default)]
pub(super) struct Origins {
    options: OriginOptions,
    /// The host that the operator chose to listen on.
    bound: String,
    loopback: bool,
}

impl Origins {
    pub fn new(options: OriginOptions, bound: &str) -> Self {
        Self {
            options,
            bound: bound.to_owned(),
            loopback: false,
        }
    }

    /// Says whether the listener is on a loopback address.
    pub fn on_loopback(mut self, loopback: bool) -> Self {
        self.loopback = loopback;
        self
    }

    /// Tells browsers which pages may use the server; `None` = those of its own origin.
    pub fn cors(&self) -> Option<CorsLayer> {
        let allowed = self.options.allowed_origins.clone();
        let origins = if allowed.is_empty() {
            return None;
        } else if allowed.iter().any(|allowed| allowed == ANY) {
            AllowOrigin::any()
        } else {
            AllowOrigin::predicate(move |origin, _| {
                let is = |a: &String| a.as_bytes().eq_ignore_ascii_case(origin.as_bytes());
                allowed.iter().any(is)
            })
        };
        let cors = CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST, Method::DELETE])
            .allow_headers(AllowHeaders::mirror_request())
            .allow_private_network(true)
            .expose_headers([
                header::RETRY_AFTER,
                X_REQUEST_ID,
                REQUEST_ID,
                MAX_TOKENS,
                WARNING,
            ])
            .max_age(MAX_AGE);
        Some(cors)
    }

    /// Checks the host and the origin of a request.
    ///
    /// # Errors
    /// `Forbidden`, naming the flag that would allow it.
    pub fn check<B>(&self, request: &Request<B>) -> Result<()> {
        let headers = request.headers();
        let host = requested_host(request.uri(), headers);
        self.check_host(host.as_deref())?;
        let site = headers.get(SEC_FETCH_SITE).map(HeaderValue::as_bytes);
        let Some(origin) = headers.get(header::ORIGIN) else {
            let foreign = matches!(site, Some(b"cross-site" | b"same-site"));
            return if foreign && !request.method().is_safe() {
                Err(forbidden_origin("another site"))
            } else {
                Ok(())
            };
        };
        let name = String::from_utf8_lossy(origin.as_bytes());
        let allowed = &self.options.allowed_origins;
        let allowed = allowed
            .iter()
            .any(|a| a == ANY || a.eq_ignore_ascii_case(&name));
        let same = site == Some(b"same-origin")
            || (name.split_once("://").zip(host))
                .is_some_and(|((_, authority), host)| authority.eq_ignore_ascii_case(&host));
        let harmless = matches!(*request.method(), Method::GET | Method::HEAD);
        if allowed || same || harmless {
            Ok(())
        } else {
            Err(forbidden_origin(&name))
        }
    }

    fn check_host(&self, host: Option<&str>) -> Result<()> {
        let allowed = &self.options.allowed_hosts;
        let checked = self.loopback || !allowed.is_empty();
        // Browsers always name a host.
        let Some(host) = host.filter(|_| checked) else {
            return Ok(());
        };
        let name = without_port(host);
        let is = |other: &str| name.eq_ignore_ascii_case(other.trim_matches(['[', ']']));
        let is_loopback = match name.parse::<IpAddr>() {
            Ok(address) => address.is_loopback(),
            Err(_) => {
                let name = name.trim_end_matches('.').to_ascii_lowercase();
                name == "localhost" || name.ends_with(".localhost")
            }
        };
        if is_loopback || is(&self.bound) || allowed.iter().any(|a| a == ANY || is(a)) {
            return Ok(());
        }
        let message = format!(
            "the host {} is not allowed; the server's operator can allow it with --allowed-hosts",
            clipped(name)
        );
        Err(Error::request(RequestErrorKind::Forbidden, None, message))
    }
}

/// The host, with its port, that the client asked.
fn requested_host(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let of_uri = uri
        .authority()
        .map(|authority| authority.as_str().to_owned());
    let of_header = || {
        let host = headers.get(header::HOST)?;
        Some(String::from_utf8_lossy(host.as_bytes()).into_owned())
    };
    of_uri.or_else(of_header)
}

/// `name`, `name:80`, `[::1]` or `[::1]:80` without port and brackets.
fn without_port(host: &str) -> &str {
    if let Some((address, _)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address;
    }
    host.split_once(':').map_or(host, |(name, _)| name)
}

fn forbidden_origin(origin: &str) -> Error {
    let message = format!(
        "requests of web pages from {} are not allowed; the server's operator can allow them with --allowed-origins",
        clipped(origin)
    );
    Error::request(RequestErrorKind::Forbidden, None, message)
}

/// A name in a message, of bounded length.
fn clipped(name: &str) -> String {
    const MAX: usize = 100;
    let start: String = name.chars().take(MAX).collect();
    format!("{start:?}")
}

#[cfg(test)]
mod tests;
