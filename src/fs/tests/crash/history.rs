//! States and promises of a run of changes, by the operations of its storage; and restores, which
//! have many intermediate states.
//!
//! The promise of lockbox-snapshot(1) for a restore: each path, and in a restore of everything each
//! object at the root, is replaced atomically; after an interruption or a kill some are in the old
//! state and others in the snapshot's state, and the same command completes it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::super::support::CREATOR;
use super::seen::{Seen, beside, has_stage, is_below, part, parts, paths, see, see_tree, whole};
use crate::env::SeededEnvironment;
use crate::error::{Error, Result};
use crate::exchange::{LiveNamespace, OfflineNamespace, Restore};
use crate::format::{Generation, Ino};
use crate::fs::FileSystem;
use crate::storage::simulated::SimulatedStorage;

/// Maximum memory for the recording of one run.
pub(super) const TRACE_LIMIT: u64 = 512 << 20;

/// A promise: from this operation of the storage on, recovery must not return an older state than
/// this one.
#[derive(Clone, Copy, Debug)]
struct Promise {
    position: usize,
    state: usize,
    generation: Generation,
}

/// State after each change, with the number of completed operations of the storage.
pub(super) struct History {
    states: Vec<(usize, Seen)>,
    promises: Vec<Promise>,
    restores: Vec<(RangeInclusive<usize>, Wanted)>,
}

/// States allowed after recovery at a point of a run.
#[derive(Clone, Copy)]
pub(super) struct Allowed<'a> {
    pub(super) states: &'a [(usize, Seen)],
    /// Minimum commit.
    pub(super) promised: Generation,
}

impl History {
    /// Returns the states allowed after recovery when the storage stopped after `position`
    /// operations: from the promised state up to the result of the interrupted change.
    pub(super) fn allowed(&self, position: usize) -> Allowed<'_> {
        let kept = self.promises.partition_point(|promise| promise.position <= position);
        let promise = self.promises[kept - 1];
        let current = self.states.partition_point(|(at, _)| *at <= position);
        let states = &self.states[promise.state..(current + 1).min(self.states.len())];
        Allowed { states, promised: promise.generation }
    }

    pub(super) fn promises(&self) -> usize {
        self.promises.len()
    }

    pub(super) fn restores(&self) -> usize {
        self.restores.len()
    }

    /// Returns the restore in progress at that point.
    pub(super) fn restore_at(&self, position: usize) -> Option<&Wanted> {
        self.restores.iter().find(|(range, _)| range.contains(&position)).map(|(_, wanted)| wanted)
    }
}

/// A restore request.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) snapshot: Vec<u8>,
    /// With a leading slash; empty for everything.
    pub(super) paths: Vec<String>,
}

impl Wanted {
    pub(super) fn everything(snapshot: &[u8]) -> Wanted {
        Wanted { snapshot: snapshot.to_vec(), paths: Vec::new() }
    }

    /// Returns the paths that are replaced atomically: in a restore of everything the objects at
    /// the root, including those of the old tree; not the stage of an interrupted restore, which
    /// the next one removes piece by piece.
    fn tops(&self, before: &str, kept: &str) -> Vec<String> {
        if !self.paths.is_empty() {
            return self.paths.clone();
        }
        let at_root = paths(before).chain(paths(kept)).filter(|path| !path[1..].contains('/') && !has_stage(path));
        at_root.map(str::to_owned).collect::<BTreeSet<String>>().into_iter().collect()
    }

    /// Restores, and compares the result with the state before; `kept` is the state in the
    /// snapshot. `go_on` gets a function that checks intermediate states. Returns false if it ended
    /// the restore, and if the parents of a path are no longer directories.
    pub(super) fn restore(
        &self,
        fs: &FileSystem,
        kept: &str,
        renamed: &dyn Fn(),
        go_on: &mut dyn FnMut(&dyn Fn()) -> Result<()>,
    ) -> bool {
        let before = see_tree(fs).0;
        let tops = self.tops(&before, kept);
        let (old, new) = (parts(&before, &tops), parts(kept, &tops));
        let old_or_new = || {
            let now = see_tree(fs).0;
            for (n, now) in parts(&now, &tops).into_iter().enumerate() {
                let (top, old, new) = (&tops[n], &old[n], &new[n]);
                assert!(now == *old || now == *new, "{top} is neither\n{old:#?}\nnor\n{new:#?}\nbut\n{now:#?}");
            }
            now
        };
        let moment = fs.open_snapshot(&self.snapshot).unwrap();
        let paths: Vec<Vec<u8>> = self.paths.iter().map(|path| path.clone().into_bytes()).collect();
        let judge = || drop(old_or_new());
        let mut names = Noting {
            alone: OfflineNamespace(fs, CREATOR),
            renamed: &|| {
                judge();
                renamed();
            },
        };
        let restored = Restore::prepare(fs, &moment, &paths, None, &mut names)
            .and_then(|restore| restore.run(&mut || go_on(&judge)));
        let now = old_or_new();
        assert!(!has_stage(&now), "a stage is left\n{now}");
        match restored {
            Err(Error::Interrupted(_)) => false,
            Err(Error::Invalid(text)) if !self.paths.is_empty() && text.contains("is no longer a directory") => false,
            restored => {
                restored.unwrap();
                if self.paths.is_empty() {
                    assert!(whole(&now) == whole(kept), "restored is\n{now}\ninstead of\n{kept}");
                } else {
                    assert!(self.paths.iter().all(|path| part(&now, path) == part(kept, path)), "{self:?}\n{now}");
                    assert!(beside(&now, &tops) == beside(&before, &tops), "{self:?} changed\n{before}\nto\n{now}");
                }
                true
            }
        }
    }
}

/// Observes each rename.
struct Noting<'a> {
    alone: OfflineNamespace<'a>,
    renamed: &'a dyn Fn(),
}

impl LiveNamespace for Noting<'_> {
    fn rename(&mut self, from: &[u8], to: &[u8], exchange: bool) -> Result<()> {
        self.alone.rename(from, to, exchange)?;
        (self.renamed)();
        Ok(())
    }

    fn make_directory(&mut self, path: &[u8]) -> Result<()> {
        self.alone.make_directory(path)
    }

    fn hide(&mut self, _: Ino) {}

    fn changed_name(&mut self, _: Ino, _: &[u8]) {}

    fn changed(&mut self, _: Ino) {}
}

/// A session on a recording storage.
pub(super) struct Recorder<'a> {
    pub(super) fs: &'a Arc<FileSystem>,
    pub(super) storage: &'a Arc<SimulatedStorage>,
    pub(super) dice: &'a SeededEnvironment,
    history: RefCell<History>,
}

impl<'a> Recorder<'a> {
    /// Promises the current state.
    pub(super) fn new(
        fs: &'a Arc<FileSystem>,
        storage: &'a Arc<SimulatedStorage>,
        dice: &'a SeededEnvironment,
    ) -> Recorder<'a> {
        let (opened, promised) = ((storage.position(), see(fs).0), fs.volume.durable().generation);
        Recorder::resumed(fs, storage, dice, opened, promised)
    }

    /// Promises the state at this position, in a commit no older than this one.
    pub(super) fn resumed(
        fs: &'a Arc<FileSystem>,
        storage: &'a Arc<SimulatedStorage>,
        dice: &'a SeededEnvironment,
        opened: (usize, Seen),
        promised: Generation,
    ) -> Recorder<'a> {
        let promises = vec![Promise { position: opened.0, state: 0, generation: promised }];
        let history = History { states: vec![opened], promises, restores: Vec::new() };
        Recorder { fs, storage, dice, history: RefCell::new(history) }
    }

    pub(super) fn below(&self, bound: u64) -> u64 {
        self.dice.next_u64() % bound
    }

    pub(super) fn position(&self) -> usize {
        self.storage.position()
    }

    /// Records the current state.
    pub(super) fn note(&self) {
        let (position, seen) = (self.position(), see(self.fs).0);
        let mut history = self.history.borrow_mut();
        match history.states.last() {
            Some((at, last)) if *last == seen && *at == position => {}
            // Equal texts are stored once.
            Some((_, last)) if *last == seen => {
                let last = last.clone();
                history.states.push((position, last));
            }
            _ => history.states.push((position, seen)),
        }
    }

    /// Records the current state, which is durable.
    pub(super) fn promise(&self) {
        self.note();
        let generation = self.fs.volume.durable().generation;
        let position = self.position();
        let mut history = self.history.borrow_mut();
        let state = history.states.len() - 1;
        history.promises.push(Promise { position, state, generation });
    }

    pub(super) fn sync(&self) {
        self.note();
        self.fs.sync().unwrap();
        self.promise();
    }

    /// Restores the request, with commits between the steps; one in four ends early.
    pub(super) fn restore(&self, wanted: &Wanted, kept: &str) {
        let begun = self.position();
        let mut left = if self.below(4) == 0 { 1 + self.below(60) } else { u64::MAX };
        let is_done = wanted.restore(self.fs, kept, &|| self.note(), &mut |judge| {
            match self.below(24) {
                0 | 1 => {
                    judge();
                    self.sync();
                }
                2 => {
                    self.note();
                    self.fs.maintain()?;
                    self.note();
                }
                _ => {}
            }
            left -= 1;
            if left == 0 { Err(Error::Interrupted(2)) } else { Ok(()) }
        });
        if is_done {
            self.promise();
        } else {
            self.note();
        }
        self.history.borrow_mut().restores.push((begun..=self.position(), wanted.clone()));
    }

    pub(super) fn ended(self) -> History {
        self.history.into_inner()
    }
}

/// Returns some paths of a tree in a snapshot; none of an empty one.
pub(super) fn some_paths(kept: &str, below: &dyn Fn(u64) -> u64) -> Vec<String> {
    let all: Vec<&str> = paths(kept).collect();
    if all.is_empty() {
        return Vec::new();
    }
    let mut chosen: Vec<String> = Vec::new();
    for _ in 0..1 + below(3) {
        let path = all[below(all.len() as u64) as usize];
        if !chosen.iter().any(|other| is_below(path, other) || is_below(other, path)) {
            chosen.push(path.to_owned());
        }
    }
    chosen
}
