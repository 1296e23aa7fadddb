//! Who this writer is, for others who find its record, and for itself after it was killed.

use std::fs;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use sha2::{Digest, Sha256};

use super::layout::Owner;

impl Owner {
    /// This process.
    pub(crate) fn here() -> Owner {
        let named = |what: &str| fs::read_to_string(what).unwrap_or_default();
        // Numbers of processes count in their namespace, of which a machine that has one name may have many, all alive.
        let machine = named("/etc/machine-id");
        let machine = match fs::read_link("/proc/self/ns/pid") {
            Ok(namespace) if !machine.trim().is_empty() => format!("{} {}", machine.trim(), namespace.display()),
            _ => String::new(),
        };
        let process = std::process::id();
        Owner {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            machine: hash("machine", &machine),
            boot: hash("boot", &named("/proc/sys/kernel/random/boot_id")),
            process,
            started: seen(process).map_or(0, |seen| seen.started),
        }
    }

    /// Whether this writer knows that the other one is no more: it was of this machine, and ended with its process or with the machine's last run.
    pub(super) fn survives(&self, other: &Owner) -> bool {
        self.machine != [0; 16]
            && self.machine == other.machine
            && (self.boot != other.boot
                || match seen(other.process) {
                    Some(seen) => seen.has_ended || seen.started != other.started,
                    // A process of another user may be hidden, but not from a signal.
                    None => !is_there(other.process),
                })
    }
}

/// The bucket's owner learns from it whether two records are of one machine, and nothing else. Zeros for a machine that has no name.
fn hash(what: &str, name: &str) -> [u8; 16] {
    let mut short = [0; 16];
    if !name.trim().is_empty() {
        short.copy_from_slice(&Sha256::digest(format!("lockbox bucket {what} {}", name.trim()))[..16]);
    }
    short
}

/// What /proc says of a process (proc_pid_stat(5)).
struct Seen {
    /// In ticks.
    started: u64,
    /// It does nothing any more, and is there until whoever started it, or took that one's place, asks how it ended: in a container perhaps never.
    has_ended: bool,
}

impl Seen {
    fn of(stat: &str) -> Option<Seen> {
        // The name of the program, in parentheses, may have anything. What follows begins with field 3.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        // The first thread may have ended before the others.
        let has_ended = matches!(*fields.first()?, "Z" | "X") && fields.get(17)?.parse::<u64>().ok()? <= 1;
        Some(Seen { started: fields.get(19)?.parse().ok()?, has_ended })
    }
}

/// None when there is none of the number.
fn seen(process: u32) -> Option<Seen> {
    Seen::of(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

/// Whether there is a process of the number, whoever may see it.
fn is_there(process: u32) -> bool {
    let Ok(number) = i32::try_from(process) else { return false };
    Pid::from_raw(number).is_none_or(|process| test_kill_process(process) != Err(Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    #[test]
    fn a_writer_is_known_to_be_gone_on_its_own_machine_alone() {
        let here = Owner { machine: [1; 16], boot: [2; 16], ..Owner::here() };
        assert!(!here.survives(&here), "this process is alive");
        assert!(here.survives(&Owner { boot: [3; 16], ..here.clone() }), "the machine was started anew");
        assert!(here.survives(&Owner { started: here.started + 1, ..here.clone() }), "the number has another process");
        assert!(
            !here.survives(&Owner { machine: [4; 16], boot: [3; 16], ..here.clone() }),
            "of others nothing is known"
        );
        // Of a process that is there, but of which /proc tells nothing, nobody says that it is gone.
        assert!(is_there(here.process) && is_there(1) && !is_there(u32::MAX));
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        assert!(!is_there(ended.id()));
        let nameless = Owner { machine: [0; 16], ..here };
        assert!(!nameless.survives(&Owner { boot: [3; 16], ..nameless.clone() }));
    }

    #[test]
    fn a_writer_that_ended_and_that_nobody_asked_about_is_gone() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        waitid(WaitId::Pid(Pid::from_child(&ended)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        let here = Owner { machine: [1; 16], boot: [2; 16], ..Owner::here() };
        let started = seen(ended.id()).unwrap().started;
        assert!(is_there(ended.id()), "its number is not given to another one yet");
        assert!(here.survives(&Owner { process: ended.id(), started, ..here.clone() }));
        ended.wait().unwrap();
        let stat = |state: &str, threads: u32| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4 0 0 0 0 1 2 3 4 20 0 {threads} 0 1234 0")
        };
        assert!(Seen::of(&stat("Z", 1)).is_some_and(|seen| seen.has_ended && seen.started == 1234));
        assert!(Seen::of(&stat("Z", 2)).is_some_and(|seen| !seen.has_ended), "another thread goes on");
        assert!(Seen::of(&stat("S", 1)).is_some_and(|seen| !seen.has_ended));
    }
}
