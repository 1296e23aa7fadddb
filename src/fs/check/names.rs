//! Checks that need all names: links, parents, reachability; and the paths of findings.

use std::collections::{HashMap, HashSet};

use super::{InodeSummary, StructureWalk};
use crate::error::Result;
use crate::format::values::decode_list;
use crate::format::{Ino, Key, ROOT_INO, kind};
use crate::fs::directory::DIRECTORY_TYPE;
use crate::txn::{Finding, FindingKind, Severity};

impl StructureWalk<'_> {
    /// Gives each finding about an inode its path, as far as directories lead to it.
    pub(super) fn set_finding_paths(&mut self) -> Result<()> {
        let mut wanted: HashSet<Ino> = self.findings.iter().filter_map(|finding| finding.inode).collect();
        let mut way: Vec<Ino> = wanted.iter().copied().collect();
        while let Some(ino) = way.pop() {
            let above = self.known.get(&ino).map_or(Ino(0), |known| known.named_in);
            if above.0 > 0 && wanted.insert(above) {
                way.push(above);
            }
        }
        let mut names: HashMap<Ino, (Ino, Vec<u8>)> = HashMap::new();
        let mut name = |key: Key, value: &[u8]| -> Result<()> {
            if key.kind == kind::DIR_LIST
                && key.object > 0
                && let Ok(entry) = decode_list(value)
                && wanted.contains(&entry.ino)
            {
                names.entry(entry.ino).or_insert_with(|| (Ino(key.object), entry.name.to_vec()));
            }
            Ok(())
        };
        self.view.scan_surviving(&mut name, &mut |_| Ok(()))?;
        for finding in &mut self.findings {
            let Some(ino) = finding.inode else { continue };
            let (mut at, mut path) = (ino, Vec::new());
            // A path has at most as many components as there are names: a cycle ends.
            for _ in 0..=names.len() {
                let Some((above, name)) = names.get(&at) else { break };
                path = [b"/", &name[..], &path].concat();
                at = *above;
            }
            finding.path = match at {
                // The root has no entry.
                _ if ino == ROOT_INO => Some(b"/".to_vec()),
                _ if path.is_empty() => None,
                ROOT_INO => Some(path),
                _ => Some([b"...", &path[..]].concat()),
            };
        }
        Ok(())
    }

    /// Checks types, links and parents, after all names were counted.
    pub(super) fn check_names(&mut self) {
        let known = std::mem::take(&mut self.known);
        let orphans = std::mem::take(&mut self.orphans);
        for ino in &orphans {
            match known.get(ino) {
                Some(known) if known.exists && known.links == 0 && known.names == 0 => {}
                Some(known) if known.exists => self.report_inode(FindingKind::Name, *ino, "is an orphan with names"),
                _ => self.report_inode(FindingKind::Name, *ino, "is an orphan, but missing"),
            }
        }
        for ino in std::mem::take(&mut self.trims) {
            if !known.get(&ino).is_some_and(|known| known.exists) {
                self.report_inode(FindingKind::Inode, ino, "is marked to be cut, but missing");
            }
        }
        for (&ino, known) in &known {
            for finding in check_summary(ino, known, orphans.contains(&ino)) {
                self.report_inode(FindingKind::Name, ino, finding);
            }
        }
        if !known.get(&ROOT_INO).is_some_and(|root| root.exists && root.file_type == DIRECTORY_TYPE) {
            self.report(Finding::new(FindingKind::Name, Severity::Wrong, "there is no root directory"));
        }
        // Hash maps have no stable order. The finding about further findings stays last.
        self.findings.sort_by(|one, other| {
            let last = |finding: &Finding| finding.kind == FindingKind::More;
            let key = |finding: &Finding| (last(finding), finding.inode, finding.kind, finding.lost.clone());
            key(one).cmp(&key(other)).then_with(|| one.detail.cmp(&other.detail))
        });
        self.known = known;
    }

    /// Reports directories in a cycle: they have right links and parents, but no path from the
    /// root.
    pub(super) fn check_reachability(&mut self) {
        let mut reached: HashSet<Ino> = HashSet::from([ROOT_INO]);
        let mut circles = Vec::new();
        let directories = self.known.iter().filter(|(_, known)| known.exists && known.file_type == DIRECTORY_TYPE);
        for (&ino, _) in directories.filter(|(_, known)| known.names > 0) {
            let mut way = Vec::new();
            let mut seen = HashSet::new();
            let mut at = ino;
            while !reached.contains(&at) && seen.insert(at) {
                way.push(at);
                at = self.known.get(&at).map_or(ROOT_INO, |known| known.named_in);
            }
            if !reached.contains(&at) {
                circles.push(at);
            }
            reached.extend(way);
        }
        for ino in circles {
            self.report_inode(FindingKind::Name, ino, "is in a circle of directories");
        }
    }
}

fn check_summary(ino: Ino, known: &InodeSummary, orphan: bool) -> Vec<&'static str> {
    let is_directory = known.file_type == DIRECTORY_TYPE;
    let wrong = if !known.exists {
        vec![(true, "is named, but missing")]
    } else if orphan {
        Vec::new()
    } else if is_directory {
        let parent = if ino == ROOT_INO { ROOT_INO } else { known.named_in };
        vec![
            (known.names != u32::from(ino != ROOT_INO), "is a directory without or with several names"),
            (known.links != known.subdirectories.saturating_add(2), "its links are not 2 and its subdirectories"),
            (known.parent != parent, "its parent is not the directory that names it"),
        ]
    } else {
        vec![
            (known.names == 0, "has no name and is no orphan"),
            (known.links != known.names, "its links are not the number of its names"),
            (known.parent != Ino(0), "has a parent, but is not a directory"),
        ]
    };
    let mut findings: Vec<&'static str> = wrong.into_iter().filter(|(is_wrong, _)| *is_wrong).map(|(_, f)| f).collect();
    if known.exists && known.named_type.is_some_and(|named| named != known.file_type) {
        findings.push("its type is not the one that its name says");
    }
    findings
}
