//! Relay of logind's sleep signals from the mount agent to the confined daemon.
//!
//! On the system bus root may start programs and change the machine. The daemon therefore gets no
//! connection to it: the agent holds the connection, and the daemon sends one byte per request.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};

use crate::dbus::{self, LogindClient};
use crate::mount::{receive_descriptor, send_descriptor};

/// Request for an inhibitor lock. Reply: a byte with the lock, or a byte and a line with the error.
const DELAY: u8 = b'd';
/// Request for the next signal. Reply: 1 before a sleep, 0 after it.
const NEXT_SIGNAL: u8 = b'n';
/// Maximum length of an error in bytes.
const MAX_ERROR: u64 = 4096;

/// Client of the relay, used by the daemon.
pub(crate) struct SleepClient(UnixStream);

impl SleepClient {
    pub(crate) fn new(relay: UnixStream) -> SleepClient {
        SleepClient(relay)
    }

    /// Takes an inhibitor lock: the machine delays its sleep while the descriptor is open.
    ///
    /// # Errors
    /// Errors of the bus and of logind, and the end of the agent.
    pub(crate) fn delay_sleep(&mut self) -> io::Result<OwnedFd> {
        self.0.write_all(&[DELAY])?;
        if let Some(lock) = receive_descriptor(&self.0) {
            return Ok(lock);
        }
        let mut error = String::new();
        BufReader::new(&self.0).take(MAX_ERROR).read_line(&mut error)?;
        match error.trim_end() {
            "" => Err(io::ErrorKind::UnexpectedEof.into()),
            error => Err(io::Error::other(error.to_owned())),
        }
    }

    /// Waits until the machine is about to sleep (true) or woke up (false).
    ///
    /// # Errors
    /// The end of the relay, which ends when the bus or logind is lost.
    pub(crate) fn next_sleep_signal(&mut self) -> io::Result<bool> {
        self.0.write_all(&[NEXT_SIGNAL])?;
        let mut sleeps = [0];
        self.0.read_exact(&mut sleeps)?;
        Ok(sleeps == [1])
    }
}

/// Server of the relay, in the agent of a mount with `lock-on-suspend`.
pub(crate) struct SleepRelay {
    /// Subscription that was made before the mount, which may hide the socket of the bus.
    prepared: Option<io::Result<LogindClient>>,
    running: Option<JoinHandle<()>>,
}

impl SleepRelay {
    pub(crate) fn prepare() -> SleepRelay {
        SleepRelay { prepared: Some(dbus::subscribe_to_sleeps()), running: None }
    }

    /// Starts the relay and returns the end of the daemon.
    ///
    /// # Errors
    /// `AlreadyExists` while an earlier one runs: a daemon that is compromised cannot start many.
    pub(crate) fn open(&mut self) -> io::Result<UnixStream> {
        if self.running.as_ref().is_some_and(|running| !running.is_finished()) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let login = self.prepared.take().unwrap_or_else(dbus::subscribe_to_sleeps);
        let (ours, theirs) = UnixStream::pair()?;
        // Not joined: it ends with the bus or with this process.
        let serving = thread::Builder::new().name("sleeps".into()).spawn(move || drop(serve(&ours, login)))?;
        self.running = Some(serving);
        Ok(theirs)
    }
}

/// Answers requests until the daemon or the bus is gone.
fn serve(mut daemon: &UnixStream, login: io::Result<LogindClient>) -> io::Result<()> {
    let report = |error: io::Error| writeln!(&mut &*daemon, "\0{}", error.to_string().replace('\n', " "));
    let mut login = match login {
        Ok(login) => login,
        Err(error) => {
            daemon.read_exact(&mut [0])?;
            return report(error);
        }
    };
    let mut request = [0];
    loop {
        daemon.read_exact(&mut request)?;
        match request[0] {
            DELAY => match login.delay_sleep() {
                Ok(lock) => send_descriptor(daemon, lock.as_fd())?,
                Err(error) => return report(error),
            },
            NEXT_SIGNAL => daemon.write_all(&[u8::from(login.next_sleep_signal()?)])?,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_gets_the_reason_for_which_logind_is_missing() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let serving = thread::spawn(move || serve(&ours, Err(io::Error::other("no\nbus"))));
        let mut client = SleepClient::new(theirs);
        assert_eq!(client.delay_sleep().unwrap_err().to_string(), "no bus");
        serving.join().unwrap().unwrap();
        assert!(client.delay_sleep().is_err() && client.next_sleep_signal().is_err());
    }

    /// A compromised daemon that writes the protocol of the bus reaches no bus.
    #[test]
    fn what_a_daemon_writes_does_not_reach_the_bus() {
        let (mut bus, theirs) = UnixStream::pair().unwrap();
        let (ours, mut daemon) = UnixStream::pair().unwrap();
        let serving = thread::spawn(move || serve(&ours, Ok(LogindClient::subscribed(theirs))));
        daemon.write_all(b"\0AUTH EXTERNAL 30\r\n").unwrap();
        assert!(serving.join().unwrap().is_err());
        let mut received = Vec::new();
        bus.read_to_end(&mut received).unwrap();
        assert!(received.is_empty(), "{received:?}");
        // The end, or a reset since not all of it was read.
        assert!(!daemon.read(&mut [0; 64]).is_ok_and(|length| length > 0));
    }

    #[test]
    fn one_relay_runs_at_a_time() {
        let (bus, theirs) = UnixStream::pair().unwrap();
        let mut relay = SleepRelay { prepared: Some(Ok(LogindClient::subscribed(theirs))), running: None };
        let mut daemon = relay.open().unwrap();
        daemon.write_all(&[NEXT_SIGNAL]).unwrap();
        assert_eq!(relay.open().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        drop(bus);
        assert_eq!(daemon.read(&mut [0]).unwrap(), 0, "the bus is gone");
    }
}
