//! What a client can send, for the fuzzer: ranges, capsules, messages, paths and forwarded addresses.

use std::net::{IpAddr, Ipv4Addr};

use hyper::HeaderMap;
use hyper::header::HeaderValue;
use lockbox_share_protocol::api::OfShare;
use lockbox_share_protocol::capsule::Capsule;
use lockbox_share_protocol::message::{Batch, Claim, Create};

use super::{Network, message, origin, range};

/// A range, `If-Range` and `If-None-Match` on three lines, behind eight bytes of length.
pub fn ranges(data: &[u8]) {
    range::fuzz(data);
}

/// The bytes of a capsule: refused, or the same when they are put together again.
pub fn capsule(data: &[u8]) {
    if let Ok(capsule) = Capsule::decode(data.to_vec()) {
        let again = Capsule::new(capsule.content(), capsule.sealed()).expect("a capsule that was read is one");
        assert_eq!(again.as_bytes(), data);
    }
}

/// The text of a request: its message, its path and query, its headers.
pub fn request(data: &[u8]) {
    let _ = serde_json::from_slice::<Batch<Claim>>(data);
    if let Ok(create) = serde_json::from_slice::<Create>(data) {
        let text = serde_json::to_vec(&create).expect("a message is text");
        assert!(serde_json::from_slice::<Create>(&text).is_ok());
    }
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(data) {
        headers.insert("x-forwarded-for", value.clone());
        headers.insert("authorization", value);
    }
    let trusted: [Network; 1] = ["192.0.2.0/24".parse().expect("a network")];
    let peer = origin::Peer::Address(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));
    let _ = origin::client(peer, &headers, &trusted);
    let _ = message::bearer::<lockbox_share_protocol::token::LeaseToken>(&headers);
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = message::parameters(Some(text), ["version", "state", "wait"]);
        if let Some((which, handle)) = OfShare::parse(text) {
            assert_eq!(which.path(handle).to_string(), text);
        }
    }
}

/// First inputs of a target.
pub fn seeds(name: &str) -> Vec<Vec<u8>> {
    let head = "age-encryption.org/v1\n-> X25519 SVrzdFfkPxf0LPHOUGB1gNb9E5Vr8EUDa9kxk04iQ0o\n\
        0OrTkKHpE7klNLd0k+9Uam5hkQkzMxaqKcIPRIO1sNE\n--- gxhoSa5BciRDt8lOpYNcx4EYtKpS0CJ06F3ZwN82VaM\n";
    match name {
        "range" => vec![b"\x00\x10\0\0\0\0\0\0bytes=5-9\n\"tag\"\n\"x\"".to_vec()],
        "capsule" => {
            let mut bytes = b"lbxs\x01\x01".to_vec();
            bytes.extend_from_slice(&((head.len() + 40) as u16).to_le_bytes());
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(&[7; 40]);
            vec![bytes]
        }
        "request" => vec![
            br#"{"handle":"1482719382210","auth":"AAAA","claim":"AAAA"}"#.to_vec(),
            b"/v1/shares/1482719382210/ciphertext".to_vec(),
            b"version=3&wait=5&state=armed".to_vec(),
            b"203.0.113.9, [2001:db8::1]:80, 192.0.2.7".to_vec(),
        ],
        _ => Vec::new(),
    }
}
