//! `lockbox run`: runs a program with environment variables that an archive keeps.
use std::ffi::{CString, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use lockbox_host::Program;
use lockbox_host::harden::{self, CoreLimit};
use lockbox_host::secrets;
use lockbox_terminal::display;
use nix::errno::Errno;
use nix::unistd::execvpe;
use zeroize::{Zeroize, Zeroizing};

use crate::exit::{Failure, Lockbox, NOT_FOUND, NOT_RUNNABLE};
use crate::open_archive::ArchiveArgs;
use crate::variables;

/// Run a program with the variables of an archive in its environment
#[derive(clap::Args)]
pub(crate) struct Args {
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
pub(crate) fn run(args: &Args, cores: CoreLimit) -> Result<(), Failure> {
    for name in &args.only {
        variables::check_name(name)?;
    }
    let mut environment = Environment(Vec::new());
    if !args.no_inherit {
        for (name, value) in secrets::inherited() {
            environment.put(name.as_bytes(), &Zeroizing::new(value.into_vec()))?;
        }
    }
    // Standard input is the program's.
    let archive = args.archive.read_with_input_taken()?;
    let names = match args.only.is_empty() {
        true => variables::names(&archive).map_err(|error| Lockbox::failure(&args.archive.archive, error))?,
        false => args.only.clone(),
    };
    for name in names {
        let value = variables::get(&archive, &name)?;
        environment.put(name.as_bytes(), &value)?;
    }
    archive.close().map_err(|error| Lockbox::failure(&args.archive.archive, error))?;
    let command: Vec<CString> = args
        .command
        .iter()
        .map(|argument| CString::new(argument.as_bytes()))
        .collect::<Result<_, _>>()
        .map_err(|_| Failure::usage("an argument of the program holds a NUL"))?;
    cores.restore();
    harden::undo_outliving_size_limits();
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
