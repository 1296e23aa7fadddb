//! `lockbox share`: shares one file, directory or text by a link that works once, and manages such
//! links.

mod content;
mod format;
mod ls;
mod manage;
mod new;
pub(crate) mod serving;
mod watch;
use clap::Subcommand;
use lockbox_share_client::shares;

use crate::exit::Failure;

/// Give away a file, a directory or a text by a link that works once
///
/// It is sealed here; the daemon that keeps it cannot read it, nor its name. Whoever has the link opens it, with 'lockbox receive' or a
/// browser.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    new: new::Args,
}

#[derive(Subcommand)]
enum Command {
    Ls(ls::Args),
    /// Tell what became of one share
    Info(manage::Args),
    Watch(watch::Args),
    /// Take a share back: its link opens nothing any more
    Revoke(manage::Args),
    /// Let a download that was interrupted be made once more
    Rearm(manage::Args),
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        Some(Command::Ls(args)) => ls::run(args),
        Some(Command::Info(args)) => manage::run(args, shares::fetch),
        Some(Command::Watch(args)) => watch::run(args),
        Some(Command::Revoke(args)) => manage::run(args, shares::revoke),
        Some(Command::Rearm(args)) => manage::run(args, shares::rearm),
        None => new::run(&args.new),
    }
}
