//! Compares the command line with the manual page, in both directions.
use std::collections::BTreeSet;

use clap::CommandFactory;

const PAGE: &str = include_str!("../../man/lockbox.1");
/// Sections about options that several commands have.
const SHARED: [&str; 4] = [".Ss Passphrase options", ".Ss Pattern options", ".Ss KDF options", ".Ss Daemon options"];

/// One item of the list of commands.
struct Item {
    names: String,
    options: BTreeSet<String>,
    /// Commands below it.
    inner: BTreeSet<String>,
}

/// Returns the lines of a section, without its title.
fn section(title: &str) -> Vec<&'static str> {
    let after = PAGE.lines().skip_while(|line| *line != title).skip(1);
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

fn items() -> Vec<Item> {
    let mut found: Vec<Item> = Vec::new();
    let mut depth = 0;
    for line in section(".Ss Commands").into_iter().chain(section(".Ss One-time links")) {
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

#[test]
fn every_command_and_option_is_in_the_manual_page_and_the_page_has_no_others() {
    let items = items();
    let shared: BTreeSet<String> = SHARED.iter().flat_map(|title| section(title)).flat_map(options).collect();
    let synopsis = section(".Sh SYNOPSIS");
    // The output of `--json` has a section of its own.
    let json: BTreeSet<&str> = section(".Sh JSON OUTPUT")
        .iter()
        .filter_map(|line| line.strip_prefix(".It Cm "))
        .flat_map(|names| names.split(" , "))
        .collect();
    let mut faults = Vec::new();
    let mut used = BTreeSet::new();
    for (name, command) in commands() {
        // `key add` has an item of its own, or one within that of `key`.
        let (outer, inner) = name.split_once(' ').unwrap_or((&name, ""));
        let item = items.iter().find(|item| item.names == name).or_else(|| {
            items.iter().find(|item| item.names == outer && item.inner.contains(inner.split(' ').next().unwrap_or("")))
        });
        let Some(item) = item else {
            faults.push(format!("command '{name}' is not in the list of commands"));
            continue;
        };
        if !synopsis.iter().any(|line| line.strip_prefix(".Cm ").is_some_and(|names| names.starts_with(outer))) {
            faults.push(format!("command '{name}' is not in the synopsis"));
        }
        let mut has = of_command(&command);
        if has.remove("-json") && !json.contains(name.as_str()) {
            faults.push(format!("what '{name} --json' prints is not described"));
        }
        for option in has.iter().filter(|option| !item.options.contains(*option) && !shared.contains(*option)) {
            faults.push(format!("option -{option} of '{name}' is missing"));
        }
        if item.names == name {
            for option in item.options.difference(&has) {
                faults.push(format!("'{name}' has no option -{option}"));
            }
        }
        used.extend(has);
    }
    for option in shared.difference(&used) {
        faults.push(format!("no command has the shared option -{option}"));
    }
    for item in &items {
        if !commands().iter().any(|(name, _)| *name == item.names || name.starts_with(&format!("{} ", item.names))) {
            faults.push(format!("there is no command '{}'", item.names));
        }
    }
    assert!(commands().len() > 12 && shared.len() > 5, "too little was found");
    assert!(faults.is_empty(), "man/lockbox.1 and the command line differ:\n{}", faults.join("\n"));
}
