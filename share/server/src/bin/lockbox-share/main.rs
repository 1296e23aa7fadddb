//! The share daemon's program: one file for each command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench_http;
mod bench_store;
mod doctor;
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
    /// Look for what would keep the daemon from serving
    Doctor(doctor::Doctor),
    BenchStore(bench_store::BenchStore),
    /// Measure how many shares are made each second over HTTP
    BenchHttp(bench_http::BenchHttp),
    /// Measure how many shares are fetched each second over HTTP
    BenchHttpFetch(bench_http::BenchHttp),
    /// Measure how many shares are made and then fetched each second over HTTP
    BenchHttpFlow(bench_http::BenchHttp),
    /// Answer everything with what stands on standard input, for the measurements
    #[command(hide = true)]
    BenchFloor,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::BenchStore(arguments) => bench_store::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::BenchHttp(arguments) => bench_http::run(&arguments, bench_http::What::Share),
        Command::BenchHttpFetch(arguments) => bench_http::run(&arguments, bench_http::What::Fetch),
        Command::BenchHttpFlow(arguments) => bench_http::run(&arguments, bench_http::What::Flow),
        Command::BenchFloor => bench_http::floor::run(),
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
