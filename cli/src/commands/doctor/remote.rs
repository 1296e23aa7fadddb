//! Probes the server at an address.
use std::path::Path;

use lockbox::Error;
use lockbox::format::header::recognize;
use lockbox::storage::ArchiveSource;
use lockbox_host::remote::{self, ArchiveLocation, Remote};

use super::{Finding, State};
use crate::exit::Failure;
use crate::interrupt::{self, Interrupt};

/// Bytes that tell an archive: magic and version.
const BEGIN: usize = 20;

pub(super) fn findings(address: &Path, how: &Remote) -> Result<Vec<Finding>, Failure> {
    let interrupt = Interrupt::watch()?;
    let probed = remote::probe(address, how, &mut || interrupt.check()).map_err(|error| match error {
        Error::Interrupted(_) => interrupt::failure(&error, "what was made there to look at it is removed"),
        error => Failure::at(address, &error),
    })?;
    let mut findings: Vec<Finding> = probed
        .into_iter()
        .map(|found| Finding {
            name: found.name,
            state: match (found.works, found.advice) {
                (false, _) => State::Bad,
                (true, Some(_)) => State::Advice,
                (true, None) => State::Good,
            },
            found: found.found,
            advice: found.advice.map(str::to_owned),
        })
        .collect();
    if findings.iter().all(|finding| finding.state != State::Bad) {
        findings.push(archive(address, how));
    }
    Ok(findings)
}

/// Reports the result of opening an archive.
fn archive(address: &Path, how: &Remote) -> Finding {
    const NAME: &str = "archive";
    let opened = ArchiveLocation::at(address, &how.without_cache()).and_then(|place| {
        let ArchiveSource::Storage(storage) = place.site() else { return Err(Error::invalid("that is no address")) };
        let length = storage.len()?;
        let mut begin = [0; BEGIN];
        let begin = &mut begin[..BEGIN.min(usize::try_from(length).unwrap_or(BEGIN))];
        storage.read_at(0, begin)?;
        recognize(begin, 0).map(|()| length)
    });
    match opened {
        Ok(length) => Finding::good(NAME, format!("there is one, of {length} bytes")),
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Finding::good(NAME, "there is none yet")
        }
        Err(error) => Finding::bad(NAME, Failure::sentence(&error), "name an archive, or a place for a backup"),
    }
}
