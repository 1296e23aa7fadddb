//! Space of an archive on its host while parts of it are overwritten repeatedly.

use super::support::{CREATOR, fresh};
use crate::env::{Environment, SeededEnvironment};
use crate::format::ROOT_INO;
use crate::fs::mode;

const SMALL: u64 = 4096;
const FILE: u64 = 8 << 20;

/// Every block of the file is overwritten six times on average, each write made durable by itself.
/// Live parts of old pages, pending frees, the reserve of the next commit and all nodes together
/// never exceed the size of the content.
#[test]
fn synced_overwrites_never_take_twice_what_is_live() {
    let (storage, fs) = fresh(7);
    let dice = SeededEnvironment::new(8);
    let mut bytes = vec![0; FILE as usize];
    dice.fill_random(&mut bytes).unwrap();
    let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
    fs.write(file, 0, &bytes).unwrap();
    fs.sync().unwrap();
    let mut most = 0;
    for write in 0..6 * FILE / SMALL {
        let at = dice.next_u64() % (FILE / SMALL) * SMALL;
        let part = &mut bytes[at as usize..(at + SMALL) as usize];
        dice.fill_random(part).unwrap();
        fs.write(file, at, part).unwrap();
        fs.sync().unwrap();
        most = most.max(storage.allocated());
        if write % 1024 == 0 {
            println!(
                "{write} writes: {:.2} of the content, at most {:.2}",
                storage.allocated() as f64 / FILE as f64,
                most as f64 / FILE as f64
            );
        }
    }
    assert!(most <= 2 * FILE, "{:.2} times the content", most as f64 / FILE as f64);
    assert!(fs.read(file, 0, FILE as usize).unwrap() == bytes);
}
