//! Verifies an open archive.

use std::collections::HashSet;

use super::Archive;
use crate::error::Result;
use crate::format::BLOCK;
use crate::fs::{DataReading, FileSystem, StructureReport};
use crate::txn::{Audit, Finding, FindingKind, LostPage, Severity};

/// Findings of one check, in the order in which they were made.
pub type Findings = Vec<Finding>;

/// What `check` found.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Blocks in use by pages.
    pub blocks: u64,
    pub inodes: u64,
    pub directories: u64,
    pub bytes: u64,
    /// None in what is sound.
    pub findings: Findings,
    /// States that a crash leaves by design, which make nothing unsound.
    pub notes: Findings,
}

/// How far a check is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckStep {
    /// The pages, in bytes; of a full check alone, before the tree.
    Pages { done: u64, total: u64 },
    /// The tree of files, in inodes.
    Tree { done: u64, total: u64 },
}

impl Archive {
    /// Verifies structure (quick) or every page, reference and count (full), reading each page of file data once.
    pub fn check(&self, full: bool, progress: &mut dyn FnMut(CheckStep)) -> Result<CheckReport> {
        let mut report = check(&self.fs, full, progress)?;
        let told: HashSet<u64> = report.findings.iter().filter_map(|finding| finding.block).collect();
        let mut outside = self.check_outside()?;
        // What is told with the file that it costs is told once.
        outside.extend(
            self.lost_of_commit().into_iter().filter(|page| page.block.is_none_or(|block| !told.contains(&block))),
        );
        let (notes, findings): (Vec<_>, Vec<_>) =
            outside.into_iter().partition(|finding| finding.severity == Severity::Note);
        report.notes = notes;
        report.findings.splice(0..0, findings);
        Ok(report)
    }

    /// Pages of the newest commit that do not open: a quick check reads no other page of file data.
    fn lost_of_commit(&self) -> Vec<Finding> {
        let volume = &self.fs.volume;
        let generation = volume.durable().generation.0;
        let find = |page: &LostPage| {
            let text = format!("a page that commit {generation} brought in is lost: {}", page.reason);
            Finding::new(FindingKind::Commit, Severity::Lost, text).at_block(page.run.address)
        };
        volume.lost_pages().iter().map(find).collect()
    }

    /// What no page tells: the header copy that is not used, the end of the file, and what of the log is lost.
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

/// A part of a block at the end of a file of this length, as a sentence. Whole blocks behind the archive are no fault: after a crash the file may
/// have grown for a commit that never came.
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
        notes: Vec::new(),
    })
}

/// Each walk tells by itself that there is more; whoever reads the findings is told once, behind them.
fn say_more_once(findings: &mut Vec<Finding>) {
    let more = findings.iter().find(|finding| finding.kind == FindingKind::More).cloned();
    findings.retain(|finding| finding.kind != FindingKind::More);
    findings.extend(more);
}
