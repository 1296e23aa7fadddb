//! `lockbox edit`: opens a file of an archive in an editor, in memory alone, and writes changes
//! back.
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::exchange::{
    self, CopyDestination, DiffRoot, ImportOptions, Problem, ProblemCause, compare_trees, components, resolve,
};
use lockbox::fs::FileSystem;
use lockbox_host::control::OwnRuntimeDir;
use lockbox_host::mounts::others_exchange;
use lockbox_host::{daemons, secrets, shown};
use lockbox_terminal::display;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, geteuid, mkdtemp};

use crate::exit::Failure;
use crate::interrupt::{on_signal, pass_on};
use crate::open_archive::{OpeningArgs, WriterArgs, import_options, read_file, regular_file};
use crate::output;
use crate::paths::in_one_archive;

/// Bytes copied at once.
const PIECE: usize = 64 << 10;
/// Editors to try when neither VISUAL nor EDITOR is set.
const USUAL: &str = "$(command -v sensible-editor || command -v editor || command -v nano || echo vi)";
/// A person needs longer to look at a file. An editor that only tells a window to show it returns
/// sooner.
const AT_ONCE: Duration = Duration::from_secs(2);
const RETURNED_AT_ONCE: &str = "the editor returned at once and changed nothing; \
     an editor that opens a window needs its option to wait, such as VISUAL='code --wait' or 'gvim -f'";
/// Types that fstatfs(2) reports for file systems in memory.
const IN_MEMORY: [rustix::fs::FsWord; 2] = [0x0102_1994, 0x8584_58f6];

/// Edit a file of an archive with VISUAL or EDITOR
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// The file, made when it is missing
    #[arg(value_name = "ARCHIVE:PATH")]
    path: OsString,
    /// Keep the text meanwhile in a directory made in DIR, which may be on a disk
    #[arg(long = "in", value_name = "DIR")]
    place: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (archive, paths) = in_one_archive([&args.path])?;
    let path = paths.first().map_or(&b""[..], Vec::as_slice);
    let names = components(path).map_err(|error| Failure::of(display(path), &error))?;
    let Some(name) = names.last() else { return Err(Failure::other("the root of an archive is not a file")) };
    let place = place(args)?;
    let named = args.opening.of(archive);
    let watch = Watch::default();
    named.take_input();
    let (archive, ()) = named.write_beside(args.writer, || watch.begin())?;
    match edit(&archive, path, name, &place, &watch) {
        // Changes that could not be written back must not get lost: they stay in the private
        // directory.
        Ok(Some(private)) => {
            let written = write_back(archive.file_system(), path, &private);
            let closed = written.and_then(|()| archive.close());
            closed.map_err(|error| private.keep(named.failure(error)))
        }
        unchanged => unchanged.and(named.close(archive)),
    }
}

/// Returns the parent of the private directory: a path without links, on which no other user can
/// exchange a directory and read the content.
fn place(args: &Args) -> Result<PathBuf, Failure> {
    const REMEDY: &str = "name a directory with --in, which may be on a disk";
    let user = geteuid();
    let given = std::env::var_os("XDG_RUNTIME_DIR");
    let place = match (&args.place, daemons::directory()) {
        (Some(place), _) => place.clone(),
        (None, OwnRuntimeDir::Ready(place)) if user.is_root() || given.is_some_and(|given| *place == *given) => place,
        // Sockets of daemons come to /tmp then, which is on a disk mostly.
        (None, _) => PathBuf::from(format!("/run/user/{user}")),
    };
    let cannot = |error| {
        let mut failure = Failure::host(format!("cannot use {}", shown(&place)), &error);
        failure.message += &format!("; {REMEDY}");
        failure
    };
    let real = place.canonicalize().map_err(cannot)?;
    let found = rustix::fs::statfs(&real).map_err(|errno| cannot(errno.into()))?;
    if args.place.is_none() && !IN_MEMORY.contains(&found.f_type) {
        return Err(Failure::other(format!(
            "{} is not in memory, so the edited text would be written to a disk; if that is intended, {REMEDY}",
            shown(&place)
        )));
    }
    if others_exchange(&real) {
        return Err(Failure::other(format!(
            "other users may rename entries of {} or of a directory above it: set XDG_RUNTIME_DIR, or {REMEDY}",
            shown(&place)
        )));
    }
    Ok(real)
}

/// Edits the file and returns the new one; None when it is unchanged.
fn edit(archive: &Archive, path: &[u8], name: &[u8], place: &Path, watch: &Watch) -> Result<Option<Private>, Failure> {
    let fs = archive.file_system();
    let is_there = !matches!(resolve(fs, path), Err(Error::NotFound));
    // Checked before the user edits.
    if is_there {
        regular_file(fs, path)?;
    } else {
        CopyDestination::of(fs, path, false).map_err(|error| Failure::of(display(path), &error))?;
    }
    let private = Private::new(place, name)?;
    if is_there {
        private.fill(fs, path)?;
    }
    let begun = Instant::now();
    let ended = editor(&private.file, watch)?;
    let lasted = begun.elapsed();
    let accident = match (watch.check(), ended) {
        (Err(failure), _) => Some(failure),
        (Ok(()), WaitStatus::Exited(..)) => None,
        (Ok(()), _) => Some(Failure::other("the editor was killed; nothing was changed")),
    };
    // An accident does not discard the user's changes.
    if let Some(failure) = accident {
        return Err(if private.has_more(fs, path) { private.keep(failure) } else { failure });
    }
    if let WaitStatus::Exited(_, code) = ended
        && code != 0
    {
        return Err(Failure::other(format!("the editor ended with exit code {code}; nothing was changed")));
    }
    let changed = match private.file.symlink_metadata() {
        Ok(found) if found.is_file() => private.differs(fs, path),
        Ok(_) => return Err(Failure::other("the editor left no regular file; nothing was changed")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_there => false,
        Err(error) => return Err(Failure::host("cannot read the edited file", &error)),
    };
    if !changed && lasted < AT_ONCE {
        output::complain(RETURNED_AT_ONCE);
    }
    Ok(changed.then_some(private))
}

fn write_back(fs: &FileSystem, path: &[u8], private: &Private) -> Result<(), Error> {
    if let Err(Error::NotFound) = resolve(fs, path) {
        let to = CopyDestination::of(fs, path, false)?;
        let options = ImportOptions { name: to.name, ..import_options(to.directory) };
        let report = exchange::import(fs, None, std::slice::from_ref(&private.file), &options, &mut |_| Ok(()))?;
        return match report.problems.into_iter().next() {
            None => Ok(()),
            // That is not about the file.
            Some(Problem { cause: ProblemCause::Failed(error @ Error::InUse(_)), .. }) => Err(error),
            Some(problem) => Err(Error::Invalid(problem.to_string())),
        };
    }
    let failed = |error| Error::io("cannot read the edited file", error);
    let mut file = File::open(&private.file).map_err(failed)?;
    exchange::rewrite(fs, path, &mut file)
}

/// Edited file, in a directory that only its user enters. Wiped and removed when dropped.
struct Private {
    directory: PathBuf,
    file: PathBuf,
}

impl Private {
    fn new(place: &Path, name: &[u8]) -> Result<Private, Failure> {
        let directory = mkdtemp(&place.join("lockbox-edit-XXXXXX"))
            .map_err(|errno| Failure::host(format!("cannot create a directory in {}", shown(place)), &errno.into()))?;
        Ok(Private { file: directory.join(OsStr::from_bytes(name)), directory })
    }

    fn fill(&self, fs: &FileSystem, path: &[u8]) -> Result<(), Failure> {
        let failed = |error: std::io::Error| Failure::host(format!("cannot write {}", shown(&self.file)), &error);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.file).map_err(failed)?;
        read_file(fs, path, PIECE, &mut |piece| file.write_all(piece).map_err(failed))
    }

    /// Returns whether the file differs from the archive's. A file that cannot be compared counts
    /// as different, so that edits are not lost.
    fn differs(&self, fs: &FileSystem, path: &[u8]) -> bool {
        if let Err(Error::NotFound) = resolve(fs, path) {
            return self.file.symlink_metadata().is_ok_and(|found| found.len() > 0);
        }
        let mut differs = false;
        let compared = compare_trees(DiffRoot::Archive(fs, path), DiffRoot::Host(&self.file), false, &mut |_, _| {
            differs = true;
            ControlFlow::Break(())
        });
        differs || !compared.is_ok_and(|problems| problems.is_empty())
    }

    /// Returns whether the directory has any content that the archive does not have. Editors keep
    /// unsaved changes in other files of the directory.
    fn has_more(&self, fs: &FileSystem, path: &[u8]) -> bool {
        let mut entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        entries.any(|entry| entry.path() != self.file || self.differs(fs, path))
    }

    /// Leaves all files in place, and adds their path to the failure.
    fn keep(self, mut failure: Failure) -> Failure {
        failure.message += &format!("; the edited text is in {}", shown(&self.file));
        std::mem::forget(self);
        failure
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // Editors leave copies in the same directory.
        let beside = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        beside.for_each(|entry| wipe(&entry.path()));
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            output::complain(&format!(
                "cannot remove {}, which holds the edited text: {error}",
                shown(&self.directory)
            ));
        }
    }
}

/// Writes zeros over a file, as far as that can be done: it is removed in any case.
fn wipe(path: &Path) {
    // Nothing that would be waited for.
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32;
    let Ok(mut file) = OpenOptions::new().write(true).custom_flags(flags).open(path) else { return };
    let Ok(end) = file.seek(SeekFrom::End(0)) else { return };
    if file.rewind().is_ok() {
        let _ = std::io::copy(&mut std::io::repeat(0).take(end), &mut file);
    }
}

const STARTING: i32 = -1;

/// Signals during editing: those of the keyboard are left to the editor, others end it; edits are
/// then kept, and not written back.
#[derive(Default)]
struct Watch {
    /// The editor's process; STARTING while it is made, or 0.
    editor: Arc<AtomicI32>,
    /// Number of the signal that arrived, or 0.
    came: Arc<AtomicU8>,
}

impl Watch {
    fn begin(&self) -> Result<(), Failure> {
        let (editor, noted) = (self.editor.clone(), self.came.clone());
        // It would end this program where it stands, and the text would stay.
        let quit: SigSet = [Signal::SIGQUIT].into_iter().collect();
        quit.thread_block().map_err(|errno| Failure::host("cannot watch for signals", &errno.into()))?;
        on_signal(move |signal| {
            let editor = editor.load(Ordering::SeqCst);
            if editor != 0 && signal == Signal::SIGINT as u8 {
                return;
            }
            noted.store(signal, Ordering::SeqCst);
            pass_on(editor, signal.into());
        })
    }

    fn check(&self) -> Result<(), Failure> {
        match self.came.load(Ordering::SeqCst) {
            0 => Ok(()),
            signal => Err(Failure::new(128 + signal, "interrupted; nothing was changed")),
        }
    }
}

fn editor(file: &Path, watch: &Watch) -> Result<WaitStatus, Failure> {
    let named = ["VISUAL", "EDITOR"].iter().filter_map(std::env::var_os).find(|editor| !editor.is_empty());
    let named = named.unwrap_or_else(|| USUAL.into());
    // Shell words, as everywhere: EDITOR may have arguments.
    let script = [b"exec ", named.as_bytes(), b" \"$@\""].concat();
    let words = [&b"sh"[..], b"-c", &script, b"sh", file.as_os_str().as_bytes()];
    let variables = secrets::inherited().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat());
    let text = |bytes: Vec<u8>| CString::new(bytes).map_err(|_| Failure::usage("the path holds a NUL"));
    let words = words.into_iter().map(|word| text(word.to_vec())).collect::<Result<Vec<_>, _>>()?;
    let variables = variables.map(text).collect::<Result<Vec<_>, _>>()?;
    watch.editor.store(STARTING, Ordering::SeqCst);
    watch.check()?;
    let cannot = |errno: nix::errno::Errno| Failure::host("cannot run the editor", &errno.into());
    let pid = spawn(&words, &variables).map_err(cannot)?;
    watch.editor.store(pid.as_raw(), Ordering::SeqCst);
    // Signal that arrived just before.
    pass_on(pid.as_raw(), watch.came.load(Ordering::SeqCst).into());
    let ended = loop {
        match waitpid(pid, None) {
            Err(nix::errno::Errno::EINTR) => {}
            ended => break ended,
        }
    };
    watch.editor.store(0, Ordering::SeqCst);
    ended.map_err(cannot)
}

/// Starts the editor with no signal blocked or ignored that this program blocks or ignores for
/// itself.
fn spawn(words: &[CString], variables: &[CString]) -> nix::Result<Pid> {
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF)?;
    attributes.set_sigmask(&SigSet::empty())?;
    attributes.set_sigdefault(&[Signal::SIGPIPE, Signal::SIGXFSZ].into_iter().collect())?;
    posix_spawn(c"/bin/sh", &PosixSpawnFileActions::init()?, &attributes, words, variables)
}
