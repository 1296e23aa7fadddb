//! What an object store is asked for: four calls, and the names below an archive's prefix.

use crate::range_source::Trouble;

/// The most names that one answer of a list has.
pub(crate) const LISTED: usize = 1000;

/// Which bytes of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of an object that has so many bytes at most.
    All(u64),
    /// Just these: an offset and a length.
    Range(u64, u64),
    /// The last ones, or all of a shorter object.
    Last(u64),
}

impl Part {
    /// Of an object that is here.
    ///
    /// # Errors
    /// As of [`Objects::get`].
    pub(crate) fn of(self, object: &[u8]) -> Result<Vec<u8>, Trouble> {
        let length = object.len() as u64;
        let range = match self {
            Part::All(most) if length > most => {
                return Err(Trouble::Unusable("an object there is longer than it can be".into()));
            }
            Part::All(_) => 0..length,
            Part::Range(offset, count) => offset.min(length)..offset.saturating_add(count).min(length),
            Part::Last(most) => length.saturating_sub(most)..length,
        };
        Ok(object[range.start as usize..range.end as usize].to_vec())
    }
}

/// An object, as a list has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// When the store got it, by its clock in seconds since 1970, where it tells that.
    pub(crate) time: Option<u64>,
}

/// Hears of a directory that cannot be looked into; an error ends the list.
pub(crate) type Barred<'a> = dyn FnMut(&str, Trouble) -> Result<(), Trouble> + 'a;

/// What became of a creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Created {
    /// The object is durable. With the store's clock in seconds since 1970, where it tells it.
    Made(Option<u64>),
    /// There is one of this name, which may be an earlier attempt of the same request: never a verdict by itself.
    Exists,
}

/// The objects below one prefix of a store. None is ever overwritten: they are made once and removed once.
///
/// # Contract
/// OBJECTS-1  Of any number of creations of one name, before or after a removal of it is asked for, one at most succeeds while the object is there, and it has
///     all its bytes from then on.
/// OBJECTS-2  What was created is found by each later `get` and `list`, of whatever process.
/// OBJECTS-3  After `Trouble::Passing` nothing is known: the request may have been carried out, may yet be, or not.
pub(crate) trait Objects: Send + Sync {
    fn create(&self, name: &str, bytes: &[u8]) -> Result<Created, Trouble>;

    /// Whether a refusal may mean that there is no such object.
    fn hides(&self) -> bool {
        false
    }

    /// # Errors
    /// `Gone` when there is none of the name, `Unusable` when it has more than `All` says. Of a shorter object comes what it has.
    fn get(&self, name: &str, part: Part) -> Result<Vec<u8>, Trouble>;

    /// The first objects in the order of their names' bytes whose names begin with `prefix` and are behind `after`, at most [`LISTED`] and `most`.
    fn list(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<Listed>, Trouble>;

    /// The same for who only looks around: `barred` gets the name of each directory whose objects are missing, and why. It never gets one for who removes
    /// what nothing names, or takes what is missing for gone.
    fn list_what_can_be(
        &self,
        prefix: &str,
        after: &str,
        most: usize,
        _barred: &mut Barred<'_>,
    ) -> Result<Vec<Listed>, Trouble> {
        self.list(prefix, after, most)
    }

    /// Removes what creations in the directory `above` that were cut off left beside the objects; one that is under way there may fail.
    fn sweep(&self, _above: &str) -> Result<(), Trouble> {
        Ok(())
    }

    /// Succeeds as well when there is none.
    fn remove(&self, name: &str) -> Result<(), Trouble>;
}
