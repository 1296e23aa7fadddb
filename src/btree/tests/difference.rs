//! Differences of two tree versions: the result equals that of two full scans, and shared nodes are
//! not read.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

type Differing = Vec<(Key, Option<Vec<u8>>, Option<Vec<u8>>)>;

fn found(store: &NodeStore, older: &Tree, newer: &Tree) -> Differing {
    let mut found = Vec::new();
    newer
        .differences(older, store, &mut |key, old, new| {
            found.push((key, old.map(<[u8]>::to_vec), new.map(<[u8]>::to_vec)));
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
    found
}

/// Returns the differences found by two full scans.
fn expected(older: &Content, newer: &Content) -> Differing {
    let keys: std::collections::BTreeSet<Key> = older.keys().chain(newer.keys()).copied().collect();
    let both = keys.into_iter().map(|key| (key, older.get(&key).cloned(), newer.get(&key).cloned()));
    both.filter(|(_, old, new)| old != new).collect()
}

/// Counter of page reads.
struct Counted {
    medium: Arc<Medium>,
    reads: AtomicUsize,
}

impl NodePages for Counted {
    fn read_node(&self, pointer: &Pointer) -> Result<Vec<u8>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.medium.read_node(pointer)
    }
}

/// Returns the number of pages that only one of the two trees has.
fn unshared(store: &NodeStore, older: &Tree, newer: &Tree) -> usize {
    let (older, newer) = (pages_of(store, older), pages_of(store, newer));
    older.symmetric_difference(&newer).count()
}

struct World {
    random: Random,
    medium: Arc<Medium>,
    store: NodeStore,
    tree: Tree,
    content: Content,
    generation: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let medium = Arc::new(Medium::default());
        let (store, tree) = (medium.cold(1 << 20), Tree::empty(TreeId::Live));
        World { random: Random(seed), store, medium, tree, content: Content::new(), generation: 0 }
    }

    fn change(&mut self, times: u64, removing: u64) {
        self.generation += 1;
        let mut edits = Edits::new(Generation(self.generation));
        let start = self.random.below(3000);
        for n in 0..times {
            // Runs of adjacent keys split and empty whole nodes; the other keys are random.
            let object = if times > 40 && n % 2 == 0 { start + n / 2 } else { self.random.below(3000) };
            let key = Key::new(object, self.random.below(3) as u8, self.random.below(2));
            if self.random.below(10) < removing {
                self.tree.remove(&self.store, &mut edits, key).unwrap();
                self.content.remove(&key);
            } else {
                let value = self.random.value(300);
                self.tree.insert(&self.store, &mut edits, key, &value).unwrap();
                self.content.insert(key, value);
            }
        }
    }

    fn commit(&mut self) -> Tree {
        let root = self.medium.flush(&self.store, &self.tree, Generation(self.generation));
        self.tree.forget_written();
        Tree::from_root(TreeId::Live, &root)
    }
}

/// Fences come in descending order, each at or before the key, one leaf apart.
#[test]
fn fences_lead_back_without_reading_a_leaf() {
    let mut world = World::new(11);
    world.change(6000, 0);
    let generation = Generation(world.generation);
    let root = world.medium.flush(&world.store, &world.tree, generation);
    let tree = Tree::from_root(TreeId::Live, &root);
    let counted = Arc::new(Counted { medium: world.medium.clone(), reads: AtomicUsize::new(0) });
    let store = NodeStore::from_pages(Arc::clone(&counted) as Arc<dyn NodePages>, 8 << 20);
    let fences = |key| {
        let mut fences = Vec::new();
        tree.fences_before(&store, key, &mut |fence| {
            fences.push(fence);
            ControlFlow::Continue(())
        })
        .unwrap();
        fences
    };
    let all = fences(Key::MAX);
    let internal = counted.reads.load(Ordering::Relaxed);
    let (mut leaves, mut nodes) = (0, 0);
    let visit = &mut |_: &Pointer, level| {
        leaves += usize::from(level == 0);
        nodes += 1;
        Ok(())
    };
    tree.visit_pages(&store, visit, &mut |lost| Err(lost.error)).unwrap();
    assert!(leaves > 20 && internal == nodes - leaves, "{internal} of {nodes} nodes were read, {leaves} are leaves");
    assert_eq!(all.len(), leaves);
    assert!(all.is_sorted_by(|a, b| a > b) && all.last() == Some(&Key::MIN));
    for key in world.content.keys().step_by(97) {
        let expected: Vec<Key> = all.iter().copied().filter(|fence| fence <= key).collect();
        assert_eq!(fences(*key), expected);
    }
    let mut first = None;
    tree.fences_before(&store, Key::MAX, &mut |fence| {
        assert_eq!(first.replace(fence), None, "it goes on behind a break");
        ControlFlow::Break(())
    })
    .unwrap();
}

#[test]
fn differences_are_those_of_two_full_scans() {
    for number in Seed::choose(1..6) {
        let seed = Seed(number);
        let mut world = World::new(number);
        let mut versions: Vec<(Tree, Content)> = vec![(Tree::empty(TreeId::Live), Content::new())];
        for round in 0..14 {
            let (times, removing) = match world.random.below(4) {
                0 => (1 + world.random.below(3), 3),
                1 => (1 + world.random.below(4000), 9),
                _ => (1 + world.random.below(2000), 3),
            };
            world.change(times, removing);
            let tree = match round % 3 {
                // In memory only, and also with nodes that are stored and not yet dropped.
                0 => world.tree.clone(),
                1 => {
                    let kept = world.tree.clone();
                    world.commit();
                    kept
                }
                _ => world.commit(),
            };
            versions.push((tree, world.content.clone()));
        }
        for (older, old) in &versions {
            for (newer, new) in &versions {
                assert!(found(&world.store, older, newer) == expected(old, new), "seed {}", seed.0);
            }
        }
    }
}

#[test]
fn shared_nodes_are_not_read() {
    for number in Seed::choose(1..6) {
        let _seed = Seed(number);
        let mut world = World::new(number);
        world.change(30_000, 1);
        let (before, content) = (world.commit(), world.content.clone());
        for times in [1, 20, 300] {
            world.change(times, 4);
            let after = world.commit();
            let differing = unshared(&world.store, &before, &after);
            let counted = Arc::new(Counted { medium: world.medium.clone(), reads: AtomicUsize::new(0) });
            let store = NodeStore::from_pages(counted.clone(), 0);
            assert!(found(&store, &before, &after) == expected(&content, &world.content));
            let reads = counted.reads.load(Ordering::Relaxed);
            // No shared page is opened, and no other one twice.
            assert!(reads <= differing, "{times} changes: {reads} reads, {differing} pages differ");
            let counted = Arc::new(Counted { medium: world.medium.clone(), reads: AtomicUsize::new(0) });
            assert_eq!(found(&NodeStore::from_pages(counted.clone(), 0), &after, &after), []);
            assert_eq!(counted.reads.load(Ordering::Relaxed), 0);
        }
        let all = pages_of(&world.store, &before).len();
        assert!(all > 150, "{all}");
    }
}

/// A caller that stops after every few keys gets each difference once, from either side.
#[test]
fn a_walk_that_was_stopped_goes_on_where_it_was() {
    for number in Seed::choose(1..4) {
        let seed = Seed(number);
        let mut world = World::new(number);
        world.change(2000, 0);
        let (before, old) = (world.commit(), world.content.clone());
        world.change(1500, 6);
        let (after, new) = (world.tree.clone(), world.content.clone());
        for (older, newer, wanted) in [
            (Some(&before), &after, expected(&old, &new)),
            (Some(&after), &before, expected(&new, &old)),
            (None, &after, expected(&Content::new(), &new)),
        ] {
            let mut walk = newer.differences_since(older);
            let mut found = Differing::new();
            loop {
                let (before, most) = (found.len(), 1 + world.random.below(5) as usize);
                walk.resume(&world.store, &mut |key, old, new| {
                    found.push((key, old.map(<[u8]>::to_vec), new.map(<[u8]>::to_vec)));
                    let enough = found.len() - before == most;
                    Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
                })
                .unwrap();
                if found.len() == before {
                    break;
                }
            }
            assert!(found == wanted, "seed {}", seed.0);
        }
    }
}

#[test]
fn a_walk_ends_when_its_visitor_breaks() {
    let mut world = World::new(1);
    world.change(3000, 0);
    let mut calls = 0;
    let mut count = |older: &Tree, newer: &Tree| {
        let before = calls;
        newer
            .differences(older, &world.store, &mut |_, _, _| {
                calls += 1;
                Ok(if calls - before < 5 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
            })
            .unwrap();
        calls - before
    };
    let empty = Tree::empty(TreeId::Live);
    assert_eq!((count(&empty, &world.tree), count(&world.tree, &empty)), (5, 5));
}
