//! What clients do who mean no good, and what a poor host does: each has its answer, and the daemon
//! goes on.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::json;

use crate::daemon::{Connection, Daemon, LONG_TIMEOUTS, Owner, QUICK, age_file, capsule, create, random, until};
use lockbox_share_protocol::capsule::ContentLocation;

/// Polls until `count` of the streams have an answer to read. A question that came earlier could
/// take the place of one of them.
fn until_answered(what: &str, streams: &[TcpStream], count: usize) {
    let answered = |stream: &&TcpStream| {
        stream.set_nonblocking(true).unwrap();
        stream.peek(&mut [0]).is_ok()
    };
    until(what, || streams.iter().filter(answered).count() == count);
}

#[test]
fn the_limiter_binds_whatever_a_client_writes_of_itself() {
    // A client may have 40 at once, and has none back for the next minute.
    let daemon = Daemon::start(&["--durability", "none", "--requests-per-minute", "1"]);
    let mut connection = daemon.connect();
    let mut statuses = Vec::new();
    for number in 0..60 {
        let forged = format!("192.0.2.{number}");
        let headers =
            [("x-forwarded-for", forged.as_str()), ("forwarded", "for=192.0.2.1"), ("x-real-ip", "192.0.2.1")];
        statuses.push(connection.ask("GET", "/v1/limits", &headers, b"").status);
    }
    let limited = statuses.iter().filter(|status| **status == 429).count();
    assert_eq!(limited, 20);
    let answer = connection.ask("GET", "/v1/limits", &[], b"");
    assert_eq!(answer.error(), "limited");
    assert!(answer.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    // Over the Unix socket nobody is limited.
    let mut local = Connection::unix(&daemon.unix);
    assert!((0..100).all(|_| local.ask("GET", "/v1/limits", &[], b"").status == 200));
    assert_eq!(daemon.metric("lockbox_share_limited_total") as usize, limited + 1);
}

#[test]
fn a_listed_proxy_names_the_clients() {
    let options = ["--durability", "none", "--requests-per-minute", "1", "--trusted-proxy", "127.0.0.0/8"];
    let daemon = Daemon::start(&options);
    let mut connection = daemon.connect();
    for number in 0..100 {
        let named = format!("203.0.113.{number}");
        assert_eq!(connection.ask("GET", "/v1/limits", &[("x-forwarded-for", &named)], b"").status, 200);
    }
    let one_network = |number: usize| format!("2001:db8:7:7:{number:x}::{number:x}");
    let limited = (0..60)
        .filter(|&number| {
            connection.ask("GET", "/v1/limits", &[("x-forwarded-for", &one_network(number))], b"").status == 429
        })
        .count();
    assert_eq!(limited, 20, "of 60 of one /64");
}

/// The kernel tells which user connects, and only the listed one is believed to be a proxy.
#[test]
fn only_the_proxys_user_names_clients_over_its_socket() {
    let own = nix::unistd::geteuid().as_raw();
    let start = |user: u32| {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("proxy.sock");
        let user = user.to_string();
        let proxy = ["--proxy-socket", socket.to_str().unwrap(), "--proxy-user", &user];
        let options = [&["--durability", "none", "--requests-per-minute", "1"][..], &proxy].concat();
        (Daemon::start_in(directory, &options), socket)
    };
    let (_daemon, socket) = start(own);
    let mut connection = Connection::unix(&socket);
    let mut ask = |named: &str| connection.ask("GET", "/v1/limits", &[("x-forwarded-for", named)], b"").status;
    for number in 0..60 {
        assert_eq!(ask(&format!("203.0.113.{number}")), 200);
    }
    // What a client wrote itself stands left of what the proxy adds.
    let limited = (0..60).filter(|number| ask(&format!("203.0.113.{number}, 198.51.100.1")) == 429).count();
    assert_eq!(limited, 20, "of 60");
    // And nobody behind it is a program of this machine.
    let mut connection = Connection::unix(&socket);
    let owner = Owner::new();
    let headers = [
        ("authorization", owner.header.as_str()),
        ("x-forwarded-for", "127.0.0.1"),
        ("content-type", "application/octet-stream"),
    ];
    assert_eq!(connection.ask("POST", "/v1/uploads", &headers, b"x").status, 403);
    let (_daemon, socket) = start(own + 1);
    let mut stranger = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let _ = stranger.write_all(b"GET /v1/limits HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 192.0.2.1\r\n\r\n");
    let mut answer = Vec::new();
    let _ = stranger.read_to_end(&mut answer);
    assert_eq!(answer, b"", "another user of this machine is not answered");
}

/// A connection from another address of this machine.
fn from(address: &str, daemon: &Daemon) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let near: std::net::SocketAddr = format!("{address}:0").parse().unwrap();
    socket.bind(&near.into()).unwrap();
    socket.connect(&daemon.http.into()).unwrap();
    socket.into()
}

/// A request whose head never ends.
fn unfinished_head(mut stream: TcpStream) -> TcpStream {
    stream.write_all(b"GET /v1/limits HTTP/1.1\r\nhost: slow\r\nx-").unwrap();
    stream
}

/// A request that is under way until its body ends.
fn unfinished_body(mut stream: TcpStream) -> TcpStream {
    let head = "POST /v1/claim HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    stream.write_all(format!("{head}content-length: 5000\r\nexpect: 100-continue\r\n\r\n").as_bytes()).unwrap();
    stream
}

/// Whether its request is under way: the daemon asks for the body when it begins to read it.
fn is_under_way(stream: &mut TcpStream) -> bool {
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).is_ok() && &answer == b"HTTP/1.1 100"
}

fn status_for(stream: TcpStream) -> u16 {
    Connection::new(stream).ask("GET", "/v1/limits", &[], b"").status
}

/// The whole house, from one address: whatever its connections wait for, others are served every
/// time.
#[test]
fn one_address_takes_no_place_from_the_unix_socket_and_from_other_addresses() {
    let daemon = Daemon::start(&[&QUICK[..], &LONG_TIMEOUTS, &["--max-connections", "64"]].concat());
    let accepted = || daemon.metric("lockbox_share_connections_accepted_total");
    let silent: Vec<TcpStream> = (0..64).map(|_| from("127.0.0.1", &daemon)).collect();
    let slow: Vec<TcpStream> = (0..64).map(|_| unfinished_head(from("127.0.0.1", &daemon))).collect();
    until("all have come", || accepted() == 128);
    for _ in 0..50 {
        assert_eq!(Connection::unix(&daemon.unix).ask("GET", "/v1/limits", &[], b"").status, 200);
        assert_eq!(status_for(from("127.0.0.2", &daemon)), 200);
        assert_eq!(status_for(from("127.0.0.1", &daemon)), 200);
    }
    assert_eq!(daemon.metric("lockbox_share_connections_refused_total"), 0);
    drop((silent, slow));
    // Bodies that never end are nobody's to take away; the address has its part of the places.
    let mut busy: Vec<TcpStream> = (0..64).map(|_| unfinished_body(from("127.0.0.3", &daemon))).collect();
    assert_eq!(busy.iter_mut().map(|stream| usize::from(is_under_way(stream))).sum::<usize>(), 16);
    let answer = Connection::new(from("127.0.0.3", &daemon)).ask("GET", "/v1/limits", &[], b"");
    assert_eq!((answer.status, answer.error().as_str()), (503, "unavailable"));
    for _ in 0..50 {
        assert_eq!(Connection::unix(&daemon.unix).ask("GET", "/v1/limits", &[], b"").status, 200);
        assert_eq!(status_for(from("127.0.0.2", &daemon)), 200);
    }
    drop(busy);
    until("there is room again", || status_for(from("127.0.0.3", &daemon)) == 200);
}

#[test]
fn a_full_house_serves_the_unix_socket_and_takes_places_back_from_who_only_waits() {
    // Few descriptors: without a part that is kept, connections would take the last one.
    let directory = tempfile::tempdir().unwrap();
    let daemon = limited(directory, "160", &LONG_TIMEOUTS);
    let full = 80;
    let mut busy = Vec::new();
    for address in ["127.0.0.1", "127.0.0.2", "127.0.0.3"] {
        busy.extend((0..20).map(|_| unfinished_body(from(address, &daemon))));
    }
    assert!(busy.iter_mut().all(is_under_way));
    let mut waiting: Vec<TcpStream> = (0..20).map(|_| unfinished_head(from("127.0.0.4", &daemon))).collect();
    until("the house is full", || daemon.metric("lockbox_share_connections") == full);
    // The oldest of those who wait goes for each newcomer with a request.
    let mut more = Vec::new();
    for _ in 0..20 {
        more.push(unfinished_body(from("127.0.0.5", &daemon)));
        assert!(more.last_mut().is_some_and(is_under_way));
    }
    assert!(waiting.iter_mut().all(|stream| matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_))));
    until("those who went are counted no more", || daemon.metric("lockbox_share_connections") == full);
    let answer = Connection::new(from("127.0.0.6", &daemon)).ask("GET", "/v1/limits", &[], b"");
    assert_eq!((answer.status, answer.error().as_str()), (503, "unavailable"));
    for _ in 0..50 {
        assert_eq!(Connection::unix(&daemon.unix).ask("GET", "/v1/limits", &[], b"").status, 200);
    }
    assert_eq!(daemon.metric("lockbox_share_accept_failures_total"), 0);
    drop(busy);
    until("there is room again", || status_for(from("127.0.0.6", &daemon)) == 200);
    assert!(daemon.metric("lockbox_share_connections_refused_total") >= 1);
}

/// Health and metrics have few places, and whoever probes the daemon must not find them taken.
#[test]
fn idle_connections_do_not_keep_a_probe_from_its_answer() {
    let daemon = Daemon::start(&QUICK);
    let idle: Vec<TcpStream> = (0..400).map(|_| TcpStream::connect(daemon.metrics).unwrap()).collect();
    for _ in 0..10 {
        let mut probe = Connection::new(TcpStream::connect(daemon.metrics).unwrap());
        assert_eq!(probe.ask("GET", "/readyz", &[], b"").text(), "ready\n");
    }
    drop(idle);
}

#[test]
fn a_listed_proxy_is_bound_by_the_sum_of_all_places_alone() {
    let proxy = ["--max-connections", "32", "--trusted-proxy", "127.0.0.1"];
    let daemon = Daemon::start(&[&QUICK[..], &LONG_TIMEOUTS, &proxy].concat());
    let mut busy: Vec<TcpStream> = (0..32).map(|_| unfinished_body(from("127.0.0.1", &daemon))).collect();
    assert!(busy.iter_mut().all(is_under_way));
    assert_eq!(status_for(from("127.0.0.1", &daemon)), 503);
    assert_eq!(Connection::unix(&daemon.unix).ask("GET", "/v1/limits", &[], b"").status, 200);
    drop(busy);
    until("there is room again", || status_for(from("127.0.0.1", &daemon)) == 200);
}

#[test]
fn slow_batches_of_one_client_leave_places_to_others() {
    let daemon = Daemon::start(&[QUICK, LONG_TIMEOUTS].concat());
    let owner = Owner::new();
    let authorization = format!("authorization: {}\r\n", owner.header);
    let begin = || {
        let mut stream = TcpStream::connect(daemon.http).unwrap();
        let head = "POST /v1/batch/info HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
        stream.write_all(format!("{head}{authorization}content-length: 5000\r\n\r\n{{").as_bytes()).unwrap();
        stream
    };
    let slow: Vec<TcpStream> = (0..24).map(|_| begin()).collect();
    until_answered("all places of the client are taken", &slow, 24 - 16);
    let ask = json!({ "items": ["0000000000000"] });
    let headers = [("authorization", owner.header.as_str()), ("content-type", "application/json")];
    let refused = daemon.post("/v1/batch/info", &headers[..1], &ask);
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert_eq!((refused.error().as_str(), refused.header("retry-after")), ("unavailable", Some("5")));
    // Another client, and what is no batch, is served.
    let mut local = Connection::unix(&daemon.unix);
    assert_eq!(local.ask("POST", "/v1/batch/info", &headers, ask.to_string().as_bytes()).status, 200);
    daemon.share(&owner, &json!({}));
    drop(slow);
    until("there is a place again", || daemon.post("/v1/batch/info", &headers[..1], &ask).status == 200);
}

#[test]
fn slow_uploads_of_one_client_leave_places_to_others() {
    let daemon = Daemon::start(&[QUICK, LONG_TIMEOUTS].concat());
    let owner = Owner::new();
    let authorization = format!("authorization: {}\r\n", owner.header);
    let begin = || {
        let mut stream = TcpStream::connect(daemon.http).unwrap();
        let head = "POST /v1/uploads HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n";
        stream.write_all(format!("{head}{authorization}content-length: 5000\r\n\r\n").as_bytes()).unwrap();
        stream
    };
    let slow: Vec<TcpStream> = (0..24).map(|_| begin()).collect();
    until_answered("all places of the client are taken", &slow, 24 - 16);
    let file = age_file(1000);
    let refused = daemon.upload(&owner, &file);
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert_eq!((refused.error().as_str(), refused.header("retry-after")), ("unavailable", Some("5")));
    let headers = [("authorization", owner.header.as_str()), ("content-type", "application/octet-stream")];
    let mut local = Connection::unix(&daemon.unix);
    assert_eq!(local.ask("POST", "/v1/uploads", &headers, &file).status, 201);
    drop(slow);
    until("there is a place again", || daemon.upload(&owner, &file).status == 201);
}

#[test]
fn watchers_of_one_client_leave_places_to_others() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let share = daemon.share(&owner, &json!({}));
    let headers = [("authorization", owner.header.as_str())];
    let watch = share.path("/watch?version=99&wait=60");
    let begin = |_| {
        let mut stream = TcpStream::connect(daemon.http).unwrap();
        let head = format!("GET {watch} HTTP/1.1\r\nhost: localhost\r\nauthorization: {}\r\n\r\n", owner.header);
        stream.write_all(head.as_bytes()).unwrap();
        stream
    };
    let waiting: Vec<TcpStream> = (0..140).map(begin).collect();
    until_answered("all places of the client are taken", &waiting, 140 - 128);
    let ask = share.path("/watch?wait=0");
    assert_eq!(daemon.get(&ask, &headers).status, 503);
    assert_eq!(Connection::unix(&daemon.unix).ask("GET", &ask, &headers, b"").status, 200);
    drop(waiting);
    until("there is a place again", || daemon.get(&ask, &headers).status == 200);
}

/// A daemon that may open so many files.
fn limited(directory: tempfile::TempDir, descriptors: &str, options: &[&str]) -> Daemon {
    let log = directory.path().join("log");
    Daemon::launch(directory, &[&QUICK[..], options].concat(), |command| {
        // A shell lowers both limits for the daemon that it becomes.
        let mut shell = std::process::Command::new("sh");
        let script = format!("ulimit -n {descriptors}; exec \"$@\"");
        shell.args(["-c", &script, "sh"]).arg(command.get_program()).args(command.get_args());
        shell.stdout(std::process::Stdio::piped()).stderr(std::fs::File::create(log).unwrap());
        *command = shell;
    })
}

#[test]
fn without_descriptors_it_waits_and_serves_on() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = limited(directory, "96", &["--trusted-proxy", "127.0.0.1"]);
    // So many that those of the Unix socket take the last descriptor: of the network's the daemon
    // takes half.
    let many: Vec<TcpStream> = (0..150).filter_map(|_| TcpStream::connect(daemon.http).ok()).collect();
    assert_eq!(many.len(), 150);
    let local: Vec<_> = (0..100).filter_map(|_| std::os::unix::net::UnixStream::connect(&daemon.unix).ok()).collect();
    until("one of them cannot be accepted", || daemon.log().contains("cannot be accepted"));
    drop((many, local));
    until("it serves again", || {
        let mut stream = Connection::new(TcpStream::connect(daemon.http).unwrap());
        stream.ask("GET", "/v1/limits", &[("connection", "close")], b"").status == 200
    });
    assert!(daemon.log().contains("descriptors are enough for 48 connections"), "{}", daemon.log());
    assert!(daemon.metric("lockbox_share_accept_failures_total") >= 1);
}

#[test]
fn ten_thousand_idle_connections_take_less_than_100_kilobytes_each() {
    let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    let wanted = if limit.1 > 45_000 { 10_000 } else { 400 };
    let _ = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, limit.1, limit.1);
    let room = ["--head-timeout", "600s", "--max-connections", "40000"];
    let daemon = Daemon::start(&QUICK.into_iter().chain(room).collect::<Vec<_>>());
    let resident = || {
        let text = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
        let line = text.lines().find(|line| line.starts_with("VmRSS:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    };
    assert_eq!(daemon.get("/v1/limits", &[]).status, 200);
    let before = resident();
    let mut slow = Vec::new();
    for number in 0..wanted {
        let mut stream = TcpStream::connect(daemon.http).unwrap();
        // Half of them have begun a request.
        if number % 2 == 0 {
            stream.write_all(b"GET /v1/limits HTTP/1.1\r\nhost: slow\r\nx-").unwrap();
        }
        slow.push(stream);
    }
    until("all are accepted", || daemon.metric("lockbox_share_connections") as usize >= wanted);
    let each = resident().saturating_sub(before) / wanted;
    assert!(each < 100_000, "{each} bytes for each connection");
    // Others are served meanwhile.
    assert_eq!(daemon.get("/v1/limits", &[]).status, 200);
}

#[test]
fn a_full_disk_is_told_and_a_message_that_fits_is_taken_again() {
    // The spool's own limit stands for the disk's: both answer alike.
    let options: Vec<&str> = QUICK.into_iter().chain(["--spool-size", "1M"]).collect();
    let daemon = Daemon::start(&options);
    let owner = Owner::new();
    let answer = daemon.upload(&owner, &age_file(2 << 20));
    assert_eq!((answer.status, answer.error().as_str()), (507, "no_space"));
    until("nothing is left of it", || daemon.metric("lockbox_share_spool_bytes") == 0);
    daemon.share_file(&owner, &age_file(1000));
}

#[test]
fn pages_of_other_sites_change_nothing() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let share = daemon.share(&owner, &json!({}));
    let own = format!("http://{}", daemon.http);
    for other in [
        ("origin", "https://evil.example"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
    ] {
        let refused = daemon.post("/v1/claim", &[other], &share.claim(random()));
        assert_eq!((refused.status, refused.error().as_str()), (403, "forbidden"), "{other:?}");
        let headers = [other, ("authorization", owner.header.as_str())];
        for path in ["/v1/uploads", "/v1/shares", &share.path("/revoke"), &share.path("/rearm")] {
            assert_eq!(daemon.post(path, &headers, &json!({})).status, 403, "{path} {other:?}");
        }
        assert_eq!(daemon.get("/v1/limits", &[other]).status, 200);
    }
    assert_eq!(daemon.state_of(&owner, &share), "armed");
    let page = [("origin", own.as_str()), ("sec-fetch-site", "same-origin")];
    // The links of a daemon without a public name begin with its address, by which the page was
    // loaded.
    assert_eq!(daemon.post("/v1/claim", &page, &share.claim(random())).status, 200);
}

#[test]
fn heads_that_are_no_http_end_their_connection_and_nothing_else() {
    let daemon = Daemon::start(&QUICK);
    let long = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "a".repeat(20_000));
    for head in [
        "\0\0\0\0\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "POST /v1/claim HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        &long,
    ] {
        let mut stream = TcpStream::connect(daemon.http).unwrap();
        let _ = stream.write_all(head.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
            "{head:.20}: {}",
            String::from_utf8_lossy(&answer)
        );
    }
    assert_eq!(daemon.get("/v1/limits", &[]).status, 200);
    let owner = Owner::new();
    let message = create(&random(), capsule(ContentLocation::Inline), None, &json!({}));
    assert_eq!(daemon.post("/v1/shares", &[("authorization", &owner.header)], &message).status, 201);
}
