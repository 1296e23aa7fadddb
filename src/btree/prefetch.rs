//! Names nodes before they are read, to a medium on which each of them is waited for.
//!
//! On another machine a node that is read is a way there and back. Which nodes a reading of some ranges takes the levels above tell, so those of one level are asked for
//! together: as many ways as the tree has levels, and not as many as it has nodes there.

use super::cursor::with_node;
use super::node::{Body, Bounds};
use super::{NodeStore, Tree};
use crate::error::Result;
use crate::format::Key;

/// Nodes of one level that are named at most: each brings its neighbours along, and what is named waits in memory until it is read.
pub(super) const MAX_PREFETCH: usize = 64;

impl Tree {
    /// Names the nodes in which these ranges of keys lie, ascending and not touching each other, and reads all of them but the leaves. Of more than [`MAX_PREFETCH`] the first.
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
