//! The examples, run as the programs that they are.

use tokio::net::TcpListener;
use tokio::sync::oneshot;

#[path = "../../examples/embed.rs"]
#[allow(dead_code, reason = "its main function")]
mod embed;
#[path = "../../examples/own_drafter.rs"]
#[allow(dead_code, reason = "its main function")]
mod own_drafter;
#[path = "../../examples/router.rs"]
#[allow(dead_code, reason = "its main function")]
mod router;

#[test]
fn an_engine_is_embedded() {
    let (text, _) = embed::complete("foretoken-demo", "Once upon a time").unwrap();
    assert!(text.split_whitespace().count() > 20, "{text}");
    let error = embed::complete("no-such-folder/model.gguf", "a").unwrap_err();
    assert!(
        error.to_string().contains("no-such-folder/model.gguf"),
        "{error}"
    );
}

/// The text is the one that plain decoding gives.
#[test]
fn a_drafter_of_ones_own_changes_no_text() {
    let prompt = "Once upon a time";
    let (text, _) = own_drafter::complete(prompt).unwrap();
    let (plain, _) = embed::complete("foretoken-demo", prompt).unwrap();
    assert!(text.starts_with(&plain), "{text} is not {plain}");
    let (_, accepted) = own_drafter::complete("a b a b a b a b a b a b a b a b").unwrap();
    assert!(accepted > 0);
}

#[tokio::test]
async fn the_api_is_a_part_of_another_app() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let served = tokio::spawn(router::serve(listener, async {
        stopped.await.ok();
    }));
    let get = |path: &str| reqwest::get(format!("http://{address}{path}"));
    let own = get("/").await.unwrap().text().await.unwrap();
    assert_eq!(own, "an app of your own");
    let models = get("/llm/v1/models").await.unwrap().text().await.unwrap();
    assert!(models.contains("foretoken-demo"), "{models}");
    stop.send(()).unwrap();
    served.await.unwrap().unwrap();
}
