//! `lockbox doctor`: checks this machine's mount requirements and secret hygiene, or the
//! capabilities of a server.
mod host;

use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::archive::recognize;
use lockbox::storage::ArchiveSource;
use lockbox_host::OTHER;
use lockbox_host::remote::{self, ArchiveLocation, RemoteArgs, RemoteOptions};
use serde_json::json;

use self::host::Confined;
use crate::exit::Failure;
use crate::interrupt::{self, Interrupt};
use crate::output::Output;

/// Check this machine's mount requirements and secret hygiene, or a server of archives
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Check this server instead, and report its capabilities; objects that are made in a store for that are removed again
    #[arg(value_name = "ADDRESS")]
    address: Option<PathBuf>,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Result of one check.
struct Finding {
    state: State,
    found: String,
    /// Remedy, in one sentence.
    advice: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Good,
    /// Works, and could be better or safer.
    Advice,
    /// Something cannot work.
    Bad,
}

impl Finding {
    fn good(found: impl Into<String>) -> Finding {
        Finding { state: State::Good, found: found.into(), advice: None }
    }

    fn advice(found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { state: State::Advice, found: found.into(), advice: Some(advice.into()) }
    }

    fn bad(found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { state: State::Bad, found: found.into(), advice: Some(advice.into()) }
    }
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Good => "ok",
            State::Advice => "advice",
            State::Bad => "bad",
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut processes = None;
    let (findings, keeps) = match &args.address {
        Some(address) => (findings_of_server(address, &args.remote.remote)?, "keeps lockbox from using this server"),
        None => {
            let mut findings = host::findings();
            findings.push(("mounts", host::confinement(processes.insert(host::processes()))));
            (findings, "keeps lockbox from working")
        }
    };
    let bad = findings.iter().filter(|(_, finding)| finding.state == State::Bad).count();
    let mut out = Output::new();
    if args.json {
        let checks: Vec<_> = findings
            .iter()
            .map(|(name, f)| json!({"name": name, "state": f.state.word(), "found": f.found, "advice": f.advice}))
            .collect();
        let mut told = json!({"ok": bad == 0, "version": env!("CARGO_PKG_VERSION"), "checks": checks});
        if let Some(processes) = processes {
            let processes: Vec<_> = processes.iter().map(Confined::json).collect();
            told["sandbox"] = json!({"kernel": host::KernelSandbox::of_host().json(), "processes": processes});
        }
        out.json(&told)?;
    } else {
        for (name, Finding { state, found, advice }) in &findings {
            out.line(&format!("{:<7} {name:<18} {found}", state.word()))?;
            if let Some(advice) = advice {
                out.line(&format!("{:<26} {advice}", ""))?;
            }
        }
    }
    out.finish()?;
    match bad {
        0 => Ok(()),
        1 => Err(Failure::new(OTHER, format!("one fault {keeps} (listed above)"))),
        count => {
            Err(Failure::new(OTHER, format!("{count} faults {} (listed above)", keeps.replacen("keeps", "keep", 1))))
        }
    }
}

/// Bytes that tell an archive: magic and version.
const BEGIN: usize = 20;

fn findings_of_server(address: &Path, how: &RemoteOptions) -> Result<Vec<(&'static str, Finding)>, Failure> {
    let interrupt = Interrupt::watch()?;
    let probed = remote::probe(address, how, &mut || interrupt.check()).map_err(|error| match error {
        Error::Interrupted(_) => interrupt::failure(&error, "the objects made there for the check were removed"),
        error => Failure::at(address, &error),
    })?;
    let mut findings = Vec::new();
    for found in probed {
        let state = match (found.works, found.advice) {
            (false, _) => State::Bad,
            (true, Some(_)) => State::Advice,
            (true, None) => State::Good,
        };
        findings.push((found.name, Finding { state, found: found.found, advice: found.advice.map(str::to_owned) }));
    }
    if findings.iter().all(|(_, finding)| finding.state != State::Bad) {
        findings.push(("archive", archive(address, how)));
    }
    Ok(findings)
}

fn archive(address: &Path, how: &RemoteOptions) -> Finding {
    let opened = ArchiveLocation::open(address, &how.without_cache()).and_then(|place| {
        let ArchiveSource::Storage(storage) = place.source() else {
            return Err(Error::invalid("that is not an address"));
        };
        let length = storage.len()?;
        let mut begin = [0; BEGIN];
        let begin = &mut begin[..BEGIN.min(usize::try_from(length).unwrap_or(BEGIN))];
        storage.read_at(0, begin)?;
        recognize(begin, 0).map(|()| length)
    });
    match opened {
        Ok(length) => Finding::good(format!("there is one, of {length} bytes")),
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Finding::good("no archive there yet")
        }
        Err(error) => Finding::bad(Failure::sentence(&error), "name an archive, or a place for a backup"),
    }
}
