//! Spool replay: sends the spooled objects of an earlier writer of this host (SPOOL-3).

use std::sync::Arc;

use lockbox::{Error, Result};

use super::layout::{Incarnation, RecordKind, TRAILER_BYTES, Trailer};
use super::object_ref::ObjectId;
use super::spool::UploadSpool;
use super::store::{BucketStore, CreateOutcome};

/// Result of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayOutcome {
    Nothing,
    /// The store has all objects.
    All,
    /// Another writer was first, or the store's newest record is not the predecessor.
    Refused,
}

/// Replays the spool before a writer acquires the archive (SPOOL-3).
///
/// # Errors
/// Errors of requests: then the spool is unchanged.
pub(super) fn replay(store: &BucketStore, spool: &UploadSpool, incarnation: &Incarnation) -> Result<ReplayOutcome> {
    let objects = spool.replayable_objects(incarnation);
    if objects.is_empty() {
        spool.clear()?;
        return Ok(ReplayOutcome::Nothing);
    }
    let Some(first) = first_refused(store, spool, incarnation, &objects)? else {
        spool.clear()?;
        return Ok(ReplayOutcome::All);
    };
    // That its writer had gone says nothing that another one does not say by coming, and has
    // nothing that no record before has.
    let is_last_word = |(name, id): &(String, ObjectId)| match id {
        ObjectId::Log(_) => Ok(decode_trailer(&read_object(spool, name)?, incarnation)?.kind == RecordKind::Close),
        ObjectId::Segment(_) | ObjectId::Checkpoint(_) => Ok(true),
    };
    if objects[first..].iter().map(is_last_word).collect::<Result<Vec<bool>>>()?.into_iter().all(|is_so| is_so) {
        spool.clear()?;
        return Ok(ReplayOutcome::Nothing);
    }
    spool.mark_refused()?;
    Ok(ReplayOutcome::Refused)
}

fn read_object(spool: &UploadSpool, name: &str) -> Result<Vec<u8>> {
    match spool.object(name) {
        Some(object) => object.map_err(|error| Error::io("cannot read what was kept", error)),
        None => Err(Error::damaged("what was kept is not there any more")),
    }
}

fn decode_trailer(record: &[u8], incarnation: &Incarnation) -> Result<Trailer> {
    Trailer::decode(&record[record.len().saturating_sub(TRAILER_BYTES)..], incarnation)
}

/// Sends the objects that follow the store's newest record. Returns the index of the first refused
/// one.
fn first_refused(
    store: &BucketStore,
    spool: &UploadSpool,
    incarnation: &Incarnation,
    objects: &[(String, ObjectId)],
) -> Result<Option<usize>> {
    let mut newest = store.newest_sequence(incarnation)?.unwrap_or(0);
    // The record that the next one has to follow upon.
    let mut before = None;
    // Segments and checkpoints of the next record.
    let mut parts = Vec::new();
    for (at, (name, id)) in objects.iter().enumerate() {
        let ObjectId::Log(sequence) = *id else {
            parts.push(name);
            continue;
        };
        let bytes = Arc::new(read_object(spool, name)?);
        let trailer = decode_trailer(&bytes, incarnation)?;
        let there = if sequence <= newest { store.read_record(incarnation, sequence)? } else { None };
        let is_there = there.is_some_and(|(there, _)| there.hash == trailer.hash);
        if !is_there {
            if newest + 1 != sequence {
                return Ok(Some(at));
            }
            let follows = match before {
                Some(hash) => hash == trailer.previous,
                None => store.read_record(incarnation, newest)?.is_some_and(|(last, _)| last.hash == trailer.previous),
            };
            if !follows {
                return Ok(Some(at));
            }
            for part in &parts {
                if store.create(part, &Arc::new(read_object(spool, part)?))? == CreateOutcome::Conflict {
                    return Ok(Some(at));
                }
            }
            if store.create(name, &bytes)? == CreateOutcome::Conflict {
                return Ok(Some(at));
            }
            newest = sequence;
        }
        before = Some(trailer.hash);
        parts.clear();
    }
    Ok(None)
}
