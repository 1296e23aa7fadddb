//! What a probe found, and what may help.

use crate::range_source::Trouble;

/// What was found of one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Stable, for programs.
    pub name: &'static str,
    /// Whether it works. What works and has advice could be better.
    pub works: bool,
    pub found: String,
    pub advice: Option<&'static str>,
}

impl Finding {
    pub(crate) fn good(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, works: true, found: found.into(), advice: None }
    }

    pub(crate) fn advice(name: &'static str, found: impl Into<String>, advice: &'static str) -> Finding {
        Finding { name, works: true, found: found.into(), advice: Some(advice) }
    }

    pub(crate) fn bad(name: &'static str, found: impl Into<String>, advice: &'static str) -> Finding {
        Finding { name, works: false, found: found.into(), advice: Some(advice) }
    }
}

/// What may help, in a sentence.
pub(crate) fn remedy(trouble: &Trouble) -> &'static str {
    match trouble {
        Trouble::Passing(_) => "see whether the server runs and can be reached from here",
        Trouble::Refused(_) => {
            "see who may read there, and as whom it is asked: lockbox-remote(7) says where credentials are looked for"
        }
        Trouble::Gone => "see whether the name is right",
        Trouble::Full(_) => "make room there",
        Trouble::Changed | Trouble::Damaged(_) | Trouble::Unusable(_) => {
            "use another server, or set this one up as lockbox-remote(7) says"
        }
    }
}
