//! Backup of a running mount into a file that the client opened, so that the daemon neither
//! resolves the client's paths nor uses its own rights.

use lockbox::archive::{BackedUp, Backups, Destination};
use lockbox::control::{BackupDone, Client, Response};
use lockbox::{Error, Result};

pub(crate) struct BackupMode {
    pub(crate) whole: bool,
    pub(crate) verify: bool,
}

pub(crate) fn run_backup(backups: Backups, mode: BackupMode, mut client: Client) -> Result<Response> {
    let Some(file) = client.file.take() else {
        return Err(Error::invalid("a backup goes into a file that comes with the request"));
    };
    let file = Destination::given(file)?;
    // A backup without a waiting client must not keep blocks from being freed.
    let watch = &mut |_| if client.is_gone() { Err(Error::Interrupted(0)) } else { Ok(()) };
    let source = backups.pin()?;
    let done = match mode.whole {
        true => Some(source.fill(&file, watch)?),
        false => source.bring_up_to_date(&file, watch)?,
    };
    if mode.verify && done.is_some() {
        source.verify(&file, watch)?;
    }
    let report = |BackedUp { time, generation, copied_bytes, .. }| BackupDone {
        seconds: time.seconds,
        nanos: time.nanos,
        generation: generation.0,
        copied_bytes,
    };
    Ok(Response::BackedUp { done: done.map(report) })
}
