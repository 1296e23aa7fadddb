//! Reports start and end of the mount to a service supervisor (sd_notify(3)), in one datagram each.

use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::exit::Failure;

/// Connection to the supervisor, if there is one.
pub struct Notify(Option<UnixDatagram>);

impl Notify {
    /// Connects to the supervisor. `socket` is the value of NOTIFY_SOCKET: a path, or an abstract
    /// name after `@`.
    ///
    /// # Errors
    /// Fails if the supervisor cannot be reached: the service would never count as started.
    pub fn connect(socket: Option<OsString>) -> Result<Notify, Failure> {
        let Some(name) = socket.filter(|name| !name.is_empty()) else { return Ok(Notify(None)) };
        let connected = socket_address(&name).and_then(|socket_address| {
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&socket_address)?;
            Ok(socket)
        });
        match connected {
            Ok(socket) => Ok(Notify(Some(socket))),
            Err(e) => Err(Failure::other(format!("cannot reach the supervisor at {}: {e}", name.to_string_lossy()))),
        }
    }

    pub fn notify_ready(&self, point: &str) {
        self.send_state(&format!("READY=1\nSTATUS=mounted at {}", point.replace('\n', "?")));
    }

    pub fn notify_stopping(&self) {
        self.send_state("STOPPING=1\nSTATUS=closing the archive");
    }

    fn send_state(&self, state: &str) {
        if let Some(socket) = &self.0 {
            // A supervisor that is gone needs no report.
            let _ = socket.send(state.as_bytes());
        }
    }
}

fn socket_address(name: &OsStr) -> std::io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        _ => SocketAddr::from_pathname(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hear(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    #[test]
    fn start_and_end_are_reported_at_a_path_and_at_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let at_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("lockbox-test-{}", std::process::id());
        let abstract_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        for (socket, listener) in [(path.into_os_string(), at_path), (format!("@{name}").into(), abstract_name)] {
            let notify = Notify::connect(Some(socket)).unwrap();
            notify.notify_ready("/mnt/a\nREADY=0");
            assert_eq!(hear(&listener), "READY=1\nSTATUS=mounted at /mnt/a?READY=0");
            notify.notify_stopping();
            assert!(hear(&listener).starts_with("STOPPING=1\n"));
        }
    }

    #[test]
    fn without_a_supervisor_nothing_is_said_and_with_a_dead_one_nothing_starts() {
        Notify::connect(None).unwrap().notify_ready("/mnt");
        assert!(Notify::connect(Some("/nonexistent/notify".into())).is_err());
    }
}
