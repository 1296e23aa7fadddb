//! The process: start, health, metrics, stop, and what it writes down.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::json;

use crate::daemon::{Connection, Daemon, Owner, QUICK, age_file, lease, until};

#[test]
fn it_stops_with_code_0_after_the_running_requests_and_keeps_the_shares() {
    let mut daemon = Daemon::start(&["--requests-per-minute", "0"]);
    let owner = Owner::new();
    let share = daemon.share(&owner, &json!({}));
    let file = daemon.share_file(&owner, &age_file(5_000_000));
    let bearer = lease(&daemon.claim(&file));
    // One request under way, one idle connection.
    let idle = daemon.connect();
    let mut running = daemon.connect();
    running.send("GET", &file.path("/ciphertext"), &[("authorization", &bearer)], b"");
    assert_eq!(running.head().status, 200);
    daemon.signal("TERM");
    until("the daemon stops listening", || std::net::TcpStream::connect(daemon.http).is_err());
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut running.stream, &mut rest).unwrap();
    assert_eq!(rest.len(), age_file(5_000_000).len());
    drop(idle);
    until("the daemon ends", || daemon.child.try_wait().unwrap().is_some());
    assert_eq!(daemon.child.wait().unwrap().code(), Some(0), "{}", daemon.log());
    assert!(!daemon.unix.exists());
    let directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
    let again = Daemon::start_in(directory, &["--requests-per-minute", "0"]);
    assert_eq!(again.claim(&share).status, 200);
    assert_eq!(again.claim(&share).status, 410);
}

#[test]
fn health_and_metrics_have_a_listener_of_their_own() {
    let daemon = Daemon::start(&QUICK);
    let mut admin = Connection::new(std::net::TcpStream::connect(daemon.metrics).unwrap());
    assert_eq!(admin.ask("GET", "/healthz", &[], b"").text(), "ok\n");
    assert_eq!(admin.ask("GET", "/readyz", &[], b"").text(), "ready\n");
    assert_eq!(admin.ask("GET", "/v1/limits", &[], b"").status, 404);
    assert_eq!(daemon.get("/metrics", &[]).status, 404);
    let owner = Owner::new();
    let share = daemon.share(&owner, &json!({}));
    daemon.claim(&share);
    for (name, value) in [("created", 1), ("claimed", 1), ("completed", 1), ("misses", 0), ("conflicts", 0)] {
        assert_eq!(daemon.metric(&format!("lockbox_share_{name}_total")), value, "{name}");
    }
}

#[test]
fn logs_and_metrics_hold_no_handle_proof_or_token() {
    let daemon = Daemon::launch(tempfile::tempdir().unwrap(), &QUICK, |command| {
        command.env("LOCKBOX_LOG", "trace");
    });
    let owner = Owner::new();
    let share = daemon.share_file(&owner, &age_file(1000));
    let claim = share.claim([9; 16]);
    let bearer = lease(&daemon.post("/v1/claim", &[], &claim));
    daemon.get(&share.path("/ciphertext"), &[("authorization", &bearer)]);
    daemon.get(&format!("/s/{}%23AGE-SECRET-KEY-1QQQ", share.created.handle), &[]);
    daemon.post("/v1/claim", &[], &json!({ "handle": share.created.handle.to_string(), "auth": "damaged-secret" }));
    let mut admin = Connection::new(std::net::TcpStream::connect(daemon.metrics).unwrap());
    let told = format!("{}\n{}", daemon.log(), admin.ask("GET", "/metrics", &[], b"").text());
    let secrets = [
        share.created.handle.to_string(),
        claim["auth"].as_str().unwrap().to_owned(),
        bearer.replace("Bearer ", ""),
        owner.header.replace("Bearer ", ""),
        "AGE-SECRET".into(),
        "damaged-secret".into(),
    ];
    for secret in secrets {
        assert!(!told.contains(&secret), "{secret} is in\n{told}");
    }
}

#[test]
fn one_state_directory_and_one_address_have_one_daemon() {
    let daemon = Daemon::start(&QUICK);
    let start = |state: &std::path::Path, listen: &str| {
        Command::new(env!("CARGO_BIN_EXE_lockbox-share"))
            .args(["serve", "--unix-socket", "none", "--metrics-listen", "none", "--listen", listen, "--state-dir"])
            .arg(state)
            .output()
            .unwrap()
    };
    let second = start(&daemon.state(), "127.0.0.1:0");
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("another lockbox-share"), "{second:?}");
    let other = tempfile::tempdir().unwrap();
    let second = start(other.path(), &daemon.http.to_string());
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("cannot listen on"), "{second:?}");
    assert_eq!(std::fs::metadata(&daemon.unix).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn the_service_manager_is_told_when_it_is_ready() {
    let directory = tempfile::tempdir().unwrap();
    let manager = std::os::unix::net::UnixDatagram::bind(directory.path().join("notify")).unwrap();
    let path = directory.path().join("notify");
    let _daemon = Daemon::launch(directory, &QUICK, |command| {
        command.env("NOTIFY_SOCKET", path);
    });
    let mut message = [0; 64];
    let length = manager.recv(&mut message).unwrap();
    assert_eq!(&message[..length], b"READY=1");
}

#[test]
fn what_whoever_started_it_left_open_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, "x").unwrap();
    let daemon = Daemon::launch(directory, &QUICK, |command| {
        let mut shell = Command::new("sh");
        let script = "exec 3<\"$0\" 9<\"$0\"; exec \"$@\"";
        shell.args(["-c", script]).arg(&secret).arg(command.get_program()).args(command.get_args());
        shell.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null());
        *command = shell;
    });
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).unwrap();
    let open: Vec<_> = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok()).collect();
    assert!(open.len() > 5 && !open.iter().any(|path| path.ends_with("secret")), "{open:?}");
}

#[test]
fn a_stopped_client_of_a_message_is_told_that_it_was_too_slow() {
    // The head of the unfinished message must arrive within its own timeout.
    let options: Vec<&str> = QUICK.into_iter().chain(["--body-timeout", "1s", "--head-timeout", "5s"]).collect();
    let daemon = Daemon::start(&options);
    let mut body = daemon.connect();
    body.stream
        .get_mut()
        .write_all(
            b"POST /v1/claim HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{",
        )
        .unwrap();
    let mut head = daemon.connect();
    head.stream.get_mut().write_all(b"GET /v1/limits HTTP/1.1\r\nhost").unwrap();
    assert_eq!(body.answer("POST").error(), "timeout");
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut head.stream, &mut rest).unwrap();
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&rest));
    until("it is counted", || daemon.metric("lockbox_share_connections_slow_total") >= 1);
}
