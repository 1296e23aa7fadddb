//! Output formats of a share: words for people, values for programs.
use std::time::SystemTime;

use lockbox_share_client::history::HistoryEntry;
use lockbox_share_client::protocol::message::{ClaimState, ShareInfo, ShareState};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::output::Output;

pub(super) fn state(state: ShareState) -> &'static str {
    match state {
        ShareState::Armed => "waiting",
        ShareState::Leased => "downloading",
        ShareState::Consumed => "used",
        ShareState::Revoked => "revoked",
        ShareState::Expired => "expired",
    }
}

/// Returns the events of a share, oldest first.
pub(super) fn events(info: &ShareInfo) -> Vec<(u64, String)> {
    let mut events = vec![(info.created_at, "made".to_owned())];
    for claim in &info.claims {
        events.push((claim.claimed_at, "claimed".to_owned()));
        match claim.state {
            ClaimState::Leased | ClaimState::Sending => {}
            ClaimState::Completed => events.push((claim.ended_at, "received in full".to_owned())),
            ClaimState::Interrupted => {
                events.push((claim.ended_at, "interrupted; 'lockbox share rearm' allows it once more".to_owned()));
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
pub(super) fn json(entry: &HistoryEntry, info: Option<&ShareInfo>) -> Value {
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

/// Prints one share with all that happened to it.
pub(super) fn print(entry: &HistoryEntry, info: &ShareInfo, as_json: bool) -> Result<(), Failure> {
    let mut out = Output::new();
    if as_json {
        out.json(&json(entry, Some(info)))?;
        return out.finish();
    }
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
pub(super) fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}
