#!/usr/bin/env python3
"""Mounts what looks like an archive, and answers as its daemon what it was told to.

    impostor.py USER POINT SOURCE [swap PARENT VICTIM] [control SOCKET STATUS]

Root makes the mount, as fusermount3 does for a user who may set allow_other, and the rest is that user's. SOURCE is the archive that the table of mounts will name. With `swap` the first who opens the
directory finds PARENT replaced by a link to VICTIM and is told that nobody serves the mount. With `control` it listens at SOCKET, answers
STATUS (JSON) to who asks for it, `done` to who wants erasing or a commit, and never anything to who wants it to stop. Prints "ready".
"""

import ctypes
import json
import os
import pwd
import socket
import struct
import sys
import threading

ENOSYS, ENOTCONN = 38, 107
GETATTR, INIT, OPENDIR = 3, 26, 27
ATTRIBUTES = struct.pack("<QII6Q10I", 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
WELCOME = struct.pack("<4IHHIIHH8I", 7, 31, 65536, 0, 8, 6, 65536, 1, 0, 0, *[0] * 8)


def main():
    user, point, source, *rest = sys.argv[1:]
    device = attach(pwd.getpwnam(user), point, source)
    swap = None
    while rest:
        word, first, second, *rest = rest
        if word == "swap":
            swap = (first, second)
        else:
            threading.Thread(target=control, args=(listen(first), json.loads(second)), daemon=True).start()
    print("ready", flush=True)
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError:
            return
        opcode, unique = struct.unpack_from("<IQ", request, 4)
        if opcode == INIT:
            reply(device, unique, WELCOME)
        elif opcode == GETATTR:
            reply(device, unique, ATTRIBUTES)
        elif opcode == OPENDIR:
            if swap:
                os.rename(swap[0], swap[0] + ".before")
                os.symlink(swap[1], swap[0])
                swap = None
            reply(device, unique, error=ENOTCONN)
        elif opcode not in (2, 36, 42):  # of these nobody awaits an answer
            reply(device, unique, error=ENOSYS)


def reply(device, unique, content=b"", error=0):
    os.write(device, struct.pack("<IiQ", 16 + len(content), -error, unique) + content)


def attach(user, point, source):
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={user.pw_uid},group_id={user.pw_gid},allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    nosuid_nodev = 2 | 4
    if libc.mount(source.encode(), point.encode(), b"fuse.lockbox", nosuid_nodev, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    return device


def listen(path):
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    return listener


def control(listener, status):
    kept = []
    while True:
        connection, _ = listener.accept()
        request = json.loads(connection.makefile().readline() or "{}")
        if request.get("request") == "stop":
            kept.append(connection)
            continue
        answer = {"response": "status", **status} if request.get("request") == "status" else {"response": "done"}
        connection.sendall(json.dumps(answer).encode() + b"\n")
        connection.close()


main()
