//! Completes values found on this host, and in archives while the keyring holds their keys.
use std::ffi::OsStr;
use std::fs::{DirEntry, File, FileType, Metadata};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::archive::{Archive, OpenOptions, recognize};
use lockbox::exchange::{Entries, resolve};
use lockbox::keys::{self, UnlockedKey};
use lockbox_host::list_option::OptionValue;
use lockbox_host::mount_options::MOUNT;
use lockbox_host::remote::REMOTE;
use lockbox_host::secrets::Keyring;
use lockbox_host::{mounts, remote};
use rustix::fs::{FileType as FileKind, Mode, OFlags, fstat, open};

use super::Candidate;
use crate::commands::env::variable_names;
use crate::paths::Named;

/// Number of files above which only their names identify archives: opening each would take longer
/// than a person waits.
const MOST_OPENED: usize = 2000;

/// Kind of entries listed in addition to directories.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Listed {
    Files,
    Archives,
    Nothing,
}

/// Returns the path that a shell would make of a word.
pub(super) fn path(word: &[u8]) -> PathBuf {
    let home = || std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    match (word.strip_prefix(b"~/"), home()) {
        (Some(below), Some(home)) => home.join(OsStr::from_bytes(below)),
        _ => PathBuf::from(OsStr::from_bytes(word)),
    }
}

/// Lists directories, and the entries of the wanted kind, that begin with `typed`.
pub(super) fn list(typed: &OsStr, listed: Listed) -> Vec<Candidate> {
    let (stem, begun) = split(typed.as_bytes());
    let directory = if stem.is_empty() { PathBuf::from(".") } else { path(stem) };
    let Ok(entries) = directory.read_dir() else { return Vec::new() };
    let name = |entry: &DirEntry| entry.file_name().as_bytes().to_vec();
    // Hidden names are listed after a typed dot.
    let fits = |name: &[u8]| name.starts_with(begun) && (begun.first() == Some(&b'.') || name.first() != Some(&b'.'));
    let fitting: Vec<_> = entries.flatten().map(|entry| (name(&entry), entry)).filter(|(name, _)| fits(name)).collect();
    let opened = fitting.len() <= MOST_OPENED;
    let mut found = Vec::new();
    for (name, entry) in fitting {
        // The kind is read from the directory itself: an entry under a dead mount is not touched.
        let Some(kind) = kind(&entry) else { continue };
        if kind.is_dir() {
            found.push(Candidate::new(stem, [&name[..], b"/"].concat()).open());
        } else if match listed {
            Listed::Files => true,
            Listed::Archives => kind.is_file() && (name.ends_with(b".lbx") || (opened && is_archive(&entry.path()))),
            Listed::Nothing => false,
        } {
            found.push(Candidate::new(stem, name));
        }
    }
    found
}

fn kind(entry: &DirEntry) -> Option<FileType> {
    let kind = entry.file_type().ok()?;
    if kind.is_symlink() { entry.path().metadata().ok().map(|it| Metadata::file_type(&it)) } else { Some(kind) }
}

pub(super) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    path.split_at(path.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1))
}

fn is_archive(path: &Path) -> bool {
    // A FIFO or a device may have taken its place, and to open one may do something.
    let begin = || {
        let held = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let mut begin = [0; 20];
        if FileKind::from_raw_mode(fstat(&held)?.st_mode).is_file() {
            File::open(format!("/proc/self/fd/{}", held.as_raw_fd()))?.read_exact(&mut begin)?;
        }
        io::Result::Ok(begin)
    };
    begin().is_ok_and(|begin| !matches!(recognize(&begin, 0), Err(Error::NotArchive(_))))
}

/// Returns the mount points of this user's archives. The kernel's table has them, so the mounts are
/// not asked.
pub(super) fn mounted(typed: &OsStr) -> Vec<Candidate> {
    let typed = typed.as_bytes();
    let here = || std::env::current_dir().unwrap_or_default().join("");
    let (stem, root) = match typed {
        [b'/', ..] => (&b""[..], PathBuf::new()),
        [b'~', b'/', ..] => (&b"~/"[..], path(b"~/")),
        [b'.', b'/', ..] => (&b"./"[..], here()),
        _ => (&b""[..], here()),
    };
    let root = root.as_os_str().as_bytes();
    let begun = [root, &typed[stem.len()..]].concat();
    let mut found = Vec::new();
    for mount in mounts::mine() {
        let point = mount.point.as_os_str().as_bytes();
        let about = || mount.source.file_name().unwrap_or_default().as_bytes();
        if point.starts_with(&begun) && point.len() > root.len() {
            found.push(Candidate::new(stem, &point[root.len()..]).about(about()));
        } else if typed.is_empty() {
            found.push(Candidate::new(b"", point).about(about()));
        }
    }
    found
}

/// Returns addresses with a cache on disk: for others a server would have to be asked.
pub(super) fn addresses() -> Vec<Candidate> {
    let kept = remote::kept().unwrap_or_default();
    kept.into_iter().filter_map(|kept| kept.address).map(|address| Candidate::new(b"", address)).collect()
}

/// Completes a comma-separated list; words already in it are not offered again.
pub(super) fn list_of_options(typed: &OsStr, mount: bool) -> Vec<Candidate> {
    let typed = typed.as_bytes();
    let (before, last) = typed.split_at(typed.iter().rposition(|&byte| byte == b',').map_or(0, |at| at + 1));
    if let Some(equals) = last.iter().position(|&byte| byte == b'=') {
        let (name, value) = (&last[..equals], &last[equals + 1..]);
        let stem = &typed[..before.len() + equals + 1];
        return match words(mount).find(|(word, _)| word.as_bytes() == name) {
            Some((_, OptionValue::OneOf(values) | OptionValue::Text(_, values))) => {
                values.iter().map(|value| Candidate::new(stem, value).open()).collect()
            }
            Some((_, OptionValue::File)) => {
                let files = list(OsStr::from_bytes(value), Listed::Files);
                files.into_iter().map(|file| super::behind(stem, file).open()).collect()
            }
            Some((_, OptionValue::Nothing)) | None => Vec::new(),
        };
    }
    let has = |word: &str| {
        let given = before.split(|&byte| byte == b',');
        given.map(|option| option.split(|&byte| byte == b'=').next()).any(|name| name == Some(word.as_bytes()))
    };
    let offered = words(mount).filter(|(word, _)| !has(word)).map(|(word, takes)| {
        let equals = if takes == OptionValue::Nothing { "" } else { "=" };
        Candidate::new(before, format!("{word}{equals}")).open()
    });
    offered.collect()
}

fn words(mount: bool) -> impl Iterator<Item = (&'static str, OptionValue)> {
    let of_mount = if mount { MOUNT } else { &[] };
    of_mount.iter().map(|row| (row.name, row.value)).chain(REMOTE.iter().map(|row| (row.name, row.value)))
}

/// Returns the cached key, if it still opens the archive. One that does not is left to a command
/// that may change something.
fn kept(archive: &Path) -> Option<UnlockedKey> {
    // A key press sends nothing over the network.
    if remote::is_remote(archive) || !archive.is_file() {
        return None;
    }
    let id = keys::identify(archive).ok()?;
    keys::accept_kept(archive, &Keyring::open().ok()?.kept(&id)?)
}

/// Opens the archive as it is: without a rollback check, and without recording its state.
fn opened(archive: &OsStr) -> Option<Archive> {
    let archive = path(archive.as_bytes());
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    Archive::open(&*archive, &kept(&archive)?, &options).ok()
}

/// Returns the paths in the archive that begin with `typed`. The archive may be named together with
/// a path; the results then are too.
pub(super) fn paths(archive: &OsStr, typed: &OsStr) -> Vec<Candidate> {
    if matches!(named(archive), Some(Named::Within { .. })) {
        return whole_or_within(typed, true);
    }
    within(archive, typed.as_bytes())
}

fn within(archive: &OsStr, typed: &[u8]) -> Vec<Candidate> {
    let (stem, begun) = split(typed);
    let Some(archive) = opened(archive) else { return Vec::new() };
    let fs = archive.file_system();
    let Some(directory) = resolve(fs, stem).ok().filter(|found| found.is_directory()) else { return Vec::new() };
    let Ok(mut entries) = Entries::new(fs, directory.ino) else { return Vec::new() };
    let mut found = Vec::new();
    while let Some(entry) = entries.next_entry() {
        let Ok(entry) = entry else { continue };
        if entry.name.starts_with(begun) {
            found.push(match entry.attributes.is_directory() {
                true => Candidate::new(stem, [entry.name, b"/"].concat()).open(),
                false => Candidate::new(stem, entry.name),
            });
        }
    }
    found
}

/// Returns archives, and after a ':' paths in them. With `colon` an archive alone is not valid.
pub(super) fn whole_or_within(typed: &OsStr, colon: bool) -> Vec<Candidate> {
    if let Some(found) = behind_colon(typed) {
        return found;
    }
    let mut found = list(typed, Listed::Archives);
    for archive in found.iter_mut().filter(|candidate| colon && !candidate.word.ends_with(b"/")) {
        archive.word.push(b':');
        archive.open = true;
    }
    found
}

pub(super) fn either(typed: &OsStr) -> Vec<Candidate> {
    behind_colon(typed).unwrap_or_else(|| list(typed, Listed::Files).into_iter().map(Candidate::open).collect())
}

fn named(word: &OsStr) -> Option<Named> {
    Named::of(path(word.as_bytes()).as_os_str()).ok()
}

/// Returns the paths that begin with the text after the colon; None when the word names nothing in
/// an archive.
fn behind_colon(typed: &OsStr) -> Option<Vec<Candidate>> {
    let Named::Within { path, .. } = named(typed)? else { return None };
    let (archive, _) = typed.as_bytes().split_at(typed.len() - path.len() - 1);
    let stem = &typed.as_bytes()[..=archive.len()];
    let found = within(OsStr::from_bytes(archive), &path);
    Some(found.into_iter().map(|candidate| super::behind(stem, candidate)).collect())
}

/// Labels of keys, and numbers.
pub(super) fn labels(archive: &OsStr) -> Vec<Candidate> {
    let archive = path(archive.as_bytes());
    let keys = kept(&archive).and_then(|key| keys::list_unlocked(&*archive, &key).ok()).unwrap_or_default();
    let mut found = Vec::new();
    for key in &keys {
        let kind = key.kind.name();
        found.push(Candidate::new(b"", key.slot.to_string()).about(kind));
        found.extend(key.label().map(|label| Candidate::new(b"", label).about(kind)));
    }
    found
}

pub(super) fn snapshots(archive: &OsStr) -> Vec<Candidate> {
    let found = opened(archive).and_then(|archive| archive.snapshots().ok()).unwrap_or_default();
    found.iter().map(|snapshot| Candidate::new(b"", &snapshot.name)).collect()
}

pub(super) fn variables(archive: &OsStr) -> Vec<Candidate> {
    let names = opened(archive).and_then(|archive| variable_names(&archive).ok()).unwrap_or_default();
    names.iter().map(|name| Candidate::new(b"", name)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode as Permissions;
    use nix::unistd::mkfifo;

    use super::*;

    fn names(found: Vec<Candidate>, place: &Path) -> Vec<String> {
        let stem = place.as_os_str().len() + 1;
        let mut names: Vec<String> =
            found.into_iter().map(|it| String::from_utf8_lossy(&it.word[stem..]).into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn archives_are_told_by_their_first_bytes_or_their_name() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let magic = b"\x89LOCKBOX\r\n\x1a\n\0\0\0\0\x01\0\0\0";
        for (name, content) in [
            ("named.lbx", &b""[..]),
            ("holiday photos", magic),
            ("text", b"LOCKBOX"),
            (".hidden", magic),
            ("short", &magic[..12]),
        ] {
            fs::write(at(name), content).unwrap();
        }
        fs::create_dir(at("directory")).unwrap();
        mkfifo(&at("fifo"), Permissions::S_IRUSR).unwrap();
        for (name, to) in
            [("link", "holiday photos"), ("broken", "missing"), ("to fifo", "fifo"), ("to directory", "directory")]
        {
            symlink(to, at(name)).unwrap();
        }
        let typed = |begun: &str| at(begun).into_os_string();
        let found = names(list(&typed(""), Listed::Archives), place.path());
        assert_eq!(found, ["directory/", "holiday photos", "link", "named.lbx", "to directory/"]);
        assert_eq!(names(list(&typed(".h"), Listed::Archives), place.path()), [".hidden"]);
        assert_eq!(names(list(&typed("d"), Listed::Nothing), place.path()), ["directory/"]);
        let all = names(list(&typed(""), Listed::Files), place.path());
        assert!(all.contains(&"fifo".to_owned()) && all.contains(&"text".to_owned()) && all.len() == 9, "{all:?}");
        assert!(["missing/", "fifo/"].iter().all(|begun| list(&typed(begun), Listed::Files).is_empty()));
    }
}
