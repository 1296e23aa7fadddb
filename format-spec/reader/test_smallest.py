"""Section 16 of ../format.md and ../vectors/smallest.json are what smallest.py makes, and the reader opens it."""

from __future__ import annotations

import tempfile
import unittest

from lockbox_reader import Archive
from smallest import BEGIN, END, PASSPHRASE, ROOT_BLOCK, SPECIFICATION, VECTOR, Smallest


class TheSmallestArchive(unittest.TestCase):
    def test_the_section_and_the_vector_are_true(self) -> None:
        smallest = Smallest()
        text = SPECIFICATION.read_text()
        self.assertEqual(text.partition(BEGIN)[2].partition(END)[0], smallest.section(), "run smallest.py")
        self.assertEqual(VECTOR.read_text(), smallest.vector(), "run smallest.py")

    def test_it_opens_and_is_empty(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(Smallest().image())
            archive = Archive(file, PASSPHRASE)
            self.assertEqual(archive.warnings, [])
            self.assertEqual(archive.live.pointer.address if archive.live.pointer else None, ROOT_BLOCK)
            self.assertEqual([path for path, _, _ in archive.walk()], [b""])


if __name__ == "__main__":
    unittest.main()
