#!/usr/bin/env python3
"""Lists and extracts lockbox archives, version 1: an independent reader written from ../format.md (section numbers are its).

It is small rather than fast and never writes to the archive.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import getpass
import heapq
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import BinaryIO, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import lockbox_format as fmt
from lockbox_format import BLOCK, Damaged, Entry, Inode, Key, Node, Pointer, Prologue, Record, Root, require
from lockbox_keys import Secrets, unlock


def slot_index(generation: int) -> int:
    return 32 * (generation % 2) + generation // 2 % 32


def slot_block(index: int) -> int:
    return 33 + 320 * (index // 32) + index % 32


class Unsealed(NamedTuple):
    """An opened page: `body` is what is stored, without padding; of data pages it is all cells, and `table` says where each lies."""

    prologue: Prologue
    body: bytes
    tag: bytes
    table: fmt.CellTable | None


class Piece(NamedTuple):
    offset: int
    data: bytes


def without(pieces: list[Piece], first: int, end: int) -> list[Piece]:
    """The parts of the pieces outside of first..end."""
    parts = []
    for offset, data in pieces:
        parts += [Piece(offset, data[: max(first - offset, 0)]), Piece(max(offset, end), data[max(end - offset, 0) :])]
    return [part for part in parts if part.data]


class Log:
    """What entries of the log lay over the trees (section 9.5): by key the value, or None for a record that is gone, and pieces of files."""

    def __init__(self) -> None:
        self.records: dict[Key, bytes | None] = {}
        self.pieces: dict[int, list[Piece]] = {}
        self.entries: list[fmt.LogEntry] = []

    def lay(self, entry: fmt.LogEntry) -> None:
        for ino, first, end in entry.ranges:
            self.pieces[ino] = without(self.pieces.get(ino, []), first, end)
        for key, value in entry.records:
            self.records[key] = value
            if key.kind == fmt.INODE and value is None:
                self.pieces.pop(key.object, None)
        for ino, offset, data in entry.pieces:
            self.pieces[ino] = without(self.pieces.get(ino, []), offset, offset + len(data)) + [Piece(offset, data)]
        self.entries.append(entry)


def extends(head: fmt.LogHead, generation: int, tag: bytes) -> bool:
    return (head.generation, head.tag) == (generation, tag)


class Archive:
    """An unlocked archive at the commit that section 10.1 trusts."""

    def __init__(self, file: BinaryIO, secrets: Secrets | bytes) -> None:
        self.file = file
        self.blocks = os.fstat(file.fileno()).st_size // BLOCK
        self.warnings: list[str] = []
        self.header = self._choose_header()
        self.id = self.header.archive
        # Bytes are a passphrase.
        volume_key = unlock(self.header, Secrets(secrets) if isinstance(secrets, bytes) else secrets)
        fmt.authenticate(self.header, volume_key)
        self._page_key, self._commit_key, self._log_key, self._name_key = (
            fmt.hkdf(volume_key, self.id, f"lockbox/v1/{label}") for label in ("page", "commit", "log", "name")
        )
        self.has_log = self.header.features & fmt.FEATURE_LOG != 0
        self.reserved = fmt.RESERVED + ((fmt.LOG,) if self.has_log else ())
        self._open_page = lru_cache(64)(self._open_page_uncached)
        self._node = lru_cache(512)(self._node_uncached)
        records, heads = self._authentic_records(), self._log_heads()
        self.record, tag = self._choose_record(records, heads)
        self.log = Log()
        self._lay_log(tag, max(records), heads)
        self.live = self.record.roots[fmt.LIVE - 1]
        require(self.live.pointer is not None, "the archive has no live tree")

    # Sections 3 and 10: header and record

    def _read(self, address: int, blocks: int) -> bytes:
        data = os.pread(self.file.fileno(), blocks * BLOCK, address * BLOCK)
        require(len(data) == blocks * BLOCK, f"the file ends early: block={address} blocks={blocks}")
        return data

    def _choose_header(self) -> fmt.Header:
        good: list[fmt.Header] = []
        failures: list[fmt.ReaderError] = []
        for copy, start in enumerate(fmt.HEADER_START):
            data = os.pread(self.file.fileno(), fmt.HEADER_BYTES, start * BLOCK)
            try:
                good.append(fmt.decode_header(data, copy))
            except fmt.ReaderError as error:
                failures.append(error)
        damaged = any(isinstance(failure, Damaged) for failure in failures)
        require(self.blocks >= fmt.MIN_BLOCKS or not (good or damaged), f"the file is truncated: blocks={self.blocks}")
        if not good:
            gravity = (fmt.NotArchive, fmt.Damaged, fmt.Unsupported)
            raise max(failures, key=lambda error: gravity.index(type(error)))
        self.warnings += [f"one header copy is unusable: {error}" for error in failures]
        return max(good, key=lambda header: header.sequence)

    def _authentic_records(self) -> dict[int, tuple[Record, bytes]]:
        records = {}
        for index in range(64):
            data = self._read(slot_block(index), 1)
            aad = fmt.associated_data("lockbox/v1/commit", self.id, bytes([index]))
            try:
                plain = fmt.xaes_open(self._commit_key, data[:24], aad, data[24:], "commit record")
            except Damaged:
                continue  # random from creation, torn, or rejected earlier
            # What opens was made by a holder of the key: what does not decode is no tear.
            record = fmt.decode_record(plain)
            require(slot_index(record.generation) == index, f"commit record in a foreign slot: slot={index}")
            records[record.generation] = (record, data[-16:])
        return records

    def _choose_record(self, records: dict[int, tuple[Record, bytes]], heads: dict[int, fmt.LogHead]) -> tuple[Record, bytes]:
        require(len(records) > 0, "no commit record is authentic")
        require(max(records) <= 2**64 - 1 - 2**48, "commit number is too great")
        newest, tag = records[max(records)]
        chosen = newest
        try:
            self._verify(newest)
        except Damaged as error:
            # A number that recovery rejected is not used again, so the one before may be further away.
            before = records.get(max((g for g in records if g < newest.generation), default=0))
            durable = newest.two_barrier or newest.closed or any(extends(head, newest.generation, tag) for head in heads.values())
            if before and before[1] == newest.previous_tag and not durable and self._is_verified(before[0]):
                chosen, tag = before
                self.warnings.append(f"commit {newest.generation} never completed, reading the one before: {error}")
            else:
                self.warnings.append(f"DAMAGED: commit {newest.generation} is incomplete: {error}")
        require(chosen.total_blocks <= self.blocks, f"the file is truncated: want={chosen.total_blocks} blocks={self.blocks}")
        require(self.has_log or chosen.pending is None, "the commit needs a log, and the header has none: an older header was put back")
        if self.header.sequence < chosen.header_sequence:
            self.warnings.append("the header is older than the archive: removed passphrases may be back")
        return chosen, tag

    def _is_verified(self, record: Record) -> bool:
        try:
            self._verify(record)
        except Damaged:
            return False
        return True

    def _verify(self, record: Record) -> None:
        """Section 10.1: every listed page opens whole with its tag, and the file is as long as the record says."""
        require(record.total_blocks <= self.blocks, f"the file is truncated: want={record.total_blocks} blocks={self.blocks}")
        for address, blocks, tag in record.allocated:
            page = self._unseal(address, blocks)
            require(page.tag == tag, f"page is not the one listed: block={address}")
            if page.prologue.compressed:
                fmt.decompress(page.body, page.prologue.plain_length, "node")

    # Sections 9.4, 9.5 and 10.2: the log

    def _log_heads(self) -> dict[int, fmt.LogHead]:
        """By block, every entry that begins in the log, of whatever record."""
        heads = {}
        for block in range(*fmt.LOG) if self.has_log else ():
            try:
                plain = self._open_log(block, self._read(block, 1)[:104], 0)
            except Damaged:
                continue  # random, a later part of an entry, or torn
            try:
                heads[block] = fmt.decode_log_head(plain)
                require(block + heads[block].blocks <= fmt.LOG[1], "log entry reaches beyond the log")
            except Damaged as error:
                heads.pop(block, None)
                self.warnings.append(f"DAMAGED: {error}: block={block}")
        return heads

    def _open_log(self, block: int, data: bytes, message: int, head: bytes = b"") -> bytes:
        """`data` is the entry from its beginning; message 0 is its head, 1 the body."""
        sealed, label = (data[104:], "body") if message else (data[24:104], "head")
        aad = fmt.associated_data(f"lockbox/v1/log/{label}", self.id, block.to_bytes(8, "little"), head)
        try:
            return AESGCM(fmt.xaes_key(self._log_key, data[:24])).decrypt(fmt.message_iv(data[:24], message), sealed, aad)
        except InvalidTag:
            raise Damaged("log entry failed authentication") from None

    def _lay_log(self, tag: bytes, newest: int, heads: dict[int, fmt.LogHead]) -> None:
        """Section 10.2: the entries that count, and whether one is missing that did."""
        record, pending = self.record, self.record.pending
        of = (pending.generation, pending.tag) if pending else (record.generation, tag)
        ours = {block: head for block, head in heads.items() if extends(head, *of)}
        wanted = pending.number if pending else 0 if record.closed else 255
        block, number, before = fmt.LOG[0], 0, bytes(16)
        problem = "it is not the one that the commit names" if pending else None
        torn = None
        while number < wanted and block in ours:
            head = ours[block]
            if (head.number, head.previous) != (number + 1, before):
                break
            data = self._read(block, head.blocks)
            try:
                body = self._open_log(block, data, 1, self._open_log(block, data[:104], 0))
            except Damaged:
                torn = head
                break
            try:
                self.log.lay(fmt.decode_log_entry(body, head.length))
            except Damaged as error:
                problem = str(error)
                break
            block, number, before = block + head.blocks, number + 1, data[-16:]
        if pending and (number, before) == (pending.number, pending.entry_tag):
            problem = None
        elif not pending and any(at >= block and head.number > number + (not record.closed) for at, head in ours.items()):
            problem = problem or "later ones are there"
        if problem:
            self.warnings.append(f"DAMAGED: entry {number + 1} of the log is lost, what was synced from it on is missing: {problem}")
        elif torn:
            self.warnings.append(f"entry {torn.number} of the log is incomplete: it was interrupted, or damaged since; what it had may be missing")
        if any(head.generation > newest for head in heads.values()):
            self.warnings.append("DAMAGED: the newest commit record is lost, entries of the log extend it")

    # Section 5: pages

    def _unseal(self, address: int, blocks: int) -> Unsealed:
        """The page at this run, opened whole."""
        reserved = any(address < end and address + blocks > start for start, end in self.reserved)
        require(not reserved and address + blocks <= self.blocks, f"pointer outside of the pages: block={address}")
        data = self._read(address, blocks)
        nonce, place = data[:24], address.to_bytes(8, "little")
        cipher = AESGCM(fmt.xaes_key(self._page_key, nonce))

        def open_message(number: int, sealed: bytes, label: str, *rest: bytes) -> bytes:
            aad = fmt.associated_data(f"lockbox/v1/{label}", self.id, place, *rest)
            return cipher.decrypt(fmt.message_iv(nonce, number), sealed, aad)

        try:
            plain = open_message(0, data[24:88], "prologue")
            prologue = fmt.decode_prologue(plain)
            require(prologue.blocks == blocks, f"page has another length: block={address}")
            end = 88 + prologue.main_length() + 16
            tag = data[end - 16 : end]
            main = open_message(1, data[88:end], "head" if prologue.has_cells() else "body", plain)
            if not prologue.has_cells():
                return Unsealed(prologue, main[: prologue.stored_length], tag, None)
            table = fmt.decode_data_head(main, prologue.stored_length, prologue.plain_length)
            right = (prologue.kind == fmt.PACKED) == (len(table.items) > 0)
            require(right, f"page has wrong items: block={address}")
            body = b""
            for number, cell in enumerate(table.cells):
                sealed = data[end + cell.at : end + cell.at + cell.stored] + cell.tag
                body += open_message(2 + number, sealed, "cell", plain, bytes([number]))
        except InvalidTag:
            raise Damaged(f"page failed authentication: block={address}") from None
        return Unsealed(prologue, body, tag, table)

    def _open_page_uncached(self, pointer: Pointer) -> Unsealed:
        where = f"block={pointer.address} generation={pointer.generation}"
        page = self._unseal(pointer.address, pointer.blocks)
        require(page.tag == pointer.tag, f"page is not the one that its pointer names: {where}")
        require(page.prologue.generation == pointer.generation, f"page has another generation: {where}")
        return page

    def _page_data(self, pointer: Pointer, start: int, length: int) -> bytes:
        """Section 5.3: plain bytes start..start + length of a data page."""
        prologue, body, _, table = self._open_page(pointer)
        require(table is not None, f"page is not a data page: block={pointer.address}")
        require(start + length <= prologue.plain_length, f"extent reaches beyond its page: block={pointer.address}")
        first, last = start // table.size, (start + length - 1) // table.size
        parts = []
        for cell in table.cells[first : last + 1]:
            stored = body[cell.at : cell.at + cell.stored]
            parts.append(stored if cell.raw else fmt.decompress(stored, cell.plain_length, "cell"))
        return b"".join(parts)[start - first * table.size :][:length]

    # Section 6: trees

    def _node_uncached(self, pointer: Pointer) -> Node:
        prologue, body, _, _ = self._open_page_uncached(pointer)
        require(prologue.kind == fmt.NODE, f"page is not a node: block={pointer.address}")
        node = fmt.decode_node(fmt.decompress(body, prologue.plain_length, "node") if prologue.compressed else body)
        same = (prologue.owner, prologue.position) == (node.tree, node.level)
        require(same, f"node differs from its prologue: block={pointer.address}")
        return node

    def scan(self, root: Root, tree: int, first: Key, end: Key) -> Iterator[tuple[Key, bytes]]:
        """The records first..end in order."""
        if root.pointer is not None:
            yield from self._scan(root.pointer, (tree, root.level, fmt.LEAST, fmt.GREATEST), first, end)

    def _scan(self, pointer: Pointer, want: tuple[int, int, Key, Key], first: Key, end: Key) -> Iterator[tuple[Key, bytes]]:
        node = self._node(pointer)
        tree, level, _, upper = want
        found = (node.tree, node.level, node.lower, node.upper)
        require(found == want, f"node is not the one that its parent names: block={pointer.address}")
        for number, (key, value) in enumerate(node.entries):
            if isinstance(value, bytes):
                if first <= key < end:
                    yield key, value
                continue
            limit = node.entries[number + 1][0] if number + 1 < len(node.entries) else upper
            if key < end and first < limit:
                yield from self._scan(value, (tree, level - 1, key, limit), first, end)

    def get(self, key: Key) -> bytes | None:
        if key in self.log.records:
            return self.log.records[key]
        after = Key(key.object, key.kind, key.sub + 1)
        return next((value for _, value in self.scan(self.live, fmt.LIVE, key, after)), None)

    def records(self, ino: int, kind: int) -> Iterator[tuple[int, bytes]]:
        first, end = Key(ino, kind, 0), Key(ino, kind + 1, 0)
        laid = sorted((key, value) for key, value in self.log.records.items() if first <= key < end and value is not None)
        tree = (record for record in self.scan(self.live, fmt.LIVE, first, end) if record[0] not in self.log.records)
        for key, value in heapq.merge(tree, laid):
            yield key.sub, value

    # Section 7: files

    def _hash(self, ino: int, name: bytes) -> int:
        return fmt.siphash24(self._name_key[:16], ino.to_bytes(8, "little") + name)

    def inode(self, ino: int) -> Inode:
        value = self.get(Key(ino, fmt.INODE, 0))
        require(value is not None, f"inode is missing: inode={ino}")
        inode = fmt.decode_inode(value)
        # Section 9.5 rule 5.
        return inode._replace(size=max([inode.size] + [p.offset + len(p.data) for p in self.pieces(ino, inode)]))

    def pieces(self, ino: int, inode: Inode) -> list[Piece]:
        return self.log.pieces.get(ino, []) if inode.type == fmt.FILE else []

    def entries(self, directory: int) -> Iterator[tuple[Entry, Inode]]:
        """The listing, each entry checked against the index and its inode."""
        names = set()
        for sequence, value in self.records(directory, fmt.DIR_LIST):
            entry = fmt.decode_list(value, sequence)
            index = self.get(Key(directory, fmt.DIR_INDEX, self._hash(directory, entry.name)))
            where = f"directory={directory} name={entry.name!r}"
            require(index is not None and entry in fmt.decode_index(index), f"list and index differ: {where}")
            require(entry.name not in names, f"name twice: {where}")
            names.add(entry.name)
            inode = self.inode(entry.ino)
            require(inode.type == entry.type and inode.links > 0, f"entry and inode differ: {where}")
            require(inode.type != fmt.DIRECTORY or inode.parent == directory, f"directory has another parent: {where}")
            yield entry, inode
        require(len(names) == self.inode(directory).size, f"directory has a wrong number of entries: inode={directory}")

    def content(self, ino: int, inode: Inode) -> Iterator[Piece]:
        """Sections 7.3 and 9.5 rule 6 for the whole file, holes left out; later pieces lie over those before them."""
        laid = self.pieces(ino, inode)
        if laid:
            inode = inode._replace(size=fmt.decode_inode(self.get(Key(ino, fmt.INODE, 0)) or b"").size)
        yield from self._stored(ino, inode)
        yield from laid

    def _stored(self, ino: int, inode: Inode) -> Iterator[Piece]:
        inline = self.get(Key(ino, fmt.INLINE, 0))
        if inline is not None:
            yield Piece(0, inline[: inode.size])
            return
        end, at = min(inode.size, inode.trim), 0
        for offset, value in self.records(ino, fmt.EXTENT):
            if offset >= end:
                break
            extent = fmt.decode_extent(value)
            require(offset >= at, f"extents overlap: inode={ino} offset={offset}")
            at = offset + extent.length
            data = self._page_data(extent.page, extent.start, extent.length)
            yield Piece(offset, data[: end - offset])

    def target(self, ino: int, inode: Inode) -> bytes:
        require(1 <= inode.size <= 4095, f"symlink has a wrong length: inode={ino}")
        target = b"".join(piece.data for piece in self.content(ino, inode))
        require(len(target) == inode.size and b"\0" not in target, f"symlink has a wrong target: inode={ino}")
        return target

    def xattrs(self, ino: int) -> Iterator[tuple[bytes, bytes]]:
        for hashed, record in self.records(ino, fmt.XATTR):
            for xattr in fmt.decode_xattrs(record):
                require(self._hash(ino, xattr.name) == hashed, f"xattr has a wrong hash: inode={ino}")
                value = xattr.value
                if xattr.piece:
                    pieces = [self.get(Key(ino, fmt.XATTR_PIECE, xattr.piece << 32 | i)) for i in range(-(-xattr.length // 3000))]
                    right = all(p is not None and len(p) == min(3000, xattr.length - 3000 * i) for i, p in enumerate(pieces))
                    require(right, f"xattr has wrong pieces: inode={ino} name={xattr.name!r}")
                    value = b"".join(piece for piece in pieces if piece is not None)
                yield xattr.name, value

    def snapshots(self) -> Iterator[tuple[int, fmt.Snapshot]]:
        root = self.record.roots[fmt.SNAPSHOTS - 1]
        for key, value in self.scan(root, fmt.SNAPSHOTS, fmt.LEAST, fmt.GREATEST):
            # Strays are passed by, whatever they say.
            if key.kind == fmt.SNAPSHOT and key.sub == 0:
                snapshot = fmt.decode_snapshot(value)
                if snapshot.name:
                    yield key.object, snapshot

    def showing(self, name: bytes) -> Archive:
        """The archive with what the snapshot of this name shows in the place of the live tree and of the log, which belongs to that."""
        # Ids ascend, and the greatest one counts.
        named = [snapshot for _, snapshot in self.snapshots() if snapshot.name == name]
        if not named:
            raise fmt.ReaderError(f"there is no snapshot {shown(name)}")
        require(named[-1].root.pointer is not None, f"snapshot has no tree: {shown(name)}")
        view = copy.copy(self)
        view.live, view.log = named[-1].root, Log()
        return view

    def walk(self) -> Iterator[tuple[bytes, int, Inode]]:
        """Every path, directories before what is in them."""
        waiting = [(b"", fmt.ROOT_INO, self.inode(fmt.ROOT_INO))]
        require(waiting[0][2].type == fmt.DIRECTORY, "the root is not a directory")
        while waiting:
            path, ino, inode = waiting.pop()
            yield path, ino, inode
            if inode.type == fmt.DIRECTORY:
                children = [(os.path.join(path, entry.name), entry.ino, child) for entry, child in self.entries(ino)]
                waiting += reversed(children)


class Extraction:
    """Writes the tree that the archive shows into a new or empty directory."""

    def __init__(self, archive: Archive, target: str) -> None:
        self.archive, self.target = archive, os.fsencode(target)
        self.first_path: dict[int, bytes] = {}
        self.problems = 0

    def run(self) -> int:
        os.makedirs(self.target, mode=0o700, exist_ok=True)
        if os.listdir(self.target):
            raise fmt.ReaderError(f"{os.fsdecode(self.target)} is not empty")
        directories = []
        for path, ino, inode in self.archive.walk():
            place = os.path.join(self.target, path)
            if inode.type == fmt.DIRECTORY:
                if path:
                    os.mkdir(place, 0o700)
                directories.append((place, ino, inode))
            else:
                self._attempt(place, lambda: self._make(place, ino, inode))
        for place, ino, inode in reversed(directories):
            self._attempt(place, lambda: self._dress(place, ino, inode))
        return self.problems

    def _attempt(self, place: bytes, action: Callable[[], None]) -> None:
        try:
            action()
        except (fmt.ReaderError, OSError, OverflowError) as error:
            self.problems += 1
            reason = str(error).encode(errors="surrogateescape")
            print(f"{shown(place)}: {shown(reason)}", file=sys.stderr)

    def _make(self, place: bytes, ino: int, inode: Inode) -> None:
        if ino in self.first_path:
            os.link(self.first_path[ino], place, follow_symlinks=False)
            return
        if inode.type == fmt.FILE:
            with open(place, "xb") as out:
                for piece in self.archive.content(ino, inode):
                    out.seek(piece.offset)
                    out.write(piece.data)
                out.truncate(inode.size)
        elif inode.type == fmt.SYMLINK:
            os.symlink(self.archive.target(ino, inode), place)
        elif inode.type == fmt.FIFO:
            os.mkfifo(place, 0o600)
        elif inode.type in (fmt.CHAR, fmt.BLOCKDEV):
            kind = stat.S_IFCHR if inode.type == fmt.CHAR else stat.S_IFBLK
            os.mknod(place, kind | 0o600, os.makedev(inode.rdev >> 20, inode.rdev & 0xFFFFF))
        else:
            raise Damaged(f"not extracted: type={inode.type}")
        self.first_path[ino] = place
        self._dress(place, ino, inode)

    def _dress(self, place: bytes, ino: int, inode: Inode) -> None:
        """Owner, xattrs, mode, times, in this order: each may undo or forbid the one before it."""
        if os.geteuid() == 0:
            os.chown(place, inode.uid, inode.gid, follow_symlinks=False)
        for name, value in self.archive.xattrs(ino):
            self._attempt(place + b" (" + name + b")", lambda: os.setxattr(place, name, value, follow_symlinks=False))
        if inode.type != fmt.SYMLINK:
            os.chmod(place, inode.mode & (0o7777 if os.geteuid() == 0 else 0o1777))
        times = tuple(t.seconds * 10**9 + t.nanos for t in (inode.atime, inode.mtime))
        os.utime(place, ns=times, follow_symlinks=False)


def shown(text: bytes) -> str:
    """What a terminal shows and does not obey: bytes that are no text, control characters and marks that reorder stand there as `\\xNN`."""
    escaped = "surrogateescape"
    characters = text.decode(errors=escaped)
    return "".join(c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in c.encode(errors=escaped)) for c in characters)


def moment(seconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return f"{seconds}s"


def show(archive: Archive) -> None:
    for path, ino, inode in archive.walk():
        when = moment(inode.mtime.seconds)
        name = shown(path) or "."
        arrow = " -> " + shown(archive.target(ino, inode)) if inode.type == fmt.SYMLINK else ""
        print(f"{stat.filemode(inode.mode)} {inode.links:3} {inode.uid:5} {inode.gid:5} {inode.size:12} {when} {name}{arrow}")


def describe(archive: Archive) -> None:
    record = archive.record
    print(f"archive     {archive.id.hex()}")
    print(f"header      sequence {archive.header.sequence}, {sum(kind != 0 for kind in archive.header.slots)} key slots")
    print(f"commit      {record.generation}{', closed' if record.closed else ''}")
    if record.origin:
        print(f"backup of   commit {record.origin.generation}, {moment(record.origin.time.seconds)}")
    entries = archive.log.entries
    if archive.has_log:
        print(f"log         {len(entries)} entries that count{', of an earlier commit' if record.pending else ''}")
    print(f"session     {record.session.hex()} since commit {record.session_first}")
    print(f"inodes      {entries[-1].inodes if entries else record.inodes}")
    print(f"blocks      {record.used_blocks} in pages, {record.total_blocks} in the file")
    print(f"snapshots   {sum(1 for _ in archive.snapshots())}")


def list_snapshots(archive: Archive) -> None:
    for number, snapshot in archive.snapshots():
        print(f"{number:6} {moment(snapshot.time.seconds)} {snapshot.inodes:12} {shown(snapshot.name)}")


def content_of(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()


def secrets(options: argparse.Namespace) -> Secrets:
    passphrase, key_file, code = (content_of(path) for path in (options.passfile, options.keyfile, options.recovery_code))
    if passphrase is not None:
        passphrase = passphrase.removesuffix(b"\n")
    elif key_file is None and code is None:
        passphrase = os.fsencode(getpass.getpass("Passphrase: "))
    return Secrets(passphrase, key_file, None if code is None else code.decode(errors="replace"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Read a lockbox archive.")
    parser.add_argument("--passfile", metavar="F", help="file with the passphrase")
    parser.add_argument("--keyfile", metavar="F", help="key file")
    parser.add_argument("--recovery-code", metavar="F", help="file with a recovery code")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("ls", "list every path"),
        ("info", "tell about the archive"),
        ("snapshots", "list the snapshots: id, time in UTC, inodes, name"),
        ("extract", "write the tree to DIR"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("archive", metavar="ARCHIVE")
        if name in ("ls", "extract"):
            command.add_argument("--snapshot", metavar="NAME", type=os.fsencode, help="what this snapshot shows, not what is there now")
        if name == "extract":
            command.add_argument("target", metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        with open(options.archive, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            archive = Archive(file, secrets(options))
            for warning in archive.warnings:
                print(f"warning: {warning}", file=sys.stderr)
            if getattr(options, "snapshot", None) is not None:
                archive = archive.showing(options.snapshot)
            if options.command == "extract":
                return 1 if Extraction(archive, options.target).run() else 0
            {"ls": show, "info": describe, "snapshots": list_snapshots}[options.command](archive)
        return 0
    except (BlockingIOError, PermissionError) as error:
        if error.filename:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"error: {options.archive} is in use by a writer", file=sys.stderr)
    except (fmt.ReaderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
