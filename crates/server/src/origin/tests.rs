use super::*;

fn checked(origins: &Origins, method: &str, headers: &[(&str, &str)]) -> Result<()> {
    let mut request = Request::builder().method(method).uri("/v1/completions");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    origins.check(&request.body(()).expect("a request"))
}

#[test]
fn a_loopback_listener_answers_only_to_its_names() {
    let options = OriginOptions {
        allowed_hosts: vec!["box.lan".into()],
        ..OriginOptions::default()
    };
    let local = Origins::new(OriginOptions::default(), "my-host").on_loopback(true);
    let named = Origins::new(options, "127.0.0.1").on_loopback(true);
    let hosts = "localhost LOCALHOST:8000 a.localhost:1 127.0.0.1 127.1.2.3:80 [::1]:80 [::1] \
        my-host:8000";
    for host in hosts.split(' ') {
        assert!(checked(&local, "GET", &[("host", host)]).is_ok(), "{host}");
    }
    for host in [
        "evil.com",
        "evil.com:8000",
        "127.0.0.1.evil.com",
        "box.lan",
        "10.0.0.1",
        "",
        "@",
    ] {
        assert!(checked(&local, "GET", &[("host", host)]).is_err(), "{host}");
    }
    assert!(checked(&named, "GET", &[("host", "Box.LAN:80")]).is_ok());
    assert!(checked(&named, "GET", &[("host", "evil.com")]).is_err());
    let public = Origins::new(OriginOptions::default(), "0.0.0.0");
    assert!(checked(&public, "GET", &[("host", "evil.com")]).is_ok());
    assert!(checked(&local, "GET", &[]).is_ok(), "no browser");
}

#[test]
fn pages_of_other_origins_need_to_be_allowed() {
    let none = Origins::new(OriginOptions::default(), "127.0.0.1").on_loopback(true);
    let host = ("host", "localhost:8000");
    for (headers, fine) in [
        (&[host][..], true),
        (&[host, ("origin", "http://localhost:8000")], true),
        (&[host, ("origin", "https://evil.com")], false),
        (&[host, ("origin", "http://localhost:3000")], false),
        (&[host, ("origin", "null")], false),
        (&[host, ("sec-fetch-site", "cross-site")], false),
        (&[host, ("sec-fetch-site", "none")], true),
        // Behind a proxy that names another host.
        (
            &[
                host,
                ("origin", "https://a.com"),
                ("sec-fetch-site", "same-origin"),
            ],
            true,
        ),
    ] {
        assert_eq!(checked(&none, "POST", headers).is_ok(), fine, "{headers:?}");
        let got = checked(&none, "GET", headers);
        assert!(got.is_ok(), "reading is the browser's to forbid");
    }
    let some = OriginOptions {
        allowed_origins: vec!["https://a.com".into()],
        ..OriginOptions::default()
    };
    let some = Origins::new(some, "127.0.0.1");
    assert!(checked(&some, "POST", &[("origin", "https://a.com")]).is_ok());
    assert!(checked(&some, "POST", &[("origin", "https://a.com.evil.com")]).is_err());
    let any = OriginOptions {
        allowed_origins: vec![ANY.into()],
        ..OriginOptions::default()
    };
    let any = Origins::new(any, "");
    assert!(checked(&any, "POST", &[("origin", "https://b.com")]).is_ok());
}

#[test]
fn flags_are_checked() {
    let (host, origin) = (OriginOptions::host, OriginOptions::origin);
    assert!(origin("https://a.com/").is_ok_and(|origin| origin == "https://a.com"));
    for wrong in ["", "a.com", "https://", "https://a.com/path"] {
        assert!(origin(wrong).is_err(), "{wrong}");
    }
    assert!(host("a.com").is_ok() && host("https://a.com").is_err() && host("").is_err());
}
