use super::fleet::tests::fleet;
use super::policy::Phase;
use super::*;
use flate2::Compression;
use flate2::write::GzEncoder;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use std::io::Write;

const KEY: &str = "secret";

/// A router of two models, `m0` and `m1`, whose clients need [`KEY`].
struct Rig {
    fleet: Arc<Fleet>,
    service: TowerToHyperService<Router>,
}

impl Rig {
    fn new() -> Self {
        Self::with_ui(true)
    }

    fn with_ui(ui: bool) -> Self {
        let fleet = fleet(&["cat", "cat"], 1, None);
        let state = RouterState {
            fleet: fleet.clone(),
            api_keys: Arc::new([KEY.to_owned()]),
            bodies: Arc::new(Bodies::new(&HttpLimits::default())),
            registry: Registry::new(),
            created: 0,
            ui,
        };
        let origins = Origins::new(OriginOptions::default(), "0.0.0.0");
        Self {
            fleet,
            service: TowerToHyperService::new(router(state, Arc::new(origins))),
        }
    }

    /// The status and the text of an answer.
    async fn send(&self, request: axum::http::request::Builder, body: Body) -> (u16, String) {
        let request = request.header(header::HOST, "router").body(body).unwrap();
        let Ok(answer) = self.service.call(request).await;
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await;
        let text = String::from_utf8(body.unwrap().to_vec()).unwrap();
        (status, text)
    }

    async fn without_key(&self, method: Method, path: &str) -> (u16, String) {
        let request = Request::builder().method(method).uri(path);
        self.send(request, Body::empty()).await
    }

    async fn with_key(&self, method: Method, path: &str) -> (u16, Value) {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("x-api-key", KEY);
        let (status, text) = self.send(request, Body::empty()).await;
        (status, serde_json::from_str(&text).unwrap_or_default())
    }

    async fn compressed(&self, path: &str, body: &Value) -> (u16, String) {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(body.to_string().as_bytes()).unwrap();
        let request = Request::post(path).header("x-api-key", KEY);
        let request = request.header(header::CONTENT_ENCODING, "gzip");
        let body = encoder.finish().unwrap();
        self.send(request, body.into()).await
    }

    /// Whether no process runs or was asked for.
    fn is_idle(&self) -> bool {
        let is_unloaded = |model| self.fleet.state(model).phase == Phase::Unloaded;
        self.fleet.load() == 0 && is_unloaded(0) && is_unloaded(1)
    }
}

#[tokio::test]
async fn what_needs_no_key_reaches_no_process() {
    let rig = Rig::new();
    for path in OPEN {
        assert!(routes().iter().any(|(own, _)| *own == path), "{path}");
        for query in ["", "/", "?model=m0"] {
            if (path, query) == ("/metrics", "?model=m0") {
                continue;
            }
            let address = format!("{path}{query}");
            let (status, answer) = rig.without_key(Method::GET, &address).await;
            assert_eq!(status, 200, "{address}: {answer}");
            let (status, answer) = rig.without_key(Method::POST, &address).await;
            let expected = if path == "/ping" { 200 } else { 405 };
            assert_eq!(status, expected, "{address}: {answer}");
        }
    }
    for (model, expected) in [("m0", 503), ("m2", 404)] {
        let path = format!("/metrics?model={model}");
        let (status, answer) = rig.without_key(Method::GET, &path).await;
        assert_eq!(status, expected, "{answer}");
        assert!(!answer.contains("m1"), "{answer}");
    }
    let (status, page) = rig.without_key(Method::GET, "/?model=m0").await;
    assert_eq!(status, 200);
    assert!(page.contains("<select id=\"model\""), "{page}");
    let (status, answer) = Rig::with_ui(false).without_key(Method::GET, "/").await;
    assert_eq!(status, 401, "{answer}");
    for path in ["/x", "/healthx", "/props?model=m0", "/api/tags", "/api/ps"] {
        let (status, answer) = rig.without_key(Method::GET, path).await;
        assert_eq!(status, 401, "{path}: {answer}");
    }
    assert!(rig.is_idle());
}

#[tokio::test]
async fn what_a_page_can_make_a_browser_send_starts_nothing() {
    let rig = Rig::new();
    for (method, a) in [
        (Method::GET, "a GET"),
        (Method::HEAD, "a HEAD"),
        (Method::OPTIONS, "an OPTIONS"),
    ] {
        let is_head = method == Method::HEAD;
        let (status, answer) = rig.with_key(method, "/tokenizer_info?model=m0").await;
        assert_eq!(status, 503, "{a}: {answer}");
        if !is_head {
            let error = &answer["error"];
            assert_eq!(error["code"], "model_unavailable");
            let message = format!(
                "the model `m0` is not loaded, and {a} starts none: load it with POST /models/load or a request"
            );
            assert_eq!(error["message"], *message);
        }
    }
    let (status, answer) = rig.with_key(Method::GET, "/props?model=m2").await;
    assert_eq!(status, 404, "{answer}");
    assert!(rig.is_idle());
}

/// What a process stores ends with it.
#[tokio::test]
async fn stored_responses_are_asked_for_and_deleted_without_a_start() {
    let rig = Rig::new();
    let response = "/v1/responses/resp_1?model=m0";
    let items = "/v1/responses/resp_1/input_items?model=m0";
    for (method, path) in [
        (Method::GET, response),
        (Method::GET, items),
        (Method::DELETE, response),
    ] {
        let (status, answer) = rig.with_key(method, path).await;
        let code = &answer["error"]["code"];
        assert_eq!((status, code), (503, &json!("model_unavailable")), "{path}");
    }
    assert!(rig.is_idle());
}

#[tokio::test]
async fn balancers_learn_that_the_router_ends() {
    let rig = Rig::new();
    let paths = ["/health", "/healthz", "/readyz", "/ping"];
    rig.fleet.shut_down();
    for path in paths {
        let (status, answer) = rig.with_key(Method::GET, path).await;
        assert_eq!(status, 503, "{path}");
        assert_eq!(answer["error"]["code"], "shutting_down", "{path}");
    }
    assert_eq!(rig.with_key(Method::GET, "/livez").await.0, 200);
    let (status, answer) = rig.with_key(Method::GET, "/props?model=m0").await;
    let code = &answer["error"]["code"];
    assert_eq!((status, code), (503, &json!("shutting_down")));
}

#[tokio::test]
async fn models_are_loaded_and_unloaded_by_compressed_bodies() {
    let rig = Rig::new();
    let body = json!({"model": "m1"});
    let success = (200, r#"{"success":true}"#.to_owned());
    assert_eq!(rig.compressed("/models/load", &body).await, success);
    assert!(!rig.is_idle());
    assert_eq!(rig.compressed("/models/unload", &body).await, success);
    rig.fleet.all_ended().await;
    assert!(rig.is_idle());
}

#[tokio::test]
async fn ollamas_clients_see_models_that_are_not_loaded() {
    let rig = Rig::new();
    let (status, list) = rig.with_key(Method::GET, "/api/tags").await;
    let model = |name: &str| {
        json!({
            "name": name, "model": name, "modified_at": "1970-01-01T00:00:00.000000Z", "size": 0, "digest": "",
            "details": {
                "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "",
                "quantization_level": ""
            }
        })
    };
    let expected = json!({"models": [model("m0:latest"), model("m1:latest")]});
    assert_eq!((status, list), (200, expected));
    let (status, list) = rig.with_key(Method::GET, "/api/ps").await;
    assert_eq!((status, list), (200, json!({"models": []})));
    assert!(rig.is_idle());
}
