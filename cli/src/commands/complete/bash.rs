//! Parses a line as bash and readline do, and quotes insertions.
//!
//! Bash also passes words that are cut at colons and equals signs, and inserts the answer
//! unchanged. So the line itself is parsed here, as data: nothing in it is expanded. Leaving the
//! quoting to readline (`-o filenames`) would make it look at each name, as a file of the current
//! directory, and wait for mounts there.

use super::Candidate;

/// The line up to the cursor.
pub(super) struct Typed {
    /// Without quotes.
    pub(super) words: Vec<Vec<u8>>,
    /// The quote in which the cursor is.
    quote: Option<u8>,
    /// Start of the part of the last word that bash replaces.
    replaced: usize,
}

impl Typed {
    pub(super) fn of(line: &[u8], breaks: &[u8]) -> Typed {
        let mut typed = Typed { words: Vec::new(), quote: None, replaced: 0 };
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
    use super::*;

    const BREAKS: &[u8] = b" \t\n\"'><=;|&(:";

    fn typed(line: &str) -> Typed {
        Typed::of(line.as_bytes(), BREAKS)
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
                let again = Typed::of(&whole, BREAKS);
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
