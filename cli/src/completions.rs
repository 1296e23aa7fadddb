//! `lockbox completions`: prints what lets a shell complete commands and options.
use clap::CommandFactory;
use clap_complete::Shell;

use crate::exit::Failure;
use crate::output::Output;

/// Print the completions of a shell
#[derive(clap::Args)]
pub(crate) struct Args {
    shell: Known,
}

/// The shells that are tested.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Known {
    Bash,
    Zsh,
    Fish,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let shell = match args.shell {
        Known::Bash => Shell::Bash,
        Known::Zsh => Shell::Zsh,
        Known::Fish => Shell::Fish,
    };
    // In memory first: the generator has no way of saying that the output is closed.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut crate::Cli::command(), "lockbox", &mut text);
    let mut out = Output::new();
    out.bytes(&text)?;
    out.finish()
}
