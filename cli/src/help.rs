//! Help of the whole program: its commands in groups, each with the first sentence of its own help;
//! and the commands and options for names that other programs use.

use std::ffi::OsString;

use clap::Subcommand;
use clap::builder::{StyledStr, Styles};
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

/// Every command is in one of them; the first has the daily ones.
pub(crate) const GROUPS: [(&str, &[&str]); 6] = [
    ("Daily", &["create", "mount", "umount", "status", "add", "extract", "ls", "cat", "exec"]),
    ("Content", &["cp", "mv", "rm", "mkdir", "edit", "diff", "run", "env"]),
    ("Keys", &["key", "passwd", "recovery", "forget", "header"]),
    ("Sharing", &["share", "receive", "export-tar", "import-tar"]),
    ("Care", &["snapshot", "backup", "info", "check", "rescue", "compact", "purge", "remote"]),
    ("Machine", &["doctor", "cache", "completions", OWN]),
];

/// Command that the parser adds automatically, after all others.
const OWN: &str = "help";

/// The parser supports one list of commands, so the groups take the place of the text before the
/// help.
pub(crate) const TEMPLATE: &str = "\
{about-with-newline}
{usage-heading} {usage}
{before-help}Options:
{options}{after-help}";

pub(crate) const MORE: &str = "'lockbox --help' describes each of them, and 'lockbox help COMMAND' one in full.";

/// Returns the daily commands, and the names of the others.
pub(crate) fn short() -> StyledStr {
    let [(daily, commands), others @ ..] = GROUPS;
    let mut text = headed(daily, &format!("\n{}\n", list(commands)));
    for (title, commands) in others {
        text += &headed(title, &format!(" {}", commands.join(", ")));
    }
    text.into()
}

/// Returns every command with its sentence.
pub(crate) fn whole() -> StyledStr {
    // One list, so that all sentences begin in the same column.
    let mut text = format!("\n{}", list(&GROUPS.map(|(_, commands)| commands).concat()));
    let literal = Styles::default();
    let literal = literal.get_literal();
    for (title, commands) in GROUPS {
        let first = format!("\n  {literal}{}{literal:#}", commands[0]);
        text = text.replacen(&first, &format!("\n{}", headed(title, &first)), 1);
    }
    text.trim_start().to_owned().into()
}

fn headed(title: &str, below: &str) -> String {
    let styles = Styles::default();
    let header = styles.get_header();
    // The parser wraps this text again, and does not see that a line begins at the start of a
    // style.
    format!("{header}\n{title}:{header:#}{below}")
}

/// Commands and their sentences, laid out by the parser for the width of the terminal.
fn list(names: &[&'static str]) -> String {
    let program = crate::commands::Command::augment_subcommands(clap::Command::new("lockbox"));
    let listed = names.iter().filter_map(|name| {
        let about = program.find_subcommand(name)?.get_about()?;
        Some(clap::Command::new(*name).about(about.clone()))
    });
    let mut list = clap::Command::new("lockbox").help_template("{subcommands}").subcommands(listed);
    list = list.disable_help_subcommand(!names.contains(&OWN));
    list.render_help().ansi().to_string().trim_end().to_owned()
}

/// Beginning of a command line, or an option of it, and its replacement.
pub(crate) const HINTS: &[(&[&str], &str)] = &[
    (&["copy", "get", "put"], "'lockbox cp' copies into an archive, out of it, and within it"),
    (&["delete", "remove"], "'lockbox rm' removes files of an archive"),
    (&["rename", "move"], "'lockbox mv' renames and moves files in an archive"),
    (
        &["grep", "find", "du", "tree"],
        "'lockbox exec' runs a program in an archive, 'lockbox mount' opens it to all programs",
    ),
    (&["init", "new", "format", "mkfs"], "'lockbox create' makes an archive"),
    (&["open", "unlock", "attach"], "'lockbox mount' opens an archive as a folder"),
    (&["close", "lock", "unmount", "detach"], "'lockbox umount' unmounts an archive and closes it"),
    (&["password", "passphrase", "passwd change", "key change"], "'lockbox passwd' changes a passphrase"),
    (&["key create", "key new", "key generate"], "'lockbox key add' adds a key; with --generate it makes a key file"),
    (&["key delete", "key revoke"], "'lockbox key rm' removes a key, 'lockbox key rekey' locks out its holder"),
    (&["header save", "header dump"], "'lockbox header backup' copies the header"),
    (&["snapshot new", "snapshot take", "snapshot add"], "'lockbox snapshot create' takes a snapshot"),
    (&["snapshot delete"], "'lockbox snapshot rm' removes snapshots"),
    (
        &["restore", "undo", "snapshot rollback", "snapshot revert"],
        "'lockbox extract' copies files out of a backup, and with --snapshot NAME out of an earlier one; 'lockbox snapshot restore' restores files within their archive",
    ),
    (&["fsck", "verify", "test"], "'lockbox check --full' verifies an archive"),
    (
        &["repair", "recover"],
        "'lockbox rescue' copies intact files out of a damaged archive; 'lockbox recovery' sets a passphrase with a recovery code",
    ),
    (&["tar", "import", "export"], "'lockbox export-tar' writes a tar, 'lockbox import-tar' reads one"),
    (
        &["push", "pull", "sync", "clone", "replicate"],
        "'lockbox backup' copies an archive into a store or out of it, and later only the changes",
    ),
    (&["remote rm", "remote forget"], "'lockbox remote unsent --forget' discards unsent data"),
    (&["send", "upload"], "'lockbox share' makes a link with which a file is received once"),
    (&["download", "fetch", "request"], "'lockbox receive' gets the file of a link"),
    (
        &["--password", "--passphrase"],
        "a passphrase is never part of a command line, which other users can see: it is asked for, or read with --passfile, --passfd \
         or --passcommand",
    ),
    (&["--readonly", "--read-only", "--ro"], "'lockbox mount -o ro' mounts read-only"),
    (&["--delete"], "'lockbox add --mirror' deletes files that its sources do not have"),
];

/// Adds the probable intention to an error about an unknown argument, where that is known better
/// than by its letters.
pub(crate) fn add_hint(mut error: Error, arguments: impl Iterator<Item = OsString>) -> Error {
    if !matches!(error.kind(), ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument) {
        return error;
    }
    let line: Vec<OsString> = arguments.collect();
    let begins = |words: &str| words.split(' ').enumerate().all(|(at, word)| line.get(at).is_some_and(|it| it == word));
    let names = |option: &str| error.get(ContextKind::InvalidArg) == Some(&ContextValue::String(option.to_owned()));
    let row = HINTS.iter().find(|(asked, _)| asked.iter().any(|asked| begins(asked) || names(asked)));
    if let Some((_, hint)) = row {
        // The usage shows similar names as well.
        for similar in [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::Usage] {
            error.remove(similar);
        }
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![(*hint).into()]));
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};
    use lockbox_host::help::{Detail, lay_out};

    use super::*;

    fn program() -> clap::Command {
        let mut program = crate::Cli::command();
        program.build();
        program
    }

    #[test]
    fn every_command_is_in_one_group() {
        let program = program();
        let mut has: Vec<&str> =
            program.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name).collect();
        let mut grouped = GROUPS.map(|(_, commands)| commands).concat();
        has.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, has);
    }

    #[test]
    fn the_whole_help_has_every_command_with_its_sentence_and_the_exit_codes() {
        let mut program = program();
        let help = program.render_long_help().to_string();
        let mut at = 0;
        for (title, commands) in GROUPS {
            let heading = format!("\n\n{title}:\n  {} ", commands[0]);
            at += help[at..].find(&heading).unwrap_or_else(|| panic!("{title}: {help}"));
            for name in commands {
                at += help[at..].find(&format!("\n  {name} ")).unwrap_or_else(|| panic!("{name}: {help}"));
            }
        }
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for command in program.get_subcommands().filter(|command| !command.is_hide_set()) {
            let about = format!(" {} {}", command.get_name(), command.get_about().unwrap());
            assert!(words.contains(&about), "{about}: {help}");
        }
        assert!(
            help.contains("\n\nUsage: lockbox <COMMAND>\n\nDaily:") && words.contains("Exit codes: 0 success"),
            "{help}"
        );
        assert!(!help.contains("\n\n\n"), "{help}");
    }

    /// Covers whole lists of `lockbox key` and the like.
    #[test]
    fn no_two_commands_are_told_alike() {
        let mut commands = vec![program()];
        while let Some(command) = commands.pop() {
            let mut told = std::collections::BTreeMap::new();
            for below in command.get_subcommands() {
                let about = below.get_about().unwrap_or_else(|| panic!("nothing tells {}", below.get_name()));
                if let Some(other) = told.insert(about.to_string(), below.get_name()) {
                    panic!("{} {other} and {}: {about}", command.get_name(), below.get_name());
                }
                commands.push(below.clone());
            }
        }
    }

    /// Returns the help texts of a command and of all below it, at 80 columns.
    fn texts(command: &mut clap::Command, name: &str, texts: &mut Vec<(String, String)>) {
        texts.push((name.to_owned(), command.render_help().to_string()));
        for inner in command.get_subcommands_mut().filter(|inner| inner.get_name() != OWN && !inner.is_hide_set()) {
            let name = format!("{name} {}", inner.get_name());
            self::texts(inner, &name, texts);
        }
    }

    fn all_texts(detail: Detail) -> Vec<(String, String)> {
        let mut program = lay_out(crate::Cli::command(), detail).term_width(80);
        program.build();
        let mut all = Vec::new();
        texts(&mut program, "lockbox", &mut all);
        all
    }

    /// `HELP=write` writes the file.
    #[test]
    fn the_summaries_are_those_that_were_reviewed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/help.txt");
        let shown: String = all_texts(Detail::Summary)
            .iter()
            .map(|(name, text)| format!("$ {name} -h\n{}\n\n", text.trim_end()))
            .collect();
        if std::env::var_os("HELP").is_some_and(|value| value == "write") {
            std::fs::write(path, &shown).unwrap();
        }
        let reviewed = std::fs::read_to_string(path).unwrap();
        let differs = shown.lines().zip(reviewed.lines()).find(|(shown, reviewed)| shown != reviewed);
        assert!(shown == reviewed, "{path} differs at {differs:?}; HELP=write renews it");
    }

    #[test]
    fn own_arguments_come_before_the_shared_ones_and_every_line_fits() {
        for (name, text) in all_texts(Detail::Full).into_iter().chain(all_texts(Detail::Summary)) {
            let headings: Vec<&str> =
                text.lines().filter(|line| line.ends_with(':') && !line.starts_with(' ')).collect();
            let first_shared = headings.iter().position(|heading| *heading == "Secrets:").unwrap_or(headings.len());
            let own = ["Usage:", "Commands:", "Arguments:", "Options:"];
            let last_own = headings.iter().rposition(|heading| own.contains(heading));
            assert!(last_own.is_none_or(|last| last < first_shared), "{name}: {headings:?}");
            // A usage line is one word for the parser.
            let long = text.lines().find(|line| line.chars().count() > 80 && !line.starts_with("Usage:"));
            assert_eq!(long, None, "{name}");
        }
    }

    #[test]
    fn the_short_help_has_a_line_for_each_other_group() {
        let help = program().term_width(80).render_help().to_string();
        for (title, commands) in &GROUPS[1..] {
            assert!(help.contains(&format!("\n{title}: {}\n", commands.join(", "))), "{title}: {help}");
        }
        assert!(help.contains("\n  status ") && help.lines().count() < 30 && !help.contains("Exit codes"), "{help}");
    }

    /// Returns the program's message for these arguments.
    fn said(arguments: &[&str]) -> String {
        let line = ["lockbox"].iter().chain(arguments);
        let error = crate::Cli::try_parse_from(line).map(drop).unwrap_err();
        add_hint(error, arguments.iter().map(OsString::from)).to_string()
    }

    #[test]
    fn every_row_is_said_to_who_asks_for_it_and_nothing_beside_it() {
        for (asked, hint) in HINTS {
            for asked in *asked {
                let words: Vec<&str> = asked.split(' ').collect();
                let said = match asked.starts_with('-') {
                    true => said(&["ls", "a.lbx", asked, "hush"]),
                    false => said(&[&words[..], &["a.lbx"]].concat()),
                };
                assert!(said.contains(&format!("\n\n  tip: {hint}\n\nFor more")), "{asked}: {said}");
                assert!(
                    !said.contains("similar") && !said.contains("hush") && !said.contains("--ask"),
                    "{asked}: {said}"
                );
            }
        }
        assert!(!said(&["ls", "a.lbx", "--password=hush"]).contains("hush"));
    }

    #[test]
    fn what_is_only_misspelt_is_told_by_its_letters() {
        for (given, meant) in [("moutn", "mount"), ("cehck", "check"), ("list", "ls")] {
            let said = said(&[given, "a.lbx"]);
            assert!(said.contains("similar subcommand") && said.contains(&format!("'{meant}'")), "{said}");
        }
        for command in ["cp", "mv", "rm", "exec"] {
            let said = said(&[command, "-p", "a.lbx:one", "a.lbx:two"]);
            assert!(said.contains("unexpected argument '-p'") && !said.contains("passphrase"), "{said}");
        }
        // The word of a row means something at its place alone.
        assert!(!said(&["key", "copy", "a.lbx"]).contains("'lockbox cp'"));
    }
}
