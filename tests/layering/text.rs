//! Reads sources as text: what is code in them, what is said, and what is there for tests alone.

pub(crate) const TEST_MARK: &str = "#[cfg(test)]";

/// Replaces comments and strings by spaces, so that only code is left to look at.
pub(crate) fn blank(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let Some((length, _)) = no_code(rest, out.ends_with(is_name)) else {
            out.push(c);
            rest = &rest[c.len_utf8()..];
            continue;
        };
        out.extend(rest[..length].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = &rest[length..];
    }
    out
}

/// The length of the comment or literal that the text begins with, and whether it is a string; `in_name` when a name ends before it.
fn no_code(text: &str, in_name: bool) -> Option<(usize, bool)> {
    if text.starts_with("//") {
        return Some((text.find('\n').unwrap_or(text.len()), false));
    }
    if text.starts_with("/*") {
        return Some((text.find("*/").map_or(text.len(), |end| end + 2), false));
    }
    let string = raw_string(text).filter(|_| !in_name).or_else(|| text.starts_with('"').then(|| quoted(text, '"')));
    string.map(|length| (length, true)).or_else(|| Some((character(text)?, false)))
}

/// The strings of a source as they are written there, without those of a module for tests at its end.
pub(crate) fn literals(text: &str) -> Vec<&str> {
    let mut rest = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let mut found = Vec::new();
    let mut in_name = false;
    while let Some(c) = rest.chars().next() {
        let (length, is_string) = no_code(rest, in_name).unwrap_or((c.len_utf8(), false));
        found.extend(is_string.then(|| &rest[..length]));
        in_name = rest[..length].ends_with(is_name);
        rest = &rest[length..];
    }
    found
}

/// Whether a sentence names a command or an option.
pub(crate) fn is_of_a_program(literal: &str) -> bool {
    let option = |mark: &str| {
        literal.match_indices(mark).any(|(at, _)| {
            let begins = literal[..at].chars().next_back().is_none_or(|c| !is_name(c) && c != '-');
            begins && literal[at + mark.len()..].starts_with(|c: char| c.is_ascii_lowercase())
        })
    };
    let command = ["'lockbox ", "`lockbox ", "mount.lockbox "].iter().any(|name| literal.contains(name));
    command || option("--") || option("-o ")
}

fn raw_string(text: &str) -> Option<usize> {
    let inner = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = inner.len() - inner.trim_start_matches('#').len();
    let body = inner[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(text.len() - body.len() + body.find(&end).map_or(body.len(), |at| at + end.len()))
}

fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// The length of a character literal; none for a lifetime.
fn character(text: &str) -> Option<usize> {
    let mut chars = text.strip_prefix('\'')?.chars();
    match (chars.next()?, chars.next()?) {
        ('\\', _) => Some(quoted(text, '\'')),
        (c, '\'') => Some(2 + c.len_utf8()),
        _ => None,
    }
}

/// Cuts out the items for tests only. The text must be free of comments and strings.
pub(crate) fn without_tests(code: &str) -> String {
    let mut parts = code.split(TEST_MARK);
    let mut out = parts.next().unwrap_or_default().to_owned();
    let mut depth = 0i32;
    for part in parts {
        let end = part.char_indices().find_map(|(at, c)| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            (depth == 0 && matches!(c, ';' | '}')).then_some(at + 1)
        });
        // A mark inside of an item that is being cut out leaves the braces of that item open.
        out.push_str(end.map_or("", |end| &part[end..]));
    }
    out
}

pub(crate) fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
