//! Parses arguments that select objects: `ARCHIVE:PATH`, and patterns as in a .gitignore file.
//!
//! An argument that may be `ARCHIVE:PATH` is taken as a whole when a file with that name exists.
//! Otherwise:
//!
//! - A path is split at the first ':' that has the name of a file before it.
//! - An address is split at the first ':' after its host or bucket that a '/' or nothing follows
//!   (one in a name of a store is written as %3A), and otherwise taken as a whole.
//!
//! The rest is a path from the root of the archive, with or without a leading '/'; an empty one is
//! the root. Names are bytes.
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use lockbox::exchange::{Filter, components};
use lockbox_host::located::Located;
use lockbox_host::{remote, shown};
use lockbox_terminal::display;

use crate::exit::Failure;

/// Object that an argument names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// A file or directory of the host, which may be an archive; or an address.
    Whole(PathBuf),
    /// Object in an archive.
    Within { archive: PathBuf, path: Vec<u8> },
}

impl Named {
    pub(crate) fn of(argument: &OsStr) -> Result<Named, Failure> {
        let whole = Path::new(argument);
        let is_remote = remote::is_remote(whole);
        if !is_remote && exists(whole) {
            return Ok(Named::Whole(whole.into()));
        }
        let bytes = argument.as_bytes();
        let mut colons = bytes.iter().enumerate().filter(|(_, byte)| **byte == b':').map(|(at, _)| at);
        let archive = |at: usize| Path::new(OsStr::from_bytes(&bytes[..at]));
        let at = match is_remote {
            true => {
                // After "scheme://host/".
                let name = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'/').nth(2).map(|(at, _)| at);
                colons.find(|&at| name.is_some_and(|name| at > name) && matches!(bytes.get(at + 1), None | Some(b'/')))
            }
            false => colons.find(|&at| archive(at).is_file()),
        };
        let Some(at) = at else {
            return Ok(Named::Whole(whole.into()));
        };
        let path = bytes[at + 1..].to_vec();
        // Refused before a passphrase is typed for it.
        components(&path).map_err(|error| Failure::of(display(&path), &error))?;
        Ok(Named::Within { archive: archive(at).into(), path })
    }
}

/// Returns whether something has this name. A mount point has, whether or not its daemon answers.
fn exists(path: &Path) -> bool {
    Located::of(path).is_ok_and(|located| located.mounted_here().is_some()) || path.symlink_metadata().is_ok()
}

/// Returns the one archive in which all arguments name an object, and the paths in it.
pub(crate) fn in_one_archive<A: AsRef<OsStr>>(
    arguments: impl IntoIterator<Item = A>,
) -> Result<(PathBuf, Vec<Vec<u8>>), Failure> {
    let mut found: Option<PathBuf> = None;
    let mut paths = Vec::new();
    for argument in arguments {
        let argument = argument.as_ref();
        let Named::Within { archive, path } = Named::of(argument)? else {
            return Err(Failure::usage(format!(
                "{} is not a path in an archive: name it as ARCHIVE:PATH, with an ARCHIVE that exists",
                shown(Path::new(argument))
            )));
        };
        let first = found.get_or_insert_with(|| archive.clone());
        if !is_same(first, &archive) {
            return Err(Failure::usage(format!(
                "{} and {} are in two archives; this command works in one archive",
                shown(first),
                shown(&archive)
            )));
        }
        paths.push(path);
    }
    let archive = found.ok_or_else(|| Failure::usage("no archive is named"))?;
    Ok((archive, paths))
}

/// Returns whether two names are those of one file.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|file| (file.dev(), file.ino())).ok();
    one == other || id(one).is_some_and(|one| Some(one) == id(other))
}

/// Patterns of files to leave out
#[derive(clap::Args)]
pub(crate) struct PatternArgs {
    /// Leave out files that match PATTERN, a line of a .gitignore file at the top of each item: *.o, /target, cache/, a/**/b
    #[arg(long, value_name = "PATTERN", group = "rules")]
    exclude: Vec<String>,
    /// Leave out files that match the lines of FILE, a .gitignore file
    #[arg(long, value_name = "FILE", group = "rules")]
    exclude_from: Vec<PathBuf>,
    /// Include files that match PATTERN although another pattern leaves them out, but not within a directory that is left out
    #[arg(long, value_name = "PATTERN", requires = "rules")]
    include: Vec<String>,
}

impl PatternArgs {
    pub(crate) fn is_empty(&self) -> bool {
        self.exclude.is_empty() && self.exclude_from.is_empty()
    }

    /// Lines of files first, then `--exclude`, then `--include`: the last match counts.
    pub(crate) fn filter(&self) -> Result<Filter, Failure> {
        if self.is_empty() {
            return Ok(Filter::default());
        }
        let mut rules = GitignoreBuilder::new("/");
        let wrong = |pattern: &str, error: ignore::Error| {
            let reason = error.to_string();
            let reason = reason.rsplit(": ").next().unwrap_or_default();
            Failure::usage(format!("'{pattern}' is not a pattern: {reason}"))
        };
        let mut add = |prefix: &str, pattern: &str| {
            rules.add_line(None, &format!("{prefix}{pattern}")).map(drop).map_err(|error| wrong(pattern, error))
        };
        for file in &self.exclude_from {
            let text = fs::read_to_string(file);
            let text = text.map_err(|e| Failure::host(format!("cannot read {}", shown(file)), &e))?;
            text.lines().try_for_each(|line| add("", line))?;
        }
        self.exclude.iter().try_for_each(|pattern| add("", pattern))?;
        self.include.iter().try_for_each(|pattern| add("!", pattern))?;
        let rules = rules.build().map_err(|error| wrong("the whole of them", error))?;
        Ok(Filter::new(move |path, is_directory| leaves_out(&rules, path, is_directory)))
    }
}

fn leaves_out(rules: &Gitignore, path: &[u8], is_directory: bool) -> bool {
    // The top of a tree has no path below itself, and the user named it.
    !path.is_empty() && rules.matched(Path::new(OsStr::from_bytes(path)), is_directory).is_ignore()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn within(archive: &Path, path: &[u8]) -> Named {
        Named::Within { archive: archive.into(), path: path.to_vec() }
    }

    #[test]
    fn an_argument_is_split_at_the_first_colon_behind_a_file_unless_it_exists_as_a_whole() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for file in ["a", "a:b", "a:whole"] {
            fs::write(at(file), "").unwrap();
        }
        fs::create_dir(at("d")).unwrap();
        let of = |name: &str| Named::of(at(name).as_os_str()).unwrap();
        assert_eq!(of("a"), Named::Whole(at("a")));
        assert_eq!(of("a:"), within(&at("a"), b""));
        assert_eq!(of("a:/x/y"), within(&at("a"), b"/x/y"));
        assert_eq!(of("a:x:y"), within(&at("a"), b"x:y"));
        assert_eq!(of("a:b:c"), within(&at("a"), b"b:c"), "of several that fit the first");
        for whole in ["a:b", "a:whole", "d", "d:x", "none:x", "none"] {
            assert_eq!(of(whole), Named::Whole(at(whole)));
        }
        let mut odd = at("a").into_os_string();
        odd.push(OsStr::from_bytes(b":\xff\n"));
        assert_eq!(Named::of(&odd).unwrap(), within(&at("a"), b"\xff\n"));
        let refused = Named::of(at("a:x/../y").as_os_str()).unwrap_err();
        assert!(refused.message.contains("must not contain '..'"), "{}", refused.message);
        for address in ["https://host/a:x", "https://host:8080/a", "s3://bucket/a", "file:///a/b", "s3://bucket:/a"] {
            assert_eq!(Named::of(OsStr::new(address)).unwrap(), Named::Whole(address.into()));
        }
        for (archive, path) in [("s3://bucket/a", ""), ("s3://bucket/a:b", "/x:/y"), ("file:///a/b", "/x")] {
            let named = Named::of(OsStr::new(&format!("{archive}:{path}"))).unwrap();
            assert_eq!(named, within(Path::new(archive), path.as_bytes()));
        }
        assert!(Named::of(OsStr::new("s3://bucket/a:/x/../y")).is_err());
    }

    #[test]
    fn one_archive_is_one_file_however_it_is_called() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::write(at("a"), "").unwrap();
        fs::write(at("b"), "").unwrap();
        std::os::unix::fs::symlink("a", at("link")).unwrap();
        let both = |one: &str, other: &str| in_one_archive([at(one), at(other)]);
        assert_eq!(both("a:x", "link:y").unwrap(), (at("a"), vec![b"x".to_vec(), b"y".to_vec()]));
        assert!(
            both("a:x", "b:y").unwrap_err().message.ends_with("are in two archives; this command works in one archive")
        );
        assert!(both("a:x", "b").unwrap_err().message.contains("is not a path in an archive"));
    }

    fn left_out(exclude: &[&str], include: &[&str], path: &str, is_directory: bool) -> bool {
        let mut rules = GitignoreBuilder::new("/");
        for line in exclude.iter().map(|p| p.to_string()).chain(include.iter().map(|p| format!("!{p}"))) {
            rules.add_line(None, &line).unwrap();
        }
        leaves_out(&rules.build().unwrap(), path.as_bytes(), is_directory)
    }

    #[test]
    fn patterns_mean_what_they_mean_in_a_gitignore_file() {
        assert!(left_out(&["*.o"], &[], "a/b.o", false));
        assert!(!left_out(&["*.o"], &["keep.o"], "a/keep.o", false));
        assert!(left_out(&["/target"], &[], "target", true));
        assert!(!left_out(&["/target"], &[], "a/target", true));
        assert!(left_out(&["cache/"], &[], "a/cache", true));
        assert!(!left_out(&["cache/"], &[], "a/cache", false));
        assert!(left_out(&["a/**/z"], &[], "a/b/c/z", false));
        assert!(!left_out(&["*"], &["*/", "*.txt"], "a", true));
        assert!(!left_out(&["*"], &["*/", "*.txt"], "a/b.txt", false));
        assert!(left_out(&["*"], &["*/", "*.txt"], "a/b.c", false));
    }
}
