//! Request bodies that are sent compressed.

use super::context::{KeyIndex, client_id};
use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use flate2::write::{MultiGzDecoder, ZlibDecoder};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_text::grammar::ClientId;
use std::convert::Infallible;
use std::io::{self, Write};

/// The encodings of bodies that are accepted, as the header of a refusal lists them.
pub(super) const ACCEPTED: &str = "gzip, deflate";

/// The encoding of a body.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
    /// zlib's format (RFC 9110, 8.4.1.2).
    Deflate,
}

impl Encoding {
    /// Reads the encoding of a body from the headers of its request.
    ///
    /// # Errors
    /// `UnsupportedEncoding`, naming the accepted encodings.
    fn of(headers: &HeaderMap) -> Result<Self> {
        let values = headers.get_all(header::CONTENT_ENCODING).iter();
        let values = values.map(|value| String::from_utf8_lossy(value.as_bytes()));
        let names = values.collect::<Vec<_>>().join(",").to_ascii_lowercase();
        let names = names.split(',').map(str::trim);
        let names = names.filter(|name| !matches!(*name, "" | "identity"));
        match names.collect::<Vec<_>>()[..] {
            [] => Ok(Self::Identity),
            ["gzip" | "x-gzip"] => Ok(Self::Gzip),
            ["deflate"] => Ok(Self::Deflate),
            _ => {
                let message = format!("the body's Content-Encoding must be one of {ACCEPTED}");
                let kind = RequestErrorKind::UnsupportedEncoding;
                Err(Error::request(kind, None, message))
            }
        }
    }
}

/// The body of a request as it is sent.
pub(super) struct SentBody {
    pub body: Body,
    pub encoding: Result<Encoding>,
    /// `None` where no key is needed.
    pub key: Option<KeyIndex>,
    pub client: ClientId,
}

impl From<Body> for SentBody {
    fn from(body: Body) -> Self {
        let encoding = Ok(Encoding::Identity);
        Self {
            body,
            encoding,
            key: None,
            client: ClientId::default(),
        }
    }
}

impl<S: Sync> FromRequest<S> for SentBody {
    type Rejection = Infallible;

    async fn from_request(request: Request, _: &S) -> Result<Self, Infallible> {
        let extensions = request.extensions();
        let key = extensions.get().copied();
        Ok(Self {
            encoding: Encoding::of(request.headers()),
            key,
            client: client_id(key, extensions.get().copied()),
            body: request.into_body(),
        })
    }
}

/// Decodes what is written to it, and writes the result to another writer, which may refuse it.
pub(super) enum BodyDecoder<W: Write> {
    Identity(W),
    Gzip(MultiGzDecoder<W>),
    Deflate(ZlibDecoder<W>),
}

impl<W: Write> BodyDecoder<W> {
    pub fn new(encoding: Encoding, out: W) -> Self {
        match encoding {
            Encoding::Identity => Self::Identity(out),
            Encoding::Gzip => Self::Gzip(MultiGzDecoder::new(out)),
            Encoding::Deflate => Self::Deflate(ZlibDecoder::new(out)),
        }
    }

    /// Decodes the next bytes.
    ///
    /// # Errors
    /// An error if the bytes are not of this encoding, or the other writer's error.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Identity(out) => out.write_all(bytes),
            Self::Gzip(decoder) => decoder.write_all(bytes),
            Self::Deflate(decoder) => decoder.write_all(bytes),
        }
    }

    /// The other writer, which has all bytes.
    ///
    /// # Errors
    /// The errors of [`BodyDecoder::write`], or an error if bytes are missing at the end.
    pub fn finish(self) -> io::Result<W> {
        match self {
            Self::Identity(out) => Ok(out),
            Self::Gzip(decoder) => decoder.finish(),
            Self::Deflate(decoder) => decoder.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn one_known_encoding_is_accepted() {
        let of = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                let value = HeaderValue::from_str(value).expect("a value");
                headers.append(header::CONTENT_ENCODING, value);
            }
            Encoding::of(&headers).ok()
        };
        for (values, encoding) in [
            (&[][..], Some(Encoding::Identity)),
            (&["identity", ""], Some(Encoding::Identity)),
            (&["GZip"], Some(Encoding::Gzip)),
            (&["x-gzip, identity"], Some(Encoding::Gzip)),
            (&["deflate"], Some(Encoding::Deflate)),
            (&["br"], None),
            (&["zstd"], None),
            (&["gzip, gzip"], None),
            (&["gzip", "deflate"], None),
        ] {
            assert_eq!(of(values), encoding, "{values:?}");
        }
    }
}
