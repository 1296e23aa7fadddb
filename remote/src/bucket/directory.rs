//! The objects below a directory of this host, or of one that this host reaches as a file system.
//!
//! An object gets its name by a hard link, which fails when there is one, after all its bytes are on the medium; a file system without hard links is refused.
//! Everything goes through the directory that was opened: a name that somebody makes a link leads nowhere else.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::UNIX_EPOCH;

use lockbox::storage::host_call;
use lockbox::{Error, Result};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, linkat, mkdirat, openat2, statat, unlinkat};
use rustix::io::Errno;

use super::object_names::hex;
use super::objects::{Barred, Created, Listed, Objects, Part};
use crate::Names;
use crate::http::plain;
use crate::range_source::Trouble;

type Answer<T> = std::result::Result<T, Trouble>;

/// What a name of an object that is being written begins with: never listed.
const UNFINISHED: char = '.';
/// Directories in each other that a list goes down.
const DEEPEST: usize = 32;
/// Bytes of chance in such a name.
const CHANCE: usize = 16;
const INSIDE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

pub(crate) struct Directory {
    root: OwnedFd,
    /// Whether the file system may have files without names.
    nameless: bool,
}

impl Directory {
    /// # Errors
    /// Those of the host; for a writer a missing directory is made, but not those above it.
    pub(crate) fn open(path: &Path, writer: Option<Names>) -> Result<Directory> {
        let failed = |error: Errno| Error::io(format!("cannot open {}", path.display()), error.into());
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let follow = if writer == Some(Names::Theirs) { OFlags::NOFOLLOW } else { OFlags::empty() };
        let opened = match rustix::fs::open(path, flags | follow, Mode::empty()) {
            Err(Errno::NOENT) if writer.is_some() => {
                let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
                    return Err(failed(Errno::NOENT));
                };
                let above = rustix::fs::open(above, flags, Mode::empty()).map_err(failed)?;
                make(&above, name).map_err(failed)?;
                rustix::fs::openat(&above, name, flags | OFlags::NOFOLLOW, Mode::empty())
            }
            opened => opened,
        };
        match opened {
            Ok(root) => Ok(Directory { root, nameless: true }),
            Err(Errno::NOTDIR) => Err(Error::NotArchive(format!(
                "{} is no directory of an archive's objects; an archive that is a file is named by its path",
                path.display()
            ))),
            Err(error) => Err(failed(error)),
        }
    }

    fn inside(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        openat2(&self.root, path, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty(), INSIDE)
    }

    /// A directory of objects, to be listed; None when there is none.
    fn directory(&self, path: &str) -> Answer<Option<OwnedFd>> {
        match self.inside(Path::new(path), OFlags::DIRECTORY | OFlags::RDONLY) {
            Ok(directory) => Ok(Some(directory)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(trouble(error)),
        }
    }

    /// The directory that an object lies in, made when it is missing, and the object's name there.
    fn place(&self, name: &str, makes: bool) -> Answer<(OwnedFd, String)> {
        let (above, last) = name.rsplit_once('/').unwrap_or(("", name));
        let mut at = self.inside(Path::new("."), OFlags::DIRECTORY | OFlags::RDONLY).map_err(trouble)?;
        for part in above.split('/').filter(|part| !part.is_empty()) {
            let open = |at: &OwnedFd| {
                let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
                openat2(at, part, flags, Mode::empty(), INSIDE)
            };
            let next = match open(&at) {
                Err(Errno::NOENT) if makes => {
                    make(&at, part).map_err(trouble)?;
                    open(&at)
                }
                next => next,
            };
            at = next.map_err(trouble)?;
        }
        Ok((at, last.to_owned()))
    }
}

/// What a list is asked for.
struct Wanted<'a> {
    prefix: &'a str,
    after: &'a str,
    most: usize,
}

/// Lists what lies in a directory, whose name with its slash is `above`, and below it, in the order of whole names: a directory stands where its name with a slash does. One
/// of which nothing is wanted is not opened.
fn list_below(
    directory: &OwnedFd,
    above: &str,
    wanted: &Wanted<'_>,
    depth: usize,
    listed: &mut Vec<Listed>,
    barred: &mut Barred<'_>,
) -> Answer<()> {
    let mut entries = Vec::new();
    let read =
        rustix::fs::Dir::read_from(directory).and_then(|entries| entries.collect::<rustix::io::Result<Vec<_>>>());
    let read = match read {
        Ok(read) => read,
        Err(error) => return barred(above, trouble(error)),
    };
    for entry in read {
        let Ok(name) = entry.file_name().to_str() else { continue };
        if name.starts_with(UNFINISHED) || name == "." || name == ".." {
            continue;
        }
        let is_directory = match entry.file_type() {
            FileType::Unknown => statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir()),
            kind => kind.is_dir(),
        };
        let slash = if is_directory { "/" } else { "" };
        let whole = format!("{above}{name}{slash}");
        let is_wanted = match is_directory {
            // Something below it may begin so, and be behind that.
            true => {
                (whole.starts_with(wanted.prefix) || wanted.prefix.starts_with(&whole))
                    && (*whole > *wanted.after || wanted.after.starts_with(&whole))
            }
            false => whole.starts_with(wanted.prefix) && *whole > *wanted.after,
        };
        if is_wanted {
            entries.push(whole);
        }
    }
    entries.sort_unstable();
    for whole in entries {
        if listed.len() >= wanted.most {
            break;
        }
        let name = whole[above.len()..].trim_end_matches('/');
        if whole.ends_with('/') {
            let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match openat2(directory, name, flags, Mode::empty(), INSIDE) {
                Ok(below) if depth > 0 => list_below(&below, &whole, wanted, depth - 1, listed, barred)?,
                Ok(_) => {
                    let why = "its directories lie deeper in each other than objects can";
                    barred(&whole, Trouble::Unusable(why.into()))?;
                }
                // Removed, or something else by now.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(error) => barred(&whole, trouble(error))?,
            }
            continue;
        }
        match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => listed.push(Listed {
                bytes: u64::try_from(stat.st_size).unwrap_or_default(),
                time: u64::try_from(stat.st_mtime).ok(),
                name: whole,
            }),
            Err(Errno::NOENT) => {}
            Err(error) => barred(above, trouble(error))?,
        }
    }
    Ok(())
}

/// Makes a directory, durably: or the objects in it are lost with it.
fn make(above: &OwnedFd, name: impl rustix::path::Arg) -> rustix::io::Result<()> {
    match mkdirat(above, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => host_call::sync(above),
        Err(error) => Err(error),
    }
}

impl Objects for Directory {
    fn create(&self, name: &str, bytes: &[u8]) -> Answer<Created> {
        let (place, name) = self.place(name, true)?;
        let unfinished = Unfinished::new(&place, self.nameless).map_err(trouble)?;
        let date = unfinished.write(bytes).map_err(|error| io_trouble(&error))?;
        let linked = unfinished.link(&place, &name);
        unfinished.forget(&place);
        match linked {
            Ok(()) => {
                host_call::sync(&place).map_err(trouble)?;
                Ok(Created::Made(date))
            }
            Err(Errno::EXIST) => {
                // It may be the caller's own, of an attempt whose end was not seen.
                host_call::sync(&place).map_err(trouble)?;
                Ok(Created::Exists)
            }
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => Err(Trouble::Unusable(
                "its file system has no hard links, without which two writers could destroy each other's work".into(),
            )),
            Err(error) => Err(trouble(error)),
        }
    }

    fn get(&self, name: &str, part: Part) -> Answer<Vec<u8>> {
        // A FIFO would be waited for.
        let file = self.inside(Path::new(name), OFlags::RDONLY | OFlags::NONBLOCK).map_err(trouble)?;
        let mut file = File::from(file);
        let metadata = file.metadata().map_err(|error| io_trouble(&error))?;
        if !metadata.is_file() {
            return Err(Trouble::Unusable("there is something else in an object's place".into()));
        }
        let length = metadata.len();
        let (offset, count) = match part {
            Part::All(most) if length > most => {
                return Err(Trouble::Unusable("an object there is longer than it can be".into()));
            }
            Part::All(_) => (0, length),
            Part::Range(offset, count) => (offset, count.min(length.saturating_sub(offset))),
            Part::Last(most) => (length.saturating_sub(most), length.min(most)),
        };
        let mut bytes = Vec::new();
        let read = file.seek(SeekFrom::Start(offset)).and_then(|_| file.take(count).read_to_end(&mut bytes));
        read.map_err(|error| io_trouble(&error))?;
        Ok(bytes)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> Answer<Vec<Listed>> {
        self.list_what_can_be(prefix, after, most, &mut |_, trouble| Err(trouble))
    }

    fn list_what_can_be(&self, prefix: &str, after: &str, most: usize, barred: &mut Barred<'_>) -> Answer<Vec<Listed>> {
        let (above, _) = prefix.rsplit_once('/').unwrap_or(("", prefix));
        let mut listed = Vec::new();
        if let Some(directory) = self.directory(if above.is_empty() { "." } else { above })? {
            let above = if above.is_empty() { String::new() } else { format!("{above}/") };
            list_below(&directory, &above, &Wanted { prefix, after, most }, DEEPEST, &mut listed, barred)?;
        }
        Ok(listed)
    }

    /// What cannot be removed now is left for the next writer.
    fn sweep(&self, above: &str) -> Answer<()> {
        let Some(directory) = self.directory(above)? else { return Ok(()) };
        for entry in rustix::fs::Dir::read_from(&directory).map_err(trouble)? {
            let entry = entry.map_err(trouble)?;
            let Some(digits) = entry.file_name().to_str().ok().and_then(|name| name.strip_prefix(UNFINISHED)) else {
                continue;
            };
            if digits.len() == 2 * CHANCE && digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                let _ = unlinkat(&directory, entry.file_name(), AtFlags::empty());
            }
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> Answer<()> {
        let (place, name) = match self.place(name, false) {
            Err(Trouble::Gone) => return Ok(()),
            place => place?,
        };
        match unlinkat(&place, &*name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(trouble(error)),
        }
    }
}

/// A file that has no name yet, or where the file system makes none such, one that is never listed.
struct Unfinished {
    file: File,
    name: Option<String>,
}

impl Unfinished {
    fn new(place: &OwnedFd, nameless: bool) -> rustix::io::Result<Unfinished> {
        let mode = Mode::RUSR | Mode::WUSR;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        if nameless {
            match openat2(place, ".", flags | OFlags::TMPFILE, mode, INSIDE) {
                Ok(file) => return Ok(Unfinished { file: file.into(), name: None }),
                Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        let mut chance = [0; CHANCE];
        getrandom::fill(&mut chance).map_err(|_| Errno::AGAIN)?;
        let name = format!("{UNFINISHED}{}", hex(&chance));
        let file = openat2(place, &*name, flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode, INSIDE)?;
        Ok(Unfinished { file: file.into(), name: Some(name) })
    }

    /// All of it, on the medium; with the time of its file system in seconds since 1970.
    fn write(&self, bytes: &[u8]) -> std::io::Result<Option<u64>> {
        (&self.file).write_all(bytes)?;
        self.file.sync_all()?;
        Ok(self.file.metadata()?.modified()?.duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs()))
    }

    fn link(&self, place: &OwnedFd, name: &str) -> rustix::io::Result<()> {
        match &self.name {
            Some(unfinished) => linkat(place, &**unfinished, place, name, AtFlags::empty()),
            None => {
                let descriptor = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                linkat(rustix::fs::CWD, &*descriptor, place, name, AtFlags::SYMLINK_FOLLOW)
            }
        }
    }

    fn forget(&self, place: &OwnedFd) {
        if let Some(name) = &self.name {
            let _ = unlinkat(place, &**name, AtFlags::empty());
        }
    }
}

fn trouble(error: Errno) -> Trouble {
    io_trouble(&error.into())
}

/// Nothing of a host's file system passes by itself.
fn io_trouble(error: &std::io::Error) -> Trouble {
    match error.kind() {
        std::io::ErrorKind::NotFound => Trouble::Gone,
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Trouble::Full(plain(&error.to_string())),
        _ => Trouble::Refused(plain(&error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn of_eight_who_make_an_object_one_does_and_its_bytes_are_there() {
        for nameless in [true, false] {
            let place = tempfile::tempdir().unwrap();
            let root = place.path().join("new");
            let directory = Directory { nameless, ..Directory::open(&root, Some(Names::Ours)).unwrap() };
            for round in 0..30 {
                let name = format!("inc/log/{round:04}");
                let won = AtomicUsize::new(0);
                std::thread::scope(|scope| {
                    for writer in 0..8_u8 {
                        let (directory, name, won) = (&directory, &name, &won);
                        scope.spawn(move || match directory.create(name, &[writer; 5000]).unwrap() {
                            Created::Made(date) => {
                                assert!(date.is_some());
                                won.fetch_add(1, Ordering::Relaxed);
                                assert_eq!(directory.get(name, Part::Last(1)).unwrap(), [writer]);
                            }
                            Created::Exists => {}
                        });
                    }
                });
                assert_eq!(won.into_inner(), 1);
            }
            let listed = directory.list("inc/log/", "inc/log/0009", 5).unwrap();
            assert_eq!((&*listed[0].name, listed[0].bytes, listed.len()), ("inc/log/0010", 5000, 5));
            assert!(listed[0].time.is_some());
            let left = std::fs::read_dir(root.join("inc/log")).unwrap().count();
            assert_eq!(left, 30, "something is left beside the objects");
            assert_eq!(directory.get("inc/log/0000", Part::Range(4999, 5)).unwrap().len(), 1);
            assert!(matches!(directory.get("inc/log/0000", Part::All(4999)), Err(Trouble::Unusable(_))));
            directory.remove("inc/log/0000").unwrap();
            directory.remove("inc/log/0000").unwrap();
            assert!(matches!(directory.get("inc/log/0000", Part::All(5000)), Err(Trouble::Gone)));
            assert_eq!(directory.list("none/", "", 5).unwrap(), []);
        }
    }

    #[test]
    fn lists_go_through_all_directories_in_the_order_of_whole_names_and_page_by_page() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::open(place.path(), Some(Names::Ours)).unwrap();
        // A directory comes where its name with the slash does, which is neither before nor behind all that begins as it does.
        let mut names =
            ["a", "a.b", "b/lockbox", "b/x/log/1", "b/x/log/2", "b-c/lockbox", "b.c", "c/d/e/f", "lockbox", "ä/ö"];
        for name in names {
            directory.create(name, name.as_bytes()).unwrap();
        }
        std::os::unix::fs::symlink("..", place.path().join("c/out")).unwrap();
        std::fs::create_dir(place.path().join("empty")).unwrap();
        names.sort_unstable();
        for most in 1..=names.len() + 2 {
            for prefix in ["", "b", "b/", "b/x", "b/x/log/", "c/d/", "z"] {
                let (mut found, mut after) = (Vec::new(), String::new());
                loop {
                    let listed = directory.list(prefix, &after, most).unwrap();
                    assert!(listed.len() <= most);
                    let Some(last) = listed.last() else { break };
                    after.clone_from(&last.name);
                    found.extend(listed.into_iter().map(|object| object.name).filter(|name| name != "c/out"));
                }
                let wanted: Vec<&str> = names.iter().copied().filter(|name| name.starts_with(prefix)).collect();
                assert_eq!(found, wanted, "{prefix} {most}");
            }
        }
    }

    /// That there are too many of them in each other keeps everybody out, root too.
    #[test]
    fn who_looks_around_passes_by_what_cannot_be_looked_into_and_who_writes_does_not() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::open(place.path(), Some(Names::Ours)).unwrap();
        for name in ["a/1", "c/1", "c/2"] {
            directory.create(name, b"x").unwrap();
        }
        std::fs::create_dir_all((0..40).fold(place.path().join("b"), |path, _| path.join("d"))).unwrap();
        assert!(matches!(directory.list("", "", 9), Err(Trouble::Unusable(_))));
        for most in 1..5 {
            let (mut found, mut after, mut shut) = (Vec::new(), String::new(), Vec::new());
            loop {
                let mut barred = |name: &str, _| {
                    shut.push(name.to_owned());
                    Ok(())
                };
                let listed = directory.list_what_can_be("", &after, most, &mut barred).unwrap();
                let Some(last) = listed.last() else { break };
                after.clone_from(&last.name);
                found.extend(listed.into_iter().map(|object| object.name));
            }
            assert_eq!(found, ["a/1", "c/1", "c/2"], "{most}");
            assert_eq!(shut, [format!("b/{}", "d/".repeat(32))], "{most}");
        }
    }

    #[test]
    fn what_a_creation_that_was_cut_off_left_is_swept_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory { nameless: false, ..Directory::open(place.path(), Some(Names::Ours)).unwrap() };
        directory.create("seg/object", b"x").unwrap();
        let (seg, _) = directory.place("seg/object", false).unwrap();
        let cut_off = Unfinished::new(&seg, false).unwrap();
        std::fs::write(place.path().join("seg/.mine"), b"x").unwrap();
        directory.sweep("seg").unwrap();
        directory.sweep("none").unwrap();
        let names = std::fs::read_dir(place.path().join("seg")).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<std::collections::BTreeSet<_>>(), [".mine".into(), "object".into()].into());
        assert_eq!(cut_off.link(&seg, "late"), Err(Errno::NOENT));
    }

    #[test]
    fn who_follows_a_writer_that_was_killed_sweeps_what_it_began() {
        let place = tempfile::tempdir().unwrap();
        let come = |take_over| {
            let directory = Box::new(Directory::open(place.path(), Some(Names::Ours)).unwrap());
            crate::bucket::Bucket::open(directory, "file:///a".into(), &crate::Options::default(), take_over).unwrap()
        };
        // Killed: it says nothing.
        std::mem::forget(come(false));
        let of_incarnation = |entry: &std::fs::DirEntry| entry.file_type().unwrap().is_dir();
        let found = std::fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap()).find(of_incarnation).unwrap();
        let directory = Directory::open(&found.path(), None).unwrap();
        let (log, _) = directory.place("log/record", false).unwrap();
        let cut_off = Unfinished::new(&log, false).unwrap();
        drop(come(true));
        assert_eq!(cut_off.link(&log, "late"), Err(Errno::NOENT));
    }

    #[test]
    fn what_the_host_says_is_told_as_that() {
        for full in [Errno::NOSPC, Errno::DQUOT] {
            assert!(matches!(crate::remote_file::told("file:///a", trouble(full)), Error::NoSpace(_)));
        }
        // Who may not read the marker is not told that there is none; here, where no one else is root, a link in its place is refused.
        let place = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("elsewhere", place.path().join("lockbox")).unwrap();
        let directory = Directory::open(place.path(), None).unwrap();
        let opened = crate::bucket::open(Box::new(directory), "file:///a".into(), &crate::Options::default());
        let told = opened.err().expect("no refusal").to_string();
        assert!(told.contains("cannot be asked"), "{told}");
    }

    #[test]
    fn nothing_leads_out_of_the_directory_or_is_waited_for() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("store");
        let directory = Directory::open(&root, Some(Names::Ours)).unwrap();
        std::fs::write(place.path().join("secret"), b"secret").unwrap();
        std::os::unix::fs::symlink("../secret", root.join("link")).unwrap();
        std::os::unix::fs::symlink("..", root.join("out")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, root.join("fifo"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        for name in ["link", "out/secret", "../secret", "/etc/passwd", "fifo"] {
            assert!(directory.get(name, Part::All(100)).is_err(), "{name}");
        }
        assert!(directory.create("out/made", b"x").is_err());
        assert!(!place.path().join("made").exists());
        assert!(Directory::open(&root.join("out"), Some(Names::Ours)).is_ok());
        assert!(matches!(Directory::open(&root.join("out"), Some(Names::Theirs)), Err(Error::NotArchive(_))));
        assert!(directory.remove("out/secret").is_err());
        assert!(place.path().join("secret").exists());
        assert!(
            Directory::open(&root.join("a/b"), Some(Names::Ours)).is_err(),
            "one directory is made, not those above it"
        );
        assert!(matches!(Directory::open(&place.path().join("secret"), Some(Names::Ours)), Err(Error::NotArchive(_))));
    }
}
