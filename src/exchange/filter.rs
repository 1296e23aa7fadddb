//! Exclude filter of a copy, provided by the caller.

use std::fmt;
use std::sync::Arc;

type ExcludePredicate = dyn Fn(&[u8], bool) -> bool + Send + Sync;

/// Predicate on a path below a source (without the source's own name and a leading slash) and
/// whether it is a directory. An excluded directory is excluded with all its descendants.
#[derive(Clone, Default)]
pub struct Filter(Option<Arc<ExcludePredicate>>);

impl Filter {
    pub fn new(excludes: impl Fn(&[u8], bool) -> bool + Send + Sync + 'static) -> Filter {
        Filter(Some(Arc::new(excludes)))
    }

    pub(super) fn excludes(&self, path: &[u8], is_directory: bool) -> bool {
        self.0.as_ref().is_some_and(|excludes| excludes(path, is_directory))
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Filter(some)" } else { "Filter(none)" })
    }
}
