//! Tests of a request's fields about drafts: predictions, their length, and whose texts they come from.

use super::*;

/// The tokens that a request with this `prediction` expects.
fn predicted(prediction: Value) -> Vec<u32> {
    let job = completion(json!({"prediction": prediction})).expect("accepted");
    job.requests[0].draft_context.prediction.to_vec()
}

#[test]
fn predictions_are_read_as_text() {
    let content = |content: Value| json!({"type": "content", "content": content});
    assert_eq!(predicted(content(json!("ab c"))), [0, 1, 26, 2]);
    let parts = json!([{"type": "text", "text": "ab"}, {"type": "text", "text": " c"}]);
    assert_eq!(predicted(content(parts)), [0, 1, 26, 2]);
    assert!(predicted(content(json!(""))).is_empty());
    assert!(predicted(Value::Null).is_empty());
    // No answer is longer than the context.
    assert_eq!(predicted(content(json!("z".repeat(1000)))).len(), 64);
    let job = chat(json!({"prediction": content(json!("b"))})).expect("accepted");
    assert_eq!(*job.requests[0].draft_context.prediction, [1]);
    let plain = json!({"prediction": content(json!("b")), "spec_length": 0});
    let job = completion(plain).expect("accepted");
    assert!(job.requests[0].draft_context.prediction.is_empty());
    for (bad, field) in [
        (json!({"type": "text", "content": "x"}), "prediction.type"),
        (json!({"type": "content"}), "prediction.content"),
        (content(json!(7)), "prediction.content"),
        (
            content(json!([{"type": "image_url"}])),
            "prediction.content[0].type",
        ),
    ] {
        refused(completion(json!({"prediction": bad})), field);
    }
}

#[test]
fn a_deeper_draft_than_the_servers_is_cut_to_it() {
    for (asked, length) in [(0, 0), (3, 3), (4, 4), (5, 4), (1_000_000, 4)] {
        let job = completion(json!({"spec_length": asked})).expect("accepted");
        assert_eq!(job.requests[0].spec_length, Some(length));
        assert_eq!(job.header.speculates, asked > 0);
    }
    for (name, rule) in [
        ("coupled", Acceptance::Coupled),
        ("rejection", Acceptance::Rejection),
    ] {
        let job = chat(json!({"acceptance": name})).expect("accepted");
        assert_eq!(job.requests[0].acceptance, Some(rule));
    }
    let job = completion(json!({})).expect("accepted");
    assert_eq!(job.requests[0].acceptance, None);
}

/// Only a request that names a lossy rule gets one.
#[test]
fn lossy_rules_are_asked_for_by_name() {
    let typical = |threshold, alpha| LossyRule::Typical { threshold, alpha };
    let lenient = |lenience| LossyRule::Lenient { lenience };
    for (body, rule) in [
        (json!({}), None),
        (json!({"acceptance": "coupled"}), None),
        (json!({"acceptance": "typical"}), Some(typical(0.09, 0.3))),
        (
            json!({"acceptance": "typical", "posterior_threshold": 1, "posterior_alpha": 0}),
            Some(typical(1.0, 0.0)),
        ),
        (json!({"acceptance": "lenient"}), Some(lenient(0.5))),
        (
            json!({"acceptance": "lenient", "lenience": 1}),
            Some(lenient(1.0)),
        ),
        (
            json!({"acceptance": "lenient", "lenience": 1e-60}),
            Some(lenient(f32::MIN_POSITIVE)),
        ),
    ] {
        for job in [completion(body.clone()), chat(body.clone())] {
            let job = job.expect("accepted");
            assert_eq!(job.requests[0].lossy, rule, "{body}");
            assert_eq!(job.header.lossy, rule.map(LossyRule::name));
        }
    }
    for (name, field, bad) in [
        ("lenient", "lenience", 0.0),
        ("lenient", "lenience", 1.5),
        ("lenient", "posterior_alpha", 0.3),
        ("typical", "posterior_alpha", 1.5),
        ("typical", "posterior_threshold", -0.5),
        ("typical", "lenience", 0.5),
    ] {
        refused(completion(json!({"acceptance": name, field: bad})), field);
    }
}

#[test]
fn only_the_same_key_and_salt_have_the_same_scope() {
    let scope = |key: Option<&str>, body: Value| {
        let mut body = body;
        body["prompt"] = "ab".into();
        let body = body.to_string();
        let job = with_key(key, |context| context.completion(body.as_bytes()));
        job.expect("accepted").requests[0].draft_context.scope
    };
    let salted = |salt: &str| json!({"cache_salt": salt});
    let all = [
        scope(None, json!({})),
        scope(None, salted("a")),
        scope(None, salted("b")),
        scope(Some("k"), json!({})),
        scope(Some("k"), salted("a")),
        // Key and salt are not just joined.
        scope(Some("ka"), json!({})),
        scope(Some("a"), json!({})),
    ];
    for (i, a) in all.iter().enumerate() {
        assert!(!all[..i].contains(a), "{all:?}");
    }
    assert_eq!(scope(None, json!({"user": "me"})), all[0]);
    assert_eq!(scope(Some("k"), salted("a")), all[4]);
}
