"""Makes small archives for the tests from ../format.md: everything in memory, one commit after the other, with entries of the log between them."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Any, NamedTuple

import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

import lockbox_format as fmt
from lockbox_format import BLOCK, GREATEST, LEAST, Key

NULL = bytes(32)


def pack_run(address: int, blocks: int) -> bytes:
    return struct.pack("<Q", address | blocks << 48)


def pack_key(key: Key) -> bytes:
    return struct.pack("<QBQ", *key)


class Page(NamedTuple):
    address: int
    blocks: int
    generation: int
    tag: bytes

    def pack(self) -> bytes:
        return pack_run(self.address, self.blocks) + struct.pack("<Q", self.generation) + self.tag


class Writer:
    """Collects records of the live tree; `commit` writes them all anew."""

    def __init__(self, passphrase: bytes = b"open sesame", features: int = 0) -> None:
        self.features = features
        self.archive, self.volume_key, self.kdf = os.urandom(16), os.urandom(32), (64, 1, 1)
        self.image = bytearray(os.urandom(fmt.MIN_BLOCKS * BLOCK))
        self.generation, self.tag = 0, bytes(16)
        self.live: dict[Key, bytes] = {}
        self.snapshots: dict[Key, bytes] = {}
        self.allocated: list[Page] = []
        self.next_sequence: dict[int, int] = {}
        self.live_root = bytes(40)
        self._begin_log()
        self._write_header(passphrase)

    def _key(self, label: str) -> bytes:
        return fmt.hkdf(self.volume_key, self.archive, f"lockbox/v1/{label}")

    def _write_header(self, passphrase: bytes, number: int = 2) -> None:
        memory, passes, lanes = self.kdf
        salt, nonce = os.urandom(32), os.urandom(24)
        kek = Argon2id(salt=salt, length=32, iterations=passes, lanes=lanes, memory_cost=memory).derive(passphrase)
        clear = salt + struct.pack("<IIII", memory, passes, lanes, 0) + fmt.hkdf(kek, self.archive, "lockbox/v1/slot/commit")
        part = self.volume_key + bytes(32) + struct.pack("<qIHH", 1, 2, 0, 5) + b"label"
        key = fmt.xaes_key(fmt.hkdf(kek, self.archive, "lockbox/v1/slot/wrap"), nonce)
        aad = fmt.associated_data("lockbox/v1/slot", self.archive, bytes([number, 1]), clear)
        slot = clear + nonce + AESGCM(key).encrypt(nonce[12:], part.ljust(512, b"\0"), aad) + os.urandom(3464)
        for copy, start in enumerate(fmt.HEADER_START):
            kinds = bytes(number) + b"\1" + bytes(31 - number)
            head = fmt.MAGIC + struct.pack("<IHBBQQQ", 1, 1, copy, 0, self.features, 0, 0) + self.archive + struct.pack("<Q", 1)
            head = (head + self._key("commitment") + kinds).ljust(4032, b"\0")
            slots = os.urandom(number * BLOCK) + slot + os.urandom((31 - number) * BLOCK)
            head += hmac.digest(self._key("header"), head + bytes(64) + slots, "sha256")
            head += hashlib.sha256(head + bytes(32) + slots).digest()
            self.image[start * BLOCK : start * BLOCK + fmt.HEADER_BYTES] = head + slots

    def page(self, kind: int, body: bytes, plain: int, owner: int, position: int, compressed: bool = False,
             cells: list[bytes] | None = None) -> Page:  # fmt: skip
        """With cells, `body` is the head without its entries' tags: 8 bytes, a length for each cell, the items."""
        least = len(body) + sum(16 + len(cell) for cell in cells or [])
        blocks = 4 if kind == fmt.NODE and not compressed else -(-(least + 104) // BLOCK)
        address, generation, nonce = len(self.image) // BLOCK, self.generation + 1, os.urandom(24)
        stored = sum(map(len, cells)) if cells else len(body)
        prologue = struct.pack("<BBHIII", kind, compressed, blocks, stored, plain, 0)
        prologue += struct.pack("<QQQQ", generation, owner, position, 0)
        place = struct.pack("<Q", address)
        cipher = AESGCM(fmt.xaes_key(self._key("page"), nonce))

        def seal(number: int, data: bytes, label: str, *rest: bytes) -> bytes:
            aad = fmt.associated_data(f"lockbox/v1/{label}", self.archive, place, *rest)
            return cipher.encrypt(fmt.message_iv(nonce, number), data, aad)

        sealed_cells = [seal(2 + i, cell, "cell", prologue, bytes([i])) for i, cell in enumerate(cells or [])]
        if cells:
            at = 8 + 4 * len(cells)
            entries = [body[8 + 4 * i : 12 + 4 * i] + cell[-16:] for i, cell in enumerate(sealed_cells)]
            body = body[:8] + b"".join(entries) + body[at:]
        room = blocks * BLOCK - 104 - (stored if cells else 0)
        main = seal(1, body.ljust(room, b"\0"), "head" if cells else "body", prologue)
        self.image += nonce + seal(0, prologue, "prologue") + main + b"".join(cell[:-16] for cell in sealed_cells)
        page = Page(address, blocks, generation, main[-16:])
        self.allocated.append(page)
        return page

    def data_page(self, data: bytes, log2: int, compress: bool, ino: int = 0, offset: int = 0,
                  items: list[tuple[int, int, int, int]] | None = None) -> Page:  # fmt: skip
        plain = [data[at : at + (1 << log2)] for at in range(0, len(data), 1 << log2)]
        cells = [zstandard.compress(cell) if compress else cell for cell in plain]
        head = struct.pack("<HBBHH", len(cells), log2, 0, len(items or []), 0)
        head += b"".join(struct.pack("<I", len(cell) | (0 if compress else 1 << 31)) for cell in cells)
        head += b"".join(struct.pack("<QQII", *item) for item in items or [])
        return self.page(fmt.PACKED if items else fmt.DATA, head, len(data), ino, offset, cells=cells)

    def extent(self, ino: int, offset: int, page: Page, start: int, length: int) -> None:
        self.live[Key(ino, fmt.EXTENT, offset)] = page.pack() + struct.pack("<IIQQ", start, length, page.generation, 0)

    def inode(self, ino: int, mode: int, size: int = 0, links: int = 1, parent: int = 0, trim: int = fmt.NO_TRIM,
              mtime: tuple[int, int] = (1_700_000_000, 123_456_789)) -> None:  # fmt: skip
        value = struct.pack("<IIIIQQ", mode, os.getuid(), os.getgid(), links, size, 0)
        value += struct.pack("<qI", *mtime) * 4 + struct.pack("<IIQQQI", 0, 0, parent, 3, trim, 1)
        self.live[Key(ino, fmt.INODE, 0)] = value + bytes(28)

    def name_hash(self, ino: int, name: bytes) -> int:
        return fmt.siphash24(self._key("name")[:16], struct.pack("<Q", ino) + name)

    def entry(self, directory: int, name: bytes, ino: int, kind: int) -> None:
        sequence = self.next_sequence.setdefault(directory, 3)
        self.next_sequence[directory] += 1
        self.live[Key(directory, fmt.DIR_LIST, sequence)] = struct.pack("<BBQ", len(name), kind, ino) + name
        index = Key(directory, fmt.DIR_INDEX, self.name_hash(directory, name))
        self.live[index] = self.live.get(index, b"") + struct.pack("<BBQQ", len(name), kind, sequence, ino) + name

    def snapshot(self, number: int, name: bytes, root: bytes | None = None, seconds: int = 5) -> None:
        """Keeps the tree of the last commit; the next one says so."""
        value = struct.pack("<QqII", self.generation, seconds, 6, 0) + (self.live_root if root is None else root)
        self.snapshots[Key(number, fmt.SNAPSHOT, 0)] = value + struct.pack("<QB", 40 + number, len(name)) + name

    def _node(self, tree: int, level: int, lower: Key, upper: Key, entries: list[tuple[Key, bytes]]) -> Page:
        body = struct.pack("<BBHI", level, tree, len(entries), 0) + pack_key(lower) + pack_key(upper)
        for key, value in entries:
            body += pack_key(key) + (value if level else struct.pack("<H", len(value)) + value)
        packed = zstandard.compress(body)
        if len(packed) + 104 <= 3 * BLOCK:
            return self.page(fmt.NODE, packed, len(body), tree, level, compressed=True)
        return self.page(fmt.NODE, body, len(body), tree, level)

    def tree(self, number: int, records: dict[Key, bytes], leaf_bytes: int = 12_000, fanout: int = 5) -> bytes:
        """Writes a tree bottom-up; answers its root field."""
        level, groups = 0, [[]]  # type: tuple[int, list[list[tuple[Key, bytes]]]]
        for key, value in sorted(records.items()):
            if sum(len(v) + 19 for _, v in groups[-1]) + len(value) > leaf_bytes:
                groups.append([])
            groups[-1].append((key, value))
        while True:
            fences = [LEAST] + [group[0][0] for group in groups[1:]] + [GREATEST]
            if level:
                groups[0][0] = (LEAST, groups[0][0][1])
            pages = [self._node(number, level, fences[i], fences[i + 1], group) for i, group in enumerate(groups)]
            if len(pages) == 1:
                return pages[0].pack() + bytes([level]) + bytes(7)
            children = [(fences[i], page.pack()) for i, page in enumerate(pages)]
            groups = [children[at : at + fanout] for at in range(0, len(children), fanout)]
            level += 1

    def pending(self) -> bytes:
        """What a commit names that leaves the present log to be laid over it."""
        return struct.pack("<Q", self.generation) + self.tag + struct.pack("<II", self.log_number, 0) + self.log_tag

    def _begin_log(self) -> None:
        self.log_block, self.log_number, self.log_tag = fmt.LOG[0], 0, bytes(16)

    def log_entry(self, records: dict[Key, bytes | None] | None = None, pieces: list[tuple[int, int, bytes]] | None = None,
                  ranges: list[tuple[int, int, int]] | None = None, **wrong: Any) -> tuple[int, int]:  # fmt: skip
        """Writes the next entry; answers its first block and the one behind it. `wrong` replaces what the entry or its place would be."""
        records, pieces, ranges = records or {}, pieces or [], ranges or []
        body = struct.pack("<QQIIII", 1000, 77, len(ranges), len(records), len(pieces), 0)
        body += b"".join(struct.pack("<QQQ", *part) for part in ranges)
        for key, value in sorted(records.items()):
            body += pack_key(key) + (struct.pack("<H", 0xFFFF) if value is None else struct.pack("<H", len(value)) + value)
        body += b"".join(struct.pack("<QQI", ino, offset, len(data)) + data for ino, offset, data in sorted(pieces))
        body = wrong.get("body", body)
        blocks, block = wrong.get("blocks", -(-(len(body) + 120) // BLOCK)), wrong.get("block", self.log_block)
        number, nonce = self.log_number + 1, os.urandom(24)
        head = struct.pack("<Q", wrong.get("generation", self.generation)) + wrong.get("tag", self.tag)
        head += struct.pack("<II", wrong.get("number", number), len(body)) + wrong.get("previous", self.log_tag)
        head += struct.pack("<qIHH", 5, 6, wrong.get("said", blocks), 0)
        cipher, place = AESGCM(fmt.xaes_key(self._key("log"), nonce)), struct.pack("<Q", block)

        def seal(message: int, data: bytes, label: str, *rest: bytes) -> bytes:
            aad = fmt.associated_data(f"lockbox/v1/log/{label}", self.archive, place, *rest)
            return cipher.encrypt(fmt.message_iv(nonce, message), data, aad)

        sealed = nonce + seal(0, head, "head") + seal(1, body.ljust(blocks * BLOCK - 120, wrong.get("padding", b"\0")), "body", head)
        self.image[block * BLOCK : (block + blocks) * BLOCK] = sealed
        self.log_block, self.log_number, self.log_tag = block + blocks, number, sealed[-16:]
        return block, block + blocks

    def commit(self, flags: int = 0, index: int | None = None, pending: bytes = b"") -> None:
        """With `index` the record goes to that slot, whatever its generation says; with `pending` tree 1 stays as it is."""
        snapshots = self.tree(fmt.SNAPSHOTS, self.snapshots) if self.snapshots else bytes(40)
        self.live_root = self.live_root if pending else self.tree(fmt.LIVE, self.live)
        roots = self.live_root + bytes(40) + snapshots + bytes(40 * 2)
        self.generation = generation = self.generation + 1
        record = struct.pack("<Q", generation) + self.tag + bytes(range(16)) + struct.pack("<QQqII", 1, 1, 5, 6, flags | (4 if pending else 0))
        counters = (1000, len(self.live), 0, len(self.image) // BLOCK, 1, 1, 0, 1, 0)
        record += roots + struct.pack("<9Q", *counters) + NULL + struct.pack("<HHI", len(self.allocated), 0, 0)
        record += b"".join(pack_run(page.address, page.blocks) + page.tag for page in self.allocated) + pending
        self.allocated = []
        self._begin_log()
        own, nonce = 32 * (generation % 2) + generation // 2 % 32, os.urandom(24)
        index = own if index is None else index
        aad = fmt.associated_data("lockbox/v1/commit", self.archive, bytes([index]))
        sealed = AESGCM(fmt.xaes_key(self._key("commit"), nonce)).encrypt(nonce[12:], record.ljust(4056, b"\0"), aad)
        self.tag = sealed[-16:]
        at = (33 + 320 * (index // 32) + index % 32) * BLOCK
        self.image[at : at + BLOCK] = nonce + sealed
