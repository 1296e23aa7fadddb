//! `lockbox add`, `extract`, `import-tar`, `export-tar`: copy files between host and archive.
use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, BufReader, BufWriter, IsTerminal, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::exchange::{
    self, ExtractOptions, ExtractReport, FileTotals, ImportOptions, ImportReport, MirrorChange, MirrorPlan, Progress,
    TarImportOptions,
};
use lockbox_host::shown;
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::{self, Failure};
use crate::interrupt::{self, Interrupt};
use crate::open_archive::{ArchiveArgs, CompressionArgs, SnapshotViewArgs, WriterArgs, creator, import_options};
use crate::output::{self, Output, put_name};
use crate::paths::PatternArgs;

/// Number of deletions listed one by one when mirroring is refused.
const TOLD: usize = 10;

/// Copy files and directories into an archive
#[derive(clap::Args)]
pub(crate) struct AddArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Files to copy; directories with everything below them
    #[arg(required = true, value_name = "SRC")]
    sources: Vec<PathBuf>,
    /// Directory of the archive to copy into, which may also be named as ARCHIVE:PATH; made when it is missing; the root by default
    #[arg(long, value_name = "PATH")]
    to: Option<OsString>,
    /// Copy the target of a SRC that is a symbolic link
    #[arg(long)]
    follow: bool,
    /// Replace files of the archive that have the same name
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    patterns: PatternArgs,
    /// Make the destination of each SRC equal to it: replace files that differ, delete files that SRC does not have
    #[arg(long, conflicts_with = "force")]
    mirror: bool,
    /// With --mirror: list the changes, and make none
    #[arg(long, requires = "mirror")]
    dry_run: bool,
    /// With --mirror: go on when more than half of the destination would be deleted
    #[arg(long, requires = "mirror")]
    delete_most: bool,
    /// With --mirror: go on when a SRC is an empty directory and its destination is not
    #[arg(long, requires = "mirror")]
    from_empty: bool,
    #[command(flatten)]
    compression: CompressionArgs,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn add(args: &AddArgs) -> Result<(), Failure> {
    let (named, mut path) = args.archive.and_paths(&None)?;
    named.set_compression(args.compression);
    let to = match (path.pop(), &args.to) {
        (Some(_), Some(_)) => return Err(Failure::usage("the archive is named with a path, so --to cannot be used")),
        (Some(path), None) => path,
        (None, to) => to.as_ref().map_or_else(Vec::new, |to| to.as_bytes().to_vec()),
    };
    let mut options = ImportOptions {
        follow: args.follow,
        replace: args.force,
        filter: args.patterns.filter()?,
        ..import_options(to)
    };
    if args.dry_run {
        return tell(args, &named, &options);
    }
    let (mut archive, interrupt) = named.write_watched(args.writer)?;
    if args.mirror {
        archive = plan(args.brakes(), &named, archive, &args.sources, &mut options)?;
    }
    let report = copy_in(&named, archive, &interrupt, "added", &args.sources, &options)?;
    if args.json {
        output::print_json(&summary(&report, args.mirror))?;
    }
    exit::of_problems(&report.problems, exit::source_code)
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
    let closed = named.close(archive);
    let report = match imported {
        // A failure to close takes precedence.
        Err(error @ Error::Interrupted(_)) => {
            closed?;
            let again =
                if options.replace || options.mirror.is_some() { "" } else { ", and reports files that already exist" };
            let kept =
                format!("everything {verb} so far is complete and stays, and unfinished copies were rolled back");
            return Err(interrupt::failure(&error, &format!("{kept}; the same command continues{again}")));
        }
        imported => imported.map_err(|error| named.failure(error))?,
    };
    closed?;
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

pub(crate) fn summary(report: &ImportReport, is_mirror: bool) -> Value {
    let mut summary = output::summary(&report.copied, &report.skipped);
    summary["problems"] = output::problems(&report.problems).into();
    if is_mirror {
        summary["unchanged"] = json!(report.unchanged);
        summary["updated"] = json!(report.updated);
        summary["deleted"] = json!(report.deleted);
        summary["deletions_skipped"] = json!(report.deletions_skipped);
    }
    summary
}

/// Deletions of a mirror that the user allows although they look like a mistake.
#[derive(Clone, Copy)]
pub(crate) struct Brakes {
    pub(crate) delete_most: bool,
    pub(crate) from_empty: bool,
}

impl AddArgs {
    fn brakes(&self) -> Brakes {
        Brakes { delete_most: self.delete_most, from_empty: self.from_empty }
    }
}

/// Adds the deletions of mirroring to the options, and returns the archive. If they look like a
/// mistake, or cannot be found, it is closed.
pub(crate) fn plan(
    brakes: Brakes,
    named: &ArchiveArgs,
    archive: Archive,
    sources: &[PathBuf],
    options: &mut ImportOptions,
) -> Result<Archive, Failure> {
    let plan = exchange::plan_mirror(archive.file_system(), sources, options, None);
    let failure = match plan.map(|plan| (refusal(brakes, &plan), plan)) {
        Ok((None, plan)) => {
            options.mirror = Some(plan);
            return Ok(archive);
        }
        Ok((Some(sentence), plan)) => {
            for deletion in plan.deletions.iter().take(TOLD) {
                output::complain(&format!("would delete {}{}", display(&deletion.path), below(deletion.entries)));
            }
            if plan.deletions.len() > TOLD {
                output::complain(&format!(
                    "and {} more; 'lockbox add --mirror --dry-run' lists them all",
                    plan.deletions.len() - TOLD
                ));
            }
            Failure::other(sentence)
        }
        Err(error) => exit::source_failure(&named.archive, error),
    };
    named.close(archive)?;
    Err(failure)
}

fn refusal(brakes: Brakes, plan: &MirrorPlan) -> Option<String> {
    let mut reasons = Vec::new();
    let mut flags = Vec::new();
    if let Some(source) = plan.empty.first()
        && !brakes.from_empty
    {
        reasons.push(format!("{} is empty, and its destination in the archive is not", shown(source)));
        flags.push("--from-empty");
    }
    if plan.deleted > plan.entries / 2 && !brakes.delete_most {
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
fn tell(args: &AddArgs, named: &ArchiveArgs, options: &ImportOptions) -> Result<(), Failure> {
    let archive = named.read()?;
    let mut changes = Vec::new();
    let mut changed = |change, path: &[u8]| changes.push((change, path.to_vec()));
    let plan = exchange::plan_mirror(archive.file_system(), &args.sources, options, Some(&mut changed))
        .map_err(|error| exit::source_failure(&named.archive, error))?;
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
    if let Some(sentence) = refusal(args.brakes(), &plan) {
        output::complain(&sentence);
    }
    Ok(())
}

/// Copy files and directories out of an archive
#[derive(clap::Args)]
pub(crate) struct ExtractArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    snapshot: SnapshotViewArgs,
    /// Paths to copy, or each with the archive as ARCHIVE:PATH; everything by default
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
    /// Directory to copy into; made when it is missing
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Replace files and empty directories that are in the way
    #[arg(long)]
    force: bool,
    /// Also make devices and keep set-user-ID, set-group-ID and sticky bits of files, capabilities
    /// and other attributes that give rights
    #[arg(long)]
    privileges: bool,
    #[command(flatten)]
    patterns: PatternArgs,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn extract(args: &ExtractArgs) -> Result<(), Failure> {
    let options = ExtractOptions {
        to: args.to.clone(),
        name: None,
        replace: args.force,
        filter: args.patterns.filter()?,
        privileges: args.privileges,
    };
    let (archive, paths) = args.archive.and_paths(&args.paths)?;
    let (opened, interrupt) = archive.read_watched(&args.snapshot)?;
    let report = copy_out(&archive, &opened, &interrupt, "extracted", &paths, &options)?;
    if args.json {
        let mut summary = output::summary(&report.copied, &report.skipped);
        summary["privileges_left"] = report.skipped.privileges.count.into();
        summary["problems"] = output::problems(&report.problems).into();
        output::print_json(&summary)?;
    }
    exit::of_extraction(&report)
}

/// Copies files out of an archive, and reports the files that could not be copied. `verb`:
/// participle for the message.
pub(crate) fn copy_out(
    named: &ArchiveArgs,
    archive: &Archive,
    interrupt: &Interrupt,
    verb: &'static str,
    paths: &[Vec<u8>],
    options: &ExtractOptions,
) -> Result<ExtractReport, Failure> {
    let bar = named.bar();
    let (fs, counted, filter) = (archive.file_system().clone(), paths.to_vec(), options.filter.clone());
    bar.count(move |wanted| exchange::count_archive_files(&fs, &counted, &filter, wanted));
    let extracted = exchange::extract(archive.file_system(), paths, options, &mut |progress| {
        bar.copied(verb, progress);
        interrupt.check()
    });
    let kept = format!("nothing was {verb}; the same command starts over");
    let report = extracted.map_err(|error| named.failure_or_interrupted(error, &kept))?;
    bar.done(verb, Some(report.copied.files), report.copied.bytes);
    output::complain_of(&report.problems);
    output::complain_of_left(&report.skipped);
    Ok(report)
}

/// Bytes after the end mark that are read, so that the program that writes them does not fail: the
/// rest of a record, and some more.
const MAX_REST: u64 = 1 << 20;

/// Copy everything in a tar on standard input into an archive
#[derive(clap::Args)]
pub(crate) struct ImportTarArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Directory of the archive to copy into; made when it is missing
    #[arg(long, value_name = "DIR", default_value = "/")]
    to: OsString,
    /// Replace files of the archive that have the same name
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    compression: CompressionArgs,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn import_tar(args: &ImportTarArgs) -> Result<(), Failure> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Failure::usage("a tar is expected on standard input"));
    }
    args.archive.set_compression(args.compression);
    args.archive.take_input();
    let (archive, interrupt) = args.archive.write_watched(args.writer)?;
    let options = TarImportOptions { to: args.to.as_bytes().to_vec(), replace: args.force, creator: creator() };
    let tar = stdin.as_fd().try_clone_to_owned();
    let mut tar = tar.map(File::from).map_err(|error| Failure::host("cannot read standard input", &error))?;
    let bar = args.archive.bar();
    if let Some(bytes) = rest_of(&mut tar) {
        bar.expect(FileTotals { files: 0, bytes });
    }
    let read = Cell::new(0);
    let mut input = BufReader::new(Watched { tar, interrupt: &interrupt, read: &read });
    let imported = exchange::import_tar(archive.file_system(), &mut input, &options, &mut |progress| {
        bar.copied("imported", &Progress { passed: FileTotals { files: 0, bytes: read.get() }, ..*progress });
        interrupt.check()
    });
    bar.wipe();
    if imported.is_ok() {
        // The rest of the input does not matter.
        let _ = io::copy(&mut input.take(MAX_REST), &mut io::sink());
    }
    // A refused tar was taken back, which is a change too.
    let closed = args.archive.close(archive);
    // The writer of the tar may have been interrupted at the same time; then the tar ends early.
    if let Err(error) = interrupt.check()
        && matches!(imported, Err(Error::Interrupted(_) | Error::Io { .. } | Error::Invalid(_)))
    {
        closed?;
        let words = "nothing was imported, and the received part was rolled back; the same command with the whole tar starts over";
        return Err(interrupt::failure(&error, words));
    }
    let report = imported.map_err(|error| match error {
        Error::Exists => Failure::other(
            "nothing was imported: the archive has a .lockbox-import-tar in its root that is not from an import; rename or delete it",
        ),
        error => args.archive.failure(error),
    })?;
    closed?;
    bar.done("imported", Some(report.copied.files), report.copied.bytes);
    output::complain_of_left(&report.skipped);
    if args.json {
        output::print_json(&output::summary(&report.copied, &report.skipped))?;
    }
    Ok(())
}

fn rest_of(tar: &mut File) -> Option<u64> {
    let length = tar.metadata().ok().filter(Metadata::is_file)?.len();
    length.checked_sub(tar.stream_position().ok()?)
}

/// Reader of the tar that fails after a signal.
struct Watched<'a> {
    tar: File,
    interrupt: &'a Interrupt,
    read: &'a Cell<u64>,
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.interrupt.readable(&self.tar)?;
        let length = self.tar.read(buffer)?;
        self.read.set(self.read.get() + length as u64);
        Ok(length)
    }
}

/// Write files and directories as a tar to standard output
#[derive(clap::Args)]
pub(crate) struct ExportTarArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    snapshot: SnapshotViewArgs,
    /// Paths to write, with everything below them, or each with the archive as ARCHIVE:PATH; everything by default
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
    #[command(flatten)]
    patterns: PatternArgs,
}

pub(crate) fn export_tar(args: &ExportTarArgs) -> Result<(), Failure> {
    if io::stdout().is_terminal() {
        return Err(Failure::usage("a tar is not for a terminal: send it to a file or a program"));
    }
    let filter = args.patterns.filter()?;
    let (named, paths) = args.archive.and_paths(&args.paths)?;
    let (archive, interrupt) = named.read_watched(&args.snapshot)?;
    let mut out = BufWriter::with_capacity(256 << 10, output::Watched::new());
    let bar = named.bar();
    let words = || "the output is not a complete tar; the same command starts over".to_owned();
    let at_once = interrupt.ends_at_once(&bar, words)?;
    let (fs, counted, left_out) = (archive.file_system().clone(), paths.clone(), filter.clone());
    bar.count(move |wanted| exchange::count_archive_files(&fs, &counted, &left_out, wanted));
    let exported = exchange::export_tar(archive.file_system(), &paths, &filter, &mut out, &mut |progress| {
        bar.copied("exported", progress);
    });
    drop(at_once);
    let failed = |error| out.get_ref().failure().unwrap_or_else(|| named.failure(error));
    let report = exported.map_err(failed)?;
    bar.done("exported", Some(report.copied.files), report.copied.bytes);
    match report.sockets {
        0 => {}
        1 => output::complain("1 socket was left out, which a tar cannot hold"),
        count => output::complain(&format!("{count} sockets were left out, which a tar cannot hold")),
    }
    Ok(())
}
