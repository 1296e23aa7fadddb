//! Answers what is asked about the snapshots of a living mount.
//!
//! # Order of a creation
//! 1  What programs wrote before they asked is with us: the kernel hands over what it caches ([`Place::collect`]).
//! 2  What is accepted is what the snapshot keeps, staged or not ([`Moments::create`]); the answer comes when it is durable.
//!
//! So a write(2) that returned before the question is in the snapshot, whoever made it and whether the file is still open.

use lockbox::Error;
use lockbox::archive::{Archive, Moments, Snapshot};
use lockbox::control::{Among, Listed, Name, PAGE, Response, Why};
use lockbox_terminal::display;

use crate::ending::{Place, Slot};
use crate::kernel_cache::KernelCache;
use crate::options::Options;

/// The moments of the archive while it is open, without the slot, which the end of the mount takes.
pub(crate) fn of(slot: &Slot) -> Option<Moments> {
    slot.lock().as_ref().map(Archive::moments)
}

/// Returns when what programs have written is with us. Without a writer the kernel has nothing (KERNEL-3).
///
/// # Errors
/// When the process that flushes the mount is gone.
pub(crate) fn collect(place: &Place, cache: &KernelCache) -> lockbox::Result<()> {
    let collected = if cache.any_writer() { place.collect() } else { Ok(()) };
    collected.map_err(|error| Error::io("the process that flushes the mount does not answer", error))
}

/// Why this mount changes no snapshot.
pub(crate) fn read_only(options: &Options) -> Option<Response> {
    let message = match &options.snapshot {
        Some(name) => format!(
            "snapshot '{}' is mounted here, for reading: the archive's snapshots cannot be changed",
            display(name.as_bytes())
        ),
        None if options.read_only => "the archive is mounted read-only: its snapshots cannot be changed".to_owned(),
        None => return None,
    };
    Some(Response::Refused { why: Why::Other, message })
}

/// The answer to a request that is done, or was not.
pub(crate) fn done(result: lockbox::Result<()>) -> Response {
    match result {
        Ok(()) => Response::Done,
        Err(error) => refused(&error),
    }
}

pub(crate) fn refused(error: &Error) -> Response {
    let why = match error {
        Error::NoSpace(_) => Why::NoSpace,
        Error::Damaged(_) => Why::Damaged,
        _ => Why::Other,
    };
    let message = match error {
        // The detail is a sentence of its own.
        Error::Invalid(detail) => detail.clone(),
        error => crate::exit::Failure::sentence(error),
    };
    Response::Refused { why, message }
}

/// A page of them.
pub(crate) fn list(moments: &Moments, after: u64, held: bool) -> lockbox::Result<Response> {
    let mut all = moments.list()?;
    all.retain(|snapshot| snapshot.id > after);
    let more = all.len() > PAGE;
    all.truncate(PAGE);
    let describe = |snapshot: Snapshot| {
        let held_bytes = held.then(|| moments.held_bytes(snapshot.id)).transpose()?;
        let Snapshot { id, name, time, inodes, .. } = snapshot;
        Ok(Listed { id, name: Name(name), seconds: time.seconds, nanos: time.nanos, inodes, held_bytes })
    };
    Ok(Response::Snapshots { snapshots: all.into_iter().map(describe).collect::<lockbox::Result<_>>()?, more })
}

pub(crate) fn remove(moments: &Moments, ids: &[u64], among: Option<Among>) -> Response {
    let mut changed = false;
    let removed = moments.remove(&mut |all| {
        changed = among.is_some_and(|among| !among.is_whole(all.iter().map(|snapshot| snapshot.id)));
        Ok(if changed { Vec::new() } else { ids.to_vec() })
    });
    match removed {
        Ok(()) if changed => Response::Refused {
            why: Why::Changed,
            message: "another program removed snapshots at the same time; nothing was removed".into(),
        },
        removed => done(removed),
    }
}
