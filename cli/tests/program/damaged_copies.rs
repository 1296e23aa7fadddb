//! A store of copies of one archive, each damaged in another way: no command gives a wrong byte without a word, and none makes it worse.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::support::{Dice, RunOutput, TestDir, noise};

const B: usize = 4096;
/// How many copies are damaged, unless `LOCKBOX_DAMAGED_COPIES` says more; each takes a quarter of a second.
const COPIES: u64 = 16;
/// What a damaged or older copy may end with, besides success: wrong passphrase, not an archive, damaged, older.
const CODES: [i32; 5] = [0, 10, 11, 12, 16];

type Files = BTreeMap<String, Vec<u8>>;

/// The archive as it is, as it was before its last session, another one, and what the first two hold.
struct Store {
    work_dir: TestDir,
    now: Vec<u8>,
    before: Vec<u8>,
    other: Vec<u8>,
    files: Files,
    older: Files,
}

impl Store {
    fn new() -> Store {
        let work_dir = TestDir::new();
        fs::create_dir_all(work_dir.path("tree/below")).unwrap();
        let write = |name: &str, length| fs::write(work_dir.path("tree").join(name), noise(length)).unwrap();
        let names: Vec<String> = (0..12).map(|n| format!("below/small{n}")).collect();
        write("large", 400_000);
        write("kept", 70_000);
        names.iter().zip(500..).for_each(|(name, length)| write(name, length));
        for name in ["a.lbx", "b.lbx"] {
            work_dir.create_archive(name);
            work_dir.run_ok(&["add", name, "tree"]);
        }
        let (before, older) = (fs::read(work_dir.path("a.lbx")).unwrap(), read_tree(&work_dir.path("tree")));
        write("large", 410_000);
        names.iter().step_by(3).zip(700..).for_each(|(name, length)| write(name, length));
        work_dir.run_ok(&["add", "--force", "a.lbx", "tree"]);
        let (now, files) = (fs::read(work_dir.path("a.lbx")).unwrap(), read_tree(&work_dir.path("tree")));
        let other = fs::read(work_dir.path("b.lbx")).unwrap();
        fs::write(work_dir.path("extra"), noise(50_000)).unwrap();
        Store { work_dir, now, before, other, files, older }
    }

    fn damaged(&self, random: &mut Dice) -> (&'static str, Vec<u8>) {
        let mut bytes = self.now.clone();
        let blocks = bytes.len() / B;
        let start = random.below(blocks);
        let end = (start + 1 + random.below(24)).min(blocks);
        let mut flip = |random: &mut Dice, first: usize, count: usize| {
            for _ in 0..1 + random.below(6) {
                bytes[first * B + random.below(count * B)] ^= 1 << random.below(8);
            }
        };
        let headers = [0, 320];
        // The commit ring lies behind each header copy.
        let rings = [33, 353];
        let what = match random.below(9) {
            0 => {
                flip(random, 0, blocks);
                "bits anywhere"
            }
            1 => {
                headers.iter().take(1 + random.below(2)).for_each(|&first| flip(random, first, 33));
                "bits of headers"
            }
            2 => {
                rings.iter().for_each(|&first| flip(random, first, 32));
                "bits of records"
            }
            3 => {
                bytes.truncate(random.below(blocks * B));
                "cut"
            }
            4 => {
                bytes[start * B..end * B].fill(0);
                "a hole"
            }
            kind @ (5 | 6) => {
                let from = if kind == 5 { &self.before } else { &self.other };
                let end = (end * B).min(from.len()).max(start * B);
                if end > start * B {
                    bytes[start * B..end].copy_from_slice(&from[start * B..end]);
                }
                if kind == 5 { "a part of an older copy" } else { "a part of another archive" }
            }
            7 => {
                let other = random.below(blocks);
                let moved = bytes[start * B..(start + 1) * B].to_vec();
                bytes.copy_within(other * B..(other + 1) * B, start * B);
                bytes[other * B..(other + 1) * B].copy_from_slice(&moved);
                "two blocks exchanged"
            }
            _ => {
                bytes.extend(noise(1 + random.below(3 * B)));
                "bytes behind"
            }
        };
        (what, bytes)
    }

    fn run(&self, arguments: &[&str]) -> RunOutput {
        let output = self.work_dir.run(arguments);
        assert!(CODES.contains(&output.code), "{arguments:?}: {output:?}");
        assert!(output.code == 0 || !output.stderr.is_empty(), "{arguments:?}: no word");
        output
    }

    /// Whether `check --full` calls it sound, and how much it found.
    fn findings(&self) -> (bool, Option<usize>) {
        let output = self.run(&["check", "--full", "--json", "c.lbx"]);
        let report: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        (output.code == 0, report.map(|report| report["findings"].as_array().unwrap().len()))
    }

    /// What an extraction gives, none of it another content than `files`; all of it, if it says so.
    fn extracted(&self, files: &Files) -> Files {
        let _ = fs::remove_dir_all(self.work_dir.path("out"));
        let output = self.run(&["extract", "c.lbx", "--to", "out"]);
        let found = read_tree(&self.work_dir.path("out"));
        for (name, content) in &found {
            assert!(files.get(name) == Some(content), "{name} was extracted with another content");
        }
        assert!(output.code != 0 || found.len() == files.len(), "extracted {} files without a word", found.len());
        found
    }

    fn look(&self) {
        let (sound, found) = self.findings();
        self.run(&["check", "c.lbx"]);
        let extracted = self.extracted(&self.prefixed(&self.files));
        assert!(!sound || extracted.len() == self.files.len(), "called sound");
        let listed = self.run(&["ls", "-R", "c.lbx"]);
        assert!(listed.code != 0 || String::from_utf8(listed.stdout).unwrap().contains("small11"), "not all is listed");
        let shown = self.run(&["cat", "c.lbx", "tree/large"]);
        let large = &self.files["large"];
        assert!(large.starts_with(&shown.stdout) && (shown.code != 0 || *large == shown.stdout), "cat");
        self.rescue();
        self.write(sound, found, &extracted);
    }

    fn prefixed(&self, files: &Files) -> Files {
        files.iter().map(|(name, content)| (format!("tree/{name}"), content.clone())).collect()
    }

    /// What is called whole is what it was, or is called an older version, or not known to be none.
    fn rescue(&self) {
        let _ = fs::remove_dir_all(self.work_dir.path("rescued"));
        let output = self.run(&["rescue", "c.lbx", "--to", "rescued", "--json"]);
        let lines = String::from_utf8(output.stdout).unwrap();
        let items: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (now, older) = (self.prefixed(&self.files), self.prefixed(&self.older));
        for (name, content) in read_tree(&self.work_dir.path("rescued")) {
            if now.get(&name) == Some(&content) {
                continue;
            }
            let told = |item: &serde_json::Value| item["older"] == true || item["unproved"] == true;
            let item = items.iter().find(|item| item["path"] == name.as_str());
            let nameless = older.values().chain(now.values()).any(|known| *known == content);
            let known = older.get(&name) == Some(&content) || nameless && !now.contains_key(&name);
            assert!(known && output.code == 12, "{name} was rescued with another content: {item:?}");
            assert!(item.is_none_or(told) || !now.contains_key(&name), "{name} is called the newest: {item:?}");
        }
    }

    /// A writer takes nothing away that could be had before.
    fn write(&self, sound: bool, found: Option<usize>, before: &Files) {
        let added = self.run(&["add", "c.lbx", "extra"]);
        let (sound_after, found_after) = self.findings();
        assert!(!sound || sound_after && added.code == 0, "a sound one is not after a write: {added:?}");
        if let (Some(found), Some(after)) = (found, found_after) {
            assert!(after <= found, "{found} findings before a write and {after} after it");
        }
        let mut files = self.prefixed(&self.files);
        if added.code == 0 {
            files.insert("extra".into(), fs::read(self.work_dir.path("extra")).unwrap());
        }
        let after = self.extracted(&files);
        assert!(before.keys().all(|name| after.contains_key(name)), "a write took something away: {added:?}");
        assert!(added.code != 0 || after.contains_key("extra"), "what was added is not there");
    }
}

/// Contents by path; a directory that is not there is empty.
fn read_tree(root: &Path) -> Files {
    let mut files = Files::new();
    let mut left = vec![root.to_path_buf()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                files.insert(name, fs::read(path).unwrap());
            }
        }
    }
    files
}

#[test]
fn no_damaged_copy_gives_a_wrong_byte_or_is_worse_after_a_write() {
    let seed = std::env::var("SEED").map_or(1, |seed| seed.parse().unwrap());
    let copies = std::env::var("LOCKBOX_DAMAGED_COPIES").map_or(COPIES, |copies| copies.parse().unwrap());
    let store = Store::new();
    let seen = read_tree(&store.work_dir.path("state"));
    for seed in seed..seed + copies {
        // A copy that was written is a fork for whoever saw it, so each begins with what was remembered of the whole one.
        for (name, content) in &seen {
            fs::write(store.work_dir.path("state").join(name), content).unwrap();
        }
        let (what, bytes) = store.damaged(&mut Dice(seed));
        println!("SEED={seed}: {what}");
        fs::write(store.work_dir.path("c.lbx"), bytes).unwrap();
        store.look();
    }
}
