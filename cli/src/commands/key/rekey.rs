//! `lockbox key rekey`: writes an archive under a new volume key.
use lockbox::archive::{Archive, KeepKeys, RekeyOptions};
use lockbox::keys::KeyName;
use lockbox_host::Prompter;
use lockbox_host::secrets::Sources;
use serde_json::json;

use super::{ChangeArgs, KeyArgs, json_of, name_of};
use crate::commands::compact::{self, Watch};
use crate::exit::{Failure, Lockbox};
use crate::output::Output;
use crate::secrets;

/// Write an archive under a new volume key, so that removed keys are worth nothing for what it holds from now on
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    change: ChangeArgs,
    /// Keep only these keys, by slot or label; may be given several times
    #[arg(long, value_name = "SLOT", conflicts_with = "drop")]
    only: Vec<String>,
    /// Keep all keys but these; may be given several times
    #[arg(long, value_name = "SLOT")]
    drop: Vec<String>,
    /// Only list what would be kept
    #[arg(long)]
    dry_run: bool,
    /// Go on although the file has further names (hard links), which will keep the old file
    #[arg(long)]
    break_links: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let KeyArgs { archive: path, unlock, .. } = &args.change.key;
    let place = args.change.place()?;
    let given = unlock.verified(&place)?;
    let prompts = Prompter::<Lockbox>::prompts(&Sources::default());
    let names = |given: &[String]| given.iter().map(|text| KeyName::parse(text)).collect();
    let keep = match (&args.only[..], &args.drop[..]) {
        ([], []) => KeepKeys::All,
        ([], drop) => KeepKeys::Drop(names(drop)),
        (only, _) => KeepKeys::Only(names(only)),
    };
    let options = RekeyOptions { keep, break_links: args.break_links, dry_run: args.dry_run, prompts: &prompts };
    let watch = Watch::start(unlock.bar())?;
    let access = unlock.access(&given.secrets, &place);
    let done = Archive::rekey(place.site(), &access, &options, &mut |step| watch.step(step));
    drop(watch);
    let report = done.map_err(|error| compact::failure(&place, error))?;
    if !args.dry_run {
        secrets::forget_kept(place.site());
    }
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "dry_run": args.dry_run,
            "kept": report.kept.iter().map(json_of).collect::<Vec<_>>(),
            "dropped": report.dropped.iter().map(json_of).collect::<Vec<_>>(),
            "disk_before": report.sizes.disk_before,
            "disk_after": report.sizes.disk_after,
        }))?;
        return out.finish();
    }
    for (what, keys) in [("kept", &report.kept), ("dropped", &report.dropped)] {
        for key in keys {
            out.line(&format!("{what:<8} {}", name_of(key)))?;
        }
    }
    if args.dry_run {
        out.line("Nothing was written.")?;
    } else {
        out.line(&format!(
            "The archive has a new volume key ({} {} before, {} after). {} still open with the old keys.",
            out.reader.size(report.sizes.disk_before),
            compact::where_it_is(path),
            out.reader.size(report.sizes.disk_after),
            if place.is_remote() {
                "Copies made before, its objects of before, which stay for a day, and versions of them that the store keeps"
            } else {
                "Copies made before"
            }
        ))?;
    }
    out.finish()
}
