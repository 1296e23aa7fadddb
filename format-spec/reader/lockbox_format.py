"""The structures and seals of a lockbox archive, version 1, after ../format.md (section numbers are its)."""

from __future__ import annotations

import hashlib
import hmac
import struct
from functools import partialmethod
from typing import NamedTuple

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

BLOCK = 4096
HEADER_BYTES = 33 * BLOCK
HEADER_START = (0, 320)
MIN_BLOCKS = 385
RESERVED = ((0, 65), (320, 385))
LOG = (65, 320)
FEATURE_LOG = 1
MAGIC = bytes.fromhex("894C4F434B424F580D0A1A0A00000000")
VERSION = 1
MAX_DATA = 131_072
MAX_NODE = 16_280
MAX_VALUE = 3_500
MAX_INO = 2**48 - 1
MAX_OFFSET = 2**63 - 1
NO_TRIM = 2**64 - 1
ROOT_INO = 1
NODE, DATA, PACKED, DELTA = 1, 2, 3, 4
LIVE, SNAPSHOTS = 1, 3
INODE, INLINE, XATTR, XATTR_PIECE, DIR_INDEX, DIR_LIST, EXTENT, ORPHAN, TRIM = 1, 2, 3, 4, 5, 6, 7, 16, 17
SNAPSHOT = 34
FIFO, CHAR, DIRECTORY, BLOCKDEV, FILE, SYMLINK, SOCKET = 1, 2, 4, 6, 8, 10, 12


class ReaderError(Exception):
    """What the user is told."""

    verdict = "damaged"


class Damaged(ReaderError):
    pass


class Unsupported(ReaderError):
    verdict = "unsupported"


class NotArchive(ReaderError):
    verdict = "not an archive"


class WrongKey(ReaderError):
    verdict = "wrong passphrase"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Damaged(message)


class Fields:
    """Cursor over a structure; running out is damage (section 1)."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data, self.at, self.what = data, 0, what

    def take(self, count: int) -> bytes:
        require(self.at + count <= len(self.data), f"{self.what} ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def left(self) -> int:
        return len(self.data) - self.at

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    u8 = partialmethod(number, 1)
    u16 = partialmethod(number, 2)
    u32 = partialmethod(number, 4)
    u64 = partialmethod(number, 8)

    def time(self) -> Time:
        seconds, nanos = struct.unpack("<qI", self.take(12))
        require(nanos < 10**9, f"{self.what} has a time beyond its second")
        return Time(seconds, nanos)

    def zero(self, count: int) -> None:
        require(not any(self.take(count)), f"{self.what} has a reserved field that is not zero")

    def end(self) -> None:
        require(self.left() == 0, f"{self.what} is too long")


class Time(NamedTuple):
    seconds: int
    nanos: int


class Key(NamedTuple):
    object: int
    kind: int
    sub: int


LEAST, GREATEST = Key(0, 0, 0), Key(2**64 - 1, 255, 2**64 - 1)


# --- section 3: header ------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    copy: int
    archive: bytes
    sequence: int
    commitment: bytes
    slots: bytes
    mac: bytes
    features: int
    read_only_features: int
    compatible_features: int
    data: bytes

    def slot(self, number: int) -> bytes:
        return self.data[BLOCK * (number + 1) : BLOCK * (number + 2)]


def decode_header(data: bytes, copy: int) -> Header:
    if data[:16].ljust(16, b"\0") != MAGIC:
        raise NotArchive("not a lockbox archive")
    f = Fields(data.ljust(16, b"\0"), "header")
    f.take(16)
    version = f.u32()
    if version != VERSION:
        raise Unsupported(f"format version {version} is not supported")
    require(len(data) == HEADER_BYTES, "header ends early")
    checksum = hashlib.sha256(data[:4064] + bytes(32) + data[BLOCK:]).digest()
    require(checksum == data[4064:BLOCK], f"header copy {copy} has a wrong checksum")
    suite, found, reserved, incompatible = f.u16(), f.u8(), f.u8(), f.u64()
    if suite != 1:
        raise Unsupported(f"cipher suite {suite} is not supported")
    if incompatible & ~FEATURE_LOG:
        raise Unsupported(f"unknown incompatible features: {incompatible & ~FEATURE_LOG:#x}")
    require(found == copy, f"header copy {copy} says that it is copy {found}")
    require(reserved == 0, "header has a reserved field that is not zero")
    read_only, compatible, archive, sequence = f.u64(), f.u64(), f.take(16), f.u64()
    commitment, slots = f.take(32), f.take(32)
    f.zero(3896)
    return Header(copy, archive, sequence, commitment, slots, f.take(32), incompatible, read_only, compatible, data)


class PassphraseSlot(NamedTuple):
    salt: bytes
    memory_kib: int
    passes: int
    lanes: int
    commitment: bytes
    nonce: bytes
    sealed: bytes


def decode_slot(data: bytes) -> PassphraseSlot:
    f = Fields(data, "key slot")
    salt, memory, passes, lanes = f.take(32), f.u32(), f.u32(), f.u32()
    f.zero(4)
    slot = PassphraseSlot(salt, memory, passes, lanes, f.take(32), f.take(24), f.take(528))
    f.take(3464)
    f.end()
    return slot


# --- section 4: cryptography ------------------------------------------------------------------------------------------


def hkdf(key: bytes, archive: bytes, label: str) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=archive, info=label.encode()).derive(key)


def xaes_key(key: bytes, nonce: bytes) -> bytes:
    """The AES-256-GCM key of XAES-256-GCM for this nonce."""
    aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    first = int.from_bytes(aes.update(bytes(16)), "big") << 1
    if first >> 128:
        first ^= 1 << 128 | 0x87
    halves = (int.from_bytes(bytes([0, i, 0x58, 0]) + nonce[:12], "big") ^ first for i in (1, 2))
    return b"".join(aes.update(half.to_bytes(16, "big")) for half in halves)


def xaes_open(key: bytes, nonce: bytes, aad: bytes, sealed: bytes, what: str) -> bytes:
    try:
        return AESGCM(xaes_key(key, nonce)).decrypt(nonce[12:], sealed, aad)
    except InvalidTag:
        raise Damaged(f"{what} failed authentication") from None


def associated_data(label: str, archive: bytes, *rest: bytes) -> bytes:
    return label.encode() + VERSION.to_bytes(4, "little") + archive + b"".join(rest)


def siphash24(key: bytes, data: bytes) -> int:
    mask = 2**64 - 1
    k0, k1 = struct.unpack("<QQ", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & mask

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = (v[0] + v[1]) & mask
            v[2] = (v[2] + v[3]) & mask
            v[1], v[3] = rotate(v[1], 13) ^ v[0], rotate(v[3], 16) ^ v[2]
            v[0] = (rotate(v[0], 32) + v[3]) & mask
            v[2] = (v[2] + v[1]) & mask
            v[3], v[1] = rotate(v[3], 21) ^ v[0], rotate(v[1], 17) ^ v[2]
            v[2] = rotate(v[2], 32)

    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def decode_sealed_part(plain: bytes, number: int) -> bytes:
    """Section 3.2: the volume key."""
    f = Fields(plain, f"key slot {number}")
    volume_key = f.take(32)
    f.take(32)
    f.time()
    f.zero(2)
    label = f.u16()
    require(label <= 255, f"key slot {number} has a label that is too long")
    try:
        f.take(label).decode()
    except UnicodeDecodeError:
        raise Damaged(f"key slot {number} has a label that is not UTF-8") from None
    f.zero(f.left())
    return volume_key


def unlock(header: Header, passphrase: bytes) -> bytes:
    """Section 3.2: the volume key."""
    damage: Damaged | None = None
    for number, kind in enumerate(header.slots):
        if kind != 1:
            continue
        try:
            slot = decode_slot(header.slot(number))
            bounded = 1 <= slot.lanes <= 16 and 1 <= slot.passes <= 64 and 8 * slot.lanes <= slot.memory_kib <= 4 << 20
            require(bounded, f"key slot {number} has parameters out of bounds")
        except Damaged as error:
            damage = error
            continue
        kdf = Argon2id(salt=slot.salt, length=32, iterations=slot.passes, lanes=slot.lanes, memory_cost=slot.memory_kib)
        kek = kdf.derive(passphrase)
        if not hmac.compare_digest(hkdf(kek, header.archive, "lockbox/v1/slot/commit"), slot.commitment):
            continue
        clear = header.slot(number)[:80]
        aad = associated_data("lockbox/v1/slot", header.archive, bytes([number, kind]), clear)
        key = hkdf(kek, header.archive, "lockbox/v1/slot/wrap")
        try:
            return decode_sealed_part(xaes_open(key, slot.nonce, aad, slot.sealed, f"key slot {number}"), number)
        except Damaged as error:
            damage = error
    raise damage or WrongKey("wrong passphrase")


def authenticate(header: Header, volume_key: bytes) -> None:
    """Section 3.1: commitment and MAC."""
    commitment = hkdf(volume_key, header.archive, "lockbox/v1/commitment")
    require(hmac.compare_digest(commitment, header.commitment), "the header does not belong to this volume key")
    covered = header.data[:4032] + bytes(64) + header.data[BLOCK:]
    mac = hmac.digest(hkdf(volume_key, header.archive, "lockbox/v1/header"), covered, "sha256")
    require(hmac.compare_digest(mac, header.mac), "the header failed authentication")


# --- section 5: pages -------------------------------------------------------------------------------------------------


class Prologue(NamedTuple):
    kind: int
    compressed: bool
    blocks: int
    stored_length: int
    plain_length: int
    generation: int
    owner: int
    position: int

    def has_cells(self) -> bool:
        return self.kind in (DATA, PACKED)

    def main_length(self) -> int:
        """Bytes of the body with its padding, or of the head."""
        return self.blocks * BLOCK - 104 - (self.stored_length if self.has_cells() else 0)


def message_iv(nonce: bytes, message: int) -> bytes:
    """Section 4.2: 0 is the prologue, 1 the body or head, 2 + i cell i."""
    return nonce[12:23] + bytes([nonce[23] ^ message])


def decode_prologue(data: bytes) -> Prologue:
    f = Fields(data, "prologue")
    kind, compression, blocks, stored, plain = f.u8(), f.u8(), f.u16(), f.u32(), f.u32()
    f.zero(4)
    p = Prologue(kind, compression == 1, blocks, stored, plain, f.u64(), f.u64(), f.u64())
    f.zero(8)
    f.end()
    require(kind in (NODE, DATA, PACKED, DELTA), f"prologue has an unknown kind: {kind}")
    require(compression == 0 or (compression == 1 and kind == NODE), "prologue has a wrong compression")
    require(1 <= blocks <= 64 and stored <= blocks * BLOCK - 104, "prologue has lengths that do not fit")
    if kind == NODE:
        require(1 <= blocks <= 3 and plain <= MAX_NODE if p.compressed else blocks == 4, "node has a wrong length")
        require(1 <= p.owner <= 5 and p.position <= 15, "prologue names a wrong tree or level")
    elif kind == DATA:
        require(1 <= p.owner <= MAX_INO and p.position + plain <= MAX_OFFSET, "prologue names a wrong inode or offset")
    else:
        require(p.owner == 0 and p.position == 0, "prologue names an owner that the kind does not have")
    if kind in (DATA, PACKED):
        require(1 <= plain <= MAX_DATA, "prologue has a wrong plain length")
        require(1 <= stored <= blocks * BLOCK - 104 - 28, "prologue leaves no room for a head")
    elif not p.compressed:
        require(plain == stored, "prologue has lengths that differ")
    return p


class Pointer(NamedTuple):
    address: int
    blocks: int
    generation: int
    tag: bytes


def decode_run(number: int, longest: int) -> tuple[int, int]:
    address, blocks = number & MAX_INO, number >> 48
    require(1 <= blocks <= longest, f"run of a wrong length: block={address} blocks={blocks}")
    return address, blocks


def decode_pointer(data: bytes) -> Pointer | None:
    """None is the null pointer."""
    f = Fields(data, "pointer")
    run, generation, tag = f.u64(), f.u64(), f.take(16)
    f.end()
    if run >> 48 == 0:
        require(not any(data), "null pointer is not zero")
        return None
    return Pointer(*decode_run(run, 64), generation, tag)


Cell = NamedTuple("Cell", [("at", int), ("stored", int), ("raw", bool), ("plain_length", int), ("tag", bytes)])
Item = NamedTuple("Item", [("ino", int), ("offset", int), ("start", int), ("length", int)])
CellTable = NamedTuple("CellTable", [("size", int), ("cells", "list[Cell]"), ("items", "list[Item]")])


def decode_data_head(head: bytes, stored_length: int, plain: int) -> CellTable:
    """Section 5.3; a cell's `at` counts from the first cell."""
    f = Fields(head, "data head")
    count, log2 = f.u16(), f.u8()
    f.zero(1)
    item_count = f.u16()
    f.zero(2)
    require(12 <= log2 <= 17, "data head has a wrong cell size")
    size = 1 << log2
    require(1 <= plain <= MAX_DATA and count == -(-plain // size), "data head has a wrong number of cells")
    require(item_count <= 4096, "data head has too many items")
    cells, at = [], 0
    for number in range(count):
        length, tag, cell_plain = f.u32(), f.take(16), min(size, plain - number * size)
        raw, stored = length >> 31 == 1, length & 2**31 - 1
        require(stored == cell_plain if raw else stored > 0, "cell has a wrong length")
        cells.append(Cell(at, stored, raw, cell_plain, tag))
        at += stored
    require(at == stored_length, "cells take another length than their page says")
    items = [Item(f.u64(), f.u64(), f.u32(), f.u32()) for _ in range(item_count)]
    end = 0
    for item in sorted(items, key=lambda item: item.start):
        require(1 <= item.ino <= MAX_INO and item.length > 0 and item.start >= end, "packed items are wrong or overlap")
        end = item.start + item.length
        require(end <= plain and item.offset + item.length <= MAX_OFFSET, "packed item is out of bounds")
    f.zero(f.left())
    return CellTable(size, cells, items)


def decompress(frame: bytes, plain: int, what: str) -> bytes:
    """One zstd frame of exactly `plain` bytes."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        require(size in (plain, zstandard.CONTENTSIZE_UNKNOWN), f"{what} has another length")
        data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=plain, allow_extra_data=False)
    except zstandard.ZstdError:
        raise Damaged(f"{what} does not decompress") from None
    require(len(data) == plain, f"{what} has another length")
    return data


# --- sections 6 to 9: nodes, values, records --------------------------------------------------------------------------


class Root(NamedTuple):
    pointer: Pointer | None
    level: int


class Node(NamedTuple):
    level: int
    tree: int
    lower: Key
    upper: Key
    entries: list[tuple[Key, bytes | Pointer]]


def decode_key(f: Fields) -> Key:
    return Key(f.u64(), f.u8(), f.u64())


def decode_node(data: bytes) -> Node:
    require(len(data) <= MAX_NODE, "node is too long")
    f = Fields(data, "node")
    level, tree, count = f.u8(), f.u8(), f.u16()
    f.zero(4)
    lower, upper = decode_key(f), decode_key(f)
    require(level <= 15 and 1 <= tree <= 5 and lower < upper, "node has a wrong level, tree or fence")
    require(count > 0 or (level == 0 and (lower, upper) == (LEAST, GREATEST)), "node is empty")
    entries: list[tuple[Key, bytes | Pointer]] = []
    for number in range(count):
        key = decode_key(f)
        if number == 0:
            require(key == lower if level else key >= lower, "node has a first key that does not fit its fence")
        else:
            require(key > entries[-1][0], "node has keys out of order")
        require(key < upper, "node has a key behind its fence")
        if level:
            pointer = decode_pointer(f.take(32))
            require(pointer is not None, "internal node has a null pointer")
            entries.append((key, pointer))
        else:
            length = f.u16()
            require(length <= MAX_VALUE, "leaf has a value that is too long")
            entries.append((key, f.take(length)))
    f.end()
    return Node(level, tree, lower, upper, entries)


class Inode(NamedTuple):
    mode: int
    uid: int
    gid: int
    links: int
    size: int
    bytes: int
    atime: Time
    mtime: Time
    ctime: Time
    btime: Time
    rdev: int
    flags: int
    parent: int
    next_sequence: int
    trim: int
    next_piece: int

    @property
    def type(self) -> int:
        return self.mode >> 12 & 15


def decode_inode(data: bytes) -> Inode:
    f = Fields(data, "inode")
    inode = Inode(f.u32(), f.u32(), f.u32(), f.u32(), f.u64(), f.u64(), f.time(), f.time(), f.time(), f.time(),
                  f.u32(), f.u32(), f.u64(), f.u64(), f.u64(), f.u32())  # fmt: skip
    f.zero(28)
    f.end()
    require(inode.size <= MAX_OFFSET and inode.parent <= MAX_INO and inode.flags < 8, "inode is out of bounds")
    return inode


class Extent(NamedTuple):
    page: Pointer
    start: int
    length: int
    born: int


def decode_extent(data: bytes) -> Extent:
    f = Fields(data, "extent")
    page, start, length, born = decode_pointer(f.take(32)), f.u32(), f.u32(), f.u64()
    f.zero(8)
    f.end()
    require(page is not None and length > 0 and start + length <= MAX_DATA, "extent is out of bounds")
    return Extent(page, start, length, born)


class Entry(NamedTuple):
    name: bytes
    type: int
    sequence: int
    ino: int


def check_name(name: bytes) -> None:
    good = len(name) > 0 and b"/" not in name and b"\0" not in name and name not in (b".", b"..")
    require(good, f"impossible name: {name!r}")


def check_entry(entry: Entry) -> Entry:
    check_name(entry.name)
    require(entry.type <= 15 and 1 <= entry.ino <= MAX_INO, "directory entry has a wrong target")
    return entry


def decode_list(data: bytes, sequence: int) -> Entry:
    f = Fields(data, "directory list")
    length, kind, ino = f.u8(), f.u8(), f.u64()
    entry = Entry(f.take(length), kind, sequence, ino)
    f.end()
    return check_entry(entry)


def decode_index(data: bytes) -> list[Entry]:
    f = Fields(data, "directory index")
    entries = []
    while f.left():
        length, kind, sequence, ino = f.u8(), f.u8(), f.u64(), f.u64()
        entries.append(check_entry(Entry(f.take(length), kind, sequence, ino)))
    return entries


class Xattr(NamedTuple):
    name: bytes
    length: int
    piece: int
    value: bytes


def decode_xattrs(data: bytes) -> list[Xattr]:
    f = Fields(data, "xattr record")
    xattrs = []
    while f.left():
        name_length, flags, length, piece = f.u8(), f.u8(), f.u32(), f.u32()
        require(flags <= 1 and (flags == 1) == (piece > 0), "xattr has wrong flags")
        require(name_length > 0 and length <= 65_536, "xattr is out of bounds")
        name = f.take(name_length)
        require(b"\0" not in name, "xattr has an impossible name")
        xattrs.append(Xattr(name, length, piece, b"" if piece else f.take(length)))
    return xattrs


def decode_root(f: Fields) -> Root:
    root = Root(decode_pointer(f.take(32)), f.u8())
    f.zero(7)
    require(root.level <= 15 and (root.pointer is not None or root.level == 0), "root has a wrong level")
    return root


class Snapshot(NamedTuple):
    generation: int
    time: Time
    root: Root
    inodes: int
    name: bytes


def decode_snapshot(data: bytes) -> Snapshot:
    f = Fields(data, "snapshot")
    generation, time = f.u64(), f.time()
    f.zero(4)
    snapshot = Snapshot(generation, time, decode_root(f), f.u64(), f.take(f.u8()))
    f.end()
    if snapshot.name:  # an empty name: being destroyed, its tree must not be read
        check_name(snapshot.name)
    return snapshot


class Pending(NamedTuple):
    """Section 9.1 rule 7: the log that is still to be laid over a record."""

    generation: int
    tag: bytes
    number: int
    entry_tag: bytes


def decode_pending(f: Fields) -> Pending:
    generation, tag, number = f.u64(), f.take(16), f.u32()
    f.zero(4)
    require(number > 0, "commit record names no entry of the log that is pending")
    return Pending(generation, tag, number, f.take(16))


class Origin(NamedTuple):
    """Section 9.1 rule 9: the commit of the archive that a backup shows."""

    session: bytes
    first: int
    generation: int
    tag: bytes
    time: Time


def decode_origin(f: Fields) -> Origin:
    origin = Origin(f.take(16), f.u64(), f.u64(), f.take(16), f.time())
    f.zero(4)
    require(origin.generation > 0, "commit record is of a backup of no commit")
    return origin


class Record(NamedTuple):
    generation: int
    previous_tag: bytes
    session: bytes
    session_first: int
    header_sequence: int
    time: Time
    two_barrier: bool
    closed: bool
    roots: list[Root]
    next_ino: int
    inodes: int
    used_blocks: int
    total_blocks: int
    next_dead: int
    next_snapshot: int
    newest_snapshot: int
    checkpoint: int
    newest_snapshot_id: int
    delta_list: Pointer | None
    allocated: list[tuple[int, int, bytes]]
    freed: list[tuple[int, int]]
    pending: Pending | None
    origin: Origin | None


def decode_record(data: bytes) -> Record:
    require(len(data) == 4056, "commit record has a wrong length")
    f = Fields(data, "commit record")
    generation, previous, session, first, sequence, time = f.u64(), f.take(16), f.take(16), f.u64(), f.u64(), f.time()
    flags = f.u32()
    require(generation > 0 and flags <= 15, "commit record has a wrong generation or flags")
    roots = [decode_root(f) for _ in range(5)]
    counters = [f.u64() for _ in range(9)]
    require(counters[0] <= MAX_INO + 1, "commit record has a wrong next inode")
    delta = decode_pointer(f.take(32))
    pages, runs = f.u16(), f.u16()
    f.zero(4)
    require(24 * pages + 8 * runs + 12 * (flags & 4) + 8 * (flags & 8) <= 3672, "commit record has lists beyond its end")
    allocated = [(*decode_run(f.u64(), 64), f.take(16)) for _ in range(pages)]
    freed = [decode_run(f.u64(), 65_535) for _ in range(runs)]
    pending = decode_pending(f) if flags & 4 else None
    origin = decode_origin(f) if flags & 8 else None
    f.zero(f.left())
    return Record(generation, previous, session, first, sequence, time, flags & 1 == 1, flags & 2 == 2, roots,
                  *counters, delta, allocated, freed, pending, origin)  # fmt: skip


# --- section 9.4: entries of the log ----------------------------------------------------------------------------------


class LogHead(NamedTuple):
    generation: int
    tag: bytes
    number: int
    length: int
    previous: bytes
    time: Time
    blocks: int


def decode_log_head(data: bytes) -> LogHead:
    f = Fields(data, "log entry")
    head = LogHead(f.u64(), f.take(16), f.u32(), f.u32(), f.take(16), f.time(), f.u16())
    f.zero(2)
    f.end()
    require(head.generation > 0 and head.number > 0, "log entry has a wrong generation or number")
    require(head.number > 1 or not any(head.previous), "the first log entry names one before it")
    require(1 <= head.blocks <= 255 and 32 <= head.length <= head.blocks * BLOCK - 120, "log entry has a wrong length")
    return head


Range = NamedTuple("Range", [("ino", int), ("first", int), ("end", int)])
LogPiece = NamedTuple("LogPiece", [("ino", int), ("offset", int), ("data", bytes)])


class LogEntry(NamedTuple):
    next_ino: int
    inodes: int
    ranges: list[Range]
    records: list[tuple[Key, bytes | None]]
    pieces: list[LogPiece]


def in_place(key: Key) -> bool:
    """Section 6.2 rule 1, for tree 1."""
    if key.kind in (ORPHAN, TRIM):
        return key.object == 0
    return key.object > 0 and INODE <= key.kind <= EXTENT and (key.kind > INLINE or key.sub == 0)


def decode_log_entry(body: bytes, length: int) -> LogEntry:
    """`body` with its padding."""
    require(not any(body[length:]), "log entry has padding that is not zero")
    f = Fields(body[:length], "log entry")
    next_ino, inodes, range_count, record_count, piece_count = f.u64(), f.u64(), f.u32(), f.u32(), f.u32()
    f.zero(4)
    require(next_ino <= MAX_INO + 1, "log entry has a wrong next inode")
    require(24 * range_count + 19 * record_count + 21 * piece_count <= f.left(), "log entry counts more than it has")
    ranges = [Range(f.u64(), f.u64(), f.u64()) for _ in range(range_count)]
    require(all(1 <= r.ino <= MAX_INO and r.first < r.end for r in ranges), "log entry has a wrong range")
    records: list[tuple[Key, bytes | None]] = []
    for _ in range(record_count):
        key, size = decode_key(f), f.u16()
        require(in_place(key) and (not records or key > records[-1][0]), "log entry has a record out of place")
        require(size <= MAX_VALUE or size == 0xFFFF, "log entry has a value that is too long")
        records.append((key, None if size == 0xFFFF else f.take(size)))
    pieces: list[LogPiece] = []
    end = (0, 0)
    for _ in range(piece_count):
        piece = LogPiece(f.u64(), f.u64(), f.take(f.u32()))
        require(1 <= piece.ino <= MAX_INO and (piece.ino, piece.offset) >= end, "log entry has pieces out of order")
        end = (piece.ino, piece.offset + len(piece.data))
        require(len(piece.data) > 0 and end[1] <= MAX_OFFSET, "log entry has a piece of a wrong length")
        pieces.append(piece)
    f.end()
    return LogEntry(next_ino, inodes, ranges, records, pieces)
