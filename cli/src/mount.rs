//! `lockbox mount`: runs the mount program in its own place.
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use lockbox_host::secrets::{Cache, Sources};

use crate::exit::Failure;

/// Names of the mount program.
const NAMES: [&str; 2] = ["mount.lockbox", "mount-lockbox"];
/// Where mount(8) looks for it.
const SYSTEM: &str = "/sbin/mount.lockbox";

/// Show an archive as a directory; returns when the directory answers
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive file
    archive: PathBuf,
    /// An existing directory
    directory: PathBuf,
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
    let mut command = Command::new(program());
    for options in &args.options {
        command.arg("-o").arg(options);
    }
    if args.foreground {
        command.arg("--foreground");
    }
    // Not as mount options: a comma in a path would end one.
    command.args(args.sources.arguments()).args(args.cache.arguments());
    let error = command.arg("--").arg(&args.archive).arg(&args.directory).exec();
    let message = format!("cannot run {}", command.get_program().to_string_lossy());
    Err(Failure::mount(format!("{message}: {error}")))
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
