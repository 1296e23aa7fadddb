//! `lockbox diff`: reports the differences between two trees, each of an archive or of the host.
use std::ffi::{OsStr, OsString};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::exchange::{DiffRoot, MetadataDifference, TreeDifference, compare_trees, components};
use lockbox::fs::mode;
use lockbox::keys;
use lockbox_host::remote;
use lockbox_terminal::display;
use serde_json::json;

use crate::commands::ls::{type_name, type_words};
use crate::exit::{self, DIFFERENT, Failure};
use crate::open_archive::OpeningArgs;
use crate::output::{self, Output, put_name};
use crate::paths::{Named, is_same};

/// Compare two trees, each of an archive or of the host
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    opening: OpeningArgs,
    /// An archive, a path in one as ARCHIVE:PATH, or a directory or file of the host
    #[arg(value_name = "A")]
    first: OsString,
    /// The same, to compare it with
    #[arg(value_name = "B")]
    second: OsString,
    /// Compare permissions, owners, times of modification, and extended attributes too
    #[arg(long)]
    metadata: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

struct Side {
    file: PathBuf,
    /// In the archive that the file is; None for one of the host.
    path: Option<Vec<u8>>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (first, second) = (Side::of(&args.first)?, Side::of(&args.second)?);
    if first.path.is_none() && second.path.is_none() {
        return Err(Failure::usage("neither path is in an archive: compare them with diff(1)"));
    }
    // The secrets of one archive are requested once.
    let both = first.path.is_some() && second.path.is_some();
    let shared = both && is_same(&first.file, &second.file);
    if both && !shared && args.opening.sources.passphrase.passfd.is_some() {
        return Err(Failure::usage("--passfd has one passphrase, and two archives are compared: use --passfile"));
    }
    let one = first.open(args)?;
    let other = if shared { None } else { second.open(args)? };
    let (one, other) = (one.as_ref(), other.as_ref().or(one.as_ref()));
    let mut out = Output::new();
    let (mut written, mut any) = (Ok(()), false);
    let problems = compare_trees(first.top(one), second.top(other), args.metadata, &mut |path, unlike| {
        any = true;
        written = match args.json {
            true => json_of(path, unlike, &mut out),
            false => out.line(&sentence(&first, &second, path, unlike)),
        };
        if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    written?;
    out.finish()?;
    let archive = if first.path.is_some() { &first.file } else { &second.file };
    let problems = problems.map_err(|error| exit::source_failure(archive, error))?;
    output::complain_of(&problems);
    match exit::gravest(&problems, exit::source_code) {
        Some(code) => Err(Failure::new(code, "not everything could be compared; see above")),
        None if any => Err(Failure::new(DIFFERENT, "")),
        None => Ok(()),
    }
}

impl Side {
    fn of(argument: &OsStr) -> Result<Side, Failure> {
        Ok(match Named::of(argument)? {
            Named::Within { archive, path } => Side { file: archive, path: Some(path) },
            Named::Whole(file) => Side { path: is_archive(&file).then(Vec::new), file },
        })
    }

    fn open(&self, args: &Args) -> Result<Option<Archive>, Failure> {
        self.path.as_ref().map(|_| args.opening.of(self.file.clone()).read()).transpose()
    }

    fn top<'a>(&'a self, archive: Option<&'a Archive>) -> DiffRoot<'a> {
        match (archive, &self.path) {
            (Some(archive), Some(path)) => DiffRoot::Archive(archive.file_system(), path),
            _ => DiffRoot::Host(&self.file),
        }
    }

    /// Returns the user's name for the object at a path below this one.
    fn label(&self, path: &[u8]) -> String {
        let mut label = self.file.as_os_str().as_bytes().to_vec();
        if let Some(top) = &self.path {
            label.extend_from_slice(b":/");
            label.extend_from_slice(&components(top).unwrap_or_default().join(&b"/"[..]));
        }
        if !path.is_empty() {
            if !label.ends_with(b"/") {
                label.push(b'/');
            }
            label.extend_from_slice(path);
        }
        display(&label)
    }
}

/// Any file that is not an archive is compared as a file.
fn is_archive(path: &Path) -> bool {
    remote::is_remote(path) || (path.is_file() && !matches!(keys::identify(path), Err(Error::NotArchive(_))))
}

/// Returns a difference in the words of diff(1).
fn sentence(first: &Side, second: &Side, path: &[u8], unlike: TreeDifference) -> String {
    let only = |side: &Side| {
        let slash = path.iter().rposition(|&byte| byte == b'/');
        let (above, name) = slash.map_or((&b""[..], path), |at| (&path[..at], &path[at + 1..]));
        format!("Only in {}: {}", side.label(above), display(name))
    };
    let (one, other) = (first.label(path), second.label(path));
    match unlike {
        TreeDifference::First => only(first),
        TreeDifference::Second => only(second),
        TreeDifference::Types(a, b) => {
            format!("File {one} is a {} while file {other} is a {}", type_words(a), type_words(b))
        }
        TreeDifference::Content(bits) => {
            let kind = match bits & mode::TYPE {
                mode::REGULAR => "Files",
                mode::SYMLINK => "Symbolic links",
                _ => "Devices",
            };
            format!("{kind} {one} and {other} differ")
        }
        TreeDifference::Metadata(differs) => format!("{one} and {other} differ in {}", named(differs).join(", ")),
    }
}

fn named(differs: MetadataDifference) -> Vec<&'static str> {
    let MetadataDifference { mode, owner, modified, attributes } = differs;
    let all = [(mode, "mode"), (owner, "owner"), (modified, "mtime"), (attributes, "attributes")];
    all.into_iter().filter(|(differs, _)| *differs).map(|(_, name)| name).collect()
}

fn json_of(path: &[u8], unlike: TreeDifference, out: &mut Output) -> Result<(), Failure> {
    let mut object = match unlike {
        TreeDifference::First => json!({ "differs": "only-first" }),
        TreeDifference::Second => json!({ "differs": "only-second" }),
        TreeDifference::Types(a, b) => json!({ "differs": "type", "first": type_name(a), "second": type_name(b) }),
        TreeDifference::Content(bits) => json!({ "differs": "content", "type": type_name(bits) }),
        TreeDifference::Metadata(differs) => json!({ "differs": "metadata", "what": named(differs) }),
    };
    put_name(&mut object, "path", if path.is_empty() { b"/" } else { path });
    out.json(&object)
}
