//! Space accounting of a copy-on-write host (btrfs, ZFS): overwriting needs new space until the
//! next barrier (HOST-6).

use super::{State, eio};
use crate::error::{Error, Result};
use crate::storage::BALLAST;
use crate::storage::sparse_image::HOST_BLOCK;

/// Space of a copy-on-write host in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CowSpace {
    free: u64,
    /// Bytes replaced or freed since the last barrier.
    pinned: u64,
    ballast: u64,
    keeps: bool,
}

impl CowSpace {
    fn take(&mut self, bytes: u64) -> Result<()> {
        self.free = self.free.checked_sub(bytes).ok_or_else(|| {
            Error::NoSpace(format!("simulated host without room to overwrite: free={} needed={bytes}", self.free))
        })?;
        Ok(())
    }

    fn fill_ballast(&mut self) -> Result<()> {
        self.take(BALLAST - self.ballast)?;
        self.ballast = BALLAST;
        Ok(())
    }
}

impl State {
    /// Sets the free bytes, or turns copy-on-write off.
    pub(super) fn set_room(&mut self, free: Option<u64>) {
        self.room = free.map(|free| CowSpace { free, ..self.room.unwrap_or_default() });
    }

    /// Takes the space for a write before any of it is applied.
    pub(super) fn take_for_write(&mut self, offset: u64, length: u64) -> Result<()> {
        let Some(room) = &mut self.room else { return Ok(()) };
        let blocks = (offset + length).div_ceil(HOST_BLOCK) - offset / HOST_BLOCK;
        room.take(blocks * HOST_BLOCK)?;
        let holes = self.cache.holes(offset, length)?;
        room.pinned += blocks.checked_sub(holes).ok_or_else(|| eio("count of blocks"))? * HOST_BLOCK;
        Ok(())
    }

    pub(super) fn take_for_allocation(&mut self, offset: u64, length: u64) -> Result<()> {
        let grows = offset + length > self.cache.len();
        let holes = self.cache.holes(offset, length)?;
        let Some(room) = &mut self.room else { return Ok(()) };
        let before = *room;
        let taken = if room.keeps && grows { room.fill_ballast() } else { Ok(()) };
        taken.and_then(|()| room.take(holes * HOST_BLOCK)).inspect_err(|_| *room = before)
    }

    pub(super) fn give_back(&mut self, allocated_before: u64) {
        let after = self.cache.allocated();
        if let Some(room) = &mut self.room {
            room.pinned += allocated_before.saturating_sub(after);
        }
    }

    pub(super) fn unpin(&mut self) {
        if let Some(room) = &mut self.room {
            room.free += std::mem::take(&mut room.pinned);
        }
    }

    pub(super) fn keep_ballast(&mut self) {
        if let Some(room) = &mut self.room {
            room.keeps = true;
            // Without space there is no ballast.
            let _ = room.fill_ballast();
        }
    }

    pub(super) fn cut_ballast(&mut self) -> bool {
        let Some(room) = &mut self.room else { return false };
        let cut = std::mem::take(&mut room.ballast);
        room.free += cut;
        cut > 0
    }
}
