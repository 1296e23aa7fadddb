//! Upper bound: an in-memory file system with the FUSE settings of lockbox.
//!
//! Its rate is the limit of the kernel, the FUSE protocol and this machine; no archive behind FUSE
//! can be faster.

mod adapter;
mod store;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use clap::Parser;
use fuser::{Session, SessionACL};
use lockbox_fuse::Failure;
use lockbox_fuse::kernel;
use lockbox_fuse::mount::{self, Mount};
use lockbox_host::mounts::Mountpoint;
use nix::mount::MsFlags;
use nix::sys::signal::{SigSet, Signal};
use std::os::unix::fs::MetadataExt;

/// Mount an empty file system in memory and serve it until SIGTERM or SIGINT
#[derive(Parser)]
#[command(name = "ceiling")]
struct Arguments {
    directory: PathBuf,
    /// Event loops
    #[arg(long, default_value_t = kernel::default_threads(false))]
    threads: usize,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "ceiling: {failure}");
            ExitCode::from(failure.code)
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::mount(format!("{}: {e}", arguments.directory.display()));
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().map_err(|e| failed(e.into()))?;

    let point = arguments.directory.canonicalize().map_err(failed)?;
    let flags = MsFlags::MS_NOATIME | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let device = Mount {
        source: "ceiling".as_ref(),
        subtype: "ceiling",
        point: &point,
        allow_other: false,
        flags,
        point_owner: None,
    }
    .attach()?;
    let config = kernel::session_config(arguments.threads);
    let adapter = adapter::Adapter::new(arguments.threads, device.try_clone().map_err(failed)?);
    let session = Session::from_fd(adapter, device, SessionACL::All, config).map_err(failed)?;
    let stop_at = point.clone();
    thread::spawn(move || {
        while signals.wait().is_ok() {
            // Also when busy: no data can be lost.
            if let Ok(held) = Mountpoint::of(&stop_at) {
                let _ = mount::detach(&held, &stop_at);
            }
        }
    });
    thread::spawn(move || {
        if let Ok(root) = point.metadata() {
            let _ = kernel::ReadAhead::of(root.dev()).and_then(kernel::ReadAhead::raise);
        }
    });
    session.run().map_err(failed)
}
