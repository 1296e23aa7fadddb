//! JSON lines between two processes, with sockets attached (SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::Serialize;

/// Maximum sockets attached to a line.
pub(crate) const MAX_SOCKETS: usize = 41;

pub(crate) fn socket_pairs(count: usize) -> io::Result<(Vec<UnixStream>, Vec<UnixStream>)> {
    let pairs: Vec<_> = (0..count).map(|_| UnixStream::pair()).collect::<io::Result<_>>()?;
    Ok(pairs.into_iter().unzip())
}

/// Sends a line with sockets attached.
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
