//! Messages, methods, owners, batches and the page.

use std::net::TcpStream;

use lockbox_share_protocol::capsule::ContentLocation;
use serde_json::{Value, json};

use crate::daemon::{Connection, Daemon, Owner, QUICK, age_file, capsule, create, lease, random};

#[test]
fn every_failure_is_a_message_with_its_status() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let auth = [("authorization", owner.header.as_str())];
    let good = create(&[1; 32], capsule(ContentLocation::Inline), None, &json!({}));
    let changed = |name: &str, value: Value| {
        let mut message = good.clone();
        message[name] = value;
        message
    };
    for (message, status, error) in [
        (changed("capsule", json!("aGVsbG8")), 400, "malformed"),
        (changed("verifier", json!("short")), 400, "malformed"),
        (changed("unknown", json!(1)), 400, "malformed"),
        (changed("max_claims", json!(9)), 400, "malformed"),
        (changed("max_claims", json!(0)), 400, "malformed"),
        (changed("expires_in", json!(0)), 400, "malformed"),
        (changed("expires_in", json!(8 * 24 * 3600)), 400, "malformed"),
        (changed("capsule", json!("a".repeat(20_000))), 413, "too_large"),
    ] {
        let answer = daemon.post("/v1/shares", &auth, &message);
        assert_eq!((answer.status, answer.error().as_str()), (status, error), "{}", answer.text());
    }
    assert_eq!(daemon.post("/v1/shares", &[], &good).error(), "unauthorized");
    assert_eq!(daemon.connect().ask("POST", "/v1/shares", &auth, good.to_string().as_bytes()).error(), "media_type");
    assert_eq!(daemon.get("/v1/nowhere", &[]).error(), "not_found");
    let method = daemon.get("/v1/claim", &[]);
    assert_eq!((method.error().as_str(), method.header("allow")), ("method", Some("POST, OPTIONS")));
    assert_eq!(daemon.get("/v1/limits?x=1", &[]).error(), "malformed");
    assert_eq!(daemon.get("/v1/limits", &[]).json()["protocol"], 1);
    let handle = format!("/v1/shares/{}", "0".repeat(13));
    assert_eq!(daemon.get(&handle, &auth).error(), "refused");
}

#[test]
fn only_its_owner_sees_and_takes_back_a_share() {
    let daemon = Daemon::start(&QUICK);
    let (owner, other) = (Owner::new(), Owner::new());
    let share = daemon.share(&owner, &json!({}));
    assert_eq!(share.created.url, format!("http://{}/s/{}", daemon.http, share.created.handle));
    for (method, ending) in [("GET", ""), ("GET", "/watch"), ("POST", "/revoke"), ("POST", "/rearm")] {
        let headers = [("authorization", other.header.as_str())];
        let answer = daemon.connect().ask(method, &share.path(ending), &headers, b"");
        assert_eq!((answer.status, answer.error().as_str()), (404, "refused"), "{ending}");
    }
    assert_eq!(daemon.state_of(&owner, &share), "armed");
    let headers = [("authorization", owner.header.as_str())];
    let rearm = daemon.connect().ask("POST", &share.path("/rearm"), &headers, b"");
    assert_eq!(rearm.error(), "not_interrupted");
    for _ in 0..2 {
        let revoked = daemon.connect().ask("POST", &share.path("/revoke"), &headers, b"");
        assert_eq!((revoked.status, revoked.json()["state"].as_str().unwrap()), (200, "revoked"));
    }
    assert_eq!(daemon.claim(&share).error(), "revoked");
}

#[test]
fn a_watcher_is_told_at_once() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let share = daemon.share_file(&owner, &age_file(100));
    let version = daemon.info(&owner, &share)["version"].as_u64().unwrap();
    let headers = [("authorization", owner.header.as_str())];
    let mut watcher = daemon.connect();
    watcher.send("GET", &share.path(&format!("/watch?version={version}&state=armed&wait=60")), &headers, b"");
    // An answer without a change comes after its time only.
    assert_eq!(daemon.get(&share.path(&format!("/watch?version={version}&wait=0")), &headers).status, 200);
    lease(&daemon.claim(&share));
    let told = watcher.answer("GET");
    assert_eq!(told.json()["state"], "leased");
    assert!(told.json()["version"].as_u64().unwrap() > version);
}

#[test]
fn batches_have_a_result_for_each_item() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let headers = [("authorization", owner.header.as_str())];
    let (armed, revoked) = (daemon.share(&owner, &json!({})), daemon.share(&owner, &json!({})));
    let others = daemon.share(&Owner::new(), &json!({}));
    daemon.post(&revoked.path("/revoke"), &headers, &json!({}));
    let handles = [&armed, &revoked, &others].map(|share| share.created.handle);
    let items: Vec<_> = handles.into_iter().cycle().take(100).collect();
    let info = daemon.post("/v1/batch/info", &headers, &json!({ "items": items })).json();
    let results = info["results"].as_array().unwrap();
    assert_eq!(results.len(), 100);
    for (results, item) in results.chunks(3).zip(items.chunks(3)) {
        assert_eq!(results[0]["ok"]["handle"], json!(item[0]));
        assert_eq!(results[0]["ok"]["state"], "armed");
        assert!(results.get(1).is_none_or(|result| result["ok"]["state"] == "revoked"), "{results:?}");
        assert!(results.get(2).is_none_or(|result| result["error"] == "refused"), "{results:?}");
    }
    let many: Vec<&str> = (0..101).map(|_| "0000000000000").collect();
    assert_eq!(daemon.post("/v1/batch/info", &headers, &json!({ "items": many })).error(), "malformed");
    assert_eq!(daemon.post("/v1/batch/info", &headers, &json!({ "items": [] })).error(), "malformed");
}

#[test]
fn the_page_is_the_same_for_everything_and_loads_nothing_from_elsewhere() {
    let daemon = Daemon::start(&QUICK);
    let share = daemon.share(&Owner::new(), &json!({}));
    let page = daemon.get(&format!("/s/{}", share.created.handle), &[]);
    for path in ["/s/0000000000000", "/s/", "/s/1482719382210%23AGE-SECRET-KEY", "/s/x?utm_source=mail"] {
        let other = daemon.get(path, &[]);
        assert_eq!((other.status, other.body == page.body), (200, true), "{path}");
    }
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'") && policy.contains("require-trusted-types-for 'script'"));
    // Over plain HTTP browsers are told nothing of HTTPS.
    assert_eq!(page.header("strict-transport-security"), None);
    assert_eq!(page.header("referrer-policy"), Some("no-referrer"));
    assert!(page.header("x-robots-tag").unwrap().contains("noindex"));
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(page.header("cache-control"), Some("no-store"));
}

/// Asks for a share over TCP, with these headers besides.
fn make(daemon: &Daemon, connection: TcpStream, more: &[(&str, &str)]) -> (u16, String) {
    let owner = Owner::new();
    let message = create(&random(), capsule(ContentLocation::Inline), None, &json!({})).to_string();
    let authorization = [("authorization", owner.header.as_str()), ("content-type", "application/json")];
    let headers: Vec<(&str, &str)> = authorization.into_iter().chain(more.iter().copied()).collect();
    let answer = Connection::new(connection).ask("POST", "/v1/shares", &headers, message.as_bytes());
    let mut local = Connection::unix(&daemon.unix);
    let over_socket = local.ask("POST", "/v1/shares", &headers, message.as_bytes());
    assert_eq!(over_socket.status, 201, "the Unix socket is always local: {}", over_socket.text());
    (answer.status, if answer.status == 201 { String::new() } else { answer.error() })
}

#[test]
fn strangers_and_proxies_make_no_shares_unless_told() {
    let forbidden = (403, "forbidden".to_owned());
    let made = (201, String::new());
    let with =
        |options: &[&'static str]| Daemon::start(&QUICK.into_iter().chain(options.iter().copied()).collect::<Vec<_>>());
    let near = |daemon: &Daemon, more: &[(&str, &str)]| make(daemon, TcpStream::connect(daemon.http).unwrap(), more);
    let daemon = with(&[]);
    assert_eq!(near(&daemon, &[]), made);
    for header in ["x-forwarded-for", "forwarded", "x-real-ip", "via", "x-forwarded-host"] {
        assert_eq!(near(&daemon, &[(header, "127.0.0.1")]), forbidden, "{header}");
    }
    // Uploads are the first step of a share.
    let owner = Owner::new();
    let headers = [
        ("authorization", owner.header.as_str()),
        ("content-type", "application/octet-stream"),
        ("x-forwarded-for", "192.0.2.1"),
    ];
    assert_eq!(daemon.connect().ask("POST", "/v1/uploads", &headers, &age_file(100)).error(), "forbidden");
    // Owners look after their shares from anywhere, and claims come from anywhere.
    let share = daemon.share(&owner, &json!({}));
    let headers = [("authorization", owner.header.as_str()), ("x-forwarded-for", "192.0.2.1")];
    assert_eq!(daemon.get(&share.path(""), &headers).status, 200);
    assert_eq!(daemon.post("/v1/claim", &[("x-forwarded-for", "192.0.2.1")], &share.claim(random())).status, 200);

    assert_eq!(near(&with(&["--public-url", "https://share.example.org"]), &[]), forbidden);
    assert_eq!(near(&with(&["--trusted-proxy", "127.0.0.1"]), &[]), forbidden);
    assert_eq!(near(&with(&["--creators", "socket"]), &[]), forbidden);
    assert_eq!(near(&with(&["--public-url", "http://localhost:99"]), &[]), made);
    let daemon = with(&["--public-url", "https://share.example.org", "--creators", "local"]);
    assert_eq!(near(&daemon, &[]), made);
    assert_eq!(near(&daemon, &[("x-forwarded-for", "192.0.2.1")]), forbidden);
    let daemon = with(&["--creators", "everybody"]);
    assert_eq!(near(&daemon, &[("x-forwarded-for", "192.0.2.1")]), made);
}

#[test]
fn who_comes_by_an_address_of_the_network_makes_no_shares_unless_told() {
    // The address by which the machine would reach others; nothing is sent.
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let Some(own) = socket.connect("192.0.2.1:9").ok().and_then(|()| socket.local_addr().ok()) else {
        eprintln!("NOT TESTED: this machine has no address besides loopback");
        return;
    };
    for (creators, status) in [(None, 403), (Some("everybody"), 201)] {
        let mut options = QUICK.to_vec();
        // A second address, so that the first is still the one of the tests.
        let second = format!("{}:0", own.ip());
        options.extend(["--listen", &second]);
        options.extend(creators.iter().flat_map(|creators| ["--creators", creators]));
        let daemon = Daemon::start(&options);
        let (near, far) = (daemon.others[0], daemon.http);
        assert!(near.ip().is_loopback() && !far.ip().is_loopback());
        assert_eq!(make(&daemon, TcpStream::connect(far).unwrap(), &[]).0, status);
        assert_eq!(make(&daemon, TcpStream::connect(near).unwrap(), &[]).0, 201);
        assert_eq!(daemon.log().contains("any client that reaches"), creators.is_some());
    }
}

#[test]
fn a_daemon_at_which_nobody_could_make_shares_does_not_start() {
    let directory = tempfile::tempdir().unwrap();
    let start = |options: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_lockbox-share"))
            .args([
                "serve",
                "--unix-socket",
                "none",
                "--metrics-listen",
                "none",
                "--listen",
                "127.0.0.1:0",
                "--state-dir",
            ])
            .arg(directory.path())
            .args(options)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for options in [&["--creators", "socket"][..], &["--public-url", "https://share.example.org"]] {
        let (code, said) = start(options);
        assert!(code == Some(1) && said.contains("allow some with --creators"), "{said}");
    }
}
