//! Sends what an earlier writer of this host made and the store did not take (SPOOL-3).

use std::sync::Arc;

use lockbox::{Error, Result};

use super::layout::{Incarnation, TRAILER_BYTES, Trailer};
use super::place::Id;
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
    if follow_upon(store, spool, incarnation, &objects)? {
        spool.clear()?;
        return Ok(Resent::All);
    }
    spool.refuse()?;
    Ok(Resent::Refused)
}

fn follow_upon(store: &Store, spool: &Spool, incarnation: &Incarnation, objects: &[(String, Id)]) -> Result<bool> {
    let object = |name: &str| match spool.object(name) {
        Some(object) => object.map_err(|error| Error::io("cannot read what was kept", error)),
        None => Err(Error::damaged("what was kept is not there any more")),
    };
    let mut newest = store.newest(incarnation)?.unwrap_or(0);
    // The record that the next one has to follow upon.
    let mut before = None;
    // Segments and checkpoints of the next record.
    let mut parts = Vec::new();
    for (name, id) in objects {
        let Id::Log(sequence) = *id else {
            parts.push(name);
            continue;
        };
        let bytes = Arc::new(object(name)?);
        let trailer = Trailer::decode(&bytes[bytes.len().saturating_sub(TRAILER_BYTES)..], incarnation)?;
        let there = if sequence <= newest { store.record(incarnation, sequence)? } else { None };
        let is_there = there.is_some_and(|(there, _)| there.hash == trailer.hash);
        if !is_there {
            if newest + 1 != sequence {
                return Ok(false);
            }
            let follows = match before {
                Some(hash) => hash == trailer.before,
                None => store.record(incarnation, newest)?.is_some_and(|(last, _)| last.hash == trailer.before),
            };
            if !follows {
                return Ok(false);
            }
            for part in &parts {
                if store.create(part, &Arc::new(object(part)?))? == Outcome::Taken {
                    return Ok(false);
                }
            }
            if store.create(name, &bytes)? == Outcome::Taken {
                return Ok(false);
            }
            newest = sequence;
        }
        before = Some(trailer.hash);
        parts.clear();
    }
    Ok(true)
}
