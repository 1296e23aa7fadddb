//! `lockbox status --check` and `--metrics`: the health of mounts for monitoring systems.
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use lockbox_host::control::Status;
use lockbox_host::shown;

use super::{Found, find, refusal};
use crate::exit::Failure;
use crate::metrics::{MetricsText, labels};
use crate::output::{self, count};

/// Health of a mount, in the words and numbers of monitoring plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Health {
    Healthy = 0,
    Warning = 1,
    Critical = 2,
}

impl Health {
    fn word(self) -> &'static str {
        match self {
            Health::Healthy => "OK",
            Health::Warning => "WARNING",
            Health::Critical => "CRITICAL",
        }
    }

    fn code(self) -> u8 {
        self as u8
    }
}

/// Prints one line about the mount, or about all; the exit code is its health. A mount that is
/// named and does not exist is critical.
pub(super) fn check(what: Option<&Path>) -> Result<(), Failure> {
    let (health, text) = match find(what, false) {
        Ok(found) => summary(&found),
        Err(failure) => (Health::Critical, failure.message),
    };
    output::print(&format!("LOCKBOX {}: {text}", health.word()))?;
    match health.code() {
        0 => Ok(()),
        // The line has said why.
        code => Err(Failure::new(code, "")),
    }
}

/// Returns the worst health, and the troubles of all mounts, the worst first.
fn summary(found: &[Found]) -> (Health, String) {
    let mut troubles: Vec<(Health, String)> = found
        .iter()
        .flat_map(|found| {
            let point = shown(&found.point());
            troubles(found).into_iter().map(move |(health, what)| (health, format!("{point}: {what}")))
        })
        .collect();
    troubles.sort_by_key(|(health, _)| std::cmp::Reverse(*health));
    let worst = troubles.first().map_or(Health::Healthy, |(health, _)| *health);
    let text = match troubles.is_empty() {
        true if found.is_empty() => "no archive is mounted".to_owned(),
        true => format!("{} mounted", count(found.len() as u64, "archive")),
        false => troubles.into_iter().map(|(_, what)| what).collect::<Vec<_>>().join("; "),
    };
    (worst, text)
}

/// Returns the reasons why a mount is not healthy: data at risk or out of reach is critical, and a
/// state that may lead there is a warning.
fn troubles(found: &Found) -> Vec<(Health, String)> {
    match found {
        Found::Served(served) => troubles_of(&served.status),
        Found::Silent(_) => vec![(Health::Critical, "no daemon answers".to_owned())],
    }
}

fn troubles_of(status: &Status) -> Vec<(Health, String)> {
    let mut troubles = Vec::new();
    let critical = [
        ("read-only because", status.latched.as_deref()),
        ("the store refuses:", status.remote.as_ref().and_then(refusal).map(|(_, why)| why)),
    ];
    let failed_snapshot = status.schedule.as_ref().and_then(|schedule| schedule.failure.as_deref());
    let warnings = [
        ("snapshot failed:", failed_snapshot),
        ("shows an earlier state because", status.follows.as_ref().and_then(|follows| follows.failure.as_deref())),
        ("when mounted:", status.fallback.as_deref()),
    ];
    for (health, all) in [(Health::Critical, &critical[..]), (Health::Warning, &warnings[..])] {
        let those = all.iter().filter_map(|(what, why)| Some((health, format!("{what} {}", (*why)?))));
        troubles.extend(those);
    }
    if status.remote.as_ref().is_some_and(|remote| remote.offline_since.is_some()) {
        troubles.push((Health::Warning, "its server does not answer".to_owned()));
    }
    troubles
}

/// Returns the metrics of these mounts.
pub(super) fn metrics(found: &[Found]) -> String {
    let mut text = MetricsText::default();
    let up = found.iter().map(|one| (labels_of(one), u8::from(matches!(one, Found::Served(_)))));
    text.gauge("lockbox_mount_up", "Whether the daemon of the mount answers.", up);
    let mut of = |name: &str, help: &str, value: &dyn Fn(&Status) -> Option<u64>| {
        let samples = found.iter().filter_map(|one| match one {
            Found::Served(served) => Some((labels_of(one), value(&served.status)?)),
            Found::Silent(_) => None,
        });
        text.gauge(name, help, samples);
    };
    of("lockbox_mount_health", "0 healthy, 1 warning, 2 critical, as 'lockbox status --check'.", &|status| {
        let worst = troubles_of(status).into_iter().map(|(health, _)| health).max();
        Some(worst.unwrap_or(Health::Healthy).code().into())
    });
    of("lockbox_mount_read_only", "Whether it is read-only.", &|status| Some(status.read_only.into()));
    of("lockbox_mount_dirty_bytes", "Data that is not durable yet.", &|status| Some(status.dirty_bytes));
    of("lockbox_mount_open_files", "Files that programs have open.", &|status| Some(status.open_files));
    of("lockbox_mount_memory_bytes", "Memory of its caches.", &|status| Some(status.memory_bytes));
    of("lockbox_mount_file_bytes", "Size of the archive's file.", &|status| status.file_bytes);
    of("lockbox_mount_used_bytes", "Space in use in the archive.", &|status| status.used_bytes);
    of("lockbox_mount_snapshots", "Snapshots of the archive.", &|status| status.snapshots);
    of("lockbox_mount_newest_snapshot_timestamp_seconds", "Time of the newest snapshot.", &|status| {
        status.newest_snapshot.and_then(|seconds| u64::try_from(seconds).ok())
    });
    of("lockbox_mount_unsent_bytes", "Data that the store does not have yet.", &|status| {
        status.remote.as_ref().map(|remote| remote.unsent)
    });
    text.finish()
}

fn labels_of(found: &Found) -> String {
    let (point, archive) = (found.point(), found.archive());
    labels(&[("mount_point", point.as_os_str().as_bytes()), ("archive", archive.as_os_str().as_bytes())])
}

#[cfg(test)]
mod tests {
    use lockbox_host::control::{RequestStats, ScheduleStatus};

    use super::super::Served;
    use super::*;

    fn served(status: Status) -> Found {
        Found::Served(Box::new(Served { status, attached: true, users: Vec::new(), held: None }))
    }

    #[test]
    fn the_worst_mount_decides_and_the_line_has_every_trouble() {
        let healthy = || served(Status { read_only: true, ..Status::default() });
        assert_eq!(summary(&[]), (Health::Healthy, "no archive is mounted".into()));
        assert_eq!(summary(&[healthy()]), (Health::Healthy, "1 archive mounted".into()));
        let schedule = Some(ScheduleStatus { failure: Some("no space".into()), ..ScheduleStatus::default() });
        let warned = || served(Status { schedule: schedule.clone(), ..Status::default() });
        let (health, text) = summary(&[healthy(), warned()]);
        assert_eq!(health, Health::Warning);
        assert!(text.ends_with(": snapshot failed: no space"), "{text}");
        let latched = served(Status { latched: Some("a write failed".into()), ..Status::default() });
        let (health, text) = summary(&[warned(), latched]);
        assert_eq!(health, Health::Critical);
        let parts: Vec<&str> = text.split("; ").collect();
        assert!(parts.len() == 2 && parts[0].ends_with(": read-only because a write failed"), "{text}");
        let away = RequestStats { offline_since: Some(0), ..RequestStats::default() };
        assert_eq!(summary(&[served(Status { remote: Some(away), ..Status::default() })]).0, Health::Warning);
        let full =
            RequestStats { refused_since: Some(0), refusal: Some("quota exceeded".into()), ..RequestStats::default() };
        assert_eq!(summary(&[served(Status { remote: Some(full), ..Status::default() })]).0, Health::Critical);
    }

    #[test]
    fn metrics_have_the_health_of_each_mount() {
        let latched = Some("a write failed".into());
        let text = metrics(&[served(Status { latched, dirty_bytes: 20, snapshots: Some(3), ..Status::default() })]);
        for line in
            ["lockbox_mount_up{", "lockbox_mount_health{", "lockbox_mount_dirty_bytes{", "lockbox_mount_snapshots{"]
                .iter()
                .zip(["1", "2", "20", "3"])
        {
            assert!(
                text.lines().any(|one| one.starts_with(line.0) && one.ends_with(&format!(" {}", line.1))),
                "{text}"
            );
        }
        assert!(text.ends_with("# EOF\n"));
        assert_eq!(metrics(&[]), "# EOF\n");
    }
}
