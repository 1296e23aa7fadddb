"""Archives with a log: which entries count (section 10.2), and what they say together with their record (9.5)."""

from __future__ import annotations

import contextlib
import io
import struct
import tempfile
import unittest
from typing import Any

import lockbox_format as fmt
from lockbox_format import BLOCK, Key
from lockbox_reader import Archive, describe
from tiny_writer import Writer

PASSPHRASE = b"open sesame"
END = 2**64 - 1
NAMED = 10, 11, 12
LARGEST = 255 * BLOCK - 120


class WithLog(unittest.TestCase):
    """Three files of 8,000 bytes in one page, `a`, `b` and `c`, whose entries the tests lay over them."""

    features = fmt.FEATURE_LOG

    def setUp(self) -> None:
        self.writer = w = Writer(PASSPHRASE, self.features)
        self.page = w.data_page(b"abc" * 8000, 12, False, 10, 0)
        for ino in NAMED:
            w.inode(ino, 0o100640, size=8000)
            w.entry(1, self.name(ino), ino, fmt.FILE)
            w.extent(ino, 0, self.page, 8000 * (ino - 10), 8000)
        w.inode(1, 0o40755, size=3, links=2, parent=1)
        w.commit()

    def name(self, ino: int) -> bytes:
        return bytes([ord("a") + ino - 10])

    def stored(self, ino: int) -> bytes:
        return (b"abc" * 8000)[8000 * (ino - 10) :][:8000]

    def open(self, image: bytes | None = None, warning: str | None = None) -> Archive:
        """`warning` is the beginning of the only one."""
        file = tempfile.TemporaryFile()
        self.addCleanup(file.close)
        file.write(self.writer.image if image is None else image)
        file.flush()
        archive = Archive(file, PASSPHRASE)
        self.assertEqual(len(archive.warnings), 0 if warning is None else 1, archive.warnings)
        self.assertTrue(warning is None or archive.warnings[0].startswith(warning), archive.warnings)
        return archive

    def flipped(self, at: int) -> bytes:
        image = bytearray(self.writer.image)
        image[at] ^= 1
        return bytes(image)

    def inode(self, ino: int, size: int, **fields: Any) -> dict[Key, bytes | None]:
        self.writer.inode(ino, fields.pop("mode", 0o100640), size=size, **fields)
        key = Key(ino, fmt.INODE, 0)
        return {key: self.writer.live[key]}

    def content(self, archive: Archive, ino: int) -> bytes:
        inode = archive.inode(ino)
        out = bytearray(inode.size)
        for piece in archive.content(ino, inode):
            out[piece.offset : piece.offset + len(piece.data)] = piece.data
        self.assertEqual(len(out), inode.size)
        return bytes(out)

    def contents(self, archive: Archive) -> list[bytes]:
        """The first byte of each file, in which the tests write which entry was the last."""
        return [self.content(archive, ino)[:1] for ino in NAMED]


class Laid(WithLog):
    def test_records_are_laid_over_the_tree_and_pieces_over_extents(self) -> None:
        w = self.writer
        before = dict(w.live)
        w.inode(13, 0o100600, size=3)
        w.entry(1, b"new", 13, fmt.FILE)
        w.inode(1, 0o40755, size=4, links=2, parent=1)
        changed = {key: value for key, value in w.live.items() if before.get(key) != value}
        w.log_entry(changed, [(13, 0, b"one"), (10, 5, b"HELLO")])
        w.log_entry({}, [(13, 1, b"N")])
        archive, out = self.open(), io.StringIO()
        with contextlib.redirect_stdout(out):
            describe(archive)
        self.assertIn("log         2 entries that count\n", out.getvalue())
        self.assertIn("inodes      77\n", out.getvalue())
        self.assertEqual([(path, inode.size) for path, _, inode in archive.walk()],
                         [(b"", 4), (b"a", 8000), (b"b", 8000), (b"c", 8000), (b"new", 3)])  # fmt: skip
        self.assertEqual(self.content(archive, 13), b"oNe")
        self.assertEqual(self.content(archive, 10), self.stored(10)[:5] + b"HELLO" + self.stored(10)[10:])
        self.assertEqual(self.content(archive, 11), self.stored(11))

    def test_records_come_in_the_order_of_their_keys(self) -> None:
        inline = Key(12, fmt.INLINE, 0)
        entry = {Key(10, fmt.EXTENT, 0): None, Key(11, fmt.EXTENT, 0): None, Key(12, fmt.EXTENT, 0): None, inline: b"inline"}
        for at, start in ((0, 300), (100, 200), (300, 0)):
            self.writer.extent(10, at, self.page, start, 100)
            entry[Key(10, fmt.EXTENT, at)] = self.writer.live[Key(10, fmt.EXTENT, at)]
        self.writer.log_entry(entry)
        self.writer.log_entry({Key(10, fmt.EXTENT, 100): None})
        archive, text = self.open(), b"abc" * 8000
        self.assertEqual([sub for sub, _ in archive.records(10, fmt.EXTENT)], [0, 300])
        self.assertEqual(self.content(archive, 10), (text[300:400] + bytes(200) + text[:100]).ljust(8000, b"\0"))
        self.assertEqual(self.content(archive, 11), bytes(8000))
        self.assertEqual(self.content(archive, 12), b"inline".ljust(8000, b"\0"))

    def test_gone_records_are_gone(self) -> None:
        w = self.writer
        names = {key: None for key in w.live if key.kind == fmt.DIR_LIST and w.live[key].endswith(b"b")}
        names |= {Key(1, fmt.DIR_INDEX, w.name_hash(1, b"b")): None, Key(11, fmt.INODE, 0): None, Key(11, fmt.EXTENT, 0): None}
        w.log_entry({**names, **self.inode(1, 2, mode=0o40755, links=2, parent=1)})
        archive = self.open()
        self.assertEqual([path for path, _, _ in archive.walk()], [b"", b"a", b"c"])
        with self.assertRaisesRegex(fmt.Damaged, "inode is missing"):
            archive.inode(11)

    def test_ranges_drop_bytes_of_earlier_pieces_and_not_of_their_own_entry(self) -> None:
        self.writer.log_entry({Key(10, fmt.EXTENT, 0): None}, [(10, 0, b"1" * 100), (10, 200, b"2" * 100), (11, 0, b"x")])
        self.writer.log_entry({}, [(10, 40, b"3" * 10)], [(10, 30, 60), (10, 90, 210), (10, 250, END), (11, 1, END)])
        archive = self.open()
        want = b"1" * 30 + bytes(10) + b"3" * 10 + bytes(10) + b"1" * 30 + bytes(120) + b"2" * 40
        self.assertEqual(self.content(archive, 10), want.ljust(8000, b"\0"))
        self.assertEqual(self.content(archive, 11)[:1], b"x")

    def test_later_pieces_lie_over_earlier_ones(self) -> None:
        self.writer.log_entry({}, [(10, 100, b"1" * 100)])
        self.writer.log_entry({}, [(10, 50, b"2" * 100), (10, 180, b"2" * 100)])
        self.writer.log_entry({}, [(10, 60, b"3"), (10, 120, b"3" * 10)])
        stored = self.stored(10)
        want = stored[:50] + b"2" * 10 + b"3" + b"2" * 59 + b"3" * 10 + b"2" * 20 + b"1" * 30 + b"2" * 100 + stored[280:]
        self.assertEqual(self.content(self.open(), 10), want)

    def test_a_file_is_as_long_as_its_inode_or_its_last_piece_says(self) -> None:
        self.writer.log_entry(self.inode(10, 100), [(10, 150, b"behind")], [(10, 100, END)])
        self.writer.log_entry(self.inode(11, 9000), [(11, 8500, b"within")])
        self.writer.log_entry({**self.inode(12, 10)}, [(12, 20, b"12345")])
        self.writer.log_entry({}, [], [(12, 23, END)])
        archive = self.open()
        # Extents beyond the inode's own size are not there, though the file is longer.
        self.assertEqual(self.content(archive, 10), self.stored(10)[:100] + bytes(50) + b"behind")
        self.assertEqual(self.content(archive, 11), self.stored(11) + bytes(500) + b"within" + bytes(494))
        self.assertEqual(self.content(archive, 12), self.stored(12)[:10] + bytes(10) + b"123")

    def test_a_trim_offset_hides_extents_and_no_piece(self) -> None:
        self.writer.log_entry(self.inode(10, 8000, trim=10), [(10, 5000, b"here")])
        want = bytearray(self.stored(10)[:10].ljust(8000, b"\0"))
        want[5000:5004] = b"here"
        self.assertEqual(self.content(self.open(), 10), bytes(want))

    def test_pieces_go_with_their_inode(self) -> None:
        self.writer.log_entry({}, [(10, 0, b"old" * 100)])
        self.writer.log_entry({Key(10, fmt.INODE, 0): None, Key(10, fmt.EXTENT, 0): None})
        self.writer.log_entry(self.inode(10, 3))
        self.assertEqual(self.content(self.open(), 10), bytes(3))

    def test_pieces_of_what_is_no_file_count_for_nothing(self) -> None:
        target = {Key(10, fmt.INLINE, 0): b"target", Key(10, fmt.EXTENT, 0): None}
        self.writer.log_entry({**self.inode(10, 6, mode=0o120777), **target}, [(10, 0, b"TARGETS"), (1, 50, b"x"), (99, 0, b"x")])
        archive = self.open()
        self.assertEqual(archive.target(10, archive.inode(10)), b"target")
        self.assertEqual(archive.inode(1).size, 3)


class Counted(WithLog):
    def three(self) -> list[tuple[int, int]]:
        """Entries of one, two and one block, each of which writes another file's first byte."""
        return [self.writer.log_entry({}, [(ino, 0, b"%d" % (ino - 9)), (ino, 1, b"x" * more)])
                for ino, more in zip(NAMED, (1, 5000, 1))]  # fmt: skip

    def first(self, count: int) -> list[bytes]:
        return [b"%d" % (ino - 9) if ino - 9 <= count else self.stored(ino)[:1] for ino in NAMED]

    def test_a_torn_last_entry_is_none_and_told_as_incomplete(self) -> None:
        blocks = self.three()
        self.assertEqual(self.contents(self.open()), self.first(3))
        for at in (0, 24, 103, 104, 1000, BLOCK - 1):
            told = "entry 3 of the log is incomplete: it was interrupted, or damaged since" if at > 103 else None
            archive = self.open(self.flipped(blocks[2][0] * BLOCK + at), told)
            self.assertEqual(self.contents(archive), self.first(2))

    def test_an_entry_that_is_lost_before_another_is_told(self) -> None:
        blocks = self.three()
        for number, last in ((0, BLOCK), (1, 2 * BLOCK)):
            for at in (0, 24, 88, 104, 3000, last - 1):
                archive = self.open(self.flipped(blocks[number][0] * BLOCK + at), f"DAMAGED: entry {number + 1} of the log is lost")
                self.assertEqual(self.contents(archive), self.first(number))

    def test_a_commit_empties_the_log(self) -> None:
        self.three()
        self.writer.commit()
        self.assertEqual(self.contents(self.open()), self.first(0))
        # Another entry over the first one: of those behind it nothing counts.
        self.writer.log_entry({}, [(12, 0, b"!")])
        self.assertEqual(self.contents(self.open()), self.first(0)[:2] + [b"!"])

    def test_entries_of_others_are_nothing(self) -> None:
        for wrong in ({"generation": 0 + 1, "tag": b"another record's"}, {"tag": bytes(16)}):
            self.writer._begin_log()
            self.writer.log_entry({}, [(10, 0, b"!")], **wrong)
            self.assertEqual(self.contents(self.open()), self.first(0))

    def test_entries_follow_each_other_in_place_number_and_tag(self) -> None:
        self.writer.log_entry({}, [(10, 0, b"1")])
        begun = self.writer.log_block, self.writer.log_number, self.writer.log_tag
        for wrong in ({"previous": b"another entry's!"}, {"number": 1, "previous": bytes(16)}, {"block": begun[0] + 1}):
            self.writer.log_block, self.writer.log_number, self.writer.log_tag = begun
            blocks = self.writer.log_entry({}, [(11, 0, b"2")], **wrong)
            self.assertEqual(self.contents(self.open()), self.first(1), wrong)
            self.writer.image[blocks[0] * BLOCK : blocks[1] * BLOCK] = bytes((blocks[1] - blocks[0]) * BLOCK)
        self.writer.log_block, self.writer.log_number, self.writer.log_tag = begun
        self.writer.log_entry({}, [(11, 0, b"2")], number=3)
        self.assertEqual(self.contents(self.open(warning="DAMAGED: entry 2 of the log is lost")), self.first(1))

    def test_an_entry_does_not_open_at_another_block(self) -> None:
        first, end = self.writer.log_entry({}, [(10, 0, b"1")])
        image = self.writer.image
        image[end * BLOCK : (end + 1) * BLOCK] = image[first * BLOCK : end * BLOCK]
        image[first * BLOCK : end * BLOCK] = bytes(BLOCK)
        self.assertEqual(self.contents(self.open()), self.first(0))

    def test_the_log_may_be_full(self) -> None:
        for number in range(255):
            self.writer.log_entry({}, [(10, 0, b"%d" % (number % 10))])
        archive = self.open()
        self.assertEqual((len(archive.log.entries), self.content(archive, 10)[:1]), (255, b"4"))
        self.writer._begin_log()
        self.writer.log_entry({}, [(10, 0, b"x" * (LARGEST - 52))])
        self.assertEqual(self.content(self.open(), 10), b"x" * (LARGEST - 52))

    def test_what_opens_and_does_not_decode_is_told(self) -> None:
        self.writer.log_entry({}, [(10, 0, b"1")])
        at = self.writer.log_block
        begun = at, 1, self.writer.log_tag
        counts = struct.pack("<QQIIII", 1000, 77, 0, 0, 1, 0)
        lost = "DAMAGED: entry 2 of the log is lost"
        for wrong, warning in (
            ({"body": counts}, lost),
            ({"body": counts + bytes(21)}, lost),
            ({"padding": b"\1"}, lost),
            ({"said": 256}, "DAMAGED: log entry has a wrong length"),
            ({"block": 319, "said": 2}, "DAMAGED: log entry reaches beyond the log"),
        ):
            self.writer.log_block, self.writer.log_number, self.writer.log_tag = begun
            block, _ = self.writer.log_entry({}, [(11, 0, b"2")], **wrong)
            self.assertEqual(self.contents(self.open(warning=warning)), self.first(1), wrong)
            self.writer.image[block * BLOCK : (block + 1) * BLOCK] = bytes(BLOCK)

    def test_a_closed_record_has_no_entries(self) -> None:
        self.three()
        self.writer.commit(2)
        self.assertEqual(self.contents(self.open()), self.first(0))
        self.writer.log_entry({}, [(10, 0, b"1")])
        self.assertEqual(self.contents(self.open(warning="DAMAGED: entry 1 of the log")), self.first(0))


class Records(WithLog):
    """What entries say of the record that they extend."""

    def test_a_record_that_an_entry_extends_was_no_interrupted_commit(self) -> None:
        root = len(self.writer.image)
        self.writer.commit()
        torn = self.flipped(root + 300)
        self.assertEqual(self.open(torn, "commit 2 never completed").record.generation, 1)
        self.writer.log_entry({}, [(10, 0, b"1")])
        self.assertEqual(self.open(self.flipped(root + 300), "DAMAGED: commit 2 is incomplete").record.generation, 2)

    def test_after_an_interrupted_commit_the_log_of_the_one_before_counts(self) -> None:
        self.writer.log_entry({}, [(10, 0, b"1")])
        root = len(self.writer.image)
        self.writer.commit()
        archive = self.open(self.flipped(root + 300), "commit 2 never completed")
        self.assertEqual(self.contents(archive), [b"1", self.stored(11)[:1], self.stored(12)[:1]])

    def test_a_record_that_is_lost_is_told_by_its_entries(self) -> None:
        self.writer.commit()
        slot = (33 + 1) * BLOCK
        self.assertEqual(self.open(self.flipped(slot)).record.generation, 1)
        self.writer.log_entry({}, [(10, 0, b"1")])
        self.assertEqual(self.open(self.flipped(slot), "DAMAGED: the newest commit record is lost").record.generation, 1)

    def test_a_pending_log_is_laid_over_the_records_that_name_it(self) -> None:
        first, _ = self.writer.log_entry({}, [(10, 0, b"1")])
        second, _ = self.writer.log_entry({}, [(11, 0, b"2")])
        pending = self.writer.pending()
        third, _ = self.writer.log_entry({}, [(12, 0, b"3")])
        want = [b"1", b"2", self.stored(12)[:1]]
        for flags in (0, 1, 0):
            self.writer.commit(flags, pending=pending)
            archive = self.open()
            self.assertEqual((archive.record.pending is None, self.contents(archive)), (False, want))
            # What lies behind the entry that is named is not looked at.
            self.assertEqual(self.contents(self.open(self.flipped(third * BLOCK + 2000))), want)
        for at, number in ((first, 1), (second, 2)):
            archive = self.open(self.flipped(at * BLOCK + 2000), f"DAMAGED: entry {number} of the log is lost")
            self.assertEqual(len(archive.log.entries), number - 1)
        # The commit that contains the entries names them no more.
        self.writer.commit()
        self.assertEqual(self.open().log.entries, [])

    def test_a_pending_log_ends_with_the_very_entry_that_is_named(self) -> None:
        self.writer.log_entry({}, [(10, 0, b"1")])
        named = self.writer.pending()
        self.writer.commit(pending=named[:-1] + bytes([named[-1] ^ 1]))
        self.open(warning="DAMAGED: entry 2 of the log is lost")

    def test_no_page_lies_in_the_log(self) -> None:
        moved = self.page._replace(address=300)
        self.writer.extent(10, 0, moved, 0, 8000)
        self.writer.commit()
        with self.assertRaisesRegex(fmt.Damaged, "pointer outside of the pages: block=300"):
            self.content(self.open(), 10)


class WithoutLog(WithLog):
    features = 0

    def test_blocks_of_a_log_are_those_of_pages(self) -> None:
        self.writer.log_entry({}, [(10, 0, b"!")])
        archive = self.open()
        self.assertEqual(self.contents(archive), [self.stored(ino)[:1] for ino in NAMED])
        self.writer.extent(10, 0, self.page._replace(address=300), 0, 8000)
        self.writer.commit()
        with self.assertRaisesRegex(fmt.Damaged, "failed authentication: block=300"):
            self.content(self.open(), 10)

    def test_a_record_of_an_archive_with_a_log_is_refused(self) -> None:
        self.writer.log_entry({}, [(10, 0, b"!")])
        self.writer.commit(pending=self.writer.pending())
        with self.assertRaisesRegex(fmt.Damaged, "the commit needs a log"):
            self.open()
        # Only the record that is trusted is looked at (section 10.2 rule 3).
        self.writer.commit()
        self.assertIsNone(self.open().record.pending)


if __name__ == "__main__":
    unittest.main()
