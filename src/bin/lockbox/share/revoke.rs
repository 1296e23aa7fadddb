//! `lockbox share revoke`: takes a share back.

use lockbox_share_client::sharing;

use super::{serving, shown};
use crate::exit::Failure;

/// Take a share back: its link opens nothing any more
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
    let info = sharing::revoke(&client, &owner, entry.handle).map_err(|error| serving::failure(&error))?;
    shown::print(&entry, &info, args.json)
}
