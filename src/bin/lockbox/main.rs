//! The program `lockbox`: parses the command line and runs one command.

mod add;
mod cat;
mod check;
mod compact;
mod create;
mod exit;
mod extract;
mod info;
mod kdf;
mod ls;
mod mount;
mod opening;
mod output;
mod passwd;
mod progress;
mod purge;
mod receive;
mod rescue;
mod runtime;
mod secrets;
mod seen;
mod share;
mod umount;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use exit::Failure;
use nix::sys::signal::{SigSet, Signal};

/// Keep files in an encrypted archive: one file that any program uses as a folder
#[derive(Parser)]
#[command(name = "lockbox", version, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Create(create::Args),
    Mount(mount::Args),
    Umount(umount::Args),
    Add(add::Args),
    Extract(extract::Args),
    Ls(ls::Args),
    Cat(cat::Args),
    Info(info::Args),
    Check(check::Args),
    Rescue(rescue::Args),
    Compact(compact::Args),
    Purge(purge::Args),
    Passwd(passwd::Args),
    Share(share::Args),
    Receive(receive::Args),
}

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let parsed = match Path::new(&name).file_name().and_then(OsStr::to_str) {
        Some("umount.lockbox" | "umount.fuse.lockbox") => umount::parse_as_umount_8(),
        _ => Cli::try_parse().map(|cli| cli.command),
    };
    let command = match parsed {
        Ok(command) => command,
        Err(error) => {
            // Help and version come as errors too; a message that cannot be shown has no other way out.
            let _ = error.print();
            return if error.use_stderr() { exit::USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    secrets::keep_out_of_core_dumps();
    outlive_size_limits();
    output::start_log();
    match run(&command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::complain(&failure.message);
            failure.code.into()
        }
    }
}

/// A write that meets a limit on the size of files fails as on a full disk, instead of ending the program.
fn outlive_size_limits() {
    let mut beyond_limit = SigSet::empty();
    beyond_limit.add(Signal::SIGXFSZ);
    // Before any other thread exists.
    let _ = beyond_limit.thread_block();
}

fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Create(args) => create::run(args),
        Command::Mount(args) => mount::run(args),
        Command::Umount(args) => umount::run(args),
        Command::Add(args) => add::run(args),
        Command::Extract(args) => extract::run(args),
        Command::Ls(args) => ls::run(args),
        Command::Cat(args) => cat::run(args),
        Command::Info(args) => info::run(args),
        Command::Check(args) => check::run(args),
        Command::Rescue(args) => rescue::run(args),
        Command::Compact(args) => compact::run(args),
        Command::Purge(args) => purge::run(args),
        Command::Passwd(args) => passwd::run(args),
        Command::Share(args) => share::run(args),
        Command::Receive(args) => receive::run(args),
    }
}
