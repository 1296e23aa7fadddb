//! Both halves of the control socket against each other.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use super::*;
use crate::error::Error;

const ID: [u8; 16] = [0xab; 16];

fn describe(request: Request) -> Response {
    match request {
        Request::Status => Response::Status(Status { pid: 7, mount_point: "/mnt".into(), ..Status::default() }),
        Request::Stop { lazy: false } => Response::Busy { message: "files are open".into() },
        _ => Response::Done,
    }
}

#[test]
fn a_question_gets_the_handlers_answer_and_the_socket_goes_with_the_server() {
    let runtime = tempfile::tempdir().unwrap();
    let server = serve(runtime.path(), &ID, describe).unwrap();
    let socket = socket_path(runtime.path(), &ID);
    assert_eq!(server.socket(), socket);
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(socket.parent().unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o700);

    assert!(matches!(ask(&socket, &Request::Stop { lazy: false }), Ok(Response::Busy { .. })));
    assert!(matches!(ask(&socket, &Request::Sync), Ok(Response::Done)));
    let all = running(runtime.path()).unwrap();
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].1.pid, 7);

    server.finish();
    assert!(!socket.exists());
    assert!(running(runtime.path()).unwrap().is_empty());
}

#[test]
fn a_second_server_of_the_same_archive_is_refused() {
    let runtime = tempfile::tempdir().unwrap();
    let first = serve(runtime.path(), &ID, describe).unwrap();
    assert!(matches!(serve(runtime.path(), &ID, describe), Err(Error::InUse(_))));
    assert!(ask(first.socket(), &Request::Status).is_ok());
}

#[test]
fn a_dead_socket_is_replaced() {
    let runtime = tempfile::tempdir().unwrap();
    drop(serve(runtime.path(), &ID, describe).unwrap());
    drop(UnixListener::bind(socket_path(runtime.path(), &ID)).unwrap());
    let server = serve(runtime.path(), &ID, describe).unwrap();
    assert!(ask(server.socket(), &Request::Status).is_ok());
}

#[test]
fn a_directory_that_others_may_enter_is_refused() {
    let runtime = tempfile::tempdir().unwrap();
    let directory = runtime.path().join("lockbox");
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(matches!(serve(runtime.path(), &ID, describe), Err(Error::NotPermitted)));
}

#[test]
fn running_without_a_directory_is_empty() {
    assert!(running(std::path::Path::new("/nonexistent")).unwrap().is_empty());
}
