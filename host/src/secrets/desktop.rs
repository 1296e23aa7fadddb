//! Prompts and reports errors in a window where there is no terminal, with zenity, kdialog or
//! pinentry. Only the first two can ask for the name of a file.
//!
//! The typed secret is read from a pipe, and is in no argument and no variable. The shown text may
//! hold untrusted names; each of these programs gives some characters a meaning, and gets them
//! escaped in its own syntax.

use std::ffi::OsStr;
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use lockbox_terminal::display;

use super::read::{PASSPHRASE, SecretKind, TYPED, checked};
use super::{Bytes, Error, Result, prompt, read};
use crate::shown;

/// Index of pinentry's answer to the question: it sends a greeting, and then answers each line of
/// the [`conversation`].
const TO_QUESTION: usize = 4;
/// Errors of pinentry when its window was closed, alone or with the whole operation: codes of
/// libgpg-error, without their source.
const CLOSED: [u32; 2] = [99, 198];

/// Number of characters in a line of zenity's windows.
const COLUMNS: usize = 64;
/// Title of the windows, and beginning of the title where a program shows no text.
const TITLE: &str = "lockbox";

/// Path with a line end: at most PATH_MAX bytes, which counts a final zero byte.
const FILE_NAME: SecretKind = SecretKind { name: "file name", most: 4096 };

const NO_WINDOW: &str = "no program can show a password window; install zenity, kdialog or pinentry";
const NO_CHOOSER: &str = "no program can ask for a file name: install zenity or kdialog, as pinentry asks for \
                          passphrases only, or name the archive with 'lockbox create --desktop ARCHIVE'";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialog {
    Zenity,
    Kdialog,
    Pinentry,
}

/// Asks for a secret. Errors: `Left` when the window is closed without an answer; one sentence
/// without a desktop, or when nothing is there to ask with.
pub(crate) fn ask(question: &str) -> Result<Bytes> {
    let question = lockbox_terminal::sentence(question.trim_end_matches([':', ' ']));
    let (dialog, mut window) = open(NO_WINDOW, |dialog| Some(dialog.question(&question)))?;
    if let Some(mut input) = window.stdin.take() {
        // A program that ended already reports the reason by its exit.
        let _ = input.write_all(conversation(&question).as_bytes());
    }
    let (answer, status) = read::answer_of(&mut window, dialog.name(), &PASSPHRASE)?;
    match dialog {
        Dialog::Pinentry => pin(&answer),
        _ => dialog.check(status).map(|()| answer),
    }
}

/// Asks for the path of a new file, and suggests `name` in the user's home directory.
///
/// # Errors
/// As [`ask`]; one sentence when the answer is not an absolute path, such as the address of a
/// server.
pub fn ask_new_file(title: &str, name: &str) -> Result<PathBuf> {
    let suggestion = std::env::home_dir().unwrap_or_default().join(name);
    let (dialog, mut window) = open(NO_CHOOSER, |dialog| dialog.chooser(title, &suggestion.to_string_lossy()))?;
    let (answer, status) = read::answer_of(&mut window, dialog.name(), &FILE_NAME)?;
    dialog.check(status)?;
    // A name may end with a line end of its own.
    let path = Path::new(OsStr::from_bytes(answer.strip_suffix(b"\n").unwrap_or(&answer)));
    match path.is_absolute() {
        true => Ok(path.to_owned()),
        false => Err(Error::source(format!("cannot save to '{}': it is not a path on this machine", shown(path)))),
    }
}

/// Asks for a new passphrase of the archive at `path` until it is typed twice. With `advice` the
/// second window warns of a weak one. Errors: as [`ask`]; when the first window is answered with
/// nothing.
pub(crate) fn choose_passphrase(path: &Path, advice: bool) -> Result<Bytes> {
    typed_twice(path, advice, ask)
}

fn typed_twice(path: &Path, advice: bool, mut ask: impl FnMut(&str) -> Result<Bytes>) -> Result<Bytes> {
    let mut notice = "";
    loop {
        let question =
            format!("{notice}If you lose the passphrase, the files are lost. New passphrase of {}", shown(path));
        let first = checked(ask(&question)?, TYPED)?;
        let warning = if advice { prompt::warning(&first, path) } else { None };
        let again = match &warning {
            Some(warning) => {
                format!("{warning} Repeat it to use it anyway, or leave this empty to choose another one")
            }
            None => "Repeat the new passphrase".into(),
        };
        let second = read::without_line_end(ask(&again)?);
        if *first == *second {
            return Ok(first);
        }
        let is_refused = warning.is_some() && second.is_empty();
        notice = if is_refused { "" } else { "The two passphrases differ. " };
    }
}

/// Shows the user of a desktop why the operation failed, until it is dismissed. Does nothing
/// without a desktop.
pub fn tell(sentence: &str) {
    let sentence = lockbox_terminal::sentence(sentence);
    let complaint = |dialog: Dialog| Some(dialog.complaint(&sentence));
    let Ok((_, mut window)) = open(NO_WINDOW, complaint) else { return notify(&sentence) };
    if let Some(mut input) = window.stdin.take() {
        let _ = input.write_all(format!("SETTITLE {TITLE}\nSETDESC {}\nMESSAGE\nBYE\n", percent(&sentence)).as_bytes());
    }
    let _ = read::answer_of(&mut window, TITLE, &PASSPHRASE);
}

/// Shows a sentence without any of the dialog programs, such as the one that they are missing.
fn notify(sentence: &str) {
    if !is_there() {
        return;
    }
    for (program, arguments) in notices(sentence) {
        let command = Command::new(program).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).status();
        if command.is_ok_and(|status| status.success()) {
            return;
        }
    }
}

/// Returns the programs that show a notification or a plain window, with their arguments.
fn notices(sentence: &str) -> [(&'static str, Vec<String>); 2] {
    [
        ("notify-send", vec!["--icon=lockbox".into(), "--".into(), TITLE.into(), markup(sentence)]),
        ("xmessage", vec!["-center".into(), format!("{TITLE}: {}", in_lines(sentence))]),
    ]
}

/// Returns whether there is a desktop, wherever its user is.
pub fn is_there() -> bool {
    ["WAYLAND_DISPLAY", "DISPLAY"].iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
}

/// Starts the first installed program that has arguments; without one the error is `lacking`.
fn open(lacking: &str, arguments: impl Fn(Dialog) -> Option<Vec<String>>) -> Result<(Dialog, Child)> {
    if !is_there() {
        return Err(Error::source("no desktop for a password window: neither DISPLAY nor WAYLAND_DISPLAY is set"));
    }
    let desktop = std::env::var("XDG_CURRENT_DESKTOP").unwrap_or_default();
    for dialog in order(&desktop) {
        let Some(arguments) = arguments(dialog) else { continue };
        let input = if dialog == Dialog::Pinentry { Stdio::piped() } else { Stdio::null() };
        let mut command = Command::new(dialog.name());
        command.args(arguments).stdin(input).stdout(Stdio::piped());
        match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::host(format!("{} failed", dialog.name()), &error)),
            Ok(window) => return Ok((dialog, window)),
        }
    }
    Err(Error::source(lacking))
}

/// A program of the user's own desktop before one of another.
fn order(desktop: &str) -> [Dialog; 3] {
    match desktop.split(':').any(|name| name.eq_ignore_ascii_case("kde")) {
        true => [Dialog::Kdialog, Dialog::Zenity, Dialog::Pinentry],
        false => [Dialog::Zenity, Dialog::Kdialog, Dialog::Pinentry],
    }
}

impl Dialog {
    fn name(self) -> &'static str {
        match self {
            Dialog::Zenity => "zenity",
            Dialog::Kdialog => "kdialog",
            Dialog::Pinentry => "pinentry",
        }
    }

    /// Fails unless the program ended with an answer; pinentry reports that in its answer.
    fn check(self, status: ExitStatus) -> Result<()> {
        match status.code() {
            Some(0) => Ok(()),
            // Both others exit with this code when their window was closed, and when they could not
            // open it, which they report themselves.
            Some(1) => Err(Error::left()),
            _ => Err(Error::source(format!("{} failed: {status}", self.name()))),
        }
    }

    /// Returns the arguments of the question. Zenity's `--password` shows no text except in the
    /// title, so an entry with hidden text is used.
    fn question(self, text: &str) -> Vec<String> {
        let title = format!("--title={TITLE}");
        match self {
            Dialog::Zenity => {
                vec![
                    "--entry".into(),
                    "--hide-text".into(),
                    title,
                    format!("--text={}", compressed(&in_lines(text)).replace('_', "__")),
                ]
            }
            Dialog::Kdialog => vec![title, "--password".into(), rich(text)],
            Dialog::Pinentry => Vec::new(),
        }
    }

    /// Returns the arguments of the question where to save a file, if the program has one. Neither
    /// interprets the title or the path.
    fn chooser(self, title: &str, suggestion: &str) -> Option<Vec<String>> {
        let title = format!("--title={TITLE}: {title}");
        match self {
            Dialog::Zenity => Some(vec![
                "--file-selection".into(),
                "--save".into(),
                "--confirm-overwrite".into(),
                title,
                format!("--filename={suggestion}"),
            ]),
            Dialog::Kdialog => Some(vec![title, "--getsavefilename".into(), suggestion.into()]),
            Dialog::Pinentry => None,
        }
    }

    /// Returns the arguments of an error message.
    fn complaint(self, text: &str) -> Vec<String> {
        let title = format!("--title={TITLE}");
        match self {
            Dialog::Zenity => {
                let text = format!("--text={}", in_lines(text));
                vec!["--error".into(), "--no-markup".into(), "--width=400".into(), title, text]
            }
            Dialog::Kdialog => vec![title, "--error".into(), rich(text)],
            Dialog::Pinentry => Vec::new(),
        }
    }
}

/// Breaks the text for zenity, whose window gets as wide as a line of its question: with a long
/// path in it, the buttons would lie beyond the display.
fn in_lines(text: &str) -> String {
    let mut rest = text;
    let mut lines = Vec::new();
    while let Some((end, _)) = rest.char_indices().nth(COLUMNS) {
        let mut places = rest[..end].rmatch_indices([' ', '/']);
        // The first slash of a path stays with it.
        let last = places.find(|(at, what)| *what == " " || !rest[..*at].ends_with(' '));
        let end = last.map_or(end, |(at, _)| at + 1);
        lines.push(&rest[..end]);
        rest = &rest[end..];
    }
    lines.push(rest);
    lines.join("\n")
}

/// For kdialog, and for zenity where it asks, which read escapes of C.
fn compressed(text: &str) -> String {
    text.replace('\\', "\\\\")
}

/// Escapes the text for kdialog, which interprets anything like HTML, so all of it is HTML; kdialog
/// breaks lines automatically.
fn rich(text: &str) -> String {
    format!("<qt>{}</qt>", markup(&compressed(text)))
}

fn markup(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// For pinentry, line by line.
fn percent(text: &str) -> String {
    text.replace('%', "%25").replace('\n', "%0A").replace('\r', "%0D")
}

fn conversation(question: &str) -> String {
    format!("SETTITLE {TITLE}\nSETDESC {}\nSETPROMPT Passphrase:\nGETPIN\nBYE\n", percent(question))
}

/// Returns the PIN from pinentry's answer: lines of data, in which some bytes are written as `%NN`,
/// before the line that ends the answer. Errors about lines before the question, such as an
/// unsupported title, are not failures.
fn pin(answer: &[u8]) -> Result<Bytes> {
    // Allocated at its largest possible size: a growing buffer leaves copies in memory.
    let mut pin = Bytes::new(Vec::with_capacity(answer.len()));
    let mut answers = 0;
    for line in answer.split(|&byte| byte == b'\n') {
        let refused = line.strip_prefix(b"ERR ");
        if refused.is_some() || line == b"OK" || line.starts_with(b"OK ") {
            if answers == TO_QUESTION {
                return refused.map_or(Ok(pin), |why| Err(unanswered(why)));
            }
            answers += 1;
        }
        let Some(mut data) = line.strip_prefix(b"D ") else { continue };
        while let [first, rest @ ..] = data {
            data = rest;
            match (first, rest) {
                (b'%', [high, low, rest @ ..]) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                    pin.push(hexadecimal(*high) << 4 | hexadecimal(*low));
                    data = rest;
                }
                _ => pin.push(*first),
            }
        }
    }
    Err(Error::source("pinentry failed: it ended without an answer"))
}

/// Returns the reason why pinentry has no answer: a code and its meaning.
fn unanswered(why: &[u8]) -> Error {
    let why = display(why);
    let (code, text) = why.split_once(' ').unwrap_or((&why, &why));
    match code.parse::<u32>() {
        Ok(code) if CLOSED.contains(&(code & 0xffff)) => Error::left(),
        _ => Error::source(format!("pinentry failed: {text}")),
    }
}

fn hexadecimal(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;

    #[test]
    fn names_of_strangers_are_text_to_every_program() {
        let hostile = "<b>x</b> & \\n \\101 %0AMESSAGE _y";
        assert_eq!(Dialog::Zenity.complaint(hostile)[4], "--text=<b>x</b> & \\n \\101 %0AMESSAGE _y");
        assert_eq!(Dialog::Zenity.question(hostile)[3], "--text=<b>x</b> & \\\\n \\\\101 %0AMESSAGE __y");
        assert!(Dialog::Zenity.complaint(hostile).contains(&"--no-markup".to_owned()));
        for arguments in [Dialog::Kdialog.question(hostile), Dialog::Kdialog.complaint(hostile)] {
            assert_eq!(arguments[2], "<qt>&lt;b&gt;x&lt;/b&gt; &amp; \\\\n \\\\101 %0AMESSAGE _y</qt>");
        }
        let path = format!("/srv/-x/{hostile}");
        let chooser = |dialog: Dialog| dialog.chooser("New", &path);
        assert_eq!(
            chooser(Dialog::Zenity).unwrap()[3..],
            ["--title=lockbox: New".into(), format!("--filename={path}")]
        );
        assert_eq!(chooser(Dialog::Kdialog).unwrap(), ["--title=lockbox: New", "--getsavefilename", &path]);
        assert_eq!(chooser(Dialog::Pinentry), None);
        let [(_, notification), (_, window)] = notices("-x <b>");
        assert_eq!(notification[2..], ["lockbox", "-x &lt;b&gt;"]);
        assert_eq!(window[1], "lockbox: -x <b>");
        let told = conversation("a%0AGETPIN\nGETPIN");
        assert_eq!(told.lines().nth(1).unwrap(), "SETDESC a%250AGETPIN%0AGETPIN");
        assert_eq!(told.lines().count(), 5);
    }

    #[test]
    fn no_line_of_zenity_is_wider_than_a_window() {
        let name = "\u{fc}\\".repeat(100);
        let path = "/srv/anna/Accounts of the years 2019 to 2026 and what belongs to them";
        let text = format!("Read-only, as this user may not write to it. The passphrase of {path}/{name}.lbx");
        let told = Dialog::Zenity.complaint(&text)[4].clone();
        assert_eq!(Dialog::Zenity.question(&text)[3], told.replace('\\', "\\\\"));
        let lines: Vec<_> = told.strip_prefix("--text=").unwrap().split('\n').collect();
        let begin = [
            "Read-only, as this user may not write to it. The passphrase of ",
            "/srv/anna/Accounts of the years 2019 to 2026 and what belongs ",
            "to them/",
        ];
        assert_eq!(lines[..3], begin);
        assert!(lines.iter().all(|line| (1..=COLUMNS).contains(&line.chars().count())), "{lines:?}");
        assert_eq!(lines.concat(), text);
        let whole = "x".repeat(COLUMNS);
        assert_eq!(in_lines(&whole), whole);
    }

    #[test]
    fn what_pinentry_says_is_read_as_it_was_typed() {
        let read = |title: &str, answer: &[u8]| {
            let greeted = format!("OK hello\n# a comment\n{title}\nOK\nOK\n");
            pin(&[greeted.as_bytes(), answer].concat())
                .map(|pin| pin.to_vec())
                .map_err(|error| (error.kind, error.sentence))
        };
        let left = Err((Kind::Left, String::new()));
        let failed = |why: &str| Err((Kind::Source, format!("pinentry failed: {why}")));
        for title in ["OK", "ERR 536871187 Unknown IPC command <User defined source 1>", "ERR 99 x"] {
            let read = |answer: &[u8]| read(title, answer);
            assert_eq!(read(b"D a%25b%0a\xc3\xbc%\nOK\nOK closing\n"), Ok(b"a%b\n\xc3\xbc%".to_vec()));
            assert_eq!(read(b"D one\nS PIN_REPEATED\nD two\nOK\n"), Ok(b"onetwo".to_vec()));
            assert_eq!(read(b"OK\nOK\n"), Ok(Vec::new()), "nothing was typed");
            assert_eq!(read(b"ERR 83886179 Operation cancelled <Pinentry>\nOK\n"), left);
            assert_eq!(read(b"ERR 83886278 Operation fully cancelled <Pinentry>\n"), left);
            assert_eq!(read(b"ERR 83918950 Inappropriate ioctl\x1b[2J\nOK\n"), failed("Inappropriate ioctl\\x1b[2J"));
            assert_eq!(read(b"ERR 83886142 Timeout <Pinentry>\n"), failed("Timeout <Pinentry>"));
            assert_eq!(read(b"ERR nothing\n"), failed("nothing"));
            assert_eq!(read(b"D x\n"), failed("it ended without an answer"));
        }
        assert_eq!(conversation("x").lines().nth(TO_QUESTION - 1), Some("GETPIN"));
    }

    /// Returns the questions of a new passphrase and its result, with the answers of the user; a
    /// user without further answers closes the window.
    fn asked_for_new(name: &str, advice: bool, answers: &[&str]) -> (Vec<String>, std::result::Result<String, Kind>) {
        let mut questions = Vec::new();
        let mut answers = answers.iter();
        let chosen = typed_twice(Path::new(name), advice, |question| {
            questions.push(question.to_owned());
            answers.next().map(|answer| Bytes::new(format!("{answer}\n").into_bytes())).ok_or_else(Error::left)
        });
        let chosen = chosen.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).map_err(|error| error.kind);
        (questions, chosen)
    }

    #[test]
    fn a_new_passphrase_is_asked_for_until_it_is_typed_twice() {
        let strong = "mural stardust acid pluck";
        let new = "If you lose the passphrase, the files are lost. New passphrase of x\\x1b.lbx";
        let differ = format!("The two passphrases differ. {new}");
        let repeat = "Repeat the new passphrase";
        let asked = |answers: &[&str]| asked_for_new("x\x1b.lbx", true, answers);
        assert_eq!(asked(&[strong, strong]), (vec![new.into(), repeat.into()], Ok(strong.into())));
        let (questions, chosen) = asked(&[strong, "mural", strong, "", strong, strong]);
        assert_eq!(questions, [new, repeat, &differ, repeat, &differ, repeat]);
        assert_eq!(chosen, Ok(strong.into()));
        for closed in [&[][..], &[strong], &[strong, "mural"], &[strong, "mural", strong]] {
            assert_eq!(asked(closed), (questions[..=closed.len()].to_vec(), Err(Kind::Left)));
        }
        assert_eq!(asked(&[""]).1, Err(Kind::Source), "nothing was typed");
    }

    #[test]
    fn a_weak_passphrase_is_taken_when_it_is_repeated_and_only_then() {
        let asked = |answers: &[&str]| asked_for_new("Tax.lbx", true, answers);
        let (questions, chosen) = asked(&["hunter2", "", "hunter2", "hunter3", "hunter2", "hunter2"]);
        assert_eq!(chosen, Ok("hunter2".into()));
        assert!(questions[1].starts_with("This passphrase is weak: some thousand guesses find it. "), "{questions:?}");
        assert_eq!((&questions[2], &questions[3], &questions[5]), (&questions[0], &questions[1], &questions[1]));
        assert!(questions[4].starts_with("The two passphrases differ. "));
        let (questions, chosen) = asked_for_new("Tax.lbx", false, &["hunter2", "hunter2"]);
        assert_eq!((&*questions[1], chosen), ("Repeat the new passphrase", Ok("hunter2".into())));
    }

    #[test]
    fn the_program_of_the_desktop_comes_first() {
        assert_eq!(order("KDE")[0], Dialog::Kdialog);
        assert_eq!(order("ubuntu:GNOME")[0], Dialog::Zenity);
        assert_eq!(order("")[0], Dialog::Zenity);
    }
}
