//! The threat model and the tables of links and of stores name tests for what they promise; each must exist, and each promise must name one.

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
    let is_name = |word: &&str| {
        word.matches('_').count() >= 3 && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    line.split('`').skip(1).step_by(2).filter(is_name).collect()
}

/// Everything in which a named test may stand.
fn all_tests(root: &Path) -> String {
    let mut all = String::new();
    for directory in [
        "src",
        "cli",
        "fuse/src",
        "host/src",
        "terminal/src",
        "remote/src",
        "share/protocol",
        "share/client",
        "share/server",
        "tests",
    ] {
        sources(&root.join(directory), &mut all);
    }
    all
}

/// As a test of Rust, one with generated arguments (`name in any::<String>()`), or a case of a script.
fn exists(test: &str, all: &str) -> bool {
    let function = format!("fn {test}(");
    let is_test =
        |rest: &str| rest.split('{').next().is_some_and(|head| head.starts_with(')') || head.contains(" in "));
    all.split(&function).skip(1).any(is_test) || all.contains(&format!("{test}() {{"))
}

/// Names of tests in a line, each of which must exist.
fn existing<'a>(line: &'a str, all: &str) -> Vec<&'a str> {
    let tests = named(line);
    for test in &tests {
        assert!(exists(test, all), "{test} is named and does not exist: {line}");
    }
    tests
}

#[test]
fn every_promise_of_the_threat_model_has_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("format-spec/THREATS.md")).expect("the threat model");
    let all = all_tests(root);
    let mut count = 0;
    for line in page.lines() {
        let tests = existing(line, &all);
        let promises = line.starts_with('|') && line.split(['|', ':']).any(|cell| cell.trim().starts_with("yes"));
        assert!(!promises || !tests.is_empty(), "no test is named: {line}");
        count += tests.len();
    }
    assert!(count > 60, "only {count} names were found");
}

/// The rows of a table whose first cells are the numbers 1 to `count`, each of which names tests that exist, or says that there is none.
fn assert_rows(page: &str, count: u32) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join(page)).expect("the table");
    let all = all_tests(root);
    let number = |row: &str| row.strip_prefix("| ")?.split(' ').next()?.parse::<u32>().ok();
    let rows: Vec<&str> = page.lines().filter(|row| number(row).is_some()).collect();
    let numbers: Vec<u32> = rows.iter().filter_map(|row| number(row)).collect();
    assert_eq!(numbers, (1..=count).collect::<Vec<u32>>());
    for row in rows {
        assert!(!existing(row, &all).is_empty() || row.contains("| not tried"), "no test is named: {row}");
    }
}

#[test]
fn every_row_of_what_went_wrong_elsewhere_has_a_test_that_exists() {
    assert_rows("tests/LINKS.md", 10);
}

#[test]
fn every_hazard_of_stores_has_a_test_that_exists_or_says_that_it_has_none() {
    assert_rows("tests/STORES.md", 32);
}
