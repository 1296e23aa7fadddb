//! What a store does with objects, found out with some that are removed again: what OBJECTS-1 to 3 ask of it, and its clock.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockbox::Result;

use super::object_names::{hex, random};
use super::objects::{Created, LISTED, Listed, Objects, Part};
use crate::diagnostics::{Finding, remedy};
use crate::range_source::Trouble;
use crate::remote_file::patiently;

/// Who make one object at once.
const RACERS: u8 = 8;
/// Bytes of an object.
const BYTES: usize = 10_000;
/// Seconds by which a clock may be wrong before a store refuses what is signed by it.
const WRONG: u64 = 300;
const USE_ANOTHER: &str = "use another store for backups: two writers could destroy each other's work there";

type Answer<T> = std::result::Result<T, Trouble>;

/// Objects of this probe, which are removed whatever comes between.
struct Traces<'a> {
    objects: &'a dyn Objects,
    timeout: Option<Duration>,
    prefix: String,
    names: Vec<String>,
}

impl Traces<'_> {
    /// The name of the next one. It is noted before anything is made.
    fn next(&mut self) -> String {
        let name = format!("{}{}", self.prefix, self.names.len());
        self.names.push(name.clone());
        name
    }

    fn ask<T>(&self, mut call: impl FnMut(&dyn Objects) -> Answer<T>) -> Answer<T> {
        patiently(&|| self.timeout, &mut || call(self.objects))
    }

    /// Forgets those that are gone.
    fn remove(&mut self) -> Answer<()> {
        while let Some(name) = self.names.last().cloned() {
            self.ask(|objects| objects.remove(&name))?;
            self.names.pop();
        }
        Ok(())
    }
}

impl Drop for Traces<'_> {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| drop(self.objects.remove(name)));
    }
}

fn content(of: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at % 251) as u8 ^ of).collect()
}

/// Adds to `findings` what the store does. The first thing that it cannot do at all ends it.
///
/// # Errors
/// That of `goes_on`.
pub(crate) fn probe(
    objects: &dyn Objects,
    timeout: Option<Duration>,
    findings: &mut Vec<Finding>,
    goes_on: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    // A store that does not answer is told at once.
    match objects.list("", "", 1) {
        Ok(_) => findings.push(Finding::good("lists", "what lies there can be listed")),
        Err(trouble @ Trouble::Refused(_)) => findings.push(Finding::advice(
            "lists",
            trouble.words(),
            "give the right to list if there are backups of many objects; an archive that is one object is read without it",
        )),
        Err(Trouble::Gone) => {
            findings.push(Finding::bad("lists", "there is no such bucket", remedy(&Trouble::Gone)));
            return Ok(());
        }
        Err(trouble) => {
            findings.push(Finding::bad("lists", trouble.words(), remedy(&trouble)));
            return Ok(());
        }
    }
    goes_on()?;
    let prefix = format!("probe-{}-", hex(&random()?));
    let mut traces = Traces { objects, timeout, prefix, names: Vec::new() };
    let (first, bytes) = (traces.next(), content(0));
    let date = match traces.ask(|objects| objects.create(&first, &bytes)) {
        Ok(Created::Made(date)) => {
            findings.push(Finding::good("writes", "objects can be made"));
            date
        }
        Ok(Created::Exists) => {
            let found = "it says of a name that nobody has used that it is taken";
            findings.push(Finding::bad("writes", found, USE_ANOTHER));
            return Ok(());
        }
        Err(trouble @ Trouble::Refused(_)) => {
            findings.push(Finding::advice(
                "writes",
                trouble.words(),
                "give the right to put and delete objects if backups are to be written; reading needs neither",
            ));
            return Ok(());
        }
        Err(trouble) => {
            findings.push(Finding::bad("writes", trouble.words(), remedy(&trouble)));
            return Ok(());
        }
    };
    goes_on()?;
    findings.push(again(&traces, &first));
    goes_on()?;
    findings.push(race(&mut traces));
    goes_on()?;
    findings.push(told("ranges", parts(&traces, &first, &bytes), "parts of objects are served"));
    goes_on()?;
    findings.push(told("order", order(&mut traces), "what was just made is listed, in the order of its bytes"));
    findings.push(clock(date));
    goes_on()?;
    findings.push(removal(&mut traces));
    Ok(())
}

/// What is as it has to be, or what is wrong.
fn told(name: &'static str, done: Answer<Option<String>>, good: &str) -> Finding {
    match done {
        Ok(None) => Finding::good(name, good),
        Ok(Some(wrong)) => Finding::bad(name, wrong, "use another store, or set this one up as lockbox-remote(7) says"),
        Err(trouble) => Finding::bad(name, trouble.words(), remedy(&trouble)),
    }
}

/// One after the other.
fn again(traces: &Traces<'_>, first: &str) -> Finding {
    const NAME: &str = "conditions";
    let other = content(1);
    match traces.ask(|objects| objects.create(first, &other)) {
        Ok(Created::Exists) => Finding::good(NAME, "an object is made only where there is none of its name"),
        Ok(Created::Made(_)) => Finding::bad(
            NAME,
            "what is there is overwritten although it was asked not to be (If-None-Match)",
            USE_ANOTHER,
        ),
        Err(trouble) => Finding::bad(NAME, trouble.words(), USE_ANOTHER),
    }
}

/// At the same time.
fn race(traces: &mut Traces<'_>) -> Finding {
    const NAME: &str = "one writer";
    let name = traces.next();
    let traces = &*traces;
    let name = &*name;
    let answers: Vec<Answer<Created>> = thread::scope(|scope| {
        let make = move |racer| traces.ask(|objects| objects.create(name, &content(racer)));
        let started: Vec<_> = (0..RACERS).map(|racer| scope.spawn(move || make(racer))).collect();
        let lost = |_| Err(Trouble::Passing("it was not asked".into()));
        started.into_iter().map(|racer| racer.join().unwrap_or_else(lost)).collect()
    });
    let winners: Vec<u8> = (0..)
        .zip(&answers)
        .filter(|(_, answer)| matches!(answer, Ok(Created::Made(_))))
        .map(|(racer, _)| racer)
        .collect();
    let there = match traces.ask(|objects| objects.get(name, Part::All(BYTES as u64))) {
        Ok(there) => there,
        Err(trouble) => return Finding::bad(NAME, trouble.words(), remedy(&trouble)),
    };
    match winners[..] {
        [winner] if there == content(winner) => {
            Finding::good(NAME, format!("of {RACERS} who made one object at once, one did"))
        }
        [_] => Finding::bad(NAME, "an object has other bytes than those of who was told that it made it", USE_ANOTHER),
        [] => Finding::advice(
            NAME,
            format!("of {RACERS} who made one object at once, none was told that it did"),
            "try again: answers may have been lost",
        ),
        _ => Finding::bad(NAME, format!("of {RACERS} who made one object at once, {} did", winners.len()), USE_ANOTHER),
    }
}

fn parts(traces: &Traces<'_>, name: &str, bytes: &[u8]) -> Answer<Option<String>> {
    let length = bytes.len();
    for (part, wanted) in [
        (Part::All(length as u64), 0..length),
        (Part::Range(0, 1), 0..1),
        (Part::Range(1000, 4096), 1000..5096),
        // As much of it as there is.
        (Part::Range(length as u64 - 5, 10), length - 5..length),
        (Part::Last(7), length - 7..length),
    ] {
        if traces.ask(|objects| objects.get(name, part))? != bytes[wanted] {
            return Ok(Some("what is sent are other bytes than those that were asked for".into()));
        }
    }
    Ok(None)
}

fn order(traces: &mut Traces<'_>) -> Answer<Option<String>> {
    // Not in their order.
    let mut names: Vec<String> = ["b", "c", "a"].map(|letter| format!("{}{letter}", traces.prefix)).into();
    for name in &names {
        traces.names.push(name.clone());
        traces.ask(|objects| objects.create(name, b"probe"))?;
    }
    names.sort();
    let made = format!("{}a", traces.prefix);
    let mut all = traces.names.clone();
    all.sort();
    let list = |after: &str, most| traces.ask(|objects| objects.list(&traces.prefix, after, most));
    let named = |listed: Vec<Listed>| listed.into_iter().map(|object| object.name).collect::<Vec<_>>();
    let wrong = if named(list("", LISTED)?) != all {
        "what was just made is not listed, or not in the order of its bytes"
    } else if named(list(&made, 1)?) != names[1..2] {
        "lists do not begin behind the name that they were asked to begin behind"
    } else {
        return Ok(None);
    };
    Ok(Some(wrong.into()))
}

fn clock(date: Option<u64>) -> Finding {
    const NAME: &str = "clock";
    let here = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    match date.map(|date| date.abs_diff(here)) {
        None => Finding::advice(
            NAME,
            "the store does not tell the time",
            "what backups need no more is never removed there; use another store if that matters",
        ),
        Some(wrong) if wrong > WRONG => Finding::advice(
            NAME,
            format!("that of the store and that of this machine differ by {wrong} seconds"),
            "set the clocks: stores refuse what is signed at another time, and removal goes by theirs",
        ),
        Some(wrong) => Finding::good(NAME, format!("the same as here to {wrong} seconds")),
    }
}

fn removal(traces: &mut Traces<'_>) -> Finding {
    const NAME: &str = "removal";
    const ADVICE: &str =
        "give the right to delete objects, and remove those: without it what backups need no more stays for ever";
    let last = traces.names.clone();
    if let Err(trouble) = traces.remove() {
        let left = format!("{}; objects whose names begin with {} are left there", trouble.words(), traces.prefix);
        return Finding::advice(NAME, left, ADVICE);
    }
    let gone = |name: &String| matches!(traces.ask(|objects| objects.get(name, Part::Last(1))), Err(Trouble::Gone));
    match last.iter().all(gone) {
        true => Finding::good(NAME, "objects can be removed, and all of this probe are"),
        false => Finding::advice(NAME, "what was removed is still there", ADVICE),
    }
}
