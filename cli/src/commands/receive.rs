//! `lockbox receive`: receives the content of a one-time link.
use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockbox::exchange;
use lockbox::storage::HostEntry;
use lockbox_host::{code, shown};
use lockbox_share_client::Error;
use lockbox_share_client::http::{self, ServerAddress, ShareClient};
use lockbox_share_client::link::{Link, MAX_TEXT};
use lockbox_share_client::meta::{self, ContentKind};
use lockbox_share_client::protocol::message::ErrorCode;
use lockbox_share_client::receive::{self, ReceiveOptions, ReceiveSummary, ReceiveTarget};
use lockbox_terminal::{display, hex};
use serde_json::json;
use zeroize::Zeroizing;

use crate::commands::share::serving::{self, ServerArgs};
use crate::exit::{Failure, NO_DAEMON};
use crate::interrupt::{self, Interrupt};
use crate::output::{self, Reader, complain};
use crate::progress::Bar;

/// Number of prompts for a link at a terminal.
const MAX_LINES: u32 = 6;

/// State after an interrupted download of which nothing arrived.
const NOTHING: &str = "nothing was received yet; continue with the same link within a minute";
/// State after an interrupted download whose hidden file is gone, because all arrived.
const OVER: &str = "the download had ended: the file has its name, or was damaged and removed";

/// Receive the content of a one-time link
///
/// A file is saved, a directory unpacked, and a text printed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The link; '-' or nothing reads it from standard input or a prompt, which other users cannot see
    link: Option<String>,
    /// Where the file goes: its name, a directory, or '-' for standard output; without it the sender's name in this directory
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Go on with a download that was cut
    #[arg(long)]
    resume: bool,
    /// Replace a file that has the name already
    #[arg(long)]
    force: bool,
    /// Save a directory as the tar that it came as, and a text as a file
    #[arg(long)]
    no_unpack: bool,
    /// Only tell whether the link still opens something; nothing is used up
    #[arg(long, conflicts_with_all = ["output", "resume", "force", "no_unpack", "ciphertext", "identity"])]
    check: bool,
    /// Keep the file sealed, as an age file
    #[arg(long)]
    ciphertext: bool,
    /// Write the link's secret as an identity file for 'age -d -i FILE'; without --ciphertext nothing is received
    #[arg(long, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Suppress progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    server: ServerArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let link = link(args)?;
    if let Some(path) = &args.identity {
        write_identity(path, &link)?;
        if !args.ciphertext {
            return Ok(());
        }
    }
    let server = match args.server.named()? {
        Some(server) => server,
        None => ServerAddress::parse(link.base()).map_err(|error| serving::failure(&error))?,
    };
    if !server.is_private() {
        complain(&format!(
            "{server} does not use https: an attacker on the network can use up the link, but cannot read its content"
        ));
    }
    // The user has just named the socket, and nothing is remembered of it.
    let listener = match &server {
        ServerAddress::Socket(path) => http::listener_uid(path).ok(),
        ServerAddress::Url(_) => None,
    };
    let client = ShareClient::new(server, listener);
    if args.check {
        return check(args, &client, &link);
    }
    let state = serving::state().ok();
    let kept = PartialPath::default();
    let to_stream = args.output.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let (interrupt, bar) = (Interrupt::watch()?, Bar::new(args.quiet));
    let all = Arc::new(AtomicBool::new(false));
    let (arrived, partial) = (all.clone(), kept.clone());
    // Received data is worth keeping.
    let words = move || if to_stream { streamed(arrived.load(Relaxed)) } else { partial.at_interruption() };
    let at_once = interrupt.ends_at_once(&bar, words)?;
    let progress = |done, total| {
        all.store(done >= total, Relaxed);
        bar.bytes("received", done, total);
    };
    let on_partial = |path: &Path| *kept.path() = Some(path.to_owned());
    let on_unresumed = |path: &Path, length: u64| {
        complain(&format!(
            "{length} bytes of this link were received earlier: they stay in {} until the new download is complete; --resume continues with them",
            shown(path)
        ));
    };
    // An incomplete directory is removed again.
    let (at_once, why) = (RefCell::new(Some(at_once)), RefCell::new(None));
    let unpack = |tar: &mut File, name: &str| {
        at_once.take();
        bar.wipe();
        unpacked(args, tar, name, &interrupt).map_err(|error| {
            let told = Error::Invalid(Failure::sentence(&error));
            *why.borrow_mut() = Some(error);
            told
        })
    };
    let text = |text: &[u8]| {
        bar.wipe();
        print_text(text)
    };
    let opens = !args.no_unpack && !args.ciphertext;
    let options = ReceiveOptions {
        state: state.as_deref(),
        resume: args.resume,
        ciphertext: args.ciphertext,
        retry_timeout: None,
        progress: &progress,
        on_partial: &on_partial,
        on_unresumed: &on_unresumed,
        // With `--output` the user wants a file.
        text: (opens && args.output.is_none() && !args.json).then_some(&text),
        unpack: opens.then_some(&unpack),
    };
    let received = match &args.output {
        Some(_) if to_stream => {
            let mut output = io::stdout().lock();
            receive::to_stream(&client, &link, &mut output, &options)
        }
        path => {
            let target = target(path.as_deref(), args.force);
            // Unfinished downloads of other commands are not removed here.
            let unfinished = if args.resume { Vec::new() } else { receive::sweep(&target, &link) };
            for path in unfinished {
                complain(&format!(
                    "{} is an unfinished download: continue with --resume and its link, or remove it",
                    shown(&path)
                ));
            }
            receive::to_file(&client, &link, &target, &options)
        }
    };
    at_once.take();
    bar.wipe();
    let receipt = received.map_err(|error| failure(&error, why.take().as_ref(), args, &kept))?;
    if to_stream {
        bar.done("received", None, receipt.size);
    }
    tell(args, &receipt)
}

/// Prints a text exactly, except on a terminal, which it must not drive and where a prompt follows.
fn print_text(text: &[u8]) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    let failed = |source| Error::Io { context: "cannot print the text".into(), source };
    if !out.is_terminal() {
        return out.write_all(text).and_then(|()| out.flush()).map_err(failed);
    }
    for line in text.strip_suffix(b"\n").unwrap_or(text).split(|&byte| byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        writeln!(out, "{}", display(line)).map_err(failed)?;
    }
    out.flush().map_err(failed)
}

/// Unpacks the tar of a directory, and returns its path.
fn unpacked(args: &Args, tar: &mut File, sent: &str, interrupt: &Interrupt) -> lockbox::Result<PathBuf> {
    let to = target(args.output.as_deref(), false);
    let (directory, exact) = match &to {
        ReceiveTarget::Directory { path, .. } => (path.clone(), None),
        ReceiveTarget::File { path, .. } => {
            (path.parent().map_or_else(PathBuf::new, Path::to_path_buf), path.file_name())
        }
    };
    let directory = if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory };
    let own = meta::safe_name(sent.strip_suffix(".tar").unwrap_or(sent));
    let called = |number: u32| match (exact, number) {
        (Some(name), 1) => Some(name.as_bytes().to_vec()),
        (Some(_), _) => None,
        (None, 1) => Some(own.clone().into_bytes()),
        (None, number) => Some(format!("{own} ({number})").into_bytes()),
    };
    let mut input = BufReader::with_capacity(256 << 10, tar);
    let report = exchange::unpack_tar(&mut input, &directory, &called, &|| interrupt.check())?;
    match report.strays {
        0 => {}
        1 => complain("1 symbolic link was left out that leads out of the directory"),
        count => complain(&format!("{count} symbolic links were left out that lead out of the directory")),
    }
    if report.special > 0 {
        complain(&format!("{} devices and FIFOs were left out", report.special));
    }
    Ok(match directory.as_os_str() == "." {
        true => PathBuf::from(OsStr::from_bytes(&report.name)),
        false => directory.join(OsStr::from_bytes(&report.name)),
    })
}

fn check(args: &Args, client: &ShareClient, link: &Link) -> Result<(), Failure> {
    let until = receive::look(client, link).map_err(|error| match error.code() {
        Some(ErrorCode::NotFound | ErrorCode::Method) => {
            Failure::new(NO_DAEMON, "the server is too old to check a link; only receiving shows whether it works")
        }
        _ => serving::failure(&error),
    })?;
    if args.json {
        return output::print_json(&json!({ "expires_at": until }));
    }
    let until = Reader::of(&io::stdout()).seconds(until);
    output::print(&format!("the link is valid until {until}"))
}

/// Path of the received data until it is complete.
#[derive(Clone, Default)]
struct PartialPath(Arc<Mutex<Option<PathBuf>>>);

impl PartialPath {
    fn path(&self) -> MutexGuard<'_, Option<PathBuf>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at_interruption(&self) -> String {
        let began = self.path().clone();
        let is_over = began.is_some_and(|path| path.symlink_metadata().is_err());
        self.sentence().unwrap_or_else(|| if is_over { OVER } else { NOTHING }.to_owned())
    }

    /// Returns a sentence on the partial data, if there is any; an empty file is removed.
    fn sentence(&self) -> Option<String> {
        let path = self.path().clone()?;
        match path.symlink_metadata().ok()?.len() {
            0 => {
                let _ = std::fs::remove_file(&path);
                None
            }
            // A tar that is being unpacked.
            _ if !path.file_name().is_some_and(|name| name.as_bytes().starts_with(b".")) => {
                Some(format!("the complete download is kept as {}", shown(&path)))
            }
            length => Some(format!(
                "the received part ({length} bytes) is kept in {}: continue with --resume and the same link, or remove it",
                shown(&path)
            )),
        }
    }
}

/// Returns the state after an interrupted download to standard output, when all of it arrived and
/// when not.
fn streamed(all: bool) -> String {
    let written = if all { "may be the whole file, but was not verified yet" } else { "is not the whole file" };
    format!("the output {written}; the same link starts over as long as the server keeps the file for it")
}

fn target(output: Option<&Path>, replace: bool) -> ReceiveTarget {
    match output {
        None => ReceiveTarget::Directory { path: PathBuf::new(), replace },
        Some(path) if path.is_dir() => ReceiveTarget::Directory { path: path.into(), replace },
        Some(path) => ReceiveTarget::File { path: path.into(), replace },
    }
}

/// Returns a failure with its remedy.
/// `unpacking`: why a directory could not be unpacked.
fn failure(error: &Error, unpacking: Option<&lockbox::Error>, args: &Args, kept: &PartialPath) -> Failure {
    let mut failure = serving::failure(error);
    let to_stream = args.output.as_ref().is_some_and(|path| path.as_os_str() == "-");
    match error {
        Error::Cut { .. } | Error::Damaged(_) if to_stream => {
            failure.message.push_str("; the output so far is not the whole file");
        }
        Error::NotUnpacked { tar, .. } => match unpacking {
            Some(why @ lockbox::Error::Interrupted(_)) => {
                let words = format!("extraction rolled back; the complete download is kept as {tar}");
                return interrupt::failure(why, &words);
            }
            Some(why) => return Failure::new(code(why), failure.message),
            None => {}
        },
        Error::Exists(_) if !args.force => failure = failure.advised("; use --force to replace it"),
        _ => {
            if let Some(told) = kept.sentence() {
                failure.message.push_str(&format!("; {told}"));
            }
        }
    }
    failure
}

fn tell(args: &Args, receipt: &ReceiveSummary) -> Result<(), Failure> {
    if !receipt.confirmed {
        complain(
            "could not report the complete download to the share daemon; the owner may see it as interrupted, and the server keeps the sealed file until the share expires",
        );
    }
    if args.json && receipt.path.is_some() {
        return output::print_json(&json!({
            "path": receipt.path.as_ref().map(|path| path.to_string_lossy()),
            "name": receipt.name,
            "size": receipt.size,
            "sha256": hex(receipt.sha256.as_bytes()),
            "kind": match receipt.kind {
                ContentKind::File => "file",
                ContentKind::Text => "text",
                ContentKind::Directory => "directory",
            },
            "confirmed": receipt.confirmed,
        }));
    }
    let Some(path) = &receipt.path else { return Ok(()) };
    if receipt.kind == ContentKind::Directory && !args.no_unpack {
        return output::print(&format!("{}/: {} bytes, unpacked", shown(path), receipt.size));
    }
    let unlike = meta::safe_name(&receipt.name) != receipt.name;
    let said = if unlike && args.output.is_none() { ", under a safe name" } else { "" };
    output::print(&format!("{}: {} bytes{said}", shown(path), receipt.size))
}

/// Reads the link: never from the environment; from an argument with a warning.
fn link(args: &Args) -> Result<Link, Failure> {
    let failed = |error: Error| serving::failure(&error);
    match args.link.as_deref() {
        Some(text) if text != "-" => {
            complain(
                "other users of this machine can see a link in the arguments; pass it on standard input or at the prompt",
            );
            Link::parse(text).map_err(failed)
        }
        _ if io::stdin().is_terminal() => prompt(),
        _ => {
            let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_TEXT + 1));
            let limit = MAX_TEXT as u64 + 1;
            let read = io::stdin().lock().take(limit).read_to_end(&mut bytes);
            read.map_err(|error| Failure::host("cannot read the link", &error))?;
            let text = Zeroizing::new(String::from_utf8_lossy(&bytes).into_owned());
            Link::parse(&text).map_err(failed)
        }
    }
}

/// Asks until the link is whole: a line that was broken would else end up in the shell.
fn prompt() -> Result<Link, Failure> {
    let mut text = Zeroizing::new(String::with_capacity(4096));
    for line in 0..MAX_LINES {
        let question = if line == 0 { "Link (not shown): " } else { "The rest of it (not shown): " };
        let typed = lockbox_host::secrets::ask_secretly(question)?;
        let typed = std::str::from_utf8(&typed).map_err(|_| Failure::usage("the input is not a link"))?;
        text.push_str(typed);
        text.push('\n');
        if typed.is_empty() || !Link::may_go_on(&text) {
            break;
        }
    }
    Link::parse(&text).map_err(|error| serving::failure(&error))
}

fn write_identity(path: &Path, link: &Link) -> Result<(), Failure> {
    let text = link.secret().identity_line();
    // Allocated in full: a growing buffer leaves copies in memory.
    let mut line = Zeroizing::new(Vec::with_capacity(text.len() + 1));
    line.extend_from_slice(text.as_bytes());
    line.push(b'\n');
    let written = HostEntry::of(path).and_then(|entry| entry.write_new(&line));
    written.map_err(|error| Failure::host(format!("cannot write {}", shown(path)), &error))
}
