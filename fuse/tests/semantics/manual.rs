//! Compares the manual page with the doc comments of the tests, in both directions.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Sections that promise nothing.
const FREE: [&str; 3] = ["NAME", "DESCRIPTION", "SEE ALSO"];

#[test]
fn the_manual_page_and_the_tests_say_the_same() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(here.join("../man/lockbox-semantics.7")).unwrap();
    let written: Vec<String> = paragraphs(&page);
    let mut proved = Vec::new();
    for file in fs::read_dir(here.join("tests/semantics")).unwrap() {
        let path = file.unwrap().path();
        if path.file_name().is_some_and(|name| name != "manual.rs") {
            proved.extend(documented(&fs::read_to_string(&path).unwrap(), &path));
        }
    }
    let (written, proved): (BTreeSet<_>, BTreeSet<_>) = (written.into_iter().collect(), proved.into_iter().collect());
    let unproved: Vec<_> = written.difference(&proved).collect();
    let unwritten: Vec<_> = proved.difference(&written).collect();
    assert!(unproved.is_empty(), "paragraphs without a test:\n{unproved:#?}\nand without a paragraph:\n{unwritten:#?}");
    assert!(unwritten.is_empty(), "tests without a paragraph:\n{unwritten:#?}");
    assert!(written.len() > 30, "only {} paragraphs were found", written.len());
}

/// The paragraphs of the sections that promise something, without markup.
fn paragraphs(page: &str) -> Vec<String> {
    let (mut found, mut words, mut section) = (Vec::new(), Vec::new(), String::new());
    for line in page.lines().chain([".Pp"]) {
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        match name {
            ".Sh" | ".Ss" | ".Pp" => {
                let paragraph = std::mem::take(&mut words).join(" ");
                if !paragraph.is_empty() && !section.is_empty() && !FREE.contains(&section.as_str()) {
                    found.push(paragraph);
                }
                if name == ".Sh" {
                    section = rest.to_owned();
                }
            }
            ".Xr" => {
                let mut rest = rest.split(' ');
                let (page, number) = (rest.next().unwrap(), rest.next().unwrap());
                words.push(format!("{page}({number}){}", rest.collect::<String>()));
            }
            _ if name.starts_with('.') => words.push(join(rest)),
            // A text line that begins with a dot is marked.
            _ => words.push(line.replace("\\&", "").replace("\\e", "\\")),
        }
    }
    found
}

/// Arguments of a macro: punctuation sticks to what stands before it.
fn join(arguments: &str) -> String {
    arguments.split(' ').fold(String::new(), |mut text, word| {
        if !text.is_empty() && ![".", ",", ";", ":", ")"].contains(&word) {
            text.push(' ');
        }
        text + word
    })
}

/// The doc comments of the tests of a file.
fn documented(source: &str, path: &Path) -> Vec<String> {
    let (mut found, mut comment) = (Vec::new(), Vec::new());
    for line in source.lines() {
        if let Some(text) = line.strip_prefix("///") {
            comment.push(text.trim());
        } else if line == "#[test]" {
            assert!(!comment.is_empty(), "a test without its paragraph in {}", path.display());
            found.push(std::mem::take(&mut comment).join(" ").replace('`', ""));
        } else {
            comment.clear();
        }
    }
    found
}
