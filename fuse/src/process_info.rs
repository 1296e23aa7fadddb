//! Groups and capabilities of the processes that make requests, read from /proc by the mount
//! agent.
//!
//! The sandbox removes /proc of other processes, because root could read the memory of the whole
//! machine there. The mount agent is queried over a separate connection: a flush occupies its
//! order connection for as long as the event loops accept pages, and the event loops make these
//! queries.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;

/// Upper bound of the forwarded lines: 65,536 groups of up to ten digits.
const MAX_STATUS: u32 = 1 << 20;
/// Lines of /proc/PID/status that are forwarded.
const LINES: [&str; 2] = ["Groups:", "CapEff:"];

/// Connection to the process that reads /proc.
pub struct ProcessInfoClient(Mutex<UnixStream>);

impl ProcessInfoClient {
    pub(crate) fn new(connection: UnixStream) -> ProcessInfoClient {
        ProcessInfoClient(Mutex::new(connection))
    }

    /// Returns groups and capabilities of a thread; empty if /proc or the agent does not answer.
    pub(crate) fn status(&self, thread: u32) -> ProcessStatus {
        request_status(&mut self.0.lock(), thread).unwrap_or_default()
    }
}

/// Selected lines of /proc/PID/status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessStatus(String);

impl ProcessStatus {
    fn of(thread: u32) -> ProcessStatus {
        ProcessStatus::select(&fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default())
    }

    pub(crate) fn select(text: &str) -> ProcessStatus {
        let selected = text.lines().filter(|line| LINES.iter().any(|name| line.starts_with(name)));
        ProcessStatus(selected.flat_map(|line| [line, "\n"]).collect())
    }

    fn field(&self, name: &str) -> &str {
        self.0.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
    }

    /// Returns the supplementary groups.
    pub(crate) fn groups(&self) -> impl Iterator<Item = u32> {
        self.field(LINES[0]).split_whitespace().filter_map(|group| group.parse().ok())
    }

    /// Returns whether a capability, by its number in linux/capability.h, is effective.
    pub(crate) fn has_capability(&self, capability: u32) -> bool {
        u64::from_str_radix(self.field(LINES[1]), 16).unwrap_or(0) >> capability & 1 == 1
    }
}

fn request_status(connection: &mut UnixStream, thread: u32) -> io::Result<ProcessStatus> {
    connection.write_all(&thread.to_le_bytes())?;
    let mut length = [0; 4];
    connection.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_STATUS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length as usize];
    connection.read_exact(&mut text)?;
    String::from_utf8(text).map(ProcessStatus).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Answers queries until the peer closes the connection.
pub(crate) fn serve(mut connection: UnixStream) -> io::Result<()> {
    let mut thread = [0; 4];
    loop {
        connection.read_exact(&mut thread)?;
        let ProcessStatus(text) = ProcessStatus::of(u32::from_le_bytes(thread));
        let length = u32::try_from(text.len()).ok().filter(|length| *length <= MAX_STATUS).unwrap_or(0);
        connection.write_all(&length.to_le_bytes())?;
        connection.write_all(&text.as_bytes()[..length as usize])?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_capabilities_are_found() {
        let status =
            ProcessStatus::select("Name:\tGroups: 7\nGroups:\t4 24 1000 \nCapInh:\t0\nCapEff:\t0000000000000010\n");
        assert_eq!(status.groups().collect::<Vec<_>>(), [4, 24, 1000]);
        assert!(status.has_capability(4) && !status.has_capability(5));
        assert_eq!(ProcessStatus::default().groups().count(), 0);
        assert!(!ProcessStatus::select("CapEff:\tnothing").has_capability(0));
    }

    #[test]
    fn the_client_returns_the_status_in_proc() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || serve(theirs));
        let outside = ProcessInfoClient::new(ours);
        for thread in [std::process::id(), 0] {
            assert_eq!(outside.status(thread), ProcessStatus::of(thread));
        }
        assert_ne!(outside.status(std::process::id()), ProcessStatus::default());
        drop(outside);
        assert!(serving.join().unwrap().is_err(), "it ends with the connection");
    }

    #[test]
    fn a_closed_connection_gives_an_empty_status() {
        let (ours, _) = UnixStream::pair().unwrap();
        assert_eq!(ProcessInfoClient::new(ours).status(std::process::id()), ProcessStatus::default());
    }
}
