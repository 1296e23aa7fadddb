//! Packs a host directory as a tar stream for sharing, like `export_tree` for an archive.

use std::collections::HashMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use tar::EntryType;

use lockbox_terminal::display;

use super::BLOCK;
use super::export::{CountingWriter, PackReport, PaxMember};
use crate::error::{Error, Result};
use crate::exchange::attributes::{host_error, read_at, timestamps};
use crate::exchange::walk::join;
use crate::fs::{Attributes, mode};
use crate::storage::{FileIdentity, names};

/// Size of one read from the host, in bytes.
const PIECE: usize = 256 << 10;
/// Maximum bytes of a file with unreported size, such as one of /proc: its size precedes its
/// content, which must therefore be buffered.
const MAX_UNSTATED: usize = 64 << 20;

/// Writes `directory` recursively, under `name`; symbolic links are not followed. Any concurrent
/// change is an error, because the result could be an inconsistent mixture.
///
/// # Errors
/// `InUse` naming the changed object, and failures of the host. A stream that ends by an error has
/// no end mark.
pub fn pack_tree(directory: &Path, name: &[u8], out: &mut dyn Write) -> Result<PackReport> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top =
        rustix::fs::openat(CWD, directory, flags, Mode::empty()).map_err(host_error("cannot open the directory"))?;
    let mut pack = Packer { out: CountingWriter::new(out), report: PackReport::default(), links: HashMap::new() };
    let mut path = name.to_vec();
    let mut levels = vec![pack.enter(top, &path)?];
    while let Some(level) = levels.last_mut() {
        path.truncate(level.path_length);
        let Some(name) = level.names.pop() else {
            if version(&stat_of(&level.directory)?) != level.before {
                return Err(changed(&path));
            }
            levels.pop();
            continue;
        };
        join(&mut path, &name);
        if let Some(directory) = pack.entry(&level.directory, &name, &path).map_err(|error| named(&path, error))? {
            let below = pack.enter(directory, &path).map_err(|error| named(&path, error))?;
            levels.push(below);
        }
    }
    pack.out.end()?;
    Ok(pack.report)
}

/// Attributes that change whenever a file or directory is modified.
type FileVersion = (FileIdentity, i64, [(i64, u64); 2]);

fn version(stat: &Stat) -> FileVersion {
    (FileIdentity::from(stat), stat.st_size, [(stat.st_mtime, stat.st_mtime_nsec), (stat.st_ctime, stat.st_ctime_nsec)])
}

fn stat_of(file: &OwnedFd) -> Result<Stat> {
    rustix::fs::fstat(file).map_err(host_error("cannot examine it"))
}

fn changed(path: &[u8]) -> Error {
    Error::InUse(format!("{} changed while it was read", display(path)))
}

fn named(path: &[u8], error: Error) -> Error {
    match error {
        Error::Io { context, source } if !context.starts_with("cannot write the tar") => {
            Error::Io { context: format!("{}: {context}", display(path)), source }
        }
        error => error,
    }
}

/// Directory on the stack.
struct PackLevel {
    directory: OwnedFd,
    names: Vec<Vec<u8>>,
    before: FileVersion,
    path_length: usize,
}

struct Packer<'a> {
    out: CountingWriter<'a>,
    report: PackReport,
    /// First paths of files with several hard links.
    links: HashMap<(u64, u64), Vec<u8>>,
}

impl Packer<'_> {
    fn enter(&mut self, directory: OwnedFd, path: &[u8]) -> Result<PackLevel> {
        let stat = stat_of(&directory)?;
        let mut names = names(&directory).map_err(host_error("cannot read the directory"))?;
        // Popped from the end.
        names.sort_by(|a, b| b.cmp(a));
        PaxMember::directory(path, &bare(&stat)).write(&mut self.out)?;
        self.report.copied.directories += 1;
        Ok(PackLevel { directory, names, before: version(&stat), path_length: path.len() })
    }

    /// Writes one object; opens and returns a directory.
    fn entry(&mut self, at: &OwnedFd, name: &[u8], path: &[u8]) -> Result<Option<OwnedFd>> {
        let examined = rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = examined.map_err(host_error("cannot examine it"))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let opened = rustix::fs::openat(at, name, flags, Mode::empty());
                Ok(Some(opened.map_err(host_error("cannot open the directory"))?))
            }
            FileType::Symlink => {
                let target =
                    rustix::fs::readlinkat(at, name, Vec::new()).map_err(host_error("cannot read the link"))?;
                self.report.copied.symlinks += 1;
                let member = PaxMember::new(path, EntryType::Symlink, &bare(&stat)).linked_to(target.into_bytes());
                member.write(&mut self.out).map(|()| None)
            }
            FileType::RegularFile => self.file(at, name, path).map(|()| None),
            _ => {
                self.report.special += 1;
                Ok(None)
            }
        }
    }

    fn file(&mut self, at: &OwnedFd, name: &[u8], path: &[u8]) -> Result<()> {
        // Opening an object that replaced it must not block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(at, name, flags, Mode::empty()).map_err(host_error("cannot open it"))?;
        let stat = stat_of(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(changed(path));
        }
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&(stat.st_dev, stat.st_ino)) {
                self.report.copied.links += 1;
                let member = PaxMember::new(path, EntryType::Link, &bare(&stat)).linked_to(first.clone());
                return member.write(&mut self.out);
            }
            self.links.insert((stat.st_dev, stat.st_ino), path.to_vec());
        }
        let unstated = if stat.st_size == 0 { unstated_content(&file)? } else { Vec::new() };
        let size = u64::try_from(stat.st_size).unwrap_or_default().max(unstated.len() as u64);
        let mut member = PaxMember::new(path, EntryType::Regular, &bare(&stat));
        member.size = size;
        member.write(&mut self.out)?;
        self.out.bytes(&unstated)?;
        let mut piece = vec![0; PIECE];
        let mut at = unstated.len() as u64;
        loop {
            let length = read_at(&file, &mut piece, at)?;
            at += length as u64;
            // The member must have exactly the stated size, and that of the file.
            if at > size || (length == 0 && at < size) {
                return Err(changed(path));
            }
            if length == 0 {
                break;
            }
            self.out.bytes(&piece[..length])?;
        }
        self.out.fill(BLOCK as u64)?;
        if version(&stat_of(&file)?) != version(&stat) {
            return Err(changed(path));
        }
        self.report.copied.files += 1;
        self.report.copied.bytes += size;
        Ok(())
    }
}

/// Returns the content of a file with unreported size.
fn unstated_content(file: &OwnedFd) -> Result<Vec<u8>> {
    let (mut content, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        match read_at(file, &mut piece, content.len() as u64)? {
            0 => return Ok(content),
            length => content.extend_from_slice(&piece[..length]),
        }
        if content.len() > MAX_UNSTATED {
            return Err(Error::invalid(format!("it states no size and has more than {} MiB", MAX_UNSTATED >> 20)));
        }
    }
}

fn bare(stat: &Stat) -> Attributes {
    let (_, mtime) = timestamps(stat);
    PaxMember::bare(&Attributes {
        mode: stat.st_mode & (mode::TYPE | mode::PERMISSIONS),
        mtime,
        ..Attributes::default()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Does something when a part of the stream is written.
    struct Meddling<F: FnMut(&[u8])>(F);

    impl<F: FnMut(&[u8])> Write for Meddling<F> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            (self.0)(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nothing_is_told_of_owners_and_special_files_are_left_out() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("folder");
        fs::create_dir_all(folder.join("in")).unwrap();
        fs::write(folder.join("in/run"), "#!").unwrap();
        fs::set_permissions(folder.join("in/run"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::hard_link(folder.join("in/run"), folder.join("same")).unwrap();
        symlink("in/run", folder.join("link")).unwrap();
        rustix::fs::mknodat(CWD, folder.join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let mut tar = Vec::new();
        let packed = pack_tree(&folder, b"given", &mut tar).unwrap();
        let counts = (packed.copied.files, packed.copied.directories, packed.copied.links, packed.copied.symlinks);
        assert_eq!((counts, packed.special), ((1, 2, 1, 1), 1));
        let mut found = Vec::new();
        for entry in tar::Archive::new(&tar[..]).entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.gid().unwrap()), (0, 0));
            assert_eq!(header.mode().unwrap() & 0o7000, 0);
            found.push(String::from_utf8(entry.path_bytes().into_owned()).unwrap());
        }
        assert_eq!(found, ["given/", "given/in/", "given/in/run", "given/link", "given/same"]);
    }

    #[test]
    fn a_file_that_states_no_size_is_packed_whole() {
        let content = fs::read("/proc/version").unwrap();
        let file = fs::File::open("/proc/version").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 0);
        let mut tar = Vec::new();
        let mut pack =
            Packer { out: CountingWriter::new(&mut tar), report: PackReport::default(), links: HashMap::new() };
        let at = rustix::fs::open("/proc", OFlags::DIRECTORY, Mode::empty()).unwrap();
        pack.file(&at, b"version", b"given").unwrap();
        pack.out.end().unwrap();
        let mut archive = tar::Archive::new(&tar[..]);
        let mut packed = Vec::new();
        archive.entries().unwrap().next().unwrap().unwrap().read_to_end(&mut packed).unwrap();
        assert!(packed == content && !content.is_empty());
    }

    #[test]
    fn what_changes_meanwhile_is_told() {
        type Change = fn(&Path);
        let changes: [(&str, Change); 4] = [
            ("given/big", |folder| fs::write(folder.join("big"), "x").unwrap()),
            ("given/big", |folder| {
                fs::File::options().append(true).open(folder.join("big")).unwrap().write_all(b"x").unwrap();
            }),
            ("given", |folder| fs::write(folder.join("another"), "x").unwrap()),
            ("given", |folder| fs::rename(folder.join("later"), folder.join("sooner")).unwrap()),
        ];
        for (what, change) in changes {
            let place = tempfile::tempdir().unwrap();
            let folder = place.path().join("folder");
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("big"), vec![b'x'; 3 * PIECE]).unwrap();
            fs::write(folder.join("later"), "x").unwrap();
            let mut done = false;
            let mut out = Meddling(|bytes: &[u8]| {
                if bytes.len() == PIECE && !done {
                    done = true;
                    change(&folder);
                }
            });
            let told = pack_tree(&folder, b"given", &mut out).unwrap_err().to_string();
            assert!(told.contains("changed while it was read") || told.contains("later"), "{what}: {told}");
            assert!(told.contains(what), "{what}: {told}");
        }
    }
}
