#!/usr/bin/env python3
"""Mounts damaged copies of an archive, for reading and for writing, and looks at every byte that a program gets.

    tests/campaign/damaged_mounts.py LOCKBOX [COPIES [SEED]]

The program mount-lockbox lies beside LOCKBOX. Run as root in a mount namespace of its own. Each line that begins with FELL is a finding; the exit
code says whether there was one.
"""
import os
import random
import shutil
import subprocess
import sys
import tempfile

from findings import environment, fallen, fell

LOCKBOX = os.path.abspath(sys.argv[1])
COPIES = int(sys.argv[2]) if len(sys.argv) > 2 else 50
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1
BLOCK = 4096
# Refused by a mount, besides success: another error, wrong key, not an archive, damaged, older.
REFUSED = {2, 10, 11, 12, 16}
tally = {"refused": 0, "read": 0, "missing": 0, "written": 0, "write refused": 0}


def run(place, *arguments):
    with open(place + "/said", "w+b") as said:
        # A daemon keeps what it inherits, so its words go to a file that nobody waits for.
        code = subprocess.run([LOCKBOX, *arguments], cwd=place, env=environment(place), stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=120).returncode
        said.seek(0)
        return code, said.read().decode(errors="replace")


def good(place, *arguments):
    code, said = run(place, *arguments)
    assert code == 0, (arguments, code, said)


def damaged(whole, older, dice):
    kind = dice.choice(["bits", "headers", "records", "cut", "hole", "older part", "exchange"])
    copy = bytearray(whole)
    blocks = len(copy) // BLOCK
    start = dice.randrange(blocks)
    end = min(blocks, start + 1 + dice.randrange(24))
    places = {"bits": [(0, blocks)], "headers": [(0, 33), (320, 33)], "records": [(33, 32), (353, 32)]}.get(kind, [])
    for first, count in places[: 1 + dice.randrange(2)]:
        for _ in range(1 + dice.randrange(6)):
            copy[min(len(copy) - 1, first * BLOCK + dice.randrange(count * BLOCK))] ^= 1 << dice.randrange(8)
    if kind == "cut":
        del copy[dice.randrange(len(copy)) :]
    elif kind == "hole":
        copy[start * BLOCK : end * BLOCK] = bytes((end - start) * BLOCK)
    elif kind == "older part":
        part = older[start * BLOCK : end * BLOCK]
        copy[start * BLOCK : start * BLOCK + len(part)] = part
    elif kind == "exchange":
        other = dice.randrange(blocks)
        for at, old in [(start, other), (other, start)]:
            copy[at * BLOCK : (at + 1) * BLOCK] = whole[old * BLOCK : (old + 1) * BLOCK]
    return kind, copy


def look(name, root, files, also=()):
    """Every file is what some commit had, or an error; a missing one is counted."""
    for path, contents in files.items():
        try:
            with open(f"{root}/{path}", "rb") as file:
                found = file.read()
        except OSError:
            tally["missing"] += 1
            continue
        tally["read"] += 1
        if found not in contents and found not in also:
            fell(name, path, "has other content")


def one(place, number, whole, older, files):
    dice = random.Random(SEED * 1_000_000 + number)
    kind, copy = damaged(whole, older, dice)
    name = f"copy {number} ({kind})"
    archive, point = place + "/c.lbx", place + "/point"
    with open(archive, "wb") as file:
        file.write(copy)
    for options in ["ro", "rw"]:
        shutil.rmtree(place + "/state", ignore_errors=True)
        code, said = run(place, "mount", "-o", options + ",sync=always", archive, point)
        if code != 0:
            tally["refused"] += 1
            if code not in REFUSED or not said.strip():
                fell(name, options, "ended with", code, said)
            continue
        look(name, point, files)
        new = dice.randbytes(1 + dice.randrange(200_000))
        written = False
        if options == "rw":
            try:
                with open(point + "/new", "wb") as file:
                    file.write(new)
                    os.fsync(file.fileno())
                with open(point + "/tree/small3", "r+b") as file:
                    file.write(new[:100])
                written = True
                tally["written"] += 1
            except OSError:
                tally["write refused"] += 1
        # What could not be saved is said, and the mount ends all the same.
        code, said = run(place, "umount", point)
        if os.path.ismount(point) or (code != 0 and not said.strip()):
            fell(name, options, "was not unmounted:", code, said)
            subprocess.run(["umount", "-l", point], check=False)
        if not written:
            continue
        code, said = run(place, "mount", "-o", "ro", archive, point)
        if code != 0:
            fell(name, "cannot be mounted after a write that was acknowledged:", code, said)
            continue
        overwritten = [new[:100] + old[100:] for old in files["tree/small3"]]
        look(name, point, files, overwritten)
        with open(point + "/new", "rb") as file:
            if file.read() != new:
                fell(name, "lost what was synced")
        run(place, "umount", point)


def main():
    print(f"seed={SEED} copies={COPIES}", flush=True)
    place = tempfile.mkdtemp(prefix="lockbox-damaged.")
    try:
        os.mkdir(place + "/point")
        os.makedirs(place + "/tree/below")
        with open(place + "/pass", "w", encoding="ascii") as file:
            file.write("a passphrase\n")
        os.chmod(place + "/pass", 0o600)
        dice = random.Random(SEED)
        files = {f"tree/small{n}": [dice.randbytes(100 + 700 * n)] for n in range(12)}
        files |= {"tree/below/large": [dice.randbytes(900_000)], "tree/below/sparse": [bytes(300_000) + b"end"]}
        for path, contents in files.items():
            with open(f"{place}/{path}", "wb") as file:
                file.write(contents[0])
        good(place, "create", "a.lbx", "--kdf-memory", "1", "--kdf-passes", "1", "--weak-kdf")
        good(place, "add", "a.lbx", "tree")
        with open(place + "/a.lbx", "rb") as file:
            older = file.read()
        for path in ["tree/small5", "tree/below/large"]:
            files[path].append(dice.randbytes(len(files[path][0]) + 1000))
            with open(f"{place}/{path}", "wb") as file:
                file.write(files[path][1])
        good(place, "add", "--force", "a.lbx", "tree")
        with open(place + "/a.lbx", "rb") as file:
            whole = file.read()
        for number in range(COPIES):
            one(place, number, whole, older, files)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{COPIES} copies:", ", ".join(f"{count} {what}" for what, count in tally.items()), f"; {len(fallen)} findings")
    sys.exit(1 if fallen else 0)


main()
