//! Each share is given away as often as was agreed, and never by looking at it.

use std::sync::Barrier;

use serde_json::json;

use crate::daemon::{Daemon, LONG_TIMEOUTS, Owner, QUICK, Share, age_file, lease, random};

const AGENTS: [&str; 4] = [
    "Slackbot-LinkExpanding 1.0 (+https://api.slack.com/robots)",
    "facebookexternalhit/1.1",
    "Mozilla/5.0 (compatible; Microsoft URL Control; Outlook SafeLinks)",
    "WhatsApp/2.23.20.0",
];

#[test]
fn a_thousand_looks_by_preview_agents_leave_the_share_armed() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let (small, large) = (daemon.share(&owner, &json!({})), daemon.share_file(&owner, &age_file(5000)));
    let mut connection = daemon.connect();
    for number in 0..1000 {
        let share = if number % 2 == 0 { &small } else { &large };
        let method = ["GET", "HEAD", "OPTIONS"][number % 3];
        let path = match number % 5 {
            0 | 1 => format!("/s/{}", share.created.handle),
            2 => format!("/s/{}%23AGE-SECRET", share.created.handle),
            3 => share.path("/ciphertext"),
            _ => "/v1/claim".into(),
        };
        let answer = connection.ask(method, &path, &[("user-agent", AGENTS[number % 4])], b"");
        assert!([200, 204, 401, 405].contains(&answer.status), "{method} {path}: {}", answer.status);
    }
    for share in [&small, &large] {
        assert_eq!(daemon.state_of(&owner, share), "armed");
        assert_eq!(daemon.claim(share).status, 200);
    }
}

#[test]
fn asking_whether_a_link_opens_something_uses_nothing_up() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    for share in [daemon.share(&owner, &json!({})), daemon.share_file(&owner, &age_file(100))] {
        let before = daemon.info(&owner, &share);
        for _ in 0..50 {
            let looked = daemon.look(&share);
            assert_eq!((looked.status, &looked.json()), (200, &json!({ "expires_at": share.created.expires_at })));
        }
        assert_eq!(daemon.info(&owner, &share), before);
        assert_eq!(daemon.claim(&share).status, 200);
        assert_ne!(daemon.look(&share).status, 200);
    }
}

/// Else a guesser would have more attempts at the one path than at the other.
#[test]
fn who_looks_without_proof_waits_as_who_claims_does() {
    let daemon = Daemon::start(&["--misses-per-minute", "3", "--requests-per-minute", "1000", "--burst", "1000"]);
    let owner = Owner::new();
    let share = daemon.share(&owner, &json!({}));
    let guess = Share { created: share.created.clone(), auth: [0; 32] };
    let statuses: Vec<u16> = (0..20).map(|_| daemon.look(&guess).status).collect();
    assert!(statuses.contains(&404) && statuses.contains(&429), "{statuses:?}");
    assert_eq!(daemon.claim(&share).status, 429);
}

fn claim_together(daemon: &Daemon, share: &Share, claimants: usize) -> Vec<u16> {
    let barrier = Barrier::new(claimants);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..claimants)
            .map(|_| {
                let mut connection = daemon.connect();
                let message = share.claim(random()).to_string();
                let barrier = &barrier;
                let claim = move || {
                    barrier.wait();
                    let headers = [("content-type", "application/json")];
                    connection.ask("POST", "/v1/claim", &headers, message.as_bytes()).status
                };
                std::thread::Builder::new().stack_size(128 * 1024).spawn_scoped(scope, claim).unwrap()
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn of_a_thousand_concurrent_claims_one_wins_and_of_eight_allowed_eight() {
    let daemon = Daemon::start(&[QUICK, LONG_TIMEOUTS].concat());
    let owner = Owner::new();
    for (allowed, claimants) in [(1, 1000), (8, 200)] {
        let share = daemon.share(&owner, &json!({ "max_claims": allowed }));
        let statuses = claim_together(&daemon, &share, claimants);
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), allowed);
        assert_eq!(statuses.iter().filter(|status| **status == 410).count(), claimants - allowed);
        assert_eq!(daemon.state_of(&owner, &share), "consumed");
    }
    let file = daemon.share_file(&owner, &age_file(100));
    let statuses = claim_together(&daemon, &file, 100);
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1);
    assert_eq!(statuses.iter().filter(|status| **status == 409).count(), 99);
}

#[test]
fn the_same_claim_sent_again_gets_the_same_answer() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    for share in [daemon.share(&owner, &json!({})), daemon.share_file(&owner, &age_file(100))] {
        let message = share.claim([5; 16]);
        let (first, second) = (daemon.post("/v1/claim", &[], &message), daemon.post("/v1/claim", &[], &message));
        assert_eq!((first.status, second.status), (200, 200));
        assert_eq!(first.json()["capsule"], second.json()["capsule"]);
        assert_eq!(first.json()["lease"]["token"], second.json()["lease"]["token"]);
        assert_ne!(daemon.claim(&share).status, 200);
    }
    assert_eq!(daemon.metric("lockbox_share_claimed_total"), 2);
}

#[test]
fn without_proof_every_answer_is_the_same_and_with_proof_it_is_true() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let used = daemon.share(&owner, &json!({}));
    assert_eq!(daemon.claim(&used).status, 200);
    let revoked = daemon.share(&owner, &json!({}));
    assert_eq!(daemon.post(&revoked.path("/revoke"), &[("authorization", &owner.header)], &json!({})).status, 200);
    let armed = daemon.share(&owner, &json!({}));
    let leased = daemon.share_file(&owner, &age_file(100));
    lease(&daemon.claim(&leased));
    let missing = Share { created: armed.created.clone(), auth: [0; 32] };
    let mut answers = Vec::new();
    for share in [&used, &revoked, &armed, &leased, &missing] {
        let guess = Share { created: share.created.clone(), auth: random() };
        let mut message = guess.claim(random());
        if std::ptr::eq(share, &missing) {
            message["handle"] = json!("0000000000000");
        }
        let look = json!({ "handle": message["handle"], "auth": message["auth"] });
        for (path, message) in [("/v1/claim", &message), ("/v1/look", &look)] {
            let mut answer = daemon.post(path, &[], message);
            assert_eq!(answer.status, 404);
            answer.headers.retain(|(name, _)| name != "date");
            answers.push((answer.headers.clone(), answer.body));
        }
    }
    assert_eq!(daemon.metric("lockbox_share_misses_total"), answers.len() as u64);
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
    for (share, status, error) in
        [(&used, 410, "consumed"), (&revoked, 410, "revoked"), (&leased, 409, "leased"), (&armed, 200, "")]
    {
        let looked = daemon.look(share);
        assert_eq!(looked.status, status);
        let answer = daemon.claim(share);
        assert_eq!(answer.status, status);
        assert!(error.is_empty() || looked.body == answer.body, "{} {}", looked.text(), answer.text());
        if !error.is_empty() {
            assert_eq!(answer.error(), error);
            assert!(answer.json()["at"].as_u64().unwrap() > 1_700_000_000);
        }
    }
}

#[test]
fn a_share_ends_by_itself() {
    let daemon = Daemon::start(&QUICK);
    let owner = Owner::new();
    let share = daemon.share(&owner, &json!({ "expires_in": 1 }));
    crate::daemon::until("the share expires", || daemon.state_of(&owner, &share) == "expired");
    let answer = daemon.claim(&share);
    assert_eq!((answer.status, answer.error().as_str()), (410, "expired"));
}
