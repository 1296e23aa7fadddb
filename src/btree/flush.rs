//! Flush: writes dirty nodes bottom-up, drops written nodes from memory, and walks stored nodes.

use std::sync::{Arc, OnceLock};

use super::node::{Body, Bounds, Node};
use super::{Child, LostVisitor, NodeStore};
use crate::error::Result;
use crate::format::Pointer;

/// Writes `node` and unstored nodes below it; returns its pointer.
pub(super) fn flush(
    store: &NodeStore,
    node: &Arc<Node>,
    write: &mut dyn FnMut(u8, Vec<u8>) -> Result<Pointer>,
) -> Result<Pointer> {
    if let Some(pointer) = node.stored.get() {
        // Children of a stored node are stored: its page names them.
        return Ok(*pointer);
    }
    let mut pointers = Vec::new();
    if let Body::Internal(children) = &node.body {
        pointers.reserve_exact(children.len());
        for (_, child) in children {
            pointers.push(match child {
                Child::Stored(pointer) => *pointer,
                Child::Resident(child) => flush(store, child, write)?,
            });
        }
    }
    let pointer = write(node.level, node.encode(&pointers))?;
    // TREE-1, TREE-2: newer versions share the node, so only its `stored` cell is set. The cell was
    // empty above, and this commit is the only writer.
    let _ = node.stored.set(pointer);
    match &node.body {
        Body::Leaf(_) => store.cache_node(&pointer, node),
        Body::Internal(children) => {
            let children = children.iter().zip(&pointers).map(|((key, _), child)| (*key, Child::Stored(*child)));
            let mut written = Node::new(node.born, node.bounds(), Body::Internal(children.collect()));
            written.stored = OnceLock::from(pointer);
            store.cache_node(&pointer, &Arc::new(written));
        }
    }
    Ok(pointer)
}

/// Replaces stored resident nodes in and below `child` by their pointers.
pub(super) fn forget_written(child: &mut Child) {
    let Child::Resident(node) = child else { return };
    if let Some(pointer) = node.stored.get() {
        *child = Child::Stored(*pointer);
        return;
    }
    let Body::Internal(children) = &node.body else { return };
    if !children.iter().any(|(_, child)| matches!(child, Child::Resident(_))) {
        return;
    }
    // TREE-1: copied when a published version shares it. The node belongs to the open transaction,
    // so nothing is superseded (TREE-3).
    if let Body::Internal(children) = &mut Arc::make_mut(node).body {
        children.iter_mut().for_each(|(_, child)| forget_written(child));
    }
}

#[cfg(test)]
pub(super) fn count_dirty(child: &Child) -> u64 {
    match child {
        Child::Resident(node) if node.stored.get().is_none() => {
            1 + match &node.body {
                Body::Leaf(_) => 0,
                Body::Internal(children) => children.iter().map(|(_, child)| count_dirty(child)).sum(),
            }
        }
        _ => 0,
    }
}

pub(super) fn visit_pages(
    store: &NodeStore,
    child: &Child,
    bounds: Bounds,
    f: &mut dyn FnMut(&Pointer, u8) -> Result<()>,
    lost: &mut LostVisitor<'_>,
) -> Result<()> {
    let pointer = match child {
        Child::Stored(pointer) => Some(pointer),
        Child::Resident(node) => node.stored.get(),
    };
    if let Some(pointer) = pointer {
        f(pointer, bounds.level)?;
    }
    let Some(node) = super::cursor::load_or_skip(store, child, bounds, lost)? else { return Ok(()) };
    if let Body::Internal(children) = &node.body {
        for (slot, (_, child)) in children.iter().enumerate() {
            visit_pages(store, child, node.child_bounds(children, slot), f, lost)?;
        }
    }
    Ok(())
}
