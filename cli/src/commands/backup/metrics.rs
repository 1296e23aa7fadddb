//! The file of metrics about the last successful backup, for the textfile collector of the node
//! exporter: it stays as it is when a backup fails, so its time tells how old the backup is.
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use lockbox::storage::HostEntry;
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

/// Replaces the file through an opened directory and never follows a link in it: another user may
/// be able to write to the directory.
fn replace(file: &Path, text: &[u8]) -> io::Result<()> {
    let entry = HostEntry::of(file)?;
    // Another extension: the collector reads only files with its own.
    let mut name = entry.name().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let beside = entry.sibling(name)?;
    // Of a process of this number that was killed.
    if let Ok(stale) = beside.open(false) {
        beside.remove(&stale)?;
    }
    let mut new = beside.create()?;
    // The collector runs as another user.
    let readable = Permissions::from_mode(0o644);
    let written = new.write_all(text).and_then(|()| new.set_permissions(readable)).and_then(|()| beside.rename(&entry));
    written.inspect_err(|_| {
        let _ = beside.remove(&new);
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_in_the_directory_leads_the_metrics_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let [victim, file] = ["victim", "a.prom"].map(|name| directory.path().join(name));
        std::fs::write(&victim, "precious").unwrap();
        let beside = directory.path().join(format!("a.prom.{}.new", std::process::id()));
        symlink(&victim, &beside).unwrap();
        assert_eq!(replace(&file, b"text").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        std::fs::remove_file(&beside).unwrap();
        std::fs::write(&beside, "of a killed process").unwrap();
        symlink(&victim, &file).unwrap();
        replace(&file, b"text").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"text");
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o644);
        assert!(!beside.exists());
    }
}
