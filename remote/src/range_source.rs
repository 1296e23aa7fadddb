//! What a server is asked for, and what it may answer.

use std::ops::Range;
use std::sync::Arc;

/// One version of a file, as its server told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    /// Length in bytes.
    pub(crate) length: u64,
    /// The strong entity tag with its quotes, where the server has one.
    pub(crate) tag: Option<String>,
    /// When it was changed, in the server's words.
    pub(crate) modified: Option<String>,
}

/// Why there are no bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// May end by itself: no connection, no answer, a cut one, an overloaded server.
    Passing(String),
    /// Another version took the file's place.
    Changed,
    /// What is there cannot be what was put there: a sentence about it.
    Damaged(String),
    /// There is no such file.
    Gone,
    /// There is no room for what is to be put there.
    Full(String),
    /// The server does not let this user read it.
    Refused(String),
    /// The answer is none that can be used, and the next one will be as this one.
    Unusable(String),
}

impl Trouble {
    /// Said of the server.
    pub(crate) fn words(&self) -> String {
        match self {
            Trouble::Passing(why) => format!("it does not answer: {why}"),
            Trouble::Changed => "the file was changed meanwhile".into(),
            Trouble::Gone => "there is nothing of this name".into(),
            Trouble::Damaged(why) | Trouble::Full(why) | Trouble::Refused(why) | Trouble::Unusable(why) => why.clone(),
        }
    }
}

/// Names the bytes of a part of a file: equal labels of equal ranges mean equal bytes.
pub(crate) type Label = [u8; 32];

/// A file of a server.
pub(crate) trait Source: Send + Sync {
    /// The first `count` bytes, or all of a shorter file, of whatever version is there now.
    fn first(&self, count: u64) -> Result<(Version, Vec<u8>), Trouble>;

    /// Whether each version was made at once, as a whole: of what its newest record names nothing can be missing but by damage.
    fn whole(&self) -> bool {
        false
    }

    /// What all versions of the file have in common whose labels may be compared. None for a file of which nothing is known to be the same in two versions: it has one label.
    fn lineage(&self) -> Option<&[u8]> {
        None
    }

    /// The label of a range.
    fn label(&self, _range: Range<u64>) -> Label {
        Label::default()
    }

    /// Fills `out` with what it has of the file's bytes from `offset` on without asking for anything; false, and anything in `out`, when it has not all of them.
    fn has(&self, _offset: u64, _out: &mut [u8]) -> bool {
        false
    }

    /// The bytes of a range inside of the file, all of them, when it still has this version.
    fn range(&self, version: &Version, range: Range<u64>) -> Result<Vec<u8>, Trouble>;
}

impl<S: Source + ?Sized> Source for Arc<S> {
    fn first(&self, count: u64) -> Result<(Version, Vec<u8>), Trouble> {
        (**self).first(count)
    }

    fn whole(&self) -> bool {
        (**self).whole()
    }

    fn lineage(&self) -> Option<&[u8]> {
        (**self).lineage()
    }

    fn label(&self, range: Range<u64>) -> Label {
        (**self).label(range)
    }

    fn has(&self, offset: u64, out: &mut [u8]) -> bool {
        (**self).has(offset, out)
    }

    fn range(&self, version: &Version, range: Range<u64>) -> Result<Vec<u8>, Trouble> {
        (**self).range(version, range)
    }
}
