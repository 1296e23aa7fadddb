#!/usr/bin/env python3
"""Looks at and alters archive files from outside, without any key.

  data FILE              writes the ranges that hold data (SEEK_DATA) to standard output
  flip FILE SEED         flips one bit somewhere in those ranges and prints its offset
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
            file.seek(start)
            while start < end:
                start += sys.stdout.buffer.write(file.read(min(1 << 20, end - start)))


def flip(name, seed):
    with open(name, "r+b", buffering=0) as file:
        found = list(ranges(file.fileno()))
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
    {"data": data, "flip": flip, "header": header}[sys.argv[1]](*sys.argv[2:])


main()
