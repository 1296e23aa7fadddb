//! Entry points for fuzzers: each accepts any bytes, and panics if an invariant is violated.
//! Compiled for fuzzing and tests only.

mod decoders;
mod forge;
mod operations;
mod seeds;
mod whole;

pub use seeds::seeds;
#[cfg(test)]
pub(in crate::archive) use {forge::*, whole::exercise};

/// Fuzz target: a panic for an input is a finding.
pub type FuzzTarget = fn(&[u8]);

/// All targets of the library by name.
pub const TARGETS: [(&str, FuzzTarget); 20] = [
    ("header", decoders::header),
    ("framing", decoders::framing),
    ("slot", decoders::slot),
    ("identity", decoders::identity),
    ("record", decoders::record),
    ("delta", decoders::delta),
    ("entry", decoders::entry),
    ("prologue", decoders::prologue),
    ("head", decoders::head),
    ("node", decoders::node),
    ("directory", decoders::directory),
    ("values", decoders::values),
    ("xattr", decoders::xattr),
    ("space", decoders::space),
    ("acl", decoders::acl),
    ("seen", decoders::seen),
    ("known", decoders::known),
    ("page", decoders::page),
    ("whole", whole::whole),
    ("operations", operations::operations),
];

/// Returns the target of this name.
pub fn target(name: &str) -> Option<FuzzTarget> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, entry)| *entry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SeededEnvironment;

    /// What the fuzzers begin with, and simple changes of it.
    #[test]
    fn every_target_takes_its_seeds_and_what_becomes_of_them() {
        let rounds = 200;
        for (name, entry) in TARGETS {
            let seeds = seeds(name);
            assert!(!seeds.is_empty(), "{name} has no seeds");
            let random = SeededEnvironment::new(7);
            for seed in &seeds {
                entry(seed);
            }
            let slow = matches!(name, "whole" | "operations" | "header");
            for _ in 0..if slow { rounds / 10 } else { rounds } {
                let mut input = seeds[random.next_u64() as usize % seeds.len()].clone();
                for _ in 0..random.next_u64() % 4 + 1 {
                    if !input.is_empty() {
                        let at = random.next_u64() as usize % input.len();
                        input[at] = random.next_u64() as u8;
                    }
                }
                if random.next_u64().is_multiple_of(4) {
                    input.truncate(random.next_u64() as usize % (input.len() + 1));
                }
                entry(&input);
            }
        }
    }
}
