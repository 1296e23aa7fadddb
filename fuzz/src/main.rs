//! One program for all targets. `SEEDS=DIRECTORY` writes the first inputs. `TARGET=NAME` chooses a
//! target, and `EXECUTIONS=N` or `DURATION=SECONDS` runs it on mutated inputs of the directories in
//! `CORPUS` (see [`mutate`]). With the feature `libfuzzer`: `TARGET=NAME lockbox-fuzz [OPTION...]
//! CORPUS`.

#![cfg_attr(feature = "libfuzzer", no_main)]

mod bucket;
mod mutate;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use lockbox::archive::fuzzing::{FuzzTarget, TARGETS, seeds};
use lockbox::error::LogStats;
use lockbox_host::control::{
    BackupDone, ExpectedSnapshots, ListedSnapshot, PathDifference, RefusalReason, Request, Response, ScheduleStatus,
    SnapshotName, Status, TreePath,
};
use lockbox_host::mount_options::MountOptions;
use lockbox_share::http::fuzzing as http;
use lockbox_share::store::fuzzing as shares;

/// Targets of what lies above the library's archive.
const UPPER: [(&str, FuzzTarget); 10] = [
    ("control", control),
    ("options", options),
    ("marker", bucket::marker),
    ("storelog", bucket::log),
    ("checkpoint", bucket::checkpoint),
    ("segment", shares::segment),
    ("connection", http::connection),
    ("range", http::ranges),
    ("capsule", http::capsule),
    ("request", http::request),
];

/// Either side of the control socket.
fn control(data: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<Request>(data) {
        let text = serde_json::to_vec(&request).expect("a message is text");
        let again: Request = serde_json::from_slice(&text).expect("a message that was written reads");
        assert_eq!(serde_json::to_vec(&again).expect("a message is text"), text);
    }
    if let Ok(response) = serde_json::from_slice::<Response>(data) {
        let text = serde_json::to_vec(&response).expect("a message is text");
        let again: Response = serde_json::from_slice(&text).expect("a message that was written reads");
        assert_eq!(serde_json::to_vec(&again).expect("a message is text"), text);
    }
}

/// A list given with `-o`; what it was understood as can be handed to the daemon.
fn options(data: &[u8]) {
    // Made once, for speed.
    static DEFAULT: OnceLock<MountOptions> = OnceLock::new();
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut options = DEFAULT.get_or_init(MountOptions::default).clone();
    if options.apply(&[text]).is_ok_and(|unknown| unknown.is_empty()) {
        let message = serde_json::to_vec(&options).expect("options are text");
        let mut again: MountOptions = serde_json::from_slice(&message).expect("options that were written read");
        // Where secrets come from is nothing for the daemon.
        again.sources.clone_from(&options.sources);
        again.cache.clone_from(&options.cache);
        assert!(again == options);
        let _ = (options.open_options(), options.unlock_limits(), options.mount_flags(), options.stop_timeout());
    }
}

/// One of each message of the control socket.
fn messages() -> Vec<Vec<u8>> {
    let name = |text: &str| SnapshotName(text.into());
    let path = |text: &str| TreePath(text.into());
    let message = |text: &str| text.to_owned();
    let requests = [
        Request::Status,
        Request::Stop { lazy: true, abandon: false, force: false },
        Request::Sync,
        Request::Purge,
        Request::SnapshotCreate { name: name("monday") },
        Request::SnapshotList { after: 3, held: true },
        Request::SnapshotHeld { ranges: vec![(1, 4), (7, u64::MAX)] },
        Request::Backup { whole: false, verify: true, percent: Some(10) },
        Request::SnapshotRemove { ids: vec![1, 2], among: Some(ExpectedSnapshots { up_to: 9, count: 4 }) },
        Request::SnapshotDiff { older: name("monday"), newer: None },
        Request::SnapshotRestore { name: name("monday"), paths: vec![path("a/b"), path("")], to: Some(path("back")) },
    ];
    let listed = ListedSnapshot {
        id: 7,
        name: name("monday"),
        seconds: -5,
        held_bytes: Some(4096),
        ..ListedSnapshot::default()
    };
    let found = PathDifference { path: path("a"), from: Some(path("b")), change: message("renamed"), changed: true };
    let status = Status {
        pid: 7,
        archive: message("a.lbx"),
        mount_point: message("/mnt"),
        log: LogStats { entries: 3, bytes: 12_288, used_bytes: 8192 },
        schedule: Some(ScheduleStatus {
            rules: message("hourly:24"),
            next: 9,
            failure: Some(message("the disk is full")),
        }),
        latched: Some(message("read-only")),
        ..Status::default()
    };
    let responses = [
        Response::Status(Box::new(status)),
        Response::Done,
        Response::Detached,
        Response::Busy { message: message("in use") },
        Response::Failed { message: message("why") },
        Response::Snapshots { snapshots: vec![listed.clone(), listed], more: true },
        Response::Held { bytes: u64::MAX },
        Response::BackedUp { done: Some(BackupDone::default()) },
        Response::Differing { found: vec![found] },
        Response::Kept { name: name("before") },
        Response::Rename { from: path("a"), to: path("b"), exchange: true },
        Response::MakeDirectory { path: path("a/b") },
        Response::Refused { why: RefusalReason::DamagedBackup, message: message("why") },
    ];
    let text = "a message is text";
    let requests = requests.iter().map(|request| serde_json::to_vec(request).expect(text));
    requests.chain(responses.iter().map(|response| serde_json::to_vec(response).expect(text))).collect()
}

fn upper_seeds(name: &str) -> Vec<Vec<u8>> {
    let texts: &[&str] = match name {
        "control" => return messages(),
        "options" => &[
            "ro,allow_other,nosuid,nodev",
            "sync=always,memory=64M,size-limit=1G,atime=open,threads=4,pack=off,compress=off",
            "stop_timeout=5,log=/tmp/log,kdf-limit=100,passfile=/pw,sandbox=off,accept-older,snapshot=monday",
            "snapshot-dir=shown,snapshots=hourly:24,daily:7",
        ],
        _ => &[],
    };
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn share_seeds(name: &str) -> Vec<Vec<u8>> {
    if name == "segment" { shares::segment_seeds() } else { http::seeds(name) }
}

/// One directory for each target.
fn write_seeds(to: &Path) {
    for name in TARGETS.iter().chain(&UPPER).map(|(name, _)| *name) {
        let directory = to.join(name);
        fs::create_dir_all(&directory).expect("a directory for seeds");
        let all = seeds(name).into_iter().chain(upper_seeds(name)).chain(bucket::seeds(name)).chain(share_seeds(name));
        for (number, seed) in all.enumerate() {
            fs::write(directory.join(format!("seed{number:03}")), seed).expect("a seed is written");
        }
    }
}

/// Does what the variables ask for. Returns the target where that is left to libFuzzer.
fn run() -> Option<FuzzTarget> {
    if let Some(to) = std::env::var_os("SEEDS") {
        write_seeds(Path::new(&to));
        return None;
    }
    let name = std::env::var("TARGET").expect("TARGET names what to fuzz");
    let mut targets = TARGETS.iter().chain(&UPPER);
    let (_, entry) = *targets.find(|(known, _)| *known == name).expect("TARGET is not known");
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let limit = match (number("EXECUTIONS"), number("DURATION")) {
        (Some(executions), _) => mutate::Limit::Executions(executions),
        (None, Some(seconds)) => mutate::Limit::Time(Duration::from_secs(seconds)),
        (None, None) => return Some(entry),
    };
    let directories = std::env::var_os("CORPUS").expect("CORPUS lists directories, divided by colons");
    let directories: Vec<PathBuf> = std::env::split_paths(&directories).collect();
    let findings = std::env::var_os("FINDINGS").expect("FINDINGS is a directory");
    mutate::run(&name, entry, limit, number("SEED").unwrap_or(1), &directories, Path::new(&findings));
    None
}

#[cfg(not(feature = "libfuzzer"))]
fn main() {
    assert!(run().is_none(), "EXECUTIONS or DURATION says when to stop");
}

#[cfg(feature = "libfuzzer")]
mod coverage_guided {
    use std::sync::OnceLock;

    static CHOSEN: OnceLock<lockbox::archive::fuzzing::FuzzTarget> = OnceLock::new();

    libfuzzer_sys::fuzz_target!(
        init: {
            let Some(entry) = super::run() else { std::process::exit(0) };
            CHOSEN.set(entry).expect("chosen once");
        },
        |data: &[u8]| {
            if let Some(entry) = CHOSEN.get() {
                entry(data);
            }
        }
    );
}
