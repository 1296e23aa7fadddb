"""What snapshots show (section 8), beside a live tree and a log that say something else."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import unittest
from pathlib import Path

import lockbox_format as fmt
from lockbox_format import Key
from lockbox_reader import Archive, main
from test_log import NAMED, PASSPHRASE, WithLog

STRANGE = b"\xff\x1b[2J\xe2\x80\xae."


class Snapshots(WithLog):
    """One of the beginning, one of a second moment, which both differ from what is live; entries of the log lie over that."""

    def setUp(self) -> None:
        super().setUp()
        w = self.writer
        w.snapshot(3, b"first")
        w.snapshot(7, STRANGE, seconds=1_700_000_000)
        self.inode(10, 5)
        w.commit()
        w.snapshot(8, b"second", seconds=4)
        self.page_of_live = w.data_page(b"live" * 2000, 12, False, 11, 0)
        w.extent(11, 0, self.page_of_live, 0, 8000)
        self.inode(12, 0, links=0)
        w.inode(1, 0o40755, size=2, links=2, parent=1)
        for key in [key for key in w.live if key.kind in (fmt.DIR_LIST, fmt.DIR_INDEX) and w.live[key].endswith(b"c")]:
            del w.live[key]
        w.commit()
        w.log_entry(self.inode(10, 9), [(10, 0, b"of an entry"), (11, 2, b"LOG")])

    def names(self, archive: Archive) -> list[bytes]:
        return [path for path, _, _ in archive.walk() if path]

    def run_reader(self, *arguments: str | bytes) -> tuple[int, str, str]:
        with tempfile.TemporaryDirectory() as folder:
            image, passfile = Path(folder, "a.lbx"), Path(folder, "pass")
            image.write_bytes(self.writer.image)
            passfile.write_bytes(PASSPHRASE)
            out, err = io.StringIO(), io.StringIO()
            # As the interpreter decodes what stands on the command line.
            given = [str(image) if argument == "ARCHIVE" else os.fsdecode(argument) for argument in arguments]
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(["--passfile", str(passfile), *given])
        return code, out.getvalue(), err.getvalue()

    def test_a_snapshot_shows_its_tree_without_what_is_live_or_in_the_log(self) -> None:
        archive = self.open()
        live = [self.content(archive, ino) for ino in NAMED[:2]]
        self.assertEqual(live, [b"of an entry", b"liLOG" + (b"live" * 2000)[5:]])
        self.assertEqual(self.names(archive), [b"a", b"b"])
        first, second = archive.showing(b"first"), archive.showing(b"second")
        self.assertEqual([self.content(first, ino) for ino in NAMED], [self.stored(ino) for ino in NAMED])
        self.assertEqual(self.content(second, 10), self.stored(10)[:5])
        self.assertEqual([self.names(first), self.names(second)], [[b"a", b"b", b"c"]] * 2)
        # The archive itself goes on showing what is live.
        self.assertEqual([self.content(archive, ino) for ino in NAMED[:2]], live)

    def test_snapshots_are_listed_by_id_with_their_names_made_harmless(self) -> None:
        self.writer.snapshot(9, b"", seconds=6)
        self.writer.commit()
        lines = [
            "     3 1970-01-01 00:00:05           43 first",
            "     7 2023-11-14 22:13:20           47 \\xff\\x1b[2J\\xe2\\x80\\xae.",
            "     8 1970-01-01 00:00:04           48 second",
        ]
        self.assertEqual(self.run_reader("snapshots", "ARCHIVE"), (0, "\n".join(lines) + "\n", ""))
        self.assertIn("snapshots   3\n", self.run_reader("info", "ARCHIVE")[1])

    def test_the_commands_read_the_snapshot_that_is_named(self) -> None:
        code, out, err = self.run_reader("ls", "--snapshot", "second", "ARCHIVE")
        self.assertEqual((code, err, [line.split()[-1] for line in out.splitlines()]), (0, "", [".", "a", "b", "c"]))
        code, out, err = self.run_reader("ls", "--snapshot", STRANGE, "ARCHIVE")
        self.assertEqual((code, err, [line.split()[4] for line in out.splitlines()]), (0, "", ["3", "8000", "8000", "8000"]))
        with tempfile.TemporaryDirectory() as target:
            self.assertEqual(self.run_reader("extract", "--snapshot", "first", "ARCHIVE", target), (0, "", ""))
            for ino in NAMED:
                self.assertEqual(Path(target, os.fsdecode(self.name(ino))).read_bytes(), self.stored(ino))

    def test_what_is_no_snapshot_is_not_read(self) -> None:
        # Being removed: whoever asks for no name does not get it.
        self.writer.snapshot(8, b"")
        self.writer.commit()
        for name in (b"second", b"", b"firs", b"\x1b"):
            with self.subTest(name=name):
                code, out, err = self.run_reader("ls", "--snapshot", name, "ARCHIVE")
                self.assertEqual((code, out), (1, ""))
                self.assertIn("there is no snapshot", err)
                self.assertNotIn("\x1b", err)

    def test_the_newest_of_one_name_is_read(self) -> None:
        w = self.writer
        w.snapshot(2**63, b"first", seconds=1)
        w.snapshot(1, b"first", bytes(40), seconds=9)
        w.commit()
        self.assertEqual(self.names(self.open().showing(b"first")), [b"a", b"b"])

    def test_a_snapshot_without_a_tree_is_refused(self) -> None:
        self.writer.snapshot(9, b"none", bytes(40))
        self.writer.commit()
        archive = self.open()
        with self.assertRaisesRegex(fmt.Damaged, "no tree"):
            archive.showing(b"none")

    def test_a_snapshot_with_the_root_of_another_tree_is_refused(self) -> None:
        self.writer.snapshot(9, b"other", self.writer.tree(fmt.SNAPSHOTS, self.writer.snapshots))
        self.writer.commit()
        archive = self.open()
        with self.assertRaisesRegex(fmt.Damaged, "not the one that its parent names"):
            self.names(archive.showing(b"other"))

    def test_damage_in_one_snapshot_reaches_no_further(self) -> None:
        w = self.writer
        w.live[Key(10, fmt.INLINE, 0)] = b"short"
        w.commit()
        w.snapshot(9, b"damaged")
        w.commit()
        address = int.from_bytes(w.snapshots[Key(9, fmt.SNAPSHOT, 0)][24:30], "little")
        # The newest record lists it no more, so that nobody meets it but who reads this snapshot.
        w.commit()
        archive = self.open(self.flipped(address * fmt.BLOCK + 300))
        with self.assertRaisesRegex(fmt.Damaged, "authentication"):
            self.names(archive.showing(b"damaged"))
        self.assertEqual(self.names(archive), [b"a", b"b"])
        self.assertEqual(self.names(archive.showing(b"second")), [b"a", b"b", b"c"])

    def test_names_of_files_are_made_harmless_too(self) -> None:
        w = self.writer
        w.inode(13, 0o120777, size=3)
        w.entry(1, b"\x1b]0;x\x07", 13, fmt.SYMLINK)
        w.live[Key(13, fmt.INLINE, 0)] = b"\x9b\n\\"
        w.inode(1, 0o40755, size=3, links=2, parent=1)
        w.commit()
        code, out, err = self.run_reader("ls", "ARCHIVE")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("\\x1b]0;x\\x07 -> \\x9b\\x0a\\\n", out)

    def test_names_of_what_cannot_be_extracted_are_made_harmless(self) -> None:
        w = self.writer
        w.inode(13, 0o140700)
        w.entry(1, b"\x1b[2J", 13, fmt.SOCKET)
        w.inode(1, 0o40755, size=3, links=2, parent=1)
        w.commit()
        with tempfile.TemporaryDirectory() as target:
            code, out, err = self.run_reader("extract", "ARCHIVE", target)
            self.assertEqual((code, out, err), (1, "", f"{target}/\\x1b[2J: not extracted: type=12\n"))


if __name__ == "__main__":
    unittest.main()
