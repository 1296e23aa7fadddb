#!/usr/bin/env python3
"""Builds a tree of real source files, and decorates it with every kind of metadata that a copy must keep. SOURCES: number of files."""
import os
import random
import shutil
import sys

WANTED = int(os.environ.get("SOURCES", "1500"))
random = random.Random(20)


def take_packages(registry, target):
    """Copies unpacked packages until there are enough files."""
    count = 0
    for index in sorted(os.listdir(registry)):
        for package in sorted(os.listdir(os.path.join(registry, index))):
            source = os.path.join(registry, index, package)
            # The biggest ones bring many files of assembler and nothing new.
            if not os.path.isdir(source) or package.startswith("aws-lc-sys"):
                continue
            shutil.copytree(source, os.path.join(target, package), symlinks=True, dirs_exist_ok=True)
            count += sum(len(files) for _, _, files in os.walk(os.path.join(target, package)))
            if count >= WANTED:
                return count
    sys.exit("only %d files below %s: build the workspace first" % (count, registry))


def decorate(top):
    odd = os.path.join(top, b"odd")
    os.mkdir(odd)
    os.chdir(odd)
    for name in [b"x" * 255, b"new\nline", b"\xff\xfe not utf-8", b" space ", b"-rf", "日本語".encode(), b"\\back'\"slash"]:
        with open(name, "wb") as file:
            file.write(name * 3)
    open("empty", "wb").close()
    with open("sparse", "wb") as file:
        file.seek(3 << 20)
        file.write(b"middle")
        file.truncate(9 << 20)
    with open("random", "wb") as file:
        file.write(random.randbytes(3_000_001))
    os.symlink("empty", "link")
    os.symlink("nowhere/at/all", "dangling")
    os.symlink("t" * 4000, "long target")
    for number in range(5):
        os.link("random", "hard%d" % number)
    os.mkdir("empty directory")
    os.mkfifo("fifo", 0o640)
    for number, mode in enumerate([0o000, 0o400, 0o644, 0o751, 0o1777, 0o2755, 0o4755, 0o7777]):
        name = "mode%d" % number
        open(name, "w").close()
        os.chown(name, 1000 + number, 2_000_000_000 + number)
        os.chmod(name, mode)
    os.mkdir("sticky")
    os.chmod("sticky", 0o3777)
    for name in ["empty", "random", "sticky"]:
        os.setxattr(name, "user.comment", "grün".encode())
        os.setxattr(name, "user.empty", b"")
        os.setxattr(name, "user.large", random.randbytes(2000))


def set_times(top):
    """Times with all nine digits, also beyond 2038; directories last, since their entries change them."""
    for directory, directories, files in os.walk(top, topdown=False):
        for name in files + [n for n in directories if os.path.islink(os.path.join(directory, n))]:
            stamp(os.path.join(directory, name))
        stamp(directory)


def stamp(path):
    # Not before 1970: not every file system on which the source may lie can keep that.
    when = random.randrange(10**9, 4 * 10**18)
    os.utime(path, ns=(when, when), follow_symlinks=False)


def main():
    registry, target = sys.argv[1:]
    os.mkdir(target)
    count = take_packages(registry, target)
    top = os.path.abspath(os.fsencode(target))
    decorate(top)
    set_times(top)
    print("source tree: %d files" % count)


main()
