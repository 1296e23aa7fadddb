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

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
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
        commands::umount::parse_as_umount_8().map(|command| (command, false))
    } else {
        parse().map_err(|error| help::add_hint(error, std::env::args_os().skip(1)))
    };
    let (command, is_json) = match parsed {
        Ok(parsed) => parsed,
        Err(error) if error.use_stderr() && !for_umount_8 && asks_for_json(std::env::args_os().skip(1)) => {
            return ended(&exit::of_usage(&error.render().to_string()), true);
        }
        Err(error) => {
            let shown = match lockbox_terminal::of_arguments(&error.render().to_string()) {
                Some(plain) => io::stderr().write_all(plain.as_bytes()),
                None => error.print().and_then(|()| io::stdout().flush()),
            };
            // Help and version come as errors too.
            return match shown {
                _ if error.use_stderr() => USAGE.into(),
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => ended(&exit::of_output(&error), false),
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
            let code = ended(&failure, is_json);
            if for_umount_8 { exit::umount_8_code(failure.code).into() } else { code }
        }
    }
}

/// Returns the command, and whether it prints JSON.
fn parse() -> clap::error::Result<(Command, bool)> {
    let mut program = lay_out(Cli::command(), Detail::requested());
    let matches = program.try_get_matches_from_mut(std::env::args_os())?;
    let command = Cli::from_arg_matches(&matches).map(|cli| cli.command).map_err(|error| error.format(&mut program))?;
    Ok((command, prints_json(&matches)))
}

fn prints_json(matches: &ArgMatches) -> bool {
    matches!(matches.try_get_one::<bool>("json"), Ok(Some(true)))
        || matches.subcommand().is_some_and(|(_, of)| prints_json(of))
}

/// Returns whether a command line that cannot be parsed has `--json`.
fn asks_for_json(arguments: impl Iterator<Item = OsString>) -> bool {
    arguments.take_while(|argument| argument != "--").any(|argument| argument == "--json")
}

fn ended(failure: &Failure, is_json: bool) -> ExitCode {
    match is_json {
        _ if failure.message.is_empty() => {}
        // With standard error closed there is no reader.
        true => drop(writeln!(io::stderr(), "{}", lockbox_terminal::json(&exit::json(failure).to_string()))),
        false => output::complain(&failure.message),
    }
    failure.code.into()
}
