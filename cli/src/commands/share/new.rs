//! `lockbox share PATH`: encrypts a file, a directory or a text, uploads it to the daemon and
//! prints the link.
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use clap::{ArgMatches, Command, FromArgMatches};
use lockbox::archive::Archive;
use lockbox::exchange;
use lockbox_share_client::http::ShareClient;
use lockbox_share_client::link::Link;
use lockbox_share_client::protocol::link_scope::LinkScope;
use lockbox_share_client::protocol::message::MAX_CLAIMS;
use lockbox_share_client::shares::{self, CreatedShare, ShareTerms};
use lockbox_share_client::source::{FileSource, Source};
use lockbox_terminal::quantity::Span;
use qrcode::QrCode;
use qrcode::render::unicode::Dense1x2;
use serde_json::json;

use super::content::{self, SharedArchiveFile};
use super::now;
use super::serving::{self, ServerArgs};
use crate::exit::Failure;
use crate::interrupt::Interrupt;
use crate::open_archive::{ArchiveArgs, SnapshotViewArgs};
use crate::output::{Output, Reader, complain};
use crate::progress::Bar;

/// The file, and how it may be used
#[derive(clap::Args)]
#[group(id = "new")]
// The argument of other commands is an option here. Its group, which tells whether it was given,
// has no members of itself.
#[command(mut_arg("archive", |arg| {
    arg.long("archive").value_name("ARCHIVE").required(false).help("Read PATH from this archive, without a mount")
}))]
#[command(mut_arg("snapshot", |arg| arg.requires("archive").help("Read PATH from this snapshot of the archive")))]
#[command(mut_group("ArchiveArgs", |group| group.arg("archive")))]
pub(crate) struct Args {
    // Before what it is read from is taken away.
    #[command(flatten)]
    quiet: Quiet,
    /// The file or directory to share, '-' for standard input; with --archive, a path in the archive
    // Others are taken to be refused in words: left to the parser, they are unknown commands.
    #[arg(required_unless_present = "text")]
    path: Vec<OsString>,
    /// Share a text: typed at a prompt that does not show it, or read from standard input
    #[arg(long, conflicts_with_all = ["path", "archive"])]
    text: bool,
    /// Name at the receiver's; by default the name that it has here
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// How long the link works: a number and s, m, h or d; without it the server's default
    #[arg(long, value_name = "TIME", value_parser = lifetime)]
    expires: Option<Span>,
    /// How often the file can be downloaded, 1 to 8
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_CLAIMS)))]
    max_downloads: u8,
    /// Show the link as a QR code on standard error as well
    #[arg(long)]
    qr: bool,
    /// A name for the share in 'lockbox share ls'; it stays on this machine
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    archive: Option<ArchiveArgs>,
    #[command(flatten)]
    snapshot: SnapshotViewArgs,
}

/// Presence of `--quiet`, an option of the archive arguments that applies without an archive too.
struct Quiet(bool);

impl clap::Args for Quiet {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for Quiet {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Quiet, clap::Error> {
        Ok(Quiet(matches.get_flag("quiet")))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        Quiet::from_arg_matches(matches).map(|quiet| *self = quiet)
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if args.path.len() > 1 {
        return Err(Failure::usage("a link shares one item: share them one by one, or a directory with all of them"));
    }
    if let Some(name) = &args.name {
        content::check_name(name)?;
    }
    let server = args.server.find()?;
    if !server.is_private() {
        complain(&format!(
            "{server} is not asked over https: an attacker on the network can see and use the sent data; \
             its administrator gets a certificate with 'lockbox-share setup'"
        ));
    }
    let client = serving::client(&mut serving::book()?, server, args.server.is_named())?;
    let give = |source: &mut dyn Source| share(args, &client, source, &Interrupt::watch()?);
    let shared = match (args.path.first(), &args.archive) {
        (None, _) => give(&mut content::text(args.name.clone().unwrap_or_else(|| "text.txt".into()))?)?,
        (Some(path), Some(archive)) => {
            let (archive, interrupt) = archive.read_watched(&args.snapshot)?;
            from_archive(args, &archive, path, |source| share(args, &client, source, &interrupt))?
        }
        (Some(path), None) if path == "-" => {
            give(&mut content::standard_input(args.name.clone().unwrap_or_else(|| "stdin".into()))?)?
        }
        (Some(path), None) => {
            // Installed before the thread that packs a directory exists.
            let interrupt = Interrupt::watch()?;
            from_host(args, Path::new(path), |source| share(args, &client, source, &interrupt))?
        }
    };
    print(args, &shared)
}

fn from_host<T>(
    args: &Args,
    path: &Path,
    give: impl FnOnce(&mut dyn Source) -> Result<T, Failure>,
) -> Result<T, Failure> {
    if path.is_dir() {
        let name = args.name.clone().unwrap_or_else(|| content::directory_name(path));
        return content::with_directory(&name, |top, out| exchange::pack_tree(path, top, out), give);
    }
    give(&mut FileSource::open(path, args.name.as_deref()).map_err(|error| serving::failure(&error))?)
}

fn from_archive<T>(
    args: &Args,
    archive: &Archive,
    path: &OsStr,
    give: impl FnOnce(&mut dyn Source) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let name = args.name.clone().unwrap_or_else(|| content::last_name(path));
    let fs = archive.file_system();
    let found = exchange::resolve(fs, path.as_bytes());
    if found.is_ok_and(|found| found.is_directory()) {
        return content::with_directory(&name, |top, out| exchange::export_tree(fs, path.as_bytes(), top, out), give);
    }
    give(&mut SharedArchiveFile::open(archive, path.as_bytes(), name)?)
}

fn share(
    args: &Args,
    client: &ShareClient,
    source: &mut dyn Source,
    interrupt: &Interrupt,
) -> Result<CreatedShare, Failure> {
    // The token first: a share that was made and cannot be revoked would be worse than none.
    let owner = serving::owner(&mut serving::book()?, client.server())?;
    let bar = Bar::new(args.quiet.0);
    let size = source.size();
    let terms = ShareTerms { expires_in: args.expires, max_claims: args.max_downloads };
    // The upload of a small file is not reported.
    let whole = Arc::new(AtomicBool::new(true));
    let is_whole = whole.clone();
    let at_once = interrupt.ends_at_once(&bar, move || words(is_whole.load(Relaxed)).to_owned())?;
    let shared = shares::share(client, &owner, source, terms, &|done| {
        // Without a known size, any piece may have been the last one.
        whole.store(size.is_none_or(|size| done >= size), Relaxed);
        bar.bytes("shared", done, size);
    });
    drop((at_once, bar));
    let shared = shared.map_err(|error| serving::failure(&error))?;
    let created = &shared.created;
    let now = now();
    serving::book()?
        .add(
            client.server(),
            created.handle,
            args.label.as_deref(),
            now.min(created.expires_at),
            created.expires_at,
            shared.lifetime,
        )
        .map_err(|error| serving::failure(&error))?;
    Ok(shared)
}

/// Returns the state after an interruption; `whole`: the server may have all of the file.
fn words(whole: bool) -> &'static str {
    match whole {
        true => {
            "the server may have made a link that was not returned; it expires by itself, and the same command makes another"
        }
        false => "nothing was shared; the same command starts over",
    }
}

fn print(args: &Args, shared: &CreatedShare) -> Result<(), Failure> {
    let link = shared.link.to_text();
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "link": *link,
            "id": shared.created.handle,
            "label": args.label,
            "size": shared.meta.size,
            "sha256": lockbox_terminal::hex(shared.meta.sha256.as_bytes()),
            "expires_at": shared.created.expires_at,
            "lifetime": shared.lifetime.to_string(),
            "max_downloads": args.max_downloads,
        }))?;
    } else {
        out.line(&link)?;
    }
    out.finish()?;
    if args.qr {
        show_qr(&shared.link)?;
    }
    if let Some(told) = LinkScope::warning(shared.link.base()) {
        complain(&told);
    }
    if !args.json {
        let times = if args.max_downloads == 1 { "once".into() } else { format!("{} times", args.max_downloads) };
        let expiry = Reader::of(&io::stderr()).seconds(shared.created.expires_at);
        complain(&format!(
            "works {times}, for {}, until {expiry}; take it back with 'lockbox share revoke {}'",
            shared.lifetime.words(),
            shared.created.handle
        ));
    }
    Ok(())
}

fn show_qr(link: &Link) -> Result<(), Failure> {
    let code = QrCode::new(link.to_text().as_bytes())
        .map_err(|error| Failure::other(format!("cannot encode the link as a QR code: {error}")))?;
    let mut picture = code.render::<Dense1x2>();
    let mut out = io::stderr().lock();
    let shown = if lockbox_terminal::is_animated() {
        // Black squares on white, for terminals of any colours: not every telephone reads the
        // inverse.
        let picture = picture.dark_color(Dense1x2::Dark).light_color(Dense1x2::Light).build();
        picture.lines().try_for_each(|line| writeln!(out, "\x1b[38;5;16;48;5;231m{line}\x1b[0m"))
    } else {
        writeln!(out, "{}", picture.dark_color(Dense1x2::Light).light_color(Dense1x2::Dark).build())
    };
    shown.map_err(|error| Failure::host("cannot show the QR code", &error))
}

fn lifetime(text: &str) -> Result<Span, String> {
    let span = Span::parse(text).filter(|span| !span.time().is_zero());
    span.ok_or_else(|| "a number above 0 and s, m, h or d, such as 15m".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let all = ["90", "90s", "15m", "2h", "7d"].map(|text| lifetime(text).unwrap().time().as_secs());
        assert_eq!(all, [90, 90, 900, 7200, 604_800]);
        for text in ["", "0", "m", "1w", "-1m", "1.5h", "99999999999999999999d"] {
            assert!(lifetime(text).is_err(), "{text}");
        }
    }
}
