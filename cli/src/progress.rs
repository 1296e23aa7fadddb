//! A progress bar, on a terminal only.
use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use lockbox::exchange::Progress;
use lockbox_terminal::{display, quantity};

/// Shows nothing when standard error is no terminal.
pub(crate) struct Bar(Option<ProgressBar>);

impl Bar {
    /// For copies, whose end is not known beforehand.
    pub(crate) fn copying() -> Bar {
        Bar::new("{spinner} {wide_msg}")
    }

    /// For work with a known end.
    pub(crate) fn checking() -> Bar {
        Bar::new("{wide_bar} {percent:>3} %")
    }

    /// For one file on its way.
    pub(crate) fn transferring() -> Bar {
        Bar::new("{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
    }

    /// For a scan with a known end, then copies.
    pub(crate) fn rescuing() -> Bar {
        Bar::new("{bar:20} {percent:>3} % {wide_msg}")
    }

    fn new(template: &str) -> Bar {
        if !io::stderr().is_terminal() {
            return Bar(None);
        }
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Bar(Some(bar))
    }

    pub(crate) fn copied(&self, progress: &Progress<'_>) {
        if let Some(bar) = &self.0 {
            bar.set_message(format!(
                "{} files, {}: {}",
                progress.files,
                quantity::readable(progress.bytes),
                display(progress.path)
            ));
        }
    }

    pub(crate) fn checked(&self, done: u64, total: u64) {
        if let Some(bar) = &self.0 {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
