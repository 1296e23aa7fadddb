//! `lockbox cache`: lists and clears the local cache of remote archives.
use std::path::PathBuf;

use lockbox::error::Timestamp;
use lockbox_host::remote;
use serde_json::json;

use crate::exit::Failure;
use crate::output::{Output, rfc3339};

/// List or remove what is kept on disk of archives on servers
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Ls(LsArgs),
    Clear(ClearArgs),
}

/// List what is kept, an archive a line: size, when it was used last, address
#[derive(clap::Args)]
pub(crate) struct LsArgs {
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Remove what is kept of all archives, or of some; a mount that uses it goes on with it
#[derive(clap::Args)]
pub(crate) struct ClearArgs {
    /// Only of these
    #[arg(value_name = "ADDRESS")]
    addresses: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Ls(args) => ls(args),
        Command::Clear(args) => clear(args),
    }
}

fn ls(args: &LsArgs) -> Result<(), Failure> {
    let mut out = Output::new();
    for kept in remote::kept()? {
        let used = Timestamp::from_system(kept.used);
        if args.json {
            out.json(&json!({
                "address": kept.address,
                "file": kept.file,
                "bytes": kept.bytes,
                "most_bytes": kept.most,
                "used": rfc3339(used),
            }))?;
        } else {
            let (size, used) = (out.reader.size(kept.bytes), out.reader.time(used));
            let address = kept.address.unwrap_or_else(|| format!("({}, which does not say its address)", kept.file));
            out.line(&format!("{size:>17}  {used}  {address}"))?;
        }
    }
    out.finish()
}

fn clear(args: &ClearArgs) -> Result<(), Failure> {
    let removed = remote::remove_kept((!args.addresses.is_empty()).then_some(&args.addresses))?;
    let bytes: u64 = removed.iter().map(|(kept, _)| kept.bytes).sum();
    let used = removed.iter().filter(|(_, is_used)| *is_used).count();
    let mut out = Output::new();
    if args.json {
        out.json(&json!({"removed": removed.len(), "bytes": bytes, "in_use": used}))?;
        return out.finish();
    }
    match removed.len() {
        0 => out.line("Nothing was kept.")?,
        1 => out.line(&format!("What was kept of 1 archive is removed: {}.", out.reader.size(bytes)))?,
        count => out.line(&format!("What was kept of {count} archives is removed: {}.", out.reader.size(bytes)))?,
    }
    match used {
        0 => {}
        1 => out.line("1 of it is in use; its space comes back when that ends.")?,
        count => out.line(&format!("{count} of them are in use; their space comes back when that ends."))?,
    }
    out.finish()
}
