#!/usr/bin/env python3
"""Automounter of one archive: mounts it at the first use, reads a file through it, and unmounts it as at its expiry.

    automounter.py ARCHIVE POINT OPTIONS FILE

As systemd and automount(8) do, it mounts autofs on POINT and calls mount(8) and umount(8) in its own process group, the only one that the kernel
lets through to POINT meanwhile. FILE is read, in another session, to standard output.
"""

import array
import ctypes
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time

READY, FAIL, EXPIRE_MULTI = 0x9360, 0x9361, 0x40049366
MISSING_DIRECT, EXPIRE_DIRECT = 5, 6
# struct autofs_v5_packet: version, type and token come first.
PACKET = 304
EXPIRE_IMMEDIATE = 1


def main():
    archive, point, options, file = sys.argv[1:]
    os.setpgrp()
    requests, theirs = os.pipe()
    automount(point, theirs)
    # Opened by the automounter, which reaches the directory of autofs itself.
    autofs = os.open(point, os.O_RDONLY | os.O_DIRECTORY)

    def answer(kind, *command):
        _, found, token = struct.unpack_from("iiI", os.read(requests, PACKET))
        done = found == kind and subprocess.run(command).returncode == 0
        fcntl.ioctl(autofs, READY if done else FAIL, token)
        return done

    user = subprocess.Popen(["cat", "--", os.path.join(point, file)], start_new_session=True)
    if not answer(MISSING_DIRECT, "mount", "-t", "lockbox", "-s", "-o", options, archive, point):
        sys.exit("cannot mount")
    if user.wait() != 0:
        sys.exit("cannot read")
    expiry = threading.Thread(target=expire, args=(autofs,), daemon=True)
    expiry.start()
    if not answer(EXPIRE_DIRECT, "umount", point):
        sys.exit("cannot unmount")
    expiry.join()


def expire(autofs):
    """Requests the expiry; returns when the request was answered."""
    flags = array.array("i", [EXPIRE_IMMEDIATE])
    while True:
        try:
            fcntl.ioctl(autofs, EXPIRE_MULTI, flags)
            return
        except BlockingIOError:
            # The mount is in use for a moment.
            time.sleep(0.02)


def automount(point, pipe):
    words = "fd=%d,pgrp=%d,minproto=5,maxproto=5,direct" % (pipe, os.getpgrp())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"test", os.fsencode(point), b"autofs", 0, words.encode()) != 0:
        sys.exit("cannot mount autofs: " + os.strerror(ctypes.get_errno()))


main()
