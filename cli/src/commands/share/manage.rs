//! `lockbox share info`, `revoke` and `rearm`: sends one request about one share and prints its new
//! state.
use lockbox_share_client::Error;
use lockbox_share_client::http::ShareClient;
use lockbox_share_client::protocol::handle::Handle;
use lockbox_share_client::protocol::message::ShareInfo;
use lockbox_share_client::protocol::token::OwnerToken;

use super::{format, serving};
use crate::exit::Failure;

#[derive(clap::Args)]
pub(super) struct Args {
    /// ID or label of the share, as 'lockbox share ls' shows them
    id: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

type Ask = fn(&ShareClient, &OwnerToken, Handle) -> Result<ShareInfo, Error>;

pub(super) fn run(args: &Args, ask: Ask) -> Result<(), Failure> {
    let (entry, client, owner) = serving::remembered(&args.id)?;
    let info = ask(&client, &owner, entry.handle).map_err(|error| serving::failure(&error))?;
    format::print(&entry, &info, args.json)
}
