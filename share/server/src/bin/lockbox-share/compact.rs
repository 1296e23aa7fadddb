//! Removes from the store of a daemon that does not run everything that nothing needs any more.

use std::path::PathBuf;

use clap::Args;
use lockbox_share::store::StoreMaintenance;
use lockbox_share::store::segments::{SegmentSettings, SegmentStore};

/// Compact the store of a daemon that does not run
#[derive(Args)]
pub(crate) struct Compact {
    /// Directory of the daemon
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,
}

pub(crate) fn run(arguments: &Compact) -> Result<(), String> {
    if !arguments.state_dir.is_dir() {
        return Err(format!("{}: there is no such directory", arguments.state_dir.display()));
    }
    let settings = SegmentSettings { background: None, ..SegmentSettings::default() };
    let store = SegmentStore::open(&arguments.state_dir, &settings).map_err(|error| error.to_string())?;
    let before = store.stats();
    store.compact().map_err(|error| error.to_string())?;
    let after = store.stats();
    #[allow(clippy::print_stdout)] // the result of the command
    {
        println!("live={}", after.live);
        println!("segment_bytes_before={}", before.segment_bytes);
        println!("segment_bytes={}", after.segment_bytes);
        println!("spool_bytes={}", after.spool_bytes);
    }
    Ok(())
}
