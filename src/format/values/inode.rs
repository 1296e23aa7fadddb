//! Inode value (section 7.1).

use crate::error::{Error, Result};
use crate::format::codec::{check_zero, exact_array, put, put_time, time_at, u32_at, u64_at};
use crate::format::ids::{Ino, MAX_INO, MAX_OFFSET, Timestamp};

/// `InodeValue::trim` of an inode without a trim offset.
pub const NO_TRIM: u64 = u64::MAX;

/// Inode flag bits.
pub mod inode_flags {
    pub const HAS_XATTRS: u32 = 1;
    pub const NO_PACK: u32 = 2;
    pub const NO_COMPRESS: u32 = 4;
}

const KNOWN_FLAGS: u32 = inode_flags::HAS_XATTRS | inode_flags::NO_PACK | inode_flags::NO_COMPRESS;
const BYTES: usize = 144;

/// Inode value (section 7.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InodeValue {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    pub size: u64,
    pub bytes: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
    pub rdev: u32,
    pub flags: u32,
    pub parent: Ino,
    pub next_sequence: u64,
    pub trim: u64,
    pub next_piece: u32,
}

impl InodeValue {
    pub fn encode(&self) -> [u8; 144] {
        let mut out = [0; BYTES];
        put(&mut out, 0, self.mode.to_le_bytes());
        put(&mut out, 4, self.uid.to_le_bytes());
        put(&mut out, 8, self.gid.to_le_bytes());
        put(&mut out, 12, self.links.to_le_bytes());
        put(&mut out, 16, self.size.to_le_bytes());
        put(&mut out, 24, self.bytes.to_le_bytes());
        put_time(&mut out, 32, self.atime);
        put_time(&mut out, 44, self.mtime);
        put_time(&mut out, 56, self.ctime);
        put_time(&mut out, 68, self.btime);
        put(&mut out, 80, self.rdev.to_le_bytes());
        put(&mut out, 84, self.flags.to_le_bytes());
        put(&mut out, 88, self.parent.0.to_le_bytes());
        put(&mut out, 96, self.next_sequence.to_le_bytes());
        put(&mut out, 104, self.trim.to_le_bytes());
        put(&mut out, 112, self.next_piece.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length, unknown flags, a size or parent out of bounds, or a time with
    /// a full second of nanoseconds.
    pub fn decode(value: &[u8]) -> Result<InodeValue> {
        let value: &[u8; BYTES] = exact_array(value, "inode")?;
        check_zero(&value[116..], "inode")?;
        let inode = InodeValue {
            mode: u32_at(value, 0),
            uid: u32_at(value, 4),
            gid: u32_at(value, 8),
            links: u32_at(value, 12),
            size: u64_at(value, 16),
            bytes: u64_at(value, 24),
            atime: time_at(value, 32, "inode")?,
            mtime: time_at(value, 44, "inode")?,
            ctime: time_at(value, 56, "inode")?,
            btime: time_at(value, 68, "inode")?,
            rdev: u32_at(value, 80),
            flags: u32_at(value, 84),
            parent: Ino(u64_at(value, 88)),
            next_sequence: u64_at(value, 96),
            trim: u64_at(value, 104),
            next_piece: u32_at(value, 112),
        };
        if inode.flags & !KNOWN_FLAGS != 0 {
            return Err(Error::damaged(format!("inode has unknown flags: {:#x}", inode.flags)));
        }
        if inode.size > MAX_OFFSET || inode.parent.0 > MAX_INO {
            return Err(Error::damaged(format!(
                "inode is out of bounds: size={} parent={}",
                inode.size, inode.parent.0
            )));
        }
        Ok(inode)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::strategies::{mutated, noise, time};

    fn changed(at: usize, bytes: &[u8]) -> Result<InodeValue> {
        let mut value = InodeValue { trim: NO_TRIM, ..InodeValue::default() }.encode();
        value[at..at + bytes.len()].copy_from_slice(bytes);
        InodeValue::decode(&value)
    }

    #[test]
    fn reserved_bytes_and_unknown_flags_of_an_inode_are_refused() {
        for (at, value) in [(84, 8), (87, 1), (116, 1), (143, 1)] {
            assert!(matches!(changed(at, &[value]), Err(Error::Damaged(_))), "at={at}");
        }
    }

    #[test]
    fn bounds_of_an_inode_are_checked() {
        assert!(changed(16, &MAX_OFFSET.to_le_bytes()).is_ok());
        assert!(changed(16, &(MAX_OFFSET + 1).to_le_bytes()).is_err());
        assert!(changed(88, &(MAX_INO + 1).to_le_bytes()).is_err());
        for at in [40, 52, 64, 76] {
            assert!(changed(at, &1_000_000_000u32.to_le_bytes()).is_err(), "at={at}");
        }
        assert!(InodeValue::decode(&[0; 143]).is_err() && InodeValue::decode(&[0; 145]).is_err());
    }

    proptest! {
        #[test]
        fn inodes_round_trip(words in any::<[u32; 6]>(), longs in any::<[u64; 4]>(), size in 0..=MAX_OFFSET,
                             times in (time(), time(), time(), time()), flags in 0..8u32, parent in 0..=MAX_INO) {
            let inode = InodeValue {
                mode: words[0], uid: words[1], gid: words[2], links: words[3], size, bytes: longs[0],
                atime: times.0, mtime: times.1, ctime: times.2, btime: times.3, rdev: words[4], flags,
                parent: Ino(parent), next_sequence: longs[1], trim: longs[2], next_piece: words[5],
            };
            prop_assert_eq!(InodeValue::decode(&inode.encode()).unwrap(), inode);
        }

        #[test]
        fn no_input_panics(bytes in noise(150), damaged in mutated(InodeValue::default().encode().to_vec())) {
            let _ = InodeValue::decode(&bytes);
            let _ = InodeValue::decode(&damaged);
        }
    }
}
