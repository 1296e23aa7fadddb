//! Sources of shared content: files that must not change while they are read, and streams of
//! unknown length.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use zeroize::Zeroizing;

use crate::meta::{ContentKind, MAX_INLINE};
use crate::{Error, Result};

/// Times of files move in steps of the kernel's tick, 1 to 10 ms: a change in the same tick as the
/// one before does not show.
const TICK: Duration = Duration::from_millis(20);
/// A file that is written all the time is not waited for.
const MAX_WAIT: Duration = Duration::from_secs(1);

pub trait Source {
    fn name(&self) -> &str;

    fn kind(&self) -> ContentKind {
        ContentKind::File
    }

    /// Bytes of the content; None when its end is not known before it comes.
    fn size(&self) -> Option<u64>;

    /// The next bytes. Errors: when the host fails.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Checks, after the last read, that the content did not change meanwhile. Errors:
    /// [`Error::Changed`] when the content may mix two states.
    fn verify(&mut self) -> Result<()>;
}

/// Regular file, inside or outside of a mount.
pub struct FileSource {
    path: PathBuf,
    name: String,
    file: File,
    before: FileIdentity,
    /// Content of a file that states no size, such as one of /proc or a document of unknown length.
    stream: Option<StreamSource<File>>,
}

/// File attributes that change with its content.
#[derive(PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileIdentity {
    fn of(metadata: &std::fs::Metadata) -> FileIdentity {
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Returns whether a change now could get the same timestamp as the last one.
    fn is_fresh(&self, now: SystemTime) -> bool {
        let Ok(seconds) = u64::try_from(self.changed.0) else { return false };
        let nanos = u32::try_from(self.changed.1).unwrap_or_default();
        let age = now.duration_since(SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos));
        // A time ahead of the clock is another machine's: waiting for it would not end.
        age.is_ok_and(|age| age < TICK)
    }
}

impl FileSource {
    /// Opens a file and notes its identity; it has another name for its receiver when one is given.
    ///
    /// # Errors
    /// When it cannot be read or is no regular file.
    pub fn open(path: &Path, name: Option<&str>) -> Result<FileSource> {
        let shown = path.display().to_string();
        // A named pipe without a writer must not stop the program.
        let file = File::options()
            .read(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(path)
            .map_err(Error::io(format!("cannot open {shown}")))?;
        let own = || path.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.map(str::to_owned).or_else(own).unwrap_or_default();
        let identify = || file.metadata().map_err(Error::io(format!("cannot read {shown}")));
        let metadata = identify()?;
        if metadata.is_dir() {
            return Err(Error::Invalid(format!("{shown} is a directory")));
        }
        if !metadata.is_file() {
            return Err(Error::Invalid(format!("{shown} is not a regular file")));
        }
        let mut before = FileIdentity::of(&metadata);
        let mut waited = Duration::ZERO;
        while before.is_fresh(SystemTime::now()) && waited < MAX_WAIT {
            thread::sleep(TICK);
            waited += TICK;
            before = FileIdentity::of(&identify()?);
        }
        let mut stream = None;
        if before.size == 0 {
            let content = file.try_clone().map_err(Error::io(format!("cannot read {shown}")))?;
            stream = Some(StreamSource::begin(name.clone(), ContentKind::File, content)?);
        }
        Ok(FileSource { path: path.to_owned(), name, file, before, stream })
    }
}

impl Source for FileSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> Option<u64> {
        self.stream.as_ref().map_or(Some(self.before.size), Source::size)
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.stream {
            Some(content) => content.read(buffer),
            None => self.file.read(buffer),
        }
    }

    fn verify(&mut self) -> Result<()> {
        let shown = self.path.display();
        let after = self.file.metadata().map_err(Error::io(format!("cannot read {shown}")))?;
        // The path as well: whoever replaced the file meanwhile wants the new one shared.
        let named = std::fs::metadata(&self.path).map(|metadata| FileIdentity::of(&metadata));
        if FileIdentity::of(&after) != self.before || named.ok().as_ref() != Some(&self.before) {
            return Err(Error::Changed(shown.to_string()));
        }
        Ok(())
    }
}

/// Content of a pipe, of typed input, or generated while it is read.
pub struct StreamSource<R> {
    name: String,
    kind: ContentKind,
    /// First bytes, buffered to find out whether the content fits into a capsule.
    first: Zeroizing<Vec<u8>>,
    at: usize,
    /// Remaining input; `None` when `first` holds all of it.
    rest: Option<R>,
}

impl<R: Read> StreamSource<R> {
    /// Reads until there is too much for a capsule, or nothing more.
    ///
    /// # Errors
    /// When the host fails.
    pub fn begin(name: String, kind: ContentKind, mut input: R) -> Result<StreamSource<R>> {
        // Room for all of it: a buffer that grew would leave copies behind.
        let mut first = Zeroizing::new(Vec::with_capacity(MAX_INLINE as usize + 1));
        let read = input.by_ref().take(MAX_INLINE + 1).read_to_end(&mut first);
        read.map_err(Error::io(format!("cannot read {name}")))?;
        let rest = (first.len() as u64 > MAX_INLINE).then_some(input);
        Ok(StreamSource { name, kind, first, at: 0, rest })
    }
}

impl<R: Read> Source for StreamSource<R> {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> ContentKind {
        self.kind
    }

    fn size(&self) -> Option<u64> {
        self.rest.is_none().then_some(self.first.len() as u64)
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = &self.first[self.at..];
        match &mut self.rest {
            Some(rest) if left.is_empty() => rest.read(buffer),
            _ => {
                let count = left.len().min(buffer.len());
                buffer[..count].copy_from_slice(&left[..count]);
                self.at += count;
                Ok(count)
            }
        }
    }

    fn verify(&mut self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A file with ten bytes, of which five were read.
    fn half_read() -> (tempfile::TempDir, PathBuf, FileSource) {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        fs::write(&path, "0123456789").unwrap();
        let mut source = FileSource::open(&path, None).unwrap();
        assert_eq!((source.name(), source.size()), ("file", Some(10)));
        source.read(&mut [0; 5]).unwrap();
        (place, path, source)
    }

    #[test]
    fn a_file_that_stays_as_it_is_can_be_shared() {
        let (_place, _, mut source) = half_read();
        assert!(source.verify().is_ok());
    }

    #[test]
    fn every_change_is_noticed() {
        type Change = (&'static str, fn(&Path));
        let changes: [Change; 5] = [
            ("written over", |path| fs::write(path, "9876543210").unwrap()),
            ("cut", |path| File::options().write(true).open(path).unwrap().set_len(3).unwrap()),
            ("replaced", |path| {
                fs::write(path.with_extension("new"), "0123456789").unwrap();
                fs::rename(path.with_extension("new"), path).unwrap();
            }),
            ("removed", |path| fs::remove_file(path).unwrap()),
            // mmap(2) and utimensat(2) can hide a change from mtime, not from ctime.
            ("written over, with its old time", |path| {
                let time = fs::metadata(path).unwrap().modified().unwrap();
                fs::write(path, "9876543210").unwrap();
                File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
            }),
        ];
        for (what, change) in changes {
            let (_place, path, mut source) = half_read();
            change(&path);
            assert!(matches!(source.verify(), Err(Error::Changed(_))), "{what}");
        }
    }

    #[test]
    fn a_file_that_states_no_size_is_read_to_its_end() {
        let content = fs::read("/proc/version").unwrap();
        let mut source = FileSource::open(Path::new("/proc/version"), None).unwrap();
        assert!(fs::metadata("/proc/version").unwrap().len() == 0 && !content.is_empty());
        assert_eq!(source.size(), Some(content.len() as u64));
        let mut read = vec![0; content.len() + 1];
        let length = source.read(&mut read).unwrap();
        assert!(read[..length] == content && source.verify().is_ok());
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("empty"), "").unwrap();
        let mut source = FileSource::open(&place.path().join("empty"), None).unwrap();
        assert_eq!((source.size(), source.read(&mut [0; 5]).unwrap()), (Some(0), 0));
    }

    #[test]
    fn only_regular_files_are_shared() {
        let place = tempfile::tempdir().unwrap();
        let told = |path: &Path| FileSource::open(path, None).map(drop).unwrap_err().to_string();
        assert!(told(place.path()).contains("is a directory"));
        let pipe = place.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(told(&pipe).contains("is not a regular file"));
        assert!(told(&place.path().join("none")).starts_with("cannot open"));
    }
}
