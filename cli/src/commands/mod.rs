//! The commands: their arguments, and the functions that run them.

mod backup;
mod check;
mod compact;
mod complete;
mod create;
mod diff;
mod doctor;
mod edit;
mod env;
mod exchange;
mod exec;
mod files;
mod key;
mod ls;
mod mount;
mod passwd;
mod receive;
mod remote;
mod rescue;
mod share;
mod snapshot;
mod status;
pub(crate) mod umount;

use clap::Subcommand;
use lockbox_host::proc::CoreLimit;

use crate::exit::Failure;

#[derive(Subcommand)]
pub(crate) enum Command {
    Create(create::Args),
    Mount(mount::Args),
    Umount(umount::Args),
    Status(status::Args),
    Add(exchange::AddArgs),
    Extract(exchange::ExtractArgs),
    ExportTar(exchange::ExportTarArgs),
    ImportTar(exchange::ImportTarArgs),
    Ls(ls::Args),
    Cat(ls::CatArgs),
    Cp(files::CopyArgs),
    Diff(diff::Args),
    Edit(edit::Args),
    Mkdir(files::MkdirArgs),
    Mv(files::MoveArgs),
    Rm(files::RemoveArgs),
    Info(check::InfoArgs),
    Check(check::Args),
    Rescue(rescue::Args),
    Backup(backup::Args),
    Compact(compact::Args),
    Purge(compact::PurgeArgs),
    Passwd(passwd::Args),
    Forget(key::ForgetArgs),
    #[command(subcommand)]
    Remote(remote::Command),
    #[command(subcommand)]
    Cache(remote::CacheCommand),
    Doctor(doctor::Args),
    Completions(complete::CompletionsArgs),
    #[command(hide = true)]
    Complete(complete::Args),
    Recovery(passwd::RecoverArgs),
    #[command(subcommand)]
    Key(key::Command),
    #[command(subcommand)]
    Header(key::HeaderCommand),
    #[command(subcommand)]
    Snapshot(snapshot::Command),
    Env(env::Args),
    Run(env::RunArgs),
    Exec(exec::Args),
    Share(share::Args),
    Receive(receive::Args),
}

pub(crate) fn run(command: &Command, cores: CoreLimit) -> Result<(), Failure> {
    match command {
        Command::Create(args) => create::run(args, cores),
        Command::Mount(args) => mount::run(args, None, cores),
        Command::Umount(args) => umount::run(args),
        Command::Status(args) => status::run(args),
        Command::Add(args) => exchange::add(args),
        Command::Extract(args) => exchange::extract(args),
        Command::ExportTar(args) => exchange::export_tar(args),
        Command::ImportTar(args) => exchange::import_tar(args),
        Command::Ls(args) => ls::run(args),
        Command::Cat(args) => ls::cat(args),
        Command::Cp(args) => files::cp(args),
        Command::Diff(args) => diff::run(args),
        Command::Edit(args) => edit::run(args),
        Command::Mkdir(args) => files::mkdir(args),
        Command::Mv(args) => files::mv(args),
        Command::Rm(args) => files::rm(args),
        Command::Info(args) => check::info(args),
        Command::Check(args) => check::run(args),
        Command::Rescue(args) => rescue::run(args),
        Command::Backup(args) => backup::run(args),
        Command::Compact(args) => compact::run(args),
        Command::Purge(args) => compact::purge(args),
        Command::Passwd(args) => passwd::run(args),
        Command::Forget(args) => key::forget(args),
        Command::Remote(command) => remote::run(command),
        Command::Cache(command) => remote::cache(command),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => complete::completions(args),
        Command::Complete(args) => {
            complete::run(args);
            Ok(())
        }
        Command::Recovery(args) => passwd::recovery(args),
        Command::Key(command) => key::run(command),
        Command::Header(command) => key::header(command),
        Command::Snapshot(command) => snapshot::run(command),
        Command::Env(args) => env::run(args),
        Command::Run(args) => env::run_program(args, cores),
        Command::Exec(args) => exec::run(args, cores),
        Command::Share(args) => share::run(args),
        Command::Receive(args) => receive::run(args),
    }
}
