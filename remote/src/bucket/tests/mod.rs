//! The bucket's invariants on a simulated store.

mod golden;
mod hooked;
mod inventory;
mod leaving;
mod living;
mod probe;
mod schedules;
mod simulated;
mod staged;
mod vectors;

use std::sync::Arc;
use std::time::Duration;

use self::simulated::World;
use super::layout::Owner;
use super::store::Store;
use crate::Options;

fn seed(default: u64) -> u64 {
    let seed = std::env::var("SEED").map_or(default, |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    seed
}

fn store(world: &Arc<World>, actor: u64) -> Arc<Store> {
    let mut store = Store::new(world.store(actor), "s3://b/p".into(), Some(Duration::ZERO));
    // One after the other, in an order that a seed gives.
    store.at_once = 1;
    Arc::new(store)
}

/// Of a machine that has no name: nobody is known to be gone.
fn somebody() -> Owner {
    Owner { host: "host".into(), ..Owner::default() }
}

fn options() -> Options {
    Options { timeout: Some(Duration::ZERO), cache_directory: None, cache_bytes: Some(0), ..Options::default() }
}
