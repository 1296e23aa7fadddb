//! Files of settings, such as those below `~/.aws`: root reads only files that no other user could
//! have written.
//!
//! They name programs (`credential_process`), servers and keys. sudo(8) and su(1) may leave root
//! with the HOME of a user. The files there would have root run that user's programs, and send
//! root's data to that user's server. So for root a file counts only when it and every directory
//! above it belong to root, and no other user may write or rename there.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::geteuid;

/// Returns the text of a file; None without one, and of one that does not count, which is logged.
pub(crate) fn read(path: &Path) -> Option<String> {
    let is_root = geteuid().is_root();
    if is_root && !is_owned_by_root(path) {
        if path.exists() {
            let path = path.display();
            tracing::warn!(
                "{path} is not used: it, or a directory above it, belongs to another user or may be written by others; root uses files of its own"
            );
        }
        return None;
    }
    fs::read_to_string(path).ok()
}

/// Returns whether only root could have written the file and its path.
///
/// The path is resolved first: each component of the result belongs to root, so no other user can
/// put a link in after that.
pub(crate) fn is_owned_by_root(path: &Path) -> bool {
    // In a user namespace root's directories belong to the overflow user; the owner of / controls
    // all files anyhow.
    let owners = [Some(0), fs::metadata("/").ok().map(|root| root.uid())];
    let is_closed = |found: Metadata| {
        let is_sticky = found.is_dir() && found.mode() & 0o1000 != 0;
        owners.contains(&Some(found.uid())) && (found.mode() & 0o022 == 0 || is_sticky)
    };
    path.canonicalize().is_ok_and(|real| real.ancestors().all(|part| part.symlink_metadata().is_ok_and(is_closed)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    #[test]
    fn root_reads_no_settings_that_another_user_could_have_written() {
        if !geteuid().is_root() {
            println!("not tested: the rule is for root");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("home");
        let config = home.join(".aws/config");
        fs::create_dir_all(config.parent().unwrap()).unwrap();
        fs::write(&config, "[default]\n").unwrap();
        let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let give = |path: &Path, user| chown(path, Some(user), None).unwrap();
        assert_eq!(read(&config).as_deref(), Some("[default]\n"));
        for part in [config.as_path(), config.parent().unwrap(), home.as_path()] {
            give(part, 1234);
            assert_eq!(read(&config), None, "{part:?} is a user's");
            give(part, 0);
            let before = part.metadata().unwrap().mode();
            set_mode(part, before | 0o020);
            assert_eq!(read(&config), None, "others write to {part:?}");
            set_mode(part, before);
            assert!(read(&config).is_some());
        }
        // Where a link leads counts, and not only where it lies.
        let theirs = place.path().join("theirs");
        fs::write(&theirs, "credential_process = false\n").unwrap();
        give(&theirs, 1234);
        fs::remove_file(&config).unwrap();
        symlink(&theirs, &config).unwrap();
        assert_eq!(read(&config), None);
        assert_eq!(read(&home.join("missing")), None);
    }
}
