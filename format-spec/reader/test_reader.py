"""Runs the vectors of ../vectors, published answers of the primitives, and whole archives through the reader."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lockbox_format as fmt
import lockbox_keys as keys
from lockbox_reader import Archive, main
from tiny_writer import Page, Writer

VECTORS = Path(__file__).parent.parent / "vectors"
PASSPHRASE = b"open sesame"


def unhex(text: str) -> bytes:
    out = b""
    for group in text.split():
        digits, _, count = group.partition("*")
        out += bytes.fromhex(digits) * int(count or 1)
    return out


def plain(value: Any) -> Any:
    """As in the vectors: byte strings in hexadecimal, named tuples as objects, keys and times as lists."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, (fmt.Key, fmt.Time)):
        return list(value)
    if hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def named(value: Any) -> dict[str, Any]:
    return {**plain(value), "name": value.name.decode()}


def header(data: bytes, vector: dict[str, Any]) -> Any:
    value = plain(fmt.decode_header(data, vector["copy"]))
    del value["data"]
    return {**value, "slots": list(bytes.fromhex(value["slots"]))}


def data_head(data: bytes, vector: dict[str, Any]) -> Any:
    table = fmt.decode_data_head(data, vector["stored_length"], vector["plain_length"])
    return {"cell_size": table.size, "cells": plain(table.cells), "items": plain(table.items)}


def key(data: bytes) -> fmt.Key:
    fields = fmt.Fields(data, "key")
    found = fmt.decode_key(fields)
    fields.end()
    return found


def list_entry(data: bytes) -> Any:
    entry = named(fmt.decode_list(data, 0))
    del entry["sequence"]
    return entry


def log_entry(data: bytes) -> Any:
    head = fmt.decode_log_head(data[:64])
    fmt.require(len(data) == 64 + head.length, "log entry has another length")
    return {**plain(head), **plain(fmt.decode_log_entry(data[64:], head.length))}


def record(data: bytes) -> Any:
    value = fmt.decode_record(data)
    allocated = [{"address": a, "blocks": n, "tag": tag.hex()} for a, n, tag in value.allocated]
    return {**plain(value), "allocated": allocated, "freed": [{"address": a, "blocks": n} for a, n in value.freed]}


DECODERS: dict[str, Callable[[bytes, dict[str, Any]], Any]] = {
    "pointer": lambda data, _: plain(fmt.decode_pointer(data)),
    "key": lambda data, _: plain(key(data)),
    "prologue": lambda data, _: plain(fmt.decode_prologue(data)),
    "data_head": data_head,
    "node": lambda data, _: plain(fmt.decode_node(data)),
    "inode": lambda data, _: plain(fmt.decode_inode(data)),
    "extent": lambda data, _: plain(fmt.decode_extent(data)),
    "directory_list": lambda data, _: list_entry(data),
    "directory_index": lambda data, _: [named(entry) for entry in fmt.decode_index(data)],
    "xattr": lambda data, _: [named(xattr) for xattr in fmt.decode_xattrs(data)],
    "snapshot": lambda data, _: named(fmt.decode_snapshot(data)),
    "record": lambda data, _: record(data),
    "log_entry": lambda data, _: log_entry(data),
    "header": header,
    "passphrase_slot": lambda data, _: plain(fmt.decode_slot(data)),
    "key_slot": lambda data, vector: plain(keys.decode_key_slot(data, vector["kind"])),
    "description": lambda data, _: plain(keys.decode_description(data)),
}
NOT_NEEDED = {"reference", "dead", "history", "delta_list", "space"}
OTHER_SHAPE = {"seal"}


class Vectors(unittest.TestCase):
    def test_every_vector_decodes_or_is_refused_as_it_says(self) -> None:
        seen = set()
        for path in VECTORS.glob("*.json"):
            file = json.loads(path.read_text())
            if "structure" not in file:
                continue  # vectors of a primitive
            seen.add(file["structure"])
            if file["structure"] in NOT_NEEDED | OTHER_SHAPE:
                continue
            decode = DECODERS[file["structure"]]
            for vector in file["accepted"]:
                with self.subTest(path.stem, vector=vector["name"]):
                    self.assertEqual(decode(unhex(vector["bytes"]), vector), vector["value"])
            for vector in file["refused"]:
                with self.subTest(path.stem, vector=vector["name"]):
                    with self.assertRaises(fmt.ReaderError) as refusal:
                        decode(unhex(vector["bytes"]), vector)
                    self.assertEqual(refusal.exception.verdict, vector["as"])
        self.assertEqual(seen, DECODERS.keys() | NOT_NEEDED | OTHER_SHAPE)

    def test_fields_have_the_names_that_the_specification_gives(self) -> None:
        """In backquotes: in the specification, or in forms like `{name, name}` of the vectors' page."""
        known = set(re.findall(r"`([a-z_]+)`", (VECTORS.parent / "format.md").read_text()))
        for form in re.findall(r"`(\{[^`]*\})`", (VECTORS / "README.md").read_text()):
            known |= set(re.findall(r"[a-z_]+", form))

        def names(value: Any) -> set[str]:
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            return set(value if isinstance(value, dict) else ()).union(*map(names, items))

        for path in VECTORS.glob("*.json"):
            for vector in json.loads(path.read_text()).get("accepted", []):
                self.assertEqual(names(vector["value"]) - known, set(), f"{path.stem} {vector['name']}")


class Seals(unittest.TestCase):
    def setUp(self) -> None:
        self.vectors = json.loads((VECTORS / "seal.json").read_text())
        self.id, self.volume_key = (bytes.fromhex(self.vectors[name]) for name in ("archive", "volume_key"))

    def key(self, label: str) -> bytes:
        return fmt.hkdf(self.volume_key, self.id, "lockbox/v1/" + label)

    def reader(self, vector: dict[str, Any]) -> tuple[Archive, fmt.Pointer]:
        """An archive of which only the page cipher and the vector's page exist."""
        archive, data = Archive.__new__(Archive), unhex(vector["bytes"])
        archive.id, archive.blocks, archive._page_key = self.id, 1 << 20, self.key("page")
        archive.reserved = fmt.RESERVED
        archive._open_page = archive._open_page_uncached  # type: ignore[method-assign]
        archive._read = lambda address, blocks: data[-blocks * fmt.BLOCK :]  # type: ignore[method-assign]
        pointer = {**vector["pointer"], "tag": bytes.fromhex(vector["pointer"]["tag"])}
        return archive, fmt.Pointer(**pointer)

    def test_keys_and_name_hashes_are_those_of_the_labels(self) -> None:
        for vector in self.vectors["keys"]:
            self.assertEqual(fmt.hkdf(self.volume_key, self.id, vector["label"]).hex(), vector["key"])
        for vector in self.vectors["name_hashes"]:
            name = vector["ino"].to_bytes(8, "little") + vector["name"].encode()
            self.assertEqual(fmt.siphash24(self.key("name")[:16], name), vector["hash"])

    def test_slot_and_header_open_as_they_say(self) -> None:
        slot, header = self.vectors["passphrase_slots"][0], self.vectors["headers"][0]
        data = bytes(fmt.BLOCK * (slot["number"] + 1)) + unhex(slot["bytes"])
        kinds = bytes(slot["number"]) + b"\1"
        fields = fmt.Header(0, self.id, 1, b"", kinds, b"", 0, 0, 0, data)
        self.assertEqual(fmt.unlock(fields, slot["passphrase"].encode()), self.volume_key)
        fmt.authenticate(fmt.decode_header(unhex(header["bytes"]), header["copy"]), self.volume_key)

    def test_pages_open_only_where_their_pointer_says(self) -> None:
        for vector in self.vectors["pages"]:
            archive, pointer = self.reader(vector)
            page = archive._open_page_uncached(pointer)
            self.assertEqual((plain(page.prologue), page.body), (vector["prologue"], unhex(vector["body"])))
            if "data" in vector:
                data = archive._page_data(pointer, 0, page.prologue.plain_length)
                self.assertEqual(data, unhex(vector["data"]))
        for vector in self.vectors["pages_refused"]:
            archive, pointer = self.reader(vector)
            with self.subTest(vector["name"]), self.assertRaises(fmt.Damaged):
                archive._open_page_uncached(pointer)

    def test_records_open_only_in_their_slot(self) -> None:
        for vector in self.vectors["records"] + self.vectors["records_refused"]:
            data = unhex(vector["bytes"])
            aad = fmt.associated_data("lockbox/v1/commit", self.id, bytes([vector["slot"]]))
            open_it = lambda: fmt.xaes_open(self.key("commit"), data[:24], aad, data[24:], "record")  # noqa: E731
            if "plain" in vector:
                self.assertEqual(open_it(), unhex(vector["plain"]))
            else:
                self.assertRaises(fmt.Damaged, open_it)

    def test_log_entries_open_only_at_their_block(self) -> None:
        archive = Archive.__new__(Archive)
        archive.id, archive._log_key = self.id, self.key("log")
        for vector in self.vectors["log_entries"] + self.vectors["log_entries_refused"]:
            data = unhex(vector["bytes"])
            with self.subTest(vector["name"]):
                if "tag" in vector:
                    head = archive._open_log(vector["block"], data, 0)
                    body = archive._open_log(vector["block"], data, 1, head)
                    self.assertEqual((head, body), (unhex(vector["head"]), unhex(vector["body"])))
                    self.assertEqual(data[-16:].hex(), vector["tag"])
                    fmt.decode_log_entry(body, fmt.decode_log_head(head).length)
                else:
                    with self.assertRaises(fmt.Damaged):
                        head = archive._open_log(vector["block"], data, 0)
                        body = archive._open_log(vector["block"], data, 1, head)
                        fmt.decode_log_entry(body, fmt.decode_log_head(head).length)


class Slots(unittest.TestCase):
    """Sections 3.2 to 3.6, step by step."""

    def setUp(self) -> None:
        self.vectors = json.loads((VECTORS / "slots.json").read_text())
        self.id, self.volume_key = (bytes.fromhex(self.vectors[name]) for name in ("archive", "volume_key"))

    def header(self, slots: dict[int, tuple[int, bytes]]) -> fmt.Header:
        data, kinds = bytearray(fmt.HEADER_BYTES), bytearray(32)
        for number, (kind, block) in slots.items():
            data[fmt.BLOCK * (number + 1) : fmt.BLOCK * (number + 2)] = block
            kinds[number] = kind
        return fmt.Header(0, self.id, 1, b"", bytes(kinds), b"", 0, 0, 0, bytes(data))

    def secrets(self, vector: dict[str, Any]) -> keys.Secrets:
        passphrase, file = vector.get("passphrase"), vector.get("key_file")
        return keys.Secrets(passphrase and passphrase.encode(), file and bytes.fromhex(file), vector.get("recovery_code"))

    def test_every_step_from_the_secret_to_the_volume_key(self) -> None:
        for vector in self.vectors["keys"]:
            self.assertEqual(fmt.hkdf(self.volume_key, self.id, vector["label"]).hex(), vector["key"])
        for vector in self.vectors["slots"]:
            with self.subTest(vector["name"]):
                kind, number, block, given = vector["kind"], vector["number"], unhex(vector["bytes"]), self.secrets(vector)
                if kind != 1:
                    kek = keys.key_of(kind, keys.decode_key_slot(block, kind), given, self.id)
                    self.assertEqual(kek and kek.hex(), vector["kek"])
                    k0 = keys.key_of(kind & ~16, keys.decode_key_slot(block, kind), given, self.id)
                    self.assertEqual(k0 and k0.hex(), vector["k0"])
                kek = bytes.fromhex(vector["kek"])
                self.assertEqual(fmt.hkdf(kek, self.id, "lockbox/v1/slot/commit").hex(), vector["commitment"])
                wrap = fmt.hkdf(kek, self.id, "lockbox/v1/slot/wrap")
                self.assertEqual(wrap.hex(), vector["wrap_key"])
                nonce, sealed, aad = (unhex(vector[name]) for name in ("nonce", "sealed", "associated_data"))
                self.assertEqual(fmt.xaes_open(wrap, nonce, aad, sealed, "slot"), unhex(vector["plain"]))
                header = self.header({number: (kind, block)})
                self.assertEqual(keys.unlock(header, given), self.volume_key)
                about = keys.describe(header, number, self.volume_key)
                self.assertEqual(about and (about.label, (about.public or b"").hex()),
                                 (vector["description"]["label"], vector["rewrap_public"]))  # fmt: skip

    def test_a_bad_slot_keeps_nobody_out_of_another(self) -> None:
        by_name = {vector["name"]: vector for vector in self.vectors["slots"]}
        file, word = by_name["a_key_file_alone"], by_name["a_passphrase"]
        for kind, at, value in ((99, 0, 0), (1, 36, 0), (1, 44, 1), (1, 40, 17), (17, 46, 1), (1, 104, 0)):
            block = bytearray(unhex(word["bytes"]))
            block[at] = value
            header = self.header({0: (kind, bytes(block)), 1: (2, unhex(file["bytes"]))})
            both = keys.Secrets(b"open sesame", bytes.fromhex(file["key_file"]))
            self.assertEqual(keys.unlock(header, both), self.volume_key)
            with self.assertRaises(fmt.WrongKey if kind == 99 else fmt.Damaged):
                keys.unlock(header, keys.Secrets(b"open sesame"))
            # Zero fields and byte 46 count in every slot, the rest in those only that are tried.
            with self.assertRaises(fmt.Damaged if at in (44, 46) else fmt.WrongKey):
                keys.unlock(header, keys.Secrets(None, b"another file"))

    def test_recovery_codes_are_read_or_refused(self) -> None:
        codes = self.vectors["recovery_codes"]
        for vector in codes["accepted"]:
            self.assertEqual(keys.parse_recovery_code(vector["text"]).hex(), vector["bytes"])
        for vector in codes["refused"]:
            with self.subTest(vector["name"]), self.assertRaises(fmt.WrongKey):
                keys.parse_recovery_code(vector["text"])


class Primitives(unittest.TestCase):
    def test_siphash_gives_the_published_values(self) -> None:
        secret = bytes(range(16))
        for length, value in ((0, 0x726FDB47DD0E0E31), (7, 0xAB0200F58B01D137), (8, 0x93F5F5799A932462), (15, 0xA129CA6149BE45E5)):
            self.assertEqual(fmt.siphash24(secret, bytes(range(length))), value)

    def test_xaes_gives_the_published_values(self) -> None:
        nonce = b"ABCDEFGHIJKLMNOPQRSTUVWX"
        for secret, aad, sealed in (
            (b"\1" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
            (b"\3" * 32, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
        ):
            opened = fmt.xaes_open(secret, nonce, aad, bytes.fromhex(sealed), "vector")
            self.assertEqual(opened, b"XAES-256-GCM")


class Archives(unittest.TestCase):
    """One archive with everything a reader must handle, and what it must refuse."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "a.lbx"
        self.writer = w = Writer(PASSPHRASE)
        self.files: dict[str, bytes] = {}
        w.inode(1, 0o40755, size=0, links=3, parent=1)
        self.big = os.urandom(131_072)
        self.file(10, "inline", b"tiny", inline=True)
        self.file(11, "raw", self.big, log2=15)
        self.file(12, "compressed", b"lockbox " * 9000, log2=12, compress=True)
        self.packed_page = page = w.data_page(b"a" * 5000 + b"b" * 3000, 12, True, items=[(13, 0, 0, 5000), (14, 0, 5000, 3000)])
        for ino, name, start, data in ((13, "packed a", 0, b"a" * 5000), (14, "packed b", 5000, b"b" * 3000)):
            self.file(ino, name, data)
            w.extent(ino, 0, page, start, len(data))
        # A hole before, between and behind; an extent beyond the size; one cut by the trim offset and one behind it.
        self.file(15, "holes", bytes(4096) + b"a" * 1000 + bytes(904) + b"b" * 94 + bytes(906), size=7000)
        w.extent(15, 4096, page, 100, 1000)
        w.extent(15, 6000, page, 5000, 94)
        self.file(16, "cut", b"b" * 500, size=500)
        w.extent(16, 0, page, 5000, 3000)
        self.file(17, "trimmed", b"a" * 600 + bytes(9400), size=10_000, trim=600)
        w.extent(17, 0, page, 0, 5000)
        w.extent(17, 5000, page, 5000, 3000)
        w.entry(1, b"hard link", 11, fmt.FILE)
        w.inode(11, 0o100640, size=len(self.big), links=2)
        self.long_target = b"x/" * 1800
        for ino, name, target in ((20, b"short", b"inline"), (21, b"long", self.long_target)):
            w.inode(ino, 0o120777, size=len(target))
            w.entry(1, name, ino, fmt.SYMLINK)
        w.live[fmt.Key(20, fmt.INLINE, 0)] = b"inline"
        w.extent(21, 0, w.data_page(self.long_target, 12, True, 21, 0), 0, 3600)
        w.inode(22, 0o10600)
        w.entry(1, b"fifo", 22, fmt.FIFO)
        w.inode(23, 0o40711, links=2, parent=1, size=200)
        w.entry(1, b"dir", 23, fmt.DIRECTORY)
        for number in range(200):
            self.file(100 + number, f"dir/f{number}", b"%d" % number, inline=True, directory=23)
        self.xattrs()
        w.inode(1, 0o40755, size=w.next_sequence[1] - 3, links=3, parent=1)
        w.commit()

    def file(self, ino: int, path: str, data: bytes, inline: bool = False, log2: int = 0, compress: bool = False,
             size: int | None = None, trim: int = fmt.NO_TRIM, directory: int = 1) -> None:  # fmt: skip
        self.files[path] = data
        self.writer.inode(ino, 0o100640, size=len(data) if size is None else size, trim=trim)
        self.writer.entry(directory, path.rpartition("/")[2].encode(), ino, fmt.FILE)
        if inline:
            self.writer.live[fmt.Key(ino, fmt.INLINE, 0)] = data
        if log2:
            self.writer.extent(ino, 0, self.writer.data_page(data, log2, compress, ino, 0), 0, len(data))

    def xattrs(self) -> None:
        w = self.writer
        small = bytes([10, 0]) + (5).to_bytes(4, "little") + bytes(4) + b"user.small" + b"value"
        large = bytes([10, 1]) + (3100).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"user.large"
        w.live[fmt.Key(10, fmt.XATTR, w.name_hash(10, b"user.small"))] = small
        w.live[fmt.Key(10, fmt.XATTR, w.name_hash(10, b"user.large"))] = large
        self.large = os.urandom(3100)  # ext4 has no room for more
        for piece in range(2):
            w.live[fmt.Key(10, fmt.XATTR_PIECE, 1 << 32 | piece)] = self.large[3000 * piece :][:3000]

    def open(self, image: bytes | None = None, passphrase: bytes = PASSPHRASE) -> Archive:
        self.path.write_bytes(self.writer.image if image is None else image)
        file = open(self.path, "rb")
        self.addCleanup(file.close)
        return Archive(file, passphrase)

    def run_reader(self, *arguments: str) -> tuple[int, str, str]:
        passfile = self.folder / "pass"
        passfile.write_bytes(PASSPHRASE + b"\n")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["--passfile", str(passfile), *arguments])
        return code, out.getvalue(), err.getvalue()

    def rewritten(self, change: Callable[[Writer], None]) -> Archive:
        change(self.writer)
        self.writer.commit()
        return self.open()

    def refuses(self, message: str, action: Callable[[], Any]) -> None:
        with self.assertRaisesRegex(fmt.ReaderError, message):
            action()

    def test_extract_gives_back_every_kind_of_object(self) -> None:
        archive = self.open()
        self.assertEqual(archive.warnings, [])
        self.assertGreaterEqual(archive.live.level, 1)
        target = self.folder / "out"
        code, _, err = self.run_reader("extract", str(self.path), str(target))
        self.assertEqual((code, err), (0, ""))
        for path, data in self.files.items():
            self.assertEqual((target / path).read_bytes(), data, path)
        self.assertTrue((target / "raw").samefile(target / "hard link"))
        self.assertEqual(os.readlink(target / "short"), "inline")
        self.assertEqual(os.readlink(target / "long").encode(), self.long_target)
        self.assertTrue((target / "fifo").is_fifo())
        self.assertEqual((target / "dir").stat().st_mode & 0o7777, 0o711)
        self.assertEqual((target / "dir").stat().st_mtime_ns, 1_700_000_000_123_456_789)
        self.assertEqual(dict(archive.xattrs(10)), {b"user.small": b"value", b"user.large": self.large})

    def test_ls_and_info_tell_what_is_there(self) -> None:
        self.open()
        code, out, _ = self.run_reader("ls", str(self.path))
        self.assertEqual(code, 0)
        self.assertIn("short -> inline\n", out)
        self.assertEqual(len(out.splitlines()), len(self.files) + 6)
        code, out, _ = self.run_reader("info", str(self.path))
        self.assertIn(self.writer.archive.hex(), out)

    def test_a_wrong_passphrase_is_told_from_damage(self) -> None:
        self.refuses("wrong passphrase", lambda: self.open(passphrase=b"other"))
        with self.assertRaises(fmt.NotArchive):
            self.open(bytes(len(self.writer.image)))

    def test_one_header_copy_is_enough(self) -> None:
        for start in fmt.HEADER_START:
            image = bytearray(self.writer.image)
            image[start * fmt.BLOCK + 5000] ^= 1
            self.assertEqual(len(self.open(image).warnings), 1)
            image[(320 - start) * fmt.BLOCK + 5000] ^= 1
            self.refuses("wrong checksum", lambda: self.open(image))

    def test_a_commit_that_never_completed_is_undone_by_one(self) -> None:
        before = len(self.writer.image)
        self.writer.commit()
        torn = bytearray(self.writer.image)
        torn[before + 300] ^= 1
        archive = self.open(torn)
        self.assertEqual((archive.record.generation, len(archive.warnings)), (1, 1))

    def test_a_closed_or_two_barrier_commit_is_never_undone(self) -> None:
        for flags in (1, 2):
            before = len(self.writer.image)
            self.writer.commit(flags)
            torn = bytearray(self.writer.image)
            torn[before + 300] ^= 1
            archive = self.open(torn)
            self.assertEqual(archive.record.generation, self.writer.generation)
            self.assertIn("DAMAGED", archive.warnings[0])

    def test_the_commit_that_is_gone_back_to_must_be_whole_itself(self) -> None:
        first, second = self.packed_page.address * fmt.BLOCK, len(self.writer.image)
        self.writer.commit()
        torn = bytearray(self.writer.image)
        torn[first + 300] ^= 1
        torn[second + 300] ^= 1
        archive = self.open(torn)
        self.assertEqual(archive.record.generation, self.writer.generation)
        self.assertIn("DAMAGED", archive.warnings[0])

    def test_an_authentic_record_that_is_out_of_place_is_no_tear(self) -> None:
        self.writer.commit(index=5)
        self.refuses("foreign slot", self.open)

    def test_a_part_of_a_block_behind_the_file_is_not_looked_at(self) -> None:
        self.assertEqual(self.open(bytes(self.writer.image) + b"more").warnings, [])

    def test_a_truncated_file_is_refused(self) -> None:
        self.writer.commit(2)
        self.refuses("truncated", lambda: self.open(self.writer.image[: -fmt.BLOCK]))

    def test_a_file_too_short_for_an_archive_is_told_from_another_file(self) -> None:
        image = bytes(self.writer.image)
        later = image[:16] + b"\2" + image[17:]
        for start, length, verdict in (
            (image, 384 * fmt.BLOCK, fmt.Damaged),
            (image, 33 * fmt.BLOCK, fmt.Damaged),
            (image, 20, fmt.Damaged),
            (image, 19, fmt.Damaged),
            (later, 20, fmt.Unsupported),
            (later, 19, fmt.Damaged),
            (image, 12, fmt.Damaged),
            (image, 11, fmt.NotArchive),
            (image, 0, fmt.NotArchive),
            (later, 320 * fmt.BLOCK, fmt.Unsupported),
            (later, 384 * fmt.BLOCK, fmt.Damaged),
        ):
            with self.subTest(length=length), self.assertRaises(verdict):
                self.open(start[:length])

    def test_a_stray_is_no_snapshot(self) -> None:
        value = struct.pack("<QqII", 1, 5, 6, 0) + bytes(40) + struct.pack("<QB", 1, 5) + b"daily"
        strays = {fmt.Key(1, fmt.SNAPSHOT, 7): value, fmt.Key(2, fmt.SNAPSHOT, 1): b"no value at all"}
        archive = self.rewritten(lambda w: w.snapshots.update({fmt.Key(1, fmt.SNAPSHOT, 0): value} | strays))
        self.assertEqual([(number, snapshot.name) for number, snapshot in archive.snapshots()], [(1, b"daily")])

    def test_a_commit_number_without_room_behind_it_is_refused(self) -> None:
        self.writer.generation = 2**64 - 2**48 - 1
        self.refuses("too great", lambda: self.rewritten(lambda _: None))

    def test_the_upper_half_of_a_mode_is_not_looked_at(self) -> None:
        archive = self.rewritten(lambda w: w.inode(10, 0xABCD << 16 | 0o100640, size=4))
        self.assertEqual({entry.name: inode.type for entry, inode in archive.entries(1)}[b"inline"], fmt.FILE)
        self.refuses("truncated", lambda: self.open(self.writer.image[: 384 * fmt.BLOCK]))

    def test_an_older_page_put_back_is_noticed(self) -> None:
        page = self.packed_page
        at = page.address * fmt.BLOCK
        old = bytes(self.writer.image[at : at + page.blocks * fmt.BLOCK])
        self.writer.commit()
        # Another authentic page at the same address, as an earlier generation would have left it.
        tail = self.writer.image[at:]
        del self.writer.image[at:]
        other = self.writer.data_page(b"a" * 5000 + b"c" * 3000, 12, True, items=[(13, 0, 0, 5000), (14, 0, 5000, 3000)])
        self.writer.image += tail[other.blocks * fmt.BLOCK :]
        self.assertNotEqual(old, bytes(self.writer.image[at : at + len(old)]))
        archive = self.open()
        self.refuses("not the one that its pointer names", lambda: list(archive.content(14, archive.inode(14))))

    def test_a_node_in_the_place_of_another_is_noticed(self) -> None:
        writer = self.writer
        original = writer._node

        def moved(tree: int, level: int, lower: fmt.Key, upper: fmt.Key, entries: Any) -> Page:
            return original(tree, level, fmt.Key(0, 0, 1) if lower == fmt.LEAST and not level else lower, upper, entries)

        writer._node = moved  # type: ignore[method-assign]
        archive = self.rewritten(lambda _: None)
        self.refuses("not the one that its parent names", lambda: list(archive.walk()))

    def test_list_and_index_must_agree(self) -> None:
        index = fmt.Key(1, fmt.DIR_INDEX, self.writer.name_hash(1, b"inline"))
        archive = self.rewritten(lambda w: w.live.pop(index) and None)
        self.refuses("list and index differ", lambda: list(archive.walk()))

    def test_a_name_cannot_lead_out_of_the_target(self) -> None:
        archive = self.rewritten(lambda w: w.entry(1, b"../escape", 10, fmt.FILE))
        self.refuses("impossible name", lambda: list(archive.walk()))

    def test_an_extent_stays_within_its_page(self) -> None:
        archive = self.rewritten(lambda w: w.extent(14, 0, self.packed_page, 5000, 3001))
        self.refuses("beyond its page", lambda: list(archive.content(14, archive.inode(14)._replace(size=9999))))

    def test_any_flipped_byte_of_a_page_is_noticed(self) -> None:
        last = self.packed_page.blocks * fmt.BLOCK - 1
        for at in (0, 24, 88, 104, 200, last - 40, last):
            image = bytearray(self.writer.image)
            image[self.packed_page.address * fmt.BLOCK + at] ^= 1
            archive = self.open(image)
            self.assertIn("DAMAGED", archive.warnings[0])
            self.refuses("authentication|not the one", lambda: list(archive.content(14, archive.inode(14))))


if __name__ == "__main__":
    unittest.main()
