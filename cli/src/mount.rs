//! `lockbox mount`: runs the mount program in its own place.
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use lockbox_host::elsewhere;
use lockbox_host::secrets::{Cache, Sources};
use lockbox_host::{mounts, shown};

use crate::exit::Failure;
use crate::runtime;

/// Names of the mount program.
const NAMES: [&str; 2] = ["mount.lockbox", "mount-lockbox"];
/// Where mount(8) looks for it.
const SYSTEM: &str = "/sbin/mount.lockbox";

/// Show an archive as a directory; returns when the directory answers
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive file
    archive: PathBuf,
    /// The directory, made when it is missing; without it one beside the archive that is named after it, without the last suffix
    directory: Option<PathBuf>,
    /// Options as in mount(8), such as ro, allow_other, sync=always or memory=SIZE
    #[arg(short = 'o', value_name = "OPTIONS", action = clap::ArgAction::Append)]
    options: Vec<String>,
    /// Stay in the foreground until the archive is unmounted
    #[arg(long)]
    foreground: bool,
    #[command(flatten)]
    sources: Sources,
    #[command(flatten)]
    cache: Cache,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    args.sources.check()?;
    let given: Vec<&str> = args.options.iter().flat_map(|list| list.split(',')).collect();
    let mut command = Command::new(program());
    let directory = match &args.directory {
        Some(directory) => directory.clone(),
        None => beside(&args.archive)?,
    };
    if !given.contains(&"remount") {
        if !given.contains(&"nonempty") {
            refuse_to_hide(&directory)?;
        }
        command.arg("--make-directory");
    }
    for options in &args.options {
        command.arg("-o").arg(options);
    }
    if args.foreground {
        command.arg("--foreground");
    }
    // Not as mount options: a comma in a path would end one.
    command.args(args.sources.arguments()).args(args.cache.arguments());
    let error = command.arg("--").arg(&args.archive).arg(&directory).exec();
    let message = format!("cannot run {}", command.get_program().to_string_lossy());
    Err(Failure::mount(format!("{message}: {error}")))
}

/// Where an archive is mounted when nothing is said: beside it, where its user looks for it, and can say it in advance.
fn beside(archive: &Path) -> Result<PathBuf, Failure> {
    let named = |why: &str| Failure::usage(format!("{why}: say on which directory to mount it"));
    if elsewhere::is_elsewhere(archive) {
        return Err(named("beside an address there is no directory"));
    }
    let directory = archive.with_extension("");
    // A relative path through `..` and the like has no name, and a name without a suffix is the archive's own.
    if archive.file_name().is_none() || directory == *archive {
        return Err(named(&format!("{} has no suffix, such as .lbx, to leave out", shown(archive))));
    }
    Ok(directory)
}

/// Content that a mount would hide. What is mounted there already, and what cannot be read, is the mount program's business.
fn refuse_to_hide(directory: &Path) -> Result<(), Failure> {
    let mounted = mounts::at(&runtime::canonical(directory)).ok().flatten();
    if mounted.is_some_and(|mounted| mounted.is_archive())
        || !directory.read_dir().is_ok_and(|mut it| it.next().is_some())
    {
        return Ok(());
    }
    Err(Failure::mount(format!(
        "{} is not empty, and a mount would hide what is in it: use -o nonempty to mount there all the same, or name another directory",
        shown(directory)
    )))
}

/// The program of the same installation, else the one in PATH or of the system.
pub(crate) fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|program| program.parent().map(Path::to_path_buf));
    let path = std::env::var_os("PATH").unwrap_or_default();
    beside
        .into_iter()
        .chain(std::env::split_paths(&path))
        .flat_map(|directory| NAMES.map(|name| directory.join(name)))
        .find(|program| program.is_file())
        .unwrap_or_else(|| PathBuf::from(SYSTEM))
}
