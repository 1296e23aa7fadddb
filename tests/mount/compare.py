#!/usr/bin/env python3
"""Compares a tree with a damaged copy: errors are allowed, wrong or silently missing content is not.

Prints "same", or "errors" when something could not be read; fails with a sentence on anything wrong.
"""
import errno
import os
import sys


def compare(original, copy):
    errors = 0
    try:
        names = sorted(os.listdir(copy))
    except OSError as error:
        return expected(error, copy)
    if names != sorted(os.listdir(original)):
        sys.exit("%r lists %d names" % (copy, len(names)))
    for name in names:
        ours, theirs = os.path.join(original, name), os.path.join(copy, name)
        try:
            right, found = os.lstat(ours), os.lstat(theirs)
            facts = ["st_mode", "st_uid", "st_gid", "st_mtime_ns"]
            for fact in facts:
                if getattr(right, fact) != getattr(found, fact):
                    sys.exit("%r: %s is %r" % (theirs, fact, getattr(found, fact)))
            for attribute in os.listxattr(ours, follow_symlinks=False):
                value = os.getxattr(theirs, attribute, follow_symlinks=False)
                if value != os.getxattr(ours, attribute, follow_symlinks=False):
                    sys.exit("%r has a wrong xattr" % theirs)
            if os.path.islink(ours):
                if os.readlink(ours) != os.readlink(theirs):
                    sys.exit("%r has a wrong target" % theirs)
            elif os.path.isdir(ours):
                errors += compare(ours, theirs)
            else:
                errors += compare_content(ours, theirs)
        except OSError as error:
            errors += expected(error, theirs)
    return errors


def compare_content(ours, theirs):
    """Block by block, so that what is readable around the damage is compared too."""
    errors = 0
    with open(ours, "rb", buffering=0) as right, open(theirs, "rb", buffering=0) as found:
        size = os.fstat(right.fileno()).st_size
        if os.fstat(found.fileno()).st_size != size:
            sys.exit("%r has a wrong size" % theirs)
        for at in range(0, size, 4096):
            try:
                content = os.pread(found.fileno(), 4096, at)
            except OSError as error:
                errors += expected(error, theirs)
                continue
            if content != os.pread(right.fileno(), 4096, at):
                sys.exit("%r has wrong content at %d" % (theirs, at))
    return errors


def expected(error, path):
    if error.errno != errno.EIO:
        sys.exit("%r gives %s" % (path, error))
    return 1


print("errors" if compare(*sys.argv[1:3]) else "same")
