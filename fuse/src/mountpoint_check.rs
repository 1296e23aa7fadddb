//! Rejects mount points that would hide files of the daemon.
//!
//! The daemon holds all of these files open and would continue. Other programs would no longer find
//! them: the archive (to copy it), the log, the control socket of `lockbox umount`, and the
//! rollback state. Therefore the user must ask for it.

use std::path::{Path, PathBuf};

use lockbox_host::daemons;
use lockbox_host::located::real_path;

use crate::exit::{Failure, MountProgram};
use crate::options::MountOptions;

/// Paths that the daemon opens later and that no mount may cover.
const SYSTEM_PATHS: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Checks that a mount on `point`, a path without links, hides no file of the daemon.
///
/// # Errors
/// Names the file that the mount would hide.
pub fn check(point: &Path, archive: &Path, options: &MountOptions) -> Result<(), Failure> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_hidden_is_named_unless_it_is_wanted() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().canonicalize().unwrap();
        let at = |name: &str| home.join(name);
        std::fs::create_dir_all(at("logs")).unwrap();
        std::os::unix::fs::symlink(at("logs"), at("link")).unwrap();
        let mut options = MountOptions::default();
        let refused = |point: &Path, archive: &str, options: &MountOptions| match check(point, &at(archive), options) {
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
}
