//! Suggests the command or option for a name that other programs use.
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

/// Beginning of a command line, or an option of it, and its replacement.
pub(crate) const TABLE: &[(&[&str], &str)] = &[
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
        "'lockbox snapshot restore' restores files from a snapshot; a backup is an archive, so 'lockbox extract' copies files out of it",
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
pub(crate) fn hinted(mut error: Error, arguments: impl Iterator<Item = OsString>) -> Error {
    if !matches!(error.kind(), ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument) {
        return error;
    }
    let line: Vec<OsString> = arguments.collect();
    let begins = |words: &str| words.split(' ').enumerate().all(|(at, word)| line.get(at).is_some_and(|it| it == word));
    let names = |option: &str| error.get(ContextKind::InvalidArg) == Some(&ContextValue::String(option.to_owned()));
    let row = TABLE.iter().find(|(asked, _)| asked.iter().any(|asked| begins(asked) || names(asked)));
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
    use clap::Parser;

    use super::*;

    /// Returns the program's message for these arguments.
    fn said(arguments: &[&str]) -> String {
        let line = ["lockbox"].iter().chain(arguments);
        let error = crate::Cli::try_parse_from(line).map(drop).unwrap_err();
        hinted(error, arguments.iter().map(OsString::from)).to_string()
    }

    #[test]
    fn every_row_is_said_to_who_asks_for_it_and_nothing_beside_it() {
        for (asked, hint) in TABLE {
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
