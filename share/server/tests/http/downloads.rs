//! Ciphertext is given in any parts to the one who has its lease, until all of it has arrived.

use std::io::Read;

use serde_json::json;
use sha2::{Digest, Sha256};

use lockbox_share_protocol::capsule::ContentLocation;
use lockbox_share_protocol::message::UploadReply;

use crate::daemon::{Daemon, Owner, QUICK, age_file, capsule, create, lease, until};

/// Megabytes of the download that is cut; more with LOCKBOX_SHARE_CUT_MIB.
fn cut_size() -> usize {
    std::env::var("LOCKBOX_SHARE_CUT_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(64) << 20
}

#[test]
fn a_download_that_is_cut_three_times_is_resumed_and_nobody_else_gets_it() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let ciphertext = age_file(cut_size());
    let share = daemon.share_file(&owner, &ciphertext);
    let length = ciphertext.len();
    let claimed = daemon.claim(&share);
    let bearer = lease(&claimed);
    let mut received = Vec::with_capacity(length);
    let mut tag = String::new();
    for permille in [10, 500, 999, 1000] {
        let range = format!("bytes={}-", received.len());
        let mut headers = vec![("authorization", bearer.as_str()), ("range", range.as_str())];
        if !tag.is_empty() {
            headers.push(("if-range", tag.as_str()));
        }
        let mut connection = daemon.connect();
        connection.send("GET", &share.path("/ciphertext"), &headers, b"");
        let head = connection.head();
        assert_eq!(head.status, 206);
        let expected = format!("bytes {}-{}/{length}", received.len(), length - 1);
        assert_eq!(head.header("content-range"), Some(expected.as_str()));
        tag = head.header("etag").unwrap().to_owned();
        let wanted = length / 1000 * permille - received.len() + if permille == 1000 { length % 1000 } else { 0 };
        let mut part = vec![0; wanted];
        connection.stream.read_exact(&mut part).unwrap();
        received.extend_from_slice(&part);
        // Dropped here: the rest never arrives.
        drop(connection);
        let second = daemon.claim(&share);
        assert_eq!((second.status, second.error().as_str()), (409, "leased"));
    }
    assert!(Sha256::digest(&received) == Sha256::digest(&ciphertext));
    assert_eq!(daemon.connect().ask("POST", &share.path("/complete"), &[("authorization", &bearer)], b"").status, 204);
    assert_eq!(daemon.state_of(&owner, &share), "consumed");
    assert_eq!(daemon.info(&owner, &share)["claims"][0]["state"], "completed");
    assert_eq!(daemon.claim(&share).status, 410);
    // The lease is over, and the bytes with it.
    let again = daemon.get(&share.path("/ciphertext"), &[("authorization", &bearer)]);
    assert_eq!(again.status, 410);
}

#[test]
fn ranges_are_answered_as_the_standard_says() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let ciphertext = age_file(300_000);
    let share = daemon.share_file(&owner, &ciphertext);
    let bearer = lease(&daemon.claim(&share));
    let length = ciphertext.len();
    let path = share.path("/ciphertext");
    let mut connection = daemon.connect();
    let mut ask = |method: &str, headers: &[(&str, &str)]| {
        let mut all = vec![("authorization", bearer.as_str())];
        all.extend_from_slice(headers);
        connection.ask(method, &path, &all, b"")
    };
    let whole = ask("GET", &[]);
    assert_eq!((whole.status, whole.body == ciphertext), (200, true));
    assert_eq!(whole.header("accept-ranges"), Some("bytes"));
    assert_eq!(whole.header("cache-control"), Some("no-store"));
    let tag = whole.header("etag").unwrap().to_owned();
    for (range, first, last) in [
        ("bytes=0-0", 0, 0),
        ("bytes=131071-131073", 131_071, 131_073),
        ("bytes=-5", length - 5, length - 1),
        ("bytes=299999-", 299_999, length - 1),
        ("bytes=7-99999999999", 7, length - 1),
    ] {
        let part = ask("GET", &[("range", range)]);
        assert_eq!(part.status, 206, "{range}");
        assert!(part.body == ciphertext[first..=last], "{range}");
        assert_eq!(part.header("content-range"), Some(format!("bytes {first}-{last}/{length}").as_str()));
    }
    let several = ask("GET", &[("range", "bytes=0-1,5-9")]);
    assert_eq!((several.status, several.body.len()), (200, length));
    let behind = ask("GET", &[("range", "bytes=999999-")]);
    assert_eq!((behind.status, behind.error().as_str()), (416, "range"));
    assert_eq!(behind.header("content-range"), Some(format!("bytes */{length}").as_str()));
    let head = ask("HEAD", &[("range", "bytes=0-9")]);
    assert_eq!((head.status, head.header("content-length")), (206, Some("10")));
    let head = ask("HEAD", &[]);
    assert_eq!((head.status, head.header("content-length")), (200, Some(length.to_string().as_str())));
    let known = ask("GET", &[("if-none-match", &tag)]);
    assert_eq!((known.status, known.header("etag")), (304, Some(tag.as_str())));
    assert_eq!(ask("GET", &[("range", "bytes=5-"), ("if-range", &tag)]).status, 206);
    assert_eq!(ask("GET", &[("range", "bytes=5-"), ("if-range", "\"other\"")]).status, 200);
    let wrong = "Bearer AAAAAAAAAAAAAAAAAAAAAA";
    assert_eq!(daemon.get(&path, &[("authorization", wrong)]).status, 404);
    assert_eq!(daemon.get(&path, &[]).status, 401);
}

#[test]
fn looking_under_a_lease_is_no_download() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let ciphertext = age_file(1000);
    let share = daemon.share_file(&owner, &ciphertext);
    let bearer = lease(&daemon.claim(&share));
    let before = daemon.info(&owner, &share);
    let tag = format!("\"{}\"", lockbox_share_protocol::token::Digest::new(Sha256::digest(&ciphertext).into()));
    for (method, header, status) in [
        ("HEAD", ("range", "bytes=0-9"), 206),
        ("HEAD", ("if-range", "x"), 200),
        ("GET", ("if-none-match", tag.as_str()), 304),
        ("GET", ("range", "bytes=99999-"), 416),
        ("HEAD", ("range", "bytes=99999-"), 416),
    ] {
        let headers = [("authorization", bearer.as_str()), header];
        assert_eq!(daemon.connect().ask(method, &share.path("/ciphertext"), &headers, b"").status, status);
        assert_eq!(daemon.info(&owner, &share), before, "{method} {header:?}");
    }
    assert_eq!(before["claims"][0]["state"], "leased");
    let part = daemon.get(&share.path("/ciphertext"), &[("authorization", &bearer), ("range", "bytes=0-0")]);
    assert_eq!(part.status, 206);
    assert_eq!(daemon.info(&owner, &share)["claims"][0]["state"], "sending");
}

#[test]
fn only_whole_downloads_count_as_completed_and_each_once() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let completed = || daemon.metric("lockbox_share_completed_total");
    let claimed = |length: usize| {
        let ciphertext = age_file(length);
        let share = daemon.share_file(&owner, &ciphertext);
        let bearer = lease(&daemon.claim(&share));
        (share, bearer, ciphertext.len())
    };
    let get = |share: &crate::daemon::Share, bearer: &str, range: &str| {
        daemon.get(&share.path("/ciphertext"), &[("authorization", bearer), ("range", range)])
    };
    let complete = |share: &crate::daemon::Share, bearer: &str| {
        let headers = [("authorization", bearer)];
        assert_eq!(daemon.connect().ask("POST", &share.path("/complete"), &headers, b"").status, 204);
    };
    // Looked at and given up.
    let (share, bearer, _) = claimed(1000);
    let headers = [("authorization", bearer.as_str())];
    assert_eq!(daemon.connect().ask("HEAD", &share.path("/ciphertext"), &headers, b"").status, 200);
    complete(&share, &bearer);
    // The last byte alone, and a download that is cut.
    let (share, bearer, _) = claimed(1000);
    assert_eq!(get(&share, &bearer, "bytes=-1").status, 206);
    let (cut, cut_bearer, _) = claimed(32 << 20);
    let mut connection = daemon.connect();
    connection.send("GET", &cut.path("/ciphertext"), &[("authorization", &cut_bearer)], b"");
    assert_eq!(connection.head().status, 200);
    drop(connection);
    until("the answer is over", || daemon.metric("lockbox_share_downloads") == 0);
    assert_eq!(completed(), 0);
    // In two parts, again, and said by the receiver, twice.
    let (share, bearer, length) = claimed(1000);
    assert_eq!(get(&share, &bearer, "bytes=500-").status, 206);
    assert_eq!(completed(), 0);
    assert_eq!(get(&share, &bearer, "bytes=0-499").status, 206);
    until("it is counted", || completed() == 1);
    assert_eq!(get(&share, &bearer, "bytes=0-").body.len(), length);
    complete(&share, &bearer);
    complete(&share, &bearer);
    assert_eq!(completed(), 1);
    // Of what nobody saw go out whole, its receiver says so, and is believed once.
    complete(&cut, &cut_bearer);
    complete(&cut, &cut_bearer);
    assert_eq!(completed(), 2);
}

#[test]
fn a_share_that_is_taken_back_stops_in_mid_download() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let ciphertext = age_file(64 << 20);
    for (number, ending) in [(1, "/rearm"), (2, "/revoke")] {
        let share = daemon.share_file(&owner, &ciphertext);
        let bearer = lease(&daemon.claim(&share));
        let mut connection = daemon.connect();
        connection.send("GET", &share.path("/ciphertext"), &[("authorization", &bearer)], b"");
        assert_eq!(connection.head().status, 200);
        let mut received = vec![0; 1 << 20];
        connection.stream.read_exact(&mut received).unwrap();
        let headers = [("authorization", owner.header.as_str())];
        assert_eq!(daemon.connect().ask("POST", &share.path(ending), &headers, b"").status, 200);
        let _ = connection.stream.read_to_end(&mut received);
        assert!(received.len() < ciphertext.len() && received[..] == ciphertext[..received.len()]);
        assert_eq!(daemon.metric("lockbox_share_downloads_stopped_total"), number);
        let again = daemon.get(&share.path("/ciphertext"), &[("authorization", &bearer)]);
        if ending == "/revoke" {
            assert_eq!((again.status, again.error().as_str()), (410, "revoked"));
        } else {
            assert_eq!((again.status, again.error().as_str()), (404, "refused"));
            let bearer = lease(&daemon.claim(&share));
            let whole = daemon.get(&share.path("/ciphertext"), &[("authorization", &bearer)]);
            assert!(whole.body == ciphertext);
        }
    }
}

#[test]
fn one_lease_has_eight_places_for_downloads() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let share = daemon.share_file(&owner, &age_file(64 << 20));
    let other = daemon.share_file(&owner, &age_file(1000));
    let bearer = lease(&daemon.claim(&share));
    // Nobody reads what is sent, so none of them ends.
    let begin = || {
        let mut connection = daemon.connect();
        connection.send("GET", &share.path("/ciphertext"), &[("authorization", &bearer)], b"");
        let head = connection.head();
        (head, connection)
    };
    let mut running: Vec<_> = (0..8).map(|_| begin()).collect();
    assert!(running.iter().all(|(head, _)| head.status == 200));
    let ninth = daemon.get(&share.path("/ciphertext"), &[("authorization", &bearer)]);
    assert_eq!((ninth.status, ninth.error().as_str(), ninth.header("retry-after")), (503, "unavailable", Some("5")));
    let other_bearer = lease(&daemon.claim(&other));
    assert_eq!(daemon.get(&other.path("/ciphertext"), &[("authorization", &other_bearer)]).status, 200);
    running.pop();
    until("there is a place again", || begin().0.status == 200);
}

/// The file fits in the buffers of the connection: the daemon hands over the last byte, and the
/// client reads none.
#[test]
fn the_last_byte_and_some_time_consume_a_share_that_can_be_rearmed() {
    let options: Vec<&str> = QUICK.into_iter().chain(["--grace", "1s"]).collect();
    let daemon = Daemon::start(&options);
    let owner = Owner::new();
    let ciphertext = age_file(100_000);
    let share = daemon.share_file(&owner, &ciphertext);
    let bearer = lease(&daemon.claim(&share));
    let mut connection = daemon.connect();
    connection.send("GET", &share.path("/ciphertext"), &[("authorization", &bearer)], b"");
    assert_eq!(connection.head().status, 200);
    drop(connection);
    until("the share is consumed", || daemon.state_of(&owner, &share) == "consumed");
    assert_eq!(daemon.info(&owner, &share)["claims"][0]["state"], "interrupted");
    let headers = [("authorization", owner.header.as_str())];
    assert_eq!(daemon.connect().ask("POST", &share.path("/rearm"), &headers, b"").status, 200);
    let bearer = lease(&daemon.claim(&share));
    let whole = daemon.get(&share.path("/ciphertext"), &[("authorization", &bearer)]);
    assert!(whole.body == ciphertext);
}

#[test]
fn an_upload_is_checked_before_it_becomes_a_share() {
    let options: Vec<&str> = QUICK.into_iter().chain(["--max-file", "1M"]).collect();
    let daemon = Daemon::start(&options);
    let owner = Owner::new();
    assert_eq!(daemon.upload(&owner, b"no age file at all, but long enough to be one").error(), "not_sealed");
    assert_eq!(daemon.upload(&owner, b"age-encryption.org/v1\n-> X25519").error(), "not_sealed");
    assert_eq!(daemon.upload(&owner, &age_file(1 << 20)).error(), "too_large");
    // In parts, without a length.
    let mut connection = daemon.connect();
    let file = age_file(1000);
    let mut body = Vec::new();
    for part in file.chunks(100) {
        body.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
        body.extend_from_slice(part);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"0\r\n\r\n");
    let head = format!(
        "POST /v1/uploads HTTP/1.1\r\nhost: localhost\r\nauthorization: {}\r\ncontent-type: application/octet-stream\r\n\
         transfer-encoding: chunked\r\n\r\n",
        owner.header
    );
    std::io::Write::write_all(connection.stream.get_mut(), &[head.as_bytes(), &body].concat()).unwrap();
    let answer = connection.answer("POST");
    assert_eq!((answer.status, answer.json()["size"].as_u64()), (201, Some(file.len() as u64)));
    // A capsule that says something else of the upload.
    let uploaded: UploadReply = serde_json::from_slice(&answer.body).unwrap();
    let content = ContentLocation::Spooled { size: 5, digest: uploaded.digest };
    let message = create(&[1; 32], capsule(content), Some(uploaded), &json!({}));
    assert_eq!(daemon.post("/v1/shares", &[("authorization", &owner.header)], &message).error(), "upload");
    let mut unknown = message.clone();
    unknown["upload"] = json!("AAAAAAAAAAAAAAAAAAAAAA");
    assert_eq!(daemon.post("/v1/shares", &[("authorization", &owner.header)], &unknown).error(), "upload");
}

#[test]
fn an_upload_and_a_share_whose_answers_were_lost_are_made_once() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let file = age_file(1000);
    let uploads: Vec<UploadReply> =
        (0..2).map(|_| serde_json::from_slice(&daemon.upload(&owner, &file).body).unwrap()).collect();
    assert_eq!(uploads[0], uploads[1]);
    until("the second file is gone", || daemon.metric("lockbox_share_spool_bytes") == file.len() as u64);
    // Of another owner it is another upload.
    let others: UploadReply = serde_json::from_slice(&daemon.upload(&Owner::new(), &file).body).unwrap();
    assert!(others.upload != uploads[0].upload);
    let [uploaded, again]: [UploadReply; 2] = uploads.try_into().ok().unwrap();
    let content = ContentLocation::Spooled { size: uploaded.size, digest: uploaded.digest };
    let message = create(&[1; 32], capsule(content), Some(uploaded), &json!({}));
    let post = |owner: &Owner, message: &serde_json::Value, path: &str| {
        daemon.post(path, &[("authorization", owner.header.as_str())], message)
    };
    let first = post(&owner, &message, "/v1/shares");
    assert_eq!(first.status, 201, "{}", first.text());
    let second = post(&owner, &message, "/v1/shares");
    assert_eq!((second.status, second.json()), (201, first.json()));
    assert_eq!(daemon.metric("lockbox_share_created_total"), 1);
    // Neither for somebody else nor for another share.
    assert_eq!(post(&Owner::new(), &message, "/v1/shares").error(), "upload");
    let other = create(&[2; 32], capsule(content), Some(again), &json!({}));
    assert_eq!(post(&owner, &other, "/v1/shares").error(), "upload");
}

#[test]
fn an_upload_that_breaks_off_leaves_nothing() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let mut connection = daemon.connect();
    let head = format!(
        "POST /v1/uploads HTTP/1.1\r\nhost: localhost\r\nauthorization: {}\r\ncontent-type: application/octet-stream\r\n\
         content-length: 10000000\r\n\r\n",
        owner.header
    );
    std::io::Write::write_all(connection.stream.get_mut(), &[head.as_bytes(), &age_file(100_000)].concat()).unwrap();
    until("bytes arrive", || daemon.metric("lockbox_share_spool_bytes") > 0);
    drop(connection);
    until("the upload is removed", || daemon.metric("lockbox_share_spool_bytes") == 0);
    assert_eq!(std::fs::read_dir(daemon.state().join("spool")).unwrap().count(), 0);
}
