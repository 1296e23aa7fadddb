//! The process that answers the questions of a [`Broker`](crate::broker::Broker).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::ToSocketAddrs;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use zeroize::Zeroizing;

use crate::address::Cloud;
use crate::azure;
use crate::broker::Question;
use crate::credentials;
use crate::fd_passing::receive;
use crate::s3;

/// Longest question: a name of a host has 253 bytes.
const MAX_QUESTION: u64 = 4096;
/// Questions that are answered at once; more are not answered.
const AT_ONCE: usize = 64;

/// The other process: answers until the fetcher is gone.
///
/// # Errors
/// The errors of starting a thread.
pub fn answer(control: UnixStream) -> io::Result<()> {
    let at_work = Arc::new(AtomicUsize::new(0));
    while let Ok((_, mut sockets)) = receive(&control, 1) {
        // The rest of the line.
        if BufReader::with_capacity(1, &control).take(MAX_QUESTION).read_until(b'\n', &mut Vec::new()).is_err() {
            break;
        }
        let Some(socket) = sockets.pop() else { continue };
        if at_work.fetch_add(1, Ordering::SeqCst) >= AT_ONCE {
            at_work.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let count = Arc::clone(&at_work);
        let work = move || {
            // Whoever asked may be gone.
            let _ = answer_one(&socket);
            count.fetch_sub(1, Ordering::SeqCst);
        };
        thread::Builder::new().name("question".into()).spawn(work)?;
    }
    Ok(())
}

fn answer_one(mut socket: &UnixStream) -> io::Result<()> {
    let mut question = Vec::new();
    socket.take(MAX_QUESTION).read_to_end(&mut question)?;
    let answer = match serde_json::from_slice(&question)? {
        Question::Addresses { host, port } => {
            let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            serde_json::to_vec(&found.map_err(|error| error.to_string()))
        }
        Question::Place => serde_json::to_vec(&credentials::place(None).map_err(|error| error.to_string())),
        Question::Keys { google } => {
            let cloud = if google { Cloud::Google } else { Cloud::S3 };
            let found = s3::looked_for(cloud, None)().map(|keys| keys.as_ref().map(credentials::given));
            serde_json::to_vec(&found.map_err(|trouble| trouble.words()))
        }
        Question::Account => serde_json::to_vec(&azure::given().map_err(|error| error.to_string())),
    }?;
    socket.write_all(&Zeroizing::new(answer))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::broker::Broker;

    #[test]
    fn what_is_asked_is_what_this_process_finds() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answering = thread::spawn(move || answer(theirs));
        let broker = Broker::over(ours);
        let limit = Some(Duration::from_secs(60));
        let found = broker.addresses("127.0.0.1", 80, limit).unwrap();
        assert_eq!(found, ["127.0.0.1:80".parse().unwrap()]);
        assert!(broker.addresses("no host has spaces", 80, limit).is_err());
        let place = credentials::place(None).unwrap();
        assert_eq!(credentials::place(Some(&broker)).unwrap(), place);
        // Many at once, each with its own answer.
        thread::scope(|scope| {
            for port in 1..20 {
                let broker = &broker;
                scope.spawn(move || {
                    let found = broker.addresses("::1", port, limit).unwrap();
                    assert_eq!((found.len(), found[0].port()), (1, port));
                });
            }
        });
        drop(broker);
        answering.join().unwrap().unwrap();
    }

    #[test]
    fn a_broker_that_is_gone_or_hangs_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let broker = Broker::over(ours);
        let waited = broker.addresses("127.0.0.1", 80, Some(Duration::from_millis(1)));
        assert_eq!(waited.unwrap_err().kind(), io::ErrorKind::WouldBlock, "nobody answers");
        drop(theirs);
        assert!(broker.addresses("127.0.0.1", 80, None).is_err());
        assert!(s3::looked_for(Cloud::S3, Some(broker))().is_err());
    }
}
