//! Language ratchet: counts phrases that `docs/STYLE.md` forbids, per crate and document, and fails when a count rises.
//!
//! `tests/language/ratchet.tsv` holds the counts. They may only fall: `RATCHET=write cargo test --test language` records lower ones.

#![allow(clippy::unwrap_used)] // a failed step fails the test

#[path = "../layering/text.rs"]
#[allow(dead_code, reason = "the layering test uses the rest")]
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Counts by scope (crate or document) and measure, with the places of each.
type Counts = BTreeMap<(String, &'static str), Vec<String>>;

const CRATES: [&str; 10] = [
    "src",
    "cli/src",
    "fuse/src",
    "host/src",
    "remote/src",
    "terminal/src",
    "share/protocol/src",
    "share/client/src",
    "share/server/src",
    "bench/src",
];
const WHO: [&str; 7] = ["who", "whoever", "whom", "nobody", "somebody", "everybody", "anybody"];
const VAGUE: [&str; 13] = [
    "who",
    "whoever",
    "whom",
    "whose",
    "nobody",
    "somebody",
    "everybody",
    "anybody",
    "what",
    "whatever",
    "elsewhere",
    "beside",
    "anew",
];
const VAGUE_PAIRS: [[&str; 2]; 8] = [
    ["that", "which"],
    ["those", "who"],
    ["those", "that"],
    ["those", "of"],
    ["is", "told"],
    ["are", "told"],
    ["be", "told"],
    ["was", "told"],
];
/// Stems of files that name no type and no mechanism.
const STEMS: [&str; 51] = [
    "given",
    "kept",
    "made",
    "told",
    "shown",
    "living",
    "near",
    "beside",
    "elsewhere",
    "place",
    "former",
    "spare",
    "working",
    "lacking",
    "built",
    "lost",
    "seen",
    "asked",
    "wanted",
    "point",
    "words",
    "lent",
    "site",
    "held",
    "left",
    "moment",
    "moments",
    "pace",
    "ending",
    "task",
    "answers",
    "hidden",
    "callers",
    "choice",
    "digits",
    "finding",
    "joining",
    "laying",
    "laid",
    "foresee",
    "vouch",
    "shortage",
    "unnamed",
    "medium",
    "ahead",
    "handing",
    "sending",
    "gathering",
    "reaching",
    "looking",
    "telling",
];
/// Types that each program has one of.
const COMMON_TYPES: [&str; 4] = ["Args", "Command", "Result", "Error"];
const MAX_DOC_COLUMNS: usize = 100;
const MAX_SUBJECT: usize = 72;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn counts_of_forbidden_phrases_only_fall() {
    let counts = count_all();
    let path = root().join("tests/language/ratchet.tsv");
    let recorded = parse_ratchet(&fs::read_to_string(&path).unwrap_or_default());
    if std::env::var_os("RATCHET").is_some_and(|mode| mode == "write") {
        let lines = counts.iter().map(|((scope, measure), places)| {
            let limit = recorded.get(&(scope.clone(), measure.to_string())).copied().unwrap_or(usize::MAX);
            format!("{scope}\t{measure}\t{}\n", places.len().min(limit))
        });
        fs::write(&path, lines.collect::<String>()).unwrap();
        return;
    }
    let mut faults = Vec::new();
    for ((scope, measure), places) in &counts {
        let limit = recorded.get(&(scope.clone(), measure.to_string())).copied().unwrap_or(0);
        if places.len() > limit {
            let shown: Vec<_> = places.iter().take(40).map(String::as_str).collect();
            faults.push(format!(
                "{scope}: {} {measure}, at most {limit}; all of them:\n  {}",
                places.len(),
                shown.join("\n  ")
            ));
        } else if places.len() < limit {
            faults.push(format!(
                "{scope}: {} {measure}, fewer than the {limit} recorded; record it with RATCHET=write",
                places.len()
            ));
        }
    }
    for ((scope, measure), limit) in &recorded {
        if !counts.keys().any(|(found, of)| found == scope && of == measure) {
            faults.push(format!("{scope}: no {measure} left of {limit}; record it with RATCHET=write"));
        }
    }
    assert!(faults.is_empty(), "docs/STYLE.md is violated in {} places:\n{}", faults.len(), faults.join("\n"));
}

/// Commits that a branch adds; in a clone of main alone there are none.
#[test]
fn commit_subjects_are_short_and_imperative() {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root()).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(base) = git(&["merge-base", "HEAD", "origin/main"]) else {
        println!("no remote branch 'main' to compare with, so no subjects were read");
        return;
    };
    let subjects = git(&["log", "--no-merges", "--format=%s", &format!("{base}..HEAD")]).unwrap();
    let faults: Vec<_> =
        subjects.lines().filter_map(|subject| Some(format!("{subject:?}: {}", subject_fault(subject)?))).collect();
    assert!(faults.is_empty(), "commit subjects:\n{}", faults.join("\n"));
}

fn subject_fault(subject: &str) -> Option<String> {
    if subject.chars().count() > MAX_SUBJECT {
        return Some(format!("longer than {MAX_SUBJECT} characters"));
    }
    let Some((scope, action)) = subject.split_once(": ") else {
        return Some("not of the form 'scope: imperative'".into());
    };
    if scope.is_empty() || scope.len() > 24 {
        return Some("the scope is not a short name".into());
    }
    let first = words_of(action).into_iter().next().unwrap_or_default();
    if first.is_empty()
        || VAGUE.contains(&first.as_str())
        || ["that", "where", "whether", "how"].contains(&first.as_str())
    {
        return Some(format!("'{first}' is not a verb in the imperative"));
    }
    (first.ends_with("ing") && first != "bring"
        || first.ends_with("ed") && !["need", "seed", "feed", "embed", "speed"].contains(&first.as_str()))
    .then(|| format!("'{first}' is not a verb in the imperative"))
}

fn parse_ratchet(text: &str) -> BTreeMap<(String, String), usize> {
    let line = |line: &str| {
        let mut cells = line.split('\t');
        let (scope, measure) = (cells.next().unwrap().to_owned(), cells.next().unwrap().to_owned());
        ((scope, measure), cells.next().unwrap().parse().unwrap())
    };
    text.lines().map(line).collect()
}

fn count_all() -> Counts {
    let mut counts = Counts::new();
    let mut types: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut files = 0;
    for scope in CRATES {
        for path in files_below(&root().join(scope), "rs") {
            let shown = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
            if !is_test(&shown) {
                files += 1;
                count_source(scope, &shown, &fs::read_to_string(&path).unwrap(), &mut counts, &mut types);
            }
        }
    }
    assert!(files > 50, "only {files} sources found");
    for (name, paths) in types {
        if paths.len() > 1 && !COMMON_TYPES.contains(&name.as_str()) {
            let places = paths.into_iter().collect::<Vec<_>>().join(", ");
            counts
                .entry(("workspace".into(), "visible type names defined twice"))
                .or_default()
                .push(format!("{name}: {places}"));
        }
    }
    let mut documents = files_below(root(), "md");
    documents.extend(fs::read_dir(root().join("man")).unwrap().map(|entry| entry.unwrap().path()));
    assert!(documents.len() > 10, "only {} documents found", documents.len());
    for path in documents {
        let shown = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            for word in words_of(line).iter().filter(|word| WHO.contains(&word.as_str())) {
                let place = format!("{shown}:{}: {word}", number + 1);
                counts.entry((shown.clone(), "words of the who-family")).or_default().push(place);
            }
        }
    }
    counts
}

fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("tests.rs") || path.contains("/fuzzing")
}

/// Files below a directory, without those that are built or fetched.
fn files_below(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut entries: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "node_modules", "staged", "results"].contains(&name.as_str()) {
                found.extend(files_below(&path, extension));
            }
        } else if path.extension().is_some_and(|of| of == extension) && name != "STYLE.md" {
            found.push(path);
        }
    }
    found
}

fn count_source(
    scope: &str,
    path: &str,
    source: &str,
    counts: &mut Counts,
    types: &mut BTreeMap<String, BTreeSet<String>>,
) {
    let mut add =
        |measure: &'static str, place: String| counts.entry((scope.to_owned(), measure)).or_default().push(place);
    let source = source.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
    for doc in docs(source) {
        let measure = if doc.of_module { "vague module docs" } else { "vague item docs" };
        if is_vague(&doc.text) {
            add(measure, format!("{path}:{}: {}", doc.line, doc.text));
        }
    }
    for (number, line) in source.lines().enumerate() {
        let text = line.trim_start();
        if (text.starts_with("///") || text.starts_with("//!")) && line.chars().count() > MAX_DOC_COLUMNS {
            add("doc lines over 100 columns", format!("{path}:{}", number + 1));
        }
    }
    for literal in
        text::literals(source).into_iter().filter(|literal| words_of(literal).len() >= 3 && is_vague(literal))
    {
        add("vague messages", format!("{path}: {literal}"));
    }
    if STEMS.contains(&stem(path).as_str()) {
        add("file names that name nothing", path.to_owned());
    }
    for name in visible_types(&text::without_tests(&text::blank(source))) {
        types.entry(name).or_default().insert(path.to_owned());
    }
}

/// The name of a file, or of its directory when it is the root of a module.
fn stem(path: &str) -> String {
    let path = Path::new(path);
    let of = |path: &Path| path.file_stem().unwrap().to_string_lossy().into_owned();
    if of(path) == "mod" { of(path.parent().unwrap()) } else { of(path) }
}

struct Doc {
    line: usize,
    of_module: bool,
    text: String,
}

/// Doc comments, each block one text.
fn docs(source: &str) -> Vec<Doc> {
    let mut found: Vec<Doc> = Vec::new();
    let mut open = None;
    for (number, line) in source.lines().enumerate() {
        let line = line.trim_start();
        let kind = ["///", "//!"].into_iter().find(|mark| line.starts_with(mark));
        if let Some(mark) = kind {
            if open != kind {
                found.push(Doc { line: number + 1, of_module: mark == "//!", text: String::new() });
            }
            let text = &mut found.last_mut().unwrap().text;
            text.push_str(line[mark.len()..].trim());
            text.push(' ');
        }
        open = kind;
    }
    found
}

/// Names of `pub` and `pub(...)` types.
fn visible_types(code: &str) -> Vec<String> {
    let name_after = |line: &str| {
        let rest = line.trim_start().strip_prefix("pub")?;
        let rest = if rest.starts_with('(') { rest.split_once(')')?.1 } else { rest };
        let mut tokens = rest.split(|c| !text::is_name(c)).filter(|token| !token.is_empty());
        let kind = tokens.next()?;
        ["struct", "enum", "trait", "type"].contains(&kind).then(|| tokens.next().map(str::to_owned))?
    };
    code.lines().filter_map(name_after).collect()
}

fn words_of(text: &str) -> Vec<String> {
    let words =
        text.split(|c: char| !c.is_ascii_alphabetic() && c != '\'').filter(|word| word.len() > 1 || *word == "a");
    words.map(str::to_ascii_lowercase).collect()
}

fn is_vague(text: &str) -> bool {
    let words = words_of(text);
    words.iter().any(|word| VAGUE.contains(&word.as_str()))
        || words.windows(2).any(|pair| VAGUE_PAIRS.iter().any(|vague| pair[0] == vague[0] && pair[1] == vague[1]))
}

/// The measures themselves.
mod rules {
    use super::*;

    fn counted(source: &str) -> Vec<(&'static str, usize)> {
        let mut counts = Counts::new();
        count_source("src", "src/given.rs", source, &mut counts, &mut BTreeMap::new());
        counts.into_iter().map(|((_, measure), places)| (measure, places.len())).collect()
    }

    #[test]
    fn each_measure_counts() {
        assert_eq!(counted("//! Parses.\n"), [("file names that name nothing", 1)]);
        let source = format!(
            "//! What it does.\n/// Who asks,\n/// and what.\nfn a() {{ b(\"nobody is here now\"); }}\n/// {}\nfn c() {{}}\n\
             \n#[cfg(test)]\nmod tests {{\n/// What.\n}}\n",
            "x".repeat(100)
        );
        let expected = [
            ("doc lines over 100 columns", 1),
            ("file names that name nothing", 1),
            ("vague item docs", 1),
            ("vague messages", 1),
            ("vague module docs", 1),
        ];
        assert_eq!(counted(&source), expected);
    }

    #[test]
    fn phrases_are_found_as_words() {
        for vague in ["the one is told", "Those of it", "Elsewhere.", "for whom"] {
            assert!(is_vague(vague), "{vague}");
        }
        for clear in ["somewhat whole", "toldyou those", "Returns the key"] {
            assert!(!is_vague(clear), "{clear}");
        }
    }

    #[test]
    fn types_that_leave_their_module_are_found() {
        let code = "pub struct A;\n  pub(crate) enum B {}\nstruct C;\npub(in crate::x) type D = u8;\npub fn e() {}\n";
        assert_eq!(visible_types(code), ["A", "B", "D"]);
    }

    #[test]
    fn subjects_are_judged() {
        for good in ["fs: commit accepted data before close", "tests: run umount-all serially", "a/b: feed the dog"] {
            assert_eq!(subject_fault(good), None, "{good}");
        }
        for bad in [
            "Commit it",
            "fs: Committing it",
            "fs: what is said",
            "fs: fixed it",
            "x: ",
            &format!("fs: do {}", "y".repeat(72)),
        ] {
            assert!(subject_fault(bad).is_some(), "{bad}");
        }
    }
}
