//! The share daemon's program: one file for each command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench_store;

/// Serve one-time links to sealed files
#[derive(Parser)]
#[command(name = "lockbox-share", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    BenchStore(bench_store::BenchStore),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::BenchStore(arguments) => bench_store::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            #[allow(clippy::print_stderr)] // a program tells its user
            {
                eprintln!("lockbox-share: {message}");
            }
            ExitCode::FAILURE
        }
    }
}
