#!/usr/bin/env python3
"""twins.py OURS REFERENCE SEED STEPS: random changes of permissions, lists, owners and attributes by several users, made in two
empty directories of which the second is on a file system of the kernel's own. Every answer and every state must be the same."""
import errno
import os
import random
import stat
import struct
import sys

ours, reference, seed, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
print("seed", seed)
chance = random.Random(seed)
USERS = [(0, 0, [0]), (0, 0, [0]), (1234, 4321, [4321, 77]), (1235, 4322, [4322])]
IDS = [0, 77, 1234, 1235, 4321, 4322, 60000]
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
NAMES = [ACCESS, ACCESS, ACCESS, DEFAULT, DEFAULT, "user.a", "user.b", "trusted.a", "security.a", "system.other", "odd"]


def become(user):
    os.seteuid(0)
    os.setegid(0)
    uid, gid, groups = user
    os.setgroups(groups)
    os.setegid(gid)
    os.seteuid(uid)


def acl():
    bits = lambda: chance.choice([0, 1, 4, 5, 6, 7, 7])
    entries = [(1, bits(), -1)]
    entries += [(2, bits(), chance.choice(IDS)) for _ in range(chance.choice([0, 0, 1, 1, 3, 200]))]
    entries += [(4, bits(), -1)]
    entries += [(8, bits(), chance.choice(IDS)) for _ in range(chance.choice([0, 0, 0, 1, 2]))]
    if len(entries) > 2 or chance.random() < 0.2:
        entries.append((16, bits(), -1))
    entries.append((32, bits(), -1))
    if chance.random() < 0.1:
        chance.choice([lambda: entries.pop(chance.randrange(len(entries))), lambda: chance.shuffle(entries),
                       lambda: entries.append((32, 7, -1)), lambda: entries.insert(0, (64, 7, -1)),
                       lambda: entries.insert(1, (2, 9, 5)), lambda: entries.clear()])()
    value = struct.pack("<I", 2 if chance.random() < 0.98 else 3)
    value += b"".join(struct.pack("<HHi", *entry) for entry in entries)
    return value[:-chance.choice([1, 4, 9])] if chance.random() < 0.03 else value


def change(paths):
    """One random change, drawn once and then made on both sides, and the path whose state is compared."""
    path = chance.choice(paths)
    name, mode, umask = chance.choice(NAMES), chance.randrange(0o10000), chance.choice([0, 0o22, 0o27, 0o77, 0o777])
    new = os.path.join(path, "n%d" % len(paths))
    value = acl() if "acl" in name else b"v" * chance.choice([0, 1, 300])
    flags = chance.choice([0, 0, 0, os.XATTR_CREATE, os.XATTR_REPLACE])
    uid, gid = chance.choice([-1, 0, 1234, 1235]), chance.choice([-1, 0, 77, 4321, 4322])
    at = lambda top, which=path: os.path.join(top, which)

    def make(call):
        def made(top):
            os.umask(umask)
            call(at(top, new))
        return made, new

    return chance.choice([
        lambda: make(lambda p: os.close(os.open(p, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))),
        lambda: make(lambda p: os.mkdir(p, mode)),
        lambda: make(lambda p: os.mkdir(p, mode | 0o700)),
        lambda: make(lambda p: os.mkfifo(p, mode)),
        lambda: make(lambda p: os.mknod(p, stat.S_IFSOCK | mode)),
        lambda: make(lambda p: os.symlink("nowhere", p)),
        lambda: (lambda top: os.chmod(at(top), mode), path),
        lambda: (lambda top: os.chmod(at(top), mode | 0o2070), path),
        lambda: (lambda top: os.lchown(at(top), uid, gid), path),
        lambda: (lambda top: os.setxattr(at(top), name, value, flags, follow_symlinks=False), path),
        lambda: (lambda top: os.setxattr(at(top), name, value, 0, follow_symlinks=False), path),
        lambda: (lambda top: os.setxattr(at(top), DEFAULT, value if "acl" in name else acl_now, 0), path),
        lambda: (lambda top: os.removexattr(at(top), name, follow_symlinks=False), path),
        lambda: (lambda top: os.getxattr(at(top), name, follow_symlinks=False), path),
        lambda: (lambda top: sorted(os.listxattr(at(top), follow_symlinks=False)), path),
        lambda: (lambda top: [os.access(at(top), how, effective_ids=True) for how in (os.R_OK, os.W_OK, os.X_OK)], path),
        lambda: (lambda top: os.truncate(at(top), 10), path),
        lambda: (lambda top: write(at(top)), path),
    ])()


def write(path):
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    try:
        os.write(file, b"more")
    finally:
        os.close(file)


def answer(call, top):
    try:
        return "ok", call(top)
    except OSError as error:
        return "error", errno.errorcode.get(error.errno)


def state(path):
    try:
        status = os.lstat(path)
    except OSError as error:
        return errno.errorcode[error.errno]
    attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)}
    return oct(status.st_mode), status.st_uid, status.st_gid, attributes


paths = [""]
for step in range(steps):
    user = chance.choice(USERS)
    acl_now = acl()
    call, touched = change(paths)
    seen = []
    for top in ours, reference:
        become(user)
        got = answer(call, top)
        become(USERS[0])
        seen.append((got, state(os.path.join(top, touched))))
    if seen[0] != seen[1]:
        sys.exit("step %d, user %s, %r differ:\n  %s\n  %s" % (step, user, touched, *seen))
    if touched not in paths and not isinstance(seen[0][1], str):
        paths.append(touched)
    if len(paths) > 60:
        paths = [""] + chance.sample(paths[1:], 30)
for path in paths:
    a, b = state(os.path.join(ours, path)), state(os.path.join(reference, path))
    if a != b:
        sys.exit("%r differs at the end:\n  %s\n  %s" % (path, a, b))
