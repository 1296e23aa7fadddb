//! Output of the program: lines on standard output, complaints on standard error, times, sizes and
//! JSON.
use std::io::{self, IsTerminal, Write};

use jiff::tz::TimeZone;
use lockbox::Error;
use lockbox::error::Timestamp;
use lockbox::exchange::{CopyCounts, Problem, ProblemCause, SkippedCount, SkippedItems};
use lockbox_terminal::{display, hex, quantity};
use serde_json::{Value, json};

use crate::exit::{self, Failure};

/// Prints an error, once, as `lockbox: sentence`.
pub(crate) fn complain(message: &str) {
    lockbox_terminal::complain("lockbox", message);
}

/// Shows a line that belongs to a question.
pub(crate) fn show(line: &str) {
    lockbox_terminal::say(&lockbox_terminal::sentence(line));
}

pub(crate) fn complain_of(problems: &[Problem]) {
    for problem in problems {
        complain(&format!("{}: {}", display(&problem.path), reason(problem)));
    }
}

/// Returns the result of a copy in either direction, for programs.
pub(crate) fn summary(copied: &CopyCounts, left: &SkippedItems) -> Value {
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
pub(crate) fn complain_of_left(left: &SkippedItems) {
    let SkippedCount { count, first } = &left.attributes;
    match count {
        0 => {}
        1 => complain(&format!("1 extended attribute was not copied: {first}")),
        count => complain(&format!("{count} extended attributes were not copied, the first: {first}")),
    }
    let SkippedCount { count, first } = &left.privileges;
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
        ProblemCause::Changed => "the file changed while it was read".to_owned(),
        ProblemCause::Itself => "the archive cannot hold itself".to_owned(),
        ProblemCause::Failed(Error::Exists) => "file exists; use --force to replace it".to_owned(),
        ProblemCause::Failed(error) => Failure::sentence(error),
    }
}

/// Sends the library's log to standard error; `LOCKBOX_LOG` sets its level.
pub(crate) fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LOCKBOX_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .without_time()
        .with_target(false)
        .with_ansi(lockbox_terminal::is_animated())
        .finish();
    // `init` would also show messages of libraries through the crate `log`, and the HTTP library
    // shows the bytes that it sends, tokens included. The only error is a second call.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Reader of output that is not JSON, which decides the format of times and sizes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    /// Person at a terminal.
    Person,
    /// Perhaps a script, on a machine in another place.
    Program,
}

impl Reader {
    pub(crate) fn of(stream: &impl IsTerminal) -> Reader {
        if stream.is_terminal() { Reader::Person } else { Reader::Program }
    }

    /// Formats a time, for a person in the local time with its offset; else in UTC.
    pub(crate) fn time(self, time: Timestamp) -> String {
        let local = || local(time.seconds, TimeZone::system());
        let here = if self == Reader::Person { local() } else { None };
        here.unwrap_or_else(|| format!("{} UTC", time.utc()))
    }

    /// The same for seconds since 1970.
    pub(crate) fn seconds(self, seconds: u64) -> String {
        self.time(Timestamp { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 })
    }

    /// Formats a size, for a person in a unit that fits; else exactly.
    pub(crate) fn size(self, bytes: u64) -> String {
        match self {
            Reader::Person => quantity::readable(bytes),
            Reader::Program => format!("{bytes} bytes"),
        }
    }
}

/// Returns None for a year of more than four digits.
fn local(seconds: i64, zone: TimeZone) -> Option<String> {
    let time = jiff::Timestamp::from_second(seconds).ok()?.to_zoned(zone);
    Some(time.strftime("%Y-%m-%d %H:%M:%S %:z").to_string())
}

/// Standard output, buffered.
pub(crate) struct Output {
    out: io::BufWriter<io::StdoutLock<'static>>,
    pub(crate) reader: Reader,
}

impl Output {
    pub(crate) fn new() -> Output {
        let out = io::stdout();
        let reader = Reader::of(&out);
        Output { out: io::BufWriter::with_capacity(64 << 10, out.lock()), reader }
    }

    /// Prints a line for people, with untrusted text escaped.
    pub(crate) fn line(&mut self, text: &str) -> Result<(), Failure> {
        self.bytes(display(text.as_bytes()).as_bytes())?;
        self.bytes(b"\n")
    }

    pub(crate) fn json(&mut self, value: &Value) -> Result<(), Failure> {
        self.bytes(lockbox_terminal::json(&value.to_string()).as_bytes())?;
        self.bytes(b"\n")
    }

    /// Prints a name of the archive: unchanged for a program, escaped for a terminal.
    pub(crate) fn name(&mut self, name: &[u8]) -> Result<(), Failure> {
        match self.reader {
            Reader::Person => self.bytes(display(name).as_bytes()),
            Reader::Program => self.bytes(name),
        }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.out.write_all(bytes).map_err(|e| exit::of_output(&e))
    }

    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|e| exit::of_output(&e))
    }
}

/// Standard output for writers that report a failed write themselves.
pub(crate) struct Watched {
    out: io::StdoutLock<'static>,
    failed: Option<io::Error>,
}

impl Watched {
    pub(crate) fn new() -> Watched {
        Watched { out: io::stdout().lock(), failed: None }
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failed.as_ref().map(exit::of_output)
    }

    fn note<T>(&mut self, done: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &done
            && let Some(number) = error.raw_os_error()
        {
            self.failed = Some(io::Error::from_raw_os_error(number));
        }
        done
    }
}

impl Write for Watched {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let done = self.out.write(bytes);
        self.note(done)
    }

    fn flush(&mut self) -> io::Result<()> {
        let done = self.out.flush();
        self.note(done)
    }
}

pub(crate) fn print(line: &str) -> Result<(), Failure> {
    let mut out = Output::new();
    out.line(line)?;
    out.finish()
}

pub(crate) fn print_json(object: &Value) -> Result<(), Failure> {
    let mut out = Output::new();
    out.json(object)?;
    out.finish()
}

/// Adds a name to a JSON object: `name` as text, and `name_hex` when the bytes are not UTF-8.
pub(crate) fn put_name(object: &mut Value, key: &str, name: &[u8]) {
    object[key] = json!(String::from_utf8_lossy(name));
    if std::str::from_utf8(name).is_err() {
        object[format!("{key}_hex")] = json!(hex(name));
    }
}

/// Formats like `1 file` or `2 files`.
pub(crate) fn count(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Formats a time as RFC 3339 with nanoseconds.
pub(crate) fn rfc3339(time: Timestamp) -> String {
    format!("{}.{:09}Z", time.utc().replace(' ', "T"), time.nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_sees_the_time_of_the_place_with_its_offset() {
        let told = |seconds, zone: &str| local(seconds, TimeZone::posix(zone).unwrap());
        let vienna = "CET-1CEST,M3.5.0,M10.5.0/3";
        assert_eq!(told(1_795_525_200, vienna).as_deref(), Some("2026-11-24 14:00:00 +01:00"));
        assert_eq!(told(1_782_907_200, vienna).as_deref(), Some("2026-07-01 14:00:00 +02:00"));
        assert_eq!(told(-1, "IST-5:30").as_deref(), Some("1970-01-01 05:29:59 +05:30"));
        assert_eq!(told(0, "EST5").as_deref(), Some("1969-12-31 19:00:00 -05:00"));
        assert_eq!(told(1 << 60, "UTC0"), None);
    }

    #[test]
    fn a_program_gets_exact_sizes_and_times_in_utc() {
        let time = Timestamp { seconds: 1_795_530_000, nanos: 5 };
        assert_eq!(Reader::Program.time(time), "2026-11-24 14:20:00 UTC");
        let huge = Timestamp { seconds: 1 << 50, nanos: 0 };
        assert_eq!(Reader::Person.time(huge), Reader::Program.time(huge), "no zone has rules for it");
        assert_eq!(
            (Reader::Program.size(20 << 20), Reader::Person.size(20 << 20)),
            ("20971520 bytes".into(), "20 MiB".into())
        );
    }

    #[test]
    fn times_in_json_have_nanoseconds() {
        assert_eq!(rfc3339(Timestamp { seconds: 1, nanos: 5 }), "1970-01-01T00:00:01.000000005Z");
    }
}
