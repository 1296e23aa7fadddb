//! Conformance suite of all stores. Each case gets a store of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use lockbox_share_protocol::message::{ClaimState, ShareState};
use lockbox_share_protocol::token::{Auth, ClaimId, Digest, Handle, LeaseToken, OwnerToken};

use super::super::simulated::ManualClock;
use super::super::{LeaseFinish, NewShare, Periods, ShareStore, SpoolEntry, StoreError, WallTime};

/// A store under test and its clock.
pub(crate) struct Subject {
    pub(crate) store: Arc<dyn ShareStore>,
    pub(crate) clock: Arc<ManualClock>,
    /// Runs the store's background work once.
    pub(crate) sweep: Box<dyn Fn()>,
    /// Set if the store counts its shares.
    pub(crate) counts: bool,
}

type Make<'a> = &'a dyn Fn(Periods) -> Subject;
type Case = fn(Make<'_>);

pub(crate) const MINUTE: Duration = Duration::from_secs(60);
pub(crate) const DAY_MS: i64 = 24 * 3600 * 1000;

pub(crate) fn handle(number: u64) -> Handle {
    Handle::new(1, 12, number).unwrap()
}

pub(crate) fn auth(number: u64) -> Auth {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Auth::new(bytes)
}

pub(crate) fn owner(number: u64) -> OwnerToken {
    let mut bytes = [9; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    OwnerToken::new(bytes)
}

pub(crate) fn id(number: u64) -> ClaimId {
    ClaimId::new((u128::from(number) + 1).to_le_bytes())
}

pub(crate) fn small(number: u64) -> NewShare {
    NewShare {
        auth: auth(number).verifier(),
        owner: owner(number).verifier(),
        ttl: 15 * MINUTE,
        claims: 1,
        capsule: Bytes::from(format!("capsule of {number}")),
        payload: None,
    }
}

pub(crate) fn large(number: u64) -> NewShare {
    let id = (u128::from(number) + 77).to_le_bytes();
    NewShare { payload: Some(SpoolEntry { id, length: 1 << 20, digest: Digest::new([3; 32]) }), ..small(number) }
}

/// Runs all cases.
pub(crate) fn suite(make: Make<'_>) {
    let cases: [(&str, Case); 24] = [
        ("a deposit is given once", a_deposit_is_given_once),
        ("a repeated claim gets the same answer", a_repeated_claim_gets_the_same_answer),
        ("a handle is taken once", a_handle_is_taken_once),
        ("bad deposits are refused", bad_deposits_are_refused),
        ("without proof everything is unknown", without_proof_everything_is_unknown),
        ("with proof the answer is true", with_proof_the_answer_is_true),
        ("a look changes nothing and is answered as a claim", a_look_changes_nothing_and_is_answered_as_a_claim),
        ("all claims that were allowed are given", all_claims_that_were_allowed_are_given),
        ("an unused lease rearms", an_unused_lease_rearms),
        ("telling of a lease changes nothing", telling_of_a_lease_changes_nothing),
        ("a used lease consumes", a_used_lease_consumes),
        ("the owner rearms an interrupted download", the_owner_rearms_an_interrupted_download),
        ("the owner rearms an unconfirmed download", the_owner_rearms_an_unconfirmed_download),
        ("a second claimant is refused throughout", a_second_claimant_is_refused_throughout),
        ("a download goes on while it is asked for", a_download_goes_on_while_it_is_asked_for),
        ("a finished lease is over", a_finished_lease_is_over),
        ("a claim becomes complete once", a_claim_becomes_complete_once),
        ("a request after the last byte keeps the lease", a_request_after_the_last_byte_keeps_the_lease),
        ("a lease outlives the share's expiry", a_lease_outlives_the_expiry),
        ("a revoked share gives nothing", a_revoked_share_gives_nothing),
        ("the audit stays and then goes", the_audit_stays_and_then_goes),
        ("clock steps move no expiry", clock_steps_move_no_expiry),
        ("a thousand claims have one winner", a_thousand_claims_have_one_winner),
        ("a thousand claims have eight winners", a_thousand_claims_have_eight_winners),
    ];
    for (name, case) in cases {
        eprintln!("case: {name}");
        case(make);
    }
}

fn a_deposit_is_given_once(make: Make<'_>) {
    let t = make(Periods::default());
    let created = t.store.create(handle(1), small(1)).wait().unwrap();
    assert_eq!(created.expires.0 - created.at.0, 15 * 60 * 1000);
    assert_eq!(t.store.stats().live, u64::from(t.counts));
    let claimed = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap();
    assert_eq!(claimed.capsule, "capsule of 1");
    assert!(claimed.lease.is_none() && !claimed.repeated && claimed.claims_left == 0);
    let again = t.store.claim(handle(1), &auth(1), id(2)).wait();
    assert_eq!(again.err(), Some(StoreError::Used { at: claimed.at }));
}

fn a_repeated_claim_gets_the_same_answer(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), small(1)).wait().unwrap();
    t.store.create(handle(2), large(2)).wait().unwrap();
    let first = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap();
    let lease = t.store.claim(handle(2), &auth(2), id(1)).wait().unwrap();
    t.clock.pass(Duration::from_secs(59));
    (t.sweep)();
    let second = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap();
    assert!(second.capsule == first.capsule && second.at == first.at && second.repeated);
    let second = t.store.claim(handle(2), &auth(2), id(1)).wait().unwrap();
    assert!(second.lease.unwrap().token == lease.lease.unwrap().token);
    // The id alone is no proof.
    assert_eq!(t.store.claim(handle(1), &auth(5), id(1)).wait().err(), Some(StoreError::Unknown));
    t.clock.pass(Duration::from_secs(1));
    let late = t.store.claim(handle(1), &auth(1), id(1)).wait();
    assert_eq!(late.err(), Some(StoreError::Used { at: first.at }));
}

fn a_handle_is_taken_once(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), small(1)).wait().unwrap();
    assert_eq!(t.store.create(handle(1), small(2)).wait().err(), Some(StoreError::Taken));
    assert!(t.store.claim(handle(1), &auth(1), id(1)).wait().is_ok());
    // A used handle names the used share, so that its answer stays true.
    assert_eq!(t.store.create(handle(1), small(2)).wait().err(), Some(StoreError::Taken));
}

fn bad_deposits_are_refused(make: Make<'_>) {
    let t = make(Periods::default());
    let day = Duration::from_secs(24 * 3600);
    let bad = [
        NewShare { capsule: Bytes::from(vec![0; 8193]), ..small(1) },
        NewShare { claims: 0, ..small(1) },
        NewShare { claims: 9, ..small(1) },
        NewShare { ttl: Duration::ZERO, ..small(1) },
        NewShare { ttl: 31 * day + Duration::from_secs(1), ..small(1) },
    ];
    for share in bad {
        assert!(matches!(t.store.create(handle(1), share).wait(), Err(StoreError::Invalid(_))));
    }
    let widest = NewShare { capsule: Bytes::from(vec![5; 8192]), claims: 8, ttl: 31 * day, ..small(1) };
    t.store.create(handle(1), widest).wait().unwrap();
    assert_eq!(t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().capsule, vec![5; 8192]);
}

fn without_proof_everything_is_unknown(make: Make<'_>) {
    let t = make(Periods::default());
    for number in 1..=4 {
        t.store.create(handle(number), large(number)).wait().unwrap();
    }
    t.store.create(handle(5), NewShare { ttl: MINUTE, ..small(5) }).wait().unwrap();
    t.store.revoke(handle(2), &owner(2)).wait().unwrap();
    let lease = t.store.claim(handle(3), &auth(3), id(3)).wait().unwrap().lease.unwrap();
    t.store.payload(handle(3), &lease.token).wait().unwrap();
    t.store.finish(handle(3), &lease.token, LeaseFinish::Now).wait().unwrap();
    t.store.claim(handle(4), &auth(4), id(4)).wait().unwrap();
    t.clock.pass(MINUTE);
    // Armed, revoked, used, leased, expired, missing.
    for number in 1..=6 {
        let unknown = Some(StoreError::Unknown);
        assert_eq!(t.store.claim(handle(number), &auth(99), id(number)).wait().err(), unknown);
        assert_eq!(t.store.look(handle(number), &auth(99)).wait().err(), unknown);
        assert_eq!(t.store.payload(handle(number), &LeaseToken::new([1; 16])).wait().err(), unknown);
        assert_eq!(t.store.payload(handle(number), &LeaseToken::new([0; 16])).wait().err(), unknown);
        assert_eq!(t.store.finish(handle(number), &LeaseToken::new([0; 16]), LeaseFinish::Now).wait().err(), unknown);
        assert_eq!(t.store.info(handle(number), &owner(99)).wait().err(), unknown);
        assert_eq!(t.store.revoke(handle(number), &owner(99)).wait().err(), unknown);
        assert_eq!(t.store.rearm(handle(number), &owner(99)).wait().err(), unknown);
        // The receiver's proof is not the owner's.
        assert_eq!(t.store.revoke(handle(number), &OwnerToken::new(*auth(number).as_bytes())).wait().err(), unknown);
    }
}

fn with_proof_the_answer_is_true(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), small(1)).wait().unwrap();
    t.store.create(handle(2), small(2)).wait().unwrap();
    let created = t.store.create(handle(3), NewShare { ttl: MINUTE, ..small(3) }).wait().unwrap();
    t.clock.pass(Duration::from_secs(30));
    let used = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().at;
    let revoked = t.store.revoke(handle(2), &owner(2)).wait().unwrap().revoked.unwrap();
    t.clock.pass(Duration::from_secs(30));
    (t.sweep)();
    t.clock.pass(Duration::from_secs(300));
    (t.sweep)();
    assert_eq!(used.0, created.at.0 + 30_000);
    assert_eq!(revoked.0, created.at.0 + 30_000);
    assert_eq!(t.store.claim(handle(1), &auth(1), id(9)).wait().err(), Some(StoreError::Used { at: used }));
    assert_eq!(t.store.claim(handle(2), &auth(2), id(9)).wait().err(), Some(StoreError::Revoked { at: revoked }));
    let expired = Some(StoreError::Expired { at: WallTime(created.at.0 + 60_000) });
    assert_eq!(t.store.claim(handle(3), &auth(3), id(9)).wait().err(), expired);
    assert_eq!(t.store.rearm(handle(3), &owner(3)).wait().err(), expired);
}

fn a_look_changes_nothing_and_is_answered_as_a_claim(make: Make<'_>) {
    let t = make(Periods::default());
    let created = t.store.create(handle(1), small(1)).wait().unwrap();
    t.store.create(handle(2), large(2)).wait().unwrap();
    t.store.create(handle(3), NewShare { claims: 2, ..large(3) }).wait().unwrap();
    let look = |number| t.store.look(handle(number), &auth(number)).wait();
    let before = t.store.info(handle(1), &owner(1)).wait().unwrap();
    assert_eq!([look(1), look(1)], [Ok(created.expires), Ok(created.expires)]);
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap(), before);
    let used = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().at;
    // The claim itself would be repeated now, with its id; who looks has none.
    assert_eq!(look(1), Err(StoreError::Used { at: used }));
    for number in [2, 3] {
        t.store.claim(handle(number), &auth(number), id(number)).wait().unwrap();
    }
    assert!(matches!(look(2), Err(StoreError::Busy { .. })));
    assert!(look(3).is_ok());
    // A lease that ended unused is over for a look as well.
    t.clock.pass(Duration::from_secs(121));
    assert!(look(2).is_ok());
    let revoked = t.store.revoke(handle(2), &owner(2)).wait().unwrap().revoked.unwrap();
    assert_eq!(look(2), Err(StoreError::Revoked { at: revoked }));
    t.clock.pass(15 * MINUTE);
    (t.sweep)();
    assert!(matches!(look(3), Err(StoreError::Expired { .. })));
}

fn all_claims_that_were_allowed_are_given(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), NewShare { claims: 3, ..small(1) }).wait().unwrap();
    t.store.create(handle(2), NewShare { claims: 2, ..large(2) }).wait().unwrap();
    for left in [2, 1, 0] {
        let claimed = t.store.claim(handle(1), &auth(1), id(left)).wait().unwrap();
        assert_eq!((u64::from(claimed.claims_left), &claimed.capsule[..]), (left, &b"capsule of 1"[..]));
    }
    assert!(matches!(t.store.claim(handle(1), &auth(1), id(9)).wait().err(), Some(StoreError::Used { .. })));
    let one = t.store.claim(handle(2), &auth(2), id(1)).wait().unwrap().lease.unwrap();
    let two = t.store.claim(handle(2), &auth(2), id(2)).wait().unwrap().lease.unwrap();
    assert!(one.token != two.token);
    for token in [one.token, two.token] {
        t.store.payload(handle(2), &token).wait().unwrap();
        t.store.finish(handle(2), &token, LeaseFinish::Now).wait().unwrap();
    }
    assert_eq!(t.store.info(handle(2), &owner(2)).wait().unwrap().state, ShareState::Consumed);
}

fn an_unused_lease_rearms(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), large(1)).wait().unwrap();
    let first = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    let until = first.until;
    assert_eq!(t.store.claim(handle(1), &auth(1), id(2)).wait().err(), Some(StoreError::Busy { until }));
    t.clock.pass(2 * MINUTE);
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Armed);
    assert_eq!(t.store.payload(handle(1), &first.token).wait().err(), Some(StoreError::Unknown));
    let second = t.store.claim(handle(1), &auth(1), id(2)).wait().unwrap().lease.unwrap();
    assert!(second.token != first.token);
    assert_eq!(t.store.payload(handle(1), &first.token).wait().err(), Some(StoreError::Unknown));
    t.store.payload(handle(1), &second.token).wait().unwrap();
}

/// Store rule 12.
fn telling_of_a_lease_changes_nothing(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), large(1)).wait().unwrap();
    let lease = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    let before = t.store.info(handle(1), &owner(1)).wait().unwrap();
    t.clock.pass(MINUTE);
    let told = t.store.lease(handle(1), &lease.token).wait().unwrap();
    assert!(told.until == lease.until && told.payload == lease.payload && told.token == lease.token);
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap(), before);
    // It was neither renewed nor marked as used.
    t.clock.pass(MINUTE);
    assert_eq!(t.store.lease(handle(1), &lease.token).wait().err(), Some(StoreError::Unknown));
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Armed);
    let second = t.store.claim(handle(1), &auth(1), id(2)).wait().unwrap().lease.unwrap();
    t.store.payload(handle(1), &second.token).wait().unwrap();
    t.store.finish(handle(1), &second.token, LeaseFinish::After(MINUTE)).wait().unwrap();
    let finishing = t.store.lease(handle(1), &second.token).wait().unwrap();
    t.clock.pass(MINUTE);
    // Nor did it take the end of the download back.
    assert_eq!(t.store.lease(handle(1), &second.token).wait().err(), Some(StoreError::Used { at: finishing.until }));
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap().events[0].state, ClaimState::Interrupted);
    assert_eq!(t.store.lease(handle(1), &LeaseToken::new([1; 16])).wait().err(), Some(StoreError::Unknown));
}

fn a_used_lease_consumes(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), NewShare { ttl: 180 * MINUTE, ..large(1) }).wait().unwrap();
    let lease = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    let lease = t.store.payload(handle(1), &lease.token).wait().unwrap();
    t.clock.pass(60 * MINUTE);
    let info = t.store.info(handle(1), &owner(1)).wait().unwrap();
    assert_eq!((info.state, info.claims_left), (ShareState::Consumed, 0));
    assert_eq!((info.events.len(), info.events[0].state), (1, ClaimState::Interrupted));
    assert_eq!(info.events[0].ended, lease.until);
    let used = Some(StoreError::Used { at: lease.until });
    assert_eq!(t.store.claim(handle(1), &auth(1), id(2)).wait().err(), used);
    assert_eq!(t.store.payload(handle(1), &lease.token).wait().err(), used);
}

fn the_owner_rearms_an_interrupted_download(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), NewShare { ttl: 180 * MINUTE, ..large(1) }).wait().unwrap();
    assert_eq!(t.store.rearm(handle(1), &owner(1)).wait().err(), Some(StoreError::NothingToRearm));
    let first = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    t.store.payload(handle(1), &first.token).wait().unwrap();
    t.clock.pass(61 * MINUTE);
    (t.sweep)();
    assert_eq!(t.store.rearm(handle(1), &owner(1)).wait().unwrap().state, ShareState::Armed);
    assert_eq!(t.store.payload(handle(1), &first.token).wait().err(), Some(StoreError::Unknown));
    let second = t.store.claim(handle(1), &auth(1), id(2)).wait().unwrap();
    assert_eq!(second.capsule, "capsule of 1");
    // A download that runs is ended as well: the owner knows better.
    t.store.payload(handle(1), &second.lease.as_ref().unwrap().token).wait().unwrap();
    assert_eq!(t.store.rearm(handle(1), &owner(1)).wait().unwrap().state, ShareState::Armed);
    let third = t.store.claim(handle(1), &auth(1), id(3)).wait().unwrap().lease.unwrap();
    t.store.payload(handle(1), &third.token).wait().unwrap();
    t.store.finish(handle(1), &third.token, LeaseFinish::Now).wait().unwrap();
    assert_eq!(t.store.rearm(handle(1), &owner(1)).wait().err(), Some(StoreError::NothingToRearm));
}

/// The last byte may have been lost after it was handed to the connection.
fn the_owner_rearms_an_unconfirmed_download(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), NewShare { ttl: 180 * MINUTE, ..large(1) }).wait().unwrap();
    let first = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    t.store.payload(handle(1), &first.token).wait().unwrap();
    t.store.finish(handle(1), &first.token, LeaseFinish::After(MINUTE)).wait().unwrap();
    t.clock.pass(5 * MINUTE);
    (t.sweep)();
    // A response that outlived the lease changes nothing.
    assert!(!t.store.finish(handle(1), &first.token, LeaseFinish::After(MINUTE)).wait().unwrap());
    let info = t.store.info(handle(1), &owner(1)).wait().unwrap();
    assert_eq!((info.state, info.events[0].state), (ShareState::Consumed, ClaimState::Interrupted));
    assert_eq!(t.store.rearm(handle(1), &owner(1)).wait().unwrap().state, ShareState::Armed);
    let second = t.store.claim(handle(1), &auth(1), id(2)).wait().unwrap();
    assert_eq!(second.capsule, "capsule of 1");
}

fn a_second_claimant_is_refused_throughout(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), large(1)).wait().unwrap();
    let lease = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    for minute in 0..10 {
        let lease = t.store.payload(handle(1), &lease.token).wait().unwrap();
        let refused = t.store.claim(handle(1), &auth(1), id(100 + minute)).wait().err();
        assert_eq!(refused, Some(StoreError::Busy { until: lease.until }), "minute {minute}");
        t.clock.pass(MINUTE);
    }
    t.store.finish(handle(1), &lease.token, LeaseFinish::Now).wait().unwrap();
    assert!(matches!(t.store.claim(handle(1), &auth(1), id(2)).wait().err(), Some(StoreError::Used { .. })));
}

fn a_download_goes_on_while_it_is_asked_for(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), large(1)).wait().unwrap();
    let lease = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    // Three hours, with a part every 40 minutes, long past the expiry of the share.
    for _ in 0..5 {
        t.store.payload(handle(1), &lease.token).wait().unwrap();
        t.clock.pass(40 * MINUTE);
        (t.sweep)();
    }
    t.store.payload(handle(1), &lease.token).wait().unwrap();
    t.store.finish(handle(1), &lease.token, LeaseFinish::Now).wait().unwrap();
}

fn a_finished_lease_is_over(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), large(1)).wait().unwrap();
    let lease = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    t.store.payload(handle(1), &lease.token).wait().unwrap();
    t.store.finish(handle(1), &lease.token, LeaseFinish::After(MINUTE)).wait().unwrap();
    t.clock.pass(MINUTE / 2);
    t.store.finish(handle(1), &lease.token, LeaseFinish::After(MINUTE)).wait().unwrap();
    t.clock.pass(MINUTE / 2);
    let info = t.store.info(handle(1), &owner(1)).wait().unwrap();
    assert_eq!((info.state, info.events[0].state), (ShareState::Consumed, ClaimState::Interrupted));
    assert!(matches!(t.store.payload(handle(1), &lease.token).wait().err(), Some(StoreError::Used { .. })));
    t.store.finish(handle(1), &lease.token, LeaseFinish::Now).wait().unwrap();
}

fn a_claim_becomes_complete_once(make: Make<'_>) {
    let t = make(Periods::default());
    let long = |number| NewShare { ttl: 180 * MINUTE, ..large(number) };
    let leased = |number| t.store.claim(handle(number), &auth(number), id(1)).wait().unwrap().lease.unwrap().token;
    let finish = |number, token: &LeaseToken, how| t.store.finish(handle(number), token, how).wait().unwrap();
    for number in 1..=4 {
        t.store.create(handle(number), long(number)).wait().unwrap();
    }
    // Said by the receiver, twice.
    let token = leased(1);
    t.store.payload(handle(1), &token).wait().unwrap();
    assert!(finish(1, &token, LeaseFinish::Now) && !finish(1, &token, LeaseFinish::Now));
    // Confirmed by the receiver after the grace.
    let token = leased(2);
    t.store.payload(handle(2), &token).wait().unwrap();
    assert!(!finish(2, &token, LeaseFinish::After(MINUTE)));
    t.clock.pass(MINUTE);
    assert!(finish(2, &token, LeaseFinish::Now) && !finish(2, &token, LeaseFinish::Now));
    // Without a byte sent.
    let token = leased(3);
    assert!(!finish(3, &token, LeaseFinish::Now));
    assert_eq!(t.store.info(handle(3), &owner(3)).wait().unwrap().state, ShareState::Consumed);
    // After it was interrupted.
    let token = leased(4);
    t.store.payload(handle(4), &token).wait().unwrap();
    t.clock.pass(61 * MINUTE);
    assert!(finish(4, &token, LeaseFinish::Now) && !finish(4, &token, LeaseFinish::Now));
}

fn a_request_after_the_last_byte_keeps_the_lease(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), large(1)).wait().unwrap();
    let lease = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    // Twice: the download is cut, and going on begins with the last bytes.
    for _ in 0..2 {
        t.store.payload(handle(1), &lease.token).wait().unwrap();
        t.store.finish(handle(1), &lease.token, LeaseFinish::After(MINUTE)).wait().unwrap();
        t.store.payload(handle(1), &lease.token).wait().unwrap();
        t.clock.pass(2 * MINUTE);
        (t.sweep)();
        assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Leased);
    }
    t.store.payload(handle(1), &lease.token).wait().unwrap();
    // But not for ever.
    for _ in 0..23 * 3 {
        t.clock.pass(20 * MINUTE);
        t.store.payload(handle(1), &lease.token).wait().unwrap();
    }
    for _ in 0..3 {
        t.clock.pass(20 * MINUTE);
        let _ = t.store.payload(handle(1), &lease.token).wait();
    }
    assert!(matches!(t.store.payload(handle(1), &lease.token).wait().err(), Some(StoreError::Used { .. })));
}

fn a_lease_outlives_the_expiry(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), NewShare { ttl: MINUTE, ..large(1) }).wait().unwrap();
    t.clock.pass(MINUTE / 2);
    let claimed = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap();
    let token = claimed.lease.unwrap().token;
    t.store.payload(handle(1), &token).wait().unwrap();
    t.clock.pass(5 * MINUTE);
    (t.sweep)();
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Leased);
    t.store.payload(handle(1), &token).wait().unwrap();
    t.store.finish(handle(1), &token, LeaseFinish::Now).wait().unwrap();
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Consumed);
}

fn a_revoked_share_gives_nothing(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), large(1)).wait().unwrap();
    let lease = t.store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap();
    t.store.payload(handle(1), &lease.token).wait().unwrap();
    let info = t.store.revoke(handle(1), &owner(1)).wait().unwrap();
    assert_eq!(info.state, ShareState::Revoked);
    let at = info.revoked.unwrap();
    for answer in [
        t.store.payload(handle(1), &lease.token).wait().err(),
        t.store.claim(handle(1), &auth(1), id(1)).wait().err(),
        t.store.rearm(handle(1), &owner(1)).wait().err(),
    ] {
        assert_eq!(answer, Some(StoreError::Revoked { at }));
    }
    assert_eq!(t.store.revoke(handle(1), &owner(1)).wait().unwrap().revoked, Some(at));
    // Of a used share nothing is left to take.
    t.store.create(handle(2), small(2)).wait().unwrap();
    t.store.claim(handle(2), &auth(2), id(2)).wait().unwrap();
    assert_eq!(t.store.revoke(handle(2), &owner(2)).wait().unwrap().state, ShareState::Consumed);
}

fn the_audit_stays_and_then_goes(make: Make<'_>) {
    let t = make(Periods::default());
    t.store.create(handle(1), small(1)).wait().unwrap();
    t.store.create(handle(2), small(2)).wait().unwrap();
    t.store.claim(handle(2), &auth(2), id(2)).wait().unwrap();
    t.clock.pass(20 * 60 * MINUTE);
    (t.sweep)();
    assert_eq!(t.store.stats().live, 0);
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Expired);
    let used = t.store.info(handle(2), &owner(2)).wait().unwrap();
    assert_eq!((used.state, used.events.len()), (ShareState::Consumed, 1));
    t.clock.pass(6 * 60 * MINUTE);
    (t.sweep)();
    assert_eq!(t.store.info(handle(1), &owner(1)).wait().err(), Some(StoreError::Unknown));
    assert_eq!(t.store.info(handle(2), &owner(2)).wait().err(), Some(StoreError::Unknown));
    // The handle is free again.
    t.store.create(handle(1), small(3)).wait().unwrap();
}

fn clock_steps_move_no_expiry(make: Make<'_>) {
    for step in [DAY_MS, -DAY_MS] {
        let t = make(Periods::default());
        t.store.create(handle(1), small(1)).wait().unwrap();
        t.clock.step(step);
        (t.sweep)();
        t.clock.pass(14 * MINUTE);
        (t.sweep)();
        assert_eq!(t.store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Armed, "{step}");
        t.clock.pass(MINUTE);
        (t.sweep)();
        let late = t.store.claim(handle(1), &auth(1), id(1)).wait().err();
        assert!(matches!(late, Some(StoreError::Expired { .. })), "{step}");
    }
}

fn a_thousand_claims_have_one_winner(make: Make<'_>) {
    winners(make, 1);
}

fn a_thousand_claims_have_eight_winners(make: Make<'_>) {
    winners(make, 8);
}

fn winners(make: Make<'_>, allowed: u8) {
    for payload in [false, true] {
        let t = make(Periods::default());
        let share = if payload { large(1) } else { small(1) };
        t.store.create(handle(1), NewShare { claims: allowed, ..share }).wait().unwrap();
        let won = AtomicUsize::new(0);
        let begin = std::sync::Barrier::new(100);
        std::thread::scope(|scope| {
            for thread in 0..100 {
                let (store, won, begin) = (&t.store, &won, &begin);
                scope.spawn(move || {
                    begin.wait();
                    // All ten are under way before the first answer is awaited.
                    let claims: Vec<_> =
                        (0..10).map(|n| store.claim(handle(1), &auth(1), id(thread * 10 + n))).collect();
                    for claim in claims {
                        match claim.wait() {
                            Ok(claimed) => {
                                assert_eq!(claimed.capsule, "capsule of 1");
                                won.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(StoreError::Used { .. } | StoreError::Busy { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
        });
        assert_eq!(won.into_inner(), usize::from(allowed));
    }
}
