//! Server process of a [`Broker`](crate::broker::Broker).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::ToSocketAddrs;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use zeroize::Zeroizing;

use crate::address::Cloud;
use crate::azure;
use crate::broker::BrokerRequest;
use crate::credentials;
use crate::fd_passing::receive;
use crate::s3;

/// Maximum request length in bytes: a host name has at most 253.
const MAX_REQUEST: u64 = 4096;
/// Maximum concurrent requests; more are dropped.
const MAX_CONCURRENT: usize = 64;

/// Serves requests until the fetcher exits.
///
/// # Errors
/// The errors of starting a thread.
pub fn serve_broker(control: UnixStream) -> io::Result<()> {
    let active = Arc::new(AtomicUsize::new(0));
    while let Ok((_, mut sockets)) = receive(&control, 1) {
        // The rest of the line.
        if BufReader::with_capacity(1, &control).take(MAX_REQUEST).read_until(b'\n', &mut Vec::new()).is_err() {
            break;
        }
        let Some(socket) = sockets.pop() else { continue };
        if active.fetch_add(1, Ordering::SeqCst) >= MAX_CONCURRENT {
            active.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let count = Arc::clone(&active);
        let work = move || {
            // The client may have exited.
            let _ = answer_request(&socket);
            count.fetch_sub(1, Ordering::SeqCst);
        };
        thread::Builder::new().name("question".into()).spawn(work)?;
    }
    Ok(())
}

fn answer_request(mut socket: &UnixStream) -> io::Result<()> {
    let mut question = Vec::new();
    socket.take(MAX_REQUEST).read_to_end(&mut question)?;
    let answer = match serde_json::from_slice(&question)? {
        BrokerRequest::Addresses { host, port } => {
            let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            serde_json::to_vec(&found.map_err(|error| error.to_string()))
        }
        BrokerRequest::Place => {
            serde_json::to_vec(&credentials::region_endpoint(None).map_err(|error| error.to_string()))
        }
        BrokerRequest::Keys { google } => {
            let cloud = if google { Cloud::Google } else { Cloud::S3 };
            let found = s3::credential_lookup(cloud, None)().map(|keys| keys.as_ref().map(credentials::to_key_pair));
            serde_json::to_vec(&found.map_err(|error| error.message()))
        }
        BrokerRequest::Account => serde_json::to_vec(&azure::account_message().map_err(|error| error.to_string())),
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
        let answering = thread::spawn(move || serve_broker(theirs));
        let broker = Broker::new(ours);
        let limit = Some(Duration::from_secs(60));
        let found = broker.addresses("127.0.0.1", 80, limit).unwrap();
        assert_eq!(found, ["127.0.0.1:80".parse().unwrap()]);
        assert!(broker.addresses("no host has spaces", 80, limit).is_err());
        let place = credentials::region_endpoint(None).unwrap();
        assert_eq!(credentials::region_endpoint(Some(&broker)).unwrap(), place);
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
        let broker = Broker::new(ours);
        let waited = broker.addresses("127.0.0.1", 80, Some(Duration::from_millis(1)));
        assert_eq!(waited.unwrap_err().kind(), io::ErrorKind::WouldBlock, "nobody answers");
        drop(theirs);
        assert!(broker.addresses("127.0.0.1", 80, None).is_err());
        assert!(s3::credential_lookup(Cloud::S3, Some(broker))().is_err());
    }
}
