//! `lockbox ls` and `cat`: list files of an archive, and write their content to standard output.
use std::collections::HashMap;
use std::ffi::OsString;

use lockbox::Error;
use lockbox::exchange::{Entries, resolve, split_device_number};
use lockbox::fs::{Attributes, FileSystem, Ino, mode};
use lockbox_host::DAMAGED;
use lockbox_terminal::display;
use nix::unistd::{Gid, Group, Uid, User};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::open_archive::{ArchiveArgs, SnapshotViewArgs, read_file};
use crate::output::{Output, complain, put_name, rfc3339};

/// List files of an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    snapshot: SnapshotViewArgs,
    /// A file or directory of the archive, which may also be named as ARCHIVE:PATH; the root by default
    #[arg(value_name = "PATH")]
    path: Option<OsString>,
    /// Show mode, links, owner, group, size and time of modification
    #[arg(short)]
    long: bool,
    /// List directories with everything below them
    #[arg(short = 'R')]
    recursive: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (archive, paths) = args.archive.and_paths(&args.path)?;
    let path: &[u8] = match &paths[..] {
        [] => b"/",
        [path] if path.is_empty() => b"/",
        [path] => path,
        _ => return Err(Failure::usage("name one file or directory to list")),
    };
    let archive = archive.read_at(&args.snapshot)?;
    let fs = archive.file_system();
    let (users, groups) = (HashMap::new(), HashMap::new());
    let mut list = List { fs, args, path, out: Output::new(), users, groups, unreadable: 0 };
    list.print_path()?;
    list.out.finish()?;
    match list.unreadable {
        0 => Ok(()),
        count => Err(Failure::new(DAMAGED, format!("{}: {count} could not be read", display(path)))),
    }
}

struct ListedObject {
    name: Vec<u8>,
    attributes: Attributes,
}

struct List<'a> {
    fs: &'a FileSystem,
    args: &'a Args,
    /// The path that the user named.
    path: &'a [u8],
    out: Output,
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
    /// Number of entries and directories that were reported and left out.
    unreadable: u64,
}

impl List<'_> {
    fn failure(&self, error: Error) -> Failure {
        Failure::of(display(self.path), &error)
    }

    fn print_path(&mut self) -> Result<(), Failure> {
        let path = self.path;
        let attributes = resolve(self.fs, path).map_err(|error| self.failure(error))?;
        if !attributes.is_directory() {
            return self.entries(path, &[ListedObject { name: path.to_vec(), attributes }], true);
        }
        let start: &[u8] = if path.iter().all(|&b| b == b'/') { b"/" } else { without_end_slashes(path) };
        // Stack of paths, the next one on top: directories are listed one after the other as ls(1)
        // does.
        let mut directories = vec![(start.to_vec(), attributes)];
        let mut first = true;
        while let Some((path, attributes)) = directories.pop() {
            let mut entries = self.readable(&path, attributes.ino)?;
            entries.sort_by(|a, b| a.name.cmp(&b.name));
            if self.args.recursive && !self.args.json {
                if !first {
                    self.out.bytes(b"\n")?;
                }
                self.out.name(&path)?;
                self.out.bytes(b":\n")?;
            }
            first = false;
            self.entries(&path, &entries, false)?;
            if self.args.recursive {
                let below = entries.iter().rev().filter(|e| e.attributes.is_directory());
                directories.extend(below.map(|e| (join(&path, &e.name), e.attributes)));
            }
        }
        Ok(())
    }

    /// Returns the readable entries of a directory, and reports the others.
    fn readable(&mut self, path: &[u8], directory: Ino) -> Result<Vec<ListedObject>, Failure> {
        let mut readable = Vec::new();
        let mut entries = Entries::new(self.fs, directory).map_err(|error| self.failure(error))?;
        while let Some(entry) = entries.next_entry() {
            match entry {
                Ok(entry) => {
                    readable.push(ListedObject { name: entry.name.to_vec(), attributes: *entry.attributes });
                }
                Err(error @ Error::Damaged(_)) => {
                    self.unreadable += 1;
                    complain(&format!("{}: {}", display(path), Failure::sentence(&error)));
                }
                Err(error) => return Err(self.failure(error)),
            }
        }
        Ok(readable)
    }

    /// `whole`: the names are paths already.
    fn entries(&mut self, directory: &[u8], entries: &[ListedObject], whole: bool) -> Result<(), Failure> {
        if self.args.json {
            for entry in entries {
                let path = if whole { entry.name.clone() } else { join(directory, &entry.name) };
                let object = self.object(&path, entry)?;
                self.out.json(&object)?;
            }
        } else if self.args.long {
            self.long(entries)?;
        } else {
            for entry in entries {
                self.out.name(&entry.name)?;
                self.out.bytes(b"\n")?;
            }
        }
        Ok(())
    }

    fn long(&mut self, entries: &[ListedObject]) -> Result<(), Failure> {
        let rows: Vec<[String; 5]> = entries.iter().map(|entry| self.columns(&entry.attributes)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let [links, user, group, size] = [width(1), width(2), width(3), width(4)];
        for (row, entry) in rows.iter().zip(entries) {
            let attributes = &entry.attributes;
            let text = format!(
                "{} {:>links$} {:<user$} {:<group$} {:>size$} {} ",
                row[0],
                row[1],
                row[2],
                row[3],
                row[4],
                self.out.reader.time(attributes.mtime)
            );
            self.out.bytes(text.as_bytes())?;
            self.out.name(&entry.name)?;
            if attributes.mode & mode::TYPE == mode::SYMLINK {
                self.out.bytes(b" -> ")?;
                let target = self.target(attributes.ino)?;
                self.out.name(&target)?;
            }
            self.out.bytes(b"\n")?;
        }
        Ok(())
    }

    fn target(&self, link: Ino) -> Result<Vec<u8>, Failure> {
        self.fs.read_link(link).map_err(|error| self.failure(error))
    }

    fn columns(&mut self, attributes: &Attributes) -> [String; 5] {
        let Attributes { uid, gid, .. } = *attributes;
        let user = self.users.entry(uid).or_insert_with(|| {
            let known = User::from_uid(Uid::from_raw(uid)).ok().flatten();
            known.map_or_else(|| uid.to_string(), |user| user.name)
        });
        let group = self.groups.entry(gid).or_insert_with(|| {
            let known = Group::from_gid(Gid::from_raw(gid)).ok().flatten();
            known.map_or_else(|| gid.to_string(), |group| group.name)
        });
        let size = match attributes.mode & mode::TYPE {
            mode::BLOCK | mode::CHARACTER => {
                let (major, minor) = split_device_number(attributes.rdev);
                format!("{major}, {minor}")
            }
            _ => attributes.size.to_string(),
        };
        [mode_text(attributes.mode), attributes.links.to_string(), user.clone(), group.clone(), size]
    }

    fn object(&self, path: &[u8], entry: &ListedObject) -> Result<Value, Failure> {
        let attributes = &entry.attributes;
        let mut object = json!({
            "ino": attributes.ino.0,
            "type": type_name(attributes.mode),
            "mode": format!("{:04o}", attributes.mode & mode::PERMISSIONS),
            "links": attributes.links,
            "uid": attributes.uid,
            "gid": attributes.gid,
            "size": attributes.size,
            "atime": rfc3339(attributes.atime),
            "mtime": rfc3339(attributes.mtime),
            "ctime": rfc3339(attributes.ctime),
        });
        put_name(&mut object, "path", path);
        let name = entry.name.rsplit(|&b| b == b'/').next().unwrap_or_default();
        put_name(&mut object, "name", name);
        match attributes.mode & mode::TYPE {
            mode::SYMLINK => put_name(&mut object, "target", &self.target(attributes.ino)?),
            mode::BLOCK | mode::CHARACTER => {
                let (major, minor) = split_device_number(attributes.rdev);
                object["device"] = json!([major, minor]);
            }
            _ => {}
        }
        Ok(object)
    }
}

fn without_end_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&b| b != b'/').map_or(0, |last| last + 1);
    &path[..end]
}

fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = directory.to_vec();
    if path.last() != Some(&b'/') {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// Returns the letter of a file type in ls(1), its name in JSON, and its words in diff(1).
fn type_names(bits: u32) -> (char, &'static str, &'static str) {
    match bits & mode::TYPE {
        mode::REGULAR => ('-', "file", "regular file"),
        mode::DIRECTORY => ('d', "directory", "directory"),
        mode::SYMLINK => ('l', "symlink", "symbolic link"),
        mode::FIFO => ('p', "fifo", "fifo"),
        mode::SOCKET => ('s', "socket", "socket"),
        mode::BLOCK => ('b', "block", "block special file"),
        mode::CHARACTER => ('c', "character", "character special file"),
        _ => ('?', "unknown", "file of an unknown type"),
    }
}

pub(crate) fn type_name(bits: u32) -> &'static str {
    type_names(bits).1
}

pub(crate) fn type_words(bits: u32) -> &'static str {
    type_names(bits).2
}

/// Formats the mode like ls(1): type, three times read, write and execute, with set-id and sticky
/// bits in the places of execute.
fn mode_text(bits: u32) -> String {
    let mut text = String::from(type_names(bits).0);
    for (shift, special, mark) in [(6, mode::SET_UID, 's'), (3, mode::SET_GID, 's'), (0, mode::STICKY, 't')] {
        let rwx = bits >> shift;
        text.push(if rwx & 4 != 0 { 'r' } else { '-' });
        text.push(if rwx & 2 != 0 { 'w' } else { '-' });
        text.push(match (rwx & 1 != 0, bits & special != 0) {
            (true, true) => mark,
            (false, true) => mark.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// Bytes read at once.
const PIECE: usize = 1 << 20;

/// Write files of an archive to standard output
#[derive(clap::Args)]
pub(crate) struct CatArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    snapshot: SnapshotViewArgs,
    /// Files of the archive, or each with the archive as ARCHIVE:PATH
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
}

pub(crate) fn cat(args: &CatArgs) -> Result<(), Failure> {
    let (archive, paths) = args.archive.and_paths(&args.paths)?;
    if paths.is_empty() {
        return Err(Failure::usage("no file of the archive is named: ARCHIVE PATH or ARCHIVE:PATH"));
    }
    let archive = archive.read_at(&args.snapshot)?;
    let mut out = Output::new();
    for path in &paths {
        read_file(archive.file_system(), path, PIECE, &mut |piece| out.bytes(piece))?;
    }
    out.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_read_as_in_ls() {
        for (bits, text) in [
            (0o100644, "-rw-r--r--"),
            (0o041777, "drwxrwxrwt"),
            (0o104755, "-rwsr-xr-x"),
            (0o102644, "-rw-r-Sr--"),
            (0o120777, "lrwxrwxrwx"),
            (0o020600, "crw-------"),
        ] {
            assert_eq!(mode_text(bits), text);
        }
    }

    #[test]
    fn paths_join_with_one_slash() {
        assert_eq!(join(b"/", b"a"), b"/a");
        assert_eq!(join(b"/a", b"b"), b"/a/b");
        assert_eq!(without_end_slashes(b"a//"), b"a");
    }
}
