//! Names the places of an archive, under which its user remembers which archive was there.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use lockbox::keys::PlaceName;

use crate::remote;

/// Number of symbolic links that the kernel follows.
const MOST_LINKS: usize = 40;

/// Returns the names of an archive's place, as `lockbox::keys::SeenOptions` wants them: of an
/// address the one spelling, of a path the names that [`paths`] gives.
pub fn place_names(archive: &Path) -> Vec<PlaceName> {
    if let Some(directory) = remote::directory(archive) {
        return paths(&directory).iter().map(|path| PlaceName::of_directory(path)).collect();
    }
    match remote::is_remote(archive) {
        true => remote::spelled(archive).iter().map(|address| PlaceName::of_address(address)).collect(),
        false => paths(archive).iter().map(|path| PlaceName::of_path(path)).collect(),
    }
}

/// Follows a path as the kernel does. Returns one absolute path for each symbolic link on the way
/// (all before the link resolved, the link and all behind it as they are), and at last the path
/// without links. An attacker with write access to a directory on the way changes later names in
/// the list and no earlier one.
///
/// A descriptor in /proc is any file that a caller opened: names there say nothing of a place, and
/// are left out.
fn paths(path: &Path) -> Vec<PathBuf> {
    let Ok(absolute) = std::path::absolute(path) else { return Vec::new() };
    let mut found: Vec<PathBuf> = Vec::new();
    let mut resolved = PathBuf::from("/");
    let parts = |path: &Path| path.components().map(|part| part.as_os_str().to_owned()).collect::<VecDeque<_>>();
    let mut pending: VecDeque<OsString> = parts(&absolute);
    let mut links = 0;
    while let Some(part) = pending.pop_front() {
        match Path::new(&part).components().next() {
            None | Some(Component::CurDir) => continue,
            Some(Component::RootDir | Component::Prefix(_)) => {
                resolved = PathBuf::from("/");
                continue;
            }
            Some(Component::ParentDir) => {
                resolved.pop();
                continue;
            }
            Some(Component::Normal(_)) => {}
        }
        let at = resolved.join(&part);
        let Ok(target) = at.read_link() else {
            resolved = at;
            continue;
        };
        found.push(pending.iter().fold(at, |path, part| path.join(part)));
        links += 1;
        if links > MOST_LINKS {
            break;
        }
        for part in parts(&target).into_iter().rev() {
            pending.push_front(part);
        }
    }
    found.push(resolved);
    found.retain(|path| !path.starts_with("/proc") && !path.starts_with("/dev/fd"));
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    struct Host {
        directory: tempfile::TempDir,
    }

    impl Host {
        fn new() -> Host {
            Host { directory: tempfile::tempdir().unwrap() }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.directory.path().canonicalize().unwrap().join(name)
        }
    }

    #[test]
    fn a_path_without_links_is_one_name_however_it_is_spelled() {
        let host = Host::new();
        fs::create_dir(host.at("d")).unwrap();
        fs::write(host.at("d/a"), "").unwrap();
        for spelled in ["d/a", "d/../d/a", "./d//a", "d/./a"] {
            assert_eq!(paths(&host.at(spelled)), [host.at("d/a")], "{spelled}");
        }
        // It need not be there.
        assert_eq!(paths(&host.at("new/b")), [host.at("new/b")]);
    }

    /// PLACE-1: under any alias that a user takes, the names before a link that an attacker made
    /// are those without it.
    #[test]
    fn a_link_put_in_place_of_a_file_or_a_directory_leaves_the_name_before_it() {
        let host = Host::new();
        fs::create_dir_all(host.at("storage/d")).unwrap();
        fs::write(host.at("storage/d/a"), "").unwrap();
        symlink(host.at("storage"), host.at("alias")).unwrap();
        let (alias, real) = (host.at("alias/d/a"), host.at("storage/d/a"));
        assert_eq!(paths(&alias), [alias.clone(), real.clone()]);
        // The attacker: the file is a link, then the directory is one.
        fs::rename(host.at("storage/d/a"), host.at("storage/d/other")).unwrap();
        symlink("other", host.at("storage/d/a")).unwrap();
        assert_eq!(paths(&real), [real.clone(), host.at("storage/d/other")]);
        assert_eq!(paths(&alias), [alias.clone(), real.clone(), host.at("storage/d/other")]);
        fs::remove_file(host.at("storage/d/a")).unwrap();
        fs::rename(host.at("storage/d/other"), host.at("storage/d/a")).unwrap();
        fs::rename(host.at("storage/d"), host.at("storage/e")).unwrap();
        symlink("../storage/e", host.at("storage/d")).unwrap();
        for name in [&real, &alias] {
            let found = paths(name);
            assert!(found.contains(&real) && found.last() == Some(&host.at("storage/e/a")), "{found:?}");
        }
    }

    #[test]
    fn links_in_a_circle_end() {
        let host = Host::new();
        symlink("y", host.at("x")).unwrap();
        symlink("x", host.at("y")).unwrap();
        assert!(paths(&host.at("x")).len() <= MOST_LINKS + 2);
    }

    #[test]
    fn a_descriptor_is_no_place() {
        let host = Host::new();
        fs::write(host.at("a"), "").unwrap();
        let file = fs::File::open(host.at("a")).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        assert_eq!(paths(Path::new(&format!("/dev/fd/{number}"))), [host.at("a")]);
    }

    #[test]
    fn addresses_are_places_in_their_one_spelling() {
        let names = |text: &str| place_names(Path::new(text));
        assert_eq!(names("s3://bucket/a.lbx"), [PlaceName::of_address("s3://bucket/a.lbx")]);
        assert_eq!(names("https://Example.org:443/a.lbx"), names("https://example.org/a.lbx"));
        let host = Host::new();
        let directory = host.at("store");
        assert_eq!(names(&format!("file://{}", directory.display())), [PlaceName::of_directory(&directory)]);
        assert_ne!(names(&format!("file://{}", directory.display())), place_names(&directory));
    }
}
