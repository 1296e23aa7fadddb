//! Verifies an open archive.

use std::collections::HashSet;

use super::Archive;
use crate::error::Result;
use crate::format::BLOCK;
use crate::fs::{DataReading, FileSystem, StructureReport};
use crate::txn::{Audit, Finding, FindingKind, LostPage, Severity};

/// Findings of one check, in order of discovery.
pub type Findings = Vec<Finding>;

/// Result of a check.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Blocks in use by pages.
    pub blocks: u64,
    pub inodes: u64,
    pub directories: u64,
    pub bytes: u64,
    /// Faults; empty for a sound archive.
    pub findings: Findings,
    /// Normal states after a crash, which are not faults.
    pub notes: Findings,
}

/// Progress of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckStep {
    /// Reading all pages, in bytes; only in a full check, before the tree.
    Pages { done: u64, total: u64 },
    /// Checking the tree of files, in inodes.
    Tree { done: u64, total: u64 },
}

impl Archive {
    /// Verifies the structure (quick), or every page, reference and count (full), reading each page
    /// of file data once.
    pub fn check(&self, full: bool, progress: &mut dyn FnMut(CheckStep)) -> Result<CheckReport> {
        let mut report = check(&self.fs, full, progress)?;
        let reported: HashSet<u64> = report.findings.iter().filter_map(|finding| finding.block).collect();
        let mut outside = self.check_outside()?;
        // Losses already reported with the affected file are not repeated.
        outside.extend(
            self.lost_of_commit().into_iter().filter(|page| page.block.is_none_or(|block| !reported.contains(&block))),
        );
        let (notes, findings): (Vec<_>, Vec<_>) =
            outside.into_iter().partition(|finding| finding.severity == Severity::Note);
        report.notes = notes;
        report.findings.splice(0..0, findings);
        Ok(report)
    }

    /// Returns the pages of the newest commit that do not open: a quick check reads no other page
    /// of file data.
    fn lost_of_commit(&self) -> Vec<Finding> {
        let volume = &self.fs.volume;
        let generation = volume.durable().generation.0;
        let find = |page: &LostPage| {
            let text = format!("a page that commit {generation} brought in is lost: {}", page.reason);
            Finding::new(FindingKind::Commit, Severity::Lost, text).at_block(page.run.address)
        };
        volume.lost_pages().iter().map(find).collect()
    }

    /// Checks everything outside of pages: the unused header copy, the end of the file, and lost
    /// log entries.
    fn check_outside(&self) -> Result<Vec<Finding>> {
        let header = self.header_flaw.as_ref().map(|(flaw, is_interrupted)| {
            let detail = format!(
                "{flaw}; without the other copy nothing would open, and the next writable opening writes it anew"
            );
            let severity = if *is_interrupted { Severity::Note } else { Severity::Minor };
            Finding::new(FindingKind::Header, severity, detail)
        });
        let length = partial_block(self.storage.len()?).map(|what| {
            let detail = format!("{what}, and the next writable opening cuts it off");
            Finding::new(FindingKind::Length, Severity::Note, detail)
        });
        let log = self.fs.volume.lost().map(|lost| {
            let detail = format!("what was durable is lost: {lost}");
            Finding::new(FindingKind::Log, Severity::Lost, detail)
        });
        Ok(header.into_iter().chain(length).chain(log).collect())
    }
}

/// Returns a message if a file of this length ends with a partial block. Complete blocks after the
/// archive are not a fault: after a crash the file may have grown for a commit that was not
/// completed.
pub(super) fn partial_block(length: u64) -> Option<String> {
    let part = length % BLOCK;
    (part > 0).then(|| format!("the file ends with a part of a block ({part} bytes) that belongs to nothing"))
}

/// [`Archive::check`] of any file system.
pub(super) fn check(fs: &FileSystem, full: bool, progress: &mut dyn FnMut(CheckStep)) -> Result<CheckReport> {
    let pages = &mut |done: u64, total: u64| {
        progress(CheckStep::Pages { done: done.saturating_mul(BLOCK), total: total.saturating_mul(BLOCK) });
    };
    let Audit { mut findings, of_files, data } = fs.volume.audit(full, pages)?;
    let reading = if full { DataReading::But(&data) } else { DataReading::Nothing };
    let StructureReport { counts, findings: structure, lost_pages } =
        fs.walk_structure(reading, &mut |done, total| progress(CheckStep::Tree { done, total }))?;
    let records_lost = structure.iter().any(|finding| finding.kind == FindingKind::RecordsLost);
    findings.extend(structure);
    // Lost blocks are reported on their own only if no affected file is known.
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
        notes: Vec::new(),
    })
}

/// Merges the notes of several walks that there are more findings into one at the end.
fn say_more_once(findings: &mut Vec<Finding>) {
    let more = findings.iter().find(|finding| finding.kind == FindingKind::More).cloned();
    findings.retain(|finding| finding.kind != FindingKind::More);
    findings.extend(more);
}
