//! Locates the word under the cursor in the command line, using the parser's command tree.
//!
//! The parser itself cannot be asked: it refuses a line that is not complete.
//!
//! Bash also passes words that are cut at colons and equals signs, and inserts the answer
//! unchanged. So its line is parsed here, as bash and readline do, as data: nothing in it is
//! expanded. Leaving the quoting to readline (`-o filenames`) would make it look at each name, as a
//! file of the current directory, and wait for mounts there.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{Arg, Command};

use super::Candidate;

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

/// An option, and its value if that is in the same word; `usize` is the start of the value.
type OptionWord<'a, 'w> = (&'a Arg, Option<(usize, &'w [u8])>);

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
                Some((argument, Some((_, value)))) => self.values.push((argument, OsStr::from_bytes(value))),
                Some((argument, None)) => self.pending = Some(argument).filter(|argument| needs_value(argument)),
                None => {}
            }
        } else if let Some(command) = self.commands().find(|command| command.get_name().as_bytes() == bytes) {
            self.command = command;
        } else {
            self.words.push(word);
        }
    }

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
            Some((argument, Some((at, typed)))) => CursorContext::Value { argument, stem: &word[..at], typed },
            _ => CursorContext::Option,
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

    /// Returns the option that a word with a dash is.
    fn dashed<'w>(&self, word: &'w [u8]) -> Option<OptionWord<'a, 'w>> {
        let options = || self.command.get_arguments().filter(|argument| !argument.is_positional());
        if let Some(long) = word.strip_prefix(b"--") {
            let name = long.split(|&byte| byte == b'=').next().unwrap_or_default();
            let is_it = |argument: &&Arg| {
                let aliases = argument.get_all_aliases().unwrap_or_default();
                argument.get_long().into_iter().chain(aliases).any(|long| long.as_bytes() == name)
            };
            let value = (name.len() < long.len()).then(|| (name.len() + 3, &long[name.len() + 1..]));
            return Some((options().find(is_it)?, value));
        }
        // `-rf`: each a flag, but for the first that takes a value, which is the rest.
        let mut last = None;
        for (at, byte) in word.iter().enumerate().skip(1) {
            let argument = options().find(|argument| argument.get_short() == Some(char::from(*byte)))?;
            let rest = &word[at + 1..];
            if needs_value(argument) {
                return Some((argument, (!rest.is_empty()).then_some((at + 1, rest))));
            }
            last = Some((argument, None));
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
        // Archives are completed with the directories among them.
        ("ARCHIVE" | "SOURCE", ..) => ValueKind::Archive,
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
            "CMD" | "ID" | "LEVEL" | "LINK" | "MIB" | "N" | "PATTERN" | "PERCENT" | "RECIPIENT" | "TEXT" | "TIME"
            | "TOKEN" | "URL" | "SHELL" | "COMMAND",
            ..,
        ) => ValueKind::Free,
        _ => return None,
    })
}

/// The line up to the cursor.
pub(super) struct BashLine {
    /// Without quotes.
    pub(super) words: Vec<Vec<u8>>,
    /// The quote in which the cursor is.
    quote: Option<u8>,
    /// Start of the part of the last word that bash replaces.
    replaced: usize,
}

impl BashLine {
    pub(super) fn of(line: &[u8], breaks: &[u8]) -> BashLine {
        let mut typed = BashLine { words: Vec::new(), quote: None, replaced: 0 };
        let mut word: Option<Vec<u8>> = None;
        let mut bytes = line.iter().copied().peekable();
        while let Some(byte) = bytes.next() {
            match (typed.quote, byte) {
                (None, b' ' | b'\t' | b'\n') => {
                    typed.words.extend(word.take());
                    typed.replaced = 0;
                    continue;
                }
                // The last byte may be one that awaits its partner.
                (None, b'\\') => word.get_or_insert_default().extend(bytes.next()),
                (None, b'\'' | b'"') => {
                    typed.replaced = word.get_or_insert_default().len();
                    typed.quote = Some(byte);
                }
                (Some(quote), byte) if byte == quote => {
                    typed.quote = None;
                    typed.replaced = word.as_ref().map_or(0, Vec::len);
                }
                (Some(b'"'), b'\\') if bytes.peek().is_some_and(|next| b"\"\\$`".contains(next)) => {
                    word.get_or_insert_default().extend(bytes.next());
                }
                (None, byte) => {
                    let word = word.get_or_insert_default();
                    word.push(byte);
                    if breaks.contains(&byte) {
                        typed.replaced = word.len();
                    }
                }
                (Some(_), byte) => word.get_or_insert_default().push(byte),
            }
        }
        typed.words.push(word.unwrap_or_default());
        // Assignments before the command.
        let assigned = typed.words.iter().take_while(|word| word.contains(&b'=')).count();
        typed.words.drain(..assigned.min(typed.words.len() - 1));
        typed
    }

    /// Returns the replacement for the part that bash replaces; None if it cannot be written within
    /// the open quotes.
    pub(super) fn completed_by(&self, candidate: &Candidate) -> Option<Vec<u8>> {
        let text = candidate.word.get(self.replaced..)?;
        let mut quoted = match self.quote {
            Some(b'\'') if text.contains(&b'\'') => return None,
            // Even a backslash does not protect it there.
            Some(b'"') if text.contains(&b'!') => return None,
            Some(b'\'') => text.to_vec(),
            Some(_) => escaped(text, |byte| b"\"\\$`".contains(&byte)),
            None if self.replaced == 0 && text.starts_with(b"~/") => {
                [b"~/", &escaped(&text[2..], is_special)[..]].concat()
            }
            None => escaped(text, is_special),
        };
        // Readline closes the quotes itself.
        if !candidate.open && self.quote.is_none() {
            quoted.push(b' ');
        }
        Some(quoted)
    }
}

/// Returns whether a byte may be special outside of quotes. Those beyond ASCII are parts of
/// letters.
fn is_special(byte: u8) -> bool {
    !byte.is_ascii_alphanumeric() && byte.is_ascii() && !b"/._-:=,@%+".contains(&byte)
}

fn escaped(text: &[u8], is_special: impl Fn(u8) -> bool) -> Vec<u8> {
    text.iter().flat_map(|&byte| is_special(byte).then_some(b'\\').into_iter().chain([byte])).collect()
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

    const BREAKS: &[u8] = b" \t\n\"'><=;|&(:";

    fn typed(line: &str) -> BashLine {
        BashLine::of(line.as_bytes(), BREAKS)
    }

    #[test]
    fn a_line_is_cut_into_words_as_bash_cuts_it() {
        for (line, words, replaced) in [
            ("lockbox ", &["lockbox", ""][..], 0),
            ("lockbox  ls", &["lockbox", "ls"], 0),
            ("A=b C= lockbox ls", &["lockbox", "ls"], 0),
            (r"lockbox ls my\ box", &["lockbox", "ls", "my box"], 0),
            (r"lockbox ls my\ box.lbx:a", &["lockbox", "ls", "my box.lbx:a"], 11),
            (r"lockbox ls a\:b", &["lockbox", "ls", "a:b"], 0),
            ("lockbox ls \"my b", &["lockbox", "ls", "my b"], 0),
            ("lockbox ls --passfile='a b", &["lockbox", "ls", "--passfile=a b"], 11),
            ("lockbox ls \"a b\"c", &["lockbox", "ls", "a bc"], 3),
            ("lockbox ls \"a\\b\\$", &["lockbox", "ls", "a\\b$"], 0),
            ("lockbox ls '", &["lockbox", "ls", ""], 0),
            ("lockbox ls a\\", &["lockbox", "ls", "a"], 0),
        ] {
            let typed = typed(line);
            let read: Vec<&str> = typed.words.iter().map(|word| std::str::from_utf8(word).unwrap()).collect();
            assert_eq!((&read[..], typed.replaced), (words, replaced), "{line}");
        }
    }

    #[test]
    fn what_is_put_there_is_one_word_and_runs_nothing() {
        let hostile = "$(touch x) `id`;a&b|c>d<e(f)!g*h?[i]{j}~#k\\l\"m'n$o^";
        for line in ["lockbox ls ", "lockbox ls \"", "lockbox ls box:"] {
            let typed = typed(line);
            let begun = String::from_utf8(typed.words.last().unwrap().clone()).unwrap();
            for name in [hostile.to_owned(), hostile.replace('!', ""), "~root".into(), "-x".into(), "ü b".into()] {
                let candidate = Candidate::new(begun.as_bytes(), &name);
                let Some(text) = typed.completed_by(&candidate) else {
                    assert!(name.contains('!') && line.ends_with('"'));
                    continue;
                };
                let whole = [line.as_bytes(), &text, if line.ends_with('"') { b"\" " } else { b"" }].concat();
                let again = BashLine::of(&whole, BREAKS);
                assert_eq!(again.words[2], format!("{begun}{name}").as_bytes(), "{}", String::from_utf8_lossy(&whole));
            }
        }
        let quoted = |line: &str, name: &str| typed(line).completed_by(&Candidate::new(b"", name));
        assert_eq!(quoted("lockbox ls '", "a'b"), None);
        assert_eq!(quoted("lockbox ls '", "a b").unwrap(), b"a b");
        assert_eq!(quoted("lockbox ls ~/a", "~/a b").unwrap(), b"~/a\\ b ");
        assert_eq!(quoted("lockbox ls x:a", "x:a b").unwrap(), b"a\\ b ");
    }
}
