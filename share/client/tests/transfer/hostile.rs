//! A server that means harm, against who shares and who receives: it leads nowhere, fills nothing
//! and is never waited for without end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use lockbox_share_client::Error;
use lockbox_share_client::http::{ServerAddress, ShareClient};
use lockbox_share_client::link::Link;
use lockbox_share_client::protocol::token::OwnerToken;
use lockbox_share_client::receive::{self, ReceiveTarget};
use lockbox_share_client::shares::{self, ShareTerms};
use lockbox_share_client::source::FileSource;
use tempfile::TempDir;

use crate::forgetful;

/// A secret that opens nothing here.
const SECRET: &str = "qypqxpq9qcrsszg2pvxq6rs0zqg3yyc5z5tpwxqergd3c8g7rusqgpqyee";

/// Answers every request by `answer`, which is told the request's first line, and hangs up.
fn server(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answer = std::sync::Arc::new(answer);
    // Ends with the process of the tests.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, answer) = (stream.unwrap(), answer.clone());
            thread::spawn(move || {
                if let Some(line) = hear(&stream) {
                    answer(&line, &mut stream);
                }
            });
        }
    });
    format!("http://{address}")
}

/// The first line of a request, with its body read.
fn hear(stream: &TcpStream) -> Option<String> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(text) = line.to_lowercase().strip_prefix("content-length:") {
            length = text.trim().parse().ok()?;
        }
        if first.is_empty() {
            first = line;
        }
    }
    reader.read_exact(&mut vec![0; length]).ok()?;
    Some(first)
}

fn claim(base: &str) -> Result<(), Error> {
    let place = TempDir::new().unwrap();
    let link = Link::parse(&format!("{base}/s/1482719382210#{SECRET}")).unwrap();
    let target = ReceiveTarget::Directory { path: place.path().into(), replace: false };
    let options = forgetful();
    receive::to_file(&ShareClient::new(ServerAddress::parse(base).unwrap(), None), &link, &target, &options).map(drop)
}

fn share(base: &str) -> Result<(), Error> {
    let place = TempDir::new().unwrap();
    let path = place.path().join("a");
    std::fs::write(&path, "x").unwrap();
    let terms = ShareTerms { expires_in: None, max_claims: 1 };
    let client = ShareClient::new(ServerAddress::parse(base).unwrap(), None);
    shares::share(&client, &OwnerToken::new([5; 32]), &mut FileSource::open(&path, None).unwrap(), terms, &|_| {})
        .map(drop)
}

/// What both sides say to a server.
fn both(base: &str) -> [Error; 2] {
    [claim(base).unwrap_err(), share(base).unwrap_err()]
}

#[test]
fn no_redirect_is_followed() {
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
    elsewhere.set_nonblocking(true).unwrap();
    let other = format!("http://{}/v1/limits", elsewhere.local_addr().unwrap());
    for status in [301, 302, 303, 307, 308] {
        for to in [other.as_str(), "file:///etc/passwd", "//evil.example/", "/v1/limits"] {
            let answer =
                format!("HTTP/1.1 {status} X\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let base = server(move |_, stream| stream.write_all(answer.as_bytes()).unwrap());
            for error in both(&base) {
                assert!(matches!(error, Error::Foreign { .. }), "{status} {to}: {error}");
            }
        }
    }
    assert!(elsewhere.accept().is_err(), "somebody was led there");
}

#[test]
fn answers_without_end_are_given_up() {
    let endless = |head: &'static str, part: Vec<u8>| {
        server(move |_, stream| {
            let _ = stream.write_all(head.as_bytes());
            while stream.write_all(&part).is_ok() {}
        })
    };
    let blanks = vec![b' '; 64 << 10];
    let chunk = [b"10000\r\n", &blanks[..], b"\r\n"].concat();
    for (what, base) in [
        ("a body", endless("HTTP/1.1 200 X\r\ncontent-type: application/json\r\n\r\n", blanks.clone())),
        ("chunks", endless("HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n", chunk)),
        ("a length", endless("HTTP/1.1 200 X\r\ncontent-length: 18446744073709551615\r\n\r\n", blanks.clone())),
        ("a refusal", endless("HTTP/1.1 410 X\r\ncontent-type: application/json\r\n\r\n", blanks.clone())),
        ("headers", endless("HTTP/1.1 200 X\r\n", b"x-flood: y\r\n".repeat(1000))),
        ("a header", endless("HTTP/1.1 200 X\r\nx-flood: ", blanks)),
        ("interim answers", endless("", b"HTTP/1.1 103 X\r\nlink: </a>\r\n\r\n".repeat(1000))),
    ] {
        let error = share(&base).unwrap_err();
        assert!(matches!(error, Error::Foreign { .. } | Error::Unreachable { .. }), "{what}: {error}");
    }
}

#[test]
fn answers_that_make_no_sense_are_told() {
    let limits = r#"{"protocol":1,"default_expiry":900,"max_expiry":900,"max_ciphertext":1,"max_claims":8,"max_batch":1,"public_url":"x"}"#;
    let created =
        |url: &str| serde_json::json!({ "handle": "1482719382210", "url": url, "expires_at": u64::MAX }).to_string();
    for url in ["file:///s/1482719382210", "https://a\u{7}/s/1482719382210", "https://a/s/1482719382211", "x"] {
        let created = created(url);
        let base = server(move |line, stream| {
            let body = if line.contains("limits") { limits } else { &created };
            let _ =
                write!(stream, "HTTP/1.1 200 X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        });
        let error = share(&base).unwrap_err();
        assert!(matches!(error, Error::NotALink(_) | Error::Foreign { .. }), "{url}: {error}");
    }
    for answer in [
        "HTTP/1.1 200 X\r\ncontent-length: 5\r\ncontent-length: 2\r\n\r\n{}xxx",
        "HTTP/1.1 200 X\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 204 X\r\n\r\n",
        "HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        "HTTP/9.9 200 X\r\n\r\n",
        "\0\0\0\0",
        "",
    ] {
        let base = server(move |_, stream| stream.write_all(answer.as_bytes()).unwrap());
        let error = share(&base).unwrap_err();
        assert!(matches!(error, Error::Foreign { .. } | Error::Unreachable { .. }), "{answer:?}: {error}");
    }
}
