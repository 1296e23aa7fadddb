//! What the kernel knows of the process behind a request and FUSE does not tell: its groups and capabilities.
//!
//! The thread waits in its system call while its request is answered, so what /proc says of it holds. When /proc does not say
//! (a process of another PID namespace, one that was killed meanwhile) the answer is the one that allows less.

use fuser::Request;

use crate::process_info::ProcessInfoClient;

/// Numbers of linux/capability.h.
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SETFCAP: u32 = 31;

/// Who sent a request.
pub(super) struct RequestCredentials<'a> {
    process_info: &'a ProcessInfoClient,
    uid: u32,
    gid: u32,
    /// The thread, in this process's PID namespace; 0 when it has no number here.
    thread: u32,
}

impl<'a> RequestCredentials<'a> {
    pub(super) fn of(request: &Request, process_info: &'a ProcessInfoClient) -> RequestCredentials<'a> {
        RequestCredentials { process_info, uid: request.uid(), gid: request.gid(), thread: request.pid() }
    }

    /// Whether it may leave the set-gid bit on what belongs to `group`: as a member, or by CAP_FSETID.
    pub(super) fn keeps_set_gid(&self, group: u32) -> bool {
        if self.gid == group {
            return true;
        }
        let status = self.process_info.status(self.thread);
        // Only root's capabilities count: those of others may be good in a user namespace of their own only.
        status.groups().any(|member| member == group) || (self.uid == 0 && status.has(CAP_FSETID))
    }

    /// Whether it may do what the owner may.
    pub(super) fn owns(&self, owner: u32) -> bool {
        self.uid == owner || (self.uid == 0 && self.process_info.status(self.thread).has(CAP_FOWNER))
    }

    /// The thread, when the kernel may have removed file capabilities for it but it could not have
    /// by itself.
    pub(super) fn cannot_remove_capabilities(&self) -> Option<u32> {
        (self.uid != 0 && !self.process_info.status(self.thread).has(CAP_SETFCAP)).then_some(self.thread)
    }

    /// Whether it may read `trusted.` attributes.
    pub(super) fn is_administrator(&self) -> bool {
        self.uid == 0 && self.process_info.status(self.thread).has(CAP_SYS_ADMIN)
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
