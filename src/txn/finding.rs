//! Findings of `check`: a sentence for people, separate fields for programs.

use std::fmt;

use crate::format::{Generation, Ino, Pointer, TreeId};

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
    pub const ALL: [FindingKind; 19] = [
        FindingKind::DataLost,
        FindingKind::RecordsLost,
        FindingKind::IndexLost,
        FindingKind::Record,
        FindingKind::Name,
        FindingKind::Entry,
        FindingKind::Inode,
        FindingKind::Attribute,
        FindingKind::Extent,
        FindingKind::Space,
        FindingKind::Count,
        FindingKind::Snapshot,
        FindingKind::Counter,
        FindingKind::Header,
        FindingKind::Length,
        FindingKind::Log,
        FindingKind::Commit,
        FindingKind::Object,
        FindingKind::More,
    ];

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
    /// Returns a finding about nothing but the sentence.
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
