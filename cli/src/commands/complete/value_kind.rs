//! What the value of each argument is: told by the name that the help gives it, and where one name means several things, by its command.

use clap::{Arg, Command};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    File,
    Directory,
    Archive,
    /// `ARCHIVE:PATH`
    Within,
    /// On the host, or `ARCHIVE:PATH`.
    Either,
    /// In the archive that another argument names.
    Path,
    /// Where an archive is mounted.
    Mounted,
    Slot,
    Snapshot,
    Variable,
    /// Of an archive that is no file.
    Address,
    MountOptions,
    RemoteOptions,
    /// Nobody can know.
    Free,
}

/// None for an argument that nobody thought of, which a test finds.
pub(super) fn of(command: &Command, argument: &Arg) -> Option<Meaning> {
    let name = argument.get_value_names().and_then(<[_]>::first).map_or("", |name| name.as_str());
    let (id, command) = (argument.get_id().as_str(), command.get_name());
    Some(match (name, command, id) {
        // It is not there yet.
        ("ARCHIVE", "create", _) => Meaning::Directory,
        ("ARCHIVE", ..) => Meaning::Archive,
        ("ARCHIVE:PATH", ..) => Meaning::Within,
        ("A" | "B", "diff", "first" | "second") | ("PATH", "cp", _) => Meaning::Either,
        ("PATH", "receive", "output") | ("PATH", "share", "path") | ("PATH", _, "socket") => Meaning::File,
        ("PATH", ..) => Meaning::Path,
        ("DIR", "import-tar" | "restore", "to") => Meaning::Path,
        ("DIR" | "DIRECTORY", ..) => Meaning::Directory,
        ("DIR|ARCHIVE", ..) => Meaning::Mounted,
        ("FILE" | "SRC" | "DEST" | "PROGRAM", ..) => Meaning::File,
        ("ADDRESS", ..) => Meaning::Address,
        ("OPTIONS", ..) => Meaning::MountOptions,
        ("LIST", ..) => Meaning::RemoteOptions,
        ("SLOT", ..) => Meaning::Slot,
        ("A" | "B", ..) => Meaning::Snapshot,
        ("NAME", "set", _) | ("NAME", _, "credential") | ("NAME", "create" | "share", "name") => Meaning::Free,
        ("NAME", "get" | "rm", "name") | ("NAME", "run", "only") => Meaning::Variable,
        ("NAME", _, "names" | "snapshot") | ("NAME", "restore", "name") => Meaning::Snapshot,
        (
            "CMD" | "ID" | "LINK" | "MIB" | "N" | "PATTERN" | "RECIPIENT" | "TEXT" | "TIME" | "TOKEN" | "URL" | "SHELL"
            | "COMMAND",
            ..,
        ) => Meaning::Free,
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
            (" snapshot diff", "older", Meaning::Snapshot),
            (" snapshot restore", "to", Meaning::Path),
            (" diff", "first", Meaning::Either),
            (" ls", "path", Meaning::Path),
            (" ls", "snapshot", Meaning::Snapshot),
            (" snapshot create", "name", Meaning::Free),
            (" snapshot rm", "names", Meaning::Snapshot),
            (" env rm", "name", Meaning::Variable),
            (" env set", "name", Meaning::Free),
            (" share", "path", Meaning::File),
            (" share", "archive", Meaning::Archive),
            (" extract", "to", Meaning::Directory),
            (" add", "to", Meaning::Path),
            (" create", "archive", Meaning::Directory),
            (" key rm", "slot", Meaning::Slot),
            (" cache clear", "addresses", Meaning::Address),
            (" remote check", "address", Meaning::Address),
        ] {
            assert_eq!(is(path, id), Some(meaning), "{path} {id}");
        }
    }
}
