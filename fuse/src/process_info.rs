//! What /proc says of the processes behind requests, read by the process outside of the sandbox.
//!
//! The sandbox leaves nothing of what /proc has of others, since that shows root the memory of the whole machine. So the second process is
//! asked, over a connection of its own: a flush keeps the other one busy for as long as the event loops need to take pages, and they ask here.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;

/// More than the lines that are passed on: 65,536 groups of up to ten digits.
const MAX_STATUS: u32 = 1 << 20;
/// The lines of /proc/PID/status that somebody asks for.
const LINES: [&str; 2] = ["Groups:", "CapEff:"];

/// Where to ask.
pub struct ProcessInfoClient(Mutex<UnixStream>);

impl ProcessInfoClient {
    pub(crate) fn new(connection: UnixStream) -> ProcessInfoClient {
        ProcessInfoClient(Mutex::new(connection))
    }

    /// What is known of a thread; nothing when /proc or the other process does not say.
    pub(crate) fn status(&self, thread: u32) -> ProcessStatus {
        request_status(&mut self.0.lock(), thread).unwrap_or_default()
    }
}

/// The parts of /proc/PID/status that matter here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessStatus(String);

impl ProcessStatus {
    fn of(thread: u32) -> ProcessStatus {
        ProcessStatus::select(&fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default())
    }

    pub(crate) fn select(text: &str) -> ProcessStatus {
        let wanted = text.lines().filter(|line| LINES.iter().any(|name| line.starts_with(name)));
        ProcessStatus(wanted.flat_map(|line| [line, "\n"]).collect())
    }

    fn field(&self, name: &str) -> &str {
        self.0.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
    }

    /// Supplementary groups.
    pub(crate) fn groups(&self) -> impl Iterator<Item = u32> {
        self.field(LINES[0]).split_whitespace().filter_map(|group| group.parse().ok())
    }

    /// Whether the capability with this number of linux/capability.h is in effect.
    pub(crate) fn has(&self, capability: u32) -> bool {
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

/// Answers until the other side is gone.
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
        assert!(status.has(4) && !status.has(5));
        assert_eq!(ProcessStatus::default().groups().count(), 0);
        assert!(!ProcessStatus::select("CapEff:\tnothing").has(0));
    }

    #[test]
    fn what_is_asked_is_what_proc_says() {
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
    fn a_process_that_is_gone_knows_nobody() {
        let (ours, _) = UnixStream::pair().unwrap();
        assert_eq!(ProcessInfoClient::new(ours).status(std::process::id()), ProcessStatus::default());
    }
}
