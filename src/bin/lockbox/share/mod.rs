//! `lockbox share`: gives away one file by a link that works once, and looks after such links.

mod info;
mod ls;
mod new;
mod rearm;
mod revoke;
pub(crate) mod serving;
mod shown;
mod watch;

use clap::Subcommand;

use crate::exit::Failure;

/// Give away one file by a link that works once
///
/// The file is sealed here; the daemon that keeps it cannot read it, nor its name. Whoever has the link opens it, with 'lockbox receive' or a
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
    Info(info::Args),
    Watch(watch::Args),
    Revoke(revoke::Args),
    Rearm(rearm::Args),
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        Some(Command::Ls(args)) => ls::run(args),
        Some(Command::Info(args)) => info::run(args),
        Some(Command::Watch(args)) => watch::run(args),
        Some(Command::Revoke(args)) => revoke::run(args),
        Some(Command::Rearm(args)) => rearm::run(args),
        None => new::run(&args.new),
    }
}
