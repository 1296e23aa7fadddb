//! Identity of a writer: shown to users that find its record, and used to detect a dead writer of
//! this machine.

use std::fs;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use sha2::{Digest, Sha256};

use super::layout::WriterIdentity;

impl WriterIdentity {
    pub(crate) fn current() -> WriterIdentity {
        let named = |what: &str| fs::read_to_string(what).unwrap_or_default();
        // Numbers of processes count in their namespace, of which a machine that has one name may
        // have many, all alive.
        let machine = named("/etc/machine-id");
        let machine = match fs::read_link("/proc/self/ns/pid") {
            Ok(namespace) if !machine.trim().is_empty() => format!("{} {}", machine.trim(), namespace.display()),
            _ => String::new(),
        };
        let process = std::process::id();
        WriterIdentity {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            machine: hash("machine", &machine),
            boot: hash("boot", &named("/proc/sys/kernel/random/boot_id")),
            process,
            started: read_process_stat(process).map_or(0, |stat| stat.started),
        }
    }

    /// Returns the name of the other writer's program if that is a process of this machine.
    pub(super) fn program_here(&self, other: &WriterIdentity) -> Option<String> {
        let is_here = self.machine != [0; 16] && self.machine == other.machine && !self.outlives(other);
        let name = is_here.then(|| fs::read(format!("/proc/{}/comm", other.process)).ok()).flatten()?;
        Some(lockbox_terminal::display(name.trim_ascii_end()))
    }

    /// Returns whether the other writer is known to be dead: it was of this machine, and its
    /// process or its boot has ended.
    pub(super) fn outlives(&self, other: &WriterIdentity) -> bool {
        self.machine != [0; 16]
            && self.machine == other.machine
            && (self.boot != other.boot
                || match read_process_stat(other.process) {
                    Some(stat) => stat.has_ended || stat.started != other.started,
                    // A process of another user may be hidden, but not from a signal.
                    None => !process_exists(other.process),
                })
    }
}

/// Hashes a machine name; zeros if there is none. The bucket's owner only learns whether two
/// records are of one machine.
fn hash(purpose: &str, name: &str) -> [u8; 16] {
    let mut short = [0; 16];
    if !name.trim().is_empty() {
        short.copy_from_slice(&Sha256::digest(format!("lockbox bucket {purpose} {}", name.trim()))[..16]);
    }
    short
}

/// Process state from /proc (proc_pid_stat(5)).
struct ProcessStat {
    /// Start time in clock ticks.
    started: u64,
    /// Zombie: it remains until its parent, or the process that adopted it, reaps it, which in a
    /// container may be never.
    has_ended: bool,
}

impl ProcessStat {
    fn parse(stat: &str) -> Option<ProcessStat> {
        // The program's name, in parentheses, may contain anything. Field 3 follows it.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        // The first thread may have ended before the others.
        let has_ended = matches!(*fields.first()?, "Z" | "X") && fields.get(17)?.parse::<u64>().ok()? <= 1;
        Some(ProcessStat { started: fields.get(19)?.parse().ok()?, has_ended })
    }
}

fn read_process_stat(process: u32) -> Option<ProcessStat> {
    ProcessStat::parse(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

/// Returns whether the process exists, even if it is hidden from this user.
fn process_exists(process: u32) -> bool {
    let Ok(number) = i32::try_from(process) else { return false };
    Pid::from_raw(number).is_none_or(|process| test_kill_process(process) != Err(Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    #[test]
    fn a_writer_is_known_to_be_gone_on_its_own_machine_alone() {
        let here = WriterIdentity { machine: [1; 16], boot: [2; 16], ..WriterIdentity::current() };
        assert!(!here.outlives(&here), "this process is alive");
        assert!(here.outlives(&WriterIdentity { boot: [3; 16], ..here.clone() }), "the machine was started anew");
        assert!(
            here.outlives(&WriterIdentity { started: here.started + 1, ..here.clone() }),
            "the number has another process"
        );
        assert!(
            !here.outlives(&WriterIdentity { machine: [4; 16], boot: [3; 16], ..here.clone() }),
            "of others nothing is known"
        );
        // Of a process that is there, but of which /proc tells nothing, nobody says that it is
        // gone.
        assert!(process_exists(here.process) && process_exists(1) && !process_exists(u32::MAX));
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        assert!(!process_exists(ended.id()));
        assert!(here.program_here(&here).is_some_and(|name| !name.is_empty()), "a writer of this machine is named");
        assert_eq!(here.program_here(&WriterIdentity { machine: [4; 16], ..here.clone() }), None);
        assert_eq!(here.program_here(&WriterIdentity { started: here.started + 1, ..here.clone() }), None);
        let nameless = WriterIdentity { machine: [0; 16], ..here };
        assert!(!nameless.outlives(&WriterIdentity { boot: [3; 16], ..nameless.clone() }));
    }

    #[test]
    fn a_writer_that_ended_and_that_nobody_asked_about_is_gone() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        waitid(WaitId::Pid(Pid::from_child(&ended)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        let here = WriterIdentity { machine: [1; 16], boot: [2; 16], ..WriterIdentity::current() };
        let started = read_process_stat(ended.id()).unwrap().started;
        assert!(process_exists(ended.id()), "its number is not given to another one yet");
        assert!(here.outlives(&WriterIdentity { process: ended.id(), started, ..here.clone() }));
        ended.wait().unwrap();
        let stat = |state: &str, threads: u32| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4 0 0 0 0 1 2 3 4 20 0 {threads} 0 1234 0")
        };
        assert!(ProcessStat::parse(&stat("Z", 1)).is_some_and(|stat| stat.has_ended && stat.started == 1234));
        assert!(ProcessStat::parse(&stat("Z", 2)).is_some_and(|seen| !seen.has_ended), "another thread goes on");
        assert!(ProcessStat::parse(&stat("S", 1)).is_some_and(|seen| !seen.has_ended));
    }
}
