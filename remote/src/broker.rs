//! Broker: a process outside of the fetcher's sandbox that looks up server names and credentials
//! for the fetcher.
//!
//! The fetcher parses data from servers, so it is confined: it opens no file of the host except its
//! caches, runs no program and only makes TCP connections. Name lookup reads files of /etc, may
//! load libraries and talks to other daemons; credentials come from files and from a program
//! (`credential_process`). The broker does both. Of data from servers it reads only DNS responses,
//! and it takes its settings from its environment: a request names a host, or one of a few kinds,
//! and nothing else. The first message of the fetcher, which it sends before it is confined, is the
//! [`BrokerScope`] of its archive: a fetcher that is compromised later gets no credentials of other
//! stores.
//!
//! Each request has a connection of its own: the fetcher creates a socket pair and sends one end. A
//! slow lookup delays no other one, and a late response is dropped.
//!
//! The messages of both processes are JSON lines, with sockets attached (SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::address::{Address, Cloud};
use crate::range_source::{RemoteError, RemoteResult};

/// Maximum response length in bytes: credentials, or the addresses of a host.
const MAX_ANSWER: u64 = 256 << 10;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum BrokerRequest {
    /// Addresses of a host, with this port.
    Addresses {
        host: String,
        port: u16,
    },
    /// Region and endpoint of the AWS tools' profile.
    Place,
    /// Credentials for S3, or for Google's store.
    Keys {
        google: bool,
    },
    Account,
    /// Login of the web server of the scope.
    Login,
}

/// Requests that the broker answers for one archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum BrokerScope {
    /// None: a directory of this host.
    Nothing,
    /// Addresses of hosts, and the login of this one.
    Web(String),
    /// Addresses of hosts, and the credentials of this protocol.
    Store(Cloud),
}

impl BrokerScope {
    pub(crate) fn of(address: Option<&Address>) -> BrokerScope {
        match address {
            Some(Address::Bucket { cloud, .. }) => BrokerScope::Store(*cloud),
            Some(Address::Web(url)) => BrokerScope::Web(url.host_str().unwrap_or_default().to_owned()),
            Some(Address::Directory(_)) | None => BrokerScope::Nothing,
        }
    }

    pub(crate) fn allows(&self, request: &BrokerRequest) -> bool {
        match *request {
            BrokerRequest::Addresses { .. } => *self != BrokerScope::Nothing,
            BrokerRequest::Place | BrokerRequest::Keys { google: false } => *self == BrokerScope::Store(Cloud::S3),
            BrokerRequest::Keys { google: true } => *self == BrokerScope::Store(Cloud::Google),
            BrokerRequest::Account => *self == BrokerScope::Store(Cloud::Azure),
            BrokerRequest::Login => matches!(self, BrokerScope::Web(_)),
        }
    }

    /// Returns the variables with credentials of other protocols, which the fetcher does not
    /// inherit.
    pub(crate) fn foreign_secrets(self) -> impl Iterator<Item = &'static str> {
        let others = SECRET_VARIABLES.iter().filter(move |(cloud, _)| self != BrokerScope::Store(*cloud));
        others.flat_map(|(_, names)| names.iter().copied())
    }
}

/// Variables of the environment with credentials, by protocol.
const SECRET_VARIABLES: [(Cloud, &[&str]); 3] = [
    (
        Cloud::S3,
        &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN"],
    ),
    (Cloud::Google, &["GS_ACCESS_KEY_ID", "GS_SECRET_ACCESS_KEY"]),
    (
        Cloud::Azure,
        &[
            "AZURE_STORAGE_CONNECTION_STRING",
            "AZURE_STORAGE_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_CLIENT_SECRET",
            "IDENTITY_HEADER",
        ],
    ),
];

/// Region, endpoint and CA certificates of a profile of the AWS tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RegionEndpoint {
    pub(crate) region: String,
    /// None for the endpoint of the region.
    pub(crate) endpoint: Option<String>,
    /// PEM file with the CA certificates of the server, in place of the system's.
    pub(crate) ca_bundle: Option<PathBuf>,
}

#[derive(Serialize, Deserialize, Zeroize, ZeroizeOnDrop)]
pub(crate) struct KeyPair {
    pub(crate) id: String,
    pub(crate) secret: String,
    pub(crate) token: Option<String>,
}

/// Failed lookup of the broker, in the form that is sent to the fetcher.
#[derive(Serialize, Deserialize)]
pub(crate) enum LookupFailure {
    /// The lookup may succeed later, as [`RemoteError::is_transient`].
    Transient(String),
    Denied(String),
    Unsupported(String),
}

impl From<RemoteError> for LookupFailure {
    fn from(error: RemoteError) -> LookupFailure {
        match error {
            RemoteError::Transient(why) | RemoteError::Busy { why, .. } => LookupFailure::Transient(why),
            RemoteError::Unsupported(why) => LookupFailure::Unsupported(why),
            error => LookupFailure::Denied(error.message()),
        }
    }
}

impl From<LookupFailure> for RemoteError {
    fn from(failure: LookupFailure) -> RemoteError {
        match failure {
            LookupFailure::Transient(why) => RemoteError::Transient(why),
            LookupFailure::Denied(why) => RemoteError::Denied(why),
            LookupFailure::Unsupported(why) => RemoteError::Unsupported(why),
        }
    }
}

/// Client of the broker, used by the fetcher.
#[derive(Clone, Debug)]
pub struct Broker(Arc<Mutex<UnixStream>>);

impl PartialEq for Broker {
    fn eq(&self, other: &Broker) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Broker {}

impl Broker {
    /// Creates a client that sends to [`crate::serve_broker`] at the other end of `control`.
    pub fn new(control: UnixStream) -> Broker {
        Broker(Arc::new(Mutex::new(control)))
    }

    /// Sends the scope of all later requests, before the first one.
    pub(crate) fn set_scope(&self, scope: BrokerScope) -> io::Result<()> {
        send(&self.0.lock(), &scope, &[])
    }

    fn request<T: DeserializeOwned>(&self, question: &BrokerRequest, limit: Option<Duration>) -> io::Result<T> {
        let (ours, theirs) = UnixStream::pair()?;
        send(&self.0.lock(), &(), &[theirs])?;
        // A limit of zero would be none.
        ours.set_read_timeout(limit.map(|limit| limit.max(Duration::from_millis(1))))?;
        (&ours).write_all(&serde_json::to_vec(question)?)?;
        ours.shutdown(Shutdown::Write)?;
        let mut answer = Zeroizing::new(Vec::with_capacity(4096));
        (&ours).take(MAX_ANSWER).read_to_end(&mut answer)?;
        serde_json::from_slice(&answer).map_err(io::Error::from)
    }

    /// Requests a secret; `failure` begins the message where the broker does not reply. Errors:
    /// `Denied`; `Transient` for a lookup that may succeed later.
    fn secret<T: DeserializeOwned>(&self, question: &BrokerRequest, failure: &str) -> RemoteResult<T> {
        let reply: io::Result<Result<T, LookupFailure>> = self.request(question, None);
        Ok(reply.map_err(|error| RemoteError::Denied(format!("{failure}: {error}")))??)
    }

    /// Looks up the addresses of a host; a failed lookup has the error kind of the system resolver.
    pub(crate) fn addresses(&self, host: &str, port: u16, limit: Option<Duration>) -> io::Result<Vec<SocketAddr>> {
        let question = BrokerRequest::Addresses { host: host.to_owned(), port };
        let reply: Result<Vec<SocketAddr>, String> = self.request(&question, limit)?;
        reply.map_err(io::Error::other)
    }

    pub(crate) fn region_endpoint(&self) -> io::Result<Result<RegionEndpoint, String>> {
        self.request(&BrokerRequest::Place, None)
    }

    /// Requests the keys for S3, or for Google's store; returns None for a public bucket.
    pub(crate) fn key_pair(&self, google: bool) -> RemoteResult<Option<KeyPair>> {
        self.secret(&BrokerRequest::Keys { google }, "cannot request credentials")
    }

    /// Requests the value of the header `Authorization` for the web server of the scope.
    pub(crate) fn login(&self) -> RemoteResult<Option<String>> {
        self.secret(&BrokerRequest::Login, "cannot ask for a login")
    }

    /// Requests the Azure account; `T` is the type that the broker sends.
    pub(crate) fn account<T: DeserializeOwned>(&self) -> RemoteResult<T> {
        self.secret(&BrokerRequest::Account, "cannot request the account")
    }
}

/// Maximum sockets attached to a line.
pub(crate) const MAX_SOCKETS: usize = 41;

pub(crate) fn socket_pairs(count: usize) -> io::Result<(Vec<UnixStream>, Vec<UnixStream>)> {
    let pairs: Vec<_> = (0..count).map(|_| UnixStream::pair()).collect::<io::Result<_>>()?;
    Ok(pairs.into_iter().unzip())
}

pub(crate) fn send(stream: &UnixStream, message: &impl Serialize, sockets: &[UnixStream]) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SOCKETS))];
    let mut parts = SendAncillaryBuffer::new(&mut space);
    if !sockets.is_empty() && !parts.push(SendAncillaryMessage::ScmRights(&sockets)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // One byte brings the sockets; the rest is a stream.
    sendmsg(stream, &[IoSlice::new(&line[..1])], &mut parts, SendFlags::NOSIGNAL)?;
    (&*stream).write_all(&line[1..])
}

/// Receives the first byte of a line and its sockets: exactly `count`, or none.
pub(crate) fn receive(stream: &UnixStream, count: usize) -> io::Result<(u8, Vec<UnixStream>)> {
    let mut first = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SOCKETS))];
    let mut parts = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut first)], &mut parts, RecvFlags::CMSG_CLOEXEC)?;
    let mut sockets = Vec::new();
    for part in parts.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            sockets.extend(rights.map(UnixStream::from));
        }
    }
    if received.bytes == 1 && (sockets.is_empty() || sockets.len() == count) {
        Ok((first[0], sockets))
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, JoinHandle};

    use lockbox::Error;

    use super::*;
    use crate::azure;

    /// Returns a client of a broker that gives these answers, one after the other.
    fn answering<T: Serialize + Send + 'static>(answers: Vec<RemoteResult<T>>) -> (Broker, JoinHandle<()>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answering = thread::spawn(move || {
            for answer in answers {
                let socket = receive(&theirs, 1).unwrap().1.pop().unwrap();
                // The line of the request is sent with the socket.
                (&theirs).read_exact(&mut [0; 4]).unwrap();
                io::read_to_string(&socket).unwrap();
                let answer = answer.map_err(LookupFailure::from);
                (&socket).write_all(&serde_json::to_vec(&answer).unwrap()).unwrap();
            }
        });
        (Broker::new(ours), answering)
    }

    fn failures() -> [RemoteError; 3] {
        [
            RemoteError::Transient("no answer".into()),
            RemoteError::Denied("it is refused".into()),
            RemoteError::Unsupported("it is not understood".into()),
        ]
    }

    #[test]
    fn a_failed_lookup_has_the_kind_at_the_client_that_it_had_at_the_broker() {
        for error in failures() {
            let (broker, answering) = answering::<()>(vec![Err(error.clone())]);
            assert_eq!(broker.key_pair(true).err(), Some(error));
            answering.join().unwrap();
        }
    }

    #[test]
    fn an_azure_account_whose_lookup_fails_is_reported_by_the_kind_of_the_failure() {
        let kinds = [Some(io::ErrorKind::TimedOut), Some(io::ErrorKind::PermissionDenied), None];
        for (failure, kind) in failures().into_iter().zip(kinds) {
            let (broker, answering) = answering::<()>(vec![Err(failure)]);
            let error = azure::account("box", Some(&broker), Some(Duration::ZERO)).err().unwrap();
            assert_eq!(error.request_kind(), kind, "{error}");
            assert_eq!(matches!(error, Error::Invalid(_)), kind.is_none(), "{error}");
            answering.join().unwrap();
        }
    }

    #[test]
    fn an_azure_account_that_cannot_be_looked_up_for_now_is_looked_up_again() {
        let [transient, ..] = failures();
        let endpoint = "https://one.blob.core.windows.net";
        let found = serde_json::json!({ "name": "one", "endpoint": endpoint, "secret": { "Access": "token" } });
        let (broker, answering) = answering(vec![Err(transient.clone()), Err(transient), Ok(found)]);
        let account = azure::account("box", Some(&broker), None).unwrap();
        assert_eq!(account.endpoint, endpoint);
        answering.join().unwrap();
    }
}
