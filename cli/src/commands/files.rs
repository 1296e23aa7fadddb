//! `lockbox cp`, `mkdir`, `mv` and `rm`: copy, make, rename and remove files of an archive.
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::exchange::{
    self, CopyDestination, ExtractOptions, Filter, ImportOptions, components, make_directories, remove, rename, resolve,
};
use lockbox::fs::{FileSystem, ROOT_INO};
use lockbox_host::shown;
use lockbox_terminal::display;

use crate::commands::exchange::{copy_in, copy_out};
use crate::exit::{self, Failure};
use crate::open_archive::{OpeningArgs, SnapshotViewArgs, WriterArgs, creator, import_options};
use crate::paths::{Named, in_one_archive, is_same};

/// Copy files and directories into an archive, out of it, or within it
#[derive(clap::Args)]
pub(crate) struct CopyArgs {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Sources, and last the destination, each on the host or in the archive as ARCHIVE:PATH: an existing directory, or for one source a new name
    #[arg(required = true, num_args = 2.., value_name = "PATH")]
    paths: Vec<OsString>,
    /// Copy directories with everything below them
    #[arg(short)]
    recursive: bool,
    /// Replace files that are in the way
    #[arg(long)]
    force: bool,
    /// Keep privileges of copies to the host, as 'extract --privileges' does
    #[arg(long)]
    privileges: bool,
}

pub(crate) fn cp(args: &CopyArgs) -> Result<(), Failure> {
    let Some((target, sources)) = args.paths.split_last() else { return Err(Failure::usage("no path is named")) };
    let within = sources.iter().map(|source| Ok(matches!(Named::of(source)?, Named::Within { .. })));
    let within = within.collect::<Result<Vec<bool>, Failure>>()?;
    let (all, none) = (within.iter().all(|&within| within), within.iter().all(|&within| !within));
    match Named::of(target)? {
        Named::Within { archive, path } if none => into(args, sources, archive, &path),
        Named::Within { archive, path } if all => {
            let (from, paths) = in_one_archive(sources)?;
            if !is_same(&from, &archive) {
                return Err(Failure::usage(format!(
                    "{} and {} are two archives: copy with 'lockbox export-tar' of the one into 'lockbox import-tar' of the other",
                    shown(&from),
                    shown(&archive)
                )));
            }
            inside(args, archive, &paths, &path)
        }
        Named::Whole(target) if all => {
            refuse_missing_archive(&target)?;
            out_of(args, sources, &target)
        }
        Named::Whole(_) if none => {
            Err(Failure::usage("no path is in an archive: name one as ARCHIVE:PATH, with an ARCHIVE that exists"))
        }
        _ => Err(Failure::usage("some sources are in an archive and some are not: copy them separately")),
    }
}

/// Refuses to write content meant for an archive to the disk, as plain text under a name with a
/// colon.
fn refuse_missing_archive(target: &Path) -> Result<(), Failure> {
    let name = target.file_name().unwrap_or_default().as_bytes();
    if !name.contains(&b':') || target.symlink_metadata().is_ok() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{} does not exist, and the part before its ':' is not an archive; create it, or choose another name for the copy",
        shown(target)
    )))
}

fn refuse_directory(name: String) -> Failure {
    Failure::other(format!("{name} is a directory")).advised("; use -r to copy it with all in it")
}

/// Copies from the host into an archive.
fn into(args: &CopyArgs, sources: &[OsString], archive: PathBuf, target: &[u8]) -> Result<(), Failure> {
    let sources: Vec<PathBuf> = sources.iter().map(PathBuf::from).collect();
    for source in &sources {
        let found = source.symlink_metadata().map_err(|error| {
            let error = Error::io(format!("cannot read {}", shown(source)), error);
            Failure::new(exit::source_code(&error), Failure::sentence(&error))
        })?;
        if found.is_dir() && !args.recursive {
            return Err(refuse_directory(shown(source)));
        }
    }
    let named = args.opening.of(archive);
    let (archive, interrupt) = named.write_watched(args.writer)?;
    let to = CopyDestination::of(archive.file_system(), target, sources.len() > 1);
    let to = to.map_err(|error| named.failure(error))?;
    let options = ImportOptions { name: to.name, replace: args.force, ..import_options(to.directory) };
    let report = copy_in(&named, archive, &interrupt, "copied", &sources, &options)?;
    exit::of_problems(&report.problems, exit::source_code)
}

/// Copies from an archive to the host.
fn out_of(args: &CopyArgs, sources: &[OsString], target: &Path) -> Result<(), Failure> {
    let (archive, paths) = in_one_archive(sources)?;
    let is_root = |path: &Vec<u8>| components(path).is_ok_and(|names| names.is_empty());
    let (to, name) = if target.is_dir() {
        (target, None)
    } else {
        let above = target.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if paths.len() > 1 || target.as_os_str().as_bytes().ends_with(b"/") || !above.is_dir() {
            let missing = if paths.len() > 1 || above.is_dir() { target } else { above };
            return Err(Failure::other(format!("{} is not a directory", shown(missing))));
        }
        match target.file_name() {
            // The root has no name, so it is the directory that is made.
            Some(_) if paths.iter().any(is_root) => (target, None),
            Some(name) => (above, Some(name)),
            None => return Err(Failure::other(format!("{} is not a directory", shown(target)))),
        }
    };
    let options = ExtractOptions {
        to: to.to_path_buf(),
        name: name.map(OsStr::as_bytes).map(<[u8]>::to_vec),
        replace: args.force,
        filter: Filter::default(),
        privileges: args.privileges,
    };
    let named = args.opening.of(archive);
    let (opened, interrupt) = named.read_watched(&SnapshotViewArgs::default())?;
    refuse_directories(args, opened.file_system(), &paths)?;
    let report = copy_out(&named, &opened, &interrupt, "copied", &paths, &options)?;
    exit::of_extraction(&report)
}

/// Copies within an archive.
fn inside(args: &CopyArgs, archive: PathBuf, paths: &[Vec<u8>], target: &[u8]) -> Result<(), Failure> {
    let named = args.opening.of(archive);
    let (archive, interrupt) = named.write_watched(args.writer)?;
    let fs = archive.file_system();
    let copied = refuse_directories(args, fs, paths).and_then(|()| {
        let to = CopyDestination::of(fs, target, paths.len() > 1);
        let copied = to.and_then(|to| exchange::copy(fs, paths, &to, args.force, &mut || interrupt.check()));
        let kept = "everything copied so far is complete and stays, and unfinished copies were rolled back";
        let again = if args.force { "" } else { " and --force" };
        let words = format!("{kept}; continue with the same command{again}");
        copied.map(drop).map_err(|error| named.failure_or_interrupted(error, &words))
    });
    // Files copied before a failure are complete, so they are kept.
    copied.and(named.close(archive))
}

fn refuse_directories(args: &CopyArgs, fs: &FileSystem, paths: &[Vec<u8>]) -> Result<(), Failure> {
    let directory = |path: &&Vec<u8>| resolve(fs, path).is_ok_and(|found| found.is_directory());
    match paths.iter().find(directory).filter(|_| !args.recursive) {
        None => Ok(()),
        Some(path) if path.is_empty() => Err(refuse_directory("the root of the archive".into())),
        Some(path) => Err(refuse_directory(display(path))),
    }
}

/// Make directories in an archive
#[derive(clap::Args)]
pub(crate) struct MkdirArgs {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// The directories, all of one archive
    #[arg(required = true, value_name = "ARCHIVE:PATH")]
    paths: Vec<OsString>,
    /// Make missing parents too, and accept directories that exist
    #[arg(short)]
    parents: bool,
}

pub(crate) fn mkdir(args: &MkdirArgs) -> Result<(), Failure> {
    let (archive, paths) = in_one_archive(&args.paths)?;
    args.opening.of(archive).change(args.writer, |fs| make_directories(fs, &paths, args.parents, creator()))
}

/// Move or rename files and directories within an archive
#[derive(clap::Args)]
pub(crate) struct MoveArgs {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Sources, and last the destination: an existing directory, or for one source a new name
    #[arg(required = true, num_args = 2.., value_name = "ARCHIVE:PATH")]
    paths: Vec<OsString>,
    /// Replace files that are in the way
    #[arg(long)]
    force: bool,
}

pub(crate) fn mv(args: &MoveArgs) -> Result<(), Failure> {
    let (archive, mut paths) = in_one_archive(&args.paths)?;
    let target = paths.pop().unwrap_or_default();
    args.opening.of(archive).change(args.writer, |fs| {
        let to = CopyDestination::of(fs, &target, paths.len() > 1)?;
        rename(fs, &paths, &to, args.force)
    })
}

/// Remove files and directories of an archive
#[derive(clap::Args)]
pub(crate) struct RemoveArgs {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Files and directories to remove, all of one archive
    #[arg(required = true, value_name = "ARCHIVE:PATH")]
    paths: Vec<OsString>,
    /// Remove directories with everything below them
    #[arg(short)]
    recursive: bool,
}

pub(crate) fn rm(args: &RemoveArgs) -> Result<(), Failure> {
    let (archive, paths) = in_one_archive(&args.paths)?;
    args.opening.of(archive).change(args.writer, |fs| {
        for path in paths.iter().filter(|_| !args.recursive) {
            if resolve(fs, path).is_ok_and(|found| found.is_directory() && found.ino != ROOT_INO) {
                let path = display(path);
                return Err(Error::Invalid(format!("{path} is a directory; use -r to remove it with all in it")));
            }
        }
        remove(fs, &paths).map(drop)
    })
}
