//! Snapshots of an archive, by their names.

use std::path::Path;

use lockbox_terminal::display;

use super::{Archive, OpenOptions};
use crate::error::{Error, Refusal, Result};
use crate::format::Timestamp;
use crate::keys::{SeenOptions, UnlockedKey};

/// A moment that the archive keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub name: Vec<u8>,
    pub time: Timestamp,
    pub inodes: u64,
    /// Bytes that nothing else shows: what removing this one alone gives back.
    pub held_bytes: u64,
}

impl Archive {
    /// As [`Archive::open_seen`], for reading what the snapshot of this name shows.
    ///
    /// # Errors
    /// `Refused` when there is none, `Invalid` unless the archive is opened for reading.
    pub fn open_snapshot(
        path: &Path,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen: &SeenOptions,
        name: &[u8],
    ) -> Result<Archive> {
        if !options.read_only {
            return Err(Error::invalid("a snapshot can only be read"));
        }
        Archive::open_at(path, key, options, seen, Some(name)).map_err(|error| named(error, name))
    }

    /// Those that the archive has, the oldest first.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let all = self.fs.snapshots()?.into_iter();
        let described = all.map(|(_, snapshot, held_bytes)| Snapshot {
            name: snapshot.name,
            time: snapshot.time,
            inodes: snapshot.inodes,
            held_bytes,
        });
        Ok(described.collect())
    }

    /// Keeps what is there now under a name; durable when it returns. It takes no space before something changes.
    ///
    /// # Errors
    /// `Refused` when another one has the name, `Invalid` for what is no name, `ReadOnly`, `NoSpace`, `Latched`.
    pub fn take_snapshot(&self, name: &[u8]) -> Result<()> {
        self.fs.take_snapshot(name).map_err(|error| named(error, name))
    }

    /// Removes the snapshots of these names, all or none, then frees in steps what only they showed; `go_on` is asked before each one. When that ends it, the
    /// snapshots are gone, and a later session or purge frees the rest.
    ///
    /// # Errors
    /// `Refused` when there is none of a name.
    pub fn remove_snapshots(&self, names: &[Vec<u8>], go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let all = self.fs.volume.readable_snapshots()?;
        let mut ids = Vec::new();
        for name in names {
            let same = all.iter().filter(|(_, snapshot)| snapshot.name == *name);
            let before = ids.len();
            ids.extend(same.map(|(id, _)| *id));
            if ids.len() == before {
                return Err(named(Error::NotFound, name));
            }
        }
        ids.sort_unstable();
        ids.dedup();
        self.fs.remove_snapshots(&ids)?;
        self.fs.finish_removals(go_on)
    }
}

/// The error with the snapshot's name where it is about that.
fn named(error: Error, name: &[u8]) -> Error {
    match error {
        Error::NotFound => Error::Refused(Refusal::NoSnapshot { name: display(name) }),
        Error::Exists => Error::Refused(Refusal::SnapshotExists { name: display(name) }),
        error => error,
    }
}
