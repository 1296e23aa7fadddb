#!/usr/bin/env python3
"""Changes a directory without end and notes what was acknowledged; or verifies those notes after a crash.

Each note is written outside of the directory, after the fsync that it reports has returned:
  file N     file N with content N is durable
  going N    file N is about to be deleted: from here on it may be there or not
"""
import os
import random
import sys


def content(number):
    source = random.Random(number)
    size = source.choice([0, 17, 700, 4096, 30_000, 150_000, 400_000])
    block = source.randbytes(min(size, 5000))
    return (block * (size // max(1, len(block)) + 1))[:size]


def path(directory, number):
    return os.path.join(directory, "d%d" % (number % 7), "file%d" % number)


def sync_directory(name):
    descriptor = os.open(name, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def change(directory, notes, seed):
    choices = random.Random(seed)
    alive = []
    number = seed * 1_000_000
    for part in range(7):
        os.makedirs(os.path.join(directory, "d%d" % part), exist_ok=True)
    while True:
        number += 1
        name = path(directory, number)
        with open(name + ".new", "wb", buffering=0) as file:
            file.write(content(number)[: choices.randrange(1, 400_000)])
            file.seek(0)
            file.write(content(number))
            os.fsync(file.fileno())
        os.rename(name + ".new", name)
        if choices.random() < 0.5:
            # Never synced: may be lost, must not hurt.
            with open(os.path.join(directory, "loose%d" % choices.randrange(20)), "wb") as file:
                file.write(content(choices.randrange(1000)))
        sync_directory(os.path.dirname(name))
        alive.append(number)
        notes.write("file %d\n" % number)
        notes.flush()
        while len(alive) > 60 or (alive and choices.random() < 0.2):
            victim = alive.pop(choices.randrange(len(alive)))
            notes.write("going %d\n" % victim)
            notes.flush()
            os.unlink(path(directory, victim))


def verify(directory, notes):
    durable = set()
    for line in notes:
        word, number = line.split()
        (durable.add if word == "file" else durable.discard)(int(number))
    for number in sorted(durable):
        with open(path(directory, number), "rb") as file:
            if file.read() != content(number):
                sys.exit("file %d was acknowledged and differs" % number)
    for name, _, files in os.walk(directory):
        for file in files:
            with open(os.path.join(name, file), "rb") as opened:
                opened.read()
    print("%d acknowledged files are there" % len(durable))


def main():
    what, directory, notes = sys.argv[1:4]
    if what == "change":
        try:
            with open(notes, "a", encoding="ascii") as file:
                change(directory, file, int(sys.argv[4]))
        except OSError as error:
            print("ended by: %s" % error)
    else:
        with open(notes, encoding="ascii") as file:
            verify(directory, file)


main()
