//! Requests that browsers send for web pages: which hosts and origins are allowed.

use crate::common::Toy;
use crate::common::server::{Server, error, greedy};
use foretoken::http::OriginOptions;
use reqwest::Method;
use serde_json::json;

const PAGE: &str = "https://chat.example.com";

async fn server(hosts: &[&str], origins: &[&str]) -> Server {
    let own = |list: &[&str]| list.iter().map(|&s| s.to_owned()).collect();
    let options = OriginOptions {
        allowed_hosts: own(hosts),
        allowed_origins: own(origins),
    };
    let configure = |s: foretoken::http::AppState| {
        s.with_origins(options, "127.0.0.1")
            .with_api_keys(vec!["secret".into()])
    };
    Server::over(Toy::default().start(), configure).await
}

#[tokio::test]
async fn a_name_that_was_pointed_to_this_machine_is_refused() {
    let server = server(&["box.lan"], &[]).await;
    for (host, status) in [
        ("evil.example.com", 403),
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("box.lan:8000", 200),
    ] {
        let request = server.client.get(server.url.clone() + "/v1/models");
        let request = request.header("host", host).bearer_auth("secret");
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status, "{host}");
        if status == 403 {
            let told = error(response, 403, "forbidden").await;
            assert!(
                told["message"]
                    .as_str()
                    .unwrap()
                    .contains("--allowed-hosts"),
                "{told}"
            );
        }
    }
    server.done().await;
}

/// Browsers send text/plain without asking first.
#[tokio::test]
async fn a_page_of_another_origin_cannot_post() {
    let server = server(&[], &[]).await;
    let post = |origin: Option<&'static str>, content_type: &'static str| {
        let request = server.client.post(server.url.clone() + "/v1/completions");
        let request = request
            .bearer_auth("secret")
            .header("content-type", content_type);
        let request = request.body(greedy("abc", 1).to_string());
        match origin {
            Some(origin) => request.header("origin", origin).send(),
            None => request.send(),
        }
    };
    let told = post(Some(PAGE), "text/plain").await.unwrap();
    let told = error(told, 403, "forbidden").await;
    assert!(
        told["message"]
            .as_str()
            .unwrap()
            .contains("--allowed-origins"),
        "{told}"
    );
    assert_eq!(
        post(Some("null"), "application/json")
            .await
            .unwrap()
            .status(),
        403
    );
    // What curl -d and bare clients send.
    for content_type in [
        "application/x-www-form-urlencoded",
        "text/plain",
        "application/json",
    ] {
        assert_eq!(
            post(None, content_type).await.unwrap().status(),
            200,
            "{content_type}"
        );
    }
    server.done().await;
}

#[tokio::test]
async fn an_allowed_page_may_ask_and_read() {
    for (allowed, told) in [(PAGE, PAGE), ("*", "*")] {
        let server = server(&[], &[allowed]).await;
        let url = server.url.clone() + "/v1/chat/completions";
        let ask = server.client.request(Method::OPTIONS, &url);
        let ask = ask
            .header("origin", PAGE)
            .header("access-control-request-method", "POST")
            .header(
                "access-control-request-headers",
                "authorization,content-type",
            );
        let answer = ask.send().await.unwrap();
        assert_eq!(answer.status(), 200, "without the key");
        let headers = answer.headers();
        assert_eq!(headers["access-control-allow-origin"], told);
        assert_eq!(headers["access-control-allow-methods"], "GET,POST,DELETE");
        let expected = "authorization,content-type";
        assert_eq!(headers["access-control-allow-headers"], expected);

        let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
        for (key, status) in [("secret", 200), ("wrong", 401)] {
            let post = server.client.post(&url).bearer_auth(key).json(&chat);
            let reply = post.header("origin", PAGE).send().await.unwrap();
            assert_eq!(reply.status(), status);
            assert_eq!(reply.headers()["access-control-allow-origin"], told);
            let exposed = reply.headers()["access-control-expose-headers"]
                .to_str()
                .unwrap();
            for name in [
                "retry-after",
                "x-request-id",
                "request-id",
                "x-foretoken-max-tokens",
                "x-foretoken-warning",
            ] {
                let names: Vec<&str> = exposed.split(',').map(str::trim).collect();
                assert!(names.contains(&name), "{name}: {exposed}");
            }
        }
        server.done().await;
    }
    let server = server(&[], &["https://other.example.com"]).await;
    let ask = server
        .client
        .request(Method::OPTIONS, server.url.clone() + "/v1/models");
    let ask = ask
        .header("origin", PAGE)
        .header("access-control-request-method", "GET");
    error(ask.send().await.unwrap(), 403, "forbidden").await;
    server.done().await;
}
