//! Set-id bits: which bits a SETATTR clears, and which callers may not clear them.
//!
//! With HANDLE_KILLPRIV_V2 the file system clears the bits. The kernel then also skips a check that
//! it makes for other file systems: clearing them is a change of the mode, which only the owner may
//! make. FUSE reports neither the reason of a SETATTR nor the flag for truncations that clear the
//! bits, so both are inferred:
//!
//! - Owner or group: a chown(2) that the kernel permitted. The bits are cleared.
//! - Size: they are cleared unless root truncates. The kernel permitted that too.
//! - Only ctime, or nothing: `chown(-1, -1)`, which every user may call if no bit is cleared. The
//!   kernel owns the ctime of regular files (KERNEL-1) and sends it for these; for other types it
//!   sends nothing.
//! - Nothing, for a regular file: the kernel clears the bits before a permitted write.
//!
//! Groups and capabilities of the process behind a request are read from /proc, because FUSE does
//! not send them. The thread blocks in its system call while its request is served, so /proc is up
//! to date. If /proc has no answer (another PID namespace, or the process was killed meanwhile),
//! the more restrictive result is used.

use fuser::Request;
use lockbox::fs::{Ino, SetAttributes, XattrMode, mode};
use lockbox::{Error, Result};

use super::context::Adapter;
use crate::mount_agent::ProcessInfoClient;

const CAPABILITY: &[u8] = b"security.capability";

const GROUP_EXECUTE: u32 = 0o010;
/// Together these bits make a program run with the rights of its group.
const GIVES_GROUP: u32 = mode::SET_GID | GROUP_EXECUTE;

impl Adapter {
    /// Returns `set` with the set-id bits that it clears.
    pub(super) fn clear_set_id(&self, request: &Request, number: Ino, set: SetAttributes) -> Result<SetAttributes> {
        if is_flush_of_times(&set) {
            return Ok(set);
        }
        let removed = self.removed_capabilities.take(number, request.pid());
        let chown = set.uid.is_some() || set.gid.is_some();
        let truncation = set.size.is_some() && request.uid() != 0;
        // A new mode already states which bits remain.
        if set.mode.is_some() || !(chown || truncation || sets_only_ctime(&set)) {
            return Ok(set);
        }
        // The kernel holds the inode's lock, so mode and owner do not change before the reply.
        let before = self.fs.attributes(number)?;
        let caller = RequestCredentials::of(request, &self.process_info);
        let bits_to_clear = bits_to_clear(before.mode, || caller.keeps_set_gid(before.gid));
        if bits_to_clear != 0 && is_empty_chown(before.mode, &set) && !caller.owns(before.uid) {
            if let Some(value) = removed
                && let Err(error) = self.fs.set_xattr(number, CAPABILITY, &value, XattrMode::Create)
            {
                tracing::warn!("a refused chown(2) left inode {} without its file capabilities: {error}", number.0);
            }
            return Err(Error::NotPermitted);
        }
        Ok(SetAttributes { kill_set_id: true, kill_set_gid: bits_to_clear & mode::SET_GID != 0, ..set })
    }

    /// Removes an attribute. Capabilities that the kernel removes before a change of the inode are
    /// remembered until that change.
    pub(super) fn remove_attribute(&self, request: &Request, number: Ino, name: &[u8]) -> Result<()> {
        if name != CAPABILITY {
            return self.fs.remove_xattr(number, name);
        }
        let thread = RequestCredentials::of(request, &self.process_info).cannot_remove_capabilities();
        let removed = thread.and_then(|thread| Some((thread, self.fs.xattr(number, name).ok()?)));
        self.fs.remove_xattr(number, name)?;
        match removed {
            Some((thread, value)) => self.removed_capabilities.record(number, thread, value),
            None => self.removed_capabilities.forget(number),
        }
        Ok(())
    }

    /// Returns the mode of a new file. Kernels before 6.0 leave the set-gid bit in a set-gid
    /// directory to the file system.
    pub(super) fn creation_mode(&self, request: &Request, directory: Ino, bits: u32) -> Result<u32> {
        if bits & GIVES_GROUP != GIVES_GROUP {
            return Ok(bits);
        }
        let directory = self.fs.attributes(directory)?;
        let caller = RequestCredentials::of(request, &self.process_info);
        Ok(mask_set_gid(bits, directory.mode, || caller.keeps_set_gid(directory.gid)))
    }
}

/// Clears the set-gid bit of a program in a set-gid directory, unless its creator belongs to the
/// group whose rights the program would get.
fn mask_set_gid(bits: u32, directory: u32, keeps_set_gid: impl FnOnce() -> bool) -> u32 {
    let inherits = bits & mode::TYPE != mode::DIRECTORY && directory & mode::SET_GID != 0;
    if bits & GIVES_GROUP == GIVES_GROUP && inherits && !keeps_set_gid() { bits & !mode::SET_GID } else { bits }
}

/// Returns whether the kernel only stores times. It sends the times changed by an attribute removal
/// before the change that caused the removal.
fn is_flush_of_times(set: &SetAttributes) -> bool {
    set.mtime.is_some() && SetAttributes { mtime: None, ctime: None, ..*set } == SetAttributes::default()
}

fn sets_only_ctime(set: &SetAttributes) -> bool {
    SetAttributes { ctime: None, ..*set } == SetAttributes::default()
}

fn is_empty_chown(before: u32, set: &SetAttributes) -> bool {
    sets_only_ctime(set) && (set.ctime.is_some() || before & mode::TYPE != mode::REGULAR)
}

/// Returns the mode bits that a file loses. Set-gid without group execution stays if the caller may
/// keep it; directories lose nothing.
fn bits_to_clear(before: u32, keeps_set_gid: impl FnOnce() -> bool) -> u32 {
    if before & mode::TYPE == mode::DIRECTORY {
        return 0;
    }
    let set_gid = before & mode::SET_GID != 0 && (before & GROUP_EXECUTE != 0 || !keeps_set_gid());
    (before & mode::SET_UID) | if set_gid { mode::SET_GID } else { 0 }
}

/// Capability numbers of linux/capability.h.
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SETFCAP: u32 = 31;

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

    use lockbox::fs::SetTime;

    use super::*;
    use crate::mount_agent::serve_process_info;

    const CTIME: SetAttributes = SetAttributes {
        ctime: Some(SetTime::Now),
        mode: None,
        uid: None,
        gid: None,
        size: None,
        atime: None,
        mtime: None,
        kill_set_id: false,
        kill_set_gid: false,
        keeps_times: false,
    };

    #[test]
    fn an_empty_chown_differs_from_the_clearing_before_a_write() {
        let nothing = SetAttributes::default();
        assert!(is_empty_chown(mode::REGULAR, &CTIME));
        assert!(!is_empty_chown(mode::REGULAR, &nothing), "the kernel takes privileges away for a writer");
        for other in [mode::FIFO, mode::SOCKET, mode::CHARACTER, mode::BLOCK, mode::SYMLINK] {
            assert!(is_empty_chown(other, &nothing), "{other:o}: nobody writes to it through us");
        }
        for set in [
            SetAttributes { uid: Some(1), ..CTIME },
            SetAttributes { mtime: Some(SetTime::Now), ..CTIME },
            SetAttributes { size: Some(0), ..CTIME },
            SetAttributes { mode: Some(0o600), ..CTIME },
        ] {
            assert!(!is_empty_chown(mode::REGULAR, &set), "{set:?}");
        }
    }

    #[test]
    fn a_set_gid_program_in_a_set_gid_directory_needs_a_member_of_the_group() {
        let bits = |bits, directory, member| mask_set_gid(bits, directory, || member);
        assert_eq!(bits(0o102_755, 0o042_777, false), 0o100_755);
        assert_eq!(bits(0o106_755, 0o042_777, false), 0o104_755, "what the owner may give is the owner's");
        assert_eq!(bits(0o102_755, 0o042_777, true), 0o102_755);
        assert_eq!(bits(0o102_755, 0o040_777, false), 0o102_755, "the group is the maker's");
        assert_eq!(bits(0o102_745, 0o042_777, false), 0o102_745, "the group may not run it");
        assert_eq!(bits(0o042_775, 0o042_777, false), 0o042_775, "of a directory it is about what is created in it");
    }

    #[test]
    fn the_bits_that_go_are_those_that_give_rights() {
        let bits = |mode, member| bits_to_clear(mode, || member);
        assert_eq!(bits(0o106_755, true), 0o6000);
        assert_eq!(bits(0o104_644, true), 0o4000);
        assert_eq!(bits(0o102_644, true), 0, "without execution by the group it says nothing about rights");
        assert_eq!(bits(0o102_644, false), 0o2000, "but whoever is not of the group could not have set it");
        assert_eq!(bits(0o100_755, false), 0);
        assert_eq!(bits(0o046_777, false), 0, "of a directory it is about what is created in it");
        assert_eq!(bits(0o016_010, false), 0o6000, "a FIFO");
    }

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
        std::thread::spawn(move || serve_process_info(theirs));
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
