"""Table of backup_nights.sh: SCRATCH VERSITYGW CANDIDATE...

Each candidate backs up the same directory ten times into its own part of one bucket, keeps the last eight nights, checks all bytes, and restores one file of the third
night and the whole tenth night. Every command below is one that a user types; variables that a user sets once count as one command each.
"""

import filecmp
import json
import os
import random
import shutil
import signal
import subprocess
import sys

from object_store import Far

scratch, versitygw, names = sys.argv[1], sys.argv[2], sys.argv[3:]
FILES = int(os.environ.get("FILES", "20000"))
CHANGED = int(os.environ.get("CHANGED", str(max(1, FILES // 100))))
LEVEL = os.environ.get("LEVEL", "best")
NIGHTS, KEPT, WANTED = 10, 8, 3
SOURCE = f"{scratch}/home/documents"


class Tree:
    """The directory: its content depends on the seed alone."""

    def __init__(self):
        self.chance = random.Random(37)
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        self.words = ["".join(self.chance.choices(letters, range(26, 0, -1), k=self.chance.randint(2, 10))) for _ in range(20000)]
        # The frequency of a word falls with its rank, as in natural text.
        total, self.weights = 0.0, []
        for rank in range(len(self.words)):
            total += 1 / (rank + 10)
            self.weights.append(total)
        for number in range(FILES):
            os.makedirs(os.path.dirname(self.path(number)), exist_ok=True)
            self.write(number)

    def path(self, number):
        return f"{SOURCE}/{number // 50}/{number % 50}"

    def write(self, number):
        size = min(int(self.chance.lognormvariate(10.0, 1.3)), 8 << 20)
        with open(self.path(number), "wb") as file:
            file.write(self.chance.randbytes(size) if number % 2 else self.text(size))

    def text(self, size):
        words = self.chance.choices(self.words, cum_weights=self.weights, k=size // 5 + 1)
        return " ".join(words).encode("ascii")[:size]

    def change(self):
        for number in self.chance.sample(range(FILES), CHANGED):
            self.write(number)


class Candidate:
    def __init__(self, place, variables):
        self.place, self.typed = place, len(variables)
        self.variables = {**os.environ, **variables, "XDG_CACHE_HOME": f"{scratch}/cache.{place}"}

    def type(self, *words):
        self.typed += 1
        done = subprocess.run(words, check=True, timeout=3600, env=self.variables, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def forget(self):
        """What a machine without caches has, as after the loss of a disk."""
        shutil.rmtree(self.variables["XDG_CACHE_HOME"], ignore_errors=True)

    def stored(self):
        found = 0
        for directory, _, files in os.walk(f"{scratch}/store/bucket/{self.place}"):
            found += sum(os.stat(f"{directory}/{name}").st_size for name in files)
        return found


class Lockbox(Candidate):
    def __init__(self):
        super().__init__("lockbox", {"LOCKBOX_PASSFILE": f"{scratch}/passphrase", "LOCKBOX_REMOTE": "allow-http,allow-private"})
        self.address, self.nights = "s3://bucket/lockbox", []

    def back_up(self):
        said = self.type("lockbox", "backup", "--compress", LEVEL, "--keep-last", str(KEPT), SOURCE, self.address)
        self.nights.append(next(word for word in said.split() if word.startswith("backup-")))

    first = night = back_up

    def verify(self):
        self.type("lockbox", "check", "--full", self.address)

    def restore(self, night, to, path=None):
        self.type("lockbox", "snapshot", "ls", self.address)
        paths = [f"documents/{path}"] if path else []
        self.type("lockbox", "extract", "--snapshot", self.nights[night - 1], "--to", to, self.address, *paths)
        return f"{to}/{os.path.basename(path)}" if path else f"{to}/documents"

    def needed(self):
        """Bytes that stay when what is dead has been removed, a day later."""
        words = ["lockbox", "remote", "check", "--json", self.address]
        found = json.loads(subprocess.run(words, check=True, env=self.variables, capture_output=True, text=True).stdout)
        return found["needed"]["bytes"]


class Restic(Candidate):
    def __init__(self):
        super().__init__("restic", {"RESTIC_PASSWORD_FILE": f"{scratch}/passphrase", "RESTIC_REPOSITORY": f"s3:{far.endpoint}/bucket/restic"})

    def first(self):
        self.type("restic", "init")
        self.type("restic", "backup", SOURCE)

    def night(self):
        self.type("restic", "backup", SOURCE)
        self.type("restic", "forget", "--keep-last", str(KEPT), "--prune")

    def verify(self):
        self.type("restic", "check", "--read-data")

    def restore(self, night, to, path=None):
        found = json.loads(self.type("restic", "snapshots", "--json"))
        snapshot = found[night - NIGHTS - 1]["short_id"]
        included = ["--include", f"{SOURCE}/{path}"] if path else []
        self.type("restic", "restore", snapshot, "--target", to, *included)
        return f"{to}{SOURCE}/{path}" if path else f"{to}{SOURCE}"

    def needed(self):
        return self.stored()


KINDS = {"lockbox": Lockbox, "restic": Restic}
rows, candidates = {}, {}


def step(what, name, work, cold=False):
    if cold:
        candidates[name].forget()
    before = candidates[name].typed
    with far.asked() as told:
        work(candidates[name])
    told["typed"] = candidates[name].typed - before
    rows.setdefault(what, {}).setdefault(name, []).append(told)
    print(f"{name}: {what}: {told}", file=sys.stderr)


def note(what, name, text):
    rows.setdefault(what, {})[name] = text


def megabytes(count):
    return f"{count / 1e6:.1f} MB"


def run():
    tree = Tree()
    size = sum(os.stat(tree.path(number)).st_size for number in range(FILES))
    print(f"{FILES} files, {megabytes(size)}; {CHANGED} rewritten each night", file=sys.stderr)
    old, to_find = f"{scratch}/old", "7/8"
    candidates.update((name, KINDS[name]()) for name in names)
    for name in names:
        note("set once: commands", name, str(candidates[name].typed))
        step("first backup", name, lambda one: one.first())
        note("stored after it", name, megabytes(candidates[name].stored()))
    for night in range(2, NIGHTS + 1):
        tree.change()
        # Changes with each night, so that each has a content of its own.
        with open(f"{SOURCE}/{to_find}", "a", encoding="ascii") as file:
            file.write(f"night {night}\n")
        if night == WANTED:
            shutil.copy(f"{SOURCE}/{to_find}", old)
        for name in names:
            step("second night" if night == 2 else "nights 3 to 10, pruned, each", name, lambda one: one.night())
    for name in names:
        one = candidates[name]
        note("stored after ten nights", name, megabytes(one.stored()))
        note("of it needed", name, megabytes(one.needed()))
        step("check of all bytes", name, lambda one: one.verify(), cold=True)
        found = []
        step("one file of night three", name, lambda one: found.append(one.restore(WANTED, f"{scratch}/one.{name}", to_find)), cold=True)
        if not filecmp.cmp(found[0], old, shallow=False):
            sys.exit(f"{name} restored another file")
        step("all of night ten", name, lambda one: found.append(one.restore(NIGHTS, f"{scratch}/all.{name}")), cold=True)
        subprocess.run(["diff", "-r", SOURCE, found[1]], check=True)
        note("commands typed", name, str(one.typed))
    table()


def table():
    print("| | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names))
    for what, by in rows.items():
        cells = []
        for name in names:
            told = by[name]
            if isinstance(told, list):
                mean = lambda key: sum(one[key] for one in told) / len(told)
                told = f"{mean('seconds'):.1f} s, {mean('requests'):.0f} requests, {megabytes(mean('up'))} up, {megabytes(mean('down'))} down"
            cells.append(told)
        print(f"| {what} | " + " | ".join(cells) + " |")


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
far = Far(scratch, versitygw)
far.delay(int(os.environ.get("DELAY", "20")))
try:
    run()
finally:
    far.close()
