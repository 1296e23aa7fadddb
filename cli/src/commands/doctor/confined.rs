//! Confinement of the processes of this user's mounts.
use std::fs;

use lockbox::control;
use lockbox_host::{daemons, proc, shown};
use serde_json::{Value, json};

use super::Finding;

const NAME: &str = "mounts";
/// CAP_IPC_LOCK, the one capability that a daemon keeps, and CAP_DAC_OVERRIDE, which a fetcher
/// keeps for objects in a directory of another user.
const KEPT: u64 = 1 << 14 | 1 << 1;

/// One process of a mount.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Confined {
    archive: String,
    pid: u32,
    /// `daemon` or `fetcher`.
    process: &'static str,
    no_new_privs: bool,
    /// A filter of system calls binds it.
    seccomp: bool,
    /// Its effective capabilities, as in /proc.
    capabilities: String,
}

impl Confined {
    fn of(archive: &str, pid: u32, process: &'static str) -> Option<Confined> {
        Confined::parse(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, archive, pid, process)
    }

    fn parse(status: &str, archive: &str, pid: u32, process: &'static str) -> Option<Confined> {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(str::trim)
        };
        Some(Confined {
            archive: archive.to_owned(),
            pid,
            process,
            no_new_privs: field("NoNewPrivs")? == "1",
            seccomp: field("Seccomp")? == "2",
            capabilities: format!("{:016x}", proc::bits(status, "CapEff")?),
        })
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "archive": self.archive,
            "pid": self.pid,
            "process": self.process,
            "no_new_privs": self.no_new_privs,
            "seccomp": self.seccomp,
            "capabilities": self.capabilities,
        })
    }

    fn is_in_force(&self) -> bool {
        let capabilities = u64::from_str_radix(&self.capabilities, 16).unwrap_or(u64::MAX);
        self.no_new_privs && self.seccomp && capabilities & !KEPT == 0
    }
}

pub(super) fn processes() -> Vec<Confined> {
    let mut found = Vec::new();
    for place in daemons::places() {
        for (_, status) in control::list_daemons(&place).unwrap_or_default() {
            found.extend(Confined::of(&status.archive, status.pid, "daemon"));
            found.extend(fetcher(status.pid).and_then(|pid| Confined::of(&status.archive, pid, "fetcher")));
        }
    }
    found
}

/// Returns the fetcher of a daemon; None if the kernel does not list children.
fn fetcher(daemon: u32) -> Option<u32> {
    // Each thread has children of its own.
    let threads = fs::read_dir(format!("/proc/{daemon}/task")).ok()?.flatten();
    let children: String =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok()).collect();
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid: &u32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).nth(1) == Some(b"--fetcher")
    })
}

pub(super) fn finding(processes: &[Confined]) -> Finding {
    let free: Vec<_> = processes.iter().filter(|process| !process.is_in_force()).collect();
    match (processes.len(), free.as_slice()) {
        (0, _) => Finding::good(NAME, "none of this user"),
        (count, []) => Finding::good(
            NAME,
            format!(
                "{count} processes, all in a sandbox: no capability but to lock memory, no new privileges, a list of system calls"
            ),
        ),
        (_, free) => {
            let named = free
                .iter()
                .map(|one| format!("the {} of {} (process {})", one.process, shown(one.archive.as_ref()), one.pid));
            Finding::advice(
                NAME,
                format!("without a whole sandbox: {}", named.collect::<Vec<_>>().join(", ")),
                "mount again without sandbox=off; the daemon's log names the reason",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_in_force_with_all_three_parts() {
        let of = |privileges: &str, seccomp: &str, capabilities: &str| {
            let status = format!("Name:\tx\nCapEff:\t{capabilities}\nNoNewPrivs:\t{privileges}\nSeccomp:\t{seccomp}\n");
            Confined::parse(&status, "/a.lbx", 7, "daemon").unwrap()
        };
        let whole = of("1", "2", "0000000000004000");
        assert!(whole.is_in_force());
        for part in [of("0", "2", "0"), of("1", "0", "0"), of("1", "2", "000001ffffffffff"), of("1", "2", "200000")] {
            assert!(!part.is_in_force(), "{part:?}");
            let found = finding(&[part]);
            assert!(found.found.contains("the daemon of /a.lbx (process 7)") && found.advice.is_some());
        }
        assert!(finding(&[whole]).advice.is_none() && finding(&[]).advice.is_none());
        assert_eq!(Confined::parse("Name:\tx\n", "/a.lbx", 7, "daemon"), None);
    }
}
