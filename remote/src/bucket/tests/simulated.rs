//! A store whose requests are lost, answered to nobody, carried out late and twice; and actors that
//! take turns at every request, so that each order of their requests is possible and a seed names
//! one.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::super::objects::{BatchRemoval, BatchReply, ListedObject, ObjectCreation, ObjectRange, ObjectStore};
use super::super::store::ORDER;
use super::GRACE;
use crate::range_source::{RemoteError, RemoteResult};

/// Chance, the same for a seed.
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn of(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    pub(super) fn noise(&mut self, length: usize) -> Vec<u8> {
        let mut noise = vec![0; length];
        for some in noise.chunks_mut(3) {
            some.copy_from_slice(&self.below(1 << 24).to_le_bytes()[..some.len()]);
        }
        noise
    }

    pub(super) fn one_in(&mut self, count: u64) -> bool {
        count > 0 && self.below(count) == 0
    }
}

/// What a store does wrong, and what it counts.
pub(super) struct World {
    state: Mutex<State>,
    turned: Condvar,
}

pub(super) struct State {
    pub(super) objects: BTreeMap<String, Vec<u8>>,
    /// When each of them was created.
    pub(super) times: BTreeMap<String, u64>,
    /// Creations that are carried out some time.
    late: Vec<(String, Vec<u8>)>,
    pub(super) clock: u64,
    pub(super) dice: Dice,
    /// One in so many requests meets a fault of each kind; 0 for none.
    pub(super) faults: u64,
    /// Whether creations are made although there is an object of the name.
    pub(super) overwrites: bool,
    /// Whether nobody is answered, and whether removals are refused.
    pub(super) away: bool,
    pub(super) keeps: bool,
    /// True if it removes in batches.
    pub(super) batches: bool,
    /// Batches that it rejects before it takes one.
    pub(super) rejected_batches: usize,
    /// Names of objects that it does not remove.
    pub(super) locked: Vec<String>,
    pub(super) requests: Vec<String>,
    /// Bytes of objects that were sent to be made, and that were asked for and came.
    pub(super) sent: u64,
    pub(super) came: u64,
    /// Actors that are not done; whose turn it is.
    actors: Vec<u64>,
    turn: Option<u64>,
    turns: u64,
    /// Until which turn an actor sleeps.
    asleep: BTreeMap<u64, u64>,
}

impl World {
    pub(super) fn new(seed: u64, faults: u64) -> Arc<World> {
        let state = State {
            objects: BTreeMap::new(),
            times: BTreeMap::new(),
            late: Vec::new(),
            clock: 1_700_000_000,
            dice: Dice::of(seed),
            faults,
            overwrites: false,
            away: false,
            keeps: false,
            batches: faults > 0 && seed.is_multiple_of(2),
            rejected_batches: 0,
            locked: Vec::new(),
            requests: Vec::new(),
            sent: 0,
            came: 0,
            actors: Vec::new(),
            turn: None,
            turns: 0,
            asleep: BTreeMap::new(),
        };
        Arc::new(World { state: Mutex::new(state), turned: Condvar::new() })
    }

    /// The store as an actor of this number sees it.
    pub(super) fn store(self: &Arc<World>, actor: u64) -> Box<dyn ObjectStore> {
        Box::new(Seen { world: self.clone(), actor, dead: Mutex::new(false) })
    }

    pub(super) fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.state.lock())
    }

    /// Runs actors side by side, one at a time.
    pub(super) fn play(self: &Arc<World>, actors: Vec<Box<dyn FnOnce() + Send + '_>>) {
        {
            let mut state = self.state.lock();
            state.actors = (1..=actors.len() as u64).collect();
            state.next();
        }
        std::thread::scope(|scope| {
            for (number, actor) in (1..).zip(actors) {
                scope.spawn(move || {
                    let world = self.clone();
                    ORDER.set(Some(Box::new(move || world.with(|state| state.dice.one_in(2)))));
                    let done = Done { world: self, number };
                    done.world.wait(number);
                    actor();
                });
            }
        });
        self.state.lock().turn = None;
    }

    fn wait(&self, actor: u64) {
        let mut state = self.state.lock();
        while state.turn.is_some_and(|turn| turn != actor) {
            self.turned.wait(&mut state);
        }
    }
}

/// An actor that ends, in a panic too.
struct Done<'a> {
    world: &'a World,
    number: u64,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut state = self.world.state.lock();
        state.actors.retain(|actor| *actor != self.number);
        state.next();
        self.world.turned.notify_all();
    }
}

impl State {
    fn next(&mut self) {
        self.turns += 1;
        // Some sleep while others come and go.
        if let Some(turn) = self.turn.filter(|_| self.dice.one_in(12)) {
            let until = self.turns + self.dice.below(90);
            self.asleep.insert(turn, until);
        }
        let is_awake = |actor: &&u64| self.asleep.get(actor).is_none_or(|until| *until <= self.turns);
        let mut ready: Vec<u64> = self.actors.iter().filter(is_awake).copied().collect();
        if ready.is_empty() {
            ready.clone_from(&self.actors);
        }
        let count = ready.len() as u64;
        self.turn = (count > 0).then(|| ready[self.dice.below(count) as usize]);
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> bool {
        let is_new = !self.objects.contains_key(name);
        if is_new || self.overwrites {
            self.objects.insert(name.to_owned(), bytes.to_vec());
            self.times.insert(name.to_owned(), self.clock);
        }
        is_new || self.overwrites
    }

    /// What the world does between two requests.
    fn passes(&mut self) {
        self.clock += 1;
        if self.dice.one_in(self.faults * 2) {
            self.clock += GRACE + 1;
        }
        if !self.late.is_empty() && self.dice.one_in(4) {
            let at = self.dice.below(self.late.len() as u64) as usize;
            let (name, bytes) = self.late.swap_remove(at);
            self.requests.push(format!("late {name}"));
            self.put(&name, &bytes);
        }
    }
}

/// What one actor sees.
struct Seen {
    world: Arc<World>,
    actor: u64,
    /// It was killed: nothing that it asks for is carried out any more.
    dead: Mutex<bool>,
}

enum Fault {
    None,
    /// Not carried out.
    Lost,
    /// Carried out, and the answer is lost.
    Silent,
    /// Carried out some time.
    Late,
}

impl Seen {
    fn request<T>(&self, what: String, work: impl FnOnce(&mut State, &Fault) -> RemoteResult<T>) -> RemoteResult<T> {
        if *self.dead.lock() {
            return Err(RemoteError::Denied("it was killed".into()));
        }
        {
            let mut state = self.world.state.lock();
            if state.turn.is_some() {
                state.next();
                self.world.turned.notify_all();
            }
        }
        self.world.wait(self.actor);
        let mut state = self.world.state.lock();
        state.passes();
        let faults = state.faults;
        if state.dice.one_in(faults * 4) {
            *self.dead.lock() = true;
            return Err(RemoteError::Denied("it was killed".into()));
        }
        let fault = match state.dice.below(3) {
            _ if state.away => Fault::Lost,
            _ if !state.dice.one_in(faults) => Fault::None,
            0 => Fault::Lost,
            1 => Fault::Silent,
            _ => Fault::Late,
        };
        let mark = match fault {
            Fault::None => "",
            Fault::Lost => " LOST",
            Fault::Silent => " SILENT",
            Fault::Late => " LATE",
        };
        let line = format!("{} {} {what}{mark}", state.clock, self.actor);
        if std::env::var_os("TRACE").is_some() {
            println!("{line}");
        }
        state.requests.push(line);
        let answer = work(&mut state, &fault);
        match fault {
            Fault::None => answer,
            _ => Err(RemoteError::Transient("no answer".into())),
        }
    }
}

impl ObjectStore for Seen {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.request(format!("create {name}"), |state, fault| {
            state.sent += bytes.len() as u64;
            match fault {
                Fault::Lost => return Err(RemoteError::NotFound),
                Fault::Late => {
                    state.late.push((name.to_owned(), bytes.to_vec()));
                    return Err(RemoteError::NotFound);
                }
                Fault::None | Fault::Silent => {}
            }
            let made = state.put(name, bytes);
            Ok(if made { ObjectCreation::Created(Some(state.clock)) } else { ObjectCreation::Exists })
        })
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.request(format!("get {name}"), |state, _| {
            let bytes = state.objects.get(name).ok_or(RemoteError::NotFound)?;
            let bytes = part.slice(bytes)?;
            state.came += bytes.len() as u64;
            Ok(bytes)
        })
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.request(format!("list {prefix}"), |state, _| {
            let found = state.objects.iter().filter(|(name, _)| name.starts_with(prefix) && ***name > *after);
            let listed = |(name, bytes): (&String, &Vec<u8>)| ListedObject {
                name: name.clone(),
                bytes: bytes.len() as u64,
                time: state.times.get(name).copied(),
            };
            Ok(found.take(most).map(listed).collect())
        })
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.request(format!("remove {name}"), |state, fault| {
            if state.keeps {
                return Err(RemoteError::Denied("you may not".into()));
            }
            if state.locked.iter().any(|locked| locked == name) {
                return Err(RemoteError::Unsupported("it responds with status 409 SnapshotsPresent".into()));
            }
            if !matches!(fault, Fault::Lost) {
                state.objects.remove(name);
            }
            Ok(())
        })
    }

    /// A part may be refused, by chance too.
    fn remove_batch(&self, names: &[String]) -> RemoteResult<BatchReply> {
        if !self.world.with(|state| state.batches) {
            return Ok(BatchReply::Unsupported);
        }
        let is_rejected = self.world.with(|state| {
            let faults = state.faults;
            let by_chance = state.dice.one_in(faults);
            let is_next = state.rejected_batches > 0;
            state.rejected_batches -= usize::from(is_next);
            is_next || by_chance
        });
        if is_rejected {
            return self.request(format!("remove batch of {} REJECTED", names.len()), |_, _| Ok(BatchReply::Rejected));
        }
        self.request(format!("remove batch of {}", names.len()), |state, fault| {
            let mut batch = BatchRemoval::default();
            for name in names {
                let faults = state.faults;
                if state.keeps || state.locked.contains(name) || state.dice.one_in(faults) {
                    batch.error = Some(RemoteError::Denied("you may not".into()));
                    continue;
                }
                if !matches!(fault, Fault::Lost) {
                    state.objects.remove(name);
                }
                batch.removed.insert(name.clone());
            }
            Ok(BatchReply::Done(batch))
        })
    }
}
