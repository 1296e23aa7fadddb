//! A share as bytes. Little-endian; the layout stands in the table below and nowhere else.
//!
//! ```text
//!   0  u64  checksum of all that follows, keyed with the segment's nonce and the record's place
//!   8  u32  length of the whole record, a multiple of 8
//!  12  u32  version
//!  16  16   key
//!  32  u64  created    40  u64  expires    48  u64  revoked, 0 for not
//!  56  32   verifier of the receiver       88  32   verifier of the owner
//! 120  u32  bytes of the capsule
//! 124  u32  where the capsule is: 0 in this record, 0xffffffff nowhere, else the place of the record that has it
//! 128  u8   claims allowed
//! 129  u8   1 when there is a payload
//! 130  u16  zero
//! 132  u32  bytes of slots that follow
//! 136       payload, when there is one: id 16, length u64, digest 32
//!           slots: tag u8 (0 free, 1 leased, 2 ended), flags u8; unless free: claim id 16, token 16, claimed u64, end u64
//!           capsule, when it is here; zeros up to the multiple of 8
//! ```

use std::hash::Hasher;

use lockbox_share_protocol::capsule::MAX_CAPSULE;
use lockbox_share_protocol::message::MAX_CLAIMS;
use lockbox_share_protocol::token::{Digest, Verifier};
use siphasher::sip::SipHasher13;

use super::contract::SpoolEntry;
use super::env::StoreTime;
use super::share::{ActiveLease, ClaimSlot, ClaimSlots, EndedClaim, Key, Share};

/// Bytes before the payload and the slots.
pub(crate) const FIXED: usize = 136;
const PAYLOAD: usize = 56;
const SLOT: usize = 50;
pub(crate) const MAX_RECORD: usize = FIXED + PAYLOAD + MAX_CLAIMS as usize * SLOT + MAX_CAPSULE + 8;

const HERE: u32 = 0;
const NOWHERE: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CapsuleRef<'a> {
    Here(&'a [u8]),
    /// In the record at this place of the same segment.
    At(u32),
    Nowhere,
}

/// Position to which a record's checksum is bound.
#[derive(Clone, Copy)]
pub(crate) struct RecordPosition {
    pub(crate) nonce: u64,
    pub(crate) at: u64,
}

pub(crate) fn encode(key: &Key, share: &Share, content: CapsuleRef<'_>, position: RecordPosition, out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + FIXED, 0);
    if let Some(payload) = &share.payload {
        out.extend_from_slice(&payload.id);
        out.extend_from_slice(&payload.length.to_le_bytes());
        out.extend_from_slice(payload.digest.as_bytes());
    }
    let slots = out.len();
    for slot in share.claims.slots() {
        encode_slot(slot, out);
    }
    let slots = (out.len() - slots) as u32;
    let content = match content {
        CapsuleRef::Here(capsule) => {
            out.extend_from_slice(capsule);
            HERE
        }
        CapsuleRef::At(at) => at,
        CapsuleRef::Nowhere => NOWHERE,
    };
    out.resize(start + (out.len() - start).next_multiple_of(8), 0);
    let fixed = &mut out[start..start + FIXED];
    fixed[12..16].copy_from_slice(&share.version.to_le_bytes());
    fixed[16..32].copy_from_slice(&key.0);
    fixed[32..40].copy_from_slice(&share.created.0.to_le_bytes());
    fixed[40..48].copy_from_slice(&share.expires.0.to_le_bytes());
    fixed[48..56].copy_from_slice(&share.revoked.map_or(0, |at| at.0.max(1)).to_le_bytes());
    fixed[56..88].copy_from_slice(share.auth.as_bytes());
    fixed[88..120].copy_from_slice(share.owner.as_bytes());
    fixed[120..124].copy_from_slice(&share.capsule_bytes.to_le_bytes());
    fixed[124..128].copy_from_slice(&content.to_le_bytes());
    fixed[128] = share.claims.allowed;
    fixed[129] = u8::from(share.payload.is_some());
    fixed[132..136].copy_from_slice(&slots.to_le_bytes());
    seal(&mut out[start..], position);
}

/// Writes the length and the checksum of a record that has this position.
pub(crate) fn seal(bytes: &mut [u8], position: RecordPosition) {
    let length = bytes.len() as u32;
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    let sum = checksum(position, &bytes[8..]);
    bytes[..8].copy_from_slice(&sum.to_le_bytes());
}

fn encode_slot(slot: &ClaimSlot, out: &mut Vec<u8>) {
    let (tag, flags, id, token, claimed, end) = match slot {
        ClaimSlot::Free => {
            out.extend_from_slice(&[0, 0]);
            return;
        }
        ClaimSlot::Leased(l) => (1, u8::from(l.sent) | u8::from(l.finishing) << 1, l.id, l.token, l.claimed, l.until),
        ClaimSlot::Ended(e) => (2, u8::from(e.completed), e.id, e.token, e.claimed, e.at),
    };
    out.extend_from_slice(&[tag, flags]);
    out.extend_from_slice(&id);
    out.extend_from_slice(&token);
    out.extend_from_slice(&claimed.0.to_le_bytes());
    out.extend_from_slice(&end.0.to_le_bytes());
}

/// Computes the checksum of a record. It is keyed, so that no capsule can contain a valid record,
/// and bound to the position, so that no record can be moved.
fn checksum(position: RecordPosition, bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(position.nonce, position.at);
    hasher.write(bytes);
    hasher.finish()
}

/// Computes the checksum of the head of a segment, which names the nonce of its records.
pub(crate) fn head_checksum(bytes: &[u8]) -> u64 {
    checksum(RecordPosition { nonce: 0, at: 0 }, bytes)
}

/// The length that a record claims to have, when it can be one.
pub(crate) fn record_length(head: &[u8]) -> Option<usize> {
    let length = u32_at(head, 8)? as usize;
    (length.is_multiple_of(8) && (FIXED..=MAX_RECORD).contains(&length)).then_some(length)
}

/// Validated record: its checksum matched and its fields are consistent.
pub(crate) struct Record<'a> {
    pub(crate) key: Key,
    pub(crate) share: Share,
    pub(crate) content: CapsuleRef<'a>,
}

/// Reads the record at the start of `bytes`; `None` when it is torn, moved, or inconsistent.
pub(crate) fn decode(bytes: &[u8], position: RecordPosition) -> Option<Record<'_>> {
    if is_sound(bytes, position) { parse(bytes) } else { None }
}

pub(crate) fn is_sound(bytes: &[u8], position: RecordPosition) -> bool {
    let record = record_length(bytes).and_then(|length| bytes.get(..length));
    record.is_some_and(|record| u64_at(record, 0) == Some(checksum(position, &record[8..])))
}

/// Parses a record with a valid checksum. An attacker that wrote the file can compute checksums
/// too, so every field is checked.
pub(crate) fn parse(bytes: &[u8]) -> Option<Record<'_>> {
    let length = record_length(bytes)?;
    let bytes = bytes.get(..length)?;
    let (allowed, has_payload) = (bytes[128], bytes[129]);
    if !(1..=MAX_CLAIMS).contains(&allowed) || has_payload > 1 || bytes[130..132] != [0, 0] {
        return None;
    }
    let mut rest = &bytes[FIXED..];
    let mut payload = None;
    if has_payload == 1 {
        let head;
        (head, rest) = rest.split_at_checked(PAYLOAD)?;
        let (id, digest) = (head[..16].try_into().ok()?, head[24..].try_into().ok()?);
        payload = Some(SpoolEntry { id, length: u64_at(head, 16)?, digest: Digest::new(digest) });
    }
    let (mut slots, rest) = rest.split_at_checked(u32_at(bytes, 132)? as usize)?;
    let mut claims = ClaimSlots::new(allowed);
    for slot in claims.slots_mut() {
        (*slot, slots) = decode_slot(slots)?;
    }
    let capsule_bytes = u32_at(bytes, 120)?;
    let content = match u32_at(bytes, 124)? {
        HERE => CapsuleRef::Here(rest.get(..capsule_bytes as usize)?),
        NOWHERE => CapsuleRef::Nowhere,
        at => CapsuleRef::At(at),
    };
    if !slots.is_empty() || capsule_bytes as usize > MAX_CAPSULE {
        return None;
    }
    let share = Share {
        // Each change adds one; no honest share comes near the half, and none may wrap to be older
        // than its own past.
        version: Some(u32_at(bytes, 12)?).filter(|version| *version <= u32::MAX / 2)?,
        created: StoreTime(u64_at(bytes, 32)?),
        expires: StoreTime(u64_at(bytes, 40)?),
        revoked: Some(u64_at(bytes, 48)?).filter(|at| *at != 0).map(StoreTime),
        auth: Verifier::new(bytes[56..88].try_into().ok()?),
        owner: Verifier::new(bytes[88..120].try_into().ok()?),
        capsule_bytes,
        payload,
        claims,
    };
    Some(Record { key: Key(bytes[16..32].try_into().ok()?), share, content })
}

fn decode_slot(bytes: &[u8]) -> Option<(ClaimSlot, &[u8])> {
    let (&[tag, flags], rest) = bytes.split_first_chunk::<2>()?;
    if tag == 0 {
        return (flags == 0).then_some((ClaimSlot::Free, rest));
    }
    let (slot, rest) = rest.split_at_checked(SLOT - 2)?;
    let (id, token) = (slot[..16].try_into().ok()?, slot[16..32].try_into().ok()?);
    let (claimed, end) = (StoreTime(u64_at(slot, 32)?), StoreTime(u64_at(slot, 40)?));
    let slot = match (tag, flags) {
        (1, 0..=3) => {
            let (sent, finishing) = (flags & 1 != 0, flags & 2 != 0);
            ClaimSlot::Leased(ActiveLease { id, token, claimed, until: end, sent, finishing })
        }
        (2, 0..=1) => ClaimSlot::Ended(EndedClaim { id, token, claimed, at: end, completed: flags == 1 }),
        _ => return None,
    };
    Some((slot, rest))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::tests::conformance::{large, small};
    use super::*;

    const POSITION: RecordPosition = RecordPosition { nonce: 7, at: 64 };

    fn shares() -> Vec<Share> {
        let ended =
            EndedClaim { id: [1; 16], token: [2; 16], claimed: StoreTime(3), at: StoreTime(4), completed: true };
        let running = ActiveLease {
            id: [5; 16],
            token: [6; 16],
            claimed: StoreTime(7),
            until: StoreTime(8),
            sent: true,
            finishing: false,
        };
        let mut busy = Share::new(&super::super::contract::NewShare { claims: 8, ..large(1) }, StoreTime(9));
        busy.claims.slots_mut()[0] = ClaimSlot::Ended(ended);
        busy.claims.slots_mut()[7] = ClaimSlot::Leased(running);
        busy.revoked = Some(StoreTime(77));
        vec![Share::new(&small(1), StoreTime(5)), busy]
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        for share in shares() {
            let capsule = vec![9; share.capsule_bytes as usize];
            for content in [CapsuleRef::Here(&capsule), CapsuleRef::At(4096), CapsuleRef::Nowhere] {
                let mut bytes = Vec::new();
                encode(&Key([3; 16]), &share, content, POSITION, &mut bytes);
                let record = decode(&bytes, POSITION).unwrap();
                assert!(record.share == share && record.content == content && record.key == Key([3; 16]));
                assert_eq!(record_length(&bytes), Some(bytes.len()));
                assert!(bytes.len() <= MAX_RECORD);
            }
        }
    }

    #[test]
    fn a_flipped_moved_or_cut_record_is_none() {
        let mut bytes = Vec::new();
        encode(&Key([3; 16]), &shares()[1], CapsuleRef::Here(&[9; 12]), POSITION, &mut bytes);
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x10;
            assert!(decode(&flipped, POSITION).is_none(), "flipped at {at}");
            assert!(decode(&bytes[..at], POSITION).is_none(), "cut at {at}");
        }
        assert!(decode(&bytes, RecordPosition { nonce: 7, at: 72 }).is_none());
        assert!(decode(&bytes, RecordPosition { nonce: 8, at: 64 }).is_none());
    }
}
