//! Keeps root from mounting another user's archive where its content would pass for root's.
//!
//! The owner of an archive chooses its content, with owners and modes: without any right, an
//! archive can hold a copy of /etc in which all files belong to root and one more user has the
//! number 0. On a directory of root's, root's mount of it with `allow_other` makes its author root.
//! The author may also choose the directory, when the path leads through a directory in
//! which the author may put a link.
//!
//! # Rule
//! Root mounts a file that another user owns only on an empty directory that this user owns: all
//! that a program finds there then, that user could have put there before. The option `trust-owner`
//! lifts the rule.
//!
//! # Order
//! The owner is that of the archive's file as it is open, and the directory is examined by the
//! descriptor on which it is mounted: no user can put another file or directory in the place of
//! either in between. Only of an archive in a directory (`file:///`) the owner is that of the path.
//! The mounting command checks by path, before it asks for a passphrase; that one is for the
//! message alone.

use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use lockbox_host::daemons::user_name;
use lockbox_host::mountpoint::Mountpoint;
use lockbox_host::remote;
use nix::unistd::geteuid;

use crate::exit::Failure;
use crate::options::Options;

/// Returns the user that must own the mount point, when the rule applies. `owner`: of the archive;
/// None for one at an address of another machine.
pub fn required(owner: Option<u32>, options: &Options) -> Option<u32> {
    owner.filter(|&owner| geteuid().is_root() && owner != 0 && !options.trust_owner)
}

/// The owner of an archive's file, or of the directory that holds its objects
/// (`file:///directory`), which no descriptor of this process is open of.
pub fn owner_by_path(archive: &Path) -> Option<u32> {
    let local = if remote::is_remote(archive) { remote::directory(archive)? } else { archive.to_path_buf() };
    local.metadata().ok().map(|found| found.uid())
}

/// Checks the rule by path: whether the mount would be refused anyhow.
///
/// # Errors
/// As of [`check`]. A path that cannot be read is left to the check at the mount.
pub fn check_early(archive: &Path, point: &Path, options: &Options) -> Result<(), Failure> {
    match (required(owner_by_path(archive), options), Mountpoint::of(point)) {
        (Some(owner), Ok(held)) => check(&held, point, owner),
        // The directory is to be made, by root.
        (Some(owner), Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(refused(point, owner, &"the directory would belong to root"))
        }
        _ => Ok(()),
    }
}

/// Checks that the open directory belongs to `owner` and is empty; `path` is for the message.
///
/// # Errors
/// A sentence that names the way out.
pub fn check(held: &Mountpoint, path: &Path, owner: u32) -> Result<(), Failure> {
    let cannot_read = |error| Failure::mount(format!("cannot read the mount point {}: {error}", path.display()));
    let found = held.owner().map_err(cannot_read)?;
    if found != owner {
        return Err(refused(path, owner, &format_args!("the directory belongs to {}", user_name(found))));
    }
    match held.is_empty().map_err(cannot_read)? {
        true => Ok(()),
        false => Err(refused(path, owner, &"the directory is not empty")),
    }
}

fn refused(path: &Path, owner: u32, why: &dyn Display) -> Failure {
    let (path, owner) = (path.display(), user_name(owner));
    Failure::mount(format!(
        "cannot mount on {path}: the archive belongs to {owner}, and {why}; root mounts an archive of another user only on an empty directory of that \
         user: mount it as {owner}, or use -o trust-owner"
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    const USER: u32 = 1234;

    #[test]
    fn root_mounts_another_users_archive_on_an_empty_directory_of_that_user_only() {
        if !geteuid().is_root() {
            println!("not tested: the rule is for root");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let at = |name: &str| place.join(name);
        for (name, owner) in [("own", USER), ("full", USER), ("roots", 0), ("others", USER + 1)] {
            fs::create_dir(at(name)).unwrap();
            chown(at(name), Some(owner), None).unwrap();
        }
        fs::write(at("full/file"), "").unwrap();
        let archive = |name: &str, owner| {
            fs::write(at(name), "").unwrap();
            chown(at(name), Some(owner), None).unwrap();
            at(name)
        };
        let (theirs, roots) = (archive("a.lbx", USER), archive("b.lbx", 0));
        let mut options = Options::default();
        let refused = |archive: &Path, point: &str, options: &Options| {
            check_early(archive, &at(point), options).err().map(|failure| failure.message).unwrap_or_default()
        };
        assert_eq!(refused(&theirs, "own", &options), "");
        assert!(refused(&theirs, "full", &options).contains("the directory is not empty"));
        assert!(refused(&theirs, "roots", &options).contains("the directory belongs to root"));
        assert!(refused(&theirs, "others", &options).contains("the directory belongs to 1235"));
        assert!(refused(&theirs, "missing", &options).contains("would belong to root"));
        for point in ["own", "full", "roots", "others", "missing"] {
            assert_eq!(refused(&roots, point, &options), "", "an archive of root's");
        }
        options.trust_owner = true;
        assert_eq!(refused(&theirs, "roots", &options), "");
        // What is checked is what is open, whatever the path leads to by now.
        let held = Mountpoint::of(&at("roots")).unwrap();
        fs::rename(at("roots"), at("away")).unwrap();
        symlink("own", at("roots")).unwrap();
        assert!(check(&held, &at("roots"), USER).is_err());
    }
}
