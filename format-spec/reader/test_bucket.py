"""Runs the vectors of ../bucket-vectors.json, and puts a small archive together from objects made from ../bucket.md."""

import hashlib
import json
import pathlib
import struct
import tempfile
import unittest

import lockbox_bucket as bucket

VECTORS = json.loads((pathlib.Path(__file__).parent.parent / "bucket-vectors.json").read_text())
PAGES = b"".join(bytes([byte]) * 4096 for byte in range(3))
INCARNATION = bytes.fromhex(VECTORS["incarnation"])


class Vectors(unittest.TestCase):
    def test_marker(self):
        data = bytes.fromhex(VECTORS["marker"])
        self.assertEqual(bucket.marker(data), INCARNATION)
        for at in (0, 8, 16, 40):
            wrong = bytearray(data)
            wrong[at] ^= 1
            with self.assertRaises(bucket.Damaged):
                bucket.marker(bytes(wrong))

    def test_record(self):
        data = PAGES + bytes.fromhex(VECTORS["record"]["behind_pages"])
        record = bucket.record(data, INCARNATION, VECTORS["record"]["number"])
        segment, five = (2, b"\x22" * 32), (1, 5)
        self.assertEqual(record["changes"], [(0, 1, (five, 2)), (1, 99, None), (100, 3900, (segment, 10)), (4000, 1, (five, 0))])
        self.assertEqual(record["dead"], [(2, b"\x77" * 32), (3, b"\x88" * 32), (1, 2), (1, 3), (1, 4)])
        self.assertEqual((record["kind"], record["length"], record["host"]), (2, 4001 * 4096, "laptop"))
        self.assertEqual(record["checkpoint"], b"\x66" * 32)
        for at in range(0, len(data), 37):
            wrong = bytearray(data)
            wrong[at] ^= 1
            with self.assertRaises(bucket.Damaged):
                bucket.record(bytes(wrong), INCARNATION, 6)

    def test_segment_and_checkpoint(self):
        data = PAGES + bytes.fromhex(VECTORS["segment"]["behind_pages"])
        self.assertEqual(hashlib.sha256(data).hexdigest(), VECTORS["segment"]["name"])
        self.assertEqual(struct.unpack_from("<QIQI", data, len(PAGES)), (7, 1, 20, 2))
        data = bytes.fromhex(VECTORS["checkpoint"]["bytes"])
        found = bucket.checkpoint(data, INCARNATION, bytes.fromhex(VECTORS["checkpoint"]["name"]))
        self.assertEqual([(first, count) for first, count, _ in found], [(0, 1), (100, 3900), (4000, 1)])


class Together(unittest.TestCase):
    def archive(self, changes, length=4 * 4096, owner=bytes(44), beside=()):
        """The bytes of an archive of one record, whose checkpoint has three blocks of a segment from block 0 on."""
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            inc = root / INCARNATION.hex()
            for part in ("log", "seg", "map"):
                (inc / part).mkdir(parents=True)
            (root / "lockbox").write_bytes(bytes.fromhex(VECTORS["marker"]))
            segment = PAGES + bytes.fromhex(VECTORS["segment"]["behind_pages"])
            place = struct.pack("<II32s", 2, 3, hashlib.sha256(segment).digest())
            (inc / "seg" / hashlib.sha256(segment).hexdigest()).write_bytes(segment)
            entries = struct.pack("<II", 1, 1) + place + struct.pack("<QIII", 0, 3, 0, 0)
            said = b"LBXCHKPT" + struct.pack("<II", 1, 0) + INCARNATION + bytes(16) + struct.pack("<QQ", 1, len(entries)) + bytes(32)
            checkpoint = entries + said
            (inc / "map" / hashlib.sha256(checkpoint).hexdigest()).write_bytes(checkpoint)
            parts = struct.pack("<II", 1, len(changes)) + place + b"".join(struct.pack("<QIII", *entry) for entry in changes)
            trailer = b"LBXRECRD" + struct.pack("<II", 1, 3) + INCARNATION + struct.pack("<QQ", 1, 1) + bytes(32)
            trailer += struct.pack("<QQ", 0, length) + bytes(32) + hashlib.sha256(checkpoint).digest() + struct.pack("<Q", len(checkpoint))
            trailer += struct.pack("<IIII", 0, len(parts), 0, len(owner)) + hashlib.sha256(b"").digest()
            trailer += hashlib.sha256(parts + owner).digest() + bytes(72)
            record = parts + owner + trailer + hashlib.sha256(trailer).digest()
            (inc / "log" / f"{2**64 - 2:016x}").write_bytes(record)
            for name in beside:
                (inc / "log" / name).write_bytes(b"")
            return bucket.archive(root)

    def test_changes_lie_over_the_checkpoint(self):
        changes = [(1, 1, 2**32 - 1, 0), (3, 1, 0, 1)]
        self.assertEqual(self.archive(changes), b"\0" * 8192 + b"\2" * 4096 + b"\1" * 4096)

    def test_an_archive_may_end_within_a_block_and_names_no_block_behind_it(self):
        """Rule 7 of 1.3: only the whole map counts, and zeros may lie anywhere."""
        self.assertEqual(self.archive([], 2 * 4096 + 5), PAGES[: 2 * 4096 + 5])
        self.assertEqual(self.archive([(1, 2**32 - 2, 2**32 - 1, 0)], 4096), PAGES[:4096])
        for changes, length in (([], 2 * 4096), ([(9, 1, 0, 0)], 4 * 4096), ([(2, 1, 2**32 - 1, 0)], 4096)):
            with self.assertRaises(bucket.Damaged):
                self.archive(changes, length)

    def test_the_owner_has_its_fields_and_a_name_that_is_not_too_long(self):
        self.archive([], owner=bytes(108))
        for length in (0, 43, 109):
            with self.assertRaises(bucket.Damaged):
                self.archive([], owner=bytes(length))

    def test_hidden_files_are_no_records_and_other_names_are_damage(self):
        self.archive([], beside=[".".ljust(33, "a")])
        with self.assertRaises(bucket.Damaged):
            self.archive([], beside=["0"])


if __name__ == "__main__":
    unittest.main()
