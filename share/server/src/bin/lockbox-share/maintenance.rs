//! Commands of an administrator: `lockbox-share doctor` checks the host's prerequisites of the
//! daemon and prints remedies, `lockbox-share compact` removes from the store of a daemon that does
//! not run everything that nothing needs any more.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Args;
use lockbox_share::store::StoreMaintenance;
use lockbox_share::store::segments::{SegmentSettings, SegmentStore};
use lockbox_share_protocol::api::SOCKET_NAME;
use nix::sys::resource::{Resource, getrlimit};

use crate::serve;

/// Free bytes below which a warning is given: a minute of busy sharing.
const LITTLE: u64 = 256 << 20;

/// Check for problems that would keep the daemon from serving
#[derive(Args)]
pub(crate) struct Doctor {
    /// Directory of the shares
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,
}

enum Finding {
    Fine(String),
    Warning(String),
    Fault(String),
}

/// Prints one line per check. Errors: when a fault would keep the daemon from serving.
#[allow(clippy::print_stdout)] // the result
pub(crate) fn diagnose(arguments: &Doctor) -> Result<(), String> {
    let state = &arguments.state_dir;
    let findings = [directory(state), writing(state), room(state), descriptors(), backlog(), socket()];
    let mut faults = 0;
    for finding in findings {
        match finding {
            Finding::Fine(text) => println!("ok       {text}"),
            Finding::Warning(text) => println!("warning  {text}"),
            Finding::Fault(text) => {
                faults += 1;
                println!("FAULT    {text}");
            }
        }
    }
    if faults == 0 { Ok(()) } else { Err(format!("{faults} of these keep the daemon from serving")) }
}

fn directory(state: &Path) -> Finding {
    match fs::metadata(state) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Finding::Warning(format!("{} does not exist; serve creates it", state.display()))
        }
        Err(error) => Finding::Fault(format!("{} cannot be inspected: {error}", state.display())),
        Ok(metadata) if !metadata.is_dir() => Finding::Fault(format!("{} is not a directory", state.display())),
        Ok(metadata) if metadata.mode() & 0o077 != 0 => {
            Finding::Warning(format!("other users have access to {}: chmod 700 it", state.display()))
        }
        Ok(_) => Finding::Fine(format!("{} is a private directory", state.display())),
    }
}

fn writing(state: &Path) -> Finding {
    if !state.is_dir() {
        return Finding::Fine("no directory to write to yet".into());
    }
    let probe = state.join(format!("doctor-{}", std::process::id()));
    let written = fs::write(&probe, b"probe").and_then(|()| fs::File::open(&probe)?.sync_all());
    let _ = fs::remove_file(&probe);
    match written {
        Ok(()) => Finding::Fine("the disk accepts writes and barriers".into()),
        Err(error) => Finding::Fault(format!("cannot write to the disk: {error}")),
    }
}

fn room(state: &Path) -> Finding {
    let existing = state.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match nix::sys::statvfs::statvfs(existing) {
        Err(error) => Finding::Warning(format!("cannot determine the free space: {error}")),
        Ok(figures) => {
            let free = figures.blocks_available() * figures.fragment_size();
            let text = format!("{} MiB are free", free >> 20);
            if free < LITTLE { Finding::Warning(text) } else { Finding::Fine(text) }
        }
    }
}

fn descriptors() -> Finding {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Err(error) => Finding::Warning(format!("cannot determine the limit of descriptors: {error}")),
        Ok((_, hard)) if hard < 24_000 => Finding::Warning(format!(
            "only {hard} descriptors: fewer connections than --max-connections are served; raise LimitNOFILE"
        )),
        Ok((_, hard)) => Finding::Fine(format!("{hard} descriptors")),
    }
}

fn backlog() -> Finding {
    let text = fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default();
    match text.trim().parse::<u32>() {
        Ok(most) if most < 1024 => Finding::Warning(format!(
            "bursts over {most} connections are refused by the kernel: raise net.core.somaxconn"
        )),
        Ok(most) => Finding::Fine(format!("{most} connections may wait to be accepted")),
        Err(_) => Finding::Warning("cannot read net.core.somaxconn".into()),
    }
}

fn socket() -> Finding {
    let path = match serve::runtime_directory() {
        Ok(directory) => directory.join(SOCKET_NAME),
        Err(message) => return Finding::Fault(message),
    };
    match std::os::unix::net::UnixStream::connect(&path) {
        Ok(_) => Finding::Fine(format!("a daemon serves on {}", path.display())),
        Err(_) => Finding::Fine(format!("no daemon serves on {}", path.display())),
    }
}

/// Compact the store of a daemon that does not run
#[derive(Args)]
pub(crate) struct Compact {
    /// Directory of the daemon
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,
}

pub(crate) fn compact(arguments: &Compact) -> Result<(), String> {
    if !arguments.state_dir.is_dir() {
        return Err(format!("{}: no such directory", arguments.state_dir.display()));
    }
    let settings = SegmentSettings { background: None, ..SegmentSettings::default() };
    let store = SegmentStore::open(&arguments.state_dir, &settings).map_err(|error| error.to_string())?;
    let before = store.stats();
    store.compact().map_err(|error| error.to_string())?;
    let after = store.stats();
    #[allow(clippy::print_stdout)] // the result of the command
    {
        println!("live={}", after.live);
        println!("segment_bytes_before={}", before.segment_bytes);
        println!("segment_bytes={}", after.segment_bytes);
        println!("spool_bytes={}", after.spool_bytes);
    }
    Ok(())
}
