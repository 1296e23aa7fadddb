//! Findings of a probe, with advice.

use crate::range_source::RemoteError;

/// Result of one check of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeFinding {
    /// Stable identifier for programs.
    pub name: &'static str,
    /// Whether the check passed. A passed check with advice could be improved.
    pub works: bool,
    pub found: String,
    pub advice: Option<&'static str>,
}

impl ProbeFinding {
    pub(crate) fn good(name: &'static str, found: impl Into<String>) -> ProbeFinding {
        ProbeFinding { name, works: true, found: found.into(), advice: None }
    }

    pub(crate) fn advice(name: &'static str, found: impl Into<String>, advice: &'static str) -> ProbeFinding {
        ProbeFinding { name, works: true, found: found.into(), advice: Some(advice) }
    }

    pub(crate) fn bad(name: &'static str, found: impl Into<String>, advice: &'static str) -> ProbeFinding {
        ProbeFinding { name, works: false, found: found.into(), advice: Some(advice) }
    }
}

/// Returns advice for an error.
pub(crate) fn remedy(error: &RemoteError) -> &'static str {
    match error {
        RemoteError::Transient(_) => "see whether the server runs and can be reached from here",
        RemoteError::Denied(_) => {
            "see who may read there, and as whom it is asked: lockbox-remote(7) says where credentials are looked for"
        }
        RemoteError::NotFound => "see whether the name is right",
        RemoteError::NoSpace(_) => "make room there",
        RemoteError::Changed | RemoteError::Damaged(_) | RemoteError::Unsupported(_) => {
            "use another server, or set this one up as lockbox-remote(7) says"
        }
    }
}
