//! Completes paths inside an archive while the keyring holds its key.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use lockbox::archive::{Archive, OpenOptions};
use lockbox::exchange::{Entries, resolve};
use lockbox::keys::{self, UnlockedKey};
use lockbox_host::remote;
use lockbox_host::secrets::Keyring;

use super::{Candidate, host};
use crate::paths::Named;
use crate::variables;

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
    let archive = host::path(archive.as_bytes());
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
    let (stem, begun) = host::split(typed);
    let Some(archive) = opened(archive) else { return Vec::new() };
    let fs = archive.file_system();
    let Some(directory) = resolve(fs, stem).ok().filter(|found| found.is_directory()) else { return Vec::new() };
    let Ok(entries) = Entries::new(fs, directory.ino) else { return Vec::new() };
    let fitting = entries.flatten().filter(|entry| entry.name.starts_with(begun));
    let found = fitting.map(|entry| match entry.attributes.is_directory() {
        true => Candidate::new(stem, [&entry.name[..], b"/"].concat()).open(),
        false => Candidate::new(stem, &entry.name),
    });
    found.collect()
}

/// Returns archives, and after a ':' paths in them. With `colon` an archive alone is not valid.
pub(super) fn whole_or_within(typed: &OsStr, colon: bool) -> Vec<Candidate> {
    if let Some(found) = behind_colon(typed) {
        return found;
    }
    let mut found = host::archives(typed);
    for archive in found.iter_mut().filter(|candidate| colon && !candidate.word.ends_with(b"/")) {
        archive.word.push(b':');
        archive.open = true;
    }
    found
}

/// Returns files of the host, or paths in an archive.
pub(super) fn either(typed: &OsStr) -> Vec<Candidate> {
    behind_colon(typed).unwrap_or_else(|| host::files(typed).into_iter().map(Candidate::open).collect())
}

fn named(word: &OsStr) -> Option<Named> {
    Named::of(host::path(word.as_bytes()).as_os_str()).ok()
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
    let archive = host::path(archive.as_bytes());
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
    let names = opened(archive).and_then(|archive| variables::names(&archive).ok()).unwrap_or_default();
    names.iter().map(|name| Candidate::new(b"", name)).collect()
}
