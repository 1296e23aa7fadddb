//! The program `lockbox`: parses the command line and runs one command.

mod busy;
mod commands;
mod exit;
mod help;
mod interrupt;
#[cfg(test)]
mod manual_tests;
mod metrics;
mod open_archive;
mod output;
mod paths;
mod progress;
mod runtime;
mod secrets;
mod snapshot_client;

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};
use lockbox_host::USAGE;
use lockbox_host::help::{Detail, VERSION, lay_out};
use lockbox_host::proc;

use commands::Command;
use exit::Failure;

/// Keep files in an encrypted archive: one file that any program uses as a folder
#[derive(Parser)]
#[command(name = "lockbox", version = VERSION, help_template = help::TEMPLATE)]
#[command(before_help = help::short(), before_long_help = help::whole())]
#[command(after_help = help::MORE, after_long_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    lockbox_terminal::abort_on_panic();
    let name = std::env::args_os().next().unwrap_or_default();
    let for_umount_8 =
        matches!(Path::new(&name).file_name().and_then(OsStr::to_str), Some("umount.lockbox" | "umount.fuse.lockbox"));
    let parsed = if for_umount_8 {
        commands::umount::parse_as_umount_8()
    } else {
        parse().map_err(|error| help::add_hint(error, std::env::args_os().skip(1)))
    };
    let command = match parsed {
        Ok(command) => command,
        Err(error) => {
            let shown = match lockbox_terminal::of_arguments(&error.render().to_string()) {
                Some(plain) => io::stderr().write_all(plain.as_bytes()),
                None => error.print().and_then(|()| io::stdout().flush()),
            };
            // Help and version come as errors too.
            return match shown {
                _ if error.use_stderr() => USAGE.into(),
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => ended(&exit::of_output(&error)),
            };
        }
    };
    let cores = proc::keep_out_of_core_dumps();
    // If the limits forbid it, `lockbox doctor` reports that.
    let _ = proc::lock_memory_if_plenty();
    proc::outlive_size_limits();
    output::start_log();
    match commands::run(&command, cores) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let code = ended(&failure);
            if for_umount_8 { exit::umount_8_code(failure.code).into() } else { code }
        }
    }
}

fn parse() -> clap::error::Result<Command> {
    let mut program = lay_out(Cli::command(), Detail::requested());
    let matches = program.try_get_matches_from_mut(std::env::args_os())?;
    Cli::from_arg_matches(&matches).map(|cli| cli.command).map_err(|error| error.format(&mut program))
}

fn ended(failure: &Failure) -> ExitCode {
    if !failure.message.is_empty() {
        output::complain(&failure.message);
    }
    failure.code.into()
}
