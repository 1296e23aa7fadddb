#!/usr/bin/env python3
"""Kills the daemon under writers that sync each write, again and again, and looks for everything that was acknowledged.

    tests/campaign/kills.py LOCKBOX [KILLS [SEED [STREAMS]]]

The program mount-lockbox lies beside LOCKBOX. Run as root in a mount namespace of its own. Each of the STREAMS (2) has an archive of its own, whose
log is on, and four writers. Each line that begins with FELL is a finding; the exit code says whether there was one.

A writer has a file of 48 blocks, each of which says which write it is of. What a block says after the kill is no older than the last write that
was acknowledged and no newer than the last one that was begun, and nothing in between. It also makes, syncs and removes small files: those
that were acknowledged are there, or gone.
"""
import hashlib
import json
import mmap
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from findings import environment, fallen, fell

LOCKBOX = os.path.abspath(sys.argv[1])
MOUNT = os.path.join(os.path.dirname(LOCKBOX), "mount-lockbox")
KILLS = int(sys.argv[2]) if len(sys.argv) > 2 else 100
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1
STREAMS = int(sys.argv[4]) if len(sys.argv) > 4 else 2
BLOCK = 4096
WRITERS = 4
BLOCKS = 48
NAMES = 16


def content(writer, place, number):
    """A block of a write: its number, and bytes that follow from it. The second half compresses."""
    head = struct.pack("<QQQ", writer, place, number)
    half = hashlib.shake_128(head).digest(BLOCK // 2 - len(head))
    return head + half + bytes(BLOCK // 2)


class Notes:
    """What a writer began and what was acknowledged, in memory that outlives it: two numbers for each block and each name."""

    def __init__(self):
        self.memory = mmap.mmap(-1, WRITERS * (BLOCKS + NAMES) * 16)

    def place(self, writer, at, acknowledged):
        return ((writer * (BLOCKS + NAMES) + at) * 2 + acknowledged) * 8

    def set(self, writer, at, acknowledged, number):
        start = self.place(writer, at, acknowledged)
        self.memory[start : start + 8] = struct.pack("<Q", number)

    def get(self, writer, at, acknowledged):
        return struct.unpack_from("<Q", self.memory, self.place(writer, at, acknowledged))[0]


def write(point, writer, notes, dice):
    """Until the mount is gone. An odd number of a name is a file, an even one none."""
    directory = os.open(f"{point}/w{writer}", os.O_RDONLY | os.O_DIRECTORY)
    file = os.open(f"{point}/w{writer}/blocks", os.O_RDWR)
    while True:
        if dice.randrange(5):
            # Neighbours in one write now and then, each acknowledged with it.
            first = dice.randrange(BLOCKS)
            places = range(first, min(BLOCKS, first + dice.choice([1, 1, 1, 2, 5])))
            number = 1 + max(notes.get(writer, place, 0) for place in places)
            for place in places:
                notes.set(writer, place, 0, number)
            os.pwrite(file, b"".join(content(writer, place, number) for place in places), first * BLOCK)
            os.fsync(file)
            for place in places:
                notes.set(writer, place, 1, number)
            continue
        name = dice.randrange(NAMES)
        at = BLOCKS + name
        number = notes.get(writer, at, 1) + 1
        notes.set(writer, at, 0, number)
        if number % 2:
            made = os.open(f"n{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=directory)
            os.write(made, content(writer, at, number)[: 200 + number % 3000])
            os.fsync(made)
            os.close(made)
        else:
            os.unlink(f"n{name}", dir_fd=directory)
        os.fsync(directory)
        notes.set(writer, at, 1, number)


def verify(point, notes, what):
    """Answers how many acknowledged things were looked at. What was found is where the next round goes on."""
    looked = 0
    for writer in range(WRITERS):
        with open(f"{point}/w{writer}/blocks", "rb") as file:
            found = file.read()
        for place in range(BLOCKS):
            block = found[place * BLOCK : (place + 1) * BLOCK]
            begun, acknowledged = notes.get(writer, place, 0), notes.get(writer, place, 1)
            number = struct.unpack_from("<Q", block, 16)[0] if len(block) == BLOCK else -1
            if number != 0 and block != content(writer, place, number) or number == 0 and block != bytes(BLOCK):
                fell(what, f"writer {writer} block {place} is nothing that was written")
            elif not acknowledged <= number <= begun:
                fell(what, f"writer {writer} block {place}: write {acknowledged} was acknowledged, {begun} begun, {number} found")
            for kind in (0, 1):
                notes.set(writer, place, kind, number)
            looked += 1
        for name in range(NAMES):
            at = BLOCKS + name
            begun, acknowledged = notes.get(writer, at, 0), notes.get(writer, at, 1)
            path = f"{point}/w{writer}/n{name}"
            there = None
            if os.path.exists(path):
                with open(path, "rb") as file:
                    there = file.read()
            # Of one that was made and not acknowledged any part may be there, and of one whose removal was not, it or nothing.
            number = begun if (there is not None) == bool(begun % 2) else acknowledged
            if (there is not None) != bool(number % 2):
                fell(what, f"writer {writer} name {name}: {acknowledged} was acknowledged, {begun} begun, there={there is not None}")
            elif there is not None and number == acknowledged and there != content(writer, at, number)[: 200 + number % 3000]:
                fell(what, f"writer {writer} name {name}: other content of {len(there)} bytes")
            if there is not None and number != acknowledged:
                os.unlink(path)
                directory = os.open(f"{point}/w{writer}", os.O_RDONLY)
                os.fsync(directory)
                os.close(directory)
                number += 1
            for kind in (0, 1):
                notes.set(writer, at, kind, number)
            looked += 1
    return looked


def stream(index, kills):
    dice = random.Random(f"{SEED} {index}")
    place = tempfile.mkdtemp(prefix="kills-")
    point = place + "/point"
    os.mkdir(point)
    with open(place + "/pass", "w", encoding="ascii") as passfile:
        passfile.write("a passphrase\n")
    os.chmod(place + "/pass", 0o600)
    env = environment(place)
    archive = place + "/a.lbx"

    def run(*arguments):
        with open(place + "/said", "w+b") as said:
            # A daemon keeps what it inherits, so its words go to a file that nobody waits for.
            code = subprocess.run(arguments, cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=120).returncode
            said.seek(0)
            words = said.read().decode(errors="replace")
        assert code == 0, (arguments, code, words)
        return words

    run(LOCKBOX, "create", "--weak-kdf", "--kdf-memory", "1", archive)
    notes = Notes()
    looked = laid = 0
    for number in range(kills + 1):
        run(MOUNT, archive, point)
        if number == 0:
            for writer in range(WRITERS):
                os.mkdir(f"{point}/w{writer}")
                with open(f"{point}/w{writer}/blocks", "wb") as file:
                    file.write(bytes(BLOCKS * BLOCK))
                    os.fsync(file.fileno())
            os.sync()
        looked += verify(point, notes, f"seed {SEED} stream {index} kill {number}:")
        status = json.loads(run(LOCKBOX, "status", "--json", point))
        if number == kills:
            run(LOCKBOX, "umount", point)
            break
        writers = []
        for writer in range(WRITERS):
            child = os.fork()
            if child == 0:
                try:
                    write(point, writer, notes, random.Random(f"{SEED} {index} {number} {writer}"))
                except OSError:
                    os._exit(0)
                os._exit(1)
            writers.append(child)
        # The moment is the point: any is right.
        time.sleep(dice.uniform(0.005, 0.12))
        daemon = os.pidfd_open(status["pid"])
        signal.pidfd_send_signal(daemon, signal.SIGKILL)
        for child in writers:
            if os.waitpid(child, 0)[1] != 0:
                fell(f"seed {SEED} stream {index} kill {number}: a writer failed by itself")
        run("umount", "-l", point)
        # Readable when it is gone, and with it the lock of the archive.
        if not select.select([daemon], [], [], 60)[0]:
            fell(f"seed {SEED} stream {index} kill {number}: the daemon does not die")
        os.close(daemon)
        if number % 50 == 49:
            run(LOCKBOX, "check", "--full", archive)
    run(LOCKBOX, "check", "--full", archive)
    shutil.rmtree(place)
    print(f"stream {index}: {kills} kills, {looked} acknowledged things looked at", flush=True)


def main():
    children = []
    for index in range(STREAMS):
        child = os.fork()
        if child == 0:
            stream(index, KILLS // STREAMS)
            os._exit(1 if fallen else 0)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    print(f"{KILLS // STREAMS * STREAMS} kills, {STREAMS} archives with {WRITERS} writers each; {len(failed)} archives with findings")
    sys.exit(1 if failed else 0)


main()
