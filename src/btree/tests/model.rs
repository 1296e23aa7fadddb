//! Model test against BTreeMap: random operations, pinned versions, commits in flight, and
//! accounting of pages.

use super::*;

struct Shape {
    /// Records of full length that the first operation inserts.
    start: u64,
    objects: u64,
    subs: u64,
    longest: u64,
    /// Records per operation.
    batch: u64,
    steps: u64,
    budget: usize,
}

/// Version that a commit is writing.
struct Flight {
    tree: Tree,
    content: Content,
    generation: Generation,
    superseded: Vec<Arc<Node>>,
    dirtied: i64,
}

struct World {
    random: Random,
    shape: Shape,
    medium: Arc<Medium>,
    store: NodeStore,
    tree: Tree,
    content: Content,
    generation: Generation,
    superseded: Vec<Arc<Node>>,
    dirtied: i64,
    flight: Option<Flight>,
    pinned: Vec<(Tree, Content)>,
    /// Pages of the last committed root, computed from written and superseded pages.
    live: HashSet<Pointer>,
    highest: u8,
    ascending: u64,
}

impl World {
    fn new(seed: u64, shape: Shape) -> World {
        let medium = Arc::new(Medium::default());
        World {
            random: Random(seed),
            store: medium.cold(shape.budget),
            shape,
            medium,
            tree: Tree::empty(TreeId::Live),
            content: Content::new(),
            generation: Generation(1),
            superseded: Vec::new(),
            dirtied: 0,
            flight: None,
            pinned: Vec::new(),
            live: HashSet::new(),
            highest: 0,
            ascending: 0,
        }
    }

    fn key(&mut self) -> Key {
        let (objects, subs) = (self.shape.objects, self.shape.subs);
        match self.random.below(4) {
            0 => {
                self.ascending += 1;
                Key::new(objects, 7, self.ascending)
            }
            // An existing key, or the next one.
            1 => {
                let probe = Key::new(self.random.below(objects), 0, 0);
                self.content.range(probe..).next().map_or(probe, |entry| *entry.0)
            }
            _ => Key::new(self.random.below(objects), self.random.below(3) as u8, self.random.below(subs)),
        }
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..10 => self.operate(),
            10..12 => self.pinned.push((self.tree.clone(), self.content.clone())),
            12 if !self.pinned.is_empty() => {
                let at = self.random.below(self.pinned.len() as u64) as usize;
                let (tree, content) = self.pinned.swap_remove(at);
                assert!(scan_all(&self.store, &tree) == content, "TREE-1");
            }
            12..15 => self.search(),
            15..17 => self.freeze(),
            _ => self.land(),
        }
        while self.pinned.len() > 4 {
            let (tree, content) = self.pinned.remove(0);
            assert!(scan_all(&self.store, &tree) == content, "TREE-1");
        }
    }

    /// Runs one operation on a working copy, which is published or dropped half way.
    fn operate(&mut self) {
        let (mut tree, mut content) = (self.tree.clone(), self.content.clone());
        let mut edits = Edits::new(self.generation);
        // Whole phases of removal make trees shrink, merge and collapse.
        let removing = if self.random.below(4) == 0 { 9 } else { 3 };
        let clear = (self.random.below(12) == 0).then(|| Key::new(self.random.below(self.shape.objects), 0, 0));
        for _ in 0..1 + self.random.below(self.shape.batch) {
            let key = self.key();
            self.edit(&mut tree, &mut content, &mut edits, key, removing);
        }
        if let Some(from) = clear {
            let to = Key::new(from.object + self.shape.objects / 2, 0, 0);
            let keys: Vec<Key> = content.range(from..to).map(|entry| *entry.0).collect();
            for key in keys {
                self.edit(&mut tree, &mut content, &mut edits, key, 10);
            }
        }
        if self.random.below(5) == 0 {
            return;
        }
        self.highest = self.highest.max(tree.level);
        (self.tree, self.content) = (tree, content);
        self.superseded.append(&mut edits.superseded);
        self.dirtied += edits.dirtied;
        if self.flight.is_none() {
            assert_eq!(self.tree.count_dirty() as i64, self.dirtied);
        }
    }

    fn edit(&mut self, tree: &mut Tree, content: &mut Content, edits: &mut Edits, key: Key, removing: u64) {
        let (before, bound) = (edits.dirtied, 2 * (i64::from(tree.level) + 1) + 1);
        assert!(bound <= tree.worst_case_dirty() as i64);
        if self.random.below(10) < removing {
            let existed = tree.remove(&self.store, edits, key).unwrap();
            assert_eq!(existed, content.remove(&key).is_some());
            assert!(existed || edits.dirtied == before, "a key that is not there dirties nothing");
        } else {
            let longest = if self.random.below(3) == 0 { self.shape.longest } else { self.shape.longest.min(150) };
            let value = self.random.value(longest);
            let existed = tree.insert(&self.store, edits, key, &value).unwrap();
            assert_eq!(existed, content.insert(key, value).is_some());
        }
        assert!(edits.dirtied - before <= bound, "worst case");
    }

    /// Compares searches from the root with searches from the finger.
    fn search(&mut self) {
        let finger = Finger::default();
        let owned = |key: Key, value: &[u8]| Ok((key, value.to_vec()));
        for _ in 0..20 {
            let key = self.key();
            let expected = self.content.get(&key);
            assert_eq!(self.tree.get(&self.store, key, |value| Ok(value.to_vec())).unwrap().as_ref(), expected);
            let near = self.tree.get_near(&self.store, &finger, key, |value| Ok(value.to_vec())).unwrap();
            assert_eq!(near.as_ref(), expected);
            // The previous key may be in the previous leaf.
            for key in [Key { sub: key.sub.saturating_sub(1), ..key }, key] {
                let expected = self.content.range(..=key).next_back();
                let floor = self.tree.floor(&self.store, key, owned).unwrap();
                assert_eq!(floor.as_ref().map(|(key, value)| (key, value)), expected);
                let near = self.tree.floor_near(&self.store, &finger, key, owned).unwrap();
                assert_eq!(near.as_ref().map(|(key, value)| (key, value)), expected);
            }
        }
        let (from, to, most) = (self.key(), self.key(), self.random.below(500) as usize);
        let expected: Vec<_> =
            if from < to { self.content.range(from..to).take(most + 1).collect() } else { Vec::new() };
        for near in [false, true, true] {
            let mut got = Vec::new();
            let mut collect = |key, value: &[u8]| {
                got.push((key, value.to_vec()));
                Ok(if got.len() > most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            };
            if near {
                self.tree.scan_near(&self.store, &finger, from, to, &mut collect).unwrap();
            } else {
                self.tree.scan(&self.store, from, to, &mut collect).unwrap();
            }
            assert_eq!(got.iter().map(|(key, value)| (key, value)).collect::<Vec<_>>(), expected);
        }
    }

    /// Begins a commit: the published version is frozen, edits continue in the next transaction.
    fn freeze(&mut self) {
        if self.flight.is_some() {
            return;
        }
        self.flight = Some(Flight {
            tree: self.tree.clone(),
            content: self.content.clone(),
            generation: self.generation,
            superseded: std::mem::take(&mut self.superseded),
            dirtied: std::mem::take(&mut self.dirtied),
        });
        self.generation = self.generation.next();
    }

    /// Ends the commit in flight: all nodes are written, the page accounting is checked, and
    /// written nodes are dropped from the newest version.
    fn land(&mut self) {
        let Some(flight) = self.flight.take() else { return };
        let before = self.medium.pages.lock().len();
        let medium = Arc::clone(&self.medium);
        let mut written = Vec::new();
        let mut write = |_, bytes| {
            written.push(medium.write(flight.generation, bytes));
            Ok(written[written.len() - 1])
        };
        let root = flight.tree.flush(&self.store, &mut write).unwrap();
        assert_eq!(written.len() as i64, flight.dirtied, "a commit writes what its operations dirtied");
        self.live.extend(written);
        for node in &flight.superseded {
            let pointer = node.stored.get().expect("an older commit has written it");
            assert!(self.live.remove(pointer), "TREE-3: superseded once");
            self.store.forget(pointer);
        }
        let again = self.medium.flush(&self.store, &flight.tree, flight.generation);
        assert_eq!(again, root);
        assert_eq!(self.medium.pages.lock().len(), before + flight.dirtied as usize, "written once");

        let cold = self.medium.cold(0);
        let reloaded = Tree::from_root(TreeId::Live, &root);
        assert!(pages_of(&cold, &reloaded) == self.live, "no page leaks");
        assert!(scan_all(&cold, &reloaded) == flight.content);
        assert!(cold.memory() == 0);

        self.tree.forget_written();
        self.tree.root.iter().for_each(assert_settled);
        assert_eq!(self.tree.count_dirty() as i64, self.dirtied);
        assert!(pages_of(&self.store, &self.tree).is_subset(&self.live));
        check_structure(&self.store, &self.tree);
        assert!(self.store.memory() <= self.shape.budget);
        if self.dirtied == 0 && self.superseded.is_empty() && self.random.below(2) == 0 {
            self.store = self.medium.cold(self.shape.budget);
            self.tree = reloaded;
        }
    }

    fn start(&mut self) {
        let mut edits = Edits::new(self.generation);
        for _ in 0..self.shape.start {
            let (key, value) = (self.key(), self.random.value(self.shape.longest));
            self.tree.insert(&self.store, &mut edits, key, &value).unwrap();
            self.content.insert(key, value);
        }
        self.dirtied = edits.dirtied;
        self.highest = self.tree.level;
    }

    fn run(&mut self) {
        self.start();
        for _ in 0..self.shape.steps {
            self.step();
        }
        for _ in 0..2 {
            self.land();
            self.freeze();
        }
        self.land();
        while let Some((tree, content)) = self.pinned.pop() {
            assert!(scan_all(&self.store, &tree) == content, "TREE-1");
        }
        // Shrinks the tree to nothing.
        let keys: Vec<Key> = self.content.keys().copied().collect();
        let mut edits = Edits::new(self.generation);
        for key in keys {
            let (mut tree, mut content) = (self.tree.clone(), std::mem::take(&mut self.content));
            self.edit(&mut tree, &mut content, &mut edits, key, 10);
            (self.tree, self.content) = (tree, content);
        }
        assert!(self.tree.root.is_none() && self.tree.level == 0);
        self.superseded.append(&mut edits.superseded);
        self.dirtied = edits.dirtied;
        assert_eq!(self.dirtied, 0);
        self.freeze();
        self.land();
        assert!(self.live.is_empty(), "an empty tree has no pages");
    }
}

#[test]
fn trees_of_small_values_answer_like_a_map() {
    for seed in Seed::choose(0..12) {
        let _seed = Seed(seed);
        let shape = Shape { start: 0, objects: 40, subs: 60, longest: 150, batch: 150, steps: 250, budget: 1 << 20 };
        World::new(seed, shape).run();
    }
}

#[test]
fn trees_of_long_values_answer_like_a_map() {
    let mut highest = 0;
    for seed in Seed::choose(100..103) {
        let _seed = Seed(seed);
        let shape =
            Shape { start: 6000, objects: 3000, subs: 3, longest: 3500, batch: 400, steps: 80, budget: 1 << 20 };
        let mut world = World::new(seed, shape);
        world.run();
        highest = highest.max(world.highest);
    }
    assert!(highest >= 2, "internal nodes split too");
}

#[test]
fn trees_of_a_few_records_answer_like_a_map() {
    for seed in Seed::choose(200..260) {
        let _seed = Seed(seed);
        let shape = Shape { start: 0, objects: 4, subs: 4, longest: 3500, batch: 3, steps: 200, budget: 0 };
        World::new(seed, shape).run();
    }
}
