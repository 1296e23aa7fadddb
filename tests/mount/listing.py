#!/usr/bin/env python3
"""Prints one line for each object of a tree with everything that a faithful copy keeps.

With a second argument the link counts of directories are printed too: file systems differ in how they count them.
"""
import os
import stat
import sys


def describe(path, first_names, directory_links):
    status = os.lstat(path)
    kind = stat.S_IFMT(status.st_mode)
    facts = ["%06o" % status.st_mode, "%d:%d" % (status.st_uid, status.st_gid), "mtime=%d" % status.st_mtime_ns]
    if kind != stat.S_IFDIR:
        facts.append("links=%d" % status.st_nlink)
        if status.st_nlink > 1:
            facts.append("first=%r" % first_names.setdefault((status.st_dev, status.st_ino), path))
        facts.append("size=%d" % status.st_size)
    elif directory_links:
        facts.append("links=%d" % status.st_nlink)
    if kind == stat.S_IFLNK:
        facts.append("target=%r" % os.readlink(path))
    if kind in (stat.S_IFBLK, stat.S_IFCHR):
        facts.append("device=%d:%d" % (os.major(status.st_rdev), os.minor(status.st_rdev)))
    for name in sorted(os.listxattr(path, follow_symlinks=False)):
        facts.append("%s=%s" % (name, os.getxattr(path, name, follow_symlinks=False).hex()))
    return " ".join(facts)


def main():
    os.chdir(os.fsencode(sys.argv[1]))
    first_names = {}
    directory_links = len(sys.argv) > 2
    paths = [b"."]
    for directory, directories, files in os.walk(b"."):
        paths += [os.path.join(directory, name) for name in directories + files]
    for path in sorted(paths):
        print("%r %s" % (path, describe(path, first_names, directory_links)))


main()
