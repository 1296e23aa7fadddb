//! The share daemon's program: reads the command line and runs the command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod maintenance;
mod serve;
mod setup;

/// Serve one-time links to sealed files
#[derive(Parser)]
#[command(name = "lockbox-share", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(Box<serve::Serve>),
    Setup(setup::Setup),
    Doctor(maintenance::Doctor),
    Compact(maintenance::Compact),
}

fn main() -> ExitCode {
    lockbox_terminal::abort_on_panic();
    serve::close_inherited();
    let result = match Arguments::parse().command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Setup(arguments) => setup::run(&arguments),
        Command::Doctor(arguments) => maintenance::diagnose(&arguments),
        Command::Compact(arguments) => maintenance::compact(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            lockbox_terminal::complain("lockbox-share", &message);
            ExitCode::FAILURE
        }
    }
}

/// Compares the command line with the manual page.
#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    const PAGE: &str = include_str!("../../../../../man/lockbox-share.8");

    #[test]
    fn every_command_and_option_is_in_the_manual_page_and_the_page_has_no_others() {
        let mut program = Arguments::command();
        program.build();
        let shown = |command: &&clap::Command| !command.is_hide_set() && command.get_name() != "help";
        let mut has: BTreeSet<String> = BTreeSet::new();
        for command in program.get_subcommands().filter(shown) {
            assert!(
                PAGE.lines()
                    .any(|line| line.starts_with(".Cm ") && line.split(' ').any(|word| word == command.get_name())),
                "the synopsis lacks '{}'",
                command.get_name()
            );
            let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
            has.extend(
                shown.filter_map(|argument| argument.get_long()).filter(|long| *long != "help").map(str::to_owned),
            );
        }
        let items = PAGE.lines().filter(|line| line.starts_with(".It Fl "));
        let named = items.flat_map(|line| line.split([' ', ','])).filter_map(|word| word.strip_prefix('-'));
        let told: BTreeSet<String> = named.map(str::to_owned).collect();
        assert!(has.len() > 25, "{has:?}");
        let lacking: Vec<_> = has.difference(&told).collect();
        let foreign: Vec<_> = told.difference(&has).collect();
        assert!(lacking.is_empty() && foreign.is_empty(), "the page lacks {lacking:?} and has {foreign:?}");
    }
}
