//! Cost of opening, lookups, listing and changes as the number of entries grows.

use lockbox::exchange::Entries;

use crate::bench_box::{BenchBox, PER_DIRECTORY, add, add_many, name};
use crate::content::Seeded;
use crate::report::Report;
use crate::{Outcome, Place};

/// Number of lookups, and of files created with a commit each; the mean is reported.
const LOOKUPS: usize = 20_000;
const COMMITS: usize = 200;

pub(crate) fn run(place: &Place, entries: &[usize]) -> Outcome<()> {
    for entries in entries {
        one(place, *entries)?;
    }
    Ok(())
}

fn one(place: &Place, entries: usize) -> Outcome<()> {
    let report = Report::new(&format!("tree: {entries} entries"), place)?;
    let mut made = BenchBox::new(place, "tree")?;
    let fs = made.fs()?;
    let mut directories = Vec::new();
    report.each("create, empty", entries, || {
        directories = add_many(&fs, 0..entries, &|_| Vec::new())?;
        Ok(fs.make_durable()?)
    })?;
    drop(fs);
    report.time("close", || made.close())?;
    report.row("size", &format!("{:.0} bytes each", made.bytes()? as f64 / entries as f64))?;
    made.make_cold()?;
    report.time("open, cold", || made.open())?;
    let fs = made.fs()?;
    let lookups = |seed: u64| {
        let mut random = Seeded::new(seed);
        (0..LOOKUPS).try_for_each(|_| {
            let number = random.below(entries as u64) as usize;
            Ok(fs.lookup(directories[number / PER_DIRECTORY], &name(number)).map(drop)?)
        })
    };
    report.each("lookup at random, nodes read as needed", LOOKUPS, || lookups(1))?;
    report.each("list with attributes", entries, || {
        let mut seen = 0;
        for directory in &directories {
            for entry in Entries::new(&fs, *directory)? {
                entry?;
                seen += 1;
            }
        }
        if seen == entries { Ok(()) } else { Err(format!("listed {seen} of {entries}").into()) }
    })?;
    report.each("lookup at random, again", LOOKUPS, || lookups(1))?;
    report.each("create and commit, one at a time", COMMITS, || {
        (0..COMMITS).try_for_each(|n| {
            add(&fs, directories[n % directories.len()], format!("new{n}").as_bytes(), b"")?;
            Ok(fs.make_durable()?)
        })
    })?;
    drop(fs);
    report.time("close again", || made.close())?;
    Ok(())
}
