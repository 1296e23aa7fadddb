use super::*;
use crate::env::SeededEnvironment;

const BLOCK: usize = HOST_BLOCK as usize;

/// Two blocks of 1 on the medium.
fn ones() -> Arc<SimulatedStorage> {
    let storage = SimulatedStorage::new();
    storage.write_at(0, &[1; 2 * BLOCK]).unwrap();
    storage.barrier().unwrap();
    storage
}

fn byte(storage: &SimulatedStorage, offset: u64) -> u8 {
    let mut out = [0];
    storage.read_at(offset, &mut out).unwrap();
    out[0]
}

fn drop_all(storage: &SimulatedStorage) -> Arc<SimulatedStorage> {
    storage.crash(&mut |_| Fate::Drop)
}

#[test]
fn synced_data_survives_a_crash() {
    let storage = ones();
    storage.write_at(0, &[2; BLOCK]).unwrap();
    storage.write_at(4096, &[3; BLOCK]).unwrap();
    assert_eq!((byte(&storage, 0), byte(&storage, 4096)), (2, 3));
    assert_eq!(drop_all(&storage).contents(), [1; 2 * BLOCK]);
    let second = storage.crash(&mut |op| if op.number == 2 { Fate::Keep } else { Fate::Drop });
    assert_eq!((byte(&second, 0), byte(&second, 4096)), (1, 3));
    storage.barrier().unwrap();
    assert_eq!(drop_all(&storage).contents(), storage.contents());
    assert_eq!(storage.medium_contents(), storage.contents());
    assert_eq!((storage.writes(), storage.barriers(), storage.pending().len()), (3, 2, 0));
}

/// The parts of older writes outside of the range stay pending.
#[test]
fn a_synced_range_survives_a_crash_and_other_writes_may_not() {
    let storage = ones();
    storage.record(1 << 20);
    storage.write_at(2048, &[2; BLOCK]).unwrap();
    storage.write_at(4096, &[3; 1024]).unwrap();
    storage.sync_range(4096, &[3; 1024]).unwrap();
    let dropped = drop_all(&storage).contents();
    assert!(dropped[..4096].iter().chain(&dropped[5120..]).all(|byte| *byte == 1));
    assert_eq!(dropped[4096..5120], [3; 1024]);
    let kept = storage.crash(&mut |_| Fate::Keep);
    assert_eq!(kept.contents(), storage.contents());
    let trace = storage.recorded().unwrap();
    let mut point = trace.replay();
    while point.advance() {}
    assert_eq!(point.power_loss(&mut |_| Fate::Drop).contents(), dropped);
    assert_eq!(point.power_loss(&mut |_| Fate::Keep).contents(), storage.contents());
    storage.barrier().unwrap();
    assert_eq!(drop_all(&storage).contents(), storage.contents());
}

#[test]
fn a_write_tears_between_sectors() {
    let storage = ones();
    storage.write_at(500, &[2; 1000]).unwrap();
    // Parts: 500..512, 512..1024, 1024..1500.
    let torn = storage.crash(&mut |_| Fate::Torn(Box::new(|part| part != 1))).contents();
    assert!(torn[..500].iter().all(|&b| b == 1) && torn[500..512].iter().all(|&b| b == 2));
    assert!(torn[512..1024].iter().all(|&b| b == 1) && torn[1024..1500].iter().all(|&b| b == 2));
    assert_eq!(torn[1500], 1);
}

#[test]
fn a_growing_write_may_leave_the_length_without_the_data() {
    let storage = ones();
    storage.write_at(8192, &[2; BLOCK]).unwrap();
    assert_eq!(drop_all(&storage).len().unwrap(), 8192);
    let torn = storage.crash(&mut |_| Fate::Torn(Box::new(|_| false)));
    assert_eq!((torn.len().unwrap(), byte(&torn, 12_287)), (12_288, 0));
}

#[test]
fn metadata_persists_where_earlier_data_did_not() {
    let storage = ones();
    storage.write_at(4096, &[2; BLOCK]).unwrap();
    storage.punch(0, 4096).unwrap();
    storage.allocate(8192, 4096).unwrap();
    storage.set_len(5000).unwrap();
    let data_only = storage.crash(&mut |op| match op.kind {
        OpKind::Write { .. } => Fate::Keep,
        _ => Fate::Drop,
    });
    assert_eq!((byte(&data_only, 0), byte(&data_only, 4096), data_only.len().unwrap()), (1, 2, 8192));
    let metadata_only = storage.crash(&mut |op| match op.kind {
        OpKind::Write { .. } => Fate::Drop,
        _ => Fate::Keep,
    });
    assert_eq!((byte(&metadata_only, 0), byte(&metadata_only, 4096), metadata_only.len().unwrap()), (0, 1, 5000));
}

#[test]
fn operations_reach_the_medium_in_any_order() {
    let storage = ones();
    storage.write_at(0, &[2; BLOCK]).unwrap();
    storage.write_at(0, &[3; BLOCK]).unwrap();
    assert_eq!(byte(&storage.crash_in_order(&[0, 1], &mut |_| Fate::Keep), 0), 3);
    assert_eq!(byte(&storage.crash_in_order(&[1, 0], &mut |_| Fate::Keep), 0), 2);
}

#[test]
fn random_crashes_reach_every_outcome() {
    let storage = ones();
    storage.write_at(0, &[2; 512]).unwrap();
    storage.write_at(512, &[2; 1024]).unwrap();
    storage.punch(4096, 4096).unwrap();
    let random = SeededEnvironment::new(1);
    let mut seen = BTreeSet::new();
    for _ in 0..1000 {
        let crashed = storage.crash_random(&mut || random.next_u64());
        seen.insert([0, 512, 1024, 4096].map(|at| byte(&crashed, at)));
    }
    assert_eq!(seen.len(), 16);
}

#[test]
fn a_dead_process_leaves_the_cache_but_makes_nothing_durable() {
    let storage = ones();
    storage.write_at(0, &[2; BLOCK]).unwrap();
    let reopened = storage.process_death();
    assert_eq!(byte(&reopened, 0), 2);
    assert_eq!(byte(&drop_all(&reopened), 0), 1);
    reopened.evict(0, 4096).unwrap();
    assert_eq!(byte(&reopened, 0), 2); // dirty pages are not dropped
    reopened.barrier().unwrap();
    assert_eq!(byte(&drop_all(&reopened), 0), 2);
    assert_eq!(byte(&drop_all(&storage), 0), 1);
}

#[test]
fn after_a_failed_barrier_data_is_readable_until_evicted_and_never_durable() {
    let storage = ones();
    storage.write_at(0, &[2; BLOCK]).unwrap();
    storage.write_at(8192, &[2; BLOCK]).unwrap();
    storage.punch(4096, 4096).unwrap();
    storage.fail_next_barrier();
    assert!(matches!(storage.barrier(), Err(Error::Io { .. })));
    assert_eq!((byte(&storage, 0), byte(&storage, 8192)), (2, 2));
    storage.barrier().unwrap();
    assert_eq!((byte(&storage, 0), byte(&storage, 8192)), (2, 2));
    let crashed = drop_all(&storage);
    assert_eq!((byte(&crashed, 0), byte(&crashed, 4096), byte(&crashed, 8192)), (1, 0, 0));
    let reopened = storage.process_death();
    assert_eq!(byte(&reopened, 0), 2);
    reopened.evict(0, 4096).unwrap();
    assert_eq!((byte(&reopened, 0), byte(&reopened, 8192)), (1, 2));
    reopened.evict(0, 1 << 20).unwrap();
    assert_eq!(byte(&reopened, 8192), 0);
}

#[test]
fn lost_data_that_is_written_again_becomes_durable() {
    let storage = ones();
    storage.write_at(0, &[2; 2 * BLOCK]).unwrap();
    storage.fail_next_barrier();
    storage.barrier().unwrap_err();
    storage.write_at(0, &[3; BLOCK]).unwrap();
    storage.write_at(4096, &[4; 512]).unwrap();
    storage.evict(0, 8192).unwrap();
    assert_eq!([0, 4096, 4608].map(|at| byte(&storage, at)), [3, 4, 1]);
    storage.barrier().unwrap();
    assert_eq!([0, 4096, 4608].map(|at| byte(&drop_all(&storage), at)), [3, 4, 1]);
}

#[test]
fn a_fault_hits_the_operation_that_it_was_set_for_and_only_that() {
    let storage = ones();
    storage.fail_after(1, Fault::NoSpace);
    storage.write_at(0, &[2]).unwrap();
    assert!(matches!(storage.allocate(0, 1 << 20), Err(Error::NoSpace(_))));
    assert_eq!(storage.len().unwrap(), 8192);
    storage.allocate(0, 1 << 20).unwrap();
    storage.fail_after(0, Fault::Eio);
    assert!(matches!(storage.punch(0, 4096), Err(Error::Io { .. })));
    storage.fail_after(0, Fault::Eio);
    assert!(matches!(storage.barrier(), Err(Error::Io { .. })));
    storage.barrier().unwrap();
    assert_eq!(byte(&drop_all(&storage), 0), 1);
}

#[test]
fn read_errors_are_transient() {
    let storage = ones();
    storage.fail_reads(Some(Box::new(|offset, length| offset <= 4096 && 4096 < offset + length as u64)));
    assert!(matches!(storage.read_at(4000, &mut [0; 200]), Err(Error::Io { .. })));
    assert_eq!(byte(&storage, 0), 1);
    storage.fail_reads(None);
    assert_eq!(byte(&storage, 4096), 1);
}

#[test]
fn the_hook_can_crash_before_every_operation() {
    let storage = SimulatedStorage::new();
    let lengths = Arc::new(Mutex::new(Vec::new()));
    let (inside, found) = (Arc::downgrade(&storage), lengths.clone());
    storage.on_op(Box::new(move |_| {
        if let Some(storage) = inside.upgrade() {
            found.lock().push(storage.crash(&mut |_| Fate::Keep).len().unwrap());
        }
    }));
    storage.write_at(0, &[1; 10]).unwrap();
    storage.set_len(20).unwrap();
    storage.allocate(0, 30).unwrap();
    storage.punch(0, 30).unwrap();
    storage.barrier().unwrap();
    assert_eq!(*lengths.lock(), [0, 10, 20, 30, 30]);
}

#[test]
fn capacity_is_that_of_the_host() {
    let storage = ones();
    storage.set_capacity(Some(12_288));
    storage.allocate(8192, 4096).unwrap();
    assert!(matches!(storage.write_at(12_288, &[1]), Err(Error::NoSpace(_))));
    let crashed = drop_all(&storage);
    assert_eq!(crashed.allocated(), 8192);
    assert!(matches!(crashed.allocate(8192, 8192), Err(Error::NoSpace(_))));
}

/// The cache against a plain vector, and the medium against the cache after each barrier.
#[test]
fn behaves_like_a_plain_file_while_nothing_crashes() {
    let random = SeededEnvironment::new(2);
    let below = |most: u64| random.next_u64() % most;
    let (storage, mut model) = (SimulatedStorage::new(), Vec::new());
    for step in 0..4000 {
        let (offset, length) = (below(40_000), below(9_000));
        let end = (offset + length) as usize;
        match below(8) {
            0..=2 => {
                if model.len() < end && length > 0 {
                    model.resize(end, 0);
                }
                if length > 0 {
                    model[offset as usize..end].fill(step as u8);
                }
                storage.write_at(offset, &vec![step as u8; length as usize]).unwrap();
            }
            3 => {
                let (start, end) = (model.len().min(offset as usize), model.len().min(end));
                model[start..end].fill(0);
                storage.punch(offset, length).unwrap();
            }
            4 => {
                if length > 0 {
                    model.resize(model.len().max(end), 0);
                    storage.allocate(offset, length).unwrap();
                }
            }
            5 => {
                model.resize(offset as usize, 0);
                storage.set_len(offset).unwrap();
            }
            6 => {
                storage.barrier().unwrap();
                assert_eq!(storage.medium_contents(), model);
            }
            _ => {
                storage.evict(offset, length).unwrap();
                let kept = storage.crash(&mut |_| Fate::Keep);
                assert_eq!((kept.contents(), kept.allocated()), (model.clone(), storage.allocated()));
            }
        }
        assert_eq!(storage.contents(), model);
    }
}

#[test]
fn a_replay_is_at_every_point_what_the_storage_was() {
    let storage = ones();
    storage.write_at(0, &[2; BLOCK]).unwrap();
    storage.record(1 << 20);
    let mut mediums = vec![storage.medium_contents()];
    let mut caches = vec![storage.contents()];
    let mut note = |storage: &SimulatedStorage| {
        mediums.push(storage.medium_contents());
        caches.push(storage.contents());
    };
    storage.punch(4096, 4096).unwrap();
    note(&storage);
    storage.write_at(8192, &[3; 2 * BLOCK]).unwrap();
    note(&storage);
    storage.barrier().unwrap();
    note(&storage);
    storage.allocate(20_000, 10_000).unwrap();
    note(&storage);
    storage.set_len(12_288).unwrap();
    note(&storage);
    assert_eq!(storage.position(), 6);
    let trace = storage.recorded().unwrap();
    assert!(trace.is_complete() && trace.len() == 6);
    let mut point = trace.replay();
    // Operations pending when recording began come first.
    assert!(point.advance());
    for (medium, cache) in mediums.iter().zip(&caches) {
        assert!(point.power_loss(&mut |_| Fate::Drop).contents() == *medium);
        assert!(point.power_loss(&mut |_| Fate::Keep).contents() == *cache);
        let dead = point.process_death();
        assert!(dead.contents() == *cache && dead.medium_contents() == *medium);
        point.advance();
    }
    assert!(!point.advance());
}

#[test]
fn a_recording_takes_no_more_memory_than_it_may() {
    let storage = ones();
    storage.record(3 * BLOCK as u64);
    for _ in 0..10 {
        storage.write_at(0, &[2; BLOCK]).unwrap();
    }
    let trace = storage.recorded().unwrap();
    assert!(!trace.is_complete() && trace.len() == 2);
}

#[test]
fn a_replayed_barrier_that_failed_shows_data_until_it_is_evicted() {
    let storage = ones();
    storage.record(1 << 20);
    storage.write_at(0, &[2; BLOCK]).unwrap();
    let trace = storage.recorded().unwrap();
    let mut point = trace.replay();
    point.advance();
    let failed = point.failed_barrier();
    failed.barrier().unwrap();
    assert_eq!(byte(&failed, 0), 2);
    failed.evict(0, 4096).unwrap();
    assert_eq!(byte(&failed, 0), 1);
}

#[test]
fn a_garbage_sector_is_neither_old_nor_new() {
    let storage = ones();
    storage.write_at(0, &[2; BLOCK]).unwrap();
    let torn = storage.crash(&mut |_| Fate::Garbage(Box::new(|part| part != 1))).contents();
    assert!(torn[..512].iter().all(|&b| b == 2) && torn[1024..BLOCK].iter().all(|&b| b == 2));
    assert!(torn[512..1024] != [1; 512] && torn[512..1024] != [2; 512]);
}

#[test]
fn planned_faults_meet_their_class_once_or_for_good() {
    let storage = ones();
    let plan = FaultPlan { class: FaultClass::Write, count: 1, fault: Fault::Eio, lasting: false };
    storage.inject(Some(plan));
    storage.write_at(0, &[3]).unwrap();
    storage.barrier().unwrap();
    assert!(matches!(storage.write_at(0, &[4]), Err(Error::Io { .. })));
    storage.write_at(0, &[5]).unwrap();
    assert_eq!(storage.injected(), 1);
    storage.inject(Some(FaultPlan { class: FaultClass::Room, fault: Fault::NoSpace, lasting: true, ..plan }));
    storage.punch(0, 10).unwrap();
    storage.write_at(0, &[6]).unwrap();
    // Allocated ranges need no space.
    storage.allocate(4096, 10).unwrap();
    assert!(matches!(storage.allocate(1 << 20, 10), Err(Error::NoSpace(_))));
    assert!(matches!(storage.punch(0, 10), Err(Error::NoSpace(_))));
    storage.inject(Some(FaultPlan { count: 0, fault: Fault::Short, ..plan }));
    assert!(storage.write_at(0, &[7; 10]).is_err());
    assert_eq!((byte(&storage, 4), byte(&storage, 5)), (7, 0));
    storage.inject(Some(FaultPlan { class: FaultClass::Read, count: 0, fault: Fault::Eio, lasting: false }));
    assert!(storage.read_at(0, &mut [0]).is_err());
    assert_eq!(byte(&storage, 0), 7);
}
