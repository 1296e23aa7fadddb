//! Space that statfs reports as available can be written, and be requested with fallocate.

use super::support::{CREATOR, NAME_KEY, OPTIONS, assert_sound, fresh_with};
use crate::env::{Environment, SeededEnvironment};
use crate::error::Error;
use crate::format::ROOT_INO;
use crate::fs::mode;

/// On a fresh archive every free byte that is shown is allocated in one request, and then written,
/// in requests of every kind that lies in whole frames; afterwards hardly any is shown.
#[test]
fn what_is_shown_as_free_can_be_allocated_and_written() {
    for limit in [8_u64 << 20, 24 << 20, 100 << 20] {
        for request in [1 << 20, 128 << 10] {
            println!("limit {limit} request {request}");
            let (_, fs) = fresh_with(limit ^ request as u64, NAME_KEY, OPTIONS);
            fs.sync().unwrap();
            fs.volume.allocator().limit_size(limit);
            let available = fs.statistics(u64::MAX).unwrap().available;
            let ino = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
            fs.allocate(ino, 0, available, false, false, u64::MAX).unwrap();
            let more = fs.allocate(ino, 0, available + (1 << 20), false, false, u64::MAX);
            assert!(matches!(more, Err(Error::NoSpace(_))));
            assert_eq!(fs.attributes(ino).unwrap().size, available);
            assert!(available > limit / 16 * 15 - (4 << 20), "{available} of {limit}");
            let mut part = vec![0; request];
            SeededEnvironment::new(limit).fill_random(&mut part).unwrap();
            for offset in (0..available).step_by(request) {
                part[..8].copy_from_slice(&offset.to_le_bytes());
                let length = (available - offset).min(request as u64) as usize;
                let written = fs.write(ino, offset, &part[..length]);
                assert!(written.is_ok(), "{offset} of {available}: {written:?}");
                if offset % (4 << 20) == 0 {
                    fs.sync().unwrap();
                }
            }
            fs.sync().unwrap();
            let left = fs.statistics(u64::MAX).unwrap().available;
            assert!(left < (1 << 20) + limit / 256, "{left} bytes are left of {available}");
            // Deleted space is available at once.
            let again = fs.make_node(ROOT_INO, b"again", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
            assert!(matches!(fs.allocate(again, 0, available / 2, false, false, u64::MAX), Err(Error::NoSpace(_))));
            fs.unlink(ROOT_INO, b"file").unwrap();
            fs.allocate(again, 0, available / 2, false, false, u64::MAX).unwrap();
            assert_sound(&fs);
        }
    }
}
