//! The share daemon's program: one file for each command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench_http;
mod bench_store;
mod compact;
mod doctor;
mod measuring;
mod serve;

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
    Doctor(doctor::Doctor),
    Compact(compact::Compact),
    BenchStore(bench_store::BenchStore),
    /// Measure how many shares are made each second over HTTP
    BenchHttp(bench_http::BenchHttp),
    /// Measure how many shares are fetched each second over HTTP
    BenchHttpFetch(bench_http::BenchHttp),
    /// Measure how many shares are made and then fetched each second over HTTP
    BenchHttpFlow(bench_http::BenchHttp),
    /// Measure how many simple questions are answered each second over HTTP, and how soon
    BenchHttpGet(bench_http::BenchHttp),
    /// Measure how many shares are made each second by batches of a hundred, beside one by one
    BenchHttpBatch(bench_http::BenchHttp),
    BenchHttpRange(bench_http::range::BenchRange),
    /// Answer everything with what stands on standard input, for the measurements
    #[command(hide = true)]
    BenchFloor,
}

fn main() -> ExitCode {
    serve::close_inherited();
    let result = match Arguments::parse().command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::BenchHttp(arguments) => bench_http::run(&arguments, bench_http::What::Share),
        Command::BenchHttpFetch(arguments) => bench_http::run(&arguments, bench_http::What::Fetch),
        Command::BenchHttpFlow(arguments) => bench_http::run(&arguments, bench_http::What::Flow),
        Command::BenchHttpGet(arguments) => bench_http::run(&arguments, bench_http::What::Get),
        Command::BenchHttpBatch(arguments) => bench_http::run(&arguments, bench_http::What::Batch),
        Command::BenchHttpRange(arguments) => bench_http::range::run(&arguments),
        Command::BenchFloor => bench_http::floor::run(),
        Command::BenchStore(arguments) => bench_store::run(&arguments),
        Command::Compact(arguments) => compact::run(&arguments),
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
        let mut has: BTreeSet<String> = BTreeSet::new();
        for command in
            program.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help")
        {
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
