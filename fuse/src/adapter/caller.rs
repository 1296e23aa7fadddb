//! What the kernel knows of the process behind a request and FUSE does not tell: its groups and capabilities.
//!
//! The thread waits in its system call while its request is answered, so what /proc says of it holds. When /proc does not say
//! (a process of another PID namespace, one that was killed meanwhile) the answer is the one that allows less.

use std::fs;

use fuser::Request;

/// Numbers of linux/capability.h.
const CAP_FSETID: u32 = 4;
const CAP_SYS_ADMIN: u32 = 21;

/// Who sent a request.
pub(crate) struct Caller {
    uid: u32,
    gid: u32,
    /// The thread, in this process's PID namespace; 0 when it has no number here.
    thread: u32,
}

impl Caller {
    pub(crate) fn of(request: &Request) -> Caller {
        Caller { uid: request.uid(), gid: request.gid(), thread: request.pid() }
    }

    /// Whether it may leave the set-gid bit on what belongs to `group`: as a member, or by CAP_FSETID.
    pub(crate) fn keeps_set_gid(&self, group: u32) -> bool {
        if self.gid == group {
            return true;
        }
        let status = self.status();
        groups(&status).any(|member| member == group) || self.has(&status, CAP_FSETID)
    }

    /// Whether it may read `trusted.` attributes.
    pub(crate) fn is_administrator(&self) -> bool {
        self.has(&self.status(), CAP_SYS_ADMIN)
    }

    /// Only root's capabilities count: those of others may be good in a user namespace of their own only.
    fn has(&self, status: &str, capability: u32) -> bool {
        self.uid == 0 && capabilities(status) & 1 << capability != 0
    }

    fn status(&self) -> String {
        fs::read_to_string(format!("/proc/{}/status", self.thread)).unwrap_or_default()
    }
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
}

fn groups(status: &str) -> impl Iterator<Item = u32> {
    field(status, "Groups:").split_whitespace().filter_map(|group| group.parse().ok())
}

fn capabilities(status: &str) -> u64 {
    u64::from_str_radix(field(status, "CapEff:"), 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tGroups: 7\nGroups:\t4 24 1000 \nCapInh:\t0\nCapEff:\t0000000000000010\n";

    #[test]
    fn groups_and_capabilities_are_found() {
        assert_eq!(groups(STATUS).collect::<Vec<_>>(), [4, 24, 1000]);
        assert_eq!(capabilities(STATUS), 1 << CAP_FSETID);
        assert_eq!(groups("").count(), 0);
        assert_eq!(capabilities("CapEff:\tnothing"), 0);
    }

    #[test]
    fn without_proc_only_the_primary_group_counts() {
        let gone = Caller { uid: 0, gid: 5, thread: 0 };
        assert!(gone.keeps_set_gid(5) && !gone.keeps_set_gid(6) && !gone.is_administrator());
    }

    #[test]
    fn this_process_is_what_the_system_says() {
        let uid = nix::unistd::getuid().as_raw();
        let this = Caller { uid, gid: u32::MAX - 1, thread: std::process::id() };
        for group in nix::unistd::getgroups().unwrap() {
            assert!(this.keeps_set_gid(group.as_raw()));
        }
    }
}
