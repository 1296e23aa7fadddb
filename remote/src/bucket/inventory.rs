//! What lies in a store, told without a key: the archives below a prefix, and whether all is there that the newest record of one names.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use lockbox::{Error, Result};
use lockbox_terminal::display;
use rangemap::RangeSet;
use sha2::{Digest, Sha256};

use super::layout::{self, BLOCK, Dead, Incarnation, Kind, TRAILER_BYTES, Trailer};
use super::object_names::{hex, id_of, path, what};
use super::object_ref::Id;
use super::objects::{Barred, Created, Listed, Objects, Part};
use super::store::{MARKER, Store};
use super::version::Moment;
use crate::Options;
use crate::range_source::Trouble;

/// Times that an examination begins anew because the writer went on while it looked.
const TRIES: usize = 8;

/// Is told of each request that takes time, with bytes done and bytes to do where those are known; an error ends the work.
pub type Step<'a> = dyn FnMut(u64, u64) -> Result<()> + 'a;

/// So many objects with so many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub objects: u64,
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// An archive in a store, or a directory that cannot be looked into.
#[derive(Debug)]
pub struct Stored {
    pub address: String,
    /// All objects that it has, needed or not.
    pub amount: Amount,
    /// When the store got its newest record, in seconds since 1970.
    pub time: Option<u64>,
    /// What its newest record says; None before a writer has committed anything.
    pub newest: Result<Option<Newest>>,
}

/// What the newest record of an archive says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest {
    pub number: u64,
    /// Of the archive, in bytes.
    pub length: u64,
    /// The machine of a writer who has not said that it went.
    pub writer: Option<String>,
}

/// The objects below a further prefix.
pub(super) struct Below {
    pub(super) objects: Arc<dyn Objects>,
    pub(super) prefix: String,
}

impl Below {
    /// A list without the prefix in its names.
    fn stripped(
        &self,
        after: &str,
        list: impl FnOnce(&str) -> std::result::Result<Vec<Listed>, Trouble>,
    ) -> std::result::Result<Vec<Listed>, Trouble> {
        let after = if after.is_empty() { String::new() } else { format!("{}{after}", self.prefix) };
        let mut listed = list(&after)?;
        for object in &mut listed {
            object.name = object.name.get(self.prefix.len()..).unwrap_or_default().to_owned();
        }
        Ok(listed)
    }
}

impl Objects for Below {
    fn create(&self, name: &str, bytes: &[u8]) -> std::result::Result<Created, Trouble> {
        self.objects.create(&format!("{}{name}", self.prefix), bytes)
    }

    fn get(&self, name: &str, part: Part) -> std::result::Result<Vec<u8>, Trouble> {
        self.objects.get(&format!("{}{name}", self.prefix), part)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> std::result::Result<Vec<Listed>, Trouble> {
        self.stripped(after, |after| self.objects.list(&format!("{}{prefix}", self.prefix), after, most))
    }

    fn list_what_can_be(
        &self,
        prefix: &str,
        after: &str,
        most: usize,
        barred: &mut Barred<'_>,
    ) -> std::result::Result<Vec<Listed>, Trouble> {
        let mut own = |name: &str, trouble| barred(name.get(self.prefix.len()..).unwrap_or_default(), trouble);
        self.stripped(after, |after| {
            self.objects.list_what_can_be(&format!("{}{prefix}", self.prefix), after, most, &mut own)
        })
    }

    fn remove(&self, name: &str) -> std::result::Result<(), Trouble> {
        self.objects.remove(&format!("{}{name}", self.prefix))
    }
}

/// What is known of the objects of one incarnation from their names.
#[derive(Default)]
struct Seen {
    amount: Amount,
    /// The record that is listed first, and when the store got it.
    newest: Option<(String, Option<u64>)>,
}

/// The archives whose objects are among these, by name, with the address of each that `address` makes of the name; behind them the directories that cannot be looked into, of which nobody knows what is in them.
///
/// # Errors
/// Those of requests and of `step`; `Unsupported` for more objects than are looked through.
pub(crate) fn archives(
    objects: Box<dyn Objects>,
    address: &dyn Fn(&str) -> String,
    options: &Options,
    step: &mut Step<'_>,
) -> Result<Vec<Stored>> {
    let objects: Arc<dyn Objects> = objects.into();
    let below = |prefix: &str| Below { objects: objects.clone(), prefix: prefix.to_owned() };
    let store = Store::new(Box::new(below("")), display(address("").as_bytes()), options.timeout);
    // By the archive's name and its incarnation: of a prefix that was emptied and made anew there may be two.
    let mut seen: BTreeMap<(String, String), Seen> = BTreeMap::new();
    let mut markers: Vec<(String, u64)> = Vec::new();
    let mut barred: BTreeMap<String, Trouble> = BTreeMap::new();
    let mut bar = |name: &str, trouble| {
        barred.insert(name.to_owned(), trouble);
        Ok(())
    };
    store.walk_what_can_be("", &mut bar, &mut |object| {
        step(0, 0)?;
        if let Some(above) = object.name.strip_suffix(MARKER)
            && (above.is_empty() || above.ends_with('/'))
        {
            markers.push((above.to_owned(), object.bytes));
        } else if let Some((above, incarnation, part)) = of_archive(&object.name) {
            let seen = seen.entry((above.to_owned(), incarnation.to_owned())).or_default();
            seen.amount.add(object.bytes);
            if part.starts_with("log/") && seen.newest.is_none() {
                seen.newest = Some((part.to_owned(), object.time));
            }
        }
        Ok(())
    })?;
    let mut found = Vec::new();
    let address = |above: &str| address(above.trim_end_matches('/'));
    let place = |above: &str| Store::new(Box::new(below(above)), display(address(above).as_bytes()), options.timeout);
    for (above, bytes) in markers {
        step(0, 0)?;
        let store = place(&above);
        let mut stored =
            Stored { address: address(&above), amount: Amount { objects: 1, bytes }, time: None, newest: Ok(None) };
        match store.known() {
            Ok(incarnation) => {
                if let Some(seen) = seen.get(&(above, hex(&incarnation))) {
                    stored.amount.objects += seen.amount.objects;
                    stored.amount.bytes = stored.amount.bytes.saturating_add(seen.amount.bytes);
                    stored.time = seen.newest.as_ref().and_then(|(_, time)| *time);
                }
                stored.newest = newest(&store, &incarnation);
            }
            // It was removed meanwhile.
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => stored.newest = Err(error),
        }
        found.push(stored);
    }
    for (above, trouble) in barred {
        found.push(Stored {
            address: address(&above),
            amount: Amount::default(),
            time: None,
            newest: Err(place(&above).told(trouble)),
        });
    }
    Ok(found)
}

/// The archive's name with its slash, the incarnation and the rest, of the name of an object that one has.
fn of_archive(name: &str) -> Option<(&str, &str, &str)> {
    let mut slashes = name.rmatch_indices('/').map(|(at, _)| at);
    let (_, last) = (slashes.next()?, slashes.next()?);
    let (above, part) = name.split_at(last);
    let begin = above.rfind('/').map_or(0, |at| at + 1);
    let (above, incarnation) = above.split_at(begin);
    let is_incarnation = incarnation.len() == 32 && incarnation.bytes().all(|digit| digit.is_ascii_hexdigit());
    let part = &part[1..];
    let is_part = ["log/", "seg/", "map/"].iter().any(|known| part.starts_with(known));
    (is_incarnation && is_part).then_some((above, incarnation, part))
}

fn newest(store: &Store, incarnation: &Incarnation) -> Result<Option<Newest>> {
    let Some(number) = store.newest(incarnation)? else { return Ok(None) };
    // Removed meanwhile: there is a newer one, which the next look finds.
    let Some((trailer, said)) = store.record(incarnation, number)? else { return Ok(None) };
    let writer = (trailer.kind != Kind::Close).then_some(said.owner.host);
    Ok(Some(Newest { number, length: trailer.length, writer }))
}

/// What an examination found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Examined {
    /// Of the newest record.
    pub number: u64,
    /// What that needs.
    pub needed: Amount,
    /// What is not as it has to be, a sentence each.
    pub faults: Vec<String>,
    /// What is said to be needed no more, and is removed after a day.
    pub dead: Amount,
    /// What no record names: of a writer that is at work, or was stopped.
    pub unnamed: Amount,
    /// Records that stay, so that their numbers are taken.
    pub records: Amount,
    /// Bytes that were read and compared.
    pub read: u64,
}

/// Whether all is there that the newest record names, with the length that it was made with; and with `whole`, with the content.
///
/// # Errors
/// Those of requests and of `step`; `NotArchive`; `Damaged` when there is no newest record that can be read.
pub(crate) fn examine(
    objects: Box<dyn Objects>,
    name: String,
    options: &Options,
    whole: bool,
    step: &mut Step<'_>,
) -> Result<Examined> {
    let store = Store::new(objects, name, options.timeout);
    let incarnation = store.known()?;
    examine_of(&store, &incarnation, whole, step)
}

/// The same with the content, where an archive has objects; None where it is one object itself.
///
/// # Errors
/// As of [`examine`].
pub(crate) fn compare(
    objects: Box<dyn Objects>,
    name: String,
    options: &Options,
    step: &mut Step<'_>,
) -> Result<Option<Examined>> {
    let store = Store::new(objects, name, options.timeout);
    match store.look() {
        Ok(Some(found)) => examine_of(&store, &found?.0, true, step).map(Some),
        Ok(None) => Ok(None),
        Err(Trouble::Refused(_)) if store.objects.hides() => Ok(None),
        Err(trouble) => Err(store.told(trouble)),
    }
}

fn examine_of(store: &Store, incarnation: &Incarnation, whole: bool, step: &mut Step<'_>) -> Result<Examined> {
    let mut last = None;
    for _ in 0..TRIES {
        let Some(moment) = Moment::newest(store, incarnation)? else {
            return Err(Error::NotArchive(format!("{}: a writer came and has not committed anything yet", store.name)));
        };
        let examined = examine_moment(store, incarnation, &moment, whole, step)?;
        // What was missing may have been removed since: it is looked at anew where the writer went on.
        if examined.faults.is_empty() || store.newest(incarnation)? == Some(examined.number) {
            return Ok(examined);
        }
        last = Some(examined);
    }
    last.ok_or_else(|| Error::InUse(format!("{}: its writer goes on all the time", store.name)))
}

fn examine_moment(
    store: &Store,
    incarnation: &Incarnation,
    moment: &Moment,
    whole: bool,
    step: &mut Step<'_>,
) -> Result<Examined> {
    let number = moment.trailer.sequence;
    let mut examined = Examined { number, ..Examined::default() };
    let mut there: BTreeMap<Id, u64> = BTreeMap::new();
    store.walk(&format!("{}/", hex(incarnation)), &mut |object| {
        step(0, 0)?;
        if let Some(id) = id_of(incarnation, &object.name) {
            there.insert(id, object.bytes);
        }
        Ok(())
    })?;
    // Not each of them: a stranger's list may name many millions.
    let (records, objects): (Vec<&Dead>, Vec<&Dead>) =
        moment.dead.iter().partition(|dead| matches!(dead.id, Id::Log(_)));
    let run = |dead: &Dead| match dead.id {
        Id::Log(first) => first..first.saturating_add(u64::from(dead.more) + 1),
        Id::Segment(_) | Id::Checkpoint(_) => 0..0,
    };
    let records: RangeSet<u64> = records.into_iter().map(run).collect();
    let objects: HashSet<Id> = objects.into_iter().map(|dead| dead.id).collect();
    let is_dead = |id: &Id| match id {
        Id::Log(sequence) => records.contains(sequence),
        id => objects.contains(id),
    };
    let mut needed: Vec<(Id, Shape)> = moment.map.sized().map(|(id, blocks)| (id, Shape::Pages(blocks))).collect();
    needed.retain(|(id, _)| *id != Id::Log(number));
    needed.push((Id::Log(number), Shape::Exactly(moment.trailer.bytes())));
    needed.extend(moment.trailer.checkpoint.map(|(hash, bytes)| (Id::Checkpoint(hash), Shape::Exactly(bytes))));
    let named: HashSet<Id> = needed.iter().map(|(id, _)| *id).collect();
    for (id, bytes) in &there {
        match id {
            id if named.contains(id) => examined.needed.add(*bytes),
            id if is_dead(id) => examined.dead.add(*bytes),
            Id::Log(_) => examined.records.add(*bytes),
            Id::Segment(_) | Id::Checkpoint(_) => examined.unnamed.add(*bytes),
        }
    }
    let total = if whole { examined.needed.bytes } else { 0 };
    for (id, shape) in needed {
        let Some(bytes) = there.get(&id) else {
            // Some stores list late.
            match store.get(&path(incarnation, &id), Part::Last(1)) {
                Err(Trouble::Gone) => examined.faults.push(format!("{} is missing", what(&id))),
                Err(trouble) => return Err(store.told(trouble)),
                Ok(_) => examined.needed.objects += 1,
            }
            step(examined.read, total)?;
            continue;
        };
        if !shape.fits(&id, *bytes) {
            examined
                .faults
                .push(format!("{} has {bytes} bytes, which is not the length that it was made with", what(&id)));
        } else if whole {
            step(examined.read, total)?;
            match store.get(&path(incarnation, &id), Part::All(*bytes)) {
                Ok(content) if is_content(incarnation, &id, &content) => {}
                Ok(_) => examined.faults.push(format!("{} has other bytes than it was made with", what(&id))),
                Err(Trouble::Gone) => examined.faults.push(format!("{} is missing", what(&id))),
                Err(trouble) => return Err(store.told(trouble)),
            }
            examined.read += bytes;
        }
    }
    examined.faults.sort();
    Ok(examined)
}

/// What is known of an object's length.
#[derive(Clone, Copy)]
enum Shape {
    Exactly(u64),
    /// So many blocks of pages, and what stands behind them.
    Pages(u32),
}

impl Shape {
    fn fits(self, id: &Id, bytes: u64) -> bool {
        match (self, id) {
            (Shape::Exactly(wanted), _) => bytes == wanted,
            (Shape::Pages(blocks), Id::Segment(_)) => layout::is_length_of_segment(blocks, bytes),
            (Shape::Pages(blocks), _) => {
                let said = bytes.checked_sub(u64::from(blocks) * BLOCK + TRAILER_BYTES as u64);
                said.is_some_and(|said| said <= layout::MAX_SAID)
            }
        }
    }
}

/// Whether the bytes are those of the object of this name.
fn is_content(incarnation: &Incarnation, id: &Id, bytes: &[u8]) -> bool {
    match id {
        Id::Segment(hash) | Id::Checkpoint(hash) => *hash == *Sha256::digest(bytes),
        Id::Log(number) => {
            let Some(at) = bytes.len().checked_sub(TRAILER_BYTES) else { return false };
            let Ok(trailer) = Trailer::decode(&bytes[at..], incarnation) else { return false };
            if trailer.sequence != *number || trailer.bytes() != bytes.len() as u64 {
                return false;
            }
            let (pages, said) = bytes[..at].split_at((u64::from(trailer.blocks) * BLOCK) as usize);
            trailer.pages == *Sha256::digest(pages) && layout::decode_said(&trailer, said).is_ok()
        }
    }
}

/// What a collection did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Objects that were removed.
    pub removed: u64,
    /// Objects that nobody named and that are dead from now on.
    pub found: u64,
    /// Objects that are dead and stay until their day is over.
    pub waiting: u64,
    /// What the user should know about the writer's coming.
    pub notice: Option<String>,
}
