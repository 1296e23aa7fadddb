//! Small files of the built-in store next to its segments: identity, clock, decoy record and
//! reserve.

use std::io;
use std::sync::Arc;

use crate::store::barrier_group::Syncable;
use crate::store::disk::{Disk, DiskFile};
use crate::store::env::{Clock, StoreClock, random};
use crate::store::error::{Result, StoreError};
use crate::store::record::{CapsuleRef, RecordPosition, encode, head_checksum};
use crate::store::share::{Key, Share};

/// Few enough that a group of changes has few files to sync, enough that two threads seldom meet.
pub(super) const SHARDS: usize = 4;
const IDENTITY: &str = "store";
const MAGIC: &[u8; 8] = b"LBXSHS1\0";
/// The record of the decoy, as long as that of a usual capsule.
const DECOY_CAPSULE: usize = 512;
/// A file of this many bytes is given up when the disk is full, so that shares can still be
/// claimed, revoked and cleaned away.
const RESERVE_BYTES: usize = 1024 * 1024;
pub(super) const RESERVE: &str = "reserve";

/// The key of handles, made with the store.
pub(super) fn identity(disk: &dyn Disk, names: &dyn Syncable) -> Result<[u8; 16]> {
    let damaged = || StoreError::Unavailable("the file that identifies the store is damaged".into());
    if disk.list()?.iter().any(|name| name == IDENTITY) {
        let mut bytes = [0; 40];
        let read = disk.open(IDENTITY).and_then(|file| file.read_at(&mut bytes, 0))?;
        let sum = head_checksum(&bytes[..32]).to_le_bytes();
        if read != bytes.len() || &bytes[..8] != MAGIC || bytes[32..] != sum || usize::from(bytes[24]) != SHARDS {
            return Err(damaged());
        }
        return bytes[8..24].try_into().map_err(|_| damaged());
    }
    let secret: [u8; 16] = random()?;
    let mut bytes = [0; 40];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..24].copy_from_slice(&secret);
    bytes[24] = SHARDS as u8;
    let sum = head_checksum(&bytes[..32]).to_le_bytes();
    bytes[32..].copy_from_slice(&sum);
    replace(disk, IDENTITY, &bytes)?;
    names.sync()?;
    Ok(secret)
}

/// Replaces a file atomically.
fn replace(disk: &dyn Disk, name: &str, bytes: &[u8]) -> io::Result<()> {
    let fresh = format!("{name}.new");
    let file = disk.create(&fresh)?;
    file.write_at(bytes, 0)?;
    file.sync()?;
    disk.rename(&fresh, name)
}

/// Store time goes on where it was saved, or begins.
pub(super) fn resume_clock(disk: &dyn Disk, clock: &Arc<dyn Clock>) -> StoreClock {
    let saved = || {
        let mut bytes = [0; 256];
        let read = disk.open("clock").ok()?.read_at(&mut bytes, 0).ok()?;
        StoreClock::resume(Arc::clone(clock), std::str::from_utf8(&bytes[..read]).ok()?)
    };
    saved().unwrap_or_else(|| StoreClock::fresh(Arc::clone(clock)))
}

pub(super) fn save_clock(disk: &dyn Disk, clock: &StoreClock) -> Result<()> {
    match replace(disk, "clock", clock.saved().as_bytes()).map_err(StoreError::from) {
        // On a full disk the older file tells the time well enough.
        Err(StoreError::Full) => Ok(()),
        other => other,
    }
}

/// Creates the decoy record that is read for a missing share.
pub(super) fn decoy(disk: &dyn Disk, decoy: &Share) -> io::Result<Arc<dyn DiskFile>> {
    let file = disk.create("decoy")?;
    let mut bytes = Vec::new();
    let share = Share { capsule_bytes: DECOY_CAPSULE as u32, ..*decoy };
    encode(
        &Key([0; 16]),
        &share,
        CapsuleRef::Here(&[0; DECOY_CAPSULE]),
        RecordPosition { nonce: 0, at: 0 },
        &mut bytes,
    );
    file.write_at(&bytes, 0)?;
    Ok(file)
}

/// Frees the reserve. False when it was given up before.
pub(super) fn give_up_reserve(disk: &dyn Disk) -> bool {
    disk.remove(RESERVE).is_ok()
}

/// A full disk took the reserve; when there is space again it comes back.
pub(super) fn restore_reserve(disk: &dyn Disk) {
    if disk.open(RESERVE).is_ok() {
        return;
    }
    if disk.create(RESERVE).and_then(|file| file.write_at(&vec![0x5a; RESERVE_BYTES], 0)).is_err() {
        // No space yet: half a reserve would stand in the way of what it is kept for.
        let _ = disk.remove(RESERVE);
    }
}
