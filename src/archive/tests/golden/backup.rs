//! The golden backup: filled once and updated to a later version, so that it contains the origin,
//! the history and pages of both.

use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::super::super::Backups;
use super::super::super::fuzzing::{noise, open_on};
use super::{
    PASSPHRASES, damaged, damages, file, freeze, hex, listing, objects, outcome, settled, without_rest_of_log,
};
use crate::format::ROOT_INO;
use crate::fs::{FileSystem, RenameMode};
use crate::storage::{MemoryStorage, Storage};

/// Returns the origin of a backup for the manifest; null for an archive.
pub(super) fn origin(fs: &FileSystem) -> Value {
    fs.volume.origin().map_or(Value::Null, |origin| {
        json!({
            "session": hex(&origin.session), "first": origin.first.0, "generation": origin.generation.0,
            "tag": hex(&origin.tag), "time": [origin.time.seconds, i64::from(origin.time.nanos)],
        })
    })
}

fn backup() -> (Vec<u8>, Value) {
    let storage = Arc::new(MemoryStorage::from_contents(objects()));
    let fs = open_on(storage.clone(), false).unwrap();
    let copy: Arc<MemoryStorage> = Arc::new(MemoryStorage::new());
    let to: Arc<dyn Storage> = copy.clone();
    let pin = || Backups::of(fs.clone(), storage.clone()).pin().unwrap();
    file(&fs, ROOT_INO, b"first", &noise(80, 20_000));
    file(&fs, ROOT_INO, b"gone", &noise(81, 9_000));
    pin().fill(&to, &mut |_| Ok(())).unwrap();
    fs.unlink(ROOT_INO, b"gone").unwrap();
    fs.rename(ROOT_INO, b"first", ROOT_INO, b"moved", RenameMode::Replace).unwrap();
    file(&fs, ROOT_INO, b"second", &noise(82, 30_000));
    fs.take_snapshot(b"in the archive alone").unwrap();
    let moment = pin();
    let now = listing(&fs).unwrap();
    assert!(moment.bring_up_to_date(&to, &mut |_| Ok(())).unwrap().is_some_and(|done| !done.whole));
    moment.verify(&to, 100, &mut |_| Ok(())).unwrap();
    drop(moment);
    fs.close().unwrap();
    (without_rest_of_log(copy.contents(), 0), now)
}

/// Run once, when backups were added to the format: its file is frozen.
#[test]
#[ignore = "writes the golden backup anew"]
fn write_golden_backup() {
    let (bytes, now) = backup();
    let bytes = settled(bytes);
    let fs = open_on(Arc::new(MemoryStorage::from_contents(bytes.clone())), true).unwrap();
    assert_eq!(listing(&fs).unwrap(), now);
    let record = fs.volume.durable();
    let damaged: Vec<Value> = damages(&bytes)
        .into_iter()
        .map(|(what, at)| {
            let bytes = damaged(&bytes, &at);
            json!({"what": what, "flip": at, "outcome": outcome(&bytes)})
        })
        .collect();
    let manifest = json!({
        "passphrases": PASSPHRASES.map(|(_, text)| text),
        "generation": record.generation.0, "closed": record.closed, "two_barrier": record.two_barrier,
        "sha256": hex(&Sha256::digest(&bytes)), "objects": now, "backup_of": origin(&fs), "damaged": damaged,
    });
    freeze("backup", &bytes, &manifest);
}
