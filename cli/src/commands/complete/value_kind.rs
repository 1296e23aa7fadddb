//! Kind of an argument's value, derived from its value name in the help; by command where one name
//! has several meanings.

use clap::{Arg, Command};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueKind {
    File,
    Directory,
    Archive,
    /// `ARCHIVE:PATH`
    Within,
    /// On the host, or `ARCHIVE:PATH`.
    Either,
    /// In the archive that another argument names.
    Path,
    /// Mount point of an archive.
    Mounted,
    Slot,
    Snapshot,
    Variable,
    /// Address of an archive that is not a file.
    Address,
    MountOptions,
    RemoteOptions,
    /// Text that cannot be predicted.
    Free,
}

/// Returns None for an argument missing in the table, which a test finds.
pub(super) fn of(command: &Command, argument: &Arg) -> Option<ValueKind> {
    let name = argument.get_value_names().and_then(<[_]>::first).map_or("", |name| name.as_str());
    let (id, command) = (argument.get_id().as_str(), command.get_name());
    Some(match (name, command, id) {
        // It is not there yet.
        ("ARCHIVE", "create", _) => ValueKind::Directory,
        ("ARCHIVE", ..) => ValueKind::Archive,
        ("ARCHIVE:PATH", ..) => ValueKind::Within,
        ("A" | "B", "diff", "first" | "second") | ("PATH", "cp", _) => ValueKind::Either,
        ("PATH", "receive", "output") | ("PATH", "share", "path") | ("PATH", _, "socket") => ValueKind::File,
        ("PATH", ..) => ValueKind::Path,
        ("DIR", "import-tar" | "restore", "to") => ValueKind::Path,
        ("DIR" | "DIRECTORY", ..) => ValueKind::Directory,
        ("DIR|ARCHIVE", ..) => ValueKind::Mounted,
        ("FILE" | "SRC" | "DEST" | "PROGRAM", ..) => ValueKind::File,
        ("ADDRESS", ..) => ValueKind::Address,
        ("OPTIONS", ..) => ValueKind::MountOptions,
        ("LIST", ..) => ValueKind::RemoteOptions,
        ("SLOT", ..) => ValueKind::Slot,
        ("A" | "B", ..) => ValueKind::Snapshot,
        ("NAME", "set", _) | ("NAME", _, "credential") | ("NAME", "create" | "share", "name") => ValueKind::Free,
        ("NAME", "get" | "rm", "name") | ("NAME", "run", "only") => ValueKind::Variable,
        ("NAME", _, "names" | "snapshot") | ("NAME", "restore", "name") => ValueKind::Snapshot,
        (
            "CMD" | "ID" | "LINK" | "MIB" | "N" | "PATTERN" | "RECIPIENT" | "TEXT" | "TIME" | "TOKEN" | "URL" | "SHELL"
            | "COMMAND",
            ..,
        ) => ValueKind::Free,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn each(command: &Command, path: &str, visit: &mut impl FnMut(&str, &Command, &Arg)) {
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            let path = format!("{path} {}", inner.get_name());
            inner.get_arguments().for_each(|argument| visit(&path, inner, argument));
            each(inner, &path, visit);
        }
    }

    #[test]
    fn somebody_thought_of_every_argument() {
        let mut program = crate::Cli::command();
        program.build();
        let (mut unknown, mut known) = (Vec::new(), Vec::new());
        each(&program, "", &mut |path, command, argument| {
            if !argument.get_action().takes_values() {
                return;
            }
            match of(command, argument) {
                Some(meaning) => known.push((path.to_owned(), argument.get_id().to_string(), meaning)),
                None => unknown.push(format!("{path} {} {:?}", argument.get_id(), argument.get_value_names())),
            }
        });
        assert!(unknown.is_empty(), "say in this file what they are:\n{}", unknown.join("\n"));
        let is = |path: &str, id: &str| known.iter().find(|it| it.0 == path && it.1 == id).map(|it| it.2);
        for (path, id, meaning) in [
            (" snapshot diff", "older", ValueKind::Snapshot),
            (" snapshot restore", "to", ValueKind::Path),
            (" diff", "first", ValueKind::Either),
            (" ls", "path", ValueKind::Path),
            (" ls", "snapshot", ValueKind::Snapshot),
            (" snapshot create", "name", ValueKind::Free),
            (" snapshot rm", "names", ValueKind::Snapshot),
            (" env rm", "name", ValueKind::Variable),
            (" env set", "name", ValueKind::Free),
            (" share", "path", ValueKind::File),
            (" share", "archive", ValueKind::Archive),
            (" extract", "to", ValueKind::Directory),
            (" add", "to", ValueKind::Path),
            (" create", "archive", ValueKind::Directory),
            (" key rm", "slot", ValueKind::Slot),
            (" cache clear", "addresses", ValueKind::Address),
            (" remote check", "address", ValueKind::Address),
        ] {
            assert_eq!(is(path, id), Some(meaning), "{path} {id}");
        }
    }
}
