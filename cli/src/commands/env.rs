//! `lockbox env` and `run`: environment variables in an archive, and a program that gets them.
//!
//! They are in the directory `/.lockbox/env`, one file per variable, named after it.
use std::ffi::{CString, OsString};
use std::io::{self, IsTerminal};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::exchange::{Entries, resolve};
use lockbox::fs::{Attributes, FileSystem, Ino, ROOT_INO, RenameMode, mode};
use lockbox_host::proc::{self, CoreLimit};
use lockbox_host::secrets;
use lockbox_terminal::display;
use nix::errno::Errno;
use nix::unistd::execvpe;
use zeroize::{Zeroize, Zeroizing};

use crate::exit::{Failure, NOT_FOUND, NOT_RUNNABLE};
use crate::open_archive::{ArchiveArgs, WriterArgs, creator};
use crate::output::Output;

/// Keep environment variables in an archive, for 'lockbox run'
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Set(Set),
    /// Print the value of a variable
    Get(One),
    /// List the names of the variables, never their values
    Ls(ArchiveArgs),
    /// Remove a variable
    Rm(Rm),
}

/// Set a variable to a value from standard input, a prompt or a file; one line end is cut off
#[derive(clap::Args)]
struct Set {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Name of the variable
    name: String,
    /// Take the value from FILE
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

/// A variable of the archive
#[derive(clap::Args)]
struct One {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Name of the variable
    name: String,
}

/// One variable, to be removed
#[derive(clap::Args)]
struct Rm {
    #[command(flatten)]
    one: One,
    #[command(flatten)]
    writer: WriterArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        Command::Set(args) => set(args),
        Command::Get(args) => get(args),
        Command::Ls(args) => list(args),
        Command::Rm(Rm { one: args, writer }) => {
            check_name(&args.name)?;
            change(&args.archive, args.archive.write(*writer)?, |archive| remove_variable(archive, &args.name))
        }
    }
}

fn set(args: &Set) -> Result<(), Failure> {
    check_name(&args.name)?;
    // Read before the passphrase prompt, which would otherwise consume standard input.
    let value = match &args.from {
        None if io::stdin().is_terminal() => None,
        from => Some(lockbox_host::secrets::value(from.as_deref())?),
    };
    if value.is_some() && args.from.is_none() {
        args.archive.take_input();
    }
    let archive = args.archive.write(args.writer)?;
    let value = match value {
        Some(value) => value,
        None => {
            let typed = lockbox_host::secrets::ask_secretly(&format!("Value of {}: ", args.name))?;
            lockbox_host::secrets::without_line_end(typed)
        }
    };
    if value.contains(&0) {
        return Err(Failure::other("the value holds a NUL, which no variable can"));
    }
    change(&args.archive, archive, |archive| write_variable(archive, &args.name, &value))
}

fn change(
    args: &ArchiveArgs,
    archive: Archive,
    change: impl FnOnce(&Archive) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let changed = change(&archive);
    changed.and(args.close(archive))
}

fn get(args: &One) -> Result<(), Failure> {
    check_name(&args.name)?;
    let archive = args.archive.read()?;
    let value = read_variable(&archive, &args.name)?;
    let mut out = Output::new();
    out.bytes(&value)?;
    out.bytes(b"\n")?;
    out.finish()
}

fn list(args: &ArchiveArgs) -> Result<(), Failure> {
    let archive = args.read()?;
    let names = variable_names(&archive).map_err(|error| args.failure(error))?;
    let mut out = Output::new();
    for name in names {
        out.line(&name)?;
    }
    out.finish()
}

/// Run a program with the variables of an archive in its environment
#[derive(clap::Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Give the program only this variable of the archive; may be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Give the program nothing of the present environment
    #[arg(long)]
    no_inherit: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Replaces this process by the program, which keeps its process id, signals and exit code. Returns
/// only when the program could not be run.
pub(crate) fn run_program(args: &RunArgs, cores: CoreLimit) -> Result<(), Failure> {
    for name in &args.only {
        check_name(name)?;
    }
    let mut environment = Environment(Vec::new());
    if !args.no_inherit {
        for (name, value) in secrets::inherited() {
            environment.put(name.as_bytes(), &Zeroizing::new(value.into_vec()))?;
        }
    }
    // Standard input is the program's.
    args.archive.take_input();
    let archive = args.archive.read()?;
    let names = match args.only.is_empty() {
        true => variable_names(&archive).map_err(|error| args.archive.failure(error))?,
        false => args.only.clone(),
    };
    for name in names {
        let value = read_variable(&archive, &name)?;
        environment.put(name.as_bytes(), &value)?;
    }
    args.archive.close(archive)?;
    let command: Vec<CString> = args
        .command
        .iter()
        .map(|argument| CString::new(argument.as_bytes()))
        .collect::<Result<_, _>>()
        .map_err(|_| Failure::usage("an argument of the program holds a NUL"))?;
    cores.restore();
    proc::restore_signals();
    let Err(errno) = execvpe(&command[0], &command, &environment.0);
    let code = if errno == Errno::ENOENT { NOT_FOUND } else { NOT_RUNNABLE };
    let program = display(command[0].as_bytes());
    Err(Failure::new(code, format!("cannot run {program}: {}", errno.desc())))
}

/// Entries `NAME=value`. The kernel drops the memory when another program replaces the process; the
/// destructor clears it in case none does.
struct Environment(Vec<CString>);

impl Environment {
    /// The last value of a name counts.
    fn put(&mut self, name: &[u8], value: &[u8]) -> Result<(), Failure> {
        let same = |entry: &CString| entry.as_bytes().strip_prefix(name).is_some_and(|rest| rest.starts_with(b"="));
        while let Some(at) = self.0.iter().position(same) {
            clear(self.0.swap_remove(at));
        }
        // Allocated at once, with the NUL: a growing vector leaves copies in memory.
        let mut entry = Vec::with_capacity(name.len() + value.len() + 2);
        entry.extend_from_slice(name);
        entry.push(b'=');
        entry.extend_from_slice(value);
        let entry = CString::new(entry).map_err(|_| Failure::other("a variable holds a NUL"))?;
        self.0.push(entry);
        Ok(())
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        self.0.drain(..).for_each(clear);
    }
}

fn clear(entry: CString) {
    entry.into_bytes().zeroize();
}

const DIRECTORY: &str = "/.lockbox/env";
const PARTS: [&[u8]; 2] = [b".lockbox", b"env"];
/// Under this name a new value is written before it takes its place; no variable can have it.
const UNFINISHED: &[u8] = b".new";
/// The kernel's limit of one variable with its name is 128 KiB.
const MAX_VALUE: usize = 64 << 10;
const MAX_NAME: usize = 255;

/// Refuses a name that is not valid in every shell.
fn check_name(name: &str) -> Result<(), Failure> {
    let begins = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    if begins && name.len() <= MAX_NAME && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "'{}' is not a name of a variable: letters, digits and underscores, at most {MAX_NAME}, not beginning with a digit",
        display(name.as_bytes())
    )))
}

/// Returns the names, sorted. Other objects in the directory are not variables: a file that a
/// program left there through a mount, for example.
pub(crate) fn variable_names(archive: &Archive) -> Result<Vec<String>, Error> {
    let fs = archive.file_system();
    let Some(directory) = directory(fs)? else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    let mut entries = Entries::new(fs, directory)?;
    while let Some(entry) = entries.next_entry() {
        let entry = entry?;
        if entry.attributes.mode & mode::TYPE == mode::REGULAR
            && let Ok(name) = String::from_utf8(entry.name.to_vec())
            && check_name(&name).is_ok()
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn read_variable(archive: &Archive, name: &str) -> Result<Zeroizing<Vec<u8>>, Failure> {
    check_name(name)?;
    let fs = archive.file_system();
    let (_, found) = find(fs, name)?;
    if found.size > MAX_VALUE as u64 {
        return Err(Failure::other(format!("{DIRECTORY}/{name} is longer than {} KiB", MAX_VALUE >> 10)));
    }
    let mut value = Zeroizing::new(Vec::new());
    let length = fs.read_into(found.ino, 0, MAX_VALUE, &mut value)?;
    value.truncate(length);
    if value.contains(&0) {
        return Err(Failure::other(format!("{DIRECTORY}/{name} holds a NUL, which no variable can")));
    }
    Ok(value)
}

/// Sets a variable: the old or the new value exists at any moment.
fn write_variable(archive: &Archive, name: &str, value: &[u8]) -> Result<(), Failure> {
    check_name(name)?;
    let fs = &**archive.file_system();
    let creator = creator();
    let mut at = ROOT_INO;
    for part in PARTS {
        let found = match fs.lookup(at, part) {
            Err(Error::NotFound) => fs.make_directory(at, part, 0o700, creator)?,
            other => other?,
        };
        if !found.is_directory() {
            return Err(Failure::other(format!("{} of the archive is not a directory", display(part))));
        }
        at = found.ino;
    }
    match fs.unlink(at, UNFINISHED) {
        Ok(()) | Err(Error::NotFound) => {}
        Err(error) => return Err(error.into()),
    }
    let made = fs.create_and_open(at, UNFINISHED, 0o600, creator)?;
    let written = fs.write(made.ino, 0, value);
    fs.release(made.ino)?;
    written?;
    Ok(fs.rename(at, UNFINISHED, at, name.as_bytes(), RenameMode::Replace)?)
}

fn remove_variable(archive: &Archive, name: &str) -> Result<(), Failure> {
    check_name(name)?;
    let fs = archive.file_system();
    let (directory, _) = find(fs, name)?;
    Ok(fs.unlink(directory, name.as_bytes())?)
}

fn directory(fs: &FileSystem) -> Result<Option<Ino>, Error> {
    match resolve(fs, DIRECTORY.as_bytes()) {
        Err(Error::NotFound) => Ok(None),
        Err(error) => Err(error),
        Ok(found) if found.is_directory() => Ok(Some(found.ino)),
        Ok(_) => Err(Error::NotDirectory),
    }
}

/// Returns the directory of the variables, and the attributes of this one.
fn find(fs: &FileSystem, name: &str) -> Result<(Ino, Attributes), Failure> {
    let missing = || Failure::other(format!("the archive has no variable {name}"));
    let directory = directory(fs)?.ok_or_else(missing)?;
    match fs.lookup(directory, name.as_bytes()) {
        Ok(found) if found.mode & mode::TYPE == mode::REGULAR => Ok((directory, found)),
        Ok(_) => Err(Failure::other(format!("{DIRECTORY}/{name} is not a file"))),
        Err(Error::NotFound) => Err(missing()),
        Err(error) => Err(Failure::of(format_args!("{DIRECTORY}/{name}"), &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_shells() {
        for good in ["A", "_", "a_1", "PATH", &"x".repeat(255)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "1A", "A-B", "A=B", "a/b", "..", ".new", "ä", "A B", "A\n", &"x".repeat(256)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
