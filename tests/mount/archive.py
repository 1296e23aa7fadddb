#!/usr/bin/env python3
"""Looks at and alters archive files from outside, without any key.

  data FILE              writes the ranges that hold data (SEEK_DATA) to standard output, without what is known to be no
                         secret: the framing blocks, and the second header copy, which repeats the first
  flip FILE SEED         flips one bit somewhere in those ranges and prints its offset
  rot FILE BEFORE        flips one bit of each block of pages that is not as in the file BEFORE
  header FILE AT HEX     overwrites bytes of both header copies and makes their checksums right again
"""
import hashlib
import os
import random
import sys

BLOCK = 4096
COPIES = (0, 320)
HEADER_BLOCKS = 33
CHECKSUM = 4064


def ranges(descriptor):
    """Where the host has data; asked for all at once, since reading brings allocated but unwritten blocks into the kernel's
    cache, where they count as data."""
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return list(find_ranges(descriptor))


def find_ranges(descriptor):
    end = os.fstat(descriptor).st_size
    at = 0
    while at < end:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:
            return
        at = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, at


def data(name):
    with open(name, "rb", buffering=0) as file:
        for start, end in ranges(file.fileno()):
            for at in range(start, end, BLOCK):
                block = at // BLOCK
                if block != 0 and not COPIES[1] <= block < COPIES[1] + HEADER_BLOCKS:
                    sys.stdout.buffer.write(os.pread(file.fileno(), min(BLOCK, end - at), at))


def flip(name, seed):
    with open(name, "r+b", buffering=0) as file:
        found = ranges(file.fileno())
        choices = random.Random(int(seed))
        at = choices.randrange(sum(end - start for start, end in found))
        for start, end in found:
            if at < end - start:
                break
            at -= end - start
        byte = os.pread(file.fileno(), 1, start + at)[0]
        bit = choices.randrange(8)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), start + at)
        print("offset %d bit %d" % (start + at, bit))


def rot(name, before):
    with open(name, "r+b") as file, open(before, "rb") as old:
        rotten = 0
        for at in range(65 * BLOCK, os.fstat(file.fileno()).st_size, BLOCK):
            now = os.pread(file.fileno(), BLOCK, at)
            if any(now) and now != os.pread(old.fileno(), BLOCK, at) and not COPIES[1] <= at // BLOCK < COPIES[1] + HEADER_BLOCKS:
                os.pwrite(file.fileno(), bytes([now[200] ^ 1]), at + 200)
                rotten += 1
        print(rotten, "blocks")


def header(name, at, new):
    new = bytes.fromhex(new)
    with open(name, "r+b", buffering=0) as file:
        for copy in COPIES:
            file.seek(copy * BLOCK)
            content = bytearray(file.read(HEADER_BLOCKS * BLOCK))
            content[int(at) : int(at) + len(new)] = new
            content[CHECKSUM : CHECKSUM + 32] = bytes(32)
            content[CHECKSUM : CHECKSUM + 32] = hashlib.sha256(content).digest()
            file.seek(copy * BLOCK)
            file.write(content)


def main():
    {"data": data, "flip": flip, "rot": rot, "header": header}[sys.argv[1]](*sys.argv[2:])


main()
