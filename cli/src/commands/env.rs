//! `lockbox env`: sets, prints, lists and removes environment variables stored in an archive for
//! `lockbox run`.
use std::io::{self, IsTerminal};
use std::path::PathBuf;

use lockbox::archive::Archive;
use lockbox_host::Program;

use crate::exit::{Failure, Lockbox};
use crate::open_archive::{ArchiveArgs, WriterArgs};
use crate::output::Output;
use crate::variables;

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
    Ls(All),
    /// Remove a variable
    Rm(Rm),
}

/// Set a variable to what is on standard input, typed at a prompt, or in a file; one line end is cut off
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

/// List the names of the variables, never their values
#[derive(clap::Args)]
struct All {
    #[command(flatten)]
    archive: ArchiveArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        Command::Set(args) => set(args),
        Command::Get(args) => get(args),
        Command::Ls(args) => list(args),
        Command::Rm(Rm { one: args, writer }) => {
            variables::check_name(&args.name)?;
            change(&args.archive, args.archive.write(*writer)?, |archive| variables::remove(archive, &args.name))
        }
    }
}

fn set(args: &Set) -> Result<(), Failure> {
    variables::check_name(&args.name)?;
    // Read before the passphrase prompt, which would otherwise consume standard input.
    let value = match &args.from {
        None if io::stdin().is_terminal() => None,
        from => Some(lockbox_host::secrets::value(from.as_deref())?),
    };
    let archive = match (&value, &args.from) {
        (Some(_), None) => args.archive.write_with_input_taken(args.writer)?,
        _ => args.archive.write(args.writer)?,
    };
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
    change(&args.archive, archive, |archive| variables::set(archive, &args.name, &value))
}

fn change(
    args: &ArchiveArgs,
    archive: Archive,
    change: impl FnOnce(&Archive) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let changed = change(&archive);
    let closed = archive.close().map_err(|error| Lockbox::failure(&args.archive, error));
    changed.and(closed)
}

fn get(args: &One) -> Result<(), Failure> {
    variables::check_name(&args.name)?;
    let archive = args.archive.read()?;
    let value = variables::get(&archive, &args.name)?;
    let mut out = Output::new();
    out.bytes(&value)?;
    out.bytes(b"\n")?;
    out.finish()
}

fn list(args: &All) -> Result<(), Failure> {
    let archive = args.archive.read()?;
    let names = variables::names(&archive).map_err(|error| Lockbox::failure(&args.archive.archive, error))?;
    let mut out = Output::new();
    for name in names {
        out.line(&name)?;
    }
    out.finish()
}
