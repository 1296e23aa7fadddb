//! The threat model names tests for what it promises; each must exist, and each promise must name one.

use std::fs;
use std::path::Path;

/// Every Rust source and case of the mount tests, joined.
fn sources(directory: &Path, all: &mut String) {
    for entry in fs::read_dir(directory).expect("a directory of the tree") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "sh") {
            all.push_str(&fs::read_to_string(&path).expect("a source"));
        }
    }
}

/// Words in back quotes that look like the name of a test.
fn named(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).filter(|word| word.matches('_').count() >= 3 && !word.contains(' ')).collect()
}

#[test]
fn every_promise_of_the_threat_model_has_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("format-spec/THREATS.md")).expect("the threat model");
    let mut all = String::new();
    for directory in ["src", "fuse/src", "tests"] {
        sources(&root.join(directory), &mut all);
    }
    let mut count = 0;
    for line in page.lines() {
        let tests = named(line);
        let promises = line.starts_with('|') && line.split(['|', ':']).any(|cell| cell.trim().starts_with("yes"));
        assert!(!promises || !tests.is_empty(), "no test is named: {line}");
        for test in tests {
            count += 1;
            let exists = all.contains(&format!("fn {test}()")) || all.contains(&format!("{test}() {{"));
            assert!(exists, "{test} is named by the threat model and does not exist");
        }
    }
    assert!(count > 30, "only {count} names were found");
}
