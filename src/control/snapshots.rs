//! Snapshot messages, and the client's paging through the list of snapshots.
//!
//! # Bounds
//! A response is one line of at most `MAX_LINE`, so a list is sent in pages of [`PAGE`]: the client
//! requests the next page with the last id that it received. Ids rise and are never reused, so
//! nothing is listed twice although snapshots are created and removed meanwhile. A client requires
//! rising ids, reads at most [`MOST`] snapshots, and allows another user's daemon [`LIST_TIMEOUT`]
//! for all pages together.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use super::client::{response_timeout, send_request_within};
use super::{Request, Response, SnapshotName};
use crate::error::{Error, Result, Timestamp};

/// Snapshots per response: with names of 255 bytes they are 45 KiB.
pub const PAGE: usize = 64;
/// Maximum number of snapshots that a client reads: several for each hour of a year, and 20 MiB.
const MOST: usize = 65_536;
/// Maximum ranges of ids in a request: with 20 digits for each end they fit into one line.
const MOST_RANGES: usize = 1400;
/// Time for another user's daemon to list all snapshots.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// Snapshot as a daemon lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListedSnapshot {
    pub id: u64,
    pub name: SnapshotName,
    pub seconds: i64,
    pub nanos: u32,
    pub inodes: u64,
    /// `None` if not requested.
    pub held_bytes: Option<u64>,
}

impl ListedSnapshot {
    pub fn time(&self) -> Timestamp {
        Timestamp { seconds: self.seconds, nanos: self.nanos.min(999_999_999) }
    }
}

/// Fingerprint of the set of snapshots that a client chose from: the highest id and the number of
/// snapshots up to it. Ids are never reused, so an equal number means that none was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedSnapshots {
    pub up_to: u64,
    pub count: u64,
}

impl ExpectedSnapshots {
    /// Returns the fingerprint of ascending ids.
    pub fn of(ids: impl Iterator<Item = u64>) -> ExpectedSnapshots {
        ids.fold(ExpectedSnapshots { up_to: 0, count: 0 }, |among, id| ExpectedSnapshots {
            up_to: id,
            count: among.count + 1,
        })
    }

    /// Returns whether none of the set is missing among `ids`.
    pub fn is_whole(&self, ids: impl Iterator<Item = u64>) -> bool {
        ids.filter(|id| *id <= self.up_to).count() as u64 == self.count
    }
}

/// Returns all snapshots of a mounted archive, oldest first; with `held`, including the bytes that
/// each one holds.
///
/// # Errors
/// As [`super::send_request`]; `Invalid` when the daemon is too old for the request, refuses it, or
/// exceeds the bounds.
pub fn list_snapshots(socket: &Path, owner: u32, held: bool) -> Result<Vec<ListedSnapshot>> {
    let until = (owner != geteuid().as_raw()).then(|| Instant::now() + LIST_TIMEOUT);
    let mut all: Vec<ListedSnapshot> = Vec::new();
    loop {
        let after = all.last().map_or(0, |last| last.id);
        let remaining =
            until.map(|until| until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        match send_request_within(socket, owner, &Request::SnapshotList { after, held }, remaining)? {
            Response::Snapshots { snapshots, more } => {
                if !append_page(&mut all, snapshots, more) {
                    return Err(Error::invalid("the daemon's list of snapshots has no end"));
                }
                if !more {
                    return Ok(all);
                }
            }
            other => return Err(Error::invalid(other.failure_message())),
        }
    }
}

/// Returns the bytes that removing the snapshots in these [`id_ranges`] would free. The time limit
/// is `limit`, or that of [`super::send_request`].
///
/// # Errors
/// As [`super::send_request`]; `Invalid` when the daemon is too old for the request or refuses it,
/// and when the set does not fit into a request.
pub fn query_held_bytes(socket: &Path, owner: u32, ranges: Vec<(u64, u64)>, limit: Option<Duration>) -> Result<u64> {
    if ranges.len() > MOST_RANGES {
        return Err(Error::invalid(format!(
            "a mounted archive tells what at most {MOST_RANGES} groups of neighbouring snapshots hold together"
        )));
    }
    let request = Request::SnapshotHeld { ranges };
    let limit = limit.or_else(|| response_timeout(owner, &request));
    match send_request_within(socket, owner, &request, limit)? {
        Response::Held { bytes } => Ok(bytes),
        other => Err(Error::invalid(other.failure_message())),
    }
}

/// Returns a set of ids as inclusive ranges. Neighbours among the ascending `all` are merged, since
/// no id between them can ever exist again.
pub fn id_ranges(all: impl Iterator<Item = u64>, is_in: impl Fn(u64) -> bool) -> Vec<(u64, u64)> {
    let (mut ranges, mut goes_on) = (Vec::<(u64, u64)>::new(), false);
    for id in all {
        let was = std::mem::replace(&mut goes_on, is_in(id));
        match ranges.last_mut() {
            Some(last) if goes_on && was => last.1 = id,
            _ if goes_on => ranges.push((id, id)),
            _ => {}
        }
    }
    ranges
}

/// Appends a page; returns whether it is valid as the next one.
fn append_page(all: &mut Vec<ListedSnapshot>, page: Vec<ListedSnapshot>, more: bool) -> bool {
    let mut last = all.last().map_or(0, |last| last.id);
    let rises = page.iter().all(|one| std::mem::replace(&mut last, one.id) < one.id);
    let follows = rises && page.len() <= PAGE && all.len() + page.len() <= MOST && (!more || !page.is_empty());
    all.extend(page);
    follows
}

#[cfg(test)]
mod tests {
    use super::super::names::MAX_NAME;
    use super::*;

    #[test]
    fn every_name_goes_and_comes() {
        let all: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
        for name in [&b"monday"[..], b"\xff\n\"\\", "für dich".as_bytes(), &all, &[0xfe; 255]] {
            let line = serde_json::to_string(&SnapshotName(name.to_vec())).unwrap();
            assert!(line.len() <= 2 * name.len() + 2);
            assert_eq!(serde_json::from_str::<SnapshotName>(&line).unwrap().0, name);
        }
        for line in ["\"a\"", "\"zz\"", "\"é\"", "7", &format!("\"{}\"", "00".repeat(256))] {
            assert!(serde_json::from_str::<SnapshotName>(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_longest_page_fits_into_a_line() {
        let one = ListedSnapshot {
            id: u64::MAX,
            name: SnapshotName(vec![0xff; MAX_NAME]),
            seconds: i64::MIN,
            nanos: u32::MAX,
            inodes: u64::MAX,
            held_bytes: Some(u64::MAX),
        };
        let page = Response::Snapshots { snapshots: vec![one; PAGE], more: true };
        assert!((serde_json::to_vec(&page).unwrap().len() as u64) < super::super::MAX_LINE);
    }

    #[test]
    fn pages_that_do_not_rise_or_do_not_end_are_refused() {
        let page =
            |ids: &[u64]| ids.iter().map(|&id| ListedSnapshot { id, ..ListedSnapshot::default() }).collect::<Vec<_>>();
        let mut all = Vec::new();
        assert!(append_page(&mut all, page(&[1, 4]), true) && append_page(&mut all, page(&[5]), true));
        assert!(append_page(&mut all, page(&[]), false));
        assert!(!append_page(&mut all.clone(), page(&[]), true), "for ever");
        assert!(
            !append_page(&mut all.clone(), page(&[5]), true) && !append_page(&mut all.clone(), page(&[7, 6]), true)
        );
        assert!(!append_page(&mut all.clone(), page(&(6..80).collect::<Vec<_>>()), true), "too long a page");
        let mut full = page(&(1..=MOST as u64).collect::<Vec<_>>());
        assert!(!append_page(&mut full, page(&[1 << 20]), true), "too many");
    }

    #[test]
    fn a_set_is_told_in_ranges_that_contain_nothing_else_and_fit_into_a_line() {
        let all = [2, 5, 9, 10, 40, 41];
        let told = |set: &[u64]| id_ranges(all.into_iter(), |id| set.contains(&id));
        assert_eq!(told(&[]), []);
        assert_eq!(told(&all), [(2, 41)]);
        assert_eq!(told(&[2, 9, 10, 41]), [(2, 2), (9, 10), (41, 41)]);
        for set in 0..64u32 {
            let is_in = |at: usize| set >> at & 1 == 1;
            let set: Vec<u64> = all.iter().enumerate().filter(|(at, _)| is_in(*at)).map(|(_, id)| *id).collect();
            let told = told(&set);
            let within = all.into_iter().filter(|id| told.iter().any(|(first, last)| (first..=last).contains(&id)));
            assert_eq!(within.collect::<Vec<_>>(), set);
        }
        let longest = Request::SnapshotHeld { ranges: vec![(u64::MAX, u64::MAX); MOST_RANGES] };
        assert!((serde_json::to_vec(&longest).unwrap().len() as u64) < super::super::MAX_LINE);
    }

    #[test]
    fn what_a_choice_was_made_among_is_whole_while_none_of_it_is_gone() {
        let among = ExpectedSnapshots::of([2, 5, 9].into_iter());
        assert!(among.is_whole([2, 5, 9].into_iter()) && among.is_whole([2, 5, 9, 10].into_iter()));
        assert!(!among.is_whole([2, 9].into_iter()) && !among.is_whole([2, 5, 10].into_iter()));
        assert!(ExpectedSnapshots::of(std::iter::empty()).is_whole([1].into_iter()));
    }
}
