//! Object store interface (create, get, list and remove below a prefix), and the names of an
//! archive's objects.

use std::collections::HashSet;
use std::io::Read;
use std::ops::Range;

use lockbox::{Error, Result};
use ureq::Body;
use ureq::http::{Response, StatusCode, header};

use super::layout::Incarnation;
use super::map::{Hash, ObjectId};
use crate::range_source::{Metered, RemoteError, RemoteResult};
use crate::{hex, http};

/// Maximum names in one list response.
pub(crate) const MAX_LIST_ENTRIES: usize = 1000;
/// Maximum objects of a batch removal: the limit of S3.
pub(crate) const MAX_BATCH: usize = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectRange {
    /// Whole object with a maximum length.
    All(u64),
    /// Offset and length.
    Range(u64, u64),
    /// Last bytes, or all of a shorter object.
    Last(u64),
}

impl ObjectRange {
    /// Returns the part of an object that is in memory. Errors: as of [`ObjectStore::get`].
    pub(crate) fn slice(self, object: &[u8]) -> RemoteResult<Vec<u8>> {
        let range = self.of_length(object.len() as u64)?;
        Ok(object[range.start as usize..range.end as usize].to_vec())
    }

    /// Returns the value of the header `Range`, and the maximum length of the part.
    pub(super) fn header(self) -> (String, u64) {
        match self {
            ObjectRange::All(most) => (format!("bytes=0-{most}"), most),
            ObjectRange::Range(offset, length) => (format!("bytes={offset}-{}", offset + length - 1), length),
            ObjectRange::Last(most) => (format!("bytes=-{most}"), most),
        }
    }

    /// Returns the offsets of the part in an object of this length.
    pub(super) fn of_length(self, length: u64) -> RemoteResult<Range<u64>> {
        match self {
            ObjectRange::All(most) if length > most => {
                Err(RemoteError::Unsupported("an object there is longer than it can be".into()))
            }
            ObjectRange::All(_) => Ok(0..length),
            ObjectRange::Range(offset, count) => Ok(offset.min(length)..offset.saturating_add(count).min(length)),
            ObjectRange::Last(most) => Ok(length.saturating_sub(most)..length),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedObject {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Creation time by the store's clock in seconds since 1970, if the store sends it.
    pub(crate) time: Option<u64>,
}

/// Callback for unreadable directories; an error ends the list.
pub(crate) type UnreadableDir<'a> = dyn FnMut(&str, RemoteError) -> RemoteResult<()> + 'a;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectCreation {
    /// The object is durable; with the store's time in seconds since 1970, if it is sent.
    Created(Option<u64>),
    /// The name exists. It may come from an earlier attempt of the same request, so this alone does
    /// not decide.
    Exists,
}

/// Objects below one prefix of a store. They are never overwritten: each is created once and
/// removed once.
///
/// # Contract
/// OBJECTS-1  Of any number of creates of one name, before or after a removal of it is requested,
///     at most one succeeds while the object exists, and the object is complete from then on.
/// OBJECTS-2  A created object is found by every later `get` and `list` of any process.
/// OBJECTS-3  After `RemoteError::Transient` nothing is known: the request may have been executed,
///     may still be, or not.
pub(crate) trait ObjectStore: Send + Sync {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation>;

    /// Returns whether a denial may mean that the object does not exist.
    fn can_hide_missing(&self) -> bool {
        false
    }

    /// Errors: `NotFound` if the name does not exist, `Unsupported` if the object is longer than
    /// `All` permits. Of a shorter object, returns the bytes that exist.
    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>>;

    /// Lists the first objects in byte order with names that begin with `prefix` and sort after
    /// `after`, at most [`MAX_LIST_ENTRIES`] and `most`.
    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>>;

    /// Like `list`, but passes unreadable directories to `on_unreadable`; their objects are
    /// missing. Only for displays: never for a caller that removes orphans or treats missing
    /// objects as deleted.
    fn list_tolerant(
        &self,
        prefix: &str,
        after: &str,
        most: usize,
        _on_unreadable: &mut UnreadableDir<'_>,
    ) -> RemoteResult<Vec<ListedObject>> {
        self.list(prefix, after, most)
    }

    /// Removes the temporary files of interrupted creates in the directory `above`; a concurrent
    /// create there may fail.
    fn sweep(&self, _above: &str) -> RemoteResult<()> {
        Ok(())
    }

    /// Removes an object; succeeds if it does not exist.
    fn remove(&self, name: &str) -> RemoteResult<()>;

    /// Removes objects, at most [`MAX_BATCH`], with one request.
    fn remove_batch(&self, _names: &[String]) -> RemoteResult<BatchReply> {
        Ok(BatchReply::Unsupported)
    }
}

/// Reply to a batch removal. Some of the objects may be removed in every case.
pub(crate) enum BatchReply {
    Done(BatchRemoval),
    /// The store rejects this request: it may lack batches, or a hop may have altered the body.
    Rejected,
    Unsupported,
}

#[derive(Default)]
pub(crate) struct BatchRemoval {
    /// Names that the store confirmed as removed.
    pub(crate) removed: HashSet<String>,
    /// First error among the others.
    pub(crate) error: Option<RemoteError>,
}

impl ObjectStore for Metered<dyn ObjectStore> {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.metrics.count_write(self.inner.create(name, bytes))
    }

    fn can_hide_missing(&self) -> bool {
        self.inner.can_hide_missing()
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.metrics.count_read(self.inner.get(name, part), Vec::len)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.metrics.count_list(self.inner.list(prefix, after, most))
    }

    fn sweep(&self, above: &str) -> RemoteResult<()> {
        self.inner.sweep(above)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.metrics.record_outcome(self.inner.remove(name))
    }

    fn remove_batch(&self, names: &[String]) -> RemoteResult<BatchReply> {
        self.metrics.record_outcome(self.inner.remove_batch(names))
    }
}

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

/// Returns the object of a name; `None` for any name that [`object_path`] does not return, such as
/// one with capitals or a sign.
pub(super) fn parse_path(incarnation: &Incarnation, name: &str) -> Option<ObjectId> {
    let (part, rest) = name.strip_prefix(&hex(incarnation))?.strip_prefix('/')?.split_once('/')?;
    let id = match part {
        "log" => ObjectId::Log(u64::MAX - u64::from_str_radix(rest, 16).ok()?),
        "seg" => ObjectId::Segment(parse_hash(rest)?),
        "map" => ObjectId::Checkpoint(parse_hash(rest)?),
        _ => return None,
    };
    (object_path(incarnation, &id) == name).then_some(id)
}

fn parse_hash(digits: &str) -> Option<Hash> {
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

/// Maximum length of a list response in bytes.
pub(super) const MAX_LIST: u64 = 4 << 20;
/// Maximum pages of one list.
pub(super) const MAX_PAGES: usize = 100;

/// Reads a response with a part of an object; also returns the object's length if the response has
/// it.
pub(super) fn read_part(
    response: Response<Body>,
    part: ObjectRange,
    most: u64,
) -> RemoteResult<(Vec<u8>, Option<u64>)> {
    let wrong = || Err(RemoteError::Unsupported("its response is not for the requested range".into()));
    let declared = http::text(response.headers(), header::CONTENT_RANGE).and_then(http::content_range);
    match (response.status(), part, declared) {
        (StatusCode::PARTIAL_CONTENT, ObjectRange::Range(offset, length), Some((first, last, _))) => {
            // A shorter answer is a shorter object.
            if first != offset || last >= offset + length {
                return wrong();
            }
        }
        (StatusCode::PARTIAL_CONTENT, ObjectRange::All(_), Some((0, last, length))) if last + 1 == length => {}
        (StatusCode::PARTIAL_CONTENT, ObjectRange::Last(_), Some((_, last, length))) if last + 1 == length => {}
        (StatusCode::PARTIAL_CONTENT, ..) => return wrong(),
        // The whole object, no longer than requested.
        (StatusCode::OK, ObjectRange::All(_) | ObjectRange::Last(_), _) => {}
        (StatusCode::OK, ObjectRange::Range(0, _), _) => {}
        (StatusCode::OK, ..) => {
            return Err(RemoteError::Unsupported("it does not serve parts of objects (ranges)".into()));
        }
        // The object ends before the range begins.
        (StatusCode::RANGE_NOT_SATISFIABLE, ..) => return Ok((Vec::new(), None)),
        (status, ..) => return Err(RemoteError::Unsupported(format!("it responds with status {}", status.as_u16()))),
    }
    // Where an answer says no length of its own, its end looks as the end of its connection does.
    let promised = declared.filter(|_| response.status() == StatusCode::PARTIAL_CONTENT);
    let promised = promised.map(|(first, last, _)| (last + 1).saturating_sub(first));
    read_body(response, most).and_then(|bytes| match promised {
        Some(promised) if promised > bytes.len() as u64 => Err(cut_off()),
        Some(promised) if promised < bytes.len() as u64 => {
            Err(RemoteError::Unsupported("it sends more bytes than were requested".into()))
        }
        _ => Ok((bytes, declared.map(|(_, _, length)| length))),
    })
}

fn cut_off() -> RemoteError {
    RemoteError::Transient("its response was truncated".into())
}

/// Reads a whole body of bounded length.
pub(super) fn read_body(response: Response<Body>, most: u64) -> RemoteResult<Vec<u8>> {
    let length = http::text(response.headers(), header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    let mut bytes = Vec::new();
    let mut reader = response.into_body().into_reader().take(most + 1);
    reader.read_to_end(&mut bytes).map_err(|error| RemoteError::Transient(http::printable(&error.to_string())))?;
    if bytes.len() as u64 > most {
        return Err(RemoteError::Unsupported("it sends more bytes than were requested".into()));
    }
    match length {
        Some(length) if length != bytes.len() as u64 => Err(cut_off()),
        _ => Ok(bytes),
    }
}

pub(super) fn store_time(response: &Response<Body>) -> Option<u64> {
    http::text(response.headers(), header::DATE).and_then(http::date)
}

pub(super) fn read_list(response: Response<Body>) -> RemoteResult<String> {
    String::from_utf8(read_body(response, MAX_LIST)?).map_err(|_| invalid_list())
}

pub(super) fn invalid_list() -> RemoteError {
    RemoteError::Unsupported("its response is not a list".into())
}
