//! `lockbox mount`: runs the mount program in its own place.
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use lockbox::crypto::Passphrase;
use lockbox_host::located::Located;
use lockbox_host::proc::CoreLimit;
use lockbox_host::secrets::{Cache, PassphraseSources, Sources, desktop};
use lockbox_host::{IN_USE, daemons, mounts, remote, shown};
use nix::unistd::{AccessFlags, access, geteuid};

use crate::exit::{self, Failure};
use crate::{output, runtime};

const NAMES: [&str; 2] = ["mount.lockbox", "mount-lockbox"];
/// Path at which mount(8) looks for the mount program.
const SYSTEM: &str = "/sbin/mount.lockbox";
/// Shows a directory in the program that its user has chosen for that.
const OPENER: &str = "xdg-open";

/// Options that most people use, of those in mount.lockbox(8).
const OPTIONS: &str = "\
Mount options, after -o and separated by commas (all of them: mount.lockbox(8)):
  ro                  Read-only
  allow_other         Let other users in; file permissions apply
  nonempty            Mount over a directory that has content
  sync=always         Every write is durable when it returns (default: in 5 s)
  idle=10m            Unmount after ten minutes without use
  lock-on-suspend     Unmount before the machine sleeps
  snapshots=hourly:24,daily:7
                      Take snapshots on a schedule and keep that many
  snapshot=NAME       Show this snapshot, read-only
  memory=256M         Limit of caches and unwritten data
  size-limit=10G      Limit of the archive's file";

/// Show an archive as a directory; returns when the directory answers
#[derive(clap::Args, Default)]
#[command(after_help = OPTIONS)]
pub(crate) struct Args {
    /// The archive file
    archive: PathBuf,
    /// The directory, made when it is missing; by default next to the archive, with the archive's name without its last suffix
    directory: Option<PathBuf>,
    /// Options as in mount(8), such as ro, allow_other, sync=always or memory=SIZE
    #[arg(short = 'o', value_name = "OPTIONS", action = clap::ArgAction::Append)]
    options: Vec<String>,
    /// Stay in the foreground until the archive is unmounted
    #[arg(long)]
    foreground: bool,
    /// Show the directory in the file manager, also when the archive is mounted already
    #[arg(long, conflicts_with_all = ["foreground", "passfd"])]
    open: bool,
    /// Ask for the passphrase in a window, with zenity, kdialog or pinentry, and tell there why it cannot be mounted
    #[arg(long)]
    desktop: bool,
    #[command(flatten)]
    sources: Sources,
    #[command(flatten)]
    cache: Cache,
}

/// Mounts a new archive and shows it, as a double click does, without asking for its passphrase.
pub(crate) fn open_new(archive: &Path, passphrase: &Passphrase, quiet: bool, cores: CoreLimit) -> Result<(), Failure> {
    // Standard input of the mount program.
    let sources = PassphraseSources { passfd: Some(0), quiet, ..PassphraseSources::default() };
    let args = Args {
        archive: archive.to_owned(),
        open: true,
        desktop: true,
        sources: Sources { passphrase: sources, ..Sources::default() },
        ..Args::default()
    };
    run(&args, Some(passphrase), cores)
}

/// Fails when [`open_new`] could not mount an archive that is going to be made at this path.
pub(crate) fn check_new(archive: &Path) -> Result<(), Failure> {
    let directory = beside(archive)?;
    let is_free = !is_mount_point(&directory)
        && match directory.read_dir() {
            Ok(mut entries) => entries.next().is_none(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
    if is_free {
        return Ok(());
    }
    Err(Failure::mount(format!(
        "cannot show {} at {}, which is not an empty directory; choose another name for the archive",
        shown(archive),
        shown(&directory)
    )))
}

/// `passphrase`: that of an archive that was just created; else the mount program asks for it.
pub(crate) fn run(args: &Args, passphrase: Option<&Passphrase>, cores: CoreLimit) -> Result<(), Failure> {
    mount(args, passphrase, cores).inspect_err(|failure| {
        // The mount program has reported its own failures already.
        if args.desktop && !failure.message.is_empty() {
            desktop::tell(&failure.message);
        }
    })
}

fn mount(args: &Args, passphrase: Option<&Passphrase>, cores: CoreLimit) -> Result<(), Failure> {
    args.sources.passphrase.check()?;
    if !args.open {
        let (mut command, _) = prepared(args)?;
        let error = command.exec();
        return Err(cannot_run(&command, &error));
    }
    // With these the mount program ends well although nothing is mounted.
    if let Some(option) = options(args).find(|option| ["foreground", "nofail"].contains(option)) {
        return Err(Failure::usage(format!("-o {option} cannot be used with --open")));
    }
    let point = match served(args)? {
        Some(point) => point,
        None => {
            let (mut command, directory) = prepared(args)?;
            let status = status(&mut command, passphrase).map_err(|error| cannot_run(&command, &error))?;
            if !status.success() {
                return Err(Failure::new(exit::of_program(status), ""));
            }
            // Files saved in a directory outside of the archive would not be encrypted.
            if !is_mount_point(&directory) {
                return Err(Failure::mount(format!("{} is not mounted, so it is not shown", shown(&directory))));
            }
            directory
        }
    };
    // The archive is mounted, so the command succeeded.
    if let Err(why) = show(&point, cores) {
        let sentence = format!("{} is mounted, but cannot be shown: {why}", shown(&point));
        output::complain(&sentence);
        if args.desktop {
            desktop::tell(&sentence);
        }
    }
    Ok(())
}

/// Runs the mount program to its end, with the passphrase on its standard input.
fn status(command: &mut Command, passphrase: Option<&Passphrase>) -> io::Result<ExitStatus> {
    let Some(passphrase) = passphrase.map(Passphrase::bytes) else { return command.status() };
    let mut child = command.stdin(Stdio::piped()).spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // The reader cuts one line end. A program that ended already reports the reason by its
        // exit.
        let end = if passphrase.ends_with(b"\n") { "\n" } else { "" };
        let _ = input.write_all(passphrase).and_then(|()| input.write_all(end.as_bytes()));
    }
    child.wait()
}

fn cannot_run(command: &Command, error: &io::Error) -> Failure {
    Failure::mount(format!("cannot run {}: {error}", command.get_program().to_string_lossy()))
}

/// Returns the existing mount point of the archive, unless another one is requested. A mount point
/// that a daemon reports may be wrong here: a detached mount is gone from it, and one of another
/// namespace never was there.
fn served(args: &Args) -> Result<Option<PathBuf>, Failure> {
    let Some((_, status)) = runtime::find(&runtime::canonical(&args.archive), &args.archive)? else { return Ok(None) };
    let point = status.mount_point_path();
    if daemons::is_out_of_sight(&status) {
        return match args.directory {
            Some(_) => Ok(None),
            None => Err(Failure::new(
                IN_USE,
                format!("{} is mounted in another namespace, as by 'lockbox exec'", shown(&args.archive)),
            )),
        };
    }
    let wanted = args.directory.as_deref().map(runtime::canonical);
    // A mount that was detached is in no table.
    let is_there = daemons::mount_of(&status, &mounts::all()).is_some();
    Ok(Some(point).filter(|point| is_there && wanted.as_ref().is_none_or(|wanted| wanted == point)))
}

/// Returns whether an archive is mounted there. Its daemon is not asked.
fn is_mount_point(directory: &Path) -> bool {
    Located::of(directory).is_ok_and(|located| located.mounted_here().is_some())
}

fn options(args: &Args) -> impl Iterator<Item = &str> {
    args.options.iter().flat_map(|list| list.split(','))
}

/// Returns the mount program with its arguments, and the directory.
fn prepared(args: &Args) -> Result<(Command, PathBuf), Failure> {
    let given: Vec<&str> = options(args).collect();
    let mut command = named_program();
    let directory = match &args.directory {
        Some(directory) => directory.clone(),
        None if args.open => within_reach(beside(&args.archive)?)?,
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
    if args.desktop {
        command.arg("--desktop");
    }
    command.arg("--").arg(&args.archive).arg(&directory);
    Ok((command, directory))
}

/// Shows a directory in the user's file manager, or returns the reason of a failure. The file
/// manager outlives this program, and gets no signal sent to it.
fn show(directory: &Path, cores: CoreLimit) -> Result<(), String> {
    // Programs that root runs on the display of another user can be controlled by that user.
    if geteuid().is_root() {
        return Err("root has no file manager".into());
    }
    if !desktop::is_there() {
        return Err("no desktop: neither DISPLAY nor WAYLAND_DISPLAY is set".into());
    }
    let path = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    let mut opener = Command::new(OPENER);
    opener.arg(path).process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // The ban on core dumps is for this program alone.
    cores.restore();
    match opener.spawn() {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!("{OPENER} not found; install xdg-utils")),
        Err(error) => Err(format!("cannot run {OPENER}: {error}")),
    }
}

/// Returns the default mount point: next to the archive, where its user looks for it and can
/// predict it.
fn beside(archive: &Path) -> Result<PathBuf, Failure> {
    let named = |why: &str| Failure::usage(format!("{why}: name the directory to mount it on"));
    if remote::is_remote(archive) {
        return Err(named("an archive at an address has no default mount point"));
    }
    let directory = archive.with_extension("");
    // A relative path through `..` and the like has no name, and without a suffix the name is the
    // archive's own.
    if archive.file_name().is_none() || directory == *archive {
        return Err(named(&format!("{} has no suffix, such as .lbx, to leave out", shown(archive))));
    }
    Ok(directory)
}

/// Returns the mount point for a file manager when none can be created next to the archive, as on a
/// read-only medium: in the runtime directory of this user.
fn within_reach(directory: PathBuf) -> Result<PathBuf, Failure> {
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Root is shown nothing, and would look for it in vain.
    let is_shut = !geteuid().is_root() && access(parent, AccessFlags::W_OK).is_err();
    match directory.file_name() {
        Some(name) if is_shut && Located::of(&directory).is_err() => Ok(daemons::ready_directory()?.join(name)),
        _ => Ok(directory),
    }
}

/// Refuses to hide content of the directory. Existing mounts there, and unreadable directories, are
/// left to the mount program.
fn refuse_to_hide(directory: &Path) -> Result<(), Failure> {
    if is_mount_point(directory) || !directory.read_dir().is_ok_and(|mut it| it.next().is_some()) {
        return Ok(());
    }
    Err(Failure::mount(format!(
        "{} is not empty, and a mount would hide its content: use -o nonempty to mount there anyway, or name another directory",
        shown(directory)
    )))
}

/// Returns the mount program, called by its name alone: with a path of the system it would exit
/// with mount(8)'s codes.
pub(crate) fn named_program() -> Command {
    let mut command = Command::new(program());
    command.arg0(NAMES[0]);
    command
}

/// Returns the program of the same installation, else the one in PATH or of the system.
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
