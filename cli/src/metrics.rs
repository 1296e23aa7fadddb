//! Metrics in the text format of OpenMetrics, which the collectors of Prometheus read too.
use std::fmt::{Display, Write};

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

#[cfg(test)]
mod tests {
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
}
