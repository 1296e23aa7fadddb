//! Sends what an earlier writer of this host made and the store did not take (SPOOL-3).

use std::sync::Arc;

use lockbox::{Error, Result};

use super::layout::{Incarnation, Kind, TRAILER_BYTES, Trailer};
use super::object_ref::Id;
use super::spool::Spool;
use super::store::{Outcome, Store};

/// What became of what was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resent {
    Nothing,
    /// The store has all of it.
    All,
    /// Another writer came first, or what is there is not what it followed upon.
    Refused,
}

/// Sends what was kept, before anybody comes as a writer (SPOOL-3).
///
/// # Errors
/// Those of requests: then all is kept as it is.
pub(super) fn resend(store: &Store, spool: &Spool, incarnation: &Incarnation) -> Result<Resent> {
    let objects = spool.whole(incarnation);
    if objects.is_empty() {
        spool.clear()?;
        return Ok(Resent::Nothing);
    }
    let Some(first) = first_refused(store, spool, incarnation, &objects)? else {
        spool.clear()?;
        return Ok(Resent::All);
    };
    // That its writer had gone says nothing that another one does not say by coming, and has nothing that no record before has.
    let is_last_word = |(name, id): &(String, Id)| match id {
        Id::Log(_) => Ok(trailer(&object(spool, name)?, incarnation)?.kind == Kind::Close),
        Id::Segment(_) | Id::Checkpoint(_) => Ok(true),
    };
    if objects[first..].iter().map(is_last_word).collect::<Result<Vec<bool>>>()?.into_iter().all(|is_so| is_so) {
        spool.clear()?;
        return Ok(Resent::Nothing);
    }
    spool.refuse()?;
    Ok(Resent::Refused)
}

fn object(spool: &Spool, name: &str) -> Result<Vec<u8>> {
    match spool.object(name) {
        Some(object) => object.map_err(|error| Error::io("cannot read what was kept", error)),
        None => Err(Error::damaged("what was kept is not there any more")),
    }
}

fn trailer(record: &[u8], incarnation: &Incarnation) -> Result<Trailer> {
    Trailer::decode(&record[record.len().saturating_sub(TRAILER_BYTES)..], incarnation)
}

/// Sends what follows upon what is there. Which record is the first that does not.
fn first_refused(
    store: &Store,
    spool: &Spool,
    incarnation: &Incarnation,
    objects: &[(String, Id)],
) -> Result<Option<usize>> {
    let mut newest = store.newest(incarnation)?.unwrap_or(0);
    // The record that the next one has to follow upon.
    let mut before = None;
    // Segments and checkpoints of the next record.
    let mut parts = Vec::new();
    for (at, (name, id)) in objects.iter().enumerate() {
        let Id::Log(sequence) = *id else {
            parts.push(name);
            continue;
        };
        let bytes = Arc::new(object(spool, name)?);
        let trailer = trailer(&bytes, incarnation)?;
        let there = if sequence <= newest { store.record(incarnation, sequence)? } else { None };
        let is_there = there.is_some_and(|(there, _)| there.hash == trailer.hash);
        if !is_there {
            if newest + 1 != sequence {
                return Ok(Some(at));
            }
            let follows = match before {
                Some(hash) => hash == trailer.before,
                None => store.record(incarnation, newest)?.is_some_and(|(last, _)| last.hash == trailer.before),
            };
            if !follows {
                return Ok(Some(at));
            }
            for part in &parts {
                if store.create(part, &Arc::new(object(spool, part)?))? == Outcome::Taken {
                    return Ok(Some(at));
                }
            }
            if store.create(name, &bytes)? == Outcome::Taken {
                return Ok(Some(at));
            }
            newest = sequence;
        }
        before = Some(trailer.hash);
        parts.clear();
    }
    Ok(None)
}
