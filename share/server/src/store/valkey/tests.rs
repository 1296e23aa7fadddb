//! The suite against a real server, which each test starts for itself on a socket in a directory of
//! its own.

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::simulated::ManualClock;
use super::super::tests::conformance::{Subject, auth, handle, id, owner, small, suite};
use super::*;
use crate::store::spool::Spool;
use crate::store::{Durability, NewShare, PendingReply, Periods, Result, ShareStore, StoreError, StoreMaintenance};

/// A server that ends with the test.
struct Server {
    child: Child,
    directory: tempfile::TempDir,
}

impl Server {
    fn start(arguments: &[&str]) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let child = launch(directory.path(), arguments);
        let server = Server { child, directory };
        server.await_answer();
        server
    }

    fn await_answer(&self) {
        let begun = Instant::now();
        while UnixStream::connect(self.socket()).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the server does not answer");
            std::thread::yield_now();
        }
    }

    fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("socket")
    }

    fn settings(&self, durability: Durability, clock: Arc<ManualClock>, periods: Periods) -> ValkeySettings {
        let url = format!("valkey+unix://{}", self.socket().display());
        ValkeySettings { url, password: None, durability, periods, clock }
    }

    fn flush(&self) {
        let client = redis::Client::open(format!("unix://{}", self.socket().display())).unwrap();
        redis::cmd("FLUSHALL").exec(&mut client.get_connection().unwrap()).unwrap();
    }
}

fn launch(directory: &std::path::Path, arguments: &[&str]) -> Child {
    let programs = ["valkey-server", "redis-server"];
    for program in programs {
        let mut command = Command::new(program);
        command.args(["--port", "0", "--save", "", "--unixsocket"]).arg(directory.join("socket"));
        command.arg("--dir").arg(directory).args(arguments).stdout(Stdio::null()).stdin(Stdio::null());
        match command.spawn() {
            Ok(child) => return child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => panic!("{program}: {error}"),
        }
    }
    panic!("this test needs a server: install the package redis-server (or valkey-server)");
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
fn the_valkey_store_conforms() {
    let server = Server::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    suite(&|periods| {
        server.flush();
        let clock = Arc::new(ManualClock::new());
        let store = ValkeyStore::connect(&server.settings(Durability::Commit, clock.clone(), periods)).unwrap();
        // The server forgets by itself.
        Subject { store: Arc::new(store), clock, sweep: Box::new(|| {}), counts: false }
    });
}

#[test]
fn two_daemons_serve_the_same_links_and_one_wins() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::new());
    let settings = server.settings(Durability::None, clock, Periods::default());
    let stores = [ValkeyStore::connect(&settings).unwrap(), ValkeyStore::connect(&settings).unwrap()];
    for number in 0..50 {
        stores[number as usize % 2].create(handle(number), small(number)).wait().unwrap();
        let claims: Vec<_> =
            (0..10).map(|n| stores[n as usize % 2].claim(handle(number), &auth(number), id(n))).collect();
        assert_eq!(claims.into_iter().map(PendingReply::wait).filter(Result::is_ok).count(), 1, "share {number}");
    }
}

#[test]
fn a_consumed_share_stays_consumed_when_the_server_is_killed() {
    let arguments = ["--appendonly", "yes", "--appendfsync", "always"];
    let mut server = Server::start(&arguments);
    let clock = Arc::new(ManualClock::new());
    let store = ValkeyStore::connect(&server.settings(Durability::Commit, clock, Periods::default())).unwrap();
    store.create(handle(1), small(1)).wait().unwrap();
    store.create(handle(2), small(2)).wait().unwrap();
    store.claim(handle(1), &auth(1), id(1)).wait().unwrap();
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let gone = store.claim(handle(2), &auth(2), id(1)).wait().err();
    assert!(matches!(&gone, Some(StoreError::Unavailable(why)) if why.contains("does not answer")), "{gone:?}");
    assert!(store.ready().is_err());
    std::fs::remove_file(server.socket()).unwrap();
    server.child = launch(server.directory.path(), &arguments);
    server.await_answer();
    // The server may still be reading its file.
    let begun = Instant::now();
    let again = loop {
        match store.claim(handle(1), &auth(1), id(2)).wait().err() {
            Some(StoreError::Unavailable(why)) => assert!(begun.elapsed() < Duration::from_secs(60), "{why}"),
            other => break other,
        }
    };
    assert!(matches!(again, Some(StoreError::Used { .. })), "{again:?}");
    assert!(store.claim(handle(2), &auth(2), id(2)).wait().is_ok());
    assert!(store.ready().is_ok());
}

#[test]
fn a_server_that_cannot_promise_is_refused_in_mode_commit() {
    let server = Server::start(&["--appendonly", "no"]);
    let clock = Arc::new(ManualClock::new());
    let settings = server.settings(Durability::Commit, clock.clone(), Periods::default());
    let refused = ValkeyStore::connect(&settings).err().unwrap();
    assert!(refused.to_string().contains("appendfsync always"), "{refused}");
    let bad = ValkeySettings { url: "valkey://:secret@localhost/".into(), ..settings };
    let refused = ValkeyStore::connect(&bad).err().unwrap();
    assert!(matches!(refused, StoreError::Invalid(_)) && !refused.to_string().contains("secret@"), "{refused}");
}

#[test]
fn payloads_that_no_share_needs_leave_the_spool() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::new());
    let store = ValkeyStore::connect(&server.settings(Durability::None, clock, Periods::default())).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let spool = Spool::open(directory.path(), 10_000).unwrap();
    let payload = || {
        let mut deposit = spool.begin().unwrap();
        deposit.write(&[4; 1000]).unwrap();
        Some(deposit.finish().wait().unwrap())
    };
    for number in 0..3 {
        store.create(handle(number), NewShare { payload: payload(), ..small(number) }).wait().unwrap();
    }
    // Its share was never made.
    payload();
    store.revoke(handle(1), &owner(1)).wait().unwrap();
    store.inner.sweep_spool(&spool, Duration::from_secs(3600)).unwrap();
    assert_eq!(spool.bytes(), 4000, "what is young stays");
    store.inner.sweep_spool(&spool, Duration::ZERO).unwrap();
    assert_eq!(spool.bytes(), 2000);
    let lease = store.claim(handle(2), &auth(2), id(1)).wait().unwrap().lease.unwrap();
    assert!(spool.read(&lease.payload).is_ok());
}
