//! Partial reads of an archive with missing or truncated objects.

use std::sync::Arc;

use lockbox::storage::Storage;
use lockbox::{Error, Result};

use super::super::layout::BLOCK;
use super::options;
use super::simulated::World;
use super::writable::{NAME, living, published, spent, whole};
use crate::remote_file::RemoteFile;

fn salvaged(world: &Arc<World>) -> Result<RemoteFile> {
    super::super::open_partial(world.store(9), NAME.into(), &options()).map(Option::unwrap)
}

/// An archive of several segments, with records that have pages in between.
fn made(world: &Arc<World>) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..30 << 20).map(|at| (at / 4096 % 251) as u8 + 1).collect();
    published(world, &bytes);
    let storage = living(world, 1).unwrap();
    for block in [1, 5, 700, 701, 3000, 7000] {
        storage.write_at(block * BLOCK, &[0xEE; BLOCK as usize]).unwrap();
        bytes[(block * BLOCK) as usize..][..BLOCK as usize].fill(0xEE);
        storage.barrier().unwrap();
    }
    bytes
}

#[test]
fn of_objects_that_are_gone_or_cut_all_else_is_read_and_they_are_zeros() {
    let world = World::new(1, 0);
    let bytes = made(&world);
    assert!(whole(&salvaged(&world).unwrap()) == bytes);
    let names: Vec<String> = world.with(|state| state.objects.keys().cloned().collect());
    let (mut lost_most, mut tried) = (0, 0);
    for name in names.iter().filter(|name| name.contains("/seg/") || name.contains("/log/")) {
        let object = world.with(|state| state.objects[name].clone());
        for kept in [None, Some(0), Some(5000), Some(object.len() / 2)] {
            world.with(|state| match kept {
                None => drop(state.objects.remove(name)),
                Some(length) => drop(state.objects.insert(name.clone(), object[..length.min(object.len())].to_vec())),
            });
            // Without what says where the rest is there is nothing.
            if let Ok(left) = salvaged(&world) {
                spent(&world);
                let found = whole(&left);
                let mut lost = 0;
                for (there, was) in found.chunks(BLOCK as usize).zip(bytes.chunks(BLOCK as usize)) {
                    assert!(there == was || there.iter().all(|byte| *byte == 0), "{name} {kept:?}");
                    lost += usize::from(there != was);
                }
                let most =
                    object.len().div_ceil(BLOCK as usize) - kept.unwrap_or_default().min(object.len()) / BLOCK as usize;
                assert!(lost <= most, "{name} {kept:?}: {lost} of {most}");
                assert!(spent(&world).len() < 400, "each of its blocks was asked for");
                (lost_most, tried) = (lost_most.max(lost), tried + 1);
            }
            world.with(|state| state.objects.insert(name.clone(), object.clone()));
        }
    }
    assert!(lost_most > 1000 && tried > 20, "{lost_most} {tried}");
}

#[test]
fn a_request_that_fails_is_no_object_that_is_gone() {
    let world = World::new(1, 0);
    made(&world);
    let left = salvaged(&world).unwrap();
    world.with(|state| state.away = true);
    let message = left.read_at(20 << 20, &mut [0; 4096]).unwrap_err();
    assert!(matches!(message, Error::Io { .. }), "{message:?}");
    world.with(|state| state.away = false);
    left.read_at(20 << 20, &mut [0; 4096]).unwrap();
}
