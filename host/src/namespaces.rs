//! Namespaces that a command makes for its program, and that a daemon started outside of them
//! joins.
//!
//! # Why the daemon is started outside
//! The owner of a user namespace has every capability in it, including tracing processes, and so
//! has each program of that user. Whether a process that is not dumpable may be traced is decided
//! in the user namespace in which execve(2) made its memory; joining another one later does not
//! change that. So a process that holds a passphrase or a key is started outside, where its user
//! cannot trace it, and joins with the key in memory. A process can join a user namespace only
//! while it has one thread. The process that unmounts is started by the daemon inside, and holds no
//! secret.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::sched::{CloneFlags, setns};
use rustix::thread::{CapabilitySet, CapabilitySets, configure_capability_in_ambient_set, set_capabilities};

use crate::control::{receive_with_descriptors, send_with_descriptors};

/// A mount namespace, and the user namespace to which it belongs when that is not the first one.
pub struct Namespaces {
    user: Option<OwnedFd>,
    mount: OwnedFd,
    /// Socket that hangs up when the process that created them ends.
    creator: OwnedFd,
    /// Other end of `creator`, which the creating process holds, and no program inherits.
    _alive: Option<UnixStream>,
}

impl Namespaces {
    /// Opens those of this process; `user`: it has created a user namespace too.
    ///
    /// # Errors
    /// When they cannot be opened.
    pub fn own(user: bool) -> io::Result<Namespaces> {
        let open = |name: &str| File::open(format!("/proc/self/ns/{name}")).map(OwnedFd::from);
        let (alive, creator) = UnixStream::pair()?;
        let user = user.then(|| open("user")).transpose()?;
        Ok(Namespaces { user, mount: open("mnt")?, creator: creator.into(), _alive: Some(alive) })
    }

    /// Sends them to the receiver at the other end, or a message that there are none.
    ///
    /// # Errors
    /// When that end is gone.
    pub fn send(namespaces: Option<&Namespaces>, socket: &UnixStream) -> io::Result<()> {
        let descriptors = namespaces.into_iter().flat_map(|them| them.user.iter().chain([&them.mount, &them.creator]));
        let descriptors: Vec<_> = descriptors.map(AsFd::as_fd).collect();
        // A message has a byte at least.
        send_with_descriptors(socket, b"n", &descriptors).map(drop)
    }

    /// Receives the namespaces that the other end sends, which may be none.
    ///
    /// # Errors
    /// `UnexpectedEof` when that end is gone.
    pub fn receive(socket: &UnixStream) -> io::Result<Option<Namespaces>> {
        let (count, mut descriptors) = receive_with_descriptors(socket, &mut [0])?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let (creator, mount) = (descriptors.pop(), descriptors.pop());
        let user = descriptors.pop();
        Ok(creator.zip(mount).map(|(creator, mount)| Namespaces { user, mount, creator, _alive: None }))
    }

    /// Enters them, and returns a socket that hangs up when the process that created them ends. Of
    /// the capabilities that the owner of a user namespace has in it, this process and its children
    /// keep the one to mount.
    ///
    /// # Errors
    /// The kernel's, such as `InvalidInput` for a process with several threads.
    pub fn join(self) -> io::Result<OwnedFd> {
        if let Some(user) = &self.user {
            setns(user, CloneFlags::CLONE_NEWUSER)?;
        }
        setns(&self.mount, CloneFlags::CLONE_NEWNS)?;
        if self.user.is_some() {
            let kept = CapabilitySet::SYS_ADMIN;
            set_capabilities(None, CapabilitySets { permitted: kept, effective: kept, inheritable: kept })?;
            configure_capability_in_ambient_set(kept, true)?;
        }
        // A change of credentials may have set it to the value of /proc/sys/fs/suid_dumpable.
        nix::sys::prctl::set_dumpable(false)?;
        Ok(self.creator)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn what_is_handed_over_comes_before_the_bytes_that_follow() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        Namespaces::send(None, &ours).unwrap();
        assert!(Namespaces::receive(&theirs).unwrap().is_none());
        for user in [false, true] {
            let own = Namespaces::own(user).unwrap();
            Namespaces::send(Some(&own), &ours).unwrap();
            (&ours).write_all(b"more").unwrap();
            let received = Namespaces::receive(&theirs).unwrap().unwrap();
            let number = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
            assert_eq!(received.user.as_ref().map(number), own.user.as_ref().map(number));
            assert_eq!(number(&received.mount), number(&own.mount));
            let mut more = [0; 4];
            (&theirs).read_exact(&mut more).unwrap();
            assert_eq!(&more, b"more");
            drop(own);
            assert_eq!(UnixStream::from(received.creator).read(&mut more).unwrap(), 0, "it does not hang up");
        }
        drop(ours);
        assert_eq!(Namespaces::receive(&theirs).err().map(|error| error.kind()), Some(ErrorKind::UnexpectedEof));
    }
}
