//! What the user of this program can do about a refusal of the library: its own commands and options.

use lockbox::archive::FindingKind;
use lockbox::error::Refusal;

/// The refusal with its remedy, as one sentence.
pub(crate) fn sentence(refusal: &Refusal) -> String {
    let remedy = match refusal {
        Refusal::Costly { .. } => "; raise the limit with --kdf-limit if you trust the archive",
        Refusal::EncryptedIdentity { .. } => "; decrypt it with age into a pipe, such as --identity <(age -d FILE)",
        Refusal::Links { .. } => ": remove them, or use --break-links",
        Refusal::PassphraseWithKeyFile => {
            ": add one that opens alone with 'lockbox key add --recovery-code', or change it with the key file and 'lockbox passwd'"
        }
        Refusal::SeveralPassphrases => ": say with --slot which one is to get the new one",
        Refusal::NoPassphrase { .. } => "; add one with 'lockbox key add'",
        Refusal::UnknownKey { slot } => &format!(": use --drop {slot}"),
        Refusal::UndescribedKey { slot } => {
            &format!(": change its passphrase to itself with 'lockbox passwd' first, or use --drop {slot}")
        }
        Refusal::UnkeptKey { slot, .. } => &format!("; or use --drop {slot}"),
    };
    format!("{refusal}{remedy}")
}

/// What mends at once what a check found, where a command does.
pub(crate) fn mending(finding: FindingKind) -> &'static str {
    match finding {
        FindingKind::Header => "; 'lockbox check --repair-header' does so now",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn options(command: &clap::Command, found: &mut Vec<String>) {
        found.extend(command.get_arguments().filter_map(|argument| argument.get_long().map(str::to_owned)));
        command.get_subcommands().for_each(|command| options(command, found));
    }

    /// The words of a command line in quotes.
    fn commands(text: &str) -> impl Iterator<Item = Vec<&str>> {
        text.split('\'').skip(1).step_by(2).map(|quoted| quoted.split(' ').collect())
    }

    #[test]
    fn what_is_advised_exists_in_this_program() {
        let path = String::from("a.lbx");
        let refusals = [
            Refusal::Costly { slot: 1, memory: 4, passes: 1, most_cost: 1, most_memory: 1 },
            Refusal::EncryptedIdentity { name: path.clone() },
            Refusal::Links { path, links: 2 },
            Refusal::PassphraseWithKeyFile,
            Refusal::SeveralPassphrases,
            Refusal::NoPassphrase { slot: 1, kind: "key file" },
            Refusal::UnknownKey { slot: 1 },
            Refusal::UndescribedKey { slot: 1 },
            Refusal::UnkeptKey { slot: 1, reason: "its plugin is missing".into() },
        ];
        let program = crate::Cli::command();
        let mut known = Vec::new();
        options(&program, &mut known);
        let remedy = |refusal: &Refusal| sentence(refusal)[refusal.to_string().len()..].to_owned();
        let advice = refusals.iter().map(remedy).chain([mending(FindingKind::Header).to_owned()]);
        for text in advice {
            let words: Vec<&str> = text.split([' ', '\'', ',']).collect();
            let named: Vec<&&str> = words.iter().filter(|word| word.starts_with("--")).collect();
            assert!(named.iter().all(|option| known.iter().any(|known| **option == format!("--{known}"))), "{text}");
            let mut names = 0;
            for command in commands(&text) {
                names += 1;
                let way = command.iter().skip(1).take_while(|word| !word.starts_with('-'));
                assert!(way.clone().count() > 0 && command[0] == "lockbox", "{text}");
                way.fold(&program, |at, word| at.find_subcommand(word).unwrap_or_else(|| panic!("{text}")));
            }
            assert!(!named.is_empty() || names > 0, "no remedy: {text}");
        }
    }
}
