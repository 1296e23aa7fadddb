//! A process outside of the fetcher's sandbox, which looks names of servers and credentials up for
//! the fetcher.
//!
//! The fetcher reads data of servers, so it is confined: it opens no file of the host but its
//! caches, runs no program and makes TCP connections alone. Looking up a name reads files of /etc,
//! may load libraries and speaks to other daemons; credentials come from files and from a program
//! (`credential_process`). This process does both. It reads nothing that a server sent but answers
//! of the resolver, and takes its settings from its environment: a question names a host, or one of
//! few kinds, and nothing else.
//!
//! Each question has a connection of its own: the fetcher makes a pair of sockets and sends one
//! end. So a slow lookup holds up no other one, and an answer that came too late is dropped.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::fd_passing::send;
use crate::range_source::Trouble;

/// Longest answer: credentials, or the addresses of a host.
const MAX_ANSWER: u64 = 256 << 10;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Question {
    /// Addresses of a host, with this port.
    Addresses { host: String, port: u16 },
    /// Region and endpoint of the AWS tools' profile.
    Place,
    /// Credentials for S3, or for Google's store.
    Keys { google: bool },
    /// The account of Azure.
    Account,
}

/// Region and endpoint of a profile of the AWS tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GivenPlace {
    pub(crate) region: String,
    /// None for that of the region.
    pub(crate) endpoint: Option<String>,
}

/// A pair of keys, and the token that comes with some.
#[derive(Serialize, Deserialize, Zeroize, ZeroizeOnDrop)]
pub(crate) struct GivenKeys {
    pub(crate) id: String,
    pub(crate) secret: String,
    pub(crate) token: Option<String>,
}

/// An account of Azure, with its key or its token.
#[derive(Serialize, Deserialize, Zeroize, ZeroizeOnDrop)]
pub(crate) struct GivenAccount {
    pub(crate) name: String,
    pub(crate) endpoint: String,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) token: Option<String>,
}

/// The fetcher's side.
#[derive(Clone, Debug)]
pub struct Broker(Arc<Mutex<UnixStream>>);

impl PartialEq for Broker {
    fn eq(&self, other: &Broker) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Broker {}

impl Broker {
    /// Asks at the other end of `control`, where [`crate::answer`] answers.
    pub fn over(control: UnixStream) -> Broker {
        Broker(Arc::new(Mutex::new(control)))
    }

    fn ask<T: DeserializeOwned>(&self, question: &Question, limit: Option<Duration>) -> io::Result<T> {
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

    /// The addresses of a host; an error of the kind of a lookup that found none.
    pub(crate) fn addresses(&self, host: &str, port: u16, limit: Option<Duration>) -> io::Result<Vec<SocketAddr>> {
        let question = Question::Addresses { host: host.to_owned(), port };
        let found: Result<Vec<SocketAddr>, String> = self.ask(&question, limit)?;
        found.map_err(io::Error::other)
    }

    /// Region and endpoint of the profile.
    pub(crate) fn place(&self) -> io::Result<Result<GivenPlace, String>> {
        self.ask(&Question::Place, None)
    }

    /// Keys for S3, or for Google's store; None for a public bucket.
    pub(crate) fn keys(&self, google: bool) -> Result<Option<GivenKeys>, Trouble> {
        let found: io::Result<Result<_, String>> = self.ask(&Question::Keys { google }, None);
        found
            .map_err(|error| Trouble::Refused(format!("cannot ask for credentials: {error}")))?
            .map_err(Trouble::Refused)
    }

    /// The account of Azure.
    pub(crate) fn account(&self) -> Result<GivenAccount, String> {
        self.ask(&Question::Account, None).unwrap_or_else(|error| Err(format!("cannot ask for the account: {error}")))
    }
}
