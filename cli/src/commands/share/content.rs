//! Content of `lockbox share` other than files of the host: standard input, texts, directories, and
//! files and directories of an archive.
use std::ffi::OsStr;
use std::io::{self, Cursor, IsTerminal, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use lockbox::archive::Archive;
use lockbox::exchange::PackReport;
use lockbox::fs::Ino;
use lockbox_share_client::meta::ContentKind;
use lockbox_share_client::source::{Source, StreamSource};
use zeroize::Zeroizing;

use super::serving;
use crate::exit::Failure;
use crate::open_archive::regular_file;
use crate::output::complain;

/// Size of one write into the tar, and number of parts that may wait for encryption.
const PART: usize = 256 << 10;
const WAITING: usize = 4;

/// A file of an archive. The archive is locked against writers as long as it is read.
pub(super) struct SharedArchiveFile<'a> {
    archive: &'a Archive,
    name: String,
    ino: Ino,
    size: u64,
    at: u64,
    part: Vec<u8>,
}

impl<'a> SharedArchiveFile<'a> {
    pub(super) fn open(archive: &'a Archive, path: &[u8], name: String) -> Result<SharedArchiveFile<'a>, Failure> {
        let attributes = regular_file(archive.file_system(), path)?;
        Ok(SharedArchiveFile { archive, name, ino: attributes.ino, size: attributes.size, at: 0, part: Vec::new() })
    }
}

impl Source for SharedArchiveFile<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> Option<u64> {
        Some(self.size)
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.archive.file_system().read_into(self.ino, self.at, buffer.len(), &mut self.part);
        let length = length.map_err(|error| io::Error::other(Failure::sentence(&error)))?;
        buffer[..length].copy_from_slice(&self.part[..length]);
        self.at += length as u64;
        Ok(length)
    }

    fn verify(&mut self) -> Result<(), lockbox_share_client::Error> {
        Ok(())
    }
}

/// Returns the last part of a path, as others will see it.
pub(super) fn last_name(path: &OsStr) -> String {
    let last = path.as_bytes().split(|&byte| byte == b'/').rfind(|part| !part.is_empty()).unwrap_or_default();
    String::from_utf8_lossy(last).into_owned()
}

/// A directory may be given by a path without a name, such as `.`.
pub(super) fn directory_name(path: &Path) -> String {
    match path.file_name() {
        Some(name) => last_name(name),
        None => last_name(path.canonicalize().unwrap_or_default().as_os_str()),
    }
}

/// Refuses a name that the receiver could not see or that is not one part of a path.
pub(super) fn check_name(name: &str) -> Result<(), Failure> {
    if name.is_empty() || matches!(name, "." | "..") || name.contains(['/', '\0']) {
        return Err(Failure::usage("it needs a file name without a directory; pass one with --name"));
    }
    Ok(())
}

pub(super) fn standard_input(name: String) -> Result<impl Source, Failure> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Failure::usage("standard input is the terminal: --text asks for a text there"));
    }
    StreamSource::begin(name, ContentKind::File, stdin.lock()).map_err(|error| serving::failure(&error))
}

/// Reads a text without echo, or from standard input. It is not an argument, which other users
/// could see.
pub(super) fn text(name: String) -> Result<impl Source, Failure> {
    let text = match io::stdin().is_terminal() {
        true => lockbox_host::secrets::ask_secretly("Text (one line, not shown): ")?,
        false => {
            let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_TEXT as usize + 1));
            let read = io::stdin().lock().take(MAX_TEXT + 1).read_to_end(&mut bytes);
            read.map_err(|error| Failure::host("cannot read the text", &error))?;
            bytes
        }
    };
    if text.is_empty() {
        return Err(Failure::usage("there is no text"));
    }
    if text.len() as u64 > MAX_TEXT {
        return Err(Failure::usage(format!(
            "a text has at most {MAX_TEXT} bytes; 'lockbox share -' shares longer ones as a file"
        )));
    }
    if std::str::from_utf8(&text).is_err() {
        return Err(Failure::usage("the input is not text in UTF-8; 'lockbox share -' shares it as a file"));
    }
    // The bytes are wiped when they were read.
    let source = StreamSource::begin(name, ContentKind::Text, Cursor::new(text));
    source.map_err(|error| serving::failure(&error))
}

/// Longest text that the page shows, and that fits into a capsule with any name.
const MAX_TEXT: u64 = 6 << 10;

/// Passes `work` the tar of a directory, which is created while it is read and exists in memory
/// alone.
pub(super) fn with_directory<T>(
    name: &str,
    pack: impl FnOnce(&[u8], &mut dyn Write) -> Result<PackReport, lockbox::Error> + Send,
    work: impl FnOnce(&mut dyn Source) -> Result<T, Failure>,
) -> Result<T, Failure> {
    check_name(name)?;
    let (sender, receiver) = sync_channel(WAITING);
    thread::scope(|scope| {
        let packing = scope.spawn(move || {
            let mut writer = Parts { sender, part: part() };
            let packed = pack(name.as_bytes(), &mut writer);
            match &packed {
                Ok(_) => writer.end(),
                Err(error) => drop(writer.sender.send(Err(io::Error::other(Failure::sentence(error))))),
            }
            packed
        });
        let reader = Joined { receiver, part: Zeroizing::default(), at: 0, ended: false };
        let source = StreamSource::begin(format!("{name}.tar"), ContentKind::Directory, reader);
        let done = source.map_err(|error| serving::failure(&error)).and_then(|mut source| work(&mut source));
        let packed = packing.join().map_err(|_| Failure::other("packing the directory failed"))?;
        let done = done?;
        match packed.map(|packed| packed.special) {
            Ok(0) | Err(_) => {}
            Ok(1) => complain("1 special file was left out, such as a socket or a device"),
            Ok(count) => complain(&format!("{count} special files were left out, such as sockets and devices")),
        }
        Ok(done)
    })
}

type Part = Zeroizing<Vec<u8>>;

fn part() -> Part {
    Zeroizing::new(Vec::with_capacity(PART))
}

/// Sends written bytes in parts. An empty part is the end: a thread that ended without one has not
/// written a complete tar.
struct Parts {
    sender: SyncSender<io::Result<Part>>,
    part: Part,
}

impl Parts {
    fn end(&mut self) {
        // The receiver is gone when sealing failed.
        let _ = self.flush().map(|()| self.sender.send(Ok(Zeroizing::default())));
    }
}

impl Write for Parts {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(PART - self.part.len());
        self.part.extend_from_slice(&bytes[..count]);
        if self.part.len() == PART {
            self.flush()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.part.is_empty() {
            return Ok(());
        }
        let sent = self.sender.send(Ok(std::mem::replace(&mut self.part, part())));
        sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

struct Joined {
    receiver: Receiver<io::Result<Part>>,
    part: Part,
    at: usize,
    ended: bool,
}

impl Read for Joined {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.part.len() && !self.ended {
            let part = self.receiver.recv().map_err(|_| io::Error::other("it could not be packed"))?;
            self.part = part?;
            self.at = 0;
            self.ended = self.part.is_empty();
        }
        let count = (&self.part[self.at..]).read(buffer)?;
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(source: &mut dyn Source) -> Result<Vec<u8>, Failure> {
        let (mut all, mut part) = (Vec::new(), [0; 1000]);
        loop {
            match source.read(&mut part) {
                Ok(0) => return Ok(all),
                Ok(count) => all.extend_from_slice(&part[..count]),
                Err(error) => return Err(Failure::other(error.to_string())),
            }
        }
    }

    #[test]
    fn what_is_packed_is_read_and_a_failure_is_not_an_end() {
        for length in [0, 1, PART - 1, PART, 9 * PART + 1] {
            let content: Vec<u8> = (0..length).map(|i| (i / 3) as u8).collect();
            let write = |_: &[u8], out: &mut dyn Write| {
                out.write_all(&content).unwrap();
                Ok(PackReport::default())
            };
            assert!(with_directory("a", write, whole).unwrap() == content, "{length}");
            let fail = |_: &[u8], out: &mut dyn Write| {
                out.write_all(&content).unwrap();
                Err(lockbox::Error::NotFound)
            };
            assert!(with_directory("a", fail, whole).is_err(), "{length}");
            // Parts sent by a thread that ends without the end mark.
            let (sender, receiver) = sync_channel(WAITING + 9);
            Parts { sender, part: part() }.write_all(&content).unwrap();
            let cut = Joined { receiver, part: Zeroizing::default(), at: 0, ended: false };
            assert!(io::copy(&mut io::BufReader::new(cut), &mut io::sink()).is_err(), "{length}");
        }
    }

    #[test]
    fn names_are_of_one_part() {
        for name in ["", ".", "..", "a/b", "a\0"] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert!(check_name(".hidden").is_ok());
        assert_eq!(["/a/b/", "b", "/"].map(|path| last_name(OsStr::new(path))), ["b", "b", ""]);
        assert_eq!(["/", "/usr/.."].map(|path| directory_name(Path::new(path))), ["", ""]);
        assert_eq!(directory_name(Path::new("/usr/bin/.")), "bin");
    }

    #[test]
    fn packing_ends_when_nobody_reads() {
        let endless = |_: &[u8], out: &mut dyn Write| loop {
            if let Err(error) = out.write_all(&[0; 1000]) {
                return Err(lockbox::Error::Invalid(error.to_string()));
            }
        };
        let told = with_directory("a", endless, |_| Err::<(), _>(Failure::other("the server is away")));
        assert_eq!(told.unwrap_err().message, "the server is away");
    }
}
