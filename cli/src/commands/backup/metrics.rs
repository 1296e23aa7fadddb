//! The file of metrics about the last successful backup, for the textfile collector of the node
//! exporter: it stays as it is when a backup fails, so its time tells how old the backup is.
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use lockbox_host::shown;

use super::{Args, Measured};
use crate::exit::Failure;
use crate::metrics::{MetricsText, labels};

/// Replaces the file as a whole, so that a collector never reads a part of it.
pub(super) fn write(file: &Path, args: &Args, measured: &Measured, took: Duration) -> Result<(), Failure> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let text = text(args, measured, took, now);
    replace(file, text.as_bytes()).map_err(|error| {
        Failure::host(format!("the backup is complete; cannot write its metrics to {}", shown(file)), &error)
    })
}

fn text(args: &Args, measured: &Measured, took: Duration, now: Duration) -> String {
    let source = args.archive.archive.as_os_str().as_bytes();
    let of = labels(&[("source", source), ("destination", args.destination.as_os_str().as_bytes())]);
    let mut text = MetricsText::default();
    text.gauge(
        "lockbox_backup_last_success_timestamp_seconds",
        "End of the last successful backup, in seconds since 1970.",
        [(of.clone(), now.as_secs())],
    );
    text.gauge("lockbox_backup_duration_seconds", "Duration of that backup.", [(of.clone(), took.as_secs_f64())]);
    let bytes = [(of.clone(), measured.copied_bytes)];
    text.gauge("lockbox_backup_copied_bytes", "File data that it copied.", bytes);
    text.gauge("lockbox_backup_files", "Files in that backup.", measured.files.map(|files| (of, files)));
    text.finish()
}

fn replace(file: &Path, text: &[u8]) -> io::Result<()> {
    // Another extension: the collector reads only files with its own.
    let mut new = file.as_os_str().to_owned();
    new.push(format!(".{}.new", std::process::id()));
    let written = create(Path::new(&new)).and_then(|mut created| created.write_all(text));
    written.and_then(|()| std::fs::rename(&new, file)).inspect_err(|_| {
        let _ = std::fs::remove_file(&new);
    })
}

/// The collector runs as another user.
fn create(path: &Path) -> io::Result<File> {
    File::options().write(true).create(true).truncate(true).mode(0o644).open(path)
}
