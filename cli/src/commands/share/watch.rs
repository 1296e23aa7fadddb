//! `lockbox share watch`: prints the events of a share until it ends.
use std::thread;
use std::time::Duration;

use lockbox_share_client::Error;
use lockbox_share_client::protocol::message::{ClaimState, ShareInfo, ShareState};
use lockbox_share_client::shares;
use serde_json::json;

use super::{format, serving};
use crate::exit::Failure;
use crate::output::{Output, complain};

/// One question is answered after so many seconds at the latest.
const WAIT: u64 = 30;
/// Delay after the daemon was out of reach, such as during a restart.
const PAUSE: Duration = Duration::from_secs(2);

/// Tell what happens to a share, until it is used up, taken back or expired
#[derive(clap::Args)]
pub(super) struct Args {
    /// ID or label of the share, as 'lockbox share ls' shows them
    id: String,
    /// Print one JSON object for each change
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let (entry, client, owner) = serving::remembered(&args.id)?;
    let mut info = shares::fetch(&client, &owner, entry.handle).map_err(|error| serving::failure(&error))?;
    let mut told = 0;
    let mut out_of_reach = false;
    loop {
        tell(args, &info, &mut told)?;
        if has_ended(&info) {
            return Ok(());
        }
        let version = (info.version, info.state);
        while (info.version, info.state) == version {
            match shares::watch(&client, &owner, &info, WAIT) {
                Ok(newer) => {
                    info = newer;
                    out_of_reach = false;
                }
                Err(error @ Error::Unreachable { .. }) => {
                    if !out_of_reach {
                        complain(&format!("{error}; waiting for it"));
                    }
                    out_of_reach = true;
                    thread::sleep(PAUSE);
                }
                Err(error) => return Err(serving::failure(&error)),
            }
        }
    }
}

/// Prints new events; a program gets the whole state each time.
fn tell(args: &Args, info: &ShareInfo, told: &mut usize) -> Result<(), Failure> {
    let mut out = Output::new();
    let events = format::events(info);
    if args.json {
        let last = events.last().map(|(_, what)| what.as_str());
        out.json(&json!({"state": info.state, "version": info.version, "downloads": info.claims, "last": last}))?;
    } else {
        for (at, what) in events.iter().skip(*told) {
            out.line(&format!("{}  {what}", out.reader.seconds(*at)))?;
        }
    }
    *told = events.len();
    out.finish()
}

/// Returns whether no event will follow. A share that is used up may still be in transfer to the
/// last receiver.
fn has_ended(info: &ShareInfo) -> bool {
    let running = info.claims.iter().any(|claim| matches!(claim.state, ClaimState::Leased | ClaimState::Sending));
    matches!(info.state, ShareState::Consumed | ShareState::Revoked | ShareState::Expired) && !running
}
