//! Verifies an open archive.

use super::Archive;
use crate::error::Result;
use crate::fs::{FileSystem, Reading, Structure};
use crate::txn::{Audit, Finding, FindingKind};

/// What `check` found.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Blocks in use by pages.
    pub blocks: u64,
    pub inodes: u64,
    pub directories: u64,
    pub bytes: u64,
    /// None in what is sound.
    pub findings: Vec<Finding>,
}

impl Archive {
    /// Verifies structure (quick) or every page, reference and count (full), reading each page of file data once. `progress` gets
    /// (done, total), first in blocks for the pages and the space, then in inodes for the tree of files.
    pub fn check(&self, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<CheckReport> {
        check(&self.fs, full, progress)
    }
}

/// [`Archive::check`] of any file system.
pub(super) fn check(fs: &FileSystem, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<CheckReport> {
    let Audit { mut findings, of_files, data } = fs.volume.audit(full, progress)?;
    let reading = if full { Reading::But(&data) } else { Reading::Nothing };
    let Structure { counts, findings: structure, lost_pages } = fs.walk_structure(reading, progress)?;
    let records_lost = structure.iter().any(|finding| finding.kind == FindingKind::RecordsLost);
    findings.extend(structure);
    // Told by block are only the losses of which no file is known.
    findings.extend(of_files.into_iter().filter(|finding| match finding.kind {
        FindingKind::DataLost => finding.block.is_none_or(|block| !lost_pages.contains(&block)),
        FindingKind::RecordsLost => !records_lost,
        FindingKind::More => true,
        _ => false,
    }));
    say_more_once(&mut findings);
    let record = fs.volume.durable();
    Ok(CheckReport {
        blocks: record.used_blocks,
        inodes: counts.inodes,
        directories: counts.directories,
        bytes: counts.bytes,
        findings,
    })
}

/// Each walk tells by itself that there is more; whoever reads the findings is told once, behind them.
fn say_more_once(findings: &mut Vec<Finding>) {
    let more = findings.iter().find(|finding| finding.kind == FindingKind::More).cloned();
    findings.retain(|finding| finding.kind != FindingKind::More);
    findings.extend(more);
}
