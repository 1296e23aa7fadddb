//! Lists against the kernel's rules, and arbitrary bytes against the parser.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::format::tests::{mutated, noise};

/// Tags as setfacl(1) writes them: `u::rw-` is `(0x01, 6)`.
fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut out = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        out.extend_from_slice(&tag.to_le_bytes());
        out.extend_from_slice(&permissions.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
    }
    out
}

const NONE: u32 = u32::MAX;
/// u::rw-,u:1000:rwx,g::r-x,g:50:-w-,m::rwx,o::r--
const FULL: [(u16, u16, u32); 6] = [(1, 6, NONE), (2, 7, 1000), (4, 5, NONE), (8, 2, 50), (16, 7, NONE), (32, 4, NONE)];

fn acl(entries: &[(u16, u16, u32)]) -> Acl {
    Acl::parse(&value(entries)).unwrap().unwrap()
}

fn refused(entries: &[(u16, u16, u32)]) -> bool {
    matches!(Acl::parse(&value(entries)), Err(Error::Invalid(_)))
}

#[test]
fn a_list_comes_back_as_it_was() {
    assert_eq!(acl(&FULL).encode(), value(&FULL));
    // The id of an entry without a number is ignored.
    let careless = [(1, 6, 0), (4, 4, 7), (32, 4, 0)];
    assert_eq!(acl(&careless).encode(), value(&[(1, 6, NONE), (4, 4, NONE), (32, 4, NONE)]));
}

#[test]
fn no_entries_are_no_list() {
    assert_eq!(Acl::parse(b"").unwrap(), None);
    assert_eq!(Acl::parse(&value(&[])).unwrap(), None);
}

#[test]
fn a_malformed_list_is_refused() {
    let [owner, user, group, named, mask, others] = FULL;
    assert!(refused(&[owner, group]), "nobody else");
    assert!(refused(&[user, group, mask, others]), "no owner");
    assert!(refused(&[owner, others]), "no group");
    assert!(refused(&[owner, user, group, others]), "a user without a mask");
    assert!(refused(&[owner, group, named, others]), "a group without a mask");
    assert!(refused(&[owner, group, mask, mask, others]), "two masks");
    assert!(refused(&[owner, owner, group, others]), "two owners");
    assert!(refused(&[owner, group, user, mask, others]), "a user behind the group");
    assert!(refused(&[(1, 8, NONE), group, others]), "a fourth permission");
    assert!(refused(&[owner, (2, 7, NONE), group, mask, others]), "a user without a number");
    assert!(refused(&[owner, (3, 7, 1), group, others]), "an unknown kind");
    assert!(matches!(Acl::parse(&value(&FULL)[..51]), Err(Error::Invalid(_))), "cut off");
    assert!(matches!(Acl::parse(&[2, 0, 0]), Err(Error::Invalid(_))), "cut off in the head");
    let mut other_version = value(&FULL);
    other_version[0] = 1;
    assert!(matches!(Acl::parse(&other_version), Err(Error::Invalid(_))), "version 1");
    let mut long = FULL.to_vec();
    long.splice(1..2, (0..506).map(|id| (2, 7, id)));
    assert_eq!(acl(&long).encode().len(), MAX_BYTES - 4);
    long.insert(1, (2, 7, 600));
    assert!(matches!(Acl::parse(&value(&long)), Err(Error::AttributeTooLarge)));
}

#[test]
fn the_mode_shows_the_mask_and_without_one_the_group() {
    let [owner, user, group, _, _, others] = FULL;
    assert_eq!(acl(&FULL).mode_bits(), 0o674);
    assert!(!acl(&FULL).is_minimal());
    assert_eq!(acl(&[owner, group, others]).mode_bits(), 0o654);
    assert!(acl(&[owner, group, others]).is_minimal());
    assert_eq!(acl(&[owner, user, group, (16, 1, NONE), others]).mode_bits(), 0o614);
    assert!(!acl(&[owner, group, (16, 1, NONE), others]).is_minimal());
}

#[test]
fn chmod_sets_the_mask_and_leaves_the_named_alone() {
    let mut list = acl(&FULL);
    list.set_mode(0o100_750);
    assert_eq!(list, acl(&[(1, 7, NONE), (2, 7, 1000), (4, 5, NONE), (8, 2, 50), (16, 5, NONE), (32, 0, NONE)]));
    let mut minimal = acl(&[(1, 6, NONE), (4, 4, NONE), (32, 4, NONE)]);
    minimal.set_mode(0o123);
    assert_eq!(minimal.mode_bits(), 0o123);
}

#[test]
fn a_new_object_gets_what_both_the_list_and_its_mode_allow() {
    let (list, bits) = acl(&FULL).inherit(0o100_666);
    assert_eq!(bits, 0o664);
    let narrowed = [(1, 6, NONE), (2, 7, 1000), (4, 5, NONE), (8, 2, 50), (16, 6, NONE), (32, 4, NONE)];
    assert_eq!(list, Some(acl(&narrowed)));
    // Without a mask the group entry is narrowed, and the mode expresses everything.
    let (list, bits) = acl(&[(1, 7, NONE), (4, 7, NONE), (32, 5, NONE)]).inherit(0o040_751);
    assert_eq!((list, bits), (None, 0o751));
}

proptest! {
    #[test]
    fn no_input_panics(bytes in noise(300), damaged in mutated(value(&FULL)), mode in any::<u32>()) {
        for bytes in [bytes, damaged] {
            if let Ok(Some(mut list)) = Acl::parse(&bytes) {
                prop_assert!(list.mode_bits() <= 0o777);
                list.set_mode(mode);
                prop_assert_eq!(list.group_class() == AclQualifier::Mask || list.is_minimal(), true);
                prop_assert_eq!(list.mode_bits(), mode & 0o777);
                prop_assert_eq!(Acl::parse(&list.encode()).unwrap().unwrap(), list);
            }
        }
    }

    #[test]
    fn valid_lists_round_trip_and_inherit_within_the_mode(
        users in vec((0..8u16, 0..NONE), 0..20),
        groups in vec((0..8u16, 0..NONE), 0..20),
        own in any::<[u16; 4]>(),
        masked in any::<bool>(),
        mode in 0..0o7777u32,
    ) {
        let mut entries = vec![(1, own[0] & 7, NONE)];
        entries.extend(users.iter().map(|&(permissions, id)| (2, permissions, id)));
        entries.push((4, own[1] & 7, NONE));
        entries.extend(groups.iter().map(|&(permissions, id)| (8, permissions, id)));
        if masked || entries.len() > 2 {
            entries.push((16, own[2] & 7, NONE));
        }
        entries.push((32, own[3] & 7, NONE));
        let list = acl(&entries);
        prop_assert_eq!(list.encode(), value(&entries));
        let (inherited, bits) = list.inherit(mode);
        prop_assert_eq!(bits, list.mode_bits() & mode & 0o777);
        if let Some(inherited) = inherited {
            prop_assert_eq!(inherited.mode_bits(), bits);
            prop_assert_eq!(Acl::parse(&inherited.encode()).unwrap(), Some(inherited));
        }
    }
}
