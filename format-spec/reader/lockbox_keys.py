"""Unlocks lockbox archives with key files and recovery codes as well, after ../format.md (section numbers are its).

Slots of age recipients are passed by: a reader of those needs an implementation of age.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import lockbox_format as fmt
from lockbox_format import BLOCK, Damaged, Fields, WrongKey, require

PASSPHRASE, KEY_FILE, RECOVERY, AGE, REWRAPPED = 1, 2, 3, 4, 16
KEY_SLOTS = (KEY_FILE, RECOVERY, AGE, PASSPHRASE + REWRAPPED, KEY_FILE + REWRAPPED, RECOVERY + REWRAPPED)
DESCRIPTION_AT, AGE_AT = 2320, 184
BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"


class Secrets(NamedTuple):
    passphrase: bytes | None = None
    key_file: bytes | None = None
    recovery_code: str | None = None


class KeySlot(NamedTuple):
    salt: bytes
    kdf: tuple[int, int, int] | None
    commitment: bytes
    nonce: bytes
    sealed: bytes
    ephemeral: bytes
    age: bytes


class Description(NamedTuple):
    created: fmt.Time
    label: str
    public: bytes | None
    recipient: str | None


def factors(kind: int, derives: bool) -> int:
    if kind & ~REWRAPPED == PASSPHRASE:
        return 2
    return 3 if kind & ~REWRAPPED == KEY_FILE and derives else 1


def decode_key_slot(data: bytes, kind: int) -> KeySlot:
    """Section 3.3."""
    require(kind in KEY_SLOTS, "key slot of an unknown kind")
    require(len(data) == BLOCK, "key slot has a wrong length")
    f = Fields(data, "key slot")
    salt = f.take(32)
    kdf = (f.u32(), f.u32(), f.u32())
    age = f.u16()
    given = f.u8()
    f.zero(1)
    derives = given & 2 != 0
    require(given == factors(kind, derives), "key slot has another combination of secrets")
    require(derives or kdf == (0, 0, 0), "key slot has parameters of a derivation that it does not have")
    require(age <= DESCRIPTION_AT - AGE_AT and (age > 0) == (kind == AGE), "key slot has an age file out of bounds")
    commitment, nonce, sealed, ephemeral = f.take(32), f.take(24), f.take(48), f.take(32)
    return KeySlot(salt, kdf if derives else None, commitment, nonce, sealed, ephemeral, f.take(age))


def decode_description(plain: bytes) -> Description:
    """Section 3.4."""
    require(len(plain) == BLOCK - DESCRIPTION_AT - 40, "description has a wrong length")
    f = Fields(plain, "description")
    created, form, label, length = f.time(), f.u8(), f.u8(), f.u16()
    try:
        text = f.take(label).decode()
        public = recipient = None
        if form == 1:
            require(length == 0, "description has a wrong form")
            public = f.take(32)
        elif form == 2:
            recipient = f.take(length).decode()
            require(recipient != "" and not packs(recipient), "description is not in its only form")
        elif form == 3:
            prefix = f.take(f.u8()).decode()
            bits = int.from_bytes(f.take((5 * length + 7) // 8), "little")
            recipient = prefix + "".join(BECH32[bits >> 5 * number & 31] for number in range(length))
            require(bits >> 5 * length == 0, "description is not in its only form")
            require(prefix.endswith("1") and packs(recipient), "description is not in its only form")
        else:
            raise Damaged("description has an unknown form")
    except UnicodeDecodeError:
        raise Damaged("description is not UTF-8") from None
    f.zero(f.left())
    return Description(created, text, public, recipient)


def packs(text: str) -> bool:
    prefix, one, data = text.rpartition("1")
    return one != "" and len(prefix.encode()) < 255 and all(c in BECH32 for c in data)


def describe(header: fmt.Header, number: int, volume_key: bytes) -> Description | None:
    """The description of a slot; None for a slot without one."""
    slot = header.slot(number)
    place = bytes([number, header.slots[number]])
    aad = fmt.associated_data("lockbox/v1/slot/description", header.archive, place, slot[:80])
    key = fmt.hkdf(volume_key, header.archive, "lockbox/v1/slot/description")
    sealed = slot[DESCRIPTION_AT:]
    try:
        return decode_description(fmt.xaes_open(key, sealed[:24], aad, sealed[24:], "description"))
    except Damaged:
        return None


def parse_recovery_code(text: str) -> bytes:
    """Section 3.6: the 16 bytes of a code."""
    digits = text.translate(str.maketrans({"O": "0", "o": "0", "I": "1", "l": "1", " ": "", "-": "", "\t": "", "\r": "", "\n": ""}))
    if not (digits.isascii() and digits.isdigit()):
        raise WrongKey("the recovery code has a typing error")
    groups = [int(digits[at : at + 6]) for at in range(0, len(digits), 6)]
    if len(digits) != 54 or any(group % 11 or group // 11 > 0xFFFF for group in groups):
        raise WrongKey("the recovery code has a typing error")
    values = b"".join((group // 11).to_bytes(2, "little") for group in groups)
    if hashlib.sha256(b"lockbox recovery code" + values[:16]).digest()[:2] != values[16:]:
        raise WrongKey("the groups of the recovery code do not belong together")
    return values[:16]


def derive(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(key)


def key_of(kind: int, slot: KeySlot, secrets: Secrets, archive: bytes) -> bytes | None:
    """Sections 3.3 and 3.5: the KEK, when the slot's secrets are there."""
    kind, rewrapped = kind & ~REWRAPPED, kind & REWRAPPED != 0
    file = None if secrets.key_file is None else hashlib.sha256(secrets.key_file).digest()
    if kind == KEY_FILE and slot.kdf is None and file is not None:
        kek = derive(file, slot.salt, b"lockbox/v1/slot/keyfile")
    elif kind == RECOVERY and secrets.recovery_code is not None:
        kek = derive(parse_recovery_code(secrets.recovery_code) + bytes(16), slot.salt, b"lockbox/v1/slot/recovery")
    elif slot.kdf is not None and secrets.passphrase is not None and (kind == PASSPHRASE or file is not None):
        memory, passes, lanes = slot.kdf
        bounded = 1 <= lanes <= 16 and 1 <= passes <= 64 and 8 * lanes <= memory <= 4 << 20
        require(bounded, "key slot has parameters out of bounds")
        given = secrets.passphrase if kind == PASSPHRASE or file is None else file + secrets.passphrase
        kek = Argon2id(salt=slot.salt, length=32, iterations=passes, lanes=lanes, memory_cost=memory).derive(given)
    else:
        return None
    if not rewrapped:
        return kek
    secret = X25519PrivateKey.from_private_bytes(fmt.hkdf(kek, archive, "lockbox/v1/slot/rewrap"))
    public = secret.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(slot.ephemeral))
    except ValueError:
        raise Damaged("key slot has a public half that is none") from None
    return derive(shared, archive, b"lockbox/v1/slot/rewrapped" + slot.ephemeral + public)


def unlock(header: fmt.Header, secrets: Secrets) -> bytes:
    """The volume key."""
    damage: Damaged | None = None
    for number, kind in enumerate(header.slots):
        if kind not in (PASSPHRASE, *KEY_SLOTS):
            continue
        try:
            if kind == PASSPHRASE:  # only whether it is one: those that have no other secret are tried at the end
                fmt.decode_slot(header.slot(number))
                continue
            slot = decode_key_slot(header.slot(number), kind)
            kek = key_of(kind, slot, secrets, header.archive)
        except Damaged as error:
            damage = error
            continue
        commitment = b"" if kek is None else fmt.hkdf(kek, header.archive, "lockbox/v1/slot/commit")
        if kek is None or not hmac.compare_digest(commitment, slot.commitment):
            continue
        aad = fmt.associated_data("lockbox/v1/slot", header.archive, bytes([number, kind]), header.slot(number)[:80])
        key = fmt.hkdf(kek, header.archive, "lockbox/v1/slot/wrap")
        try:
            return fmt.xaes_open(key, slot.nonce, aad, slot.sealed, f"key slot {number}")
        except Damaged as error:
            damage = error
    if secrets.passphrase is not None:
        try:
            return fmt.unlock(header, secrets.passphrase)
        except WrongKey:
            pass
    raise damage or WrongKey("wrong passphrase or key")
