//! `lockbox info`: prints the properties of an archive.
use lockbox_host::Program;
use serde_json::json;

use crate::exit::{Failure, Lockbox};
use crate::open_archive::ArchiveArgs;
use crate::output::{Output, hex, rfc3339};

/// Show facts about an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let archive = args.archive.read()?;
    let info = archive.info().map_err(|error| Lockbox::failure(&args.archive.archive, error))?;
    // The tree of snapshots alone may be damaged, on which `check` reports more.
    let moments = archive.snapshot_manager();
    let snapshots = moments.list().and_then(|all| match all.len() {
        0 => Ok((0, 0)),
        count => Ok((count, moments.held_bytes(&|_| true)?)),
    });
    let mut out = Output::new();
    let reader = out.reader;
    if args.json {
        let slots: Vec<_> =
            info.key_slots.iter().map(|&(n, kind)| json!({"slot": n, "kind": slot_kind(kind)})).collect();
        out.json(&json!({
            "archive_id": hex(&info.archive),
            "fingerprint": info.fingerprint.to_string(),
            "format_version": info.format_version,
            "generation": info.generation.0,
            "session": hex(&info.session),
            "committed": rfc3339(info.committed),
            "closed": info.closed,
            "log": info.log,
            "inodes": info.inodes,
            "file_bytes": info.file_bytes,
            "used_bytes": info.used_bytes,
            "key_slots": slots,
            "snapshots": snapshots.as_ref().ok().map(|(count, _)| count),
            "snapshots_held_bytes": snapshots.as_ref().ok().map(|(_, held)| held),
            "backup_of": info.backup_of.map(|(generation, time)| json!({"generation": generation.0, "time": rfc3339(time)})),
            "fallback": info.fallback,
        }))?;
    } else {
        let slots: Vec<_> = info.key_slots.iter().map(|&(n, kind)| format!("{n} {}", slot_kind(kind))).collect();
        for (name, value) in [
            ("Archive id", hex(&info.archive)),
            ("Fingerprint", info.fingerprint.to_string()),
            ("Format version", info.format_version.to_string()),
            ("Generation", info.generation.0.to_string()),
            ("Session", hex(&info.session)),
            ("Last commit", reader.time(info.committed)),
            ("Closed cleanly", yes(info.closed)),
            ("Log", yes(info.log)),
            ("Files and directories", info.inodes.to_string()),
            ("Size of the file", reader.size(info.file_bytes)),
            ("In use", reader.size(info.used_bytes)),
            ("Key slots", slots.join(", ")),
            (
                "Snapshots",
                match snapshots {
                    Ok((0, _)) => "0".to_owned(),
                    Ok((count, held)) => format!("{count}, {} held", reader.size(held)),
                    Err(error) => format!("not known: {error}"),
                },
            ),
        ] {
            out.line(&format!("{name:<22} {value}"))?;
        }
    }
    out.finish()
}

fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

/// Specification 3.1, field "kind of each key slot".
fn slot_kind(kind: u8) -> &'static str {
    match kind {
        1 | 17 => "passphrase",
        2 | 18 => "key file",
        3 | 19 => "recovery code",
        4 => "age recipient",
        _ => "unknown",
    }
}
