//! The commands, one module each: its arguments, and the function that runs it.

mod add;
mod backup;
mod cache;
mod cat;
mod check;
mod compact;
mod complete;
mod completions;
mod cp;
mod create;
mod diff;
mod doctor;
mod edit;
mod env;
mod exec;
mod export_tar;
mod extract;
mod forget;
mod header;
mod import_tar;
mod info;
mod key;
mod ls;
mod mkdir;
mod mount;
mod mv;
mod passwd;
mod purge;
mod receive;
mod recovery;
mod remote;
mod rescue;
mod rm;
mod run;
mod share;
mod snapshot;
mod status;
pub(crate) mod umount;

use clap::Subcommand;
use lockbox_host::harden::CoreLimit;

use crate::exit::Failure;

#[derive(Subcommand)]
pub(crate) enum Command {
    Create(create::Args),
    Mount(mount::Args),
    Umount(umount::Args),
    Status(status::Args),
    Add(add::Args),
    Extract(extract::Args),
    ExportTar(export_tar::Args),
    ImportTar(import_tar::Args),
    Ls(ls::Args),
    Cat(cat::Args),
    Cp(cp::Args),
    Diff(diff::Args),
    Edit(edit::Args),
    Mkdir(mkdir::Args),
    Mv(mv::Args),
    Rm(rm::Args),
    Info(info::Args),
    Check(check::Args),
    Rescue(rescue::Args),
    Backup(backup::Args),
    Compact(compact::Args),
    Purge(purge::Args),
    Passwd(passwd::Args),
    Forget(forget::Args),
    #[command(subcommand)]
    Remote(remote::Command),
    #[command(subcommand)]
    Cache(cache::Command),
    Doctor(doctor::Args),
    Completions(completions::Args),
    #[command(hide = true)]
    Complete(complete::Args),
    Recovery(recovery::Args),
    #[command(subcommand)]
    Key(key::Command),
    #[command(subcommand)]
    Header(header::Command),
    #[command(subcommand)]
    Snapshot(snapshot::Command),
    Env(env::Args),
    Run(run::Args),
    Exec(exec::Args),
    Share(share::Args),
    Receive(receive::Args),
}

pub(crate) fn run(command: &Command, cores: CoreLimit) -> Result<(), Failure> {
    match command {
        Command::Create(args) => create::run(args),
        Command::Mount(args) => mount::run(args, cores),
        Command::Umount(args) => umount::run(args),
        Command::Status(args) => status::run(args),
        Command::Add(args) => add::run(args),
        Command::Extract(args) => extract::run(args),
        Command::ExportTar(args) => export_tar::run(args),
        Command::ImportTar(args) => import_tar::run(args),
        Command::Ls(args) => ls::run(args),
        Command::Cat(args) => cat::run(args),
        Command::Cp(args) => cp::run(args),
        Command::Diff(args) => diff::run(args),
        Command::Edit(args) => edit::run(args),
        Command::Mkdir(args) => mkdir::run(args),
        Command::Mv(args) => mv::run(args),
        Command::Rm(args) => rm::run(args),
        Command::Info(args) => info::run(args),
        Command::Check(args) => check::run(args),
        Command::Rescue(args) => rescue::run(args),
        Command::Backup(args) => backup::run(args),
        Command::Compact(args) => compact::run(args),
        Command::Purge(args) => purge::run(args),
        Command::Passwd(args) => passwd::run(args),
        Command::Forget(args) => forget::run(args),
        Command::Remote(command) => remote::run(command),
        Command::Cache(command) => cache::run(command),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => completions::run(args),
        Command::Complete(args) => {
            complete::run(args);
            Ok(())
        }
        Command::Recovery(args) => recovery::run(args),
        Command::Key(command) => key::run(command),
        Command::Header(command) => header::run(command),
        Command::Snapshot(command) => snapshot::run(command),
        Command::Env(args) => env::run(args),
        Command::Run(args) => run::run(args, cores),
        Command::Exec(args) => exec::run(args, cores),
        Command::Share(args) => share::run(args),
        Command::Receive(args) => receive::run(args),
    }
}
