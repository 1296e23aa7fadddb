//! Cost of a new passphrase's key derivation: calibrated, or as requested.
use lockbox::archive::{Archive, KdfCost};
use lockbox_host::Spinner;

use crate::exit::Failure;

/// Duration of a calibrated derivation.
const TARGET_MILLIS: u64 = 1000;

/// Cost of the key derivation
#[derive(clap::Args)]
pub(crate) struct KdfArgs {
    /// Memory of the key derivation in MiB; calibrated to about one second by default
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=4096))]
    kdf_memory: Option<u32>,
    /// Passes over that memory
    #[arg(long, visible_alias = "kdf-time", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    kdf_passes: Option<u32>,
    /// Lanes computed side by side
    #[arg(long, visible_alias = "kdf-parallelism", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    kdf_lanes: Option<u32>,
    /// Allow less than 64 MiB and 3 passes: whoever has a copy of the archive can then guess passphrases cheaply
    #[arg(long)]
    weak_kdf: bool,
}

impl KdfArgs {
    /// A person at a terminal `sees` that it takes a while.
    pub(crate) fn cost(&self, sees: bool) -> Result<KdfCost, Failure> {
        if self.kdf_memory.is_none() && self.kdf_passes.is_none() && self.kdf_lanes.is_none() {
            let _working = Spinner::deriving(sees);
            return Ok(Archive::calibrate(TARGET_MILLIS, memory_limit_kib()));
        }
        let floor = KdfCost::FLOOR;
        let cost = KdfCost {
            memory_kib: self.kdf_memory.map_or(floor.memory_kib, |mib| mib * 1024),
            passes: self.kdf_passes.unwrap_or(floor.passes),
            lanes: self.kdf_lanes.unwrap_or(floor.lanes),
        };
        let work = |cost: KdfCost| u64::from(cost.memory_kib) * u64::from(cost.passes);
        if (cost.memory_kib < floor.memory_kib || work(cost) < work(floor)) && !self.weak_kdf {
            return Err(Failure::usage(
                "the key derivation is weaker than 64 MiB and 3 passes; --weak-kdf allows it for tests",
            ));
        }
        Ok(cost)
    }
}

/// Returns half of the machine's memory, at most 1 GiB: the archive is to open on other machines
/// too.
fn memory_limit_kib() -> u32 {
    const MOST: u32 = 1 << 20;
    let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    lockbox_host::proc::kib(&table, "MemTotal").map_or(MOST, |kib| u32::try_from(kib / 2).unwrap_or(MOST).min(MOST))
}
