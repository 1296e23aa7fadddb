//! Checks of the mount point: it must not hide files of the daemon, and another user's archive must
//! not pass for root's.
//!
//! # Hidden files
//! The daemon holds all of its files open and would continue. Other programs would no longer find
//! them: the archive (to copy it), the log, the control socket of `lockbox umount`, and the
//! rollback state. Therefore the user must ask for it (`over-archive`).
//!
//! # Owner
//! The owner of an archive chooses its content, with owners and modes. Without any right, an
//! archive can hold a copy of /etc in which all files belong to root and one more user has uid 0.
//! If root mounts it with `allow_other` on a directory of root's, its author becomes root. The
//! author may also choose the directory, if the path leads through a directory in which the author
//! can create a link.
//!
//! So root mounts another user's file only on an empty directory that this user owns: that user
//! could have created everything that a program then finds there. The option `trust-owner` lifts
//! the rule.
//!
//! The owner is that of the open archive file, and the directory is checked through the descriptor
//! on which it is mounted. So no user can replace either in between. Only for an archive in a
//! directory (`file:///`) the owner is that of the path. The mount command also checks by path
//! before it asks for a passphrase; that check only gives an early message.

use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lockbox_host::daemons::{self, user_name};
use lockbox_host::located::real_path;
use lockbox_host::mountpoint::Mountpoint;
use lockbox_host::remote;
use nix::unistd::geteuid;

use crate::exit::{Failure, MountProgram};
use crate::options::MountOptions;

/// Paths that the daemon opens later and that no mount may cover.
const SYSTEM_PATHS: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Checks that a mount on `point`, a path without links, hides no file of the daemon.
///
/// # Errors
/// Names the file that the mount would hide.
pub fn check_covered_files(point: &Path, archive: &Path, options: &MountOptions) -> Result<(), Failure> {
    if let Some(system) = SYSTEM_PATHS.iter().find(|path| Path::new(path).starts_with(point)) {
        return Err(Failure::mount(format!("nothing can be mounted at {}: it holds {system}", point.display())));
    }
    if options.over_archive {
        return Ok(());
    }
    let needed = [
        ("the archive", Some(archive.to_path_buf())),
        ("what this user remembers of archives", options.seen_options().directory),
        ("the daemon's socket", daemons::ready_directory::<MountProgram>().ok()),
        ("the log", options.log.clone()),
    ];
    for (what, path) in needed {
        if let Some(path) = path.map(|path| resolve_existing(&path))
            && path.starts_with(point)
        {
            return Err(Failure::mount(format!(
                "the mount point {} holds {what}, {}, which the mount would hide: use -o over-archive to mount there all the same",
                point.display(),
                path.display()
            )));
        }
    }
    Ok(())
}

/// Resolves the links of the longest existing ancestor of `path`.
fn resolve_existing(path: &Path) -> PathBuf {
    for there in path.ancestors() {
        if let Ok(found) = real_path(there) {
            let rest = path.strip_prefix(there).unwrap_or(Path::new(""));
            return found.join(rest);
        }
    }
    path.to_path_buf()
}

/// Returns the user that must own the mount point, if the rule applies. `owner`: of the archive;
/// None for a remote one.
pub fn required_owner(owner: Option<u32>, options: &MountOptions) -> Option<u32> {
    owner.filter(|&owner| geteuid().is_root() && owner != 0 && !options.trust_owner)
}

/// Returns the owner of an archive's file, or of the directory with its objects
/// (`file:///directory`), for which this process has no descriptor.
pub fn owner_by_path(archive: &Path) -> Option<u32> {
    let local = if remote::is_remote(archive) { remote::directory(archive)? } else { archive.to_path_buf() };
    local.metadata().ok().map(|found| found.uid())
}

/// Checks by path whether the mount would be refused anyway.
///
/// # Errors
/// As of [`check_owner`]. A path that cannot be read is left to the check at the mount.
pub fn check_owner_early(archive: &Path, point: &Path, options: &MountOptions) -> Result<(), Failure> {
    match (required_owner(owner_by_path(archive), options), Mountpoint::of(point)) {
        (Some(owner), Ok(held)) => check_owner(&held, point, owner),
        // The directory would be created, by root.
        (Some(owner), Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(owner_refusal(point, owner, &"the directory would belong to root"))
        }
        _ => Ok(()),
    }
}

/// Checks that the open directory belongs to `owner` and is empty; `path` is for the message.
///
/// # Errors
/// A sentence that names the option that lifts the rule.
pub fn check_owner(held: &Mountpoint, path: &Path, owner: u32) -> Result<(), Failure> {
    let cannot_read = |error| Failure::mount(format!("cannot read the mount point {}: {error}", path.display()));
    let found = held.owner().map_err(cannot_read)?;
    if found != owner {
        return Err(owner_refusal(path, owner, &format_args!("the directory belongs to {}", user_name(found))));
    }
    match held.is_empty().map_err(cannot_read)? {
        true => Ok(()),
        false => Err(owner_refusal(path, owner, &"the directory is not empty")),
    }
}

fn owner_refusal(path: &Path, owner: u32, why: &dyn Display) -> Failure {
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

    #[test]
    fn hidden_files_are_named_unless_over_archive_is_set() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().canonicalize().unwrap();
        let at = |name: &str| home.join(name);
        std::fs::create_dir_all(at("logs")).unwrap();
        std::os::unix::fs::symlink(at("logs"), at("link")).unwrap();
        let mut options = MountOptions::default();
        let refused = |point: &Path, archive: &str, options: &MountOptions| match check_covered_files(
            point,
            &at(archive),
            options,
        ) {
            Ok(()) => String::new(),
            Err(failure) => failure.message,
        };
        assert!(refused(&home, "a.lbx", &options).contains("holds the archive"));
        assert_eq!(refused(&at("point"), "a.lbx", &options), "");
        assert_eq!(refused(&at("a"), "a.lbx", &options), "", "a name that begins alike");
        options.log = Some(at("link/not/there"));
        assert!(refused(&at("logs"), "a.lbx", &options).contains("holds the log"));
        options.over_archive = true;
        assert_eq!(refused(&home, "a.lbx", &options), "");
        for system in ["/", "/proc", "/sys", "/dev"] {
            assert!(refused(Path::new(system), "a.lbx", &options).contains("nothing can be mounted"), "{system}");
        }
    }

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
        let mut options = MountOptions::default();
        let refused = |archive: &Path, point: &str, options: &MountOptions| {
            check_owner_early(archive, &at(point), options).err().map(|failure| failure.message).unwrap_or_default()
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
        // The open directory is checked, whatever the path leads to by now.
        let held = Mountpoint::of(&at("roots")).unwrap();
        fs::rename(at("roots"), at("away")).unwrap();
        symlink("own", at("roots")).unwrap();
        assert!(check_owner(&held, &at("roots"), USER).is_err());
    }
}
