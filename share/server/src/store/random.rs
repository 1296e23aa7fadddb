//! Random bytes and handles from the system's randomness.

use lockbox_share_protocol::handle::Handle;

use super::error::{Result, StoreError};

pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut out = [0; N];
    getrandom::fill(&mut out).map_err(|error| StoreError::Unavailable(format!("no randomness: {error}")))?;
    Ok(out)
}

/// A handle with random digits, without bias.
///
/// # Errors
/// `Invalid` when a part is out of range, `Unavailable` without randomness.
pub fn random_handle(routing: u8, digits: u32) -> Result<Handle> {
    let limit = 10u64.pow(digits.min(12));
    let bound = u64::MAX - u64::MAX % limit;
    loop {
        let number = u64::from_le_bytes(random()?);
        if number < bound {
            return Handle::new(routing, digits, number % limit)
                .ok_or(StoreError::Invalid("a handle has a routing digit and 6 to 12 random digits"));
        }
    }
}
