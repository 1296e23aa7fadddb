//! Prompts and reports errors in a window where there is no terminal, with zenity, kdialog or
//! pinentry.
//!
//! The typed secret is read from a pipe, and is in no argument and no variable. The shown text may
//! hold untrusted names; each of these programs gives some characters a meaning, and gets them
//! escaped in its own syntax.

use std::io::{ErrorKind, Write};
use std::process::{Child, Command, Stdio};

use lockbox_terminal::display;

use super::read::PASSPHRASE;
use super::{Bytes, Error, Result, read};

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialog {
    Zenity,
    Kdialog,
    Pinentry,
}

/// Asks for a secret.
///
/// # Errors
/// `Left` when the window is closed without an answer; one sentence without a desktop, or when
/// nothing is there to ask with.
pub(crate) fn ask(question: &str) -> Result<Bytes> {
    let question = lockbox_terminal::sentence(question.trim_end_matches([':', ' ']));
    let (dialog, mut window) = open(|dialog| dialog.question(&question))?;
    if let Some(mut input) = window.stdin.take() {
        // A program that ended already reports the reason by its exit.
        let _ = input.write_all(conversation(&question).as_bytes());
    }
    let (answer, status) = read::answer_of(&mut window, dialog.name(), &PASSPHRASE)?;
    match dialog {
        Dialog::Pinentry => pin(&answer),
        // Both exit with this code when their window was closed, and when they could not open it,
        // which they report themselves.
        _ if status.code() == Some(1) => Err(Error::left()),
        _ if !status.success() => Err(Error::source(format!("{} failed: {status}", dialog.name()))),
        _ => Ok(answer),
    }
}

/// Shows the user of a desktop why the operation failed, until it is dismissed. Does nothing
/// without a desktop.
pub fn tell(sentence: &str) {
    let sentence = lockbox_terminal::sentence(sentence);
    let Ok((_, mut window)) = open(|dialog| dialog.complaint(&sentence)) else { return notify(&sentence) };
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

/// Starts the first installed program of them.
fn open(arguments: impl Fn(Dialog) -> Vec<String>) -> Result<(Dialog, Child)> {
    if !is_there() {
        return Err(Error::source("there is no desktop to ask on: neither DISPLAY nor WAYLAND_DISPLAY is set"));
    }
    let desktop = std::env::var("XDG_CURRENT_DESKTOP").unwrap_or_default();
    for dialog in order(&desktop) {
        let input = if dialog == Dialog::Pinentry { Stdio::piped() } else { Stdio::null() };
        let mut command = Command::new(dialog.name());
        command.args(arguments(dialog)).stdin(input).stdout(Stdio::piped());
        match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::host(format!("{} failed", dialog.name()), &error)),
            Ok(window) => return Ok((dialog, window)),
        }
    }
    Err(Error::source("no program can ask in a window: install zenity, kdialog or pinentry"))
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

/// Returns the whole input of pinentry.
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

    #[test]
    fn the_program_of_the_desktop_comes_first() {
        assert_eq!(order("KDE")[0], Dialog::Kdialog);
        assert_eq!(order("ubuntu:GNOME")[0], Dialog::Zenity);
        assert_eq!(order("")[0], Dialog::Zenity);
    }
}
