//! Damage to pages of the newest commit when it is known to have been durable: only the content of
//! the page is lost (specification 10.1 rule 7).

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::fuzzing::{ARCHIVE, OWNER, create_on, key, noise, open_on, with_header};
use super::super::{Archive, OpenOptions};
use crate::error::Error;
use crate::format::ROOT_INO;
use crate::format::header::FEATURE_LOG;
use crate::format::record::CommitRecord;
use crate::fs::{FileSystem, mode};
use crate::keys::UnlockedKey;
use crate::storage::{MemoryStorage, Storage};
use crate::txn::{FindingKind, Severity};

/// Content by path.
type Files = BTreeMap<Vec<u8>, Vec<u8>>;

/// State after a kill following an fsync: a log entry extends the newest record, which names all of
/// its pages itself.
fn killed() -> (Vec<u8>, CommitRecord, Files) {
    let storage = Arc::new(with_header(FEATURE_LOG).unwrap());
    let fs = create_on(storage.clone(), 1).unwrap();
    let mut files = Files::new();
    for n in 0..160u64 {
        let directory = format!("directory{}", n / 20).into_bytes();
        let at = match fs.lookup(ROOT_INO, &directory) {
            Ok(found) => found.ino,
            Err(_) => fs.make_directory(ROOT_INO, &directory, 0o750, OWNER).unwrap().ino,
        };
        let name = format!("file with a name of some length {n}").into_bytes();
        let content = noise(n, if n % 8 == 0 { 30_000 } else { 3000 });
        let ino = fs.make_node(at, &name, mode::REGULAR | 0o640, 0, OWNER).unwrap().ino;
        fs.write(ino, 0, &content).unwrap();
        files.insert([&b"/"[..], &directory, b"/", &name].concat(), content);
    }
    fs.make_durable().unwrap();
    let small = fs.make_node(ROOT_INO, b"small", mode::REGULAR | 0o640, 0, OWNER).unwrap().ino;
    fs.write(small, 0, b"said by the log").unwrap();
    files.insert(b"/small".to_vec(), b"said by the log".to_vec());
    let record = (*fs.volume.durable()).clone();
    fs.sync().unwrap();
    assert_eq!((fs.volume.durable().generation, fs.volume.log_use().entries), (record.generation, 1));
    assert!(!record.two_barrier && record.allocated.len() > 12, "{} pages", record.allocated.len());
    (storage.contents(), record, files)
}

/// Returns everything readable, and the number of unreadable files or directories.
fn read(fs: &FileSystem) -> (Files, usize) {
    let (mut files, mut failed) = (Files::new(), 0);
    let mut pending = vec![(ROOT_INO, Vec::new())];
    while let Some((directory, path)) = pending.pop() {
        let mut names = Vec::new();
        let listed = fs.list_directory(directory, 2, u64::MAX, false, &mut |entry, _| {
            names.push(entry.name.to_vec());
            ControlFlow::Continue(())
        });
        failed += usize::from(listed.is_err());
        for name in names {
            let path = [&path[..], b"/", &name].concat();
            match fs.lookup(directory, &name) {
                Ok(found) if found.mode & mode::TYPE == mode::DIRECTORY => pending.push((found.ino, path)),
                Ok(found) => match fs.read(found.ino, 0, 1 << 20) {
                    Ok(content) => drop(files.insert(path, content)),
                    Err(_) => failed += 1,
                },
                Err(_) => failed += 1,
            }
        }
    }
    (files, failed)
}

fn flipped(bytes: &[u8], at: u64) -> Arc<MemoryStorage> {
    let storage = MemoryStorage::from_contents(bytes.to_vec());
    storage.write_at(at, &[bytes[at as usize] ^ 0x10]).unwrap();
    Arc::new(storage)
}

#[test]
fn a_flipped_bit_of_the_newest_commit_costs_what_the_page_had() {
    let (bytes, record, files) = killed();
    assert_eq!(read(&open_on(flipped(&bytes, 100 << 12), true).unwrap()), (files.clone(), 0));
    let (mut refused, mut worst) = (0, 0);
    for (run, _) in &record.allocated {
        for at in [run.offset() + 30, run.offset() + 2000] {
            let storage = flipped(&bytes, at);
            let before = storage.contents();
            match open_on(storage.clone(), false).map(drop) {
                Err(Error::Damaged(text)) => {
                    let commit = format!("commit {} was durable, but", record.generation.0);
                    assert!(text.starts_with(&commit) && text.contains("rescued"), "{text}");
                }
                opened => panic!("block {}: {opened:?}", run.address),
            }
            assert!(storage.contents() == before, "block {}: it was written to", run.address);
            // Without the path to the root directory nothing can be read.
            let Ok(fs) = open_on(storage, true) else {
                refused += 1;
                continue;
            };
            let said = fs.volume.fallback().expect("a sentence");
            assert!(said.contains(&format!("commit {} was durable", record.generation.0)), "{said}");
            assert_eq!(fs.volume.lost_pages().iter().map(|page| page.run).collect::<Vec<_>>(), [*run]);
            let (left, failed) = read(&fs);
            assert!(left.iter().all(|(path, content)| files.get(path) == Some(content)), "block {}", run.address);
            assert!(left.len() == files.len() || failed > 0, "block {}: files went without a word", run.address);
            worst = worst.max(files.len() - left.len());
        }
    }
    assert!(refused <= 6 && worst < files.len() / 2, "{refused} refused, {worst} of {} files lost", files.len());
}

/// The quick check reports the page, the full one the affected file.
#[test]
fn a_check_tells_what_a_page_of_the_newest_commit_cost() {
    let (bytes, record, files) = killed();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("archive");
    let unlocked = UnlockedKey { archive: ARCHIVE, volume_key: key(), by_recipient: false };
    let options = OpenOptions { read_only: true, memory: 16 << 20, ..OpenOptions::default() };
    // A whole file in a page of its own.
    let (run, _) = record.allocated.iter().max_by_key(|(run, _)| run.blocks).unwrap();
    std::fs::write(&file, flipped(&bytes, run.offset() + 9000).contents()).unwrap();
    let archive = Archive::open(&file, &unlocked, &options).unwrap();
    assert!(archive.info().unwrap().fallback.is_some_and(|said| said.contains("was durable, but")));
    let quick = archive.check(false, &mut |_| {}).unwrap().findings;
    let [page] = &quick[..] else { panic!("{quick:?}") };
    assert_eq!((page.kind, page.severity, page.block), (FindingKind::Commit, Severity::Lost, Some(run.address)));
    let full = archive.check(true, &mut |_| {}).unwrap().findings;
    assert!(
        full.iter().all(|finding| finding.kind == FindingKind::DataLost && finding.block == page.block),
        "{full:?}"
    );
    assert!(full.iter().any(|finding| finding.path.as_ref().is_some_and(|path| files.contains_key(path))), "{full:?}");
}
