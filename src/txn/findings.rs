//! Findings of `check`: a sentence for people, separate fields for programs. Among them the
//! comparison of a commit record's counters with its trees (specification 9.1 rules 13 to 16).
//!
//! A number that is to be given next is above all that were given. One that is too low makes the
//! next change replace a record that is there: a new file takes over an inode with all that it has,
//! a snapshot inherits the dead list of another one. A snapshot that the record does not name, or
//! names with a lower generation, loses its pages to the next change. So a writer compares before
//! it writes anything. Keys ascend, so the last record of each tree tells; a damaged part proves
//! nothing, and a writer that changes it meets the damage.

use std::fmt;

use super::operation::Logged;
use super::state::{Counters, Trees, is_being_removed, snapshots_of};
use crate::btree::{NodeStore, Tree};
use crate::error::{Error, Result};
use crate::format::record::CommitRecord;
use crate::format::{Generation, Ino, Key, Pointer, TreeId, kind};

/// Kind of a finding. Programs use these names: names are added, never changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FindingKind {
    /// Bytes of file data cannot be read.
    DataLost,
    /// A page of the tree of files cannot be read, and with it names, attributes and places of
    /// data.
    RecordsLost,
    /// A page of another tree cannot be read: counts, snapshots, history, space map.
    IndexLost,
    /// A record is malformed, or of an unknown kind.
    Record,
    /// Names, links and parents of directories disagree.
    Name,
    /// The two records of a directory's entry disagree, or with the directory.
    Entry,
    /// An inode disagrees with its own records.
    Inode,
    /// An extended attribute or access control list.
    Attribute,
    /// A place of file data that no writer would have written.
    Extent,
    /// The space map disagrees with the pages that there are.
    Space,
    /// A page's recorded reference count is wrong.
    Count,
    /// A kept version of the tree.
    Snapshot,
    /// A number of the commit record.
    Counter,
    /// One of the two copies of the header is lost, altered or older.
    Header,
    /// The file has more than the archive.
    Length,
    /// An entry of the log, or a commit that entries extend.
    Log,
    /// A page that the newest commit brought in does not open.
    Commit,
    /// An object of the store that has the archive is missing, or has other bytes than it was made
    /// with.
    Object,
    /// More findings exist than are reported.
    More,
}

impl FindingKind {
    /// Returns the name for programs.
    pub fn name(self) -> &'static str {
        match self {
            FindingKind::DataLost => "data-lost",
            FindingKind::RecordsLost => "records-lost",
            FindingKind::IndexLost => "index-lost",
            FindingKind::Record => "record",
            FindingKind::Name => "name",
            FindingKind::Entry => "entry",
            FindingKind::Inode => "inode",
            FindingKind::Attribute => "attribute",
            FindingKind::Extent => "extent",
            FindingKind::Space => "space",
            FindingKind::Count => "count",
            FindingKind::Snapshot => "snapshot",
            FindingKind::Counter => "counter",
            FindingKind::Header => "header",
            FindingKind::Length => "length",
            FindingKind::Log => "log",
            FindingKind::Commit => "commit",
            FindingKind::Object => "object",
            FindingKind::More => "more",
        }
    }
}

/// Consequence of a finding for the archive's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Something that was stored cannot be read any more.
    Lost,
    /// Records contradict each other: reads may be incomplete, and a change may do harm.
    Wrong,
    /// Nothing that was stored is concerned: it costs space or a second copy, or is a wrong number.
    Minor,
    /// No fault: a crash leaves it so, and the next writable opening puts it in order.
    Note,
}

impl Severity {
    /// Returns the name for programs.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Lost => "lost",
            Severity::Wrong => "wrong",
            Severity::Minor => "minor",
            Severity::Note => "note",
        }
    }
}

/// Data that cannot be read any more.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lost {
    /// A byte range of the finding's file.
    Bytes { offset: u64, length: u64 },
    /// Something of each of these inodes, the last one included.
    Inodes(Ino, Ino),
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    pub severity: Severity,
    pub inode: Option<Ino>,
    /// Path of the inode as far as the directories give it: from the root, or from `...` on when
    /// the way to the root is lost.
    pub path: Option<Vec<u8>>,
    /// First block of the page.
    pub block: Option<u64>,
    /// Commit that wrote the page.
    pub generation: Option<Generation>,
    pub lost: Option<Lost>,
    /// The sentence, without inode and path.
    pub detail: String,
}

impl Finding {
    pub fn new(kind: FindingKind, severity: Severity, detail: impl Into<String>) -> Finding {
        let detail = detail.into();
        Finding { kind, severity, inode: None, path: None, block: None, generation: None, lost: None, detail }
    }

    pub(crate) fn of_inode(self, ino: Ino) -> Finding {
        Finding { inode: Some(ino), ..self }
    }

    pub(crate) fn at_block(self, block: u64) -> Finding {
        Finding { block: Some(block), ..self }
    }

    pub(crate) fn on_page(self, page: &Pointer) -> Finding {
        Finding { block: Some(page.run.address), generation: Some(page.generation), ..self }
    }

    pub(crate) fn losing(self, lost: Lost) -> Finding {
        Finding { lost: Some(lost), ..self }
    }

    /// Returns the finding for an unreadable node of a tree other than the tree of files.
    pub(crate) fn of_index(tree: TreeId, page: &Pointer, error: &crate::Error) -> Finding {
        let name = match tree {
            TreeId::Live => "files",
            TreeId::References => "counts",
            TreeId::Snapshots => "snapshots",
            TreeId::History => "the history",
            TreeId::Space => "the space map",
        };
        let detail = format!("a page of {name} cannot be read: {error}");
        Finding::new(FindingKind::IndexLost, Severity::Wrong, detail).on_page(page)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.inode, &self.path) {
            (Some(ino), Some(path)) => {
                write!(f, "inode {} ({}): ", ino.0, String::from_utf8_lossy(path).escape_debug())?;
            }
            (Some(ino), None) => write!(f, "inode {}: ", ino.0)?,
            (None, _) => {}
        }
        f.write_str(&self.detail)
    }
}

/// Returns the contradictions within the record itself: generations that are not before its own.
pub(super) fn record_contradictions(record: &CommitRecord) -> Vec<Finding> {
    let (generation, session) = (record.generation.0, record.session_first.0);
    let newest = record.newest_snapshot.0;
    let mut wrong = Vec::new();
    if !(1..=generation).contains(&session) {
        wrong.push(format!("commit {generation} is of a session that begins with commit {session}"));
    }
    if generation == 1 && record.previous_tag != [0; 16] {
        wrong.push("commit 1 extends another one".to_owned());
    }
    if newest > generation {
        wrong.push(format!("commit {generation} has a newest snapshot of commit {newest}"));
    }
    if let Some(origin) = record.origin.filter(|origin| origin.generation.0 >= generation) {
        wrong.push(format!("commit {generation} is of a backup of commit {}", origin.generation.0));
    }
    let roots = TreeId::ALL.into_iter().map(|tree| record.roots[tree].pointer.run);
    let pages = roots.chain(record.allocated.iter().map(|(run, _)| *run));
    if let Some(page) = pages.max_by_key(|run| run.end()).filter(|run| run.end() > record.total_blocks) {
        let blocks = record.total_blocks;
        wrong.push(format!("commit {generation} is of a file of {blocks} blocks, but names block {}", page.end() - 1));
    }
    wrong.into_iter().map(finding).collect()
}

/// Returns the contradictions between the counters and the trees of the same version. Reads the
/// last leaf of the trees 1 and 2, and all snapshots. Errors: only errors that are neither damage
/// nor a failed read.
pub(super) fn counter_contradictions(
    counters: &Counters,
    trees: &Trees,
    logged: Option<&Logged>,
    store: &NodeStore,
) -> Result<Vec<Finding>> {
    let mut wrong = Vec::new();
    let in_tree = known(last_ino(&trees.live, store))?.unwrap_or(0);
    let last = in_tree.max(logged.map_or(0, Logged::last_ino));
    if last >= counters.next_ino {
        wrong.push(format!("the next inode number is {}, but inode {last} is there", counters.next_ino));
    }
    of_snapshots(counters, trees, store, &mut wrong)?;
    Ok(wrong.into_iter().map(finding).collect())
}

fn of_snapshots(counters: &Counters, trees: &Trees, store: &NodeStore, wrong: &mut Vec<String>) -> Result<()> {
    let Counters { next_snapshot, next_dead, newest_snapshot, newest_snapshot_id: id, .. } = *counters;
    if let Some(all) = known(snapshots_of(&trees.snapshots, store))? {
        if let Some((last, _)) = all.last().filter(|(last, _)| *last >= next_snapshot) {
            wrong.push(format!("the next snapshot is {next_snapshot}, but snapshot {last} is there"));
        }
        let newest = all.iter().rev().find(|(_, snapshot)| !is_being_removed(snapshot));
        let there = newest.map_or((0, Generation(0)), |(id, snapshot)| (*id, snapshot.generation));
        if there != (id, newest_snapshot) {
            let of = |(id, generation): (u64, Generation)| format!("{id} of commit {}", generation.0);
            let (there, said) = (of(there), of((id, newest_snapshot)));
            wrong.push(format!("the newest snapshot is {there}, but the commit says {said}"));
        }
        let mut before = Generation(0);
        for (id, snapshot) in all.iter().filter(|(_, snapshot)| !is_being_removed(snapshot)) {
            let (generation, root) = (snapshot.generation, snapshot.root.pointer.generation);
            if root > generation {
                wrong.push(format!("snapshot {id} is of commit {}, but its root of commit {}", generation.0, root.0));
            }
            if generation < before {
                let text =
                    format!("snapshot {id} is of commit {}, but one before it of commit {}", generation.0, before.0);
                wrong.push(text);
            }
            before = before.max(generation);
        }
    }
    let lists = &trees.references;
    if let Some(key) = known(last_dead(lists, store, Key::MAX))?.flatten()
        && key.object >= next_snapshot
    {
        wrong.push(format!("the next snapshot is {next_snapshot}, but there is a dead list of {}", key.object));
    }
    if let Some(key) = known(last_dead(lists, store, Key::new(id, kind::DEAD, u64::MAX)))?.flatten()
        && key.object == id
        && key.sub >= next_dead
    {
        wrong.push(format!("the next dead-list entry is {next_dead}, but {} is there", key.sub));
    }
    Ok(())
}

/// Returns the greatest inode number that a record of a known kind has; 0 without any.
pub(super) fn last_ino(live: &Tree, store: &NodeStore) -> Result<u64> {
    let mut at = Key::MAX;
    loop {
        let Some(key) = live.floor(store, at, |key, _| Ok(key))? else { return Ok(0) };
        at = match key {
            Key { object: 0, .. } => return Ok(0),
            Key { kind: kind::INODE..=kind::EXTENT, .. } => return Ok(key.object),
            // Of a kind that is not known, and before or behind all that are.
            Key { object, kind: 0, .. } => Key::new(object - 1, u8::MAX, u64::MAX),
            Key { object, .. } => Key::new(object, kind::EXTENT, u64::MAX),
        };
    }
}

/// Returns the key of the last dead-list entry at or before `at`, unless another record stands
/// there.
fn last_dead(references: &Tree, store: &NodeStore, at: Key) -> Result<Option<Key>> {
    let found = references.floor(store, at, |key, _| Ok(key))?;
    Ok(found.filter(|key| key.kind == kind::DEAD))
}

/// Returns None for a damaged node: it proves nothing. A read that the host refuses is an error.
pub(super) fn known<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(Error::Damaged(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn finding(text: String) -> Finding {
    Finding::new(FindingKind::Counter, Severity::Wrong, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_a_sentence_about_its_inode() {
        let finding = Finding::new(FindingKind::Inode, Severity::Wrong, "is wrong");
        assert_eq!(finding.to_string(), "is wrong");
        let finding = finding.of_inode(Ino(5));
        assert_eq!(finding.to_string(), "inode 5: is wrong");
        let path = Some(b"/a\n\xff".to_vec());
        assert_eq!(Finding { path, ..finding }.to_string(), "inode 5 (/a\\n\u{fffd}): is wrong");
    }
}
