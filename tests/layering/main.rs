//! Reads the sources and ARCHITECTURE.md, and fails on an import, a name or a file that the project's rules forbid.

#![allow(clippy::unwrap_used)] // a failed step fails the test

mod circles;
mod paths;
mod reach;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use paths::Modules;
use text::{TEST_MARK, blank, is_name, is_of_a_program, literals, without_tests};

/// Modules of the table and what each may import.
type Table = BTreeMap<String, BTreeSet<String>>;
/// Sources as paths below the repository with their text.
type Sources = BTreeMap<PathBuf, String>;

const MAX_LINES: usize = 800;
/// Words in names that say nothing about an item's job.
const BANNED_NAMES: [&str; 3] = ["helper", "util", "common"];
/// Traces of the place where a source was written instead of the product that it belongs to.
const FOREIGN: [&str; 8] =
    ["/home/", "/root/", "/users/", "/work/", ".internal", ".corp.", "co-authored-by", "signed-off-by"];
const ITEM_WORDS: [&str; 9] = ["fn", "struct", "enum", "union", "trait", "type", "mod", "const", "static"];
/// What fuzzers enter by is no part of a program, and reaches into every layer as tests do; the other rules hold for it.
const FUZZ_MARK: &str = "#[cfg(any(test, debug_assertions))]";

/// A crate: the root of its sources, its row of the table, and what other crates call it.
struct Crate {
    root: &'static str,
    row: &'static str,
    called: &'static str,
}

const fn of(root: &'static str, row: &'static str, called: &'static str) -> Crate {
    Crate { root, row, called }
}

/// Programs follow the library whose directory they lie in. The modules of `src` have rows of their own.
const CRATES: [Crate; 13] = [
    of("src", "", "lockbox"),
    of("cli/src", "cli", ""),
    of("fuse/src", "fuse", "lockbox_fuse"),
    of("fuse/src/bin", "fuse", ""),
    of("host/src", "host", "lockbox_host"),
    of("remote/src", "remote", "lockbox_remote"),
    of("terminal/src", "terminal", "lockbox_terminal"),
    of("share/protocol/src", "share/protocol", "lockbox_share_protocol"),
    of("share/client/src", "share/client", "lockbox_share_client"),
    of("share/server/src", "share/server", "lockbox_share"),
    of("share/server/src/bin", "share/server", ""),
    of("bench/src/scenarios", "bench", ""),
    of("bench/src/ceiling", "bench", ""),
];

/// Ways through a layer that are still there, as of 2026-11-23, and may only become fewer: take off what is mended.
const WAYS: [&str; 1] = ["fs: '.blocks_unless_busy' leads to pager"];

/// Upper bound of the `pub` items of the library, re-exports and modules left out; it may only fall.
const MAX_PUBLIC: usize = 390;

/// All sources of the crates.
fn all() -> Sources {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Sources::new();
    for of in &CRATES {
        read_sources(root, &root.join(of.root), &mut sources);
    }
    assert!(sources.len() > 50, "only {} sources found", sources.len());
    sources
}

fn table() -> Table {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    parse_table(&fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap())
}

#[test]
fn sources_keep_to_the_import_table_and_the_naming_rules() {
    let faults = faults(&table(), &all());
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// A module that has files of its own is the `mod.rs` of their directory, which then holds all of it.
#[test]
fn a_room_is_one_directory() {
    let (root, mut sources) = (Path::new(env!("CARGO_MANIFEST_DIR")), all());
    read_sources(root, &root.join("share"), &mut sources);
    read_sources(root, &root.join("bench/src"), &mut sources);
    let beside: Vec<_> = sources.keys().filter(|path| root.join(path.with_extension("")).is_dir()).collect();
    assert!(beside.is_empty(), "beside the directories of their names: {beside:?}");
}

#[test]
fn the_files_of_a_module_need_each_other_in_no_circle() {
    let sources = all();
    let found = CRATES.iter().flat_map(|of| circles::circles(of.root, &Modules::of(of.root, &sources)));
    assert_eq!(found.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn no_layer_is_reached_through_another() {
    let sources = all();
    let (table, library) = (table(), Modules::of("src", &sources));
    let mut found = reach::ways_taken(&table, &library, &library, "", &BTreeSet::new());
    let others = CRATES.iter().filter(|of| !of.row.is_empty()).map(|of| (of.row, Modules::of(of.root, &sources)));
    let others: Vec<_> = others.collect();
    let elsewhere = others.iter().flat_map(|(_, modules)| reach::names(modules)).collect();
    for (row, modules) in &others {
        found.extend(reach::ways_taken(&table, &library, modules, row, &elsewhere));
    }
    assert_eq!(found, WAYS.map(String::from).into());
}

/// An item is public because a program uses it; the bound falls with the number.
#[test]
fn the_library_has_no_more_public_items_than_before() {
    let sources = all();
    let is_public = |line: &&str| {
        let mut words = line.split_whitespace();
        words.next() == Some("pub") && words.next().is_some_and(|kind| ITEM_WORDS.contains(&kind) && kind != "mod")
    };
    let library = Modules::of("src", &sources);
    let found: usize = library.all().map(|(_, code)| code.lines().filter(is_public).count()).sum();
    assert_eq!(found, MAX_PUBLIC, "set MAX_PUBLIC to the lower number, or keep the new item `pub(crate)`");
}

fn read_sources(root: &Path, directory: &Path, sources: &mut Sources) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_sources(root, &path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.insert(path.strip_prefix(root).unwrap().into(), fs::read_to_string(&path).unwrap());
        }
    }
}

fn parse_table(architecture: &str) -> Table {
    let names = |cell: &str| -> BTreeSet<String> {
        cell.split(',').map(|name| name.trim().trim_matches('`').to_owned()).filter(|name| name != "nothing").collect()
    };
    let rows = architecture.lines().skip_while(|line| !line.starts_with("| module | may import |")).skip(2);
    let mut table = Table::new();
    for row in rows.take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        assert_eq!(cells.len(), 2, "row of the import table: {row}");
        for module in names(cells[0]) {
            table.insert(module, names(cells[1]));
        }
    }
    assert!(!table.is_empty(), "ARCHITECTURE.md has no import table");
    table
}

/// Everything that is wrong, one sentence each.
fn faults(table: &Table, sources: &Sources) -> Vec<String> {
    let mut faults = Vec::new();
    let tests = test_modules(sources, TEST_MARK);
    let fuzzing = test_modules(sources, FUZZ_MARK);
    let mut seen = BTreeSet::new();
    for (path, text) in sources {
        let shown = path.display();
        let lower = text.to_lowercase();
        for word in FOREIGN.iter().filter(|word| lower.contains(**word)) {
            faults.push(format!("{shown}: contains '{word}', which belongs to a place and not to the product"));
        }
        if is_below(path, &tests) {
            continue;
        }
        let lines = text.lines().count();
        if lines > MAX_LINES {
            faults.push(format!("{shown}: {lines} lines, at most {MAX_LINES} are allowed"));
        }
        let opening = text.lines().next().unwrap_or_default();
        if opening.strip_prefix("//! ").is_none_or(|sentence| sentence.len() <= 5) {
            faults.push(format!("{shown}: the first line is no sentence that says the file's job"));
        }
        if path.starts_with("src") {
            let remedies = literals(text).into_iter().filter(|literal| is_of_a_program(literal));
            faults.extend(remedies.map(|literal| {
                format!(
                    "{shown}: {literal} is of a program's user interface, and the program that speaks is not known here"
                )
            }));
        }
        let code = without_tests(&blank(text));
        for name in item_names(&code).into_iter().chain(path.file_stem().map(|stem| stem.to_string_lossy().into())) {
            for banned in words(&name).iter().filter(|word| is_banned(word)) {
                faults.push(format!("{shown}: the name '{name}' uses the word '{banned}'"));
            }
        }
        let Some(module) = module_of(path) else { continue };
        let Some(allowed) = table.get(&module) else {
            faults.push(format!("{shown}: module '{module}' is not in the import table"));
            continue;
        };
        for import in imports(path, &code).into_iter().filter(|_| !is_below(path, &fuzzing)) {
            if import != module && !allowed.contains(&import) {
                faults.push(format!("{shown}: '{module}' may not import '{import}'"));
            }
        }
        seen.insert(module);
    }
    let gone = table.keys().filter(|row| !seen.contains(*row));
    faults.extend(gone.map(|row| format!("import table: no module '{row}' exists")));
    faults
}

/// Paths (without extension) of the modules that have this mark.
fn test_modules(sources: &Sources, mark: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for (path, text) in sources {
        let code = blank(text);
        for rest in code.split(mark).skip(1) {
            let item = rest.split([';', '{']).next().unwrap_or_default();
            let declared = item.split_once("mod ").filter(|_| rest[item.len()..].starts_with(';'));
            found.extend(declared.map(|(_, name)| home(path).join(name.trim())));
        }
    }
    found
}

/// Whether a file is that of a module, or of one below it.
fn is_below(path: &Path, modules: &[PathBuf]) -> bool {
    modules.iter().any(|of| path.starts_with(of) || path.with_extension("") == *of)
}

/// The directory in which the child modules of a file lie.
fn home(path: &Path) -> PathBuf {
    match path.file_stem().and_then(|stem| stem.to_str()) {
        Some("mod" | "lib" | "main") => path.parent().unwrap_or(Path::new("")).into(),
        _ => path.with_extension(""),
    }
}

/// The row of the table that a file belongs to; none for the root of the library, which only lists modules.
fn module_of(path: &Path) -> Option<String> {
    let of = CRATES.iter().filter(|of| path.starts_with(of.root)).max_by_key(|of| of.root.len())?;
    let top =
        || Some(path.strip_prefix(of.root).ok()?.iter().next()?.to_string_lossy().trim_end_matches(".rs").to_owned());
    if of.row.is_empty() { top().filter(|top| top != "lib") } else { Some(of.row.into()) }
}

/// Rows of the table that the code names: modules of the library, and other crates.
fn imports(path: &Path, code: &str) -> BTreeSet<String> {
    let program = !path.starts_with("src");
    let mut prefixes = vec![if program { "lockbox::" } else { "crate::" }.to_owned()];
    let names_crate = |of: &Crate| {
        let path = format!("{}::", of.called);
        code.match_indices(&path).any(|(at, _)| !code[..at].ends_with(|c| is_name(c) || c == ':'))
    };
    let crates = CRATES.iter().filter(|of| !of.row.is_empty() && !of.called.is_empty() && names_crate(of));
    let depth = home(path).components().count().saturating_sub(1);
    if !program && depth > 0 {
        // `super` often enough is the crate's root as well.
        prefixes.push("super::".repeat(depth));
    }
    let mut found = BTreeSet::new();
    for prefix in &prefixes {
        for (at, _) in code.match_indices(prefix.as_str()) {
            if !code[..at].ends_with(|c| is_name(c) || c == ':') {
                found.extend(first_names(&code[at + prefix.len()..]));
            }
        }
    }
    // The root passes on two names of `error`.
    let origin = |name: String| if matches!(name.as_str(), "Error" | "Result") { "error".into() } else { name };
    found.into_iter().map(origin).chain(crates.map(|of| of.row.to_owned())).collect()
}

/// The first name of a path, or of each path in a group: `{a::b, c::{d, e}}` gives a and c.
fn first_names(path: &str) -> Vec<String> {
    let name = |text: &str| text.trim_start().chars().take_while(|&c| is_name(c)).collect::<String>();
    let Some(group) = path.trim_start().strip_prefix('{') else { return vec![name(path)] };
    let mut names = vec![name(group)];
    let mut depth = 1;
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => names.push(name(&group[at + 1..])),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Names of the items that the code declares.
fn item_names(code: &str) -> Vec<String> {
    let tokens: Vec<&str> = code.split(|c| !is_name(c)).filter(|token| !token.is_empty()).collect();
    let declared = tokens.windows(2).filter(|pair| ITEM_WORDS.contains(&pair[0]) && !ITEM_WORDS.contains(&pair[1]));
    declared.map(|pair| pair[1].to_owned()).collect()
}

/// Splits `snake_case` and `CamelCase` into lower-case words.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = '_';
    for c in name.chars() {
        if c == '_' || (c.is_uppercase() && !before.is_uppercase()) {
            words.push(String::new());
        }
        if c != '_' {
            words.last_mut().unwrap().extend(c.to_lowercase());
        }
        before = c;
    }
    words.retain(|word| !word.is_empty());
    words
}

fn is_banned(word: &str) -> bool {
    let banned = |word: &str| BANNED_NAMES.contains(&word);
    banned(word) || word.strip_suffix('s').is_some_and(banned)
}

/// The rules themselves: each bad source must be found out, each good one let through.
mod rules {
    use super::*;

    const TABLE: &str =
        "text\n\n| module | may import |\n|---|---|\n| `low`, `fuse`, `host` | nothing |\n| `high` | `low` |\n\n";
    const GOOD: &str = "//! Does one thing that can be said in a sentence.\n";

    fn sources(more: &[(&str, &str)]) -> Sources {
        let base = [("src/low.rs", ""), ("src/high/mod.rs", ""), ("fuse/src/lib.rs", ""), ("host/src/lib.rs", "")];
        base.iter().chain(more).map(|(path, code)| (PathBuf::from(path), format!("{GOOD}{code}"))).collect()
    }

    fn check(path: &str, code: &str) -> Vec<String> {
        faults(&parse_table(TABLE), &sources(&[(path, code)]))
    }

    #[track_caller]
    fn refused(path: &str, code: &str, expected: &str) {
        let faults = check(path, code);
        assert!(faults.len() == 1 && faults[0].contains(expected), "{code:?} gave {faults:?}");
    }

    #[track_caller]
    fn accepted(path: &str, code: &str) {
        assert_eq!(check(path, code), Vec::<String>::new(), "{code:?}");
    }

    #[test]
    fn an_import_outside_the_table_is_found() {
        refused("src/low.rs", "use crate::high::Thing;", "'low' may not import 'high'");
        refused("src/low.rs", "use crate::{low::A, high::{B, C}};", "'low' may not import 'high'");
        refused("src/low.rs", "fn f() { crate::high::g() }", "'low' may not import 'high'");
        refused("src/low.rs", "use super::high::Thing;", "'low' may not import 'high'");
        refused("src/low/inner.rs", "use super::super::high;", "'low' may not import 'high'");
        refused("fuse/src/lib.rs", "use lockbox::high::Thing;", "'fuse' may not import 'high'");
        refused("fuse/src/lib.rs", "fn f() { lockbox_host::ask() }", "'fuse' may not import 'host'");
        refused("src/low.rs", "use lockbox_host::ask;", "'low' may not import 'host'");
        accepted("src/high/part.rs", "use crate::low::Thing; use super::other; use crate::high::X;");
        accepted("src/low/inner.rs", "use super::high; pub(crate) fn f() {}");
    }

    #[test]
    fn comments_strings_and_tests_do_not_count_as_imports() {
        accepted("src/low.rs", "// use crate::high;\n/// [`crate::high`]\nconst A: &str = \"use crate::high\";");
        accepted("src/low.rs", "const A: &str = r#\"crate::high \"x\" \"#; const B: char = '\"'; // crate::high");
        accepted(
            "src/low.rs",
            "fn f<'a>(x: &'a u8) {}\n#[cfg(test)]\nmod tests { use crate::high::{A, B}; fn f() {} }",
        );
        accepted("src/low.rs", "#[cfg(test)]\nmod a { #[cfg(test)]\nuse x::{Y}; fn f() { crate::high::g() } }");
        refused("src/low.rs", "#[cfg(test)]\nmod tests { fn f() {} }\nuse crate::high;", "may not import 'high'");
        refused("src/low.rs", "#[cfg(test)]\nmod tests;\nuse crate::high;", "may not import 'high'");
    }

    #[test]
    fn files_of_test_modules_are_exempt() {
        let table = parse_table(TABLE);
        let tests = ("src/low/tests.rs", "use crate::high;");
        assert_eq!(
            faults(&table, &sources(&[("src/low.rs", "#[cfg(test)]\nmod tests;"), tests])),
            Vec::<String>::new()
        );
        let marked = sources(&[("src/low.rs", "#[cfg(any(test, debug_assertions))]\npub mod tests;"), tests]);
        assert_eq!(faults(&table, &marked), Vec::<String>::new());
        assert_eq!(faults(&table, &sources(&[("src/low.rs", "mod tests;"), tests])).len(), 1);
    }

    #[test]
    fn modules_and_rows_without_each_other_are_found() {
        refused("src/stray.rs", "", "module 'stray' is not in the import table");
        let table = parse_table(&TABLE.replace("| `high` |", "| `high`, `gone` |"));
        assert_eq!(faults(&table, &sources(&[])), ["import table: no module 'gone' exists"]);
    }

    #[test]
    fn names_without_meaning_are_found() {
        refused("src/low.rs", "struct PageHelper;", "uses the word 'helper'");
        refused("src/low.rs", "fn split_utils() {}", "uses the word 'utils'");
        refused("src/low.rs", "mod utils { }", "uses the word 'utils'");
        refused("src/high/common.rs", "", "uses the word 'common'");
        accepted("src/low.rs", "fn f(x: &[u8]) { for part in x.chunks(4) {} }");
    }

    #[test]
    fn long_files_and_files_without_a_purpose_are_found() {
        refused("src/low.rs", &"\n".repeat(MAX_LINES), "801 lines");
        accepted("src/low.rs", &"\n".repeat(MAX_LINES - 1));
        let mut sources = sources(&[]);
        sources.insert("src/low.rs".into(), "fn main() {}".into());
        let found = faults(&parse_table(TABLE), &sources);
        assert!(found.len() == 1 && found[0].contains("first line"), "{found:?}");
    }

    #[test]
    fn options_and_commands_in_the_texts_of_the_library_are_found() {
        for text in [
            "use --drop 3",
            "(--slot)",
            "mount it with -o accept-older",
            "run 'lockbox passwd' first",
            "try \\\n --force",
        ] {
            refused("src/low.rs", &format!("const TEXT: &str = \"{text}\";"), "user interface");
            accepted("fuse/src/lib.rs", &format!("const TEXT: &str = \"{text}\";"));
        }
        accepted("src/low.rs", "// as --drop does\nconst TEXT: &str = \"-----BEGIN a -- b, x--y\";");
        accepted("src/low.rs", "\n#[cfg(test)]\nmod tests { const TEXT: &str = \"--drop\"; }");
    }

    #[test]
    fn traces_of_a_place_are_found() {
        refused("src/low.rs", "const PATH: &str = \"/home/somebody/lockbox\";", "'/home/'");
        refused("src/low.rs", "// built under /root/lockbox", "'/root/'");
    }
}
