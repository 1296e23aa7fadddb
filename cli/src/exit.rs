//! Exit codes of the program, and the remedies that it adds to errors of the library.
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use lockbox::Error;
use lockbox::archive::FindingKind;
use lockbox::error::Refusal;
use lockbox::exchange::{ExtractReport, Problem, ProblemCause};
use lockbox_host::daemons::{self, Holder};
use lockbox_host::mounts::{self, Mounted};
use lockbox_host::{
    DAMAGED, DENIED, IN_USE, MOUNT_FAILED, NO_ARCHIVE, NO_SOURCE, NO_SPACE, NOT_ARCHIVE, OLDER, OTHER, Program,
    UNREACHABLE, USAGE, WRONG_KEY, code, located, remote, shown,
};
use lockbox_terminal::{advice, display};
use serde_json::{Value, json};

/// The compared objects differ; diff(1) has 1 for that, which is wrong usage here.
pub(crate) const DIFFERENT: u8 = 3;
pub(crate) const NO_LINK: u8 = 20;
pub(crate) const NO_DAEMON: u8 = 21;
/// Program not found, or not executable: the codes of the shells and of env(1).
pub(crate) const NOT_FOUND: u8 = 127;
pub(crate) const NOT_RUNNABLE: u8 = 126;

/// Shown at the end of the whole help.
pub(crate) const HELP: &str = "\
Exit codes: 0 success, 1 usage, 2 other error, 3 differences found, 10 wrong passphrase, 11 not an archive or unsupported version, \
12 damaged, 13 in use, 14 no space, 15 mount failed, 16 older, diverged or replaced archive, 17 server does not answer, \
18 server refuses, 19 no such archive or bucket, 20 invalid link, 21 no share daemon, 22 no such source, 128 and the signal's number \
when interrupted";

/// Code that shells show for a program that SIGPIPE ended: this one ignores the signal, and ends
/// without a message as if it did not.
const READER_GONE: u8 = 128 + 13;

/// Returns the exit code that shells report for a program.
pub(crate) fn of_program(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

/// Returns a failure as `--json` prints it. The names of the kinds are promises.
pub(crate) fn json(failure: &Failure) -> Value {
    let kind = match failure.code {
        USAGE => "usage",
        DIFFERENT => "different",
        WRONG_KEY => "wrong-key",
        NOT_ARCHIVE => "not-archive",
        DAMAGED => "damaged",
        IN_USE => "in-use",
        NO_SPACE => "no-space",
        MOUNT_FAILED => "mount-failed",
        OLDER => "older",
        UNREACHABLE => "unreachable",
        DENIED => "denied",
        NO_ARCHIVE => "no-archive",
        NO_LINK => "no-link",
        NO_DAEMON => "no-daemon",
        NO_SOURCE => "no-source",
        129.. => "interrupted",
        _ => "other",
    };
    let Failure { code, message, advice, .. } = failure;
    json!({"error": {"kind": kind, "exit_code": code, "message": message, "advice": advice}})
}

/// Returns the failure that a rendered error of the command line describes: its first line, and its
/// tip.
pub(crate) fn of_usage(rendered: &str) -> Failure {
    let message = rendered.lines().next().unwrap_or_default();
    let tip = rendered.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    let failure = Failure::usage(message.trim_start_matches("error: "));
    failure.advised(&tip.map(|tip| format!("; {tip}")).unwrap_or_default())
}

/// Returns the failure of writing to standard output; a closed pipe has no message.
pub(crate) fn of_output(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::new(READER_GONE, ""),
        _ => Failure::host("cannot write to standard output", error),
    }
}

/// Returns the code that umount(8) passes on as its own when it calls this program as
/// umount.lockbox: 1 for wrong usage, 32 for a failure.
pub(crate) fn umount_8_code(code: u8) -> u8 {
    if code == USAGE { USAGE } else { 32 }
}

pub(crate) struct Lockbox;

pub(crate) type Failure = lockbox_host::Failure<Lockbox>;

impl Program for Lockbox {
    const NAME: &'static str = "lockbox";
    const NAMES_ARCHIVE: bool = true;

    fn words(error: &Error) -> Option<String> {
        match error {
            // The detail is a sentence of its own.
            Error::Invalid(detail) => Some(detail.clone()),
            _ => None,
        }
    }

    fn remedy(error: &Error) -> String {
        match error {
            Error::Refused(refusal) => remedy(refusal),
            Error::OlderCopy(_) => "; use --accept-older to accept it".into(),
            Error::ForkedCopy(_) => "; use --accept-fork to accept this copy".into(),
            Error::Replaced(_) => "; use --accept-other to accept this archive".into(),
            _ => String::new(),
        }
    }

    /// Names the holder when the archive is in use.
    fn failure(path: &Path, error: Error) -> Failure {
        if let Error::InUse(_) = &error
            && let Holder::Serves(status) = daemons::holder(path)
            // At an address only a writer is in the way.
            && !(remote::is_remote(path) && status.read_only)
        {
            let point = shown(&status.mount_point_path());
            let hidden = daemons::is_out_of_sight(&status) && daemons::mount_of(&status, &mounts::all()).is_none();
            let (how, remedy) = if hidden {
                let how =
                    "has it mounted in another namespace, as for 'lockbox exec', until the last program there ends";
                (how.to_owned(), String::new())
            } else {
                let end = advice("lockbox umount", status.mount_point_path().as_os_str().as_bytes());
                (format!("serves it at {point}"), format!("; use the files there, or end that with {end}"))
            };
            let sentence = format!("{} is in use: process {} {how}", shown(path), status.pid);
            return Failure::new(code(&error), sentence).advised(&remedy);
        }
        // Any answer of that directory counts, as long as it still answers.
        if matches!(error, Error::NotArchive(_) | Error::Io { .. })
            && let Some(mounted) = located::root_at(path, &mounts::all())
        {
            return mount_point(path, mounted, code(&error));
        }
        Failure::at(path, &error)
    }
}

/// Returns the failure of a command that was given the mount point in place of the archive.
pub(crate) fn mount_point(path: &Path, mounted: &Mounted, code: u8) -> Failure {
    let archive = shown(&mounted.source);
    Failure::new(code, format!("{} is where {archive} is mounted", shown(path)))
        .advised(": name the archive, or use the files there")
}

/// Returns the remedy for a refusal, with the punctuation that joins it to the refusal.
fn remedy(refusal: &Refusal) -> String {
    let remedy = match refusal {
        Refusal::KdfCost { .. } => "; raise the limit with --kdf-limit if you trust the archive",
        Refusal::EncryptedIdentity { .. } => "; decrypt it with age into a pipe, such as --identity <(age -d FILE)",
        Refusal::Links { .. } => ": remove them, or use --break-links",
        Refusal::PassphraseWithKeyFile => {
            ": add one that opens alone with 'lockbox key add --recovery-code', or change it with the key file and 'lockbox passwd'"
        }
        Refusal::ExistingObject { .. } => "; use --force to replace it",
        Refusal::SeveralPassphrases => ": name with --slot the key slot to change",
        Refusal::NoPassphrase { .. } => "; add one with 'lockbox key add'",
        Refusal::UnknownKey { slot } => &format!(": use --drop {slot}"),
        Refusal::UndescribedKey { slot } => {
            &format!(": change its passphrase to itself with 'lockbox passwd' first, or use --drop {slot}")
        }
        Refusal::UnkeptKey { slot, .. } => &format!("; or use --drop {slot}"),
        Refusal::NoSnapshot { .. } => ": 'lockbox snapshot ls' lists its snapshots",
        Refusal::SnapshotExists { .. } => ": choose another name, or remove that one with 'lockbox snapshot rm'",
        Refusal::NameOfSchedule { .. } => ": choose another name",
        Refusal::Destination { .. } | Refusal::DamagedBackup { .. } | Refusal::FailedBackup { .. } => "",
    };
    remedy.to_owned()
}

/// Returns the remedy for a finding of `check`, when a command is one.
pub(crate) fn mending(finding: FindingKind) -> &'static str {
    match finding {
        FindingKind::Header => "; 'lockbox check --repair-header' does so now",
        FindingKind::Log | FindingKind::Commit => {
            "; the archive cannot be changed: 'lockbox rescue' copies out all remaining content"
        }
        _ => "",
    }
}

/// Fails with the code of the gravest problem, if there is any; each was shown before.
pub(crate) fn of_problems(problems: &[Problem], code: fn(&Error) -> u8) -> Result<(), Failure> {
    let Some(worst) = gravest(problems, code) else { return Ok(()) };
    let count = problems.len();
    let objects = if count == 1 { "1 object was" } else { &format!("{count} objects were") };
    Err(Failure::new(worst, format!("{objects} not copied in full; see above")))
}

/// Fails if not everything was copied out of an archive.
pub(crate) fn of_extraction(report: &ExtractReport) -> Result<(), Failure> {
    let Some((path, error)) = &report.ended else { return of_problems(&report.problems, code) };
    let mut failure = Failure::of(display(path), error);
    failure.message += &match report.copied.files {
        1 => "; 1 file was copied before".to_owned(),
        files => format!("; {files} files were copied before"),
    };
    Err(failure)
}

/// Returns the exit code of the gravest problem. `code`: that of one, [`source_code`] where files
/// of the host are read.
pub(crate) fn gravest(problems: &[Problem], code: fn(&Error) -> u8) -> Option<u8> {
    let codes = problems.iter().map(|problem| match &problem.cause {
        ProblemCause::Changed | ProblemCause::Itself => OTHER,
        ProblemCause::Failed(error) => code(error),
    });
    // A missing source is less grave than damage, although its number is higher.
    codes.max_by_key(|code| if *code == NO_SOURCE { OTHER } else { *code })
}

/// Returns the exit code for an error of a command that reads files of this host besides an open
/// archive: a missing file is one of those.
pub(crate) fn source_code(error: &Error) -> u8 {
    match error {
        Error::Io { source, .. } if error.request_kind().is_none() && source.kind() == io::ErrorKind::NotFound => {
            NO_SOURCE
        }
        _ => code(error),
    }
}

/// Returns the failure of such a command, for an error of the archive at `path` or of a source.
pub(crate) fn source_failure(path: &Path, error: Error) -> Failure {
    let code = source_code(&error);
    let mut failure = Lockbox::failure(path, error);
    failure.code = code;
    failure
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn options(command: &clap::Command, found: &mut Vec<String>) {
        found.extend(command.get_arguments().filter_map(|argument| argument.get_long().map(str::to_owned)));
        command.get_subcommands().for_each(|command| options(command, found));
    }

    /// Returns the words of a command line in quotes.
    fn commands(text: &str) -> impl Iterator<Item = Vec<&str>> {
        text.split('\'').skip(1).step_by(2).map(|quoted| quoted.split(' ').collect())
    }

    #[test]
    fn what_is_advised_exists_in_this_program() {
        let path = String::from("a.lbx");
        let refusals = [
            Refusal::KdfCost { slot: 1, memory: 4, passes: 1, most_cost: 1, most_memory: 1 },
            Refusal::EncryptedIdentity { name: path.clone() },
            Refusal::Links { path, links: 2 },
            Refusal::PassphraseWithKeyFile,
            Refusal::ExistingObject { what: "one already exists".into() },
            Refusal::SeveralPassphrases,
            Refusal::NoPassphrase { slot: 1, kind: "key file" },
            Refusal::UnknownKey { slot: 1 },
            Refusal::UndescribedKey { slot: 1 },
            Refusal::UnkeptKey { slot: 1, reason: "its plugin is missing".into() },
        ];
        let program = crate::Cli::command();
        let mut known = Vec::new();
        options(&program, &mut known);
        let hints = crate::help::HINTS.iter().map(|(_, hint)| String::from(*hint));
        let advice = refusals
            .iter()
            .map(remedy)
            .chain([FindingKind::Header, FindingKind::Log].map(|kind| mending(kind).to_owned()))
            .chain(hints);
        for text in advice {
            let words: Vec<&str> = text.split([' ', '\'', ',']).collect();
            let named: Vec<&&str> = words.iter().filter(|word| word.starts_with("--")).collect();
            assert!(named.iter().all(|option| known.iter().any(|known| **option == format!("--{known}"))), "{text}");
            let mut names = 0;
            for command in commands(&text) {
                names += 1;
                let way = command.iter().skip(1).take_while(|word| !word.starts_with('-'));
                assert!(way.clone().count() > 0 && command[0] == "lockbox", "{text}");
                way.fold(&program, |at, word| at.find_subcommand(word).unwrap_or_else(|| panic!("{text}")));
            }
            assert!(!named.is_empty() || names > 0, "no remedy: {text}");
        }
    }

    #[test]
    fn a_missing_source_is_neither_a_missing_archive_nor_graver_than_damage() {
        let missing = || Error::io("cannot open x", io::Error::from_raw_os_error(2));
        let gone = Error::request("cannot open s3://b/a", io::ErrorKind::NotFound);
        assert_eq!(source_failure(Path::new("a.lbx"), missing()).code, NO_SOURCE);
        assert_eq!((source_code(&gone), code(&gone)), (lockbox_host::NO_ARCHIVE, lockbox_host::NO_ARCHIVE));
        assert_eq!(code(&missing()), OTHER, "the target of a copy");
        let problem = |error| Problem { path: Vec::new(), cause: ProblemCause::Failed(error) };
        let damaged = || Error::damaged("block=1");
        assert_eq!(gravest(&[problem(missing())], source_code), Some(NO_SOURCE));
        assert_eq!(gravest(&[problem(missing()), problem(damaged())], source_code), Some(code(&damaged())));
    }

    #[test]
    fn a_sentence_has_the_causes_and_no_numbers() {
        let error = Error::io("cannot open a.lbx", std::io::Error::from_raw_os_error(13));
        let sentence = Failure::sentence;
        assert_eq!(sentence(&error), "cannot open a.lbx: Permission denied");
        assert_eq!(sentence(&Error::OlderCopy("facts".into())), "older copy: facts; use --accept-older to accept it");
        assert!(sentence(&Error::ForkedCopy("facts".into())).ends_with("facts; use --accept-fork to accept this copy"));
        assert!(
            sentence(&Error::Replaced("facts".into())).ends_with("facts; use --accept-other to accept this archive")
        );
        assert_eq!(Failure::at(Path::new("a.lbx"), &Error::WrongKey).message, "a.lbx: wrong passphrase or key");
    }
}
