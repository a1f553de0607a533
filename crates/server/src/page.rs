//! The page at `/`, which shows speculation at work. It is one document that loads nothing but this API.

use super::state::AppState;
use axum::extract::State;
use axum::http::header;
use axum::response::{Html, IntoResponse};
use std::sync::LazyLock;

/// The page with its style and script, but with `{{nonce}}` instead of a nonce and `{{api}}` instead of the
/// path by which the model can be asked.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    include_str!("page/index.html")
        .replace("{{style}}", include_str!("page/style.css"))
        .replace(
            "{{script}}",
            concat!(
                include_str!("page/answer.js"),
                "\n",
                include_str!("page/markdown.js"),
                "\n",
                include_str!("page/chat.js")
            ),
        )
});

/// The page of a server.
pub(super) async fn page(State(state): State<AppState>) -> impl IntoResponse {
    document(state.text.has_chat_template())
}

/// The page, which asks for chats or for completions. Its nonce is new each time, so that nothing but its own script and
/// style ever runs, and no cache may keep it.
pub(super) fn document(chats: bool) -> impl IntoResponse {
    let nonce = format!("{:032x}", rand::random::<u128>());
    let api = if chats {
        "chat/completions"
    } else {
        "completions"
    };
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".into()),
        (header::REFERRER_POLICY, "no-referrer".into()),
        (header::CACHE_CONTROL, "no-store".into()),
    ];
    let page = PAGE.replace("{{nonce}}", &nonce).replace("{{api}}", api);
    (headers, Html(page))
}
