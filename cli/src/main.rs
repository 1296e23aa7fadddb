//! The program `lockbox`: parses the command line and runs one command.

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
mod exit;
mod export_tar;
mod extract;
mod forget;
mod header;
mod help;
mod hints;
mod import_tar;
mod in_use;
mod info;
mod interrupt;
mod kdf;
mod key;
mod ls;
#[cfg(test)]
mod manual;
mod mkdir;
mod moments;
mod mount;
mod mounted_tree;
mod mv;
mod opening;
mod output;
mod passwd;
mod paths;
mod patterns;
mod progress;
mod prune;
mod purge;
mod receive;
mod recovery;
mod remote;
mod rescue;
mod rm;
mod run;
mod runtime;
mod secrets;
mod seen;
mod share;
mod snapshot;
mod snapshot_diff;
mod snapshot_restore;
mod status;
mod umount;
mod unlocking;
mod variables;

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use lockbox_host::USAGE;
use lockbox_host::harden::{self, CoreLimit};

use exit::Failure;

/// Keep files in an encrypted archive: one file that any program uses as a folder
#[derive(Parser)]
#[command(name = "lockbox", version, help_template = help::TEMPLATE)]
#[command(before_help = help::short(), before_long_help = help::whole())]
#[command(after_help = help::MORE, after_long_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
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

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let for_umount_8 =
        matches!(Path::new(&name).file_name().and_then(OsStr::to_str), Some("umount.lockbox" | "umount.fuse.lockbox"));
    let parsed = if for_umount_8 {
        umount::parse_as_umount_8()
    } else {
        Cli::try_parse().map(|cli| cli.command).map_err(|error| hints::hinted(error, std::env::args_os().skip(1)))
    };
    let command = match parsed {
        Ok(command) => command,
        Err(error) => {
            let shown = match lockbox_terminal::of_arguments(&error.render().to_string()) {
                Some(plain) => io::stderr().write_all(plain.as_bytes()),
                None => error.print().and_then(|()| io::stdout().flush()),
            };
            // Help and version come as errors too.
            return match shown {
                _ if error.use_stderr() => USAGE.into(),
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => ended(&exit::of_output(&error)),
            };
        }
    };
    let cores = harden::keep_out_of_core_dumps();
    // Where that is not allowed, doctor says so.
    let _ = harden::lock_memory_if_plenty();
    harden::outlive_size_limits();
    output::start_log();
    match run(&command, cores) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let code = ended(&failure);
            if for_umount_8 { exit::umount_8_code(failure.code).into() } else { code }
        }
    }
}

/// Says why the program ends without success, unless there is nothing to say.
fn ended(failure: &Failure) -> ExitCode {
    if !failure.message.is_empty() {
        output::complain(&failure.message);
    }
    failure.code.into()
}

fn run(command: &Command, cores: CoreLimit) -> Result<(), Failure> {
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
