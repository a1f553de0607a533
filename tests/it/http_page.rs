//! The page at `/`. What it does in a browser is tested by `scripts/page-test.py`.

use crate::common::Toy;
use crate::common::server::{Server, error};
use foretoken::http::AppState;
use serde_json::json;

/// The page needs no key, because it asks for it, and allows itself nothing but its own script and this API.
#[tokio::test]
async fn the_page_is_there_unless_it_is_switched_off() {
    let with_key = |state: AppState| state.with_api_keys(vec!["secret".into()]);
    let server = Server::over(Toy::default().start(), with_key).await;
    let page = server.get("/").await;
    assert_eq!(page.status(), 200);
    let header = |name: &str| page.headers()[name].to_str().expect("text").to_owned();
    assert_eq!(header("content-type"), "text/html; charset=utf-8");
    assert_eq!(header("x-content-type-options"), "nosniff");
    assert_eq!(header("cache-control"), "no-store");
    let policy = header("content-security-policy");
    let nonce = policy.split("script-src 'nonce-").nth(1).expect("a nonce");
    let nonce = nonce.split('\'').next().expect("its end").to_owned();
    assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"));
    let text = page.text().await.expect("a whole page");
    for tag in ["script", "style"] {
        assert_eq!(text.matches(&format!("<{tag}")).count(), 1);
        assert!(
            text.contains(&format!("<{tag} nonce=\"{nonce}\">")),
            "{tag}"
        );
    }
    assert!(!text.contains("{{") && text.contains("const API = \"chat/completions\";"));
    // As the API says it of a model without a template, of which the page does not know before.
    assert!(text.contains("detail.includes(\"no chat template\")"));
    for outside in [
        "http://",
        "https://",
        "@import",
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        " onclick=",
        " style=",
    ] {
        let found = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(outside), "{outside}");
    }
    let again = server.get("/").await.text().await.expect("a whole page");
    assert!(!again.contains(&nonce), "a nonce is used once");
    error(server.get("/v1/models").await, 401, "invalid_api_key").await;
    error(
        server.post("/", &json!({})).await,
        405,
        "method_not_allowed",
    )
    .await;
    server.done().await;

    let off = Server::over(Toy::default().start(), |s| s.with_ui(false)).await;
    error(off.get("/").await, 404, "not_found").await;
    off.done().await;
    let off = |state| with_key(state).with_ui(false);
    let off = Server::over(Toy::default().start(), off).await;
    error(off.get("/").await, 401, "invalid_api_key").await;
    off.done().await;
}
