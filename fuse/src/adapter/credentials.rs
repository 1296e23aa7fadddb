//! Groups and capabilities of the process behind a request, which FUSE does not send.
//!
//! The thread blocks in its system call while its request is served, so /proc is up to date. If
//! /proc has no answer (another PID namespace, or the process was killed meanwhile), the more
//! restrictive result is used.

use fuser::Request;

use crate::process_info::ProcessInfoClient;

/// Capability numbers of linux/capability.h.
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SETFCAP: u32 = 31;

/// Credentials of the process that sent a request.
pub(super) struct RequestCredentials<'a> {
    process_info: &'a ProcessInfoClient,
    uid: u32,
    gid: u32,
    /// Thread number in this process's PID namespace; 0 if it has none here.
    thread: u32,
}

impl<'a> RequestCredentials<'a> {
    pub(super) fn of(request: &Request, process_info: &'a ProcessInfoClient) -> RequestCredentials<'a> {
        RequestCredentials { process_info, uid: request.uid(), gid: request.gid(), thread: request.pid() }
    }

    /// Returns whether the caller may keep the set-gid bit on a file of `group`: as a member, or by
    /// CAP_FSETID.
    pub(super) fn keeps_set_gid(&self, group: u32) -> bool {
        if self.gid == group {
            return true;
        }
        let status = self.process_info.status(self.thread);
        // Only root's capabilities count: other users may hold them in a user namespace of their
        // own only.
        status.groups().any(|member| member == group) || (self.uid == 0 && status.has_capability(CAP_FSETID))
    }

    /// Returns whether the caller has the rights of the owner.
    pub(super) fn owns(&self, owner: u32) -> bool {
        self.uid == owner || (self.uid == 0 && self.process_info.status(self.thread).has_capability(CAP_FOWNER))
    }

    /// Returns the thread if the kernel may have removed file capabilities on its behalf that it
    /// could not have removed itself.
    pub(super) fn cannot_remove_capabilities(&self) -> Option<u32> {
        (self.uid != 0 && !self.process_info.status(self.thread).has_capability(CAP_SETFCAP)).then_some(self.thread)
    }

    /// Returns whether the caller may read `trusted.` attributes.
    pub(super) fn is_administrator(&self) -> bool {
        self.uid == 0 && self.process_info.status(self.thread).has_capability(CAP_SYS_ADMIN)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::process_info;

    #[test]
    fn without_proc_only_the_primary_group_and_the_user_count() {
        let (nobody, _) = UnixStream::pair().unwrap();
        let gone = RequestCredentials { process_info: &ProcessInfoClient::new(nobody), uid: 0, gid: 5, thread: 0 };
        assert!(gone.keeps_set_gid(5) && !gone.keeps_set_gid(6) && !gone.is_administrator());
        assert!(gone.owns(0) && !gone.owns(6));
    }

    #[test]
    fn this_process_is_what_the_system_says() {
        let uid = nix::unistd::getuid().as_raw();
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || process_info::serve(theirs));
        let this = RequestCredentials {
            process_info: &ProcessInfoClient::new(ours),
            uid,
            gid: u32::MAX - 1,
            thread: std::process::id(),
        };
        for group in nix::unistd::getgroups().unwrap() {
            assert!(this.keeps_set_gid(group.as_raw()));
        }
    }
}
