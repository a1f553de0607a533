//! The forms of a path that name the same route.

use axum::http::Uri;
use axum::http::uri::PathAndQuery;

/// The first segments that a path without `/v1` may have.
const SHORT: [&str; 8] = [
    "chat",
    "completions",
    "embeddings",
    "messages",
    "models",
    "rerank",
    "responses",
    "score",
];

/// Other servers' names of routes, and the names that the routes have here.
const ALIASES: [(&str, &str); 3] = [
    ("/reranking", "/v1/rerank"),
    ("/v1/reranking", "/v1/rerank"),
    ("/v2/rerank", "/v1/rerank"),
];

/// Brings the path into the form that the routes have: no slash at the end, and `/v1` where clients were told
/// an address without it.
pub(super) fn normalize(uri: &mut Uri) {
    let Some(path) = normalized(uri.path()) else {
        return;
    };
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    let mut parts = std::mem::take(uri).into_parts();
    // A part of a path, or one with another before it, always is one.
    parts.path_and_query = PathAndQuery::try_from(target).ok().or(parts.path_and_query);
    *uri = Uri::from_parts(parts).unwrap_or_default();
}

/// `None` = it is in that form.
fn normalized(path: &str) -> Option<String> {
    let trimmed = path.trim_end_matches('/');
    if let Some((_, name)) = ALIASES.iter().find(|(alias, _)| *alias == trimmed) {
        return Some((*name).to_owned());
    }
    let first = trimmed.strip_prefix('/')?.split('/').next()?;
    if SHORT.contains(&first) {
        return Some(format!("/v1{trimmed}"));
    }
    (trimmed.len() < path.len()).then(|| trimmed.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_one_form() {
        for (path, expected) in [
            ("/", "/"),
            ("//", "//"),
            ("/health", "/health"),
            ("/health/", "/health"),
            ("/v1/models?a=/", "/v1/models?a=/"),
            ("/v1/models///?a=b&c", "/v1/models?a=b&c"),
            ("/models/org/name/", "/v1/models/org/name"),
            ("/chat/completions", "/v1/chat/completions"),
            ("/completions?", "/v1/completions?"),
            ("http://host:1/responses/", "http://host:1/v1/responses"),
            ("/rerank", "/v1/rerank"),
            ("/v2/rerank/", "/v1/rerank"),
            ("/v2/rerank/x", "/v2/rerank/x"),
            ("/reranking?a=b", "/v1/rerank?a=b"),
            ("/score", "/v1/score"),
            ("/modelsx", "/modelsx"),
            ("/v1", "/v1"),
            ("*", "*"),
        ] {
            let mut uri: Uri = path.parse().expect(path);
            normalize(&mut uri);
            let found = uri.to_string();
            assert_eq!(found, expected.parse::<Uri>().expect("a URI").to_string());
        }
    }
}
