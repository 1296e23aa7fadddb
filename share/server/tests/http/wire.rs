//! What a client can write that two programs could read differently, or that costs more to read
//! than to write.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::json;

use crate::daemon::{Daemon, Owner, QUICK, age_file, lease, random};

/// What the daemon answers to bytes, until it closes the connection.
fn raw(daemon: &Daemon, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(daemon.http).unwrap();
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Statuses of the answers in what came back.
fn statuses(answers: &str) -> Vec<u16> {
    answers.split("HTTP/1.1 ").skip(1).filter_map(|answer| answer.get(..3)?.parse().ok()).collect()
}

#[test]
fn a_request_names_its_host_once() {
    let daemon = Daemon::start(&QUICK);
    for (head, status) in [
        ("GET /v1/limits HTTP/1.1\r\nhost: a\r\n", 200),
        ("GET /v1/limits HTTP/1.1\r\n", 400),
        ("GET /v1/limits HTTP/1.1\r\nhost: a\r\nhost: b\r\n", 400),
        ("GET /v1/limits HTTP/1.1\r\nhost: a\r\nHost: a\r\n", 400),
        ("GET /s/1482719382210 HTTP/1.1\r\nhost: a, b\r\n", 400),
        ("GET http://b/v1/limits HTTP/1.1\r\nhost: a\r\n", 400),
        ("GET /v1/limits HTTP/1.0\r\n", 200),
        ("POST /v1/claim HTTP/1.1\r\n", 400),
        ("GET /nothing HTTP/1.1\r\n", 400),
    ] {
        let answer = raw(&daemon, format!("{head}connection: close\r\n\r\n").as_bytes());
        assert_eq!(answer.split(' ').nth(1), Some(status.to_string().as_str()), "{head}");
    }
}

/// Behind each of these stands another request, which a proxy in front may have taken for the body:
/// it is not heard.
#[test]
fn what_is_hidden_behind_an_unclear_length_is_not_heard() {
    // Some are taken for the body's begin, whose rest is waited for.
    let daemon = Daemon::start(&[&QUICK[..], &["--body-timeout", "1s"]].concat());
    let hidden = "GET /v1/limits HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let length = hidden.len() + 5;
    let chunked = format!("content-length: {length}\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n");
    let reversed = format!("transfer-encoding: chunked\r\ncontent-length: {length}\r\n\r\n0\r\n\r\n");
    for framing in [
        chunked.as_str(),
        &reversed,
        "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        "transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n0x0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n-0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n10000000000000000\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n\r\n",
        "content-length: 0\r\ncontent-length: 5\r\n\r\n",
        "content-length: +0\r\n\r\n",
        "content-length: -1\r\n\r\n",
        "content-length: 0x0\r\n\r\n",
        "content-length: 0, 0\r\n\r\n",
        "content-length: 18446744073709551616\r\n\r\n",
        "content-length: 0\r\n folded: x\r\n\r\n",
        "content-length : 0\r\n\r\n",
    ] {
        let head = "POST /v1/claim HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n";
        let found = statuses(&raw(&daemon, format!("{head}{framing}{hidden}").as_bytes()));
        assert!(matches!(found[..], [] | [400..=499]), "{framing:?}: {found:?}");
    }
    assert_eq!(daemon.get("/v1/limits", &[]).status, 200);
}

#[test]
fn requests_in_one_packet_are_answered_each_and_in_order() {
    let daemon = Daemon::start(&QUICK);
    let mut requests = String::new();
    for number in 0..200 {
        let path = if number % 2 == 0 { "/v1/limits" } else { "/v1/nowhere" };
        let end = if number == 199 { "connection: close\r\n" } else { "" };
        requests.push_str(&format!("GET {path} HTTP/1.1\r\nhost: a\r\n{end}\r\n"));
    }
    let found = statuses(&raw(&daemon, requests.as_bytes()));
    assert_eq!(found, [200, 404].repeat(100));
}

#[test]
fn heads_chunks_and_trailers_without_end_are_cut_off() {
    // Digits are read for as long as a part of a body may take.
    let daemon = Daemon::start(&[&QUICK[..], &["--body-timeout", "1s"]].concat());
    let upload = format!(
        "POST /v1/uploads HTTP/1.1\r\nhost: localhost\r\nauthorization: {}\r\ncontent-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        Owner::new().header
    );
    for (what, begin, flood) in [
        ("headers", "GET /v1/limits HTTP/1.1\r\nhost: a\r\n", "x-flood: y\r\n"),
        ("one header", "GET /v1/limits HTTP/1.1\r\nhost: a\r\nx: ", "aaaaaaaaaaaaaaaa"),
        ("an address", "GET /v1/", "aaaaaaaaaaaaaaaa"),
        ("blank lines", "", "\r\n"),
        ("trailers", &format!("{upload}0\r\n"), "x-flood: y\r\n"),
        ("an extension of a chunk", &format!("{upload}5;"), "aaaaaaaaaaaaaaaa"),
        ("digits of a chunk", &format!("{upload}0"), "0000000000000000"),
        (
            "a message",
            "POST /v1/claim HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
            "10\r\n                \r\n",
        ),
    ] {
        let mut stream = TcpStream::connect(daemon.http).unwrap();
        let _ = stream.write_all(begin.as_bytes());
        let part = flood.repeat(1000);
        // Ends when the daemon closes the connection.
        let sent = (0..100_000).take_while(|_| stream.write_all(part.as_bytes()).is_ok()).count();
        assert!(sent < 100_000, "{what}: {sent} parts were taken");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let found = statuses(&String::from_utf8_lossy(&answer));
        assert!(matches!(found[..], [] | [400..=499]), "{what}: {found:?}");
    }
    assert_eq!(daemon.get("/v1/limits", &[]).status, 200);
    assert_eq!(daemon.metric("lockbox_share_spool_bytes"), 0);
}

#[test]
fn paths_that_say_something_else_lead_nowhere() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let share = daemon.share_file(&owner, &age_file(1000));
    let bearer = lease(&daemon.claim(&share));
    let handle = share.created.handle.to_string();
    let headers = [("authorization", bearer.as_str())];
    assert_eq!(daemon.get(&share.path("/ciphertext"), &headers).status, 200);
    for path in [
        "/v1/shares/../../etc/passwd".to_owned(),
        format!("/v1/shares/{handle}/../{handle}/ciphertext"),
        format!("/v1/shares//{handle}/ciphertext"),
        format!("/v1/shares/{handle}%2fciphertext"),
        format!("/v1/shares/%2e/{handle}/ciphertext"),
        format!("/v1/shares/{handle}/ciphertext/"),
        format!("/v1/shares/{handle}/ciphertext%00"),
        format!("/v1/shares/+{handle}/ciphertext"),
        format!("/v1/shares/0{handle}/ciphertext"),
        format!("/v1/shares/ {handle}/ciphertext"),
        format!("/v1/shares/{}/ciphertext", "9".repeat(40)),
        "/v1/shares/١٤٨٢٧١٩٣٨٢٢١٠/ciphertext".to_owned(),
        format!("/V1/shares/{handle}/ciphertext"),
        format!("/assets/../v1/shares/{handle}/ciphertext"),
        "/assets/../../../../etc/passwd".to_owned(),
    ] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: {bearer}\r\nconnection: close\r\n\r\n");
        let found = statuses(&raw(&daemon, request.as_bytes()));
        assert!(matches!(found[..], [400 | 404]), "{path}: {found:?}");
    }
    // Below /s/ stands the page, whatever follows.
    let page = daemon.get("/s/../../etc/passwd", &[]);
    assert!(page.status == 200 && page.text().starts_with("<!doctype html>"));
}

#[test]
fn ranges_that_overlap_run_over_or_run_backwards_give_no_byte_twice() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let ciphertext = age_file(100_000);
    let share = daemon.share_file(&owner, &ciphertext);
    let bearer = lease(&daemon.claim(&share));
    let many = format!("bytes={}", ["0-"; 500].join(","));
    for range in [
        "bytes=0-,0-,0-",
        "bytes=5-2",
        "bytes=--5",
        "bytes=-0",
        "bytes=18446744073709551615-",
        "bytes=18446744073709551616-18446744073709551617",
        "bytes=-18446744073709551615",
        "bytes=0x0-5",
        "bytes= 0-5",
        "bytes=0-5\u{a0}",
        "lines=0-5",
        "bytes=",
        &many,
    ] {
        let answer = daemon.get(&share.path("/ciphertext"), &[("authorization", &bearer), ("range", range)]);
        assert!(matches!(answer.status, 200 | 206 | 400 | 416), "{range}: {}", answer.status);
        assert!(answer.body.len() <= ciphertext.len(), "{range}");
    }
}

#[test]
fn what_is_packed_is_not_unpacked() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let share = daemon.share(&owner, &json!({}));
    // A gzip of a gigabyte would begin like this; the daemon reads messages as they are.
    let packed = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    let headers = [("content-type", "application/json"), ("content-encoding", "gzip")];
    assert_eq!(daemon.connect().ask("POST", "/v1/claim", &headers, &packed).status, 400);
    let plain = share.claim(random()).to_string();
    assert_eq!(daemon.connect().ask("POST", "/v1/claim", &headers[..1], plain.as_bytes()).status, 200);
    let deep = format!("{}1{}", "[".repeat(7000), "]".repeat(7000));
    assert_eq!(daemon.connect().ask("POST", "/v1/claim", &headers[..1], deep.as_bytes()).status, 400);
}
