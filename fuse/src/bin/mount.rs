//! mount.lockbox: mounts a lockbox archive, for people, for mount(8) and for `lockbox mount`.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use lockbox::archive::Archive;
use lockbox_fuse::exit::{Failure, OTHER, USAGE};
use lockbox_fuse::journal::{self, Target};
use lockbox_fuse::options::Options;
use lockbox_fuse::session::{self, Task};
use lockbox_fuse::{daemon, mount, passphrase, remount, unmounter};

/// Mount a lockbox archive
///
/// The passphrase comes from the option passfile=, the environment (LOCKBOX_PASSFILE, LOCKBOX_PASSCOMMAND), standard input
/// when it is no terminal, or a prompt.
#[derive(Parser)]
#[command(name = "mount.lockbox", version, after_help = AFTER_HELP)]
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
    #[arg(short = 's', hide = true)]
    sloppy: bool,
    #[arg(short = 't', hide = true)]
    file_system_type: Option<String>,
}

const AFTER_HELP: &str = "\
Options:
  ro, rw                       Read-only or (default) read-write
  allow_other                  Let other users in; file permissions apply
  sync=never|periodic|always   How much is durable without fsync
                               (default periodic: every 5 seconds)
  memory=SIZE                  Cap of caches and unwritten data, such as 256M
  size-limit=SIZE              Most that the archive's file may grow to
  pack=on|off, compress=on|off How new data is stored
  atime=off|open               Access times: as they are set (default), or
                               noted when something is opened for reading
  threads=N                    Event loops (default: processors, at least 4)
  passfile=FILE                Read the passphrase from a private file
  passfile_any                 Accept a passfile that others may read
  stop_timeout=SECONDS         How long a busy mount is served after the order
                               to stop (default 60)
  accept-older, accept-fork    Go on with a copy that is older than what this
                               user saw of the archive, or was written apart
  kdf-limit=N                  What unlocking may cost, in MiB times passes
  sandbox=on|off               Whether the daemon gives up the files that it does
                               not need (default on)
  log=FILE                     Log there instead of to the system log
  foreground                   As --foreground
  suid, dev, exec, nosuid, nodev, noexec, noatime
                               As in mount(8); default nosuid,nodev
  remount                      Change ro, rw and these of a living mount
Exit codes:
  0 mounted, 1 usage, 2 other error, 10 wrong passphrase, 11 not an archive or
  too new, 12 damaged, 13 in use, 14 no space, 15 mounting failed,
  16 older copy or copies written apart";

fn main() -> ExitCode {
    daemon::harden();
    if std::env::args_os().nth(1).is_some_and(|first| first == daemon::ARGUMENT) {
        return finish(daemon::run(), false);
    }
    if std::env::args_os().nth(1).is_some_and(|first| first == unmounter::ARGUMENT) {
        return if unmounter::run().is_ok() { ExitCode::SUCCESS } else { ExitCode::from(OTHER) };
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    finish(mount_archive(&arguments), true)
}

fn finish(result: Result<(), Failure>, speak: bool) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if speak {
                tell(&failure.message);
            }
            ExitCode::from(failure.code)
        }
    }
}

fn mount_archive(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(flags) = remount::requested(&arguments.options)? {
        let absent = |e| Failure::mount(format!("mount point {}: {e}", arguments.directory.display()));
        let point = arguments.directory.canonicalize().map_err(absent)?;
        return if arguments.fake { Ok(()) } else { remount::remount(&point, flags) };
    }
    let mut options = Options::parse(&arguments.options)?;
    options.foreground |= arguments.foreground;
    options.sandbox &= !arguments.no_sandbox;
    options.log = options.log.map(std::path::absolute).transpose().map_err(|e| Failure::usage(format!("log=: {e}")))?;
    if arguments.fake {
        return Ok(());
    }
    let archive = arguments
        .archive
        .canonicalize()
        .map_err(|e| Failure::other(format!("cannot open {}: {e}", arguments.archive.display())))?;
    let point = daemon::prepare_point(&arguments.directory)?;
    // Before the passphrase is asked for and worked on for a second.
    if let Some(failure) = session::holder(&archive) {
        return Err(failure);
    }
    let key = Archive::unlock_within(&archive, &passphrase::obtain(&options)?, &options.unlock_limits())?;
    let task =
        Task { archive: OsString::from(archive), point: OsString::from(point), options, verbose: arguments.verbose };
    if task.options.foreground {
        journal::start(&task.options.log.as_deref().map_or(Target::Terminal, Target::File), task.verbose)?;
        return session::serve(&task, &key, |_| Ok(()));
    }
    if let Some(notice) = daemon::launch(&task, &key)? {
        tell(&notice);
    }
    mount::register(task.archive(), task.point());
    Ok(())
}

fn tell(message: &str) {
    let _ = writeln!(io::stderr(), "mount.lockbox: {message}");
}
