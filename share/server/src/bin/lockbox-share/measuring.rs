//! Host access of the measurements: a state directory, and the processor time of this process.

use std::path::{Path, PathBuf};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

/// The daemon's state, temporary unless it was named.
pub(crate) struct StateDirectory {
    pub(crate) path: PathBuf,
    temporary: bool,
}

impl StateDirectory {
    pub(crate) fn new(named: Option<&Path>) -> Result<StateDirectory, String> {
        if let Some(path) = named {
            return Ok(StateDirectory { path: path.into(), temporary: false });
        }
        let path = std::env::temp_dir().join(format!("lockbox-share-bench-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(StateDirectory { path, temporary: true })
    }
}

impl Drop for StateDirectory {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Seconds of processor time that this process has used.
pub(crate) fn processor_seconds() -> f64 {
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time()))
}
