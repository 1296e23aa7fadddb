//! Log output: the terminal, a file, or the system log of a daemon; passed on to other processes of
//! this program.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use lockbox_host::Program;
use lockbox_host::mount_options::MountOptions;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::{Failure, MountProgram};

/// Facility daemon (3), severity notice (5): the line itself has the level.
const PRIORITY: u8 = 3 << 3 | 5;

pub enum LogTarget<'a> {
    Terminal,
    File(&'a Path),
    System,
}

impl<'a> LogTarget<'a> {
    pub fn of(options: &'a MountOptions) -> LogTarget<'a> {
        match &options.log {
            Some(path) => LogTarget::File(path),
            None if options.foreground => LogTarget::Terminal,
            None => LogTarget::System,
        }
    }
}

/// Argument that stands for standard error; paths of logs are absolute.
const STANDARD_ERROR: &str = "-";

/// Returns the command of another process of this program, which logs to the same target: the last
/// argument. A terminal's interrupt is meant for the daemon alone, so the process gets a group of
/// its own, unless the caller sets another group.
pub(crate) fn process_command(arguments: &[&OsStr], target: &LogTarget<'_>) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(MountProgram::NAME).args(arguments).process_group(0);
    match *target {
        LogTarget::System => &mut command,
        LogTarget::File(path) => command.arg(path),
        LogTarget::Terminal => command.arg(STANDARD_ERROR),
    };
    command.stderr(if matches!(target, LogTarget::Terminal) { Stdio::inherit() } else { Stdio::null() });
    command
}

/// Starts logging to `target`, the last argument of a process of [`process_command`].
pub(crate) fn start_process(target: Option<&Path>) -> io::Result<LogTarget<'_>> {
    let target = match target {
        None => LogTarget::System,
        Some(path) if path == Path::new(STANDARD_ERROR) => LogTarget::Terminal,
        Some(path) => LogTarget::File(path),
    };
    start(&target, false).map_err(|failure| io::Error::other(failure.message))?;
    Ok(target)
}

pub(crate) fn level_filter(verbose: bool) -> EnvFilter {
    EnvFilter::new(if verbose { "info,lockbox=debug,lockbox_fuse=debug" } else { "warn,fuser=error" })
}

/// Starts logging, and returns the log if it is a file. Names, sizes and paths inside an archive
/// are never logged, only inode numbers and pages.
pub fn start(target: &LogTarget<'_>, verbose: bool) -> Result<Option<File>, Failure> {
    let builder = tracing_subscriber::fmt().with_env_filter(level_filter(verbose)).with_target(false).with_ansi(false);
    let mut log = None;
    let started = match target {
        LogTarget::Terminal => {
            builder.with_writer(io::stderr).without_time().finish().with(IgnoreLostReplies).try_init()
        }
        LogTarget::File(path) => {
            let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
            let both = file.and_then(|file| Ok((file.try_clone()?, file)));
            let (again, file) =
                both.map_err(|e| Failure::other(format!("cannot open the log {}: {e}", path.display())))?;
            log = Some(again);
            builder.with_writer(std::sync::Mutex::new(file)).finish().with(IgnoreLostReplies).try_init()
        }
        LogTarget::System => builder
            .with_writer(Arc::new(Syslog(connect_syslog())))
            .without_time()
            .finish()
            .with(IgnoreLostReplies)
            .try_init(),
    };
    started.map_err(|e| Failure::other(format!("cannot start logging: {e}")))?;
    if !matches!(target, LogTarget::Terminal) {
        log_panics();
    }
    Ok(log)
}

/// Drops one event of the FUSE library: the kernel rejected a reply because the waiting program was
/// killed (ENOENT), which is harmless. Other rejected replies are logged.
struct IgnoreLostReplies;

impl<S: Subscriber> Layer<S> for IgnoreLostReplies {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        struct Message(bool);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                if field.name() == "message" {
                    let text = format!("{value:?}");
                    self.0 |= text.starts_with("Failed to send FUSE reply") && text.contains("(os error 2)");
                }
            }
        }
        let mut message = Message(false);
        event.record(&mut message);
        !message.0
    }
}

/// Logs panics, in place of the previous hook: a program whose panics must end it calls
/// `abort_on_panic` afterwards. The daemon's standard error may lead nowhere. Only the source
/// location is logged, since a message could quote content of the archive.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or("an unknown place".into(), ToString::to_string);
        tracing::error!("the program failed and ends, at {place}: synced data is safe; please report this line");
    }));
}

fn connect_syslog() -> Option<UnixDatagram> {
    let socket = UnixDatagram::unbound().ok()?;
    socket.connect("/dev/log").ok()?;
    // A full log must not block the file system.
    socket.set_nonblocking(true).ok()?;
    Some(socket)
}

/// Writes each event as one datagram to /dev/log; without a system log events are lost.
struct Syslog(Option<UnixDatagram>);

impl Write for &Syslog {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        if let Some(socket) = &self.0 {
            let mut datagram = format!("<{PRIORITY}>mount.lockbox[{}]: ", std::process::id()).into_bytes();
            datagram.extend_from_slice(event.trim_ascii_end());
            let _ = socket.send(&datagram);
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts the events that reach the log.
    struct Count(Arc<AtomicUsize>);

    impl<S: Subscriber> Layer<S> for Count {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_reply_to_a_killed_program_is_not_logged() {
        let logged = Arc::new(AtomicUsize::new(0));
        let subscriber = tracing_subscriber::registry().with(Count(Arc::clone(&logged))).with(IgnoreLostReplies);
        tracing::subscriber::with_default(subscriber, || {
            for (errno, expected) in [(2, 0), (22, 1), (19, 2)] {
                let refused = io::Error::from_raw_os_error(errno);
                tracing::error!("Failed to send FUSE reply: {refused}");
                assert_eq!(logged.load(Ordering::SeqCst), expected, "{refused}");
            }
            tracing::error!("cannot open: {}", io::Error::from_raw_os_error(2));
            assert_eq!(logged.load(Ordering::SeqCst), 3);
        });
    }

    #[test]
    fn a_panic_is_logged_by_location_only() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let usual = std::panic::take_hook();
        let mut file = start(&LogTarget::File(&log), false).unwrap().unwrap();
        let ended = std::thread::spawn(|| panic!("content of a file")).join();
        std::panic::set_hook(usual);
        assert!(ended.is_err());
        file.write_all(b"said by the C library").unwrap();
        let text = std::fs::read_to_string(&log).unwrap();
        assert!(text.contains("ERROR") && text.contains("fuse/src/logging.rs:"), "{text}");
        assert!(!text.contains("content of a file"), "{text}");
        // The log is that of the process: other tests append to it.
        assert!(text.contains("said by the C library"), "{text}");
    }
}
