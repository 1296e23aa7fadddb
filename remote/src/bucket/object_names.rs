//! The names of an archive's objects below its prefix.

use lockbox::{Error, Result};

use super::layout::Incarnation;
use super::object_ref::{Hash, Id};
pub(super) use crate::hex::hex;

pub(super) fn what(id: &Id) -> String {
    match id {
        Id::Log(sequence) => format!("record {sequence}"),
        Id::Segment(hash) => format!("segment {}", hex(hash)),
        Id::Checkpoint(hash) => format!("checkpoint {}", hex(hash)),
    }
}

/// The name of an object below the prefix.
pub(super) fn path(incarnation: &Incarnation, id: &Id) -> String {
    let incarnation = hex(incarnation);
    match id {
        // The newest is listed first.
        Id::Log(sequence) => format!("{incarnation}/log/{:016x}", u64::MAX - sequence),
        Id::Segment(hash) => format!("{incarnation}/seg/{}", hex(hash)),
        Id::Checkpoint(hash) => format!("{incarnation}/map/{}", hex(hash)),
    }
}

/// What an object of this name is named by; None for what is no object of the archive.
pub(super) fn id_of(incarnation: &Incarnation, name: &str) -> Option<Id> {
    let (part, name) = name.strip_prefix(&hex(incarnation))?.strip_prefix('/')?.split_once('/')?;
    match part {
        "log" if name.len() == 16 => u64::from_str_radix(name, 16).ok().map(|number| Id::Log(u64::MAX - number)),
        "seg" => unhex(name).map(Id::Segment),
        "map" => unhex(name).map(Id::Checkpoint),
        _ => None,
    }
}

/// The hash that these digits are.
pub(super) fn unhex(digits: &str) -> Option<Hash> {
    let mut hash = Hash::default();
    if digits.len() != 2 * hash.len() {
        return None;
    }
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(hash)
}

/// What nobody can guess, and nobody has made before.
pub(super) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Error::io("no random numbers", std::io::Error::other(error)))?;
    Ok(bytes)
}
