#!/usr/bin/env python3
"""Random operations on two files of a mount, compared with what the files ought to hold: what fsx 0.3.2 does not do.

ranges.py [--direct] [--remount COMMAND] --seed N --operations N DIRECTORY

Writes and reads (with --direct by O_DIRECT, in blocks), through memory maps, truncates, punches, zeroes, allocates, copies between and
within the files, seeks for data and holes. With --remount the command, given the directory, remounts it now and then.
"""

import argparse
import ctypes
import errno
import mmap
import os
import random
import subprocess
import sys

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
BLOCK = 4096
LIMIT = 600_000

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def fallocate(fd, mode, offset, length):
    if libc.fallocate(fd, mode, offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Tested:
    def __init__(self, path, direct):
        self.path, self.direct = path, direct
        self.content = bytearray()
        self.fd = self.direct_fd = -1
        self.open(os.O_CREAT)

    def open(self, flags=0):
        self.fd = os.open(self.path, os.O_RDWR | flags, 0o644)
        if self.direct:
            self.direct_fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)

    def close(self):
        os.close(self.fd)
        if self.direct:
            os.close(self.direct_fd)

    def grow(self, end):
        if len(self.content) < end:
            self.content.extend(bytes(end - len(self.content)))


class Run:
    def __init__(self, options):
        self.random = random.Random(options.seed)
        self.options = options
        self.files = [Tested(os.path.join(options.directory, name), options.direct) for name in ("a", "b")]
        self.history = []

    def below(self, bound):
        return self.random.randrange(bound) if bound > 0 else 0

    def range(self, bound):
        """Aligned or not, short or long, within `bound`."""
        unit = self.random.choice([1, 1, 512, BLOCK, 131072])
        offset = self.below(bound // unit + 1) * unit
        length = 1 + self.below(self.random.choice([100, BLOCK, 20_000, 200_000]))
        return offset, max(1, min(length, bound - offset)) if offset < bound else 1

    def bytes(self, length):
        if self.below(2):
            return self.random.randbytes(length)
        return bytes([1 + self.below(255)]) * length

    def write(self, file):
        offset, length = self.range(LIMIT)
        data = self.bytes(length)
        self.history.append(("write", file.path, offset, length))
        assert os.pwrite(file.fd, data, offset) == length
        file.grow(offset + length)
        file.content[offset:offset + length] = data

    def write_direct(self, file):
        offset, length = self.below(LIMIT // BLOCK) * BLOCK, (1 + self.below(40)) * BLOCK
        self.history.append(("direct", file.path, offset, length))
        buffer = mmap.mmap(-1, length)
        buffer[:] = self.bytes(length)
        assert os.pwritev(file.direct_fd, [buffer], offset) == length
        file.grow(offset + length)
        file.content[offset:offset + length] = buffer[:]

    def read_direct(self, file):
        offset, length = self.below(LIMIT // BLOCK) * BLOCK, (1 + self.below(40)) * BLOCK
        buffer = mmap.mmap(-1, length)
        got = os.preadv(file.direct_fd, [buffer], offset)
        self.same(file, offset, buffer[:got], min(length, max(0, len(file.content) - offset)))

    def read(self, file):
        offset, length = self.range(LIMIT)
        self.same(file, offset, os.pread(file.fd, length, offset), min(length, max(0, len(file.content) - offset)))

    def same(self, file, offset, got, length):
        expected = file.content[offset:offset + length]
        if got != expected:
            at = next((i for i in range(min(len(got), length)) if got[i] != expected[i]), min(len(got), length))
            self.fail(f"{file.path} differs at {offset + at}: read of {offset}+{length} gave {len(got)} bytes")

    def map(self, file):
        if not file.content:
            return
        offset, length = self.range(len(file.content))
        length = min(length, len(file.content) - offset)
        if length <= 0:
            return
        self.history.append(("map", file.path, offset, length))
        data = self.bytes(length)
        with mmap.mmap(file.fd, len(file.content)) as mapped:
            self.same(file, offset, mapped[offset:offset + length], length)
            mapped[offset:offset + length] = data
        file.content[offset:offset + length] = data

    def truncate(self, file):
        size = self.below(self.random.choice([300, LIMIT]))
        self.history.append(("truncate", file.path, size))
        os.ftruncate(file.fd, size)
        del file.content[size:]
        file.grow(size)

    def empty(self, file):
        mode = self.random.choice([PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE])
        offset, length = self.range(LIMIT)
        self.history.append(("empty", mode, file.path, offset, length))
        fallocate(file.fd, mode, offset, length)
        if not mode & KEEP_SIZE:
            file.grow(offset + length)
        end = min(offset + length, len(file.content))
        if offset < end:
            file.content[offset:end] = bytes(end - offset)

    def allocate(self, file):
        mode = self.random.choice([0, KEEP_SIZE])
        offset, length = self.range(LIMIT)
        self.history.append(("allocate", mode, file.path, offset, length))
        fallocate(file.fd, mode, offset, length)
        if not mode:
            file.grow(offset + length)

    def copy(self, source):
        target = self.random.choice(self.files)
        (start, length), (to, _) = self.range(len(source.content)), self.range(LIMIT)
        expected = max(0, min(length, len(source.content) - start))
        self.history.append(("copy", source.path, start, target.path, to, length))
        if source is target and start < to + length and to < start + length:
            try:
                os.copy_file_range(source.fd, target.fd, length, start, to)
            except OSError as error:
                assert error.errno == errno.EINVAL, error
                return
            assert expected == 0 or not (start < to + expected and to < start + expected), "an overlapping copy was made"
        done = 0
        while done < expected:
            copied = os.copy_file_range(source.fd, target.fd, expected - done, start + done, to + done)
            assert copied > 0, "a copy ended early"
            done += copied
        if expected > 0:
            target.grow(to + expected)
            target.content[to:to + expected] = source.content[start:start + expected]

    def layout(self, file):
        """What is called a hole holds nothing, and data and holes alternate up to the end."""
        at, size, data = 0, len(file.content), 0
        # Before seeking, which has the kernel hand over what it caches.
        assert os.fstat(file.fd).st_blocks > 0 or not any(file.content), "data without blocks"
        while at < size:
            try:
                found = os.lseek(file.fd, at, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO, error
                found = size
            assert at <= found <= size, f"SEEK_DATA from {at} gave {found}, size {size}"
            if any(file.content[at:found]):
                self.fail(f"{file.path} has data in what is called a hole: {at}..{found}")
            if found == size:
                break
            at = os.lseek(file.fd, found, os.SEEK_HOLE)
            assert found < at <= size, f"SEEK_HOLE from {found} gave {at}, size {size}"
            data += at - found
        stat = os.fstat(file.fd)
        assert stat.st_size == size, f"size {stat.st_size} instead of {size}"
        assert stat.st_blocks * 512 <= data + BLOCK, f"{stat.st_blocks} blocks for {data} bytes"

    def reopen(self, file):
        file.close()
        file.open()

    def remount(self):
        for file in self.files:
            file.close()
        subprocess.run([self.options.remount, self.options.directory], check=True)
        for file in self.files:
            file.open()
            self.check(file)

    def check(self, file):
        self.layout(file)
        self.same(file, 0, os.pread(file.fd, LIMIT * 2, 0), len(file.content))

    def fail(self, reason):
        for entry in self.history[-30:]:
            print(*entry)
        sys.exit(f"seed {self.options.seed}, operation {self.operation}: {reason}")

    def run(self):
        kinds = [(self.write, 10), (self.read, 10), (self.map, 4), (self.truncate, 3), (self.empty, 6), (self.allocate, 2),
                 (self.copy, 6), (self.layout, 4), (self.reopen, 2), (lambda file: os.fsync(file.fd), 1)]
        if self.options.direct:
            kinds += [(self.write_direct, 12), (self.read_direct, 12)]
        operations, weights = zip(*kinds)
        for self.operation in range(self.options.operations):
            if self.options.remount and self.operation % 2000 == 1999:
                self.remount()
            try:
                self.random.choices(operations, weights)[0](self.random.choice(self.files))
            except (AssertionError, OSError) as error:
                self.fail(f"{type(error).__name__}: {error}")
        if self.options.remount:
            self.remount()
        for file in self.files:
            self.check(file)
            file.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--operations", type=int, required=True)
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--remount", metavar="COMMAND")
    parser.add_argument("directory")
    Run(parser.parse_args()).run()


main()
