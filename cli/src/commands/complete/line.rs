//! Locates the word under the cursor in the command line, using the parser's command tree.
//!
//! The parser itself cannot be asked: it refuses a line that is not complete.
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{Arg, Command};

/// Parsed words before the last one.
pub(super) struct Line<'a> {
    pub(super) command: &'a Command,
    /// Option that takes the next word as its value.
    pending: Option<&'a Arg>,
    /// Words that belong to no option.
    words: Vec<&'a OsStr>,
    values: Vec<(&'a Arg, &'a OsStr)>,
    /// True after `--`, which ends the options.
    escaped: bool,
}

/// Role of the last word.
pub(super) enum CursorContext<'a, 'w> {
    /// The name of an option.
    Option,
    /// The value of an option; `stem` is the part of the word before it, which is the option.
    Value { argument: &'a Arg, stem: &'w [u8], typed: &'w [u8] },
    /// A command, or the value of an argument.
    Word { argument: Option<&'a Arg> },
}

/// Word that begins with a dash, by its role.
enum Dashed<'a, 'w> {
    /// An option, and its value if that is in the same word; `usize` is the start of the value.
    Known(&'a Arg, Option<(usize, &'w [u8])>),
    Unknown,
}

impl<'a> Line<'a> {
    pub(super) fn of(program: &'a Command, before: &'a [OsString]) -> Line<'a> {
        let mut line = Line { command: program, pending: None, words: Vec::new(), values: Vec::new(), escaped: false };
        for word in before {
            line.take(word);
        }
        line
    }

    fn take(&mut self, word: &'a OsStr) {
        let bytes = word.as_bytes();
        if let Some(argument) = self.pending.take() {
            self.values.push((argument, word));
        } else if !self.escaped && bytes == b"--" {
            self.escaped = true;
        } else if !self.escaped && bytes.len() > 1 && bytes[0] == b'-' {
            match self.dashed(bytes) {
                Dashed::Known(argument, Some((_, value))) => self.values.push((argument, OsStr::from_bytes(value))),
                Dashed::Known(argument, None) if needs_value(argument) => self.pending = Some(argument),
                Dashed::Known(..) | Dashed::Unknown => {}
            }
        } else if let Some(command) = self.commands().find(|command| command.get_name().as_bytes() == bytes) {
            self.command = command;
        } else {
            self.words.push(word);
        }
    }

    /// Returns the commands that are valid at this position.
    pub(super) fn commands(&self) -> impl Iterator<Item = &'a Command> + use<'a> {
        let none = self.escaped || !self.words.is_empty() || !self.values.is_empty();
        self.command.get_subcommands().filter(move |_| !none)
    }

    pub(super) fn place<'w>(&self, word: &'w [u8]) -> CursorContext<'a, 'w> {
        if let Some(argument) = self.pending {
            return CursorContext::Value { argument, stem: b"", typed: word };
        }
        if self.escaped || word.first() != Some(&b'-') {
            return CursorContext::Word { argument: self.positional() };
        }
        match self.dashed(word) {
            Dashed::Known(argument, Some((at, typed))) => CursorContext::Value { argument, stem: &word[..at], typed },
            Dashed::Known(..) | Dashed::Unknown => CursorContext::Option,
        }
    }

    /// Returns whether a word at this position may begin with a dash: at any other, a file name
    /// would be an option, which may run a program.
    pub(super) fn takes_dash(&self, place: &CursorContext<'_, '_>) -> bool {
        match place {
            CursorContext::Option => true,
            CursorContext::Value { stem, .. } => !stem.is_empty(),
            CursorContext::Word { .. } => self.escaped,
        }
    }

    fn dashed<'w>(&self, word: &'w [u8]) -> Dashed<'a, 'w> {
        let options = || self.command.get_arguments().filter(|argument| !argument.is_positional());
        if let Some(long) = word.strip_prefix(b"--") {
            let name = long.split(|&byte| byte == b'=').next().unwrap_or_default();
            let is_it = |argument: &&Arg| {
                let aliases = argument.get_all_aliases().unwrap_or_default();
                argument.get_long().into_iter().chain(aliases).any(|long| long.as_bytes() == name)
            };
            let value = (name.len() < long.len()).then(|| (name.len() + 3, &long[name.len() + 1..]));
            return options().find(is_it).map_or(Dashed::Unknown, |argument| Dashed::Known(argument, value));
        }
        // `-rf`: each a flag, but for the first that takes a value, which is the rest.
        let mut last = Dashed::Unknown;
        for (at, byte) in word.iter().enumerate().skip(1) {
            let found = options().find(|argument| argument.get_short() == Some(char::from(*byte)));
            let Some(argument) = found else { return Dashed::Unknown };
            let rest = &word[at + 1..];
            if needs_value(argument) {
                return Dashed::Known(argument, (!rest.is_empty()).then_some((at + 1, rest)));
            }
            last = Dashed::Known(argument, None);
        }
        last
    }

    fn positional(&self) -> Option<&'a Arg> {
        let all = || self.command.get_positionals();
        if self.escaped
            && let Some(last) = all().find(|argument| argument.is_last_set())
        {
            return Some(last);
        }
        let plain = || all().filter(|argument| !argument.is_last_set());
        let many = |argument: &&Arg| {
            argument.get_num_args().is_some_and(|range| range.max_values() > 1)
                || matches!(argument.get_action(), clap::ArgAction::Append)
        };
        plain().nth(self.words.len()).or_else(|| plain().last().filter(many))
    }

    pub(super) fn archive(&self) -> Option<OsString> {
        let is_archive = |argument: &Arg| kind_of(self.command, argument) == Some(ValueKind::Archive);
        let named = self.values.iter().find(|(argument, _)| is_archive(argument)).map(|(_, value)| *value);
        let placed = self.command.get_positionals().zip(&self.words).find(|(argument, _)| is_archive(argument));
        named.or(placed.map(|(_, word)| *word)).map(OsStr::to_owned)
    }

    /// Returns whether paths in the archive may follow the argument, and so share one word with it.
    pub(super) fn takes_paths(&self) -> bool {
        self.command.get_positionals().any(|argument| kind_of(self.command, argument) == Some(ValueKind::Path))
    }
}

/// Returns whether the next word is the value, when none is in the same word.
fn needs_value(argument: &Arg) -> bool {
    argument.get_action().takes_values()
        && !argument.is_require_equals_set()
        && argument.get_num_args().is_none_or(|range| range.min_values() > 0)
}

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
pub(super) fn kind_of(command: &Command, argument: &Arg) -> Option<ValueKind> {
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
            "CMD" | "ID" | "LINK" | "MIB" | "N" | "PATTERN" | "PERCENT" | "RECIPIENT" | "TEXT" | "TIME" | "TOKEN"
            | "URL" | "SHELL" | "COMMAND",
            ..,
        ) => ValueKind::Free,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Returns the argument that is the last word, or has it as a part of its value, and the part
    /// of the word before the value.
    fn place(line: &[&str]) -> (String, String) {
        let mut program = crate::Cli::command();
        program.build();
        let words: Vec<OsString> = line.iter().map(OsString::from).collect();
        let (current, before) = words.split_last().unwrap();
        match Line::of(&program, before).place(current.as_bytes()) {
            CursorContext::Option => ("-".into(), String::new()),
            CursorContext::Value { argument, stem, .. } => {
                (argument.get_id().to_string(), String::from_utf8(stem.to_vec()).unwrap())
            }
            CursorContext::Word { argument } => {
                (argument.map_or_else(String::new, |argument| argument.get_id().to_string()), String::new())
            }
        }
    }

    #[test]
    fn the_place_of_a_word_is_that_which_the_parser_gives_it() {
        for (line, id, stem) in [
            (&["mount", ""][..], "archive", ""),
            (&["mount", "a", ""], "directory", ""),
            (&["mount", "a", "b", ""], "", ""),
            (&["mount", "-o", ""], "options", ""),
            (&["mount", "-oro", "-o", "x", ""], "archive", ""),
            (&["mount", "-oro,"], "options", "-o"),
            (&["mount", "--passfile", "x", ""], "archive", ""),
            (&["mount", "--passfile=x"], "passfile", "--passfile="),
            (&["mount", "--passfile=x", ""], "archive", ""),
            (&["mount", "--foreground", ""], "archive", ""),
            (&["mount", "--foreground"], "-", ""),
            (&["mount", "-"], "-", ""),
            (&["mount", "--", "-"], "archive", ""),
            (&["umount", "--wait", ""], "what", ""),
            (&["umount", "--wait=5"], "wait", "--wait="),
            (&["ls", "-lR", "a", ""], "path", ""),
            (&["rm", "-r", "a:b", "a:c", ""], "paths", ""),
            (&["exec", "a", "--", "sh", "-"], "command", ""),
            (&["key", "rm", "a", ""], "slot", ""),
            (&["key", "rekey", "--drop", "1", "a", "--only", ""], "only", ""),
            (&["share", "--archive", ""], "archive", ""),
            (&["share", "x", "ls"], "path", ""),
        ] {
            assert_eq!(place(line), (id.to_owned(), stem.to_owned()), "{line:?}");
        }
    }

    #[test]
    fn a_name_with_a_dash_is_offered_only_where_it_is_no_option() {
        let mut program = crate::Cli::command();
        program.build();
        for (line, takes) in [
            (&["info", ""][..], false),
            (&["cat", "a.lbx", ""], false),
            (&["ls", "a.lbx", "--snapshot", ""], false),
            (&["info", "--", ""], true),
            (&["cat", "--", "a.lbx", "-"], true),
            (&["mount", "-"], true),
            (&["mount", "-oro,"], true),
            (&["mount", "--passfile=x"], true),
        ] {
            let words: Vec<OsString> = line.iter().map(OsString::from).collect();
            let (current, before) = words.split_last().unwrap();
            let line_of = Line::of(&program, before);
            assert_eq!(line_of.takes_dash(&line_of.place(current.as_bytes())), takes, "{line:?}");
        }
    }

    #[test]
    fn the_archive_of_a_line_is_found_wherever_it_stands() {
        let mut program = crate::Cli::command();
        program.build();
        for line in [
            &["ls", "-l", "a.lbx"][..],
            &["key", "rm", "--passfile", "x", "a.lbx"],
            &["share", "--archive=a.lbx"],
            &["cat", "a.lbx", "b"],
        ] {
            let words: Vec<OsString> = line.iter().map(OsString::from).collect();
            assert_eq!(Line::of(&program, &words).archive().as_deref(), Some(OsStr::new("a.lbx")), "{line:?}");
        }
        assert_eq!(Line::of(&program, &["ls".into()]).archive(), None);
    }

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
            match kind_of(command, argument) {
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
