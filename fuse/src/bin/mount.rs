//! mount.lockbox: mounts a lockbox archive; called by users, mount(8) and `lockbox mount`.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};
use lockbox::Error;
use lockbox::archive::{Archive, OpenOptions};
use lockbox::keys::{PlaceName, UnlockedKey};

use lockbox_fuse::daemon::Notify;
use lockbox_fuse::logging::{self, LogTarget};
use lockbox_fuse::{DaemonConfig, Failure, MountProgram};
use lockbox_fuse::{daemon, fetcher, kernel, mount, mount_agent, mount8, session};
use lockbox_host::help::{Detail, VERSION, lay_out};
use lockbox_host::list_option;
use lockbox_host::located::real_path;
use lockbox_host::mount_options::{MOUNT, MountOptions};
use lockbox_host::mounts::CreatedMountpoint;
use lockbox_host::namespaces::Namespaces;
use lockbox_host::remote::{self, ArchiveLocation};
use lockbox_host::secrets::{Cache, Sources, desktop};
use lockbox_host::{NO_ARCHIVE, OTHER, Program, USAGE, proc};
use lockbox_terminal::{display, say};
use nix::errno::Errno;
use nix::sys::statvfs::FsFlags;
use nix::unistd::{AccessFlags, access};

/// Mount a lockbox archive
#[derive(Parser)]
#[command(name = "mount.lockbox", version = VERSION, after_help = after_help())]
struct Arguments {
    /// The archive file
    archive: PathBuf,
    /// The directory to mount it on
    directory: PathBuf,
    /// Mount options, separated by commas
    #[arg(short, value_name = "OPTIONS", value_delimiter = None)]
    options: Vec<String>,
    /// Stay in the foreground and log to standard error
    #[arg(long)]
    foreground: bool,
    /// Make the directory when it is missing, and remove it after the unmount
    #[arg(long)]
    make_directory: bool,
    /// Ask for the passphrase in a window, with zenity, kdialog or pinentry, and report failures there
    #[arg(long)]
    desktop: bool,
    #[command(flatten)]
    sources: Sources,
    #[command(flatten)]
    cache: Cache,
    /// Run the daemon without a sandbox, as sandbox=off
    #[arg(long)]
    no_sandbox: bool,
    /// Log more
    #[arg(short, long)]
    verbose: bool,
    /// Check the arguments only
    #[arg(short = 'f', hide = true)]
    fake: bool,
    #[arg(short = 'n', hide = true)]
    no_table: bool,
    /// Pass over options that are not known
    #[arg(short = 's')]
    sloppy: bool,
    #[arg(short = 't', hide = true)]
    file_system_type: Option<String>,
    /// As mount(8) passes it
    #[arg(short = 'N', hide = true, value_name = "NAMESPACE")]
    namespace: Option<PathBuf>,
    /// For the program of `lockbox exec`, which begins when this one has ended and the mount is there
    #[arg(long, hide = true)]
    for_program: bool,
}

const EXIT_CODES: &str = "\
Exit codes:
  0 mounted, 1 usage, 2 other error, 10 wrong passphrase, 11 not an archive or
  too new, 12 damaged, 13 in use, 14 no space, 15 mounting failed,
  16 older, diverged or replaced archive, 17 server does not answer,
  18 server refuses, 19 no such archive or bucket
  Called by a path in /sbin or /usr/sbin, as mount(8) does: its codes
  0 mounted, 1 usage, 2 system error, 32 failed";

fn after_help() -> String {
    let options = list_option::help(MOUNT);
    format!("Mount options, after -o and separated by commas:\n{options}{EXIT_CODES}")
}

fn main() -> ExitCode {
    lockbox_terminal::abort_on_panic();
    daemon::harden();
    let exit = |ended: io::Result<()>| if ended.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(OTHER) };
    match std::env::args_os().nth(1).as_deref().and_then(OsStr::to_str) {
        Some(daemon::ARGUMENT) => return finish(&daemon::run(), false),
        Some(mount_agent::ARGUMENT) => return exit(mount_agent::run()),
        Some(fetcher::ARGUMENT) => return exit(fetcher::run()),
        Some(fetcher::BROKER_ARGUMENT) => return exit(fetcher::run_broker()),
        _ => {}
    }
    let arguments = match parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = match lockbox_terminal::of_arguments(&error.render().to_string()) {
                Some(plain) => io::stderr().write_all(plain.as_bytes()),
                None => error.print(),
            };
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    let mounted = mount_archive(&arguments);
    let code = finish(&mounted, true);
    if let Err(failure) = &mounted
        && arguments.desktop
        && !failure.message.is_empty()
    {
        desktop::tell(&window_message(&failure.message, &arguments.archive));
    }
    code
}

/// Adds the archive's name if it is missing: a window shows no command line.
fn window_message(message: &str, archive: &Path) -> String {
    let name = lockbox_host::shown(archive);
    if message.contains(&name) { message.to_owned() } else { format!("{name}: {message}") }
}

fn finish(result: &Result<(), Failure>, speak: bool) -> ExitCode {
    let Err(failure) = result else { return ExitCode::SUCCESS };
    // A user who cancelled the prompt needs no message.
    if speak && !failure.message.is_empty() {
        print_message(&failure.message);
    }
    let for_mount_8 = mount8::is_caller(std::env::args_os().next().as_deref());
    ExitCode::from(if for_mount_8 { mount8::exit_code(failure) } else { failure.code })
}

fn mount_archive(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(namespace) = &arguments.namespace {
        // Archive, secrets and control socket are files of this namespace, but the mount would be
        // in the other one.
        return Err(Failure::usage(format!(
            "an archive cannot be mounted into another namespace with -N: run the command inside of it, with nsenter --mount={}",
            namespace.display()
        )));
    }
    let namespaces = arguments.for_program.then(|| receive_namespaces(&arguments.options)).transpose()?;
    // The daemon locks its own memory.
    let _ = proc::lock_memory_if_plenty();
    if let Some(change) = mount8::parse_request(&arguments.options, &mount8::command_line_options())? {
        let absent = |e| Failure::mount(format!("mount point {}: {e}", arguments.directory.display()));
        let point = real_path(&arguments.directory).map_err(absent)?;
        return if arguments.fake { Ok(()) } else { mount8::remount(&point, change) };
    }
    let mut options = parse_options(arguments)?;
    mount8::check_swallowed_options(&options, &arguments.archive, &arguments.directory)?;
    options.foreground |= arguments.foreground;
    options.sandbox &= !arguments.no_sandbox;
    options.sources.overridden_by(&arguments.sources);
    options.sources.passphrase.input_taken = arguments.for_program;
    options.sources.passphrase.desktop = arguments.desktop;
    options.sources.passphrase.check()?;
    options.cache.keyring_cache = arguments.cache.keyring_cache.or(options.cache.keyring_cache);
    options.log = options.log.map(std::path::absolute).transpose().map_err(|e| Failure::usage(format!("log=: {e}")))?;
    if arguments.fake {
        return Ok(());
    }
    let Some((archive, place)) = locate_archive(&arguments.archive, &options)? else { return Ok(()) };
    options.places = place_names(&arguments.archive, &archive, &arguments.directory);
    let missing = if arguments.make_directory { missing_directory(&arguments.directory)? } else { None };
    let creates_point = missing.is_some();
    let point = missing.map_or_else(|| daemon::prepare_point(&arguments.directory), Ok)?;
    mount::check_covered_files(&point, &archive, &options)?;
    if !arguments.for_program {
        mount::check_owner_early(&archive, &point, &options)?;
    }
    // Set here, because `status` shows it.
    options.threads.get_or_insert_with(|| kernel::default_threads(place.is_remote()));
    // Checked before the prompt and the slow key derivation.
    if place.is_remote() {
        if !options.read_only && !place.can_be_changed() {
            options.read_only = true;
            options.sources.passphrase.notice = Some("Read-only, as it is a file of a server");
        }
    } else {
        if !options.read_only && is_read_only(&archive) {
            options.read_only = true;
            options.sources.passphrase.notice = Some("Read-only, as its medium is");
            print_message(&format!("{} is on a read-only medium, so it is mounted read-only", archive.display()));
        } else if !options.read_only && arguments.desktop && may_only_be_read(&archive) {
            // A click on a file gives no options.
            options.read_only = true;
            options.sources.passphrase.notice = Some("Read-only, as this user may not write to it");
            print_message(&format!("{} may not be written by this user: it is mounted read-only", archive.display()));
        }
    }
    // Readers of a remote archive exclude no writer. A writer must not take over from a daemon of this
    // machine before it is refused: that mount would become read-only for nothing.
    if !(place.is_remote() && options.read_only) {
        session::wait_until_free(&archive, options.read_only, print_message)?;
    }
    let (key, refused) = lockbox_host::unlock(
        place.source(),
        &arguments.archive,
        &options.sources,
        &options.cache,
        &options.unlock_limits(),
    )?;
    if let Some(sentence) = refused {
        print_message(&sentence);
    }
    if place.is_remote() && !options.read_only && is_backup(&place, &key, &options)? {
        options.read_only = true;
        print_message(&format!("{} is a backup: it is mounted read-only", arguments.archive.display()));
    }
    // Dropped: the daemon opens the archive again.
    drop(place);
    let failed = |e: io::Error| Failure::mount(format!("cannot create the directory {}: {e}", point.display()));
    if creates_point {
        // Not kept: a daemon in the foreground closes descriptors that it did not open itself.
        CreatedMountpoint::make(&point).map(drop).map_err(failed)?;
    }
    let (archive, point) = (OsString::from(archive), OsString::from(point));
    // A killed `lockbox exec` leaves its directory to the end of the mount.
    let made = creates_point || arguments.for_program;
    let config = DaemonConfig { archive, point, options, verbose: arguments.verbose, made };
    let served = serve(&config, &key, namespaces.as_ref());
    match &served {
        Err(_) if creates_point => drop(CreatedMountpoint::of(config.point()).map(|made| made.remove())),
        Ok(()) if !config.options.foreground && config.options.sources.passphrase.advises() => {
            let point = display(config.point().as_os_str().as_bytes());
            let archive = display(config.archive().file_name().unwrap_or_default().as_bytes());
            if creates_point {
                say(&format!("Your files are in {point}."));
                say(&format!("To close: lockbox umount {point} (the folder disappears, the files stay in {archive})"));
            }
            let unscheduled = !config.options.snapshots.has_rules() && !config.options.read_only;
            if unscheduled
                && namespaces.is_none()
                && config.point().read_dir().is_ok_and(|mut entries| entries.next().is_none())
            {
                say("Deleted files are erased; -o snapshots=hourly:24,daily:7 keeps versions.");
            }
        }
        _ => {}
    }
    served
}

fn parse() -> clap::error::Result<Arguments> {
    let mut program = lay_out(Arguments::command(), Detail::requested());
    let matches = program.try_get_matches_from_mut(std::env::args_os())?;
    Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut program))
}

/// Returns the names of the archive's location: those on the command line and, since mount(8) has
/// resolved the links there, those in fstab.
fn place_names(named: &Path, archive: &Path, point: &Path) -> Vec<PlaceName> {
    let mut place_names = lockbox_host::place_names(named);
    if mount8::is_caller(std::env::args_os().next().as_deref()) {
        let table = std::fs::read(mount8::FSTAB).unwrap_or_default();
        place_names.extend(
            mount8::names_in_fstab(&table, archive, point).iter().flat_map(|name| lockbox_host::place_names(name)),
        );
    }
    place_names
}

/// Receives the namespaces of the program from `lockbox exec`, which created them and waits for
/// this process. Rejects options with which this process could succeed without a mount, or not end,
/// and options that the program would inherit.
fn receive_namespaces(lists: &[String]) -> Result<Namespaces, Failure> {
    let mut words = lists.iter().flat_map(|list| list.split(','));
    let names = ["foreground", "nofail", "remount", "passfd"];
    match words.find(|option| option.split('=').next().is_some_and(|name| names.contains(&name))) {
        Some(option) => Err(Failure::usage(format!(
            "the mount option {} is not for 'lockbox exec', which runs a program in the mount",
            option.escape_default()
        ))),
        None => {
            let socket = io::stdout().as_fd().try_clone_to_owned().map(UnixStream::from);
            let received = socket.and_then(|socket| Namespaces::receive(&socket));
            received.ok().flatten().ok_or_else(|| Failure::usage("no program waits for this mount"))
        }
    }
}

/// Returns the path of a missing mount point that can be created.
fn missing_directory(path: &Path) -> Result<Option<PathBuf>, Failure> {
    match path.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        _ => return Ok(None),
    }
    let failed = |e: io::Error| Failure::mount(format!("mount point {}: {e}", path.display()));
    let absolute = std::path::absolute(path).map_err(failed)?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else { return Ok(None) };
    Ok(Some(parent.canonicalize().map_err(failed)?.join(name)))
}

fn is_read_only(archive: &Path) -> bool {
    nix::sys::statvfs::statvfs(archive).is_ok_and(|host| host.flags().contains(FsFlags::ST_RDONLY))
}

/// Returns whether a remote archive is a backup, and would stop being one if it were written to.
fn is_backup(place: &ArchiveLocation, key: &UnlockedKey, options: &MountOptions) -> Result<bool, Failure> {
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let archive = Archive::open_seen(place.source(), key, &reading, &options.seen_options())?;
    let info = archive.info()?;
    // Recorded now, so that the daemon does not report a first use.
    info.first_use.iter().for_each(|sentence| print_message(sentence));
    Ok(info.backup_of.is_some())
}

fn may_only_be_read(archive: &Path) -> bool {
    access(archive, AccessFlags::W_OK) == Err(Errno::EACCES) && access(archive, AccessFlags::R_OK).is_ok()
}

fn serve(config: &DaemonConfig, key: &UnlockedKey, namespaces: Option<&Namespaces>) -> Result<(), Failure> {
    if config.options.foreground {
        daemon::close_inherited();
        logging::start(&LogTarget::of(&config.options), config.verbose)?;
        lockbox_terminal::abort_on_panic();
        let notify = Notify::connect(std::env::var_os("NOTIFY_SOCKET"))?;
        let ready = |_: &[String]| {
            notify.notify_ready(&config.point().to_string_lossy());
            Ok(())
        };
        return session::serve(config, key, None, ready, || notify.notify_stopping());
    }
    daemon::launch(config, key, namespaces)?.iter().for_each(|notice| print_message(notice));
    if namespaces.is_none() {
        mount::register(config.archive(), config.point());
    }
    Ok(())
}

/// Returns the archive's absolute path, or its address, and its location; None if it is missing and
/// may be (`nofail`).
fn locate_archive(name: &Path, options: &MountOptions) -> Result<Option<(PathBuf, ArchiveLocation)>, Failure> {
    let is_remote = remote::is_remote(name);
    if options.remote.unsent && !is_remote {
        return Err(Failure::usage("-o unsent is for archives at addresses"));
    }
    if is_remote {
        return match ArchiveLocation::open(name, &options.remote.without_cache()) {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound && options.nofail => Ok(None),
            opened => Ok(Some((name.to_owned(), opened.map_err(|error| MountProgram::failure(name, error))?))),
        };
    }
    match name.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound && options.nofail => Ok(None),
        Err(e) => {
            let code = if e.kind() == io::ErrorKind::NotFound { NO_ARCHIVE } else { OTHER };
            Err(Failure::new(code, format!("cannot open {}: {e}", name.display())))
        }
        Ok(path) => {
            let place = ArchiveLocation::file(&path);
            Ok(Some((path, place)))
        }
    }
}

fn parse_options(arguments: &Arguments) -> Result<MountOptions, Failure> {
    if !arguments.sloppy {
        return MountOptions::parse(&arguments.options).map_err(Failure::usage);
    }
    let (options, unknown) = MountOptions::parse_sloppily(&arguments.options).map_err(Failure::usage)?;
    if arguments.verbose {
        unknown.iter().for_each(|name| print_message(&format!("ignored: unknown mount option {name}")));
    }
    Ok(options)
}

fn print_message(message: &str) {
    lockbox_terminal::complain(MountProgram::NAME, message);
}

/// Compares the command line and the options with the manual page.
#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use clap::CommandFactory;

    const PAGE: &str = include_str!("../../../man/mount.lockbox.8");

    /// Returns the words that the page formats as literal.
    fn words() -> BTreeSet<String> {
        let marked = PAGE.lines().filter(|line| line.contains("Cm ") || line.starts_with(".It Fl"));
        let split = |line: &'static str| line.split([' ', ',', '|', '=']).filter(|word| !word.is_empty());
        marked.flat_map(split).map(str::to_owned).collect()
    }

    #[test]
    fn every_option_is_in_the_manual_page_and_the_help() {
        let words = words();
        let mut missing: Vec<String> = Vec::new();
        let named = MOUNT.iter().map(|row| row.name).filter(|name| !words.contains(*name));
        missing.extend(named.map(|name| format!("-o {name}")));
        let help = list_option::help(MOUNT);
        let in_help: BTreeSet<_> = help.split([' ', ',', '=', '\n']).collect();
        let without: Vec<_> = MOUNT.iter().map(|row| row.name).filter(|name| !in_help.contains(name)).collect();
        assert_eq!(without, ["nonempty"], "options of 'lockbox mount' alone");
        assert!(PAGE.contains("Cm x-") && MountOptions::parse(&["x-systemd.automount"]).is_ok());
        let mut command = Arguments::command();
        command.build();
        // Options that only other lockbox programs use are not documented.
        let shown = |argument: &&clap::Arg| {
            let is_clap = ["help", "version"].contains(&argument.get_id().as_str());
            !is_clap && (!argument.is_hide_set() || argument.get_long().is_none())
        };
        for argument in command.get_arguments().filter(shown) {
            let long = argument.get_long().map(|long| format!("-{long}"));
            let name = long.or_else(|| argument.get_short().map(String::from));
            missing.extend(name.filter(|name| !words.contains(name)).map(|name| format!("-{name}")));
        }
        assert!(missing.is_empty(), "man/mount.lockbox.8 lacks {missing:?}");
    }
}
