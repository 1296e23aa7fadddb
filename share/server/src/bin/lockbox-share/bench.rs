//! `lockbox-share bench`: the measurements.

use clap::Subcommand;

use crate::bench_http::range::{self, BenchRange};
use crate::bench_http::{self, BenchHttp, Workload, floor};
use crate::bench_store::{self, BenchStore};

/// Measure the store and the daemon
#[derive(Subcommand)]
pub(crate) enum Bench {
    Store(BenchStore),
    /// Measure how many shares are made each second over HTTP
    Http(BenchHttp),
    /// Measure how many shares are fetched each second over HTTP
    HttpFetch(BenchHttp),
    /// Measure how many shares are made and then fetched each second over HTTP
    HttpFlow(BenchHttp),
    /// Measure how many simple questions are answered each second over HTTP, and how soon
    HttpGet(BenchHttp),
    /// Measure how many shares are made each second by batches of a hundred, beside one by one
    HttpBatch(BenchHttp),
    HttpRange(BenchRange),
    /// Answer everything with what stands on standard input, for the others
    #[command(hide = true)]
    Floor,
}

pub(crate) fn run(bench: &Bench) -> Result<(), String> {
    match bench {
        Bench::Store(arguments) => bench_store::run(arguments),
        Bench::Http(arguments) => bench_http::run(arguments, Workload::Share),
        Bench::HttpFetch(arguments) => bench_http::run(arguments, Workload::Fetch),
        Bench::HttpFlow(arguments) => bench_http::run(arguments, Workload::Flow),
        Bench::HttpGet(arguments) => bench_http::run(arguments, Workload::Get),
        Bench::HttpBatch(arguments) => bench_http::run(arguments, Workload::Batch),
        Bench::HttpRange(arguments) => range::run(arguments),
        Bench::Floor => floor::run(),
    }
}
