//! Where the program's messages go: the terminal, a file, or the system's log once it is a daemon.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::exit::Failure;

/// Facility daemon (3), severity notice (5): the level stands in the line itself.
const PRIORITY: u8 = 3 << 3 | 5;

pub enum Target<'a> {
    Terminal,
    File(&'a Path),
    System,
}

/// Starts logging. Names, sizes and paths inside an archive are never logged, only inode numbers and pages.
pub fn start(target: &Target<'_>, verbose: bool) -> Result<(), Failure> {
    let filter = EnvFilter::new(if verbose { "info,lockbox=debug,lockbox_fuse=debug" } else { "warn,fuser=error" });
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_ansi(false);
    let started = match target {
        Target::Terminal => builder.with_writer(io::stderr).without_time().try_init(),
        Target::File(path) => {
            let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
            let file = file.map_err(|e| Failure::other(format!("cannot open the log {}: {e}", path.display())))?;
            builder.with_writer(std::sync::Mutex::new(file)).try_init()
        }
        Target::System => builder.with_writer(System(connect())).without_time().try_init(),
    };
    started.map_err(|e| Failure::other(format!("cannot start logging: {e}")))
}

fn connect() -> Option<UnixDatagram> {
    let socket = UnixDatagram::unbound().ok()?;
    socket.connect("/dev/log").ok()?;
    // A full log must not hold up the file system.
    socket.set_nonblocking(true).ok()?;
    Some(socket)
}

/// Writes each event as one datagram to /dev/log; without a system log events are lost.
struct System(Option<UnixDatagram>);

impl<'a> MakeWriter<'a> for System {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self.0.as_ref())
    }
}

struct Line<'a>(Option<&'a UnixDatagram>);

impl Write for Line<'_> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        if let Some(socket) = self.0 {
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
