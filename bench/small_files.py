#!/usr/bin/env python3
"""Creates, stats, reads or deletes a tree of small files and prints how many files a second that were."""
import os
import random
import sys
import time

PER_DIRECTORY = 500
SIZE = 1024


def main():
    what, top, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    content = random.Random(8).randbytes(SIZE)
    start = time.perf_counter()
    {"create": create, "stat": stat, "read": read, "delete": delete}[what](top, count, content)
    print("%.1f" % (count / (time.perf_counter() - start)))


def create(top, count, content):
    """With an fsync of each directory once it is full."""
    os.mkdir(top)
    for first in range(0, count, PER_DIRECTORY):
        directory = os.path.join(top, "d%05d" % (first // PER_DIRECTORY))
        os.mkdir(directory)
        for number in range(first, min(count, first + PER_DIRECTORY)):
            descriptor = os.open(os.path.join(directory, "f%07d" % number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(descriptor, content)
            os.close(descriptor)
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def files(top):
    for directory, _, names in os.walk(top):
        for name in names:
            yield os.path.join(directory, name)


def stat(top, count, content):
    seen = sum(os.lstat(path).st_size == SIZE for path in files(top))
    assert seen == count, seen


def read(top, count, content):
    seen = 0
    for path in files(top):
        descriptor = os.open(path, os.O_RDONLY)
        seen += os.read(descriptor, SIZE + 1) == content
        os.close(descriptor)
    assert seen == count, seen


def delete(top, count, content):
    for directory, directories, names in os.walk(top, topdown=False):
        for name in names:
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


main()
