//! Names of an archive's objects below its prefix.

use lockbox::{Error, Result};

use super::layout::Incarnation;
use super::object_ref::{Hash, ObjectId};
pub(super) use crate::hex::hex;

pub(super) fn describe(id: &ObjectId) -> String {
    match id {
        ObjectId::Log(sequence) => format!("record {sequence}"),
        ObjectId::Segment(hash) => format!("segment {}", hex(hash)),
        ObjectId::Checkpoint(hash) => format!("checkpoint {}", hex(hash)),
    }
}

/// Returns the name of an object below the prefix.
pub(super) fn object_path(incarnation: &Incarnation, id: &ObjectId) -> String {
    let incarnation = hex(incarnation);
    match id {
        // The newest is listed first.
        ObjectId::Log(sequence) => format!("{incarnation}/log/{:016x}", u64::MAX - sequence),
        ObjectId::Segment(hash) => format!("{incarnation}/seg/{}", hex(hash)),
        ObjectId::Checkpoint(hash) => format!("{incarnation}/map/{}", hex(hash)),
    }
}

/// Parses the name of an object; None if it is not one of the archive.
pub(super) fn parse_path(incarnation: &Incarnation, name: &str) -> Option<ObjectId> {
    let (part, name) = name.strip_prefix(&hex(incarnation))?.strip_prefix('/')?.split_once('/')?;
    match part {
        "log" if name.len() == 16 => u64::from_str_radix(name, 16).ok().map(|number| ObjectId::Log(u64::MAX - number)),
        "seg" => parse_hash(name).map(ObjectId::Segment),
        "map" => parse_hash(name).map(ObjectId::Checkpoint),
        _ => None,
    }
}

/// Parses the hexadecimal digits of a hash.
pub(super) fn parse_hash(digits: &str) -> Option<Hash> {
    let mut hash = Hash::default();
    if digits.len() != 2 * hash.len() {
        return None;
    }
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(hash)
}

/// Returns a unique, unguessable id.
pub(crate) fn random_bytes() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Error::io("no random numbers", std::io::Error::other(error)))?;
    Ok(bytes)
}
