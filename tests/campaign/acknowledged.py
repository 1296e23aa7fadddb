#!/usr/bin/env python3
"""A writer that notes elsewhere what it began and what was acknowledged, and a reader that looks for that.

    tests/campaign/acknowledged.py write DIRECTORY NOTES SEED [COUNT]
    tests/campaign/acknowledged.py read DIRECTORY NOTES

The writer goes on where the notes end. Each of its COUNT steps (without it: until something fails) ends with fsync(2): it makes or removes a file, replaces one by a name
that is moved over it, or overwrites a block of a file of many. It prints the number of each step when all of it was acknowledged; of one that failed it prints the call and
the error, and its exit code is 3. Asked to end (SIGTERM) it does so after a step. The reader prints how many acknowledged steps there are; each line that begins with FELL is a finding, and its exit code is 1 then.

What is found is what the last acknowledged step made of its place, or a later one that was begun, and nothing in between; but of a file whose making was not acknowledged
there may be any part.
"""
import errno
import hashlib
import os
import random
import re
import signal
import sys

BLOCK = 4096
BLOCKS = 64
NAMES = 16


def content(number, size):
    """Bytes that say which step they are of. The second half compresses."""
    head = b"%016d" % number
    return (head + hashlib.shake_128(head).digest(size // 2) + bytes(size))[:size]


def size(number):
    return 16 + number * 7919 % 20000


class Notes:
    """A line `begun NUMBER KIND PLACE` before each step, and `done NUMBER` after it."""

    def __init__(self, path):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(path, encoding="ascii") as lines:
            told = [line.split() for line in lines]
        self.done = {int(number) for word, number, *_ in told if word == "done"}
        self.begun = [(int(number), *rest) for word, number, *rest in told if word == "begun"]

    def note(self, *words):
        os.write(self.file, (" ".join(map(str, words)) + "\n").encode())

    def allowed(self):
        """Of each place the steps that may be the last one there, oldest first; None for that nothing was there before."""
        places = {}
        for number, kind, place in self.begun:
            step = (number, kind)
            if number in self.done:
                places[place] = [step]
            else:
                places.setdefault(place, [None]).append(step)
        return places


class Call:
    """The name of what is being done, for who fails in it."""

    name = "open"

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.name = name
            return getattr(os, name)(*arguments, **named)

        return call


def write(directory, notes, dice, count):
    call = Call()
    asked = []
    # In the midst of an fsync the kernel would forget what times the file has.
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    number = max((number for number, *_ in notes.begun), default=0)
    files = [place for place, steps in notes.allowed().items() if place[0] == "f" and steps[-1] and steps[-1][1] == "make" and len(steps) == 1]
    try:
        top = call.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        blocks = call.open("blocks", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=top)
        while not asked and (count is None or count > 0):
            number += 1
            kind = dice.choice(["make", "make", "block", "block", "move", "remove" if len(files) > 8 else "make"])
            if kind == "make":
                place = f"f{number}"
                notes.note("begun", number, kind, place)
                made = call.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=top)
                call.write(made, content(number, size(number)))
                call.fsync(made)
                call.close(made)
                call.fsync(top)
                files.append(place)
            elif kind == "remove":
                place = files.pop(dice.randrange(len(files)))
                notes.note("begun", number, kind, place)
                call.unlink(place, dir_fd=top)
                call.fsync(top)
            elif kind == "move":
                place = f"name{dice.randrange(NAMES)}"
                notes.note("begun", number, kind, place)
                made = call.open("new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=top)
                call.write(made, content(number, size(number)))
                call.fsync(made)
                call.close(made)
                call.rename("new", place, src_dir_fd=top, dst_dir_fd=top)
                call.fsync(top)
            else:
                at = dice.randrange(BLOCKS)
                notes.note("begun", number, kind, f"block{at}")
                call.pwrite(blocks, content(number, BLOCK), at * BLOCK)
                call.fsync(blocks)
            notes.note("done", number)
            print(number, flush=True)
            if count is not None:
                count -= 1
    except OSError as error:
        print(call.name, errno.errorcode[error.errno], flush=True)
        sys.exit(3)


def read(directory, notes):
    fallen = 0

    def fell(*words):
        nonlocal fallen
        fallen += 1
        print("FELL", *words)

    def there(name):
        try:
            with open(os.path.join(directory, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    places = notes.allowed()
    blocks = there("blocks") or b""
    for name in os.listdir(directory):
        if re.fullmatch(r"f\d+|name\d+", name) and name not in places:
            fell(name, "was never begun")
    for at in range(BLOCKS):
        if f"block{at}" not in places and blocks[at * BLOCK : (at + 1) * BLOCK].strip(b"\0"):
            fell(f"block{at}", "was never begun")
    for place, steps in places.items():
        if place.startswith("block"):
            at = int(place[5:])
            found = blocks[at * BLOCK : (at + 1) * BLOCK]
            fits = any(found == content(step[0], BLOCK) if step else not found.strip(b"\0") for step in steps)
        else:
            found = there(place)
            fits = False
            for step in steps:
                if step is None or step[1] == "remove":
                    fits |= found is None
                elif step[1] == "make" and step[0] not in notes.done:
                    fits = True
                else:
                    fits |= found == content(step[0], size(step[0]))
        if not fits:
            what = "nothing" if found is None else f"{len(found)} bytes that begin with {found[:16]!r}"
            fell(place, f"is {what}, and may be one of {steps}")
    print(len(notes.done))
    sys.exit(1 if fallen else 0)


def main():
    what, directory, notes = sys.argv[1:4]
    if what == "read":
        read(directory, Notes(notes))
    else:
        count = int(sys.argv[5]) if len(sys.argv) > 5 else None
        # Other steps after each kill, and the same ones for the same seed.
        notes = Notes(notes)
        write(directory, notes, random.Random(f"{sys.argv[4]} {len(notes.begun)}"), count)


main()
