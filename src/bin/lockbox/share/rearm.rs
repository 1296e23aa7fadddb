//! `lockbox share rearm`: arms a share again whose download was interrupted.

use lockbox_share_client::sharing;

use super::{serving, shown};
use crate::exit::Failure;

/// Let a download that was interrupted be made once more
#[derive(clap::Args)]
pub(super) struct Args {
    /// ID or label of the share, as 'lockbox share ls' shows them
    id: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let (entry, client, owner) = serving::remembered(&args.id)?;
    let info = sharing::rearm(&client, &owner, entry.handle).map_err(|error| serving::failure(&error))?;
    shown::print(&entry, &info, args.json)
}
