//! Page prologue and pointer (specification 5.1 and 5.2).

use super::data_head::head_length;
use super::ids::{
    BLOCK, Generation, MAX_DATA, MAX_INO, MAX_LEVEL, MAX_OFFSET, MAX_PAGE_BLOCKS, NODE_BLOCKS, NODE_CAPACITY,
    PAGE_OVERHEAD, Pointer, Run, TreeId,
};
use super::{array_at, check_zero, put, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};

/// Length of the prologue's plaintext in bytes.
pub const PROLOGUE: usize = 48;
/// Length of an encoded pointer in bytes.
pub const POINTER: usize = 32;

/// Kind of a page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageKind {
    Node = 1,
    Data = 2,
    Packed = 3,
    DeltaList = 4,
}

impl PageKind {
    fn from_byte(byte: u8) -> Result<PageKind> {
        match byte {
            1 => Ok(PageKind::Node),
            2 => Ok(PageKind::Data),
            3 => Ok(PageKind::Packed),
            4 => Ok(PageKind::DeltaList),
            _ => Err(Error::damaged(format!("prologue has an unknown kind: {byte}"))),
        }
    }
}

/// Sealed description at the start of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prologue {
    pub kind: PageKind,
    /// Set when the whole body is one zstd frame (nodes only).
    pub compressed: bool,
    pub blocks: u16,
    /// Bytes of the body before its padding; for a data page the bytes of all cells.
    pub stored_length: u32,
    pub plain_length: u32,
    pub generation: Generation,
    /// Tree number of a node, inode of a data page, otherwise 0.
    pub owner: u64,
    /// Level of a node, file offset of a data page, otherwise 0.
    pub position: u64,
}

impl Prologue {
    pub fn encode(&self) -> [u8; PROLOGUE] {
        let mut out = [0; PROLOGUE];
        out[0] = self.kind as u8;
        out[1] = u8::from(self.compressed);
        put(&mut out, 2, self.blocks.to_le_bytes());
        put(&mut out, 4, self.stored_length.to_le_bytes());
        put(&mut out, 8, self.plain_length.to_le_bytes());
        put(&mut out, 16, self.generation.0.to_le_bytes());
        put(&mut out, 24, self.owner.to_le_bytes());
        put(&mut out, 32, self.position.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for an unknown kind, lengths beyond the page, or compression of a kind that has
    /// none.
    pub fn decode(bytes: &[u8; PROLOGUE]) -> Result<Prologue> {
        check_zero(&bytes[12..16], "prologue")?;
        check_zero(&bytes[40..48], "prologue")?;
        if bytes[1] > 1 {
            return Err(Error::damaged(format!("prologue has an unknown compression: {}", bytes[1])));
        }
        let prologue = Prologue {
            kind: PageKind::from_byte(bytes[0])?,
            compressed: bytes[1] == 1,
            blocks: u16_at(bytes, 2),
            stored_length: u32_at(bytes, 4),
            plain_length: u32_at(bytes, 8),
            generation: Generation(u64_at(bytes, 16)),
            owner: u64_at(bytes, 24),
            position: u64_at(bytes, 32),
        };
        prologue.check()?;
        Ok(prologue)
    }

    /// Returns whether the page holds file data: a sealed head and separately sealed cells, instead
    /// of one sealed body.
    pub fn has_cells(&self) -> bool {
        matches!(self.kind, PageKind::Data | PageKind::Packed)
    }

    /// Returns the length of the message that the pointer's tag authenticates: the head of a data
    /// page, otherwise the body with its padding.
    pub fn main_length(&self) -> usize {
        let room = usize::from(self.blocks) * BLOCK as usize - PAGE_OVERHEAD;
        if self.has_cells() { room - self.stored_length as usize } else { room }
    }

    /// Checks the relations between fields required by section 5.1.
    fn check(&self) -> Result<()> {
        let blocks_fit = match self.kind {
            PageKind::Node if self.compressed => 1..NODE_BLOCKS,
            PageKind::Node => NODE_BLOCKS..NODE_BLOCKS + 1,
            _ => 1..MAX_PAGE_BLOCKS + 1,
        };
        if !blocks_fit.contains(&u64::from(self.blocks)) {
            return Err(Error::damaged(format!("prologue has a wrong number of blocks: {}", self.blocks)));
        }
        let room = usize::from(self.blocks) * BLOCK as usize - PAGE_OVERHEAD;
        let (stored, plain) = (self.stored_length as usize, self.plain_length as usize);
        let lengths_fit = stored <= room
            && match self.kind {
                PageKind::Node if self.compressed => stored > 0 && plain <= NODE_CAPACITY,
                PageKind::Node | PageKind::DeltaList => stored == plain,
                PageKind::Data | PageKind::Packed => {
                    (1..=MAX_DATA).contains(&plain) && stored > 0 && room - stored >= head_length(1, 0)
                }
            };
        if !lengths_fit {
            return Err(Error::damaged(format!(
                "prologue has lengths that do not fit: blocks={} stored={stored} plain={plain}",
                self.blocks
            )));
        }
        if self.compressed && self.kind != PageKind::Node {
            return Err(Error::damaged("prologue compresses a body that is not a node"));
        }
        let place_fits = match self.kind {
            PageKind::Node => {
                (1..=TreeId::ALL.len() as u64).contains(&self.owner) && self.position <= u64::from(MAX_LEVEL)
            }
            PageKind::Data => {
                (1..=MAX_INO).contains(&self.owner)
                    && self.position.checked_add(plain as u64).is_some_and(|end| end <= MAX_OFFSET)
            }
            PageKind::Packed | PageKind::DeltaList => self.owner == 0 && self.position == 0,
        };
        if !place_fits {
            return Err(Error::damaged(format!(
                "prologue names a wrong owner: owner={} position={}",
                self.owner, self.position
            )));
        }
        Ok(())
    }
}

impl Pointer {
    pub fn encode(&self) -> [u8; POINTER] {
        let mut out = [0; POINTER];
        put(&mut out, 0, self.run.pack().to_le_bytes());
        put(&mut out, 8, self.generation.0.to_le_bytes());
        put(&mut out, 16, self.tag);
        out
    }

    /// # Errors
    /// `Damaged` for a page of more than 64 blocks, or a null pointer that is not all zero.
    #[inline]
    pub fn decode(bytes: &[u8; POINTER]) -> Result<Pointer> {
        let run = Run::unpack(u64_at(bytes, 0));
        if run.blocks == 0 {
            check_zero(bytes, "null pointer")?;
            return Ok(Pointer::NULL);
        }
        if run.blocks > MAX_PAGE_BLOCKS {
            return Err(Error::damaged(format!("pointer to a page that is too long: blocks={}", run.blocks)));
        }
        Ok(Pointer { run, generation: Generation(u64_at(bytes, 8)), tag: array_at(bytes, 16) })
    }
}

#[cfg(test)]
mod tests;
