//! Layout of help texts: a command's own arguments and options come first. Options that many
//! commands share are at the end of `--help`; `-h` names only where they are.

use std::env;

use clap::Command;

/// Text of `--version`: version, commit and format of archives.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("LOCKBOX_BUILD"), ", format 1)");

/// Headings of the shared options, by argument id.
const SHARED: [(&str, &[&str]); 4] = [
    (
        "Secrets",
        &[
            "passfile",
            "passfd",
            "passcommand",
            "credential",
            "ask_password",
            "passfile_any",
            "keyfile",
            "identity",
            "recovery_code",
            "keyring_cache",
            "kdf_limit",
        ],
    ),
    ("Key derivation", &["kdf_memory", "kdf_passes", "kdf_lanes", "weak_kdf"]),
    ("Older and replaced copies", &["accept_older", "accept_fork", "accept_other"]),
    ("Archives at addresses", &["remote", "take_over"]),
];

/// Replaces the shared options in short help texts.
const POINTER: &str = "Options for secrets and for archives at addresses: --help, lockbox-keys(7)";

/// Display order after all options that have none of their own; those count from zero.
const LAST: usize = 998;

/// Amount of help: a summary (`-h`) or everything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    Summary,
    Full,
}

impl Detail {
    /// Returns the detail that this process' command line asks for.
    pub fn requested() -> Detail {
        let mut words = env::args_os().skip(1).take_while(|word| word != "--").enumerate();
        match words.any(|(at, word)| word == "--help" || (at == 0 && word == "help")) {
            true => Detail::Full,
            false => Detail::Summary,
        }
    }
}

/// Returns the command, and those below it, with their help texts laid out.
pub fn lay_out(command: Command, detail: Detail) -> Command {
    let mut shares = false;
    let command = command.mut_args(|argument| {
        let heading =
            SHARED.iter().find(|(_, ids)| ids.contains(&argument.get_id().as_str())).map(|(heading, _)| *heading);
        shares |= heading.is_some();
        let is_hidden = argument.is_hide_set() || (heading.is_some() && detail == Detail::Summary);
        let argument = argument.help_heading(heading).hide(is_hidden);
        // It comes with the sources of secrets, before a command's own options.
        if argument.get_id() == "quiet" { argument.display_order(LAST) } else { argument }
    });
    let names: Vec<String> = command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    let command =
        names.into_iter().fold(command, |command, name| command.mut_subcommand(name, |inner| lay_out(inner, detail)));
    match shares && detail == Detail::Summary && command.get_after_help().is_none() {
        true => command.after_help(POINTER),
        false => command,
    }
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    #[test]
    fn the_version_names_the_format_that_is_written() {
        assert!(VERSION.ends_with(&format!(", format {})", lockbox::archive::FORMAT_VERSION)), "{VERSION}");
    }

    #[test]
    fn shared_options_come_last_in_full_help_and_not_in_the_summary() {
        let shared = Arg::new("passfile").long("passfile").help_heading("Misleading");
        let own = Arg::new("own").long("own").help_heading("Misleading").action(ArgAction::SetTrue);
        let command = || Command::new("program").subcommand(Command::new("run").args([shared.clone(), own.clone()]));
        let help = |detail| {
            let mut program = lay_out(command(), detail);
            program.find_subcommand_mut("run").unwrap().render_help().to_string()
        };
        let (full, summary) = (help(Detail::Full), help(Detail::Summary));
        let at = |text: &str| full.find(text).unwrap_or_else(|| panic!("{text}: {full}"));
        assert!(at("Options:\n") < at("--own") && at("--own") < at("Secrets:") && at("Secrets:") < at("--passfile"));
        assert!(summary.contains("--own") && !summary.contains("--passfile") && summary.contains(POINTER), "{summary}");
        assert!(!full.contains("Misleading") && !full.contains(POINTER), "{full}");
    }
}
