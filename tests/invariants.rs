//! Reads the table of invariants in ARCHITECTURE.md and the sources: a word stands for one list, and every list is in the table.

#![allow(clippy::unwrap_used)] // as in every test

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn sources(below: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(below).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// `ACL-1  text` in a doc comment states an invariant.
fn stated(line: &str) -> Option<(&str, u32)> {
    let text = line.strip_prefix("//! ").or_else(|| line.strip_prefix("/// "))?;
    let (label, rest) = text.split_once("  ")?;
    let (word, number) = label.split_once('-')?;
    let number = number.parse().ok()?;
    (!rest.is_empty() && word.bytes().all(|byte| byte.is_ascii_uppercase())).then_some((word, number))
}

#[test]
fn a_word_stands_for_one_list_and_the_table_has_them_all() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for below in ["src", "fuse/src", "remote/src", "bench/src"] {
        sources(&root.join(below), &mut files);
    }
    let mut lists: BTreeMap<String, (String, u32)> = BTreeMap::new();
    for file in files {
        let name = file.strip_prefix(root).unwrap().display().to_string();
        for (word, number) in fs::read_to_string(&file).unwrap().lines().filter_map(stated) {
            let list = lists.entry(word.into()).or_insert((name.clone(), 0));
            assert_eq!(list.0, name, "{word}-{number} is stated twice");
            list.1 = list.1.max(number);
        }
    }
    assert!(lists.len() > 15, "the lists were not found: {lists:?}");
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    for (word, (file, last)) in lists {
        let numbers = if last == 1 { format!("{word}-1") } else { format!("{word}-1 to {last}") };
        let row = architecture.lines().find(|line| line.starts_with(&format!("| {numbers} |")));
        assert!(row.is_some_and(|row| row.contains(&format!("`{file}`"))), "no row for {numbers} of {file}");
    }
}
