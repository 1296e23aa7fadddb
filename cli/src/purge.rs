//! `lockbox purge`: erases all freed space now, also of a mounted archive.
use std::path::Path;

use lockbox::control::{self, Request, Response, Status};
use lockbox_host::{Program, shown};

use crate::exit::{Failure, Lockbox};
use crate::opening::ArchiveArgs;
use crate::runtime;

/// Erase what deleted files left in an archive, now; the archive may be mounted, and named by its mount point
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive.archive;
    if let Some((socket, status)) = runtime::find(&runtime::canonical(path), path)? {
        return ask(&socket, &status);
    }
    if path.is_dir() {
        return Err(Failure::other(format!("{} is not the mount point of an archive", shown(path))));
    }
    let archive = args.archive.write()?;
    let purged = archive.file_system().purge();
    // Closing erases what is left and gives the end of the file back, also when purging failed half-way.
    purged.and(archive.close()).map_err(|error| Lockbox::failure(path, error))
}

fn ask(socket: &Path, status: &Status) -> Result<(), Failure> {
    match control::ask(socket, status.uid, &Request::Purge)? {
        Response::Done => Ok(()),
        other => Err(Failure::other(format!("{}: {}", status.mount_point, other.complaint()))),
    }
}
