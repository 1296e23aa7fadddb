#!/usr/bin/env python3
"""xattrs.py user|root DIRECTORY: extended attributes as Linux programs expect them. Prints nothing and ends with 0."""
import errno
import os
import socket
import stat
import sys

role, top = sys.argv[1:]


def refused(code, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except OSError as error:
        assert error.errno == code, "%s instead of %s: %r" % (error, errno.errorcode[code], arguments)
    else:
        raise AssertionError("not refused with %s: %r" % (errno.errorcode[code], arguments))


def flags_and_sizes(path):
    refused(errno.ENODATA, os.getxattr, path, "user.a")
    refused(errno.ENODATA, os.setxattr, path, "user.a", b"v", os.XATTR_REPLACE)
    refused(errno.ENODATA, os.removexattr, path, "user.a")
    os.setxattr(path, "user.a", b"v", os.XATTR_CREATE)
    refused(errno.EEXIST, os.setxattr, path, "user.a", b"w", os.XATTR_CREATE)
    os.setxattr(path, "user.a", b"w", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.a") == b"w"
    os.setxattr(path, "user.empty", b"")
    assert os.getxattr(path, "user.empty") == b""
    longest = "user." + "n" * 250
    os.setxattr(path, longest, b"x")
    refused(errno.ERANGE, os.setxattr, path, longest + "n", b"x")
    large = os.urandom(65536)
    os.setxattr(path, "user.large", large)
    assert os.getxattr(path, "user.large") == large
    refused(errno.E2BIG, os.setxattr, path, "user.large", large + b"x")
    assert set(os.listxattr(path)) == {"user.a", "user.empty", longest, "user.large"}
    os.setxattr(path, "user.large", b"short")
    for name in os.listxattr(path):
        os.removexattr(path, name)
    assert os.listxattr(path) == []


def many(path):
    names = {"user.%s" % number for number in range(500)}
    for name in names:
        os.setxattr(path, name, name.encode() * 9)
    assert set(os.listxattr(path)) == names
    assert all(os.getxattr(path, name) == name.encode() * 9 for name in names)
    # The system call itself: a probe, a buffer that is a byte short, one that fits.
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    size = libc.listxattr(path.encode(), None, 0)
    assert size == sum(len(name) + 1 for name in names)
    buffer = ctypes.create_string_buffer(size)
    assert libc.listxattr(path.encode(), buffer, size - 1) == -1 and ctypes.get_errno() == errno.ERANGE
    assert libc.listxattr(path.encode(), buffer, size) == size
    assert libc.getxattr(path.encode(), b"user.7", None, 0) == 54
    assert libc.getxattr(path.encode(), b"user.7", buffer, 53) == -1 and ctypes.get_errno() == errno.ERANGE
    # A flood ends in "no space" and leaves the file as it was.
    for number in range(300):
        try:
            os.setxattr(path, "user.%0250d" % number, b"")
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            break
    else:
        raise AssertionError("no bound")
    assert names < set(os.listxattr(path))
    for name in os.listxattr(path):
        os.removexattr(path, name)


def others(directory):
    """What has no user attributes of its own."""
    link, fifo = directory + "/link", directory + "/fifo"
    os.symlink("nowhere", link)
    os.mkfifo(fifo)
    for path in link, fifo:
        refused(errno.EPERM, os.setxattr, path, "user.a", b"v", follow_symlinks=False)
        refused(errno.ENODATA, os.getxattr, path, "user.a", follow_symlinks=False)
    refused(errno.EOPNOTSUPP, os.setxattr, link, "system.posix_acl_access", b"", follow_symlinks=False)
    if role == "root":
        os.mknod(directory + "/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        unix = socket.socket(socket.AF_UNIX)
        os.chdir(directory)
        unix.bind("socket")
        for path in link, fifo, "null", "socket":
            for name in "trusted.a", "security.a":
                os.setxattr(path, name, b"v" * 3001, follow_symlinks=False)
                assert os.getxattr(path, name, follow_symlinks=False) == b"v" * 3001
            assert sorted(os.listxattr(path, follow_symlinks=False)) == ["security.a", "trusted.a"]
    else:
        refused(errno.EPERM, os.setxattr, fifo, "trusted.a", b"v")
        refused(errno.EPERM, os.setxattr, fifo, "security.a", b"v")


directory = top + "/" + role
os.mkdir(directory)
file = directory + "/file"
open(file, "w").close()
for path in file, directory:
    flags_and_sizes(path)
    for name in "system.other", "os2.a", "plain":
        refused(errno.EOPNOTSUPP, os.setxattr, path, name, b"v")
        refused(errno.EOPNOTSUPP, os.getxattr, path, name)
    refused(errno.EINVAL, os.setxattr, path, "user.", b"v")
many(file)
others(directory)
