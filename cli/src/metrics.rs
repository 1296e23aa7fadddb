//! Metrics in the text format of OpenMetrics, which Prometheus reads too, and files of them for the
//! textfile collector of the node exporter.
use std::fmt::{Display, Write as _};
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use lockbox::storage::HostEntry;

/// Metrics, family by family.
#[derive(Default)]
pub(crate) struct MetricsText(String);

impl MetricsText {
    /// Adds a gauge with its samples, each with its labels; nothing without samples.
    pub(crate) fn gauge<V: Display>(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = (String, V)>) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (labels, value) in samples {
            let _ = writeln!(self.0, "{name}{{{labels}}} {value}");
        }
    }

    pub(crate) fn finish(self) -> String {
        self.0 + "# EOF\n"
    }
}

/// Returns labels as they stand between braces.
pub(crate) fn labels(pairs: &[(&str, &[u8])]) -> String {
    let label = |(name, value): &(&str, &[u8])| {
        let value = String::from_utf8_lossy(value);
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{name}=\"{value}\"")
    };
    pairs.iter().map(label).collect::<Vec<_>>().join(",")
}

/// Replaces the file as a whole, so that a collector never reads a part of it; through an opened
/// directory, and never follows a link in it: another user may be able to write to the directory.
pub(crate) fn replace_file(file: &Path, text: &[u8]) -> io::Result<()> {
    let entry = HostEntry::of(file)?;
    // Another extension: the collector reads only files with its own.
    let mut name = entry.name().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let temporary = entry.sibling(name)?;
    // Of a process of this number that was killed.
    if let Ok(stale) = temporary.open(false) {
        temporary.remove(&stale)?;
    }
    let mut new = temporary.create()?;
    // The collector runs as another user.
    let readable = Permissions::from_mode(0o644);
    let written =
        new.write_all(text).and_then(|()| new.set_permissions(readable)).and_then(|()| temporary.rename(&entry));
    written.inspect_err(|_| {
        let _ = temporary.remove(&new);
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn labels_are_quoted_and_a_text_has_an_end() {
        let mut text = MetricsText::default();
        text.gauge("lockbox_files", "Files.", [(labels(&[("at", b"/a \"b\"\\\n\xff"), ("to", b"c")]), 7)]);
        text.gauge("lockbox_none", "Nothing.", Vec::<(String, u64)>::new());
        let expected = "# HELP lockbox_files Files.\n# TYPE lockbox_files gauge\n\
            lockbox_files{at=\"/a \\\"b\\\"\\\\\\n\u{fffd}\",to=\"c\"} 7\n# EOF\n";
        assert_eq!(text.finish(), expected);
    }

    #[test]
    fn a_link_in_the_directory_leads_the_metrics_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let [victim, file] = ["victim", "a.prom"].map(|name| directory.path().join(name));
        std::fs::write(&victim, "precious").unwrap();
        let temporary = directory.path().join(format!("a.prom.{}.new", std::process::id()));
        symlink(&victim, &temporary).unwrap();
        assert_eq!(replace_file(&file, b"text").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        std::fs::remove_file(&temporary).unwrap();
        std::fs::write(&temporary, "of a killed process").unwrap();
        symlink(&victim, &file).unwrap();
        replace_file(&file, b"text").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"text");
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o644);
        assert!(!temporary.exists());
    }
}
