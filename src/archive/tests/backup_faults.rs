//! Faults of a backup's medium at each operation: the archive is not affected, and the file remains
//! the old backup or becomes the new one.

use std::sync::Arc;

use super::backups::{filled, on, shown, source};
use super::sample::{expected, fresh, noise, put};
use super::snapshot_faults::plans;
use crate::env::{SeededEnvironment, stride};
use crate::error::{Error, Refusal, Result};
use crate::format::ROOT_INO;
use crate::keys::header::Header;
use crate::storage::Storage;
use crate::storage::simulated::{Fault, FaultClass, FaultPlan, SimulatedStorage};

#[test]
fn a_medium_that_fails_under_a_backup_is_said_of_the_backup() {
    let (storage, fs) = fresh(14);
    let write = |from: u64| {
        for n in from..from + 12 {
            put(&fs, ROOT_INO, format!("file{n}").as_bytes(), &noise(n, 90_000));
        }
    };
    write(0);
    let (old, earlier) = (expected(&fs), source(&fs, &storage));
    let bytes = filled(&earlier).contents();
    write(12);
    let (new, later) = (expected(&fs), source(&fs, &storage));
    // Repeats the operation with more successful calls before each fault; returns the number of
    // failures.
    let failing =
        |plan: FaultPlan, begin: &dyn Fn() -> Arc<SimulatedStorage>, work: &dyn Fn(&Arc<dyn Storage>) -> Result<()>| {
            let mut times = 0;
            for count in (0..).step_by(stride(13)) {
                let (plan, chance) = (FaultPlan { count, ..plan }, SeededEnvironment::new(count));
                let file = begin();
                file.inject(Some(plan));
                let done = work(&(file.clone() as Arc<dyn Storage>));
                let met = file.injected() > 0;
                file.inject(None);
                match &done {
                    // A fault may be ignored, such as that of returning space to the host.
                    Ok(()) => {}
                    Err(Error::NoSpace(_)) => assert_eq!(plan.fault, Fault::NoSpace),
                    Err(Error::Refused(Refusal::FailedBackup { .. } | Refusal::DamagedBackup { .. })) if met => {}
                    Err(error) => panic!("{plan:?}: {error:?}"),
                }
                for left in [file.process_death(), file.crash_random(&mut || chance.next_u64())] {
                    // The next reader sees the medium, without the data of the failed barrier in
                    // the host's cache.
                    left.barrier().unwrap();
                    left.evict(0, left.len().unwrap()).unwrap();
                    if Header::read(&*left).is_err() {
                        assert!(done.is_err(), "{plan:?}: nothing is there");
                        continue;
                    }
                    let shows = shown(&*left);
                    assert!(shows == new || shows == old && done.is_err(), "{plan:?}");
                    // In any state, the next run completes the new backup.
                    later.bring_up_to_date(&(left.clone() as Arc<dyn Storage>), &mut on).unwrap().unwrap();
                    assert!(shown(&*left) == new, "{plan:?}: the next run");
                }
                if !met {
                    break;
                }
                times += 1;
            }
            times
        };
    let (mut next, mut whole) = (0, 0);
    for plan in plans() {
        let there = || SimulatedStorage::from_contents(&bytes);
        next += failing(plan, &there, &|file| later.bring_up_to_date(file, &mut on).map(drop));
        if plan.class != FaultClass::Read {
            whole += failing(plan, &SimulatedStorage::new, &|file| later.fill(file, &mut on).map(drop));
        }
    }
    println!("summary: {next} faults: of the medium while a backup is brought up to date");
    println!("summary: {whole} faults: of the medium while a backup is made");
    assert!(next > 20 && whole > 20, "{next} {whole}");
    assert_eq!(fs.volume.latched(), None);
    drop((earlier, later));
    fs.close().unwrap();
}
