//! Checks whether memory can reach a disk unencrypted through swap space.
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lockbox_host::shown;

use super::Finding;

const NAME: &str = "swap";
/// Devices lie on devices on devices, but not deeper.
const DEEPEST: u32 = 16;

pub(super) fn finding() -> Finding {
    let advice =
        "encrypt swap (crypttab with a random key) or use zram: what programs read from archives may be written there";
    let Ok(table) = fs::read_to_string("/proc/swaps") else {
        return Finding::advice(NAME, "cannot be told: /proc/swaps is not readable", advice);
    };
    let spaces = spaces(&table);
    if spaces.is_empty() {
        return Finding::good(NAME, "none");
    }
    let plain: Vec<_> = spaces.iter().filter(|path| !is_encrypted(path)).map(|path| shown(path)).collect();
    if plain.is_empty() {
        return Finding::good(NAME, "encrypted or in memory");
    }
    Finding::advice(NAME, format!("not encrypted, as far as can be told: {}", plain.join(", ")), advice)
}

/// Parses `/proc/swaps`, skipping the header line.
fn spaces(table: &str) -> Vec<PathBuf> {
    table.lines().skip(1).filter_map(|line| line.split_whitespace().next()).map(PathBuf::from).collect()
}

/// The device, or the one under the file, or any device below that.
fn is_encrypted(space: &Path) -> bool {
    if space.file_name().is_some_and(|name| name.to_string_lossy().starts_with("zram")) {
        return true;
    }
    let Ok(metadata) = fs::metadata(space) else { return false };
    let is_device = std::os::unix::fs::FileTypeExt::is_block_device(&metadata.file_type());
    let number = if is_device { metadata.rdev() } else { metadata.dev() };
    let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
    crypt_below(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")), 0)
}

/// Returns whether dm-crypt is the device of this directory in /sys, or all devices below it.
fn crypt_below(device: &Path, depth: u32) -> bool {
    let uuid = fs::read_to_string(device.join("dm/uuid")).unwrap_or_default();
    if uuid.starts_with("CRYPT-") {
        return true;
    }
    let slaves: Vec<PathBuf> = match fs::read_dir(device.join("slaves")) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => return false,
    };
    depth < DEEPEST && !slaves.is_empty() && slaves.iter().all(|slave| crypt_below(slave, depth + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let table = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/dm-1                               partition\t8388604\t0\t-2\n\
                     /swap                                   file\t1024\t0\t-3\n";
        assert_eq!(spaces(table), [Path::new("/dev/dm-1"), Path::new("/swap")]);
        assert!(spaces("Filename Type\n").is_empty());
    }

    #[test]
    fn a_volume_on_encrypted_devices_alone_is_encrypted() {
        let place = std::env::temp_dir().join(format!("lockbox-doctor-{}", std::process::id()));
        let make = |name: &str, uuid: Option<&str>, slaves: &[&str]| {
            fs::create_dir_all(place.join(name).join("slaves")).unwrap();
            if let Some(uuid) = uuid {
                fs::create_dir_all(place.join(name).join("dm")).unwrap();
                fs::write(place.join(name).join("dm/uuid"), uuid).unwrap();
            }
            for slave in slaves {
                std::os::unix::fs::symlink(place.join(slave), place.join(name).join("slaves").join(slave)).unwrap();
            }
        };
        make("crypt", Some("CRYPT-LUKS2-0123-cryptswap\n"), &["disk"]);
        make("disk", None, &[]);
        make("on-crypt", Some("LVM-0123"), &["crypt"]);
        make("on-both", Some("LVM-4567"), &["crypt", "disk"]);
        let encrypted = |name: &str| crypt_below(&place.join(name), 0);
        let found = ["crypt", "disk", "on-crypt", "on-both", "missing"].map(encrypted);
        fs::remove_dir_all(&place).unwrap();
        assert_eq!(found, [true, false, true, false, false]);
    }
}
