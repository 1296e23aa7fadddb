//! Benchmarks of the library without a mount: adding, listing, reading and extracting files.
//!
//! `cargo run --release -p lockbox-bench --bin scenarios -- small` prints one row for each step,
//! with its peak memory. Times are of one run; only ratios within it can be compared.

mod files;
mod measure;

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Result of a scenario; an error only ends it.
type Outcome<T> = Result<T, Box<dyn Error>>;

/// Measure the library without a mount
#[derive(Parser)]
#[command(name = "scenarios")]
struct Arguments {
    #[command(subcommand)]
    scenario: Scenario,
    #[command(flatten)]
    place: Place,
}

/// Where and with what.
#[derive(Args)]
pub(crate) struct Place {
    /// Directory on the disk to measure
    #[arg(long, global = true, default_value_os_t = std::env::temp_dir())]
    work: PathBuf,
    /// MiB of memory that the archive may use
    #[arg(long, global = true, default_value_t = 256)]
    memory: u64,
}

#[derive(Subcommand)]
enum Scenario {
    /// Add files of 1 KiB, commit, list, read and extract them
    Small {
        #[arg(long, default_value_t = 100_000)]
        files: usize,
    },
    /// Add one large file, read ranges of it cold and warm, extract it
    Large {
        /// MiB of the file
        #[arg(long, default_value_t = 1024)]
        size: u64,
    },
    /// Add, delete and replace files of an archive that has five times as many
    AppendDelete {
        #[arg(long, default_value_t = 10_000)]
        files: usize,
    },
    /// Compare two snapshots between which 100 files were changed, warm and cold
    Diff {
        #[arg(long, default_value_t = 1_000_000)]
        entries: usize,
    },
    /// Open, look up, list and change archives of more and more entries
    Tree {
        #[arg(long, value_delimiter = ',', default_value = "10000,100000,1000000")]
        entries: Vec<usize>,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let place = &arguments.place;
    let done = match arguments.scenario {
        Scenario::Small { files } => files::small(place, files),
        Scenario::Large { size } => files::large(place, size),
        Scenario::AppendDelete { files } => files::append_delete(place, files),
        Scenario::Diff { entries } => files::diff(place, entries),
        Scenario::Tree { entries } => entries.into_iter().try_for_each(|entries| files::tree(place, entries)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "scenarios: {error}");
            ExitCode::FAILURE
        }
    }
}
