//! Changes of a filled archive: files added, as many deleted, as many replaced, then one commit.

use lockbox::fs::RenameMode;

use crate::bench_box::{BenchBox, PER_DIRECTORY, add, add_each, add_many, name};
use crate::report::Report;
use crate::{Outcome, Place, content};

const SIZE: usize = 1024;

pub(crate) fn run(place: &Place, files: usize) -> Outcome<()> {
    let (before, report) = (files * 5, Report::new(&format!("append-delete: {files} of each"), place)?);
    let mut made = BenchBox::new(place, "append-delete")?;
    let fs = made.fs()?;
    let content = |number: usize| content::text(number as u64 + 1, SIZE);
    let (_, directories) = report.time(&format!("add {before} files"), || add_many(&fs, 0..before, &content))?;
    report.time("commit", || Ok(fs.make_durable()?))?;

    // Whole directories at the end, so that names never meet.
    let first = before.next_multiple_of(PER_DIRECTORY);
    report.time("add, one at a time", || add_each(&fs, first..first + files, &content))?;
    let home = |number: usize| directories[number / PER_DIRECTORY];
    report.time("delete", || (0..files).try_for_each(|n| Ok(fs.unlink(home(5 * n), &name(5 * n))?)))?;
    report.time("replace", || {
        (0..files).try_for_each(|n| {
            let number = 5 * n + 1;
            add(&fs, home(number), b"new", &content(number + before))?;
            Ok(fs.rename(home(number), b"new", home(number), &name(number), RenameMode::Replace)?)
        })
    })?;
    report.time("commit of all three", || Ok(fs.make_durable()?))?;
    drop(fs);
    report.time("close", || made.close())?;
    Ok(())
}
