//! Replies shared by several requests.

use std::ops::ControlFlow;

use fuser::{ReplyEmpty, ReplyWrite, ReplyXattr};
use lockbox::{Error, Result};

use crate::errno::errno;

pub(crate) fn reply_empty(result: Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Maximum of one copy_file_range, in whole blocks: the reply counts in 32 bits.
pub(crate) const MAX_COPY: u32 = 1 << 31;

pub(crate) fn reply_copied(result: Result<u64>, reply: ReplyWrite) {
    match result {
        Ok(copied) => reply.written(u32::try_from(copied).unwrap_or(MAX_COPY)),
        Err(error) => reply.error(errno(&error)),
    }
}

pub(crate) fn reply_xattr(result: Result<Vec<u8>>, size: u32, reply: ReplyXattr) {
    match result {
        // A value is 64 KiB at most; a list of names longer than the kernel's 64 KiB fails below.
        Ok(value) if size == 0 => reply.size(u32::try_from(value.len()).unwrap_or(u32::MAX)),
        Ok(value) if value.len() > size as usize => reply.error(errno(&Error::RangeTooSmall)),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Stops a listing once the reply is full.
pub(crate) fn stop_if_full(is_full: bool) -> ControlFlow<()> {
    if is_full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}
