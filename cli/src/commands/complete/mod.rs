//! `lockbox complete`: lists completions for a shell. The scripts of `lockbox completions` call it.
//!
//! It only reads: it prompts for nothing, derives no key, changes nothing, and uses no network.
//! Names in an archive are available while the keyring has the archive's key. On any failure
//! nothing is offered and nothing is printed. Names with characters that a terminal would obey are
//! not offered either, so that untrusted names are harmless in any shell; every shell gets them as
//! data, or quoted for it.
mod line;
mod values;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use clap::CommandFactory;
use lockbox_terminal::display;

use self::line::{BashLine, CursorContext, Line, ValueKind};
use self::values::Listed;
use crate::exit::Failure;
use crate::output::Output;

/// Deadline, after which nothing is offered: the mount or the server does not answer, and the shell
/// waits. Tests on a busy machine get more.
const PATIENCE: Duration = Duration::from_secs(if cfg!(debug_assertions) { 5 } else { 1 });

/// Complete a command line
#[derive(clap::Args)]
pub(crate) struct Args {
    shell: Shell,
    /// For bash the word separators and the line up to the cursor, for the others the words, of which the last is not complete
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// The shells that are tested.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Possible completion of a word.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    word: Vec<u8>,
    /// Length of the part that need not be shown again.
    shared: usize,
    /// The word may go on, so no space follows.
    open: bool,
    about: String,
}

impl Candidate {
    fn new(stem: &[u8], rest: impl AsRef<[u8]>) -> Candidate {
        Candidate { word: [stem, rest.as_ref()].concat(), shared: stem.len(), open: false, about: String::new() }
    }

    fn open(self) -> Candidate {
        Candidate { open: true, ..self }
    }

    /// Adds a description. Untrusted text is escaped: shells show it, and a newline would start
    /// another candidate.
    fn about(self, about: impl AsRef<[u8]>) -> Candidate {
        Candidate { about: display(about.as_ref()), ..self }
    }
}

/// Never fails: a completion has no reader for errors.
pub(crate) fn run(args: &Args) {
    let (shell, words) = (args.shell, args.words.clone());
    let (send, answer) = mpsc::channel();
    // A thread that hangs ends with the process.
    thread::spawn(move || send.send(text(shell, &words)));
    if let Ok(text) = answer.recv_timeout(PATIENCE) {
        let _ = io::stdout().write_all(&text);
    }
}

/// Returns the text that the script of the shell reads.
fn text(shell: Shell, words: &[OsString]) -> Vec<u8> {
    match (shell, words) {
        (Shell::Bash, [breaks, line]) => {
            let typed = BashLine::of(line.as_bytes(), breaks.as_bytes());
            let words: Vec<OsString> = typed.words.iter().skip(1).cloned().map(OsString::from_vec).collect();
            let quoted = offered(&words).into_iter().filter_map(|candidate| typed.completed_by(&candidate));
            quoted.flat_map(|quoted| [&quoted[..], b"\0"].concat()).collect()
        }
        (Shell::Bash, _) => Vec::new(),
        (Shell::Zsh, words) => {
            let fields = |candidate: Candidate| {
                let (shown, space) = (&candidate.word[candidate.shared..], if candidate.open { "" } else { " " });
                [&candidate.word[..], shown, space.as_bytes(), candidate.about.as_bytes(), b""].join(&0)
            };
            offered(words).into_iter().flat_map(fields).collect()
        }
        (Shell::Fish, words) => {
            let row = |candidate: Candidate| [&candidate.word[..], b"\t", candidate.about.as_bytes(), b"\n"].concat();
            offered(words).into_iter().flat_map(row).collect()
        }
    }
}

/// Returns the candidates for the last of the words after the program's name.
fn offered(words: &[OsString]) -> Vec<Candidate> {
    let mut program = crate::Cli::command();
    program.build();
    let Some((current, before)) = words.split_last() else { return Vec::new() };
    let line = Line::of(&program, before);
    let place = line.place(current.as_bytes());
    let takes_dash = line.takes_dash(&place);
    let mut found = match place {
        CursorContext::Option => options(&line, current.as_bytes()),
        CursorContext::Value { argument, stem, typed } => {
            let found = of_argument(&line, argument, stem.len(), OsStr::from_bytes(typed));
            found.into_iter().map(|candidate| behind(stem, candidate)).collect()
        }
        CursorContext::Word { argument } => {
            let mut found = commands(&line);
            found.extend(argument.into_iter().flat_map(|argument| of_argument(&line, argument, 0, current)));
            found
        }
    };
    found.retain(|Candidate { word, .. }| {
        word.starts_with(current.as_bytes())
            && (takes_dash || !word.starts_with(b"-"))
            && display(word).as_bytes() == word
    });
    found.sort_by(|one, other| one.word.cmp(&other.word));
    found.dedup_by(|one, other| one.word == other.word);
    found
}

/// Returns the candidate for the value of an option in the same word.
fn behind(stem: &[u8], candidate: Candidate) -> Candidate {
    Candidate { word: [stem, &candidate.word].concat(), shared: stem.len() + candidate.shared, ..candidate }
}

fn commands(line: &Line<'_>) -> Vec<Candidate> {
    let commands = line.commands().filter(|command| !command.is_hide_set());
    commands.map(|command| Candidate::new(b"", command.get_name()).about(first_line(command.get_about()))).collect()
}

/// Returns names of options; the short ones unless a long one is begun.
fn options(line: &Line<'_>, current: &[u8]) -> Vec<Candidate> {
    let mut found = Vec::new();
    for argument in line.command.get_arguments().filter(|argument| !argument.is_positional() && !argument.is_hide_set())
    {
        let about = first_line(argument.get_help());
        let equals = argument.is_require_equals_set() && argument.get_num_args().is_some_and(|n| n.min_values() > 0);
        for long in argument.get_long().into_iter().chain(argument.get_visible_aliases().unwrap_or_default()) {
            let candidate = Candidate::new(b"", format!("--{long}{}", if equals { "=" } else { "" }));
            found.push(Candidate { open: equals, ..candidate.about(&about) });
        }
        if let Some(short) = argument.get_short().filter(|_| current == b"-") {
            found.push(Candidate::new(b"", format!("-{short}")).about(&about));
        }
    }
    found
}

fn first_line(help: Option<&clap::builder::StyledStr>) -> String {
    help.map(|help| help.to_string().lines().next().unwrap_or_default().to_owned()).unwrap_or_default()
}

/// Returns candidates for the value of an argument. `before` is the length of the option within the
/// word.
fn of_argument(line: &Line<'_>, argument: &clap::Arg, before: usize, typed: &OsStr) -> Vec<Candidate> {
    let values = argument.get_possible_values();
    if !values.is_empty() && argument.get_action().takes_values() {
        return values.iter().map(|value| Candidate::new(b"", value.get_name())).collect();
    }
    let archive = || line.archive();
    match line::kind_of(line.command, argument) {
        Some(ValueKind::File) => values::list(typed, Listed::Files),
        Some(ValueKind::Directory) => values::list(typed, Listed::Nothing),
        Some(ValueKind::Archive) if before == 0 && line.takes_paths() => values::whole_or_within(typed, false),
        Some(ValueKind::Archive) => values::list(typed, Listed::Archives),
        Some(ValueKind::Within) => values::whole_or_within(typed, true),
        Some(ValueKind::Either) => values::either(typed),
        Some(ValueKind::Path) => archive().map(|archive| values::paths(&archive, typed)).unwrap_or_default(),
        Some(ValueKind::Mounted) => values::mounted(typed),
        Some(ValueKind::Slot) => archive().map(|archive| values::labels(&archive)).unwrap_or_default(),
        Some(ValueKind::Snapshot) => archive().map(|archive| values::snapshots(&archive)).unwrap_or_default(),
        Some(ValueKind::Variable) => archive().map(|archive| values::variables(&archive)).unwrap_or_default(),
        Some(ValueKind::Address) => values::addresses(),
        Some(ValueKind::MountOptions) => values::list_of_options(typed, true),
        Some(ValueKind::RemoteOptions) => values::list_of_options(typed, false),
        Some(ValueKind::Free) | None => Vec::new(),
    }
}

/// Print the completions of a shell
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    shell: Shell,
}

pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let script = match args.shell {
        Shell::Bash => include_str!("lockbox.bash"),
        Shell::Zsh => include_str!("lockbox.zsh"),
        Shell::Fish => include_str!("lockbox.fish"),
    };
    let mut out = Output::new();
    out.bytes(script.as_bytes())?;
    out.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<String> {
        let words: Vec<OsString> = line.iter().map(OsString::from).collect();
        offered(&words).into_iter().map(|candidate| String::from_utf8(candidate.word).unwrap()).collect()
    }

    #[test]
    fn commands_options_and_values_are_offered_where_they_fit() {
        assert!(words(&[""]).contains(&"mount".to_owned()) && !words(&[""]).contains(&"complete".to_owned()));
        assert_eq!(words(&["um"]), ["umount"]);
        assert_eq!(words(&["key", "re"]), ["recovery", "rekey"]);
        assert_eq!(words(&["help", "um"]), ["umount"]);
        assert_eq!(words(&["umount", "--w"]), ["--wait"]);
        assert_eq!(words(&["create", "--kdf-p"]), ["--kdf-parallelism", "--kdf-passes"]);
        assert_eq!(words(&["completions", ""]), ["bash", "fish", "zsh"]);
        assert!(
            words(&["mount", "-"]).contains(&"-o".to_owned()) && !words(&["mount", "--"]).contains(&"-o".to_owned())
        );
    }

    #[test]
    fn an_empty_word_is_never_offered_an_option() {
        fn below(command: &clap::Command, path: &[&str]) {
            for inner in command.get_subcommands() {
                let path = [path, &[inner.get_name()]].concat();
                let offered = words(&[&path[..], &[""]].concat());
                assert!(!offered.iter().any(|word| word.starts_with('-')), "{path:?}: {offered:?}");
                below(inner, &path);
            }
        }
        below(&crate::Cli::command(), &[]);
    }

    #[test]
    fn what_strangers_called_theirs_stays_one_line() {
        let about = Candidate::new(b"", "box").about(b"a\n$(b)\tc\x1b[2J\0\xff").about;
        assert_eq!(about, "a\\x0a$(b)\\x09c\\x1b[2J\\x00\\xff");
    }

    #[test]
    fn lists_of_options_go_on_behind_their_commas() {
        assert_eq!(words(&["mount", "-o", "ro,syn"]), ["ro,sync="]);
        assert_eq!(words(&["mount", "-oro,sync=p"]), ["-oro,sync=periodic"]);
        assert_eq!(
            words(&["exec", "-o", "snapshot-dir="]),
            ["hidden", "off", "shown"].map(|dir| format!("snapshot-dir={dir}"))
        );
        assert_eq!(words(&["ls", "--remote", "timeout=h"]), ["timeout=hard"]);
        assert_eq!(words(&["ls", "--remote=allow-http,allow-h"]), [""; 0], "that one is there");
        assert_eq!(words(&["ls", "--remote=allow-http,allow-"]), ["--remote=allow-http,allow-private"]);
        assert!(words(&["mount", "-o", ""]).contains(&"idle=".to_owned()));
    }
}
