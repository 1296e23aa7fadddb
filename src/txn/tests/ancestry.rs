//! The history of sessions: its bound, and the answers about sessions that it lost.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::support::*;
use crate::format::values::HistoryValue;
use crate::format::{Generation, Key, kind};
use crate::storage::MemoryStorage;
use crate::txn::ancestry::MOST_SESSIONS;
use crate::txn::{Ancestry, Mark, Volume};

fn sessions(volume: &Volume) -> Vec<u64> {
    let mut found = Vec::new();
    let state = volume.state();
    let store = volume.store();
    state
        .trees
        .history
        .scan(store, Key::MIN, Key::MAX, &mut |key, _| {
            found.push(key.sub);
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
    found
}

/// However often an archive is written, the history has 4,096 records; older sessions are unknown.
#[test]
fn the_history_is_bounded_and_says_what_it_does_not_know() {
    const SURPLUS: u64 = 100;
    let dice = Dice::new(1);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    // Made up: generations 1, 2, 3 ... each a session of its own, and the archive's own commits
    // come after them.
    let most = MOST_SESSIONS as u64;
    let session = |n: u64| bytes_of(n, 16).try_into().unwrap();
    volume
        .operate(1, true, |operation| {
            operation.changed = true;
            for n in 1..=most + SURPLUS {
                let value = HistoryValue { session: session(n), last: Generation(n), last_tag: [n as u8; 16] };
                let key = Key::new(0, kind::HISTORY, n);
                operation.insert_history(key, &value.encode())?;
            }
            Ok(())
        })
        .unwrap();
    for n in 0..most + SURPLUS {
        // Commits of no content: the numbers of the made-up sessions have to lie in the past.
        volume.operate(1, true, |operation| operation.insert(extent_key(2, 0), &n.to_le_bytes())).unwrap();
        volume.commit().unwrap();
    }
    volume.close().unwrap();
    drop(volume);
    let mut counts = Vec::new();
    for n in 0..3u64 {
        let volume = open(storage.clone(), &dice);
        volume.operate(1, true, |operation| operation.insert(extent_key(2, 0), &n.to_le_bytes())).unwrap();
        volume.close().unwrap();
        counts.push(sessions(&volume).len() as u64);
    }
    // 64 go at once. The archive's own first session took the place of the made-up number 1.
    assert_eq!(counts, [most + SURPLUS - 64, most, most]);

    let volume = open(storage, &dice);
    let kept = sessions(&volume);
    let seen = |n: u64, tag: u64| Mark {
        session: session(n),
        first: Generation(n),
        generation: Generation(n),
        tag: [tag as u8; 16],
    };
    assert_eq!(volume.descent_from(&seen(1, 1)).unwrap(), Ancestry::Unknown);
    let oldest = kept[1];
    assert_eq!(volume.descent_from(&seen(oldest, oldest)).unwrap(), Ancestry::Descendant);
    assert_eq!(volume.descent_from(&seen(oldest, oldest + 1)).unwrap(), Ancestry::Diverged);
    let newest = volume.opened_at().unwrap();
    let later = Mark { generation: Generation(newest.generation.0 + 1), ..newest };
    assert_eq!(volume.descent_from(&later).unwrap(), Ancestry::Older);
    assert_eq!(volume.descent_from(&Mark { tag: [0; 16], ..newest }).unwrap(), Ancestry::Diverged);
    assert_eq!(volume.trail(newest, 64).unwrap().len(), 64);
}
