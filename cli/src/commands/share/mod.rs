//! `lockbox share`: shares one file, directory or text by a link that works once, and manages such
//! links.
mod content;
mod new;
pub(crate) mod serving;

use std::thread;
use std::time::{Duration, SystemTime};

use clap::Subcommand;
use lockbox_share_client::history::HistoryEntry;
use lockbox_share_client::http::{ServerAddress, ShareClient};
use lockbox_share_client::protocol::message::{ClaimState, ShareInfo, ShareState};
use lockbox_share_client::protocol::token::{Handle, OwnerToken};
use lockbox_share_client::{Error, shares};
use serde_json::{Value, json};

use self::serving::ServerArgs;
use crate::exit::Failure;
use crate::output::{Output, Reader, complain, print_json};

/// Share a file, a directory or a text through a one-time link
///
/// It is sealed here; the daemon that keeps it cannot read it, nor its name. The link opens it, with 'lockbox receive' or a
/// browser.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    new: new::Args,
}

#[derive(Subcommand)]
enum Command {
    Ls(ListArgs),
    /// Show the state of one share
    Info(ShareIdArgs),
    Watch(WatchArgs),
    /// Take a share back: its link opens nothing any more
    Revoke(ShareIdArgs),
    /// Let a download that was interrupted be made once more
    Rearm(ShareIdArgs),
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        Some(Command::Ls(args)) => ls(args),
        Some(Command::Info(args)) => manage(args, shares::fetch),
        Some(Command::Watch(args)) => watch(args),
        Some(Command::Revoke(args)) => manage(args, shares::revoke),
        Some(Command::Rearm(args)) => manage(args, shares::rearm),
        None => new::run(&args.new),
    }
}

/// List your shares and their states, the newest first
#[derive(clap::Args)]
struct ListArgs {
    /// Only shares with this label
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
}

fn ls(args: &ListArgs) -> Result<(), Failure> {
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
                worst = Some(Failure::new(failure.code, "some servers did not answer (listed above)"));
            }
        }
    }
    drop(book);
    print_list(args, &entries, &infos)?;
    worst.map_or(Ok(()), Err)
}

fn print_list(
    args: &ListArgs,
    entries: &[HistoryEntry],
    infos: &[(Handle, ServerAddress, ShareInfo)],
) -> Result<(), Failure> {
    let info = |entry: &HistoryEntry| {
        let found = infos.iter().find(|(handle, server, _)| *handle == entry.handle && *server == entry.server());
        found.map(|(_, _, info)| info)
    };
    if args.json {
        let all: Vec<_> = entries.iter().map(|entry| json_of(entry, info(entry))).collect();
        return print_json(&all.into());
    }
    let mut out = Output::new();
    let reader = out.reader;
    let width = reader.seconds(0).len();
    let mut row = |[id, state, left, expires, lifetime, label]: [&str; 6]| {
        out.line(&format!("{id:<13}  {state:<11}  {left:>4}  {expires:<width$}  {lifetime:>4}  {label}"))
    };
    if reader == Reader::Person && !entries.is_empty() {
        row(["ID", "STATE", "LEFT", "EXPIRES", "FOR", "LABEL"])?;
    }
    for entry in entries {
        let (state, left) = match info(entry) {
            Some(info) => (state(info.state), format!("{}/{}", info.claims_left, info.max_claims)),
            None if entry.expires_at < now() => ("ended", "-".into()),
            None => ("unknown", "-".into()),
        };
        let label = entry.label.as_deref().unwrap_or("-");
        let lifetime = entry.lifetime().map_or_else(|| "-".into(), |span| span.to_string());
        let (id, expires) = (entry.handle.to_string(), reader.seconds(entry.expires_at));
        row([&id, state, &left, &expires, &lifetime, label])?;
    }
    out.finish()
}

#[derive(clap::Args)]
struct ShareIdArgs {
    /// ID or label of the share, as 'lockbox share ls' shows them
    id: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

type Ask = fn(&ShareClient, &OwnerToken, Handle) -> Result<ShareInfo, Error>;

fn manage(args: &ShareIdArgs, ask: Ask) -> Result<(), Failure> {
    let (entry, client, owner) = serving::remembered(&args.id)?;
    let info = ask(&client, &owner, entry.handle).map_err(|error| serving::failure(&error))?;
    print(&entry, &info, args.json)
}

/// One question is answered after so many seconds at the latest.
const WAIT: u64 = 30;
/// Delay after the daemon was out of reach, such as during a restart.
const PAUSE: Duration = Duration::from_secs(2);

/// Report changes of a share, until it is used up, taken back or expired
#[derive(clap::Args)]
struct WatchArgs {
    /// ID or label of the share, as 'lockbox share ls' shows them
    id: String,
    /// Print one JSON object for each change
    #[arg(long)]
    json: bool,
}

fn watch(args: &WatchArgs) -> Result<(), Failure> {
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
fn tell(args: &WatchArgs, info: &ShareInfo, told: &mut usize) -> Result<(), Failure> {
    let mut out = Output::new();
    let events = events(info);
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

fn state(state: ShareState) -> &'static str {
    match state {
        ShareState::Armed => "waiting",
        ShareState::Leased => "downloading",
        ShareState::Consumed => "used",
        ShareState::Revoked => "revoked",
        ShareState::Expired => "expired",
    }
}

/// Returns the events of a share, oldest first.
fn events(info: &ShareInfo) -> Vec<(u64, String)> {
    let mut events = vec![(info.created_at, "made".to_owned())];
    for claim in &info.claims {
        events.push((claim.claimed_at, "claimed".to_owned()));
        match claim.state {
            ClaimState::Leased | ClaimState::Sending => {}
            ClaimState::Completed => events.push((claim.ended_at, "received in full".to_owned())),
            ClaimState::Interrupted => {
                events.push((
                    claim.ended_at,
                    "interrupted or not confirmed; 'lockbox share rearm' allows it once more".to_owned(),
                ));
            }
        }
    }
    events.extend(info.revoked_at.map(|at| (at, "taken back".to_owned())));
    if info.state == ShareState::Expired {
        events.push((info.expires_at, "expired".to_owned()));
    }
    events.sort_by_key(|(at, _)| *at);
    events
}

/// Returns the data about a share, for a program; without `info` the server has forgotten it or is
/// out of reach.
fn json_of(entry: &HistoryEntry, info: Option<&ShareInfo>) -> Value {
    let mut object = json!({
        "id": entry.handle,
        "label": entry.label,
        "server": entry.server().to_string(),
        "created_at": entry.created_at,
        "expires_at": entry.expires_at,
        "lifetime": entry.lifetime().map(|span| span.to_string()),
        "state": null,
    });
    if let Some(info) = info {
        object["state"] = json!(info.state);
        object["max_downloads"] = json!(info.max_claims);
        object["downloads_left"] = json!(info.claims_left);
        object["downloads"] = json!(info.claims);
        object["revoked_at"] = json!(info.revoked_at);
        object["sealed_size"] = json!(info.size);
    }
    object
}

fn print(entry: &HistoryEntry, info: &ShareInfo, as_json: bool) -> Result<(), Failure> {
    if as_json {
        return print_json(&json_of(entry, Some(info)));
    }
    let mut out = Output::new();
    out.line(&format!("id          {}", entry.handle))?;
    if let Some(label) = &entry.label {
        out.line(&format!("label       {}", label))?;
    }
    out.line(&format!("server      {}", entry.server()))?;
    out.line(&format!("state       {}", state(info.state)))?;
    out.line(&format!("downloads   {} of {} left", info.claims_left, info.max_claims))?;
    let lifetime = entry.lifetime().map(|span| format!(", {} after it was made", span.words())).unwrap_or_default();
    out.line(&format!("expires     {}{lifetime}", out.reader.seconds(info.expires_at)))?;
    for (at, what) in events(info) {
        out.line(&format!("{}  {what}", out.reader.seconds(at)))?;
    }
    out.finish()
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}
