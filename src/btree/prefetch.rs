//! Node prefetch for high-latency storage.
//!
//! On remote storage every node read costs a round trip. The levels above determine the nodes
//! needed for a set of key ranges, so the nodes of each level are requested together: one round
//! trip per level instead of one per node.

use super::cursor::with_node;
use super::node::{Body, Bounds};
use super::{NodeStore, Tree};
use crate::error::Result;
use crate::format::Key;

/// Maximum number of nodes prefetched per level. Each also brings its neighbours, and prefetched
/// data occupies memory until it is read.
pub(super) const MAX_PREFETCH: usize = 64;

impl Tree {
    /// Prefetches the nodes that cover `ranges` (ascending and disjoint), and reads all of them
    /// except leaves; only the first [`MAX_PREFETCH`] per level.
    pub(crate) fn prefetch(&self, store: &NodeStore, ranges: &[(Key, Key)]) -> Result<()> {
        let Some(root) = self.root.as_ref().filter(|_| store.is_remote()) else { return Ok(()) };
        let mut nodes = vec![(root.clone(), Bounds::root(self.id as u8, self.level))];
        for _ in 0..self.level {
            let mut below = Vec::new();
            for (child, bounds) in nodes {
                with_node(store, &child, bounds, |node| {
                    let Body::Internal(children) = &node.body else { return Ok(()) };
                    let all = (0..children.len()).map(|slot| (&children[slot].1, node.child_bounds(children, slot)));
                    let wanted = all.filter(|(_, bounds)| is_touched(bounds, ranges));
                    below
                        .extend(wanted.take(MAX_PREFETCH - below.len()).map(|(child, bounds)| (child.clone(), bounds)));
                    Ok(())
                })?;
            }
            store.prefetch(below.iter().map(|(child, _)| child));
            nodes = below;
        }
        Ok(())
    }
}

fn is_touched(bounds: &Bounds, ranges: &[(Key, Key)]) -> bool {
    let at = ranges.partition_point(|(_, to)| *to <= bounds.lower);
    ranges.get(at).is_some_and(|(from, _)| *from < bounds.upper)
}
