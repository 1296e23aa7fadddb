//! What the program shows: lines on standard output, complaints on standard error, times and JSON.
use std::io::{self, IsTerminal, Write};

use lockbox::error::Timestamp;
use lockbox::exchange::{Cause, Copied, Left, LeftOut, Problem};
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::Failure;

/// Shows what went wrong, once, as `lockbox: sentence`.
pub(crate) fn complain(message: &str) {
    lockbox_terminal::complain("lockbox", message);
}

/// Shows a line that belongs to a question.
pub(crate) fn show(line: &str) {
    // Nobody is left to tell when standard error is closed.
    let _ = writeln!(io::stderr(), "{}", lockbox_terminal::sentence(line));
}

/// Shows each object that failed.
pub(crate) fn complain_of(problems: &[Problem]) {
    for problem in problems {
        complain(&format!("{}: {}", display(&problem.path), reason(problem)));
    }
}

/// What a copy in either direction did, for programs.
pub(crate) fn summary(copied: &Copied, left: &LeftOut) -> Value {
    json!({
        "files": copied.files,
        "directories": copied.directories,
        "links": copied.links,
        "symlinks": copied.symlinks,
        "others": copied.others,
        "bytes": copied.bytes,
        "attributes_left": left.attributes.count,
    })
}

/// Shows how much was left out of a copy, and one example of each kind.
pub(crate) fn complain_of_left(left: &LeftOut) {
    let Left { count, first } = &left.attributes;
    match count {
        0 => {}
        1 => complain(&format!("1 extended attribute was not copied: {first}")),
        count => complain(&format!("{count} extended attributes were not copied, the first: {first}")),
    }
    let Left { count, first } = &left.privileges;
    match count {
        0 => {}
        1 => complain(&format!("1 privilege was left out ({first}); --privileges keeps it")),
        count => complain(&format!("{count} privileges were left out (the first: {first}); --privileges keeps them")),
    }
}

/// The same for a program.
pub(crate) fn problems(problems: &[Problem]) -> Vec<Value> {
    let object = |problem: &Problem| {
        let mut object = json!({"message": reason(problem)});
        put_name(&mut object, "path", &problem.path);
        object
    };
    problems.iter().map(object).collect()
}

fn reason(problem: &Problem) -> String {
    match &problem.cause {
        Cause::Changed => "the file changed while it was read".to_owned(),
        Cause::Itself => "the archive cannot hold itself".to_owned(),
        Cause::Failed(error) => Failure::sentence(error),
    }
}

/// The library's log goes to standard error; `LOCKBOX_LOG` chooses how much of it.
pub(crate) fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LOCKBOX_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .without_time()
        .with_target(false)
        .with_ansi(io::stderr().is_terminal())
        .finish();
    // `init` would show what libraries say through the crate `log` as well, and the HTTP library shows the bytes that it sends, tokens included.
    // The only error is a second call.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Standard output, buffered.
pub(crate) struct Output {
    out: io::BufWriter<io::StdoutLock<'static>>,
    terminal: bool,
}

impl Output {
    pub(crate) fn new() -> Output {
        let out = io::stdout();
        let terminal = out.is_terminal();
        Output { out: io::BufWriter::with_capacity(64 << 10, out.lock()), terminal }
    }

    /// For people, whatever strangers wrote into it.
    pub(crate) fn line(&mut self, text: &str) -> Result<(), Failure> {
        self.bytes(display(text.as_bytes()).as_bytes())?;
        self.bytes(b"\n")
    }

    pub(crate) fn json(&mut self, value: &Value) -> Result<(), Failure> {
        self.bytes(lockbox_terminal::json(&value.to_string()).as_bytes())?;
        self.bytes(b"\n")
    }

    /// A name of the archive: as it is for a program, made harmless for a terminal.
    pub(crate) fn name(&mut self, name: &[u8]) -> Result<(), Failure> {
        if self.terminal { self.bytes(display(name).as_bytes()) } else { self.bytes(name) }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.out.write_all(bytes).map_err(|e| Failure::host("cannot write the output", &e))
    }

    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|e| Failure::host("cannot write the output", &e))
    }
}

/// Prints a line for people, and nothing else.
pub(crate) fn print(line: &str) -> Result<(), Failure> {
    let mut out = Output::new();
    out.line(line)?;
    out.finish()
}

/// Prints an object for a program, and nothing else.
pub(crate) fn print_json(object: &Value) -> Result<(), Failure> {
    let mut out = Output::new();
    out.json(object)?;
    out.finish()
}

/// Adds a name to a JSON object: `name` as text, and `name_hex` when the bytes are no UTF-8.
pub(crate) fn put_name(object: &mut Value, key: &str, name: &[u8]) {
    object[key] = json!(String::from_utf8_lossy(name));
    if std::str::from_utf8(name).is_err() {
        object[format!("{key}_hex")] = json!(hex(name));
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// RFC 3339 with nanoseconds.
pub(crate) fn rfc3339(time: Timestamp) -> String {
    format!("{}.{:09}Z", time.utc().replace(' ', "T"), time.nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_json_have_nanoseconds() {
        assert_eq!(rfc3339(Timestamp { seconds: 1, nanos: 5 }), "1970-01-01T00:00:01.000000005Z");
    }
}
