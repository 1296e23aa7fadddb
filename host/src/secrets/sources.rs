//! Sources of credentials on the command line: a key file, identities, and the passphrase, which
//! may also be in the environment, on standard input or at a prompt.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::RawFd;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use clap::Args;
use lockbox::crypto::identity::is_public_key;

use super::read::{PASSPHRASE, Privacy, SecretKind, TYPED, checked};
use super::{Bytes, Error, Result, desktop, prompt, read};
use crate::shown;

const IDENTITY: SecretKind = SecretKind { name: "identity", most: 1 << 20 };
/// The reader of the file applies the limit.
const KEY_FILE: SecretKind = SecretKind { name: "key file", most: usize::MAX };

/// Where the secrets that open an archive come from; nothing in here is secret.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    #[command(flatten)]
    pub passphrase: PassphraseSources,
    /// Open with the key file FILE; a passphrase is asked for only when a key slot wants both
    #[arg(long, value_name = "FILE")]
    pub keyfile: Option<PathBuf>,
    /// Open with the identities in FILE: of age and its plugins, or an OpenSSH private key; may be repeated
    #[arg(long, value_name = "FILE")]
    pub identity: Vec<PathBuf>,
    /// Open with the recovery code in FILE, or on standard input for -; it may also be given as a passphrase
    #[arg(long, value_name = "FILE")]
    pub recovery_code: Option<PathBuf>,
}

impl Sources {
    /// Returns whether the command line names any secret that opens an archive, and not just a way
    /// of asking.
    pub(crate) fn any_named(&self) -> bool {
        self.passphrase.any_named() || self.names_file()
    }

    /// Returns whether it names a file that opens an archive without any passphrase.
    pub fn names_file(&self) -> bool {
        self.keyfile.is_some() || self.recovery_code.is_some() || !self.identity.is_empty()
    }

    /// Returns the same options for the command line of another program of lockbox.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments = self.passphrase.arguments();
        let files = self.keyfile.iter().map(|path| ("--keyfile=", path));
        let files = files.chain(self.recovery_code.iter().map(|path| ("--recovery-code=", path)));
        let files = files.chain(self.identity.iter().map(|path| ("--identity=", path)));
        arguments.extend(files.map(|(name, path)| assigned(name, path.as_os_str())));
        arguments
    }

    /// Overrides fields with those set in `later`, as later options do; identities add up.
    pub fn overridden_by(&mut self, later: &Sources) {
        self.passphrase.overridden_by(&later.passphrase);
        replace(&mut self.keyfile, &later.keyfile);
        replace(&mut self.recovery_code, &later.recovery_code);
        self.identity.extend_from_slice(&later.identity);
    }

    /// Returns the key file, opened, and its name for messages.
    ///
    /// # Errors
    /// One sentence when it cannot be opened or others may read it.
    pub fn key_file(&self) -> Result<Option<(File, String)>> {
        let open = |path: &PathBuf| Ok((read::open(path, &KEY_FILE, self.passphrase.privacy())?, shown(path)));
        self.keyfile.as_ref().map(open).transpose()
    }

    /// Returns the recovery code.
    ///
    /// # Errors
    /// One sentence when it cannot be read or others may read it.
    pub fn recovery_code(&self) -> Result<Option<Bytes>> {
        self.recovery_code.as_ref().map(|path| self.passphrase.bytes(path)).transpose()
    }

    /// Returns the content of each identity file and its name for messages.
    ///
    /// # Errors
    /// One sentence when one cannot be read or others may read it.
    pub fn identities(&self) -> Result<Vec<(Bytes, String)>> {
        let read = |path: &PathBuf| Ok((self.identity_file(path)?, shown(path)));
        self.identity.iter().map(read).collect()
    }

    fn identity_file(&self, path: &Path) -> Result<Bytes> {
        let private = read::file(path, &IDENTITY, self.passphrase.privacy());
        // The public half of a key may be readable by others, and protecting it is no remedy: the
        // attempt to use it reports that it is public. A pipe would block.
        let public = || {
            let content = path.is_file().then(|| read::file(path, &IDENTITY, Privacy::Waived).ok()).flatten();
            content.filter(|content| is_public_key(content))
        };
        private.or_else(|error| public().ok_or(error))
    }
}

/// Where a passphrase comes from, as the command line says; nothing in here is secret.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct PassphraseSources {
    /// Read the passphrase from FILE; without any source from LOCKBOX_PASSFILE, the output of LOCKBOX_PASSCOMMAND, standard
    /// input when it is no terminal, or a prompt
    #[arg(long, value_name = "FILE")]
    pub passfile: Option<PathBuf>,
    /// Read the passphrase from the open descriptor N
    #[arg(long, value_name = "N")]
    pub passfd: Option<RawFd>,
    /// Take the output of the shell command CMD as the passphrase
    #[arg(long, value_name = "CMD")]
    pub passcommand: Option<OsString>,
    /// Read the passphrase from the systemd credential NAME, a file in $CREDENTIALS_DIRECTORY
    #[arg(long, value_name = "NAME")]
    pub credential: Option<OsString>,
    /// Ask for the passphrase through systemd-ask-password when there is no terminal
    #[arg(long)]
    pub ask_password: bool,
    /// Accept files with secrets that others may read
    #[arg(long)]
    pub passfile_any: bool,
    /// Suppress hints and progress
    #[arg(long)]
    pub quiet: bool,
    /// Standard input is something else, so the terminal is asked.
    #[arg(skip)]
    pub input_taken: bool,
    /// There is no terminal: secrets that no option names are requested in a window.
    #[arg(skip)]
    pub desktop: bool,
    /// Notice of the window above the prompt, as standard error is not visible there.
    #[arg(skip)]
    pub notice: Option<&'static str>,
}

fn replace<T: Clone>(mine: &mut Option<T>, later: &Option<T>) {
    if later.is_some() {
        mine.clone_from(later);
    }
}

/// Returns one argument: a value may begin with a dash.
fn assigned(name: &str, value: &OsStr) -> OsString {
    [OsStr::new(name), value].into_iter().collect()
}

enum Source<'a> {
    File(PathBuf),
    Descriptor(RawFd),
    /// The command, and the name of where it was given.
    Command(OsString, &'static str),
    Credential(&'a OsStr),
    AskPassword,
    Window,
    Input,
    Prompt,
}

impl PassphraseSources {
    /// Returns whether the command line names a source, and not just a way of asking.
    pub fn any_named(&self) -> bool {
        self.passfile.is_some() || self.passfd.is_some() || self.passcommand.is_some() || self.credential.is_some()
    }

    /// Rejects combinations that can never work, before any prompt.
    ///
    /// # Errors
    /// Usage, naming the options that do not go together.
    pub fn check(&self) -> Result<()> {
        let given = [
            ("passfile", self.passfile.is_some()),
            ("passfd", self.passfd.is_some()),
            ("passcommand", self.passcommand.is_some()),
            ("credential", self.credential.is_some()),
            ("ask-password", self.ask_password),
        ];
        let mut given = given.iter().filter(|(_, given)| *given).map(|(name, _)| name);
        if let (Some(one), Some(other)) = (given.next(), given.next()) {
            return Err(Error::usage(format!("{one} and {other} are both sources of the passphrase; choose one")));
        }
        if self.passfd.is_some_and(|number| number < 0 || number == 1 || number == 2) {
            return Err(Error::usage("passfd takes the number of a descriptor to read from: 0, 3 or more"));
        }
        if self.input_taken && self.passfd == Some(0) {
            return Err(Error::usage("standard input is not for the passphrase here: passfd takes another descriptor"));
        }
        if let Some(name) = &self.credential
            && !is_plain_name(name)
        {
            return Err(Error::usage("credential takes the name of a credential, without a path"));
        }
        Ok(())
    }

    /// Returns the same options for the command line of another program of lockbox.
    pub fn arguments(&self) -> Vec<OsString> {
        let passfd = self.passfd.map(|number| OsString::from(number.to_string()));
        let values = [
            ("--passfile=", self.passfile.as_deref().map(Path::as_os_str)),
            ("--passfd=", passfd.as_deref()),
            ("--passcommand=", self.passcommand.as_deref()),
            ("--credential=", self.credential.as_deref()),
        ];
        let flags =
            [("--ask-password", self.ask_password), ("--passfile-any", self.passfile_any), ("--quiet", self.quiet)];
        let values = values.into_iter().filter_map(|(name, value)| Some(assigned(name, value?)));
        values.chain(flags.into_iter().filter(|(_, given)| *given).map(|(name, _)| name.into())).collect()
    }

    /// Overrides fields with those set in `later`, as later options do.
    pub fn overridden_by(&mut self, later: &PassphraseSources) {
        replace(&mut self.passfile, &later.passfile);
        replace(&mut self.passfd, &later.passfd);
        replace(&mut self.passcommand, &later.passcommand);
        replace(&mut self.credential, &later.credential);
        self.ask_password |= later.ask_password;
        self.passfile_any |= later.passfile_any;
        self.quiet |= later.quiet;
    }

    /// Returns the passphrase of the archive at `path`, without its line end.
    ///
    /// # Errors
    /// As [`PassphraseSources::check`]; one sentence when the source fails or is empty.
    pub fn passphrase(&self, path: &Path) -> Result<Bytes> {
        match self.source()? {
            Source::Window => Source::Window.asked(&match self.notice {
                Some(notice) => format!("{notice}. {}", question(path)),
                None => question(path),
            }),
            source @ Source::Prompt => source.asked(&question(path)),
            source => self.read(&source, path),
        }
    }

    /// Returns whether the passphrase is typed by a person.
    pub fn is_typed(&self) -> bool {
        matches!(self.source(), Ok(Source::Prompt | Source::Window))
    }

    /// Prompts again after a wrong passphrase: `why` is part of the question, and printed nowhere
    /// else.
    pub(crate) fn once_more(&self, why: &str, path: &Path) -> Result<Bytes> {
        self.source()?.asked(&format!("{why}. {}", question(path)))
    }

    /// Returns a passphrase to be set: typed twice at a prompt or in windows.
    ///
    /// # Errors
    /// As [`PassphraseSources::passphrase`]; when the two differ at a prompt.
    pub fn new_passphrase(&self, path: &Path) -> Result<Bytes> {
        match self.source()? {
            Source::Prompt => self.chosen(path),
            Source::Window => unmarked(desktop::choose_passphrase(path, !self.quiet)?),
            source => unmarked(self.read(&source, path)?),
        }
    }

    /// Returns the old and the new passphrase; the new one from the file `new` if there is one. If
    /// both are read from standard input, each is one line.
    ///
    /// # Errors
    /// As [`PassphraseSources::new_passphrase`].
    pub fn old_and_new(&self, new: Option<&Path>, path: &Path) -> Result<(Bytes, Bytes)> {
        let source = self.source()?;
        if let Some(file) = new {
            let old = self.passphrase(path)?;
            return Ok((old, unmarked(self.of_file(file)?)?));
        }
        match source {
            Source::Input | Source::Descriptor(0) => two_lines(read::input(&PASSPHRASE)?),
            _ if io::stdin().is_terminal() => Ok((self.passphrase(path)?, self.chosen(path)?)),
            source => Ok((self.read(&source, path)?, unmarked(checked(read::input(&PASSPHRASE)?, INPUT)?)?)),
        }
    }

    /// Returns whether a person sees advice and progress.
    pub fn advises(&self) -> bool {
        !self.quiet && io::stderr().is_terminal()
    }

    fn chosen(&self, path: &Path) -> Result<Bytes> {
        checked(prompt::choose_passphrase(path, self.advises())?, TYPED)
    }

    /// Answers a question of an identity or its plugin without echo, such as for the passphrase of
    /// an SSH key. Returns None when no person can be asked.
    pub(crate) fn answer(&self, question: &str) -> Option<Bytes> {
        // Never the secret that opens the archive: a token would take it for its PIN, block itself,
        // and learn it.
        let answer = if self.desktop {
            Source::Window.asked(question)
        } else if prompt::has_terminal() {
            prompt::ask(question).and_then(|typed| checked(typed, TYPED))
        } else if self.ask_password {
            read::ask_agents(question.trim_end(), &PASSPHRASE).and_then(|typed| checked(typed, TYPED))
        } else {
            return None;
        };
        answer.ok()
    }

    /// Returns a passphrase to be set by a command that does not need the current one: from `file`,
    /// typed twice, or from standard input.
    ///
    /// # Errors
    /// As [`PassphraseSources::new_passphrase`].
    pub fn new_one(&self, file: Option<&Path>, path: &Path) -> Result<Bytes> {
        match file {
            Some(file) => unmarked(self.of_file(file)?),
            None if io::stdin().is_terminal() => self.chosen(path),
            None => unmarked(checked(read::input(&PASSPHRASE)?, INPUT)?),
        }
    }

    /// Reads another secret that is no longer than a passphrase: from `file`, or standard input for
    /// `-`.
    ///
    /// # Errors
    /// One sentence when it cannot be read or other users may read it.
    pub fn bytes(&self, file: &Path) -> Result<Bytes> {
        if file == Path::new("-") { read::input(&PASSPHRASE) } else { read::file(file, &PASSPHRASE, self.privacy()) }
    }

    fn source(&self) -> Result<Source<'_>> {
        self.check()?;
        let environment = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let terminal = io::stdin().is_terminal();
        Ok(if let Some(path) = &self.passfile {
            Source::File(path.clone())
        } else if let Some(number) = self.passfd {
            Source::Descriptor(number)
        } else if let Some(command) = &self.passcommand {
            Source::Command(command.clone(), "the passcommand")
        } else if let Some(name) = &self.credential {
            Source::Credential(name)
        } else if self.ask_password && !terminal {
            Source::AskPassword
        } else if self.desktop {
            Source::Window
        } else if let Some(path) = environment(PASSFILE) {
            Source::File(path.into())
        } else if let Some(command) = environment(PASSCOMMAND) {
            Source::Command(command, PASSCOMMAND)
        } else if terminal || (self.input_taken && prompt::has_terminal()) {
            Source::Prompt
        } else if self.input_taken {
            return Err(Error::usage(
                "standard input is not for the passphrase here: use --passfile, LOCKBOX_PASSFILE or LOCKBOX_PASSCOMMAND",
            ));
        } else {
            Source::Input
        })
    }

    pub(crate) fn privacy(&self) -> Privacy {
        if self.passfile_any { Privacy::Waived } else { Privacy::Demanded }
    }

    fn read(&self, source: &Source<'_>, path: &Path) -> Result<Bytes> {
        match source {
            Source::File(file) => self.of_file(file),
            Source::Descriptor(number) => {
                checked(read::descriptor(*number, &PASSPHRASE)?, &format!("descriptor {number} had no passphrase"))
            }
            Source::Command(command, name) => {
                checked(read::shell(command, name, &PASSPHRASE)?, &format!("{name} printed no passphrase"))
            }
            Source::Credential(name) => checked(credential(name)?, "the credential has no passphrase: it is empty"),
            Source::AskPassword => checked(read::ask_agents(question(path).trim_end(), &PASSPHRASE)?, TYPED),
            Source::Window => source.asked(&question(path)),
            Source::Input | Source::Prompt => checked(read::input(&PASSPHRASE)?, INPUT),
        }
    }

    fn of_file(&self, file: &Path) -> Result<Bytes> {
        let read = read::file(file, &PASSPHRASE, self.privacy())?;
        checked(read, &format!("{} has no passphrase: it is empty", shown(file)))
    }
}

impl Source<'_> {
    fn asked(&self, question: &str) -> Result<Bytes> {
        let typed = if matches!(self, Source::Window) { desktop::ask(question) } else { prompt::ask(question) };
        checked(typed?, TYPED)
    }
}

fn question(path: &Path) -> String {
    format!("Passphrase of {}: ", shown(path))
}

/// Returns whether the name is one part of a path, and not `.` or `..`.
fn is_plain_name(name: &OsStr) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// Reads a file that the service manager created for this unit alone; its directory keeps other
/// users out.
fn credential(name: &OsStr) -> Result<Bytes> {
    let directory = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from).filter(|path| path.is_absolute());
    let Some(directory) = directory else {
        return Err(Error::source(
            "no credentials: CREDENTIALS_DIRECTORY is not set; systemd sets it for units with LoadCredential=",
        ));
    };
    read::file(&directory.join(name), &PASSPHRASE, Privacy::Waived)
}

fn two_lines(mut both: Bytes) -> Result<(Bytes, Bytes)> {
    let Some(end) = both.iter().position(|&b| b == b'\n') else {
        return Err(Error::source(TWO_LINES));
    };
    let second = last_line(&both[end + 1..], TWO_LINES)?;
    both.truncate(end + 1);
    Ok((checked(both, TWO_LINES)?, second))
}

/// Returns the new passphrase of standard input. Errors: `otherwise` if it is empty, or if a line
/// follows: a passphrase with a line feed cannot be typed.
pub fn last_line(rest: &[u8], otherwise: &str) -> Result<Bytes> {
    if rest.strip_suffix(b"\n").unwrap_or(rest).contains(&b'\n') {
        return Err(Error::source(otherwise));
    }
    let mut line = Bytes::new(Vec::with_capacity(rest.len()));
    line.extend_from_slice(rest);
    checked(line, otherwise)
}

const PASSFILE: &str = "LOCKBOX_PASSFILE";
const PASSCOMMAND: &str = "LOCKBOX_PASSCOMMAND";

/// Variables that say where a passphrase is. Programs that are started on the content of an archive
/// do not inherit them: they do not need the secret that opens this archive, and others of its
/// user.
const VARIABLES: [&str; 2] = [PASSFILE, PASSCOMMAND];

/// Returns the environment without the variables that say where a passphrase is.
pub fn inherited() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(|(name, _)| !VARIABLES.iter().any(|own| name == own))
}

/// Takes the variables that say where a passphrase is out of the environment of a program.
pub fn withhold(command: &mut Command) -> &mut Command {
    VARIABLES.into_iter().fold(command, Command::env_remove)
}

const INPUT: &str = "standard input had no passphrase: use --passfile, LOCKBOX_PASSCOMMAND or a terminal";
const TWO_LINES: &str = "standard input must have the old and the new passphrase, one a line";

/// Byte order marks that editors of Windows put before a text: in UTF-8, and in UTF-16 of both
/// orders.
const MARKS: [&[u8]; 3] = [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"];

/// Returns whether a passphrase begins with a byte order mark, which an editor wrote into its file.
/// It counts like any other byte, so that an archive opens with the file that it was made with.
pub(crate) fn is_marked(passphrase: &[u8]) -> bool {
    MARKS.iter().any(|mark| passphrase.starts_with(mark))
}

/// Errors: for a new passphrase with a mark: at a prompt it cannot be typed.
fn unmarked(passphrase: Bytes) -> Result<Bytes> {
    if is_marked(&passphrase) {
        return Err(Error::source(
            "the new passphrase begins with a byte order mark, which cannot be typed: save its file as UTF-8 without one",
        ));
    }
    Ok(passphrase)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::Kind;
    use super::*;

    #[test]
    fn one_line_end_is_cut_and_nothing_is_refused() {
        let cut = |text: &str| checked(Bytes::new(text.as_bytes().to_vec()), "empty").ok().map(|bytes| bytes.to_vec());
        assert_eq!(cut("abc\n"), Some(b"abc".to_vec()));
        assert_eq!(cut("abc\n\n"), Some(b"abc\n".to_vec()));
        assert_eq!(cut(" abc\r\n"), Some(b" abc".to_vec()));
        assert_eq!(cut("\n"), None);
        assert_eq!(cut(""), None);
    }

    #[test]
    fn a_byte_order_mark_is_refused_in_a_new_passphrase_and_counts_in_an_old_one() {
        let place = tempfile::tempdir().unwrap();
        let (file, sources) =
            (place.path().join("pass"), PassphraseSources { passfile_any: true, ..Default::default() });
        for (content, is_refused) in [
            (&b"\xef\xbb\xbfsecret\r\n"[..], true),
            (b"\xff\xfes\0e\0", true),
            (b"\xfe\xff\0s\0e", true),
            (b"secret\xef\xbb\xbf\n", false),
            (b"\xefsecret\n", false),
        ] {
            std::fs::write(&file, content).unwrap();
            let sources = PassphraseSources { passfile: Some(file.clone()), ..sources.clone() };
            let new = [sources.new_one(Some(&file), Path::new("a.lbx")), sources.new_passphrase(Path::new("a.lbx"))];
            assert_eq!(new.each_ref().map(Result::is_err), [is_refused; 2], "{content:?}");
            let old = sources.passphrase(Path::new("a.lbx")).unwrap();
            assert!(content.starts_with(&old) && is_marked(&old) == is_refused, "{content:?}");
        }
    }

    #[test]
    fn two_passphrases_come_one_a_line() {
        let split = |text: &str| two_lines(Bytes::new(text.as_bytes().to_vec())).ok();
        let (old, new) = split("old\nnew\n").unwrap();
        assert_eq!((&**old, &**new), (&b"old"[..], &b"new"[..]));
        for text in ["old", "old\n", "\nnew\n", "old\n\n", "old\nnew\nnew\n", "old\nnew\n\n"] {
            assert!(split(text).is_none(), "{text:?}");
        }
    }

    #[test]
    fn an_input_that_is_taken_is_never_the_source() {
        let taken = PassphraseSources { input_taken: true, ..PassphraseSources::default() };
        let from = |sources: PassphraseSources| match sources.source() {
            Ok(Source::Input) => "input",
            Ok(Source::Descriptor(_)) => "descriptor",
            Ok(Source::File(_)) => "file",
            Ok(_) => "something else",
            Err(_) => "nothing",
        };
        assert_ne!(from(taken.clone()), "input");
        assert_eq!(from(PassphraseSources { passfd: Some(0), ..taken.clone() }), "nothing");
        assert_eq!(from(PassphraseSources { passfd: Some(3), ..taken.clone() }), "descriptor");
        assert_eq!(from(PassphraseSources { passfile: Some("file".into()), ..taken }), "file");
    }

    #[test]
    fn two_sources_of_the_passphrase_are_a_usage_error() {
        let all = PassphraseSources {
            passfile: Some("file".into()),
            passfd: Some(3),
            passcommand: Some("command".into()),
            credential: Some("name".into()),
            ask_password: true,
            ..PassphraseSources::default()
        };
        let none = PassphraseSources::default;
        let pick: [fn(&PassphraseSources, &mut PassphraseSources); 5] = [
            |from, to| to.passfile = from.passfile.clone(),
            |from, to| to.passfd = from.passfd,
            |from, to| to.passcommand = from.passcommand.clone(),
            |from, to| to.credential = from.credential.clone(),
            |from, to| to.ask_password = from.ask_password,
        ];
        for (first, one) in pick.iter().enumerate() {
            let mut sources = none();
            one(&all, &mut sources);
            assert_eq!(sources.check(), Ok(()));
            for other in &pick[first + 1..] {
                let mut both = sources.clone();
                other(&all, &mut both);
                let error = both.check().unwrap_err();
                assert_eq!(error.kind, Kind::Usage);
                assert!(error.sentence.contains(" are both sources of the passphrase"), "{error}");
                assert_eq!(both.passphrase(Path::new("a.lbx")).unwrap_err(), error);
            }
        }
    }

    #[test]
    fn a_credential_is_a_name_and_a_descriptor_can_be_read() {
        for name in ["", ".", "..", "/etc/passwd", "a/b", "a/", "../a"] {
            let sources = PassphraseSources { credential: Some(name.into()), ..PassphraseSources::default() };
            assert_eq!(sources.check().unwrap_err().kind, Kind::Usage, "{name:?}");
        }
        for number in [-1, 1, 2] {
            let sources = PassphraseSources { passfd: Some(number), ..PassphraseSources::default() };
            assert_eq!(sources.check().unwrap_err().kind, Kind::Usage, "{number}");
        }
    }

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        sources: Sources,
    }

    #[test]
    fn arguments_for_another_program_say_the_same() {
        let given = ["--passfd=5", "--passfile-any", "--keyfile=-a, b", "--identity=one", "--identity=two"];
        let parse = |arguments: &[OsString]| {
            let name = [OsString::from("program")];
            Program::try_parse_from(name.iter().chain(arguments)).ok().unwrap().sources
        };
        let sources = parse(&given.map(OsString::from));
        assert_eq!(sources.arguments(), given);
        assert_eq!(parse(&sources.arguments()), sources);
        for given in [
            "--recovery-code=-",
            "--passfile=x",
            "--passcommand=echo a, b",
            "--credential=name",
            "--ask-password",
            "--quiet",
        ] {
            let sources = parse(&[given.into()]);
            assert_eq!(sources.arguments(), [given]);
        }
    }

    #[test]
    fn later_options_replace_earlier_ones_and_identities_add_up() {
        let one = Sources { keyfile: Some("a".into()), identity: vec!["x".into()], ..Sources::default() };
        let other = Sources { keyfile: Some("b".into()), identity: vec!["y".into()], ..Sources::default() };
        let mut both = one.clone();
        both.overridden_by(&other);
        assert_eq!((both.keyfile, both.identity), (Some("b".into()), vec!["x".into(), "y".into()]));
        let mut both = one.clone();
        both.overridden_by(&Sources::default());
        assert_eq!(both, one);
    }
}
