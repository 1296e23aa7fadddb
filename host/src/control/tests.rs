//! Tests of client and server of the control socket against each other.

use std::io::{Read, Seek, Write as _};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use lockbox::error::{Error, LogStats};

fn name() -> SocketName {
    SocketName::of_address("https://example.com/a.lbx".as_ref())
}

fn me() -> u32 {
    nix::unistd::geteuid().as_raw()
}

fn own(runtime: &Path) -> RuntimeDir {
    RuntimeDir { runtime: runtime.into(), owner: me() }
}

fn describe(request: Request) -> Response {
    match request {
        Request::Status => {
            Response::Status(Box::new(Status { pid: 7, mount_point: "/mnt".into(), ..Status::default() }))
        }
        Request::Stop { lazy: false, abandon: false, force: false } => {
            Response::Busy { message: "files are open".into() }
        }
        _ => Response::Done,
    }
}

fn serve(
    runtime: &Path,
    name: &SocketName,
    handler: impl Fn(Request) -> Response + Send + Sync + 'static,
) -> lockbox::Result<ControlServer> {
    listen(runtime, name)?.serve(move |request, _| handler(request))
}

#[test]
fn a_question_gets_the_handlers_answer_and_the_socket_goes_with_the_server() {
    let runtime = tempfile::tempdir().unwrap();
    let server = serve(runtime.path(), &name(), describe).unwrap();
    let socket = socket_path(runtime.path(), &name());
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(socket.parent().unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o700);

    assert!(matches!(
        send_request(&socket, me(), &Request::Stop { lazy: false, abandon: false, force: false }),
        Ok(Response::Busy { .. })
    ));
    assert!(matches!(send_request(&socket, me(), &Request::Sync), Ok(Response::Done)));
    let all = list_daemons(&own(runtime.path())).unwrap();
    assert_eq!(all.len(), 1);
    // Process and user id are those of the peer credentials, not those in the status.
    assert_eq!(all[0].1.pid, std::process::id());
    assert_eq!(all[0].1.uid, nix::unistd::geteuid().as_raw());

    server.finish();
    assert!(!socket.exists());
    assert!(list_daemons(&own(runtime.path())).unwrap().is_empty());
}

#[test]
fn the_socket_is_taken_away_where_it_was_whatever_hides_the_path() {
    let place = tempfile::tempdir().unwrap();
    let (runtime, aside) = (place.path().join("run"), place.path().join("aside"));
    std::fs::create_dir(&runtime).unwrap();
    let listening = listen(&runtime, &name()).unwrap();
    let waits = std::os::unix::net::UnixStream::connect(socket_path(&runtime, &name()));
    assert!(waits.is_ok(), "before it is served");
    let server = listening.serve(|request, _| describe(request)).unwrap();
    std::fs::rename(&runtime, &aside).unwrap();
    assert!(send_request(&socket_path(&aside, &name()), me(), &Request::Sync).is_ok());
    drop(waits);
    server.finish();
    assert!(!socket_path(&aside, &name()).exists());
    // A failed mount removes it too.
    drop(listen(&aside, &name()).unwrap());
    assert!(!socket_path(&aside, &name()).exists());
}

#[test]
fn a_second_server_of_the_same_archive_is_refused() {
    let runtime = tempfile::tempdir().unwrap();
    let _first = serve(runtime.path(), &name(), describe).unwrap();
    assert!(matches!(serve(runtime.path(), &name(), describe), Err(Error::InUse(_))));
    assert!(send_request(&socket_path(runtime.path(), &name()), me(), &Request::Status).is_ok());
}

#[test]
fn each_file_and_address_has_a_name_of_its_own() {
    let place = tempfile::tempdir().unwrap();
    let named = |file: &str| SocketName::of_file(&place.path().join(file).metadata().unwrap());
    std::fs::write(place.path().join("a"), "").unwrap();
    std::fs::copy(place.path().join("a"), place.path().join("b")).unwrap();
    std::fs::hard_link(place.path().join("a"), place.path().join("link")).unwrap();
    let (a, b, link) = (named("a"), named("b"), named("link"));
    assert_ne!(a, b);
    assert_eq!(a, link, "the same file by another name");
    let at = |address: &str| SocketName::of_address(address.as_ref());
    assert_ne!(at("s3://bucket/a"), at("s3://bucket/b"));
    let reader = |point: &str| SocketName::of_reader("s3://bucket/a".as_ref(), Path::new(point));
    assert!(reader("/mnt/a") != reader("/mnt/b") && reader("/mnt/a") != at("s3://bucket/a"));
    let long = at(&format!("https://example.com/{}", "a/".repeat(500)));
    for name in [a, b, long] {
        let path = socket_path(Path::new("/run/user/4294967295"), &name);
        assert!(name.is_of(&path) && rustix::net::SocketAddrUnix::new(&path).is_ok(), "{}", path.display());
    }
}

#[test]
fn a_dead_socket_is_replaced() {
    let runtime = tempfile::tempdir().unwrap();
    drop(serve(runtime.path(), &name(), describe).unwrap());
    drop(UnixListener::bind(socket_path(runtime.path(), &name())).unwrap());
    let _server = serve(runtime.path(), &name(), describe).unwrap();
    assert!(send_request(&socket_path(runtime.path(), &name()), me(), &Request::Status).is_ok());
}

#[test]
fn a_directory_that_others_may_enter_is_refused() {
    let runtime = tempfile::tempdir().unwrap();
    let directory = runtime.path().join("lockbox");
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(matches!(serve(runtime.path(), &name(), describe), Err(Error::NotPermitted)));
}

#[test]
fn running_without_a_directory_is_empty() {
    assert!(list_daemons(&own(Path::new("/nonexistent"))).unwrap().is_empty());
}

#[test]
fn nothing_is_asked_where_another_user_is_expected() {
    let runtime = tempfile::tempdir().unwrap();
    let _server = serve(runtime.path(), &name(), describe).unwrap();
    let place = RuntimeDir { owner: own(runtime.path()).owner + 1, ..own(runtime.path()) };
    assert!(list_daemons(&place).unwrap().is_empty());
    // A symbolic link is not followed either: it may lead to the socket of another service.
    let elsewhere = tempfile::tempdir().unwrap();
    let sockets = elsewhere.path().join("lockbox");
    std::fs::create_dir(&sockets).unwrap();
    std::os::unix::fs::symlink(socket_path(runtime.path(), &name()), sockets.join("x.sock")).unwrap();
    assert!(list_daemons(&own(elsewhere.path())).unwrap().is_empty());
}

#[test]
fn no_request_reaches_a_process_of_another_user() {
    let runtime = tempfile::tempdir().unwrap();
    let (sender, asked) = std::sync::mpsc::channel();
    let sender = parking_lot::Mutex::new(sender);
    let server = serve(runtime.path(), &name(), move |request| {
        let _ = sender.lock().send(());
        describe(request)
    });
    let server = server.unwrap();
    for request in
        [Request::Status, Request::Sync, Request::Purge, Request::Stop { lazy: true, abandon: false, force: false }]
    {
        assert!(matches!(
            send_request(&socket_path(runtime.path(), &name()), me() + 1, &request),
            Err(Error::NotPermitted)
        ));
    }
    server.finish();
    assert!(asked.try_recv().is_err());
}

#[test]
fn who_answers_for_its_status_and_for_nothing_else_is_left_in_time_unless_it_is_ours() {
    for request in [
        Request::Sync,
        Request::Purge,
        Request::Stop { lazy: false, abandon: false, force: false },
        Request::Stop { lazy: true, abandon: false, force: false },
        Request::SnapshotCreate { name: SnapshotName::default() },
        Request::SnapshotList { after: 0, held: true },
        Request::SnapshotHeld { ranges: vec![(1, 2)] },
        Request::SnapshotRemove { ids: vec![1], among: None },
    ] {
        assert_eq!(client::response_timeout(me(), &request), None);
        let limit = client::response_timeout(me() + 1, &request).unwrap();
        assert!((60..=600).contains(&limit.as_secs()), "{request:?}");
    }
    assert!(
        client::response_timeout(me() + 1, &Request::Backup { whole: true, verify: true, percent: None }).is_some()
    );
    let runtime = tempfile::tempdir().unwrap();
    let (over, hold) = std::sync::mpsc::channel::<()>();
    let hold = parking_lot::Mutex::new(hold);
    let server = serve(runtime.path(), &name(), move |request| {
        if !matches!(request, Request::Status) {
            let _ = hold.lock().recv();
        }
        describe(request)
    });
    let _server = server.unwrap();
    assert!(send_request(&socket_path(runtime.path(), &name()), me(), &Request::Status).is_ok());
    let limit = Some(std::time::Duration::from_millis(50));
    let error = client::send_request_within(
        &socket_path(runtime.path(), &name()),
        me(),
        &Request::Stop { lazy: false, abandon: false, force: false },
        limit,
    )
    .unwrap_err();
    assert!(error.to_string().starts_with("no answer within"), "{error}");
    drop(over);
}

#[test]
fn who_takes_no_connection_is_left_in_time() {
    let runtime = tempfile::tempdir().unwrap();
    std::fs::create_dir(runtime.path().join("lockbox")).unwrap();
    let socket = socket_path(runtime.path(), &name());
    let listener = UnixListener::bind(&socket).unwrap();
    // The listener's queue is full when a connection has to wait.
    nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
    let _waiting = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let limit = Some(Duration::from_millis(50));
    assert!(matches!(
        client::send_request_within(&socket, me(), &Request::Stop { lazy: false, abandon: false, force: false }, limit),
        Err(Error::Io { .. })
    ));
}

/// Includes a long line, which is received in parts.
#[test]
fn a_file_comes_with_its_request_and_who_leaves_is_gone() {
    let runtime = tempfile::tempdir().unwrap();
    let (sender, left) = std::sync::mpsc::channel();
    let sender = parking_lot::Mutex::new(sender);
    let server = listen(runtime.path(), &name()).unwrap().serve(move |request, client| match (request, &client.file) {
        (Request::Backup { whole: true, .. }, Some(file)) => {
            assert!(!client.is_gone());
            std::fs::File::from(file.try_clone().unwrap()).write_all(b"written").unwrap();
            Response::Done
        }
        (Request::Backup { whole: false, .. }, _) => {
            while !client.is_gone() {
                std::thread::yield_now();
            }
            let _ = sender.lock().send(());
            Response::Done
        }
        (request, None) => describe(request),
        (request, Some(_)) => panic!("a file with {request:?}"),
    });
    let _server = server.unwrap();
    let mut file = tempfile::tempfile().unwrap();
    let backup = |whole, go_on: &dyn Fn() -> lockbox::Result<()>| {
        let request = Request::Backup { whole, verify: false, percent: None };
        send_request_with_file(
            &socket_path(runtime.path(), &name()),
            me(),
            &request,
            std::os::fd::AsFd::as_fd(&file),
            go_on,
        )
    };
    assert!(matches!(backup(true, &|| Ok(())), Ok(Response::Done)));
    let looks = std::cell::Cell::new(0);
    let stopped = backup(false, &|| {
        looks.set(looks.get() + 1);
        if looks.get() > 1 { Err(Error::Interrupted(2)) } else { Ok(()) }
    });
    assert!(matches!(stopped, Err(Error::Interrupted(2))));
    left.recv().unwrap();
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "written");
    let ids = vec![u64::MAX; 2000];
    let remove = Request::SnapshotRemove { ids, among: None };
    assert!(send_request(&socket_path(runtime.path(), &name()), me(), &remove).is_ok());
}

#[test]
fn a_strangers_text_is_cut() {
    let runtime = tempfile::tempdir().unwrap();
    let long = || "ü".repeat(5000);
    let talk = move |request| match request {
        Request::Status => Response::Status(Box::new(Status {
            options: long(),
            latched: Some(long()),
            fallback: Some(long()),
            schedule: Some(ScheduleStatus { rules: long(), next: 0, failure: Some(long()) }),
            ..Status::default()
        })),
        Request::SnapshotCreate { .. } => Response::Refused { why: RefusalReason::NoSpace, message: long() },
        Request::Stop { .. } => Response::Busy { message: long() },
        _ => Response::Failed { message: long() },
    };
    let _server = serve(runtime.path(), &name(), talk).unwrap();
    let Response::Status(status) = send_request(&socket_path(runtime.path(), &name()), me(), &Request::Status).unwrap()
    else {
        panic!("no status")
    };
    assert_eq!(
        (status.options.len(), status.latched.unwrap().len(), status.fallback.unwrap().len()),
        (4096, 4096, 4096)
    );
    let schedule = status.schedule.unwrap();
    assert_eq!((schedule.rules.len(), schedule.failure.unwrap().len()), (4096, 4096));
    for request in [
        Request::Sync,
        Request::Stop { lazy: false, abandon: false, force: false },
        Request::SnapshotCreate { name: SnapshotName::default() },
    ] {
        match send_request(&socket_path(runtime.path(), &name()), me(), &request).unwrap() {
            Response::Busy { message } | Response::Failed { message } | Response::Refused { message, .. } => {
                assert_eq!(message.len(), 4096)
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The deadline counts from the request, not from the last byte: it ends the reading although each
/// read finds a byte.
#[test]
fn a_daemon_that_answers_in_drops_is_left_in_time() {
    let runtime = tempfile::tempdir().unwrap();
    std::fs::create_dir(runtime.path().join("lockbox")).unwrap();
    let socket = socket_path(runtime.path(), &name());
    let listener = UnixListener::bind(&socket).unwrap();
    let mut conversation =
        client::connect(&socket, me(), &Request::Status, &[], Some(Duration::from_secs(3600)), &|| Ok(())).unwrap();
    let (mut daemon, _) = listener.accept().unwrap();
    daemon.write_all(b"  ").unwrap();
    let patient = conversation.reader.get_mut();
    assert_eq!(patient.read(&mut [0]).unwrap(), 1);
    patient.until = Some(std::time::Instant::now());
    assert_eq!(patient.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::TimedOut);
    assert!(matches!(conversation.receive(), Err(Error::Io { .. })));
}

#[test]
fn what_an_older_daemon_says_is_understood() {
    let line = r#"{"response":"status","pid":1,"archive":"/a","archive_id":"00","mount_point":"/m","read_only":false,
        "options":"rw","generation":3,"dirty_bytes":0}"#;
    let Response::Status(status) = serde_json::from_str(line).unwrap() else { panic!("no status") };
    assert_eq!((status.generation, status.since, status.file_bytes, status.mount_namespace), (3, 0, None, 0));
    assert_eq!(status.log, LogStats::default());
    assert_eq!((status.snapshots, status.newest_snapshot, status.schedule), (None, None, None));
    let line = r#"{"response":"failed","message":"request not understood: unknown variant `snapshot-list`"}"#;
    let response: Response = serde_json::from_str(line).unwrap();
    assert!(response.failure_message().contains("older than this program"), "{}", response.failure_message());
    let newer = r#"{"response":"refused","why":"moonlight","message":"no"}"#;
    assert!(matches!(serde_json::from_str(newer).unwrap(), Response::Refused { why: RefusalReason::Other, .. }));
}

#[test]
fn a_list_comes_in_pages_and_a_strangers_endless_one_is_left() {
    let runtime = tempfile::tempdir().unwrap();
    let server = serve(runtime.path(), &name(), |request| match request {
        Request::SnapshotList { after, .. } => {
            let ids = (after + 1..=200).take(PAGE);
            let listed = ids.map(|id| ListedSnapshot {
                id,
                name: SnapshotName(vec![0xff, id as u8]),
                ..ListedSnapshot::default()
            });
            let snapshots: Vec<ListedSnapshot> = listed.collect();
            Response::Snapshots { more: snapshots.last().is_some_and(|last| last.id < 200), snapshots }
        }
        _ => Response::Done,
    });
    let server = server.unwrap();
    let all = list_snapshots(&socket_path(runtime.path(), &name()), me(), false).unwrap();
    assert_eq!(all.iter().map(|one| one.id).collect::<Vec<_>>(), (1..=200).collect::<Vec<_>>());
    assert_eq!(all[76].name, SnapshotName(vec![0xff, 77]));
    server.finish();
    let endless =
        |_| Response::Snapshots { snapshots: vec![ListedSnapshot { id: 1, ..ListedSnapshot::default() }], more: true };
    let server = serve(runtime.path(), &name(), endless).unwrap();
    let error = list_snapshots(&socket_path(runtime.path(), &name()), me(), true).unwrap_err();
    assert!(error.to_string().contains("has no end"), "{error}");
    server.finish();
    let server = serve(runtime.path(), &name(), |_| Response::Failed { message: "the archive is being closed".into() });
    let _server = server.unwrap();
    let error = list_snapshots(&socket_path(runtime.path(), &name()), me(), true).unwrap_err();
    assert!(error.to_string().contains("being closed"), "{error}");
}

#[test]
fn a_daemon_has_its_client_do_things_before_it_answers() {
    let runtime = tempfile::tempdir().unwrap();
    let waited = Duration::from_secs(60);
    let listening = listen(runtime.path(), &name()).unwrap();
    let server = listening.serve(move |_, client| {
        let path = TreePath(b"a\xff\n".to_vec());
        let made = |path| client.request_action(&Response::MakeDirectory { path }, &|| "it".into(), waited, &|| Ok(()));
        let done = made(path.clone());
        client.send(&Response::Kept { name: SnapshotName(b"told".to_vec()) }).unwrap();
        let failed = made(path);
        // A response that is too long for a line is not sent in part.
        let long = TreePath(vec![0; 12 << 10]);
        let long = vec![PathDifference { path: long, from: None, change: String::new(), changed: false }; 3];
        assert!(client.send(&Response::Differing { found: long }).is_err());
        // The failure is reported, regardless of its error kind.
        let is_right = done.is_ok() && matches!(&failed, Err(Error::NoSpace(text)) if text.starts_with("it: No space"));
        if is_right { Response::Done } else { Response::Failed { message: format!("{done:?} {failed:?}") } }
    });
    let _server = server.unwrap();
    let (mut made, mut kept) = (0, None);
    let end =
        exchange_messages(&socket_path(runtime.path(), &name()), me(), &Request::Sync, &|| Ok(()), &mut |response| {
            Ok(match response {
                Response::MakeDirectory { path } => {
                    assert_eq!(path.0, b"a\xff\n");
                    made += 1;
                    ControlFlow::Continue(Some(ActionResult { errno: (made == 2).then_some(28) }))
                }
                Response::Kept { name } => {
                    kept = Some(name);
                    ControlFlow::Continue(None)
                }
                end => ControlFlow::Break(end),
            })
        });
    assert!(matches!(end, Ok(Response::Done)), "{end:?}");
    assert_eq!((made, kept), (2, Some(SnapshotName(b"told".to_vec()))));
}

#[test]
fn a_daemon_waits_for_no_client_that_went_or_says_nothing() {
    let runtime = tempfile::tempdir().unwrap();
    let (ended, end) = mpsc::channel();
    let listening = listen(runtime.path(), &name()).unwrap();
    let server = listening.serve(move |request, client| {
        let limit = Duration::from_millis(if matches!(request, Request::Sync) { 60_000 } else { 300 });
        let what = Response::MakeDirectory { path: TreePath::default() };
        let done = client.request_action(&what, &|| "it".into(), limit, &|| Ok(()));
        ended.send(done).unwrap();
        Response::Done
    });
    let _server = server.unwrap();
    let socket = socket_path(runtime.path(), &name());
    let went: lockbox::Result<()> =
        exchange_messages(&socket, me(), &Request::Sync, &|| Ok(()), &mut |_| Err(Error::NotPermitted));
    assert!(matches!(went, Err(Error::NotPermitted)), "{went:?}");
    assert!(matches!(end.recv_timeout(Duration::from_secs(60)), Ok(Err(Error::Interrupted(_)))));
    // It listens and does not respond.
    let silent = exchange_messages(&socket, me(), &Request::Purge, &|| Ok(()), &mut |response| {
        Ok(match response {
            Response::MakeDirectory { .. } => ControlFlow::Continue(None),
            end => ControlFlow::Break(end),
        })
    });
    assert!(matches!(silent, Ok(Response::Done)), "{silent:?}");
    assert!(matches!(end.recv_timeout(Duration::from_secs(60)), Ok(Err(Error::Interrupted(_)))));
    // An interrupt ends the wait at once.
    let left: lockbox::Result<()> =
        exchange_messages(&socket, me(), &Request::Sync, &|| Err(Error::Interrupted(2)), &mut |_| {
            Ok(ControlFlow::Continue(None))
        });
    assert!(matches!(left, Err(Error::Interrupted(2))), "{left:?}");
}

#[test]
fn a_request_that_no_daemon_would_read_is_not_sent() {
    let runtime = tempfile::tempdir().unwrap();
    let _server = serve(runtime.path(), &name(), describe).unwrap();
    let paths = vec![TreePath(vec![b'a'; 4000]); 9];
    let request = Request::SnapshotRestore { name: SnapshotName::default(), paths, to: None };
    let asked = send_request(&socket_path(runtime.path(), &name()), me(), &request);
    assert!(matches!(&asked, Err(Error::Invalid(text)) if text.contains("too many names")), "{asked:?}");
    assert!(TreePath(vec![0; 12 << 10]).fits() && !TreePath(vec![0; (12 << 10) + 1]).fits());
}

#[test]
fn what_a_set_holds_is_asked_within_bounds() {
    let runtime = tempfile::tempdir().unwrap();
    let server = serve(runtime.path(), &name(), |request| match request {
        Request::SnapshotHeld { ranges } => Response::Held { bytes: ranges.iter().map(|(from, to)| from + to).sum() },
        _ => Response::Done,
    });
    let server = server.unwrap();
    assert_eq!(query_held_bytes(&socket_path(runtime.path(), &name()), me(), vec![(1, 2), (4, 4)], None).unwrap(), 11);
    let error = query_held_bytes(&socket_path(runtime.path(), &name()), me(), vec![(1, 2); 5000], None).unwrap_err();
    assert!(error.to_string().contains("at most 1400 groups"), "{error}");
    server.finish();
    // Response of a daemon that does not know the request.
    let older = |_| Response::Failed { message: "request not understood: unknown variant".into() };
    let server = serve(runtime.path(), &name(), older).unwrap();
    let error = query_held_bytes(&socket_path(runtime.path(), &name()), me(), vec![(1, 2)], None).unwrap_err();
    assert!(error.to_string().contains("older than this program"), "{error}");
    server.finish();
}

#[test]
fn a_path_comes_back_whatever_its_bytes_are() {
    for path in [&b"/mnt/a"[..], b"/mnt/caf\xe9", b"/\xff\xfe/\n"] {
        let path = Path::new(OsStr::from_bytes(path));
        let mut status = Status::default();
        status.set_archive(path);
        status.set_mount_point(path);
        let line = serde_json::to_string(&status).unwrap();
        assert_eq!(line.contains("_hex"), path.to_str().is_none(), "{line}");
        let back: Status = serde_json::from_str(&line).unwrap();
        assert_eq!((back.archive_path(), back.mount_point_path()), (path.to_owned(), path.to_owned()));
    }
}

/// A path of text only is what an older daemon says.
#[test]
fn an_older_daemon_is_understood_and_a_longer_path_is_not() {
    let status: Status = serde_json::from_str(r#"{"archive":"/a.lbx","mount_point":"/m"}"#).unwrap();
    assert_eq!((status.archive_path(), status.mount_point_path()), ("/a.lbx".into(), "/m".into()));
    assert_eq!((status.mount_id, status.mount_device), (0, 0));
    let long = format!(r#"{{"archive":"/a","archive_hex":"{}"}}"#, "ff".repeat(5000));
    assert!(serde_json::from_str::<Status>(&long).is_err());
}
