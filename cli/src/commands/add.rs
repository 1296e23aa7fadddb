//! `lockbox add`: copies files of the host into an archive, or makes a part of it equal to them.
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::exchange::{self, ImportOptions, ImportReport, MirrorChange, MirrorPlan};
use lockbox_host::{Program, shown};
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::{self, Failure, Lockbox};
use crate::interrupt::{self, Interrupt};
use crate::open_archive::{ArchiveArgs, WriterArgs, creator};
use crate::output::{self, Output, put_name};
use crate::paths::PatternArgs;

/// Number of deletions listed one by one when mirroring is refused.
const TOLD: usize = 10;

/// Copy files and directories into an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// What to copy; directories with everything below them
    #[arg(required = true, value_name = "SRC")]
    sources: Vec<PathBuf>,
    /// Directory of the archive to copy into, which may also be named as ARCHIVE:PATH; made when it is missing; the root by default
    #[arg(long, value_name = "PATH")]
    to: Option<OsString>,
    /// Copy what a SRC that is a symbolic link points to
    #[arg(long)]
    follow: bool,
    /// Replace files of the archive that have the same name
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    patterns: PatternArgs,
    /// Make what is at the place of each SRC equal to it: replace what differs, delete what SRC does not have
    #[arg(long, conflicts_with = "force")]
    mirror: bool,
    /// With --mirror: tell what would be done, and do nothing
    #[arg(long, requires = "mirror")]
    dry_run: bool,
    /// With --mirror: go on when more than half of what is there would be deleted
    #[arg(long, requires = "mirror")]
    delete_most: bool,
    /// With --mirror: go on when a SRC is an empty directory and what is there is not
    #[arg(long, requires = "mirror")]
    from_empty: bool,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (named, mut path) = args.archive.and_paths(&None)?;
    let to = match (path.pop(), &args.to) {
        (Some(_), Some(_)) => return Err(Failure::usage("the archive is named with a path, so there is no --to")),
        (Some(path), None) => path,
        (None, to) => to.as_ref().map_or_else(Vec::new, |to| to.as_bytes().to_vec()),
    };
    let mut options = ImportOptions {
        to,
        name: None,
        follow: args.follow,
        replace: args.force,
        creator: creator(),
        filter: args.patterns.filter()?,
        mirror: None,
    };
    if args.dry_run {
        return tell(args, &named, &options);
    }
    let (archive, interrupt) = named.write_watched(args.writer)?;
    if args.mirror {
        match plan(args, &named, &archive, &options) {
            Ok(plan) => options.mirror = Some(plan),
            Err(failure) => {
                archive.close().map_err(|error| Lockbox::failure(&named.archive, error))?;
                return Err(failure);
            }
        }
    }
    let report = copy_in(&named, archive, &interrupt, "added", &args.sources, &options)?;
    if args.json {
        output::print_json(&summary(args, &report))?;
    }
    exit::of_problems(&report.problems).map_or(Ok(()), Err)
}

/// Copies files into an archive, closes it, and reports the files that could not be copied. `verb`:
/// participle for the message.
pub(crate) fn copy_in(
    named: &ArchiveArgs,
    archive: Archive,
    interrupt: &Interrupt,
    verb: &'static str,
    sources: &[PathBuf],
    options: &ImportOptions,
) -> Result<ImportReport, Failure> {
    let bar = named.bar();
    let (counted, how) = (sources.to_vec(), options.clone());
    bar.count(move |wanted| exchange::count_host_files(&counted, &how, wanted));
    let imported = exchange::import(archive.file_system(), archive.identity(), sources, options, &mut |progress| {
        bar.copied(verb, progress);
        interrupt.check()
    });
    bar.wipe();
    // Files added before a failure are complete, so they are kept.
    let closed = archive.close();
    let failed = |error| Lockbox::failure(&named.archive, error);
    let report = match imported {
        // A failure to close takes precedence.
        Err(error @ Error::Interrupted(_)) => {
            closed.map_err(failed)?;
            let again =
                if options.replace || options.mirror.is_some() { "" } else { ", and tells what is there already" };
            let kept = format!("what was {verb} until then is whole and stays, and what was on its way was taken back");
            return Err(interrupt::failure(&error, &format!("{kept}; the same command goes on{again}")));
        }
        imported => imported.map_err(failed)?,
    };
    closed.map_err(failed)?;
    bar.done(verb, Some(report.copied.files), report.copied.bytes);
    output::complain_of(&report.problems);
    match report.deletions_skipped {
        0 => {}
        1 => output::complain("nothing was deleted, because not everything could be copied: 1 entry stays"),
        count => {
            output::complain(&format!(
                "nothing was deleted, because not everything could be copied: {count} entries stay"
            ));
        }
    }
    output::complain_of_left(&report.skipped);
    Ok(report)
}

fn summary(args: &Args, report: &ImportReport) -> Value {
    let mut summary = output::summary(&report.copied, &report.skipped);
    summary["problems"] = output::problems(&report.problems).into();
    if args.mirror {
        summary["unchanged"] = json!(report.unchanged);
        summary["updated"] = json!(report.updated);
        summary["deleted"] = json!(report.deleted);
        summary["deletions_skipped"] = json!(report.deletions_skipped);
    }
    summary
}

/// Returns the deletions of mirroring, unless they look like a mistake.
fn plan(args: &Args, named: &ArchiveArgs, archive: &Archive, options: &ImportOptions) -> Result<MirrorPlan, Failure> {
    let plan = exchange::plan_mirror(archive.file_system(), &args.sources, options, None)
        .map_err(|error| Lockbox::failure(&named.archive, error))?;
    match refusal(args, &plan) {
        None => Ok(plan),
        Some(sentence) => {
            for deletion in plan.deletions.iter().take(TOLD) {
                output::complain(&format!("would delete {}{}", display(&deletion.path), below(deletion.entries)));
            }
            if plan.deletions.len() > TOLD {
                output::complain(&format!("and {} more; --dry-run tells them all", plan.deletions.len() - TOLD));
            }
            Err(Failure::other(sentence))
        }
    }
}

fn refusal(args: &Args, plan: &MirrorPlan) -> Option<String> {
    let mut reasons = Vec::new();
    let mut flags = Vec::new();
    if let Some(source) = plan.empty.first()
        && !args.from_empty
    {
        reasons.push(format!("{} is empty, and what the archive has in its place is not", shown(source)));
        flags.push("--from-empty");
    }
    if plan.deleted > plan.entries / 2 && !args.delete_most {
        reasons.push(format!("{} of {} entries would be deleted, more than half", plan.deleted, plan.entries));
        flags.push("--delete-most");
    }
    let (reasons, flags) = (reasons.join("; "), flags.join(" "));
    (!reasons.is_empty()).then(|| format!("nothing was changed: {reasons} (if that is right: {flags})"))
}

fn below(entries: u64) -> String {
    if entries > 1 { format!(" with {} entries", entries - 1) } else { String::new() }
}

/// Prints the effects of mirroring without applying them.
fn tell(args: &Args, named: &ArchiveArgs, options: &ImportOptions) -> Result<(), Failure> {
    let archive = named.read()?;
    let mut changes = Vec::new();
    let mut changed = |change, path: &[u8]| changes.push((change, path.to_vec()));
    let plan = exchange::plan_mirror(archive.file_system(), &args.sources, options, Some(&mut changed))
        .map_err(|error| Lockbox::failure(&named.archive, error))?;
    let words = changes.iter().map(|(change, path)| {
        let word = match change {
            MirrorChange::Add => "add",
            MirrorChange::Replace => "replace",
            MirrorChange::Update => "update",
        };
        (word, path, 1)
    });
    let words = words.chain(plan.deletions.iter().map(|deletion| ("delete", &deletion.path, deletion.entries)));
    let mut out = Output::new();
    for (word, path, entries) in words {
        if args.json {
            let mut object = json!({ "change": word });
            if word == "delete" {
                object["entries"] = json!(entries);
            }
            put_name(&mut object, "path", path);
            out.json(&object)?;
        } else {
            out.line(&format!("{word:<8}{}{}", display(path), below(entries)))?;
        }
    }
    out.finish()?;
    if let Some(sentence) = refusal(args, &plan) {
        output::complain(&sentence);
    }
    Ok(())
}
