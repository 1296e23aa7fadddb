//! `lockbox key ls` and `lockbox key test`: which keys there are, and which of them a secret is.
use lockbox::keys::{self, KeyAccess, KeyInfo};
use lockbox::storage::ArchiveSource;
use serde_json::json;

use super::{KeyArgs, json_of, name_of, row};
use crate::exit::Failure;
use crate::open_archive;
use crate::output::Output;
use crate::secrets;

/// List the keys of an archive, with their labels
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    key: KeyArgs,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Say which keys of an archive the given secrets are
#[derive(clap::Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    key: KeyArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let keys = keys(&args.key, |site, access| keys::list(site, access))?;
    let mut out = Output::new();
    for key in &keys {
        if args.json { out.json(&json_of(key))? } else { out.line(&row(key, out.reader))? }
    }
    out.finish()
}

pub(crate) fn test(args: &TestArgs) -> Result<(), Failure> {
    let keys = keys(&args.key, |site, access| keys::list_all(site, access))?;
    let opened: Vec<&KeyInfo> = keys.iter().filter(|key| key.opened).collect();
    let mut out = Output::new();
    if args.json {
        out.json(&json!({"opened": opened.iter().map(|key| json_of(key)).collect::<Vec<_>>()}))?;
    } else {
        for key in opened {
            out.line(&format!("opens key slot {}", name_of(key)))?;
        }
    }
    out.finish()
}

type Lister = fn(ArchiveSource<'_>, &KeyAccess<'_>) -> lockbox::Result<Vec<KeyInfo>>;

fn keys(args: &KeyArgs, list: Lister) -> Result<Vec<KeyInfo>, Failure> {
    let place = open_archive::place(&args.archive, &args.remote)?;
    keys::identify(place.site()).map_err(|error| secrets::failure(&place, error))?;
    args.unlock.with_access(&place, |access| list(place.site(), access))
}
