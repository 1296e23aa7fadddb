//! Compares the command line with the manual pages, in both directions.
use std::collections::BTreeSet;

use clap::CommandFactory;

/// Overview: the groups of commands, and the options of many of them.
const OVERVIEW: &str = include_str!("../../man/lockbox.1");
/// Pages that describe commands, by name.
const PAGES: [(&str, &str); 7] = [
    ("lockbox-mount", include_str!("../../man/lockbox-mount.1")),
    ("lockbox-files", include_str!("../../man/lockbox-files.1")),
    ("lockbox-key", include_str!("../../man/lockbox-key.1")),
    ("lockbox-share", include_str!("../../man/lockbox-share.1")),
    ("lockbox-snapshot", include_str!("../../man/lockbox-snapshot.1")),
    ("lockbox-backup", include_str!("../../man/lockbox-backup.1")),
    ("lockbox-check", include_str!("../../man/lockbox-check.1")),
];
/// Sections about options that several commands have: of all pages, and of one.
const SHARED: [&str; 2] = [".Ss Passphrase options", ".Ss KDF options"];
const SHARED_OF_PAGE: [(&str, &str); 2] =
    [("lockbox-files", ".Ss Pattern options"), ("lockbox-share", ".Ss Daemon options")];

/// One item of the list of commands.
struct Item {
    names: String,
    options: BTreeSet<String>,
    /// Commands below it.
    inner: BTreeSet<String>,
}

/// Returns the lines of a section, without its title.
fn section(page: &'static str, title: &str) -> Vec<&'static str> {
    let after = page.lines().skip_while(|line| *line != title).skip(1);
    let lines: Vec<_> = after.take_while(|line| !line.starts_with(".Ss ") && !line.starts_with(".Sh ")).collect();
    assert!(!lines.is_empty(), "the page has no section '{title}'");
    lines
}

/// Returns `-lazy` and `l` of `.It Fl -lazy , l Ar file`.
fn options(line: &str) -> impl Iterator<Item = String> {
    let flags = line.strip_prefix(".It Fl ").unwrap_or_default();
    let named = flags.split([',']).filter_map(|flag| flag.trim().trim_start_matches("Fl ").split(' ').next());
    named.filter(|flag| !flag.is_empty()).map(str::to_owned).collect::<Vec<_>>().into_iter()
}

fn items(page: &'static str) -> Vec<Item> {
    let mut found: Vec<Item> = Vec::new();
    let mut depth = 0;
    for line in section(page, ".Ss Commands") {
        depth += i32::from(line.starts_with(".Bl ")) - i32::from(line.starts_with(".El"));
        match (line.strip_prefix(".It Cm "), found.last_mut()) {
            (Some(names), _) if depth == 1 => {
                // `.It Cm receive Op Ar link`
                let names = [" Op ", " Ar "].iter().fold(names, |name, word| name.split(word).next().unwrap_or(name));
                found.push(Item { names: names.to_owned(), options: BTreeSet::new(), inner: BTreeSet::new() });
            }
            (Some(name), Some(item)) => {
                item.inner.extend(name.split([' ', ',']).filter(|name| !name.is_empty()).map(str::to_owned));
            }
            (None, Some(item)) => item.options.extend(options(line)),
            (_, None) => {}
        }
    }
    found
}

/// Long names, or short ones where there is no long one, and further long names.
fn of_command(command: &clap::Command) -> BTreeSet<String> {
    let automatic = ["help", "version"];
    let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let arguments = arguments.filter(|argument| !automatic.contains(&argument.get_id().as_str()));
    arguments
        .flat_map(|argument| {
            let name = argument.get_long().map(|long| format!("-{long}"));
            let further = argument.get_visible_aliases().unwrap_or_default().into_iter().map(|long| format!("-{long}"));
            name.or_else(|| argument.get_short().map(String::from)).into_iter().chain(further)
        })
        .collect()
}

/// Returns the commands that do something, with their full names.
fn commands() -> Vec<(String, clap::Command)> {
    fn add(command: &clap::Command, before: &str, all: &mut Vec<(String, clap::Command)>) {
        for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help" && !inner.is_hide_set()) {
            let name = format!("{before}{}", inner.get_name());
            if inner.has_subcommands() {
                add(inner, &format!("{name} "), all);
            }
            // `share` is a command without a subcommand too.
            if !inner.has_subcommands() || !of_command(inner).is_empty() {
                all.push((name, inner.clone()));
            }
        }
    }
    let mut all = Vec::new();
    let mut root = crate::Cli::command();
    root.build();
    add(&root, "", &mut all);
    all
}

/// Compares the commands of one page with the page, and returns their names.
fn compare(name: &str, page: &'static str, shared: &BTreeSet<String>, faults: &mut Vec<String>) -> BTreeSet<String> {
    let items = items(page);
    let own_sections = SHARED_OF_PAGE.iter().filter(|(of, _)| *of == name);
    let own: BTreeSet<String> = own_sections.flat_map(|(_, title)| section(page, title)).flat_map(options).collect();
    let synopsis = section(page, ".Sh SYNOPSIS");
    // The output of `--json` has a section of its own.
    let json: BTreeSet<&str> = section(page, ".Sh JSON OUTPUT")
        .iter()
        .filter_map(|line| line.strip_prefix(".It Cm "))
        .flat_map(|names| names.split(" , "))
        .collect();
    let mut described = BTreeSet::new();
    let mut used = BTreeSet::new();
    for (command_name, command) in commands() {
        // `key add` has an item of its own, or one within that of `key`.
        let (outer, inner) = command_name.split_once(' ').unwrap_or((&command_name, ""));
        let item = items.iter().find(|item| item.names == command_name).or_else(|| {
            items.iter().find(|item| item.names == outer && item.inner.contains(inner.split(' ').next().unwrap_or("")))
        });
        let in_synopsis =
            synopsis.iter().any(|line| line.strip_prefix(".Cm ").is_some_and(|names| names.starts_with(outer)));
        let Some(item) = item else { continue };
        if !in_synopsis {
            faults.push(format!("{name}: command '{command_name}' is not in the synopsis"));
        }
        let mut has = of_command(&command);
        if has.remove("-json") && !json.contains(command_name.as_str()) {
            faults.push(format!("{name}: the output of '{command_name} --json' is not described"));
        }
        let explained = |option: &&String| [&item.options, shared, &own].iter().any(|set| set.contains(*option));
        for option in has.iter().filter(|option| !explained(option)) {
            faults.push(format!("{name}: option -{option} of '{command_name}' is missing"));
        }
        if item.names == command_name {
            for option in item.options.difference(&has) {
                faults.push(format!("{name}: '{command_name}' has no option -{option}"));
            }
        }
        used.extend(has);
        described.insert(command_name);
    }
    for option in own.difference(&used) {
        faults.push(format!("{name}: no command of the page has the shared option -{option}"));
    }
    for item in &items {
        if !described.iter().any(|name| *name == item.names || name.starts_with(&format!("{} ", item.names))) {
            faults.push(format!("{name}: there is no command '{}'", item.names));
        }
    }
    for name_in_json in json.iter().filter(|name| !described.contains(**name)) {
        faults.push(format!("{name}: JSON OUTPUT has '{name_in_json}', which is not a command of the page"));
    }
    described
}

#[test]
fn every_command_and_option_is_in_one_manual_page_and_the_pages_have_no_others() {
    let shared: BTreeSet<String> = SHARED.iter().flat_map(|title| section(OVERVIEW, title)).flat_map(options).collect();
    let mut faults = Vec::new();
    let mut described = Vec::new();
    for (name, page) in PAGES {
        described.extend(compare(name, page, &shared, &mut faults));
    }
    for (name, _) in commands() {
        match described.iter().filter(|described| **described == name).count() {
            0 => faults.push(format!("no page has the command '{name}' in its list")),
            1 => {}
            _ => faults.push(format!("several pages have the command '{name}'")),
        }
    }
    let used: BTreeSet<String> = commands().iter().flat_map(|(_, command)| of_command(command)).collect();
    for option in shared.difference(&used) {
        faults.push(format!("no command has the shared option -{option}"));
    }
    assert!(commands().len() > 12 && shared.len() > 5, "too little was found");
    assert!(faults.is_empty(), "man/*.1 and the command line differ:\n{}", faults.join("\n"));
}

#[test]
fn the_overview_has_the_groups_of_the_help_and_names_the_page_of_each_command() {
    for (group, commands) in crate::help::GROUPS {
        let lines = section(OVERVIEW, &format!(".Ss {group}"));
        let listed: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix(".It Cm ")).collect();
        let wanted: Vec<&str> = commands.iter().copied().filter(|name| *name != "help").collect();
        assert_eq!(listed, wanted, "{group}");
        let pages: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix(".Xr ")).collect();
        assert_eq!(pages.len(), listed.len(), "{group}: one page for each command");
        for (command, page) in listed.iter().zip(pages) {
            let page = page.strip_suffix(" 1").unwrap();
            let (_, text) = PAGES.iter().find(|(name, _)| *name == page).unwrap_or_else(|| panic!("no page {page}"));
            let has = items(text).iter().any(|item| item.names.split(' ').next() == Some(command));
            assert!(has, "{page}(1) does not describe {command}");
        }
    }
}

#[test]
fn every_page_of_section_1_is_compared() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../man");
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let found: BTreeSet<String> = names.filter_map(|name| name.strip_suffix(".1").map(str::to_owned)).collect();
    let compared = PAGES.iter().map(|(name, _)| *name).chain(["lockbox"]);
    assert_eq!(found, compared.map(str::to_owned).collect::<BTreeSet<String>>());
}
