//! `lockbox share ls`: lists the shares that this user made.
use lockbox_share_client::history::HistoryEntry;
use lockbox_share_client::http::ServerAddress;
use lockbox_share_client::protocol::handle::Handle;
use lockbox_share_client::protocol::message::ShareInfo;
use lockbox_share_client::shares;

use super::format;
use super::serving::{self, ServerArgs};
use crate::exit::Failure;
use crate::output::{Output, complain};

/// List your shares and what became of them, the newest first
#[derive(clap::Args)]
pub(super) struct Args {
    /// Only shares with this label
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let only = args.server.named()?;
    let mut book = serving::book()?;
    let wanted = |entry: &&HistoryEntry| {
        only.as_ref().is_none_or(|server| *server == entry.server())
            && args.label.as_ref().is_none_or(|label| entry.label.as_ref() == Some(label))
    };
    let entries: Vec<HistoryEntry> = book.entries().filter(wanted).cloned().collect();
    let mut servers: Vec<ServerAddress> = Vec::new();
    for entry in &entries {
        if !servers.contains(&entry.server()) {
            servers.push(entry.server());
        }
    }
    let mut infos: Vec<(Handle, ServerAddress, ShareInfo)> = Vec::new();
    let mut worst = None;
    for server in servers {
        let owner = serving::owner(&mut book, &server)?;
        let handles: Vec<Handle> =
            entries.iter().filter(|entry| entry.server() == server).map(|entry| entry.handle).collect();
        let client = serving::client(&mut book, server.clone(), args.server.is_named())?;
        match shares::fetch_all(&client, &owner, &handles) {
            Ok(found) => infos.extend(found.into_iter().flatten().map(|info| (info.handle, server.clone(), info))),
            // The other servers' shares are shown nevertheless.
            Err(error) => {
                let failure = serving::failure(&error);
                complain(&failure.message);
                worst = Some(Failure::new(failure.code, "not every server answered; see above"));
            }
        }
    }
    drop(book);
    print(args, &entries, &infos)?;
    worst.map_or(Ok(()), Err)
}

fn print(args: &Args, entries: &[HistoryEntry], infos: &[(Handle, ServerAddress, ShareInfo)]) -> Result<(), Failure> {
    let info = |entry: &HistoryEntry| {
        let found = infos.iter().find(|(handle, server, _)| *handle == entry.handle && *server == entry.server());
        found.map(|(_, _, info)| info)
    };
    let mut out = Output::new();
    if args.json {
        let all: Vec<_> = entries.iter().map(|entry| format::json(entry, info(entry))).collect();
        out.json(&all.into())?;
        return out.finish();
    }
    for entry in entries {
        let (state, left) = match info(entry) {
            Some(info) => (format::state(info.state), format!("{}/{}", info.claims_left, info.max_claims)),
            None if entry.expires_at < format::now() => ("ended", "-".into()),
            None => ("unknown", "-".into()),
        };
        let label = entry.label.as_deref().unwrap_or("-");
        let lifetime = entry.lifetime().map_or_else(|| "-".into(), |span| span.to_string());
        out.line(&format!(
            "{:<13}  {state:<11}  {left:>3}  {}  {lifetime:>4}  {label}",
            entry.handle.to_string(),
            out.reader.seconds(entry.expires_at)
        ))?;
    }
    out.finish()
}
