#!/usr/bin/env python3
"""A working day on a train: a bad link, programs that work on a mount behind it, and what they saw.

    tests/campaign/train.py link DEVICE PEER SEED
    tests/campaign/train.py work DIRECTORY NOTES PHASE [STEPS FIRST]
    tests/campaign/train.py worked NOTES PHASE
    tests/campaign/train.py report NOTES
    tests/campaign/train.py check DIRECTORY NOTES

`link` makes two network devices and carries packets between them. Each line of standard input sets one property: `loss PERCENT`,
`rate BYTES_A_SECOND`, `delay MS` (of each direction), `cut`, `mend`. A queue of 200 ms is kept for each direction; what does not fit is lost.
`count` prints the bytes that the link carried from DEVICE and from PEER since the last `count`, without lost packets.

`work` runs git, SQLite, an editor, and a shell that copies and lists, side by side in DIRECTORY, until it is asked to end (SIGTERM) or has done
STEPS steps of each, numbered from FIRST (1). It appends one line of JSON to NOTES for each step: program, number, phase (the content of the file PHASE when the step
began), seconds, and the error, if there was one. A step without an error was acknowledged, because each ends with an fsync.

`worked` ends with 0 if each program has done a step of PHASE without an error. `report` prints a table by phase and program. `check` looks for each acknowledged step in DIRECTORY; its exit code is 1 if one is missing.
"""
import collections
import fcntl
import heapq
import json
import os
import pathlib
import random
import signal
import sqlite3
import statistics
import struct
import subprocess
import sys
import threading
import time

SET_DEVICE, TUN, NO_HEADER = 0x400454CA, 0x1, 0x1000
QUEUE = 0.2
# A step that takes longer is ended, which is its error.
PATIENCE = 900


class Link:
    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.is_cut, self.loss, self.rate, self.delay = False, 0.0, 12_500_000.0, 0.01
        self.bytes = [0, 0]

    def obey(self, line):
        match line.split():
            case ["loss", percent]:
                self.loss = float(percent) / 100
            case ["rate", rate]:
                self.rate = float(rate)
            case ["delay", milliseconds]:
                self.delay = float(milliseconds) / 1000
            case ["cut"]:
                self.is_cut = True
            case ["mend"]:
                self.is_cut = False
            case ["count"]:
                print(*self.bytes, flush=True)
                self.bytes = [0, 0]
            case words:
                sys.exit(f"unknown: {words}")

    def carry(self, end, source, sink):
        """One direction; packets stay in order, as all have the same delay unless it was changed."""
        due, arrived, free = [], threading.Condition(), 0.0

        def deliver():
            while True:
                with arrived:
                    while not due or due[0][0] > time.monotonic():
                        arrived.wait(due[0][0] - time.monotonic() if due else None)
                    packet = heapq.heappop(due)[2]
                try:
                    os.write(sink, packet)
                except OSError:
                    pass

        threading.Thread(target=deliver, daemon=True).start()
        for number in range(1 << 62):
            try:
                packet = os.read(source, 1 << 16)
            except OSError:
                return  # the device went with its machine
            now = time.monotonic()
            free = max(free, now)
            if self.is_cut or self.dice.random() < self.loss or free - now > QUEUE:
                continue
            self.bytes[end] += len(packet)
            free += len(packet) / self.rate
            with arrived:
                heapq.heappush(due, (free + self.delay, number, packet))
                arrived.notify()


def link(device, peer, seed):
    ends = []
    for name in (device, peer):
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(end, SET_DEVICE, struct.pack("16sH22x", name.encode(), TUN | NO_HEADER))
        ends.append(end)
    of = Link(seed)
    for end in (0, 1):
        threading.Thread(target=of.carry, args=(end, ends[end], ends[1 - end]), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        of.obey(line)


class Failed(Exception):
    pass


def run(*command, at):
    try:
        done = subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} did not end within {PATIENCE} s") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Failed(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout


def git(directory, number):
    at = directory / "git"
    if not at.is_dir():
        run("git", "-c", "init.defaultBranch=main", "init", "--quiet", at, at=directory)
    (at / "number").write_text(f"{number}\n", encoding="ascii")
    settings = ("user.name=a", "user.email=a@example.org", "core.fsync=all", "core.fsyncMethod=fsync", "gc.auto=0")
    options = [word for setting in settings for word in ("-c", setting)]
    run("git", *options, "add", "--all", at=at)
    run("git", *options, "commit", "--quiet", "--allow-empty", f"--message={number}", at=at)


def sqlite(directory, number):
    script = f"PRAGMA synchronous=FULL; CREATE TABLE IF NOT EXISTS t(number INTEGER); INSERT INTO t VALUES({number});"
    run("sqlite3", "-bail", "database", script, at=directory)


def editor(directory, number):
    letter = directory / "letter"
    commands = (f"normal! Gopage {number}", "set fsync", "wq")
    run("vim", "-es", "-N", "-u", "NONE", "-i", "NONE", *(f"+{command}" for command in commands), letter, at=directory)
    if f"page {number}\n" not in letter.read_text(encoding="ascii"):
        raise Failed("vim reported success without the page")


def shell(directory, number):
    (directory / "copies").mkdir(exist_ok=True)
    run("dd", "if=/dev/urandom", f"of=copies/{number}", "bs=65536", "count=3", "conv=fsync", "status=none", at=directory)
    run("ls", "-lR", "git", at=directory)


PROGRAMS = {"git": git, "SQLite": sqlite, "editor": editor, "shell": shell}


def work(directory, notes, phase, steps="0", first="1"):
    ends = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ends.set())
    directory, phase = pathlib.Path(directory), pathlib.Path(phase)
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def repeat(name, program):
        number = int(first)
        while not ends.is_set() and number < int(first) + (int(steps) or 1 << 62):
            step = {"program": name, "number": number, "phase": phase.read_text(encoding="ascii").strip()}
            began = time.monotonic()
            try:
                program(directory, number)
            except (Failed, OSError) as error:
                step["error"] = str(error)
            step["seconds"] = round(time.monotonic() - began, 3)
            os.write(file, (json.dumps(step) + "\n").encode())
            # As a person does; and a failure at once must not fill the notes.
            ends.wait(0.5)
            number += 1

    threads = [threading.Thread(target=repeat, args=item) for item in PROGRAMS.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def steps_of(notes):
    return [json.loads(line) for line in pathlib.Path(notes).read_text(encoding="ascii").splitlines()]


def worked(notes, phase):
    done = {step["program"] for step in steps_of(notes) if step["phase"] == phase and "error" not in step}
    sys.exit(done != set(PROGRAMS))


def report(notes):
    groups = collections.defaultdict(list)
    for step in steps_of(notes):
        groups[step["phase"], step["program"]].append(step)
    print("| phase | program | steps | failed | median s | longest s | errors |")
    print("|---|---|---:|---:|---:|---:|---|")
    for (phase, program), steps in groups.items():
        seconds = [step["seconds"] for step in steps]
        errors = collections.Counter(step["error"] for step in steps if "error" in step)
        told = "; ".join(f"{count} x {error}" for error, count in errors.most_common(3))
        median = statistics.median(seconds)
        print(f"| {phase} | {program} | {len(steps)} | {errors.total()} | {median:.2f} | {max(seconds):.2f} | {told} |")


def check(directory, notes):
    directory = pathlib.Path(directory)
    acknowledged = collections.defaultdict(set)
    for step in steps_of(notes):
        if "error" not in step:
            acknowledged[step["program"]].add(step["number"])
    subjects = run("git", "log", "--format=%s", at=directory / "git").split()
    with sqlite3.connect(f"file:{directory}/database?mode=ro", uri=True) as database:
        rows = database.execute("SELECT number FROM t").fetchall()
        if database.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
            sys.exit("SQLite finds the database damaged")
    run("git", "fsck", "--full", "--strict", at=directory / "git")
    lines = (directory / "letter").read_text(encoding="ascii").splitlines()
    copies = [path.name for path in (directory / "copies").iterdir() if path.stat().st_size == 3 * 65536]
    found = {
        "git": {int(subject) for subject in subjects},
        "SQLite": {row[0] for row in rows},
        "editor": {int(line.removeprefix("page ")) for line in lines if line},
        "shell": {int(name) for name in copies},
    }
    missing = {name: sorted(acknowledged[name] - found[name]) for name in PROGRAMS}
    print(" ".join(f"{name}={len(acknowledged[name])}" for name in PROGRAMS))
    if any(missing.values()):
        sys.exit(f"acknowledged and missing: {missing}")


if __name__ == "__main__":
    {"link": link, "work": work, "worked": worked, "report": report, "check": check}[sys.argv[1]](*sys.argv[2:])
