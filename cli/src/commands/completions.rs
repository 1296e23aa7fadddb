//! `lockbox completions`: prints the shell script that calls `lockbox complete`.
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
    let script = match args.shell {
        Known::Bash => include_str!("complete/lockbox.bash"),
        Known::Zsh => include_str!("complete/lockbox.zsh"),
        Known::Fish => include_str!("complete/lockbox.fish"),
    };
    let mut out = Output::new();
    out.bytes(script.as_bytes())?;
    out.finish()
}
