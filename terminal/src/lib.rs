//! Shows text from untrusted sources (names, labels, and answers of daemons and servers), and
//! formats and parses times and sizes.
//!
//! Every program of the project prints messages through [`complain`], and any other output that may
//! hold such text through [`display`] or [`json`], so that callers need not know the origin of a
//! text. Escaped are characters that a terminal obeys (control characters, also of C1 and a
//! newline, which would make a line look like one of ours) and characters that reorder other text.

pub mod quantity;

pub use quantity::{civil, utc};

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::os::unix::ffi::OsStrExt;

/// Longest message in bytes: two paths and a sentence. A longer one is an attempt to fill a screen.
const MOST: usize = 9 << 10;

/// Makes every panic end the process after its report, also in test builds, whose panics unwind.
/// Each program calls this first, and again when it has replaced the hook that reports.
pub fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// Returns the bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes `program: sentence` to standard error, wrapped at the width of a terminal.
pub fn complain(program: &str, message: &str) {
    say(&format!("{program}: {}", sentence(message)));
}

/// Writes a line of [`sentence`]s to standard error, wrapped at the width of a terminal.
pub fn say(line: &str) {
    let line = match terminal_size::terminal_size_of(io::stderr()) {
        // A terminal may report no width at all.
        Some((terminal_size::Width(width), _)) if width >= NARROWEST => wrapped(line, width.into()),
        _ => line.to_owned(),
    };
    // With standard error closed there is no reader.
    let _ = writeln!(io::stderr(), "{line}");
}

/// Narrower terminals wrap lines themselves.
const NARROWEST: u16 = 20;

/// Breaks a line between words; a longer word, such as a path, stays whole, to be copied.
fn wrapped(line: &str, width: usize) -> String {
    let whole_words = textwrap::WordSplitter::NoHyphenation;
    let options = textwrap::Options::new(width).break_words(false).word_splitter(whole_words).subsequent_indent("  ");
    textwrap::fill(line, options)
}

/// Returns whether standard error is a terminal that obeys escape sequences.
pub fn is_animated() -> bool {
    io::stderr().is_terminal() && env::var_os("TERM").is_some_and(|term| term != "dumb")
}

/// Returns the text of a message or a question.
pub fn sentence(text: &str) -> String {
    let mut shown = display(text.as_bytes());
    if shown.len() > MOST {
        shown.truncate(shown.floor_char_boundary(MOST));
        shown.push_str(" [...]");
    }
    shown
}

/// Returns an error of the command line, when an argument has characters that a terminal would
/// obey, such as an untrusted file name.
pub fn of_arguments(text: &str) -> Option<String> {
    let harmless = |argument: OsString| display(argument.as_bytes()).as_bytes() == argument.as_bytes();
    (!env::args_os().all(harmless)).then(|| lines(text))
}

/// Removes the numbers that the standard library adds to the host's errors: their words have the
/// same meaning.
pub fn without_numbers(mut text: String) -> String {
    while let Some(start) = text.find(" (os error ") {
        let Some(length) = text[start..].find(')') else { break };
        text.replace_range(start..=start + length, "");
    }
    text
}

fn lines(text: &str) -> String {
    text.split('\n').map(sentence).collect::<Vec<_>>().join("\n")
}

/// Formats a name or any other bytes: bytes that are not text, drive a terminal or reorder text are
/// written as `\xNN`, byte by byte.
pub fn display(bytes: &[u8]) -> String {
    let mut shown = String::with_capacity(bytes.len());
    for piece in bytes.utf8_chunks() {
        for c in piece.valid().chars() {
            if is_obeyed(c) {
                escape(c.encode_utf8(&mut [0; 4]).as_bytes(), &mut shown);
            } else {
                shown.push(c);
            }
        }
        escape(piece.invalid(), &mut shown);
    }
    shown
}

/// Returns the advice to run a command on a path, in quotes. The command contains the path only if
/// a shell takes it as one word: a copied line must run nothing that the author of a name wrote.
pub fn advice(command: &str, path: &[u8]) -> String {
    let shown = display(path);
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || !byte.is_ascii() || b"/._-+,:@%=".contains(&byte);
    match shown.as_bytes() == path && shown.bytes().all(plain) {
        true => format!("'{command} {shown}'"),
        false => format!("'{command}' with that path"),
    }
}

/// Escapes a line of JSON without changing its meaning to any parser: such characters are in
/// strings only, where they may be `\uNNNN`.
pub fn json(line: &str) -> String {
    let mut shown = String::with_capacity(line.len());
    for c in line.chars() {
        match u32::from(c) {
            code @ ..=0xffff if is_obeyed(c) => drop(write!(shown, "\\u{code:04x}")),
            _ => shown.push(c),
        }
    }
    shown
}

/// Returns whether a terminal may do something other than show this character at its position. Some
/// of Unicode's marks make a text look like another one: those that reorder surrounding characters,
/// and those that end a line or a paragraph.
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}')
}

fn escape(bytes: &[u8], shown: &mut String) {
    for byte in bytes {
        // Writing to a String does not fail.
        let _ = write!(shown, "\\x{byte:02x}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_contains_no_path_that_a_shell_would_take_apart() {
        assert_eq!(advice("lockbox umount", "/mnt/a-b_c.é".as_bytes()), "'lockbox umount /mnt/a-b_c.é'");
        for path in
            ["/a b", "/a;id", "/a$(id)", "/a`id`", "/a'", "/a\"", "/a\\", "/a*", "/a~b", "/a\n", "/a&", "/a#", "/a!"]
        {
            assert_eq!(advice("lockbox umount", path.as_bytes()), "'lockbox umount' with that path", "{path}");
        }
        assert_eq!(advice("lockbox umount", b"/a\xff"), "'lockbox umount' with that path");
        assert_eq!(advice("lockbox umount", "/a\u{202e}b".as_bytes()), "'lockbox umount' with that path");
    }

    /// Runs only as a child of the test below.
    #[test]
    #[ignore = "ends its process"]
    fn panic_in_a_thread() {
        std::panic::set_hook(Box::new(|_| complain("test", "reported by its own hook")));
        abort_on_panic();
        let _ = std::thread::spawn(|| panic!("in a thread")).join();
    }

    #[test]
    fn a_panic_in_any_thread_ends_the_program() {
        use std::os::unix::process::ExitStatusExt;
        let test = env::current_exe().unwrap();
        let arguments = ["--exact", "tests::panic_in_a_thread", "--ignored", "--nocapture"];
        let output = std::process::Command::new(test).args(arguments).output().unwrap();
        assert_eq!(output.status.signal(), Some(6), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("reported by its own hook"), "{output:?}");
    }

    /// Returns all of C0 and C1, DEL, and the marks that reorder text or end lines.
    fn obeyed() -> impl Iterator<Item = char> {
        let marks = "\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}";
        ('\0'..' ').chain('\u{7f}'..='\u{9f}').chain(marks.chars())
    }

    #[test]
    fn no_control_character_and_no_mark_that_reorders_reaches_the_terminal() {
        for c in obeyed() {
            let text = format!("a{c}b");
            let escaped: String = c.to_string().bytes().map(|byte| format!("\\x{byte:02x}")).collect();
            assert_eq!(display(text.as_bytes()), format!("a{escaped}b"));
            assert_eq!(sentence(&text), format!("a{escaped}b"));
            assert_eq!(lines(&text).contains(c), c == '\n');
            assert!(!json(&text).contains(c) && json(&text).is_ascii());
        }
        assert_eq!(display(b"\xff\xc3\x9b1m\x9b"), "\\xff\\xc3\\x9b1m\\x9b".replace("\\xc3\\x9b", "\u{db}"));
    }

    #[test]
    fn what_is_only_shown_stays_as_it_is() {
        for text in ["Grüße", "日本語", "שלום", "a\\x1bb", "👩\u{200d}👧", "'\"{}", "\u{a0}"] {
            assert_eq!((display(text.as_bytes()), sentence(text), json(text)), (text.into(), text.into(), text.into()));
        }
    }

    #[test]
    fn every_byte_that_is_no_text_is_escaped() {
        for byte in 0x80..=0xff_u8 {
            assert_eq!(display(&[b'a', byte]), format!("a\\x{byte:02x}"));
        }
    }

    #[test]
    fn a_message_is_wrapped_between_words_and_paths_stay_whole() {
        let path = "/mnt/archive/a/path/that/is/longer/than/the/line";
        let shown = wrapped(&format!("lockbox: cannot read {path}: no such file"), 30);
        assert_eq!(shown, format!("lockbox: cannot read\n  {path}:\n  no such file"));
        assert_eq!(wrapped("lockbox: 日本語 日本語 well-known", 20), "lockbox: 日本語\n  日本語 well-known");
        assert_eq!(wrapped("short", 20), "short");
    }

    #[test]
    fn a_message_that_would_fill_the_screen_is_cut() {
        let shown = sentence(&"\u{1b}ü".repeat(10_000));
        assert!(shown.len() < 10_000 && shown.ends_with(" [...]"));
    }
}
