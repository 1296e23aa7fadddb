#!/usr/bin/env python3
"""Puts the objects of an archive (../bucket.md) together again: lockbox_bucket.py DIRECTORY FILE. Written from that page alone."""

import hashlib
import pathlib
import re
import struct
import sys

BLOCK = 4096
ZEROS = 2**32 - 1


class Damaged(Exception):
    """An object is not what it has to be."""


def check(condition, what):
    if not condition:
        raise Damaged(what)


def digest(data):
    return hashlib.sha256(data).digest()


def marker(data):
    """The incarnation."""
    check(len(data) == 64 and data[:8] == b"LBXBUCKT" and digest(data[:32]) == data[32:], "the marker")
    check(struct.unpack_from("<I", data, 8)[0] == 1, "the version")
    return data[16:32]


def identity(data):
    """(kind, number or hash) and the blocks of an object."""
    kind, blocks = struct.unpack_from("<II", data)
    name = data[8:40]
    check(kind in (1, 2, 3) and blocks <= 4096, "an object of a map")
    return (kind, struct.unpack("<Q", name[:8])[0] if kind == 1 else name), blocks


def entries(data):
    """(first block, count, place) in order; a place is (object, block in it), or None for zeros."""
    objects, count = struct.unpack_from("<II", data)
    check(len(data) == 8 + 40 * objects + 20 * count, "the length of a map")
    known = [identity(data[8 + 40 * i : 48 + 40 * i]) for i in range(objects)]
    check(all(name[0] != 3 for name, _ in known), "a checkpoint as a place")
    found, behind = [], 0
    for i in range(count):
        first, length, which, at = struct.unpack_from("<QIII", data, 8 + 40 * objects + 20 * i)
        check(first >= behind and length > 0 and first + length <= (2**63 - 1) // BLOCK, "the order of a map")
        behind = first + length
        if which == ZEROS:
            found.append((first, length, None))
            continue
        check(which < objects and at + length <= known[which][1], "a place of a map")
        found.append((first, length, (known[which][0], at)))
    return found


def run(data, newest):
    """The objects of an entry of a dead list."""
    (kind, name), more = identity(data)
    check(name + more < newest if kind == 1 else more == 0, "a dead list")
    return [(kind, name + at) for at in range(more + 1)] if kind == 1 else [(kind, name)]


def record(data, incarnation, number):
    """The fields of a record that a reader needs."""
    check(len(data) >= 352, "a record")
    trailer = data[-352:]
    check(trailer[:8] == b"LBXRECRD" and digest(trailer[:320]) == trailer[320:], "a record's trailer")
    version, kind = struct.unpack_from("<II", trailer, 8)
    check(version == 1 and kind in (1, 2, 3), "a record's version or kind")
    check(trailer[16:32] == incarnation, "a record's incarnation")
    check(struct.unpack_from("<Q", trailer, 32)[0] == number and 0 < number < 2**64 - 1, "a record's number")
    check(struct.unpack_from("<Q", trailer, 40)[0] < 2**64 - 1, "a record's epoch")
    length = struct.unpack_from("<Q", trailer, 88)[0]
    checkpoint, checkpoint_length = trailer[128:160], struct.unpack_from("<Q", trailer, 160)[0]
    blocks, changes, dead, owner = struct.unpack_from("<IIII", trailer, 168)
    check(length < 2**63 and checkpoint_length <= 64 << 20, "a record's lengths")
    check(blocks <= 4096 and changes + dead + owner <= 4 << 20, "a record's parts")
    check(len(data) == blocks * BLOCK + changes + dead + owner + 352, "the length of a record")
    check(digest(data[: blocks * BLOCK]) == trailer[184:216], "a record's pages")
    said = data[blocks * BLOCK : -352]
    check(digest(said) == trailer[216:248], "what a record says")
    check(dead % 48 == 0 and dead // 48 <= 16384 and 44 <= owner <= 108, "what a record says")
    return {
        "kind": kind,
        "length": length,
        "checkpoint": checkpoint if checkpoint_length else None,
        "checkpoint_length": checkpoint_length,
        "changes": entries(said[:changes]),
        "dead": [one for at in range(changes, changes + dead, 48) for one in run(said[at : at + 40], number)],
        "host": said[changes + dead + 44 :].decode("utf-8", "replace"),
    }


def checkpoint(data, incarnation, name):
    """The entries of a checkpoint."""
    check(digest(data) == name and len(data) >= 96, "a checkpoint's name")
    trailer = data[-96:]
    check(trailer[:8] == b"LBXCHKPT" and trailer[16:32] == incarnation, "a checkpoint's trailer")
    check(struct.unpack_from("<I", trailer, 8)[0] == 1, "a checkpoint's version")
    return entries(data[:-96])


def path(root, incarnation, name):
    kind, which = name
    if kind == 1:
        return root / incarnation.hex() / "log" / f"{2**64 - 1 - which:016x}"
    return root / incarnation.hex() / ("seg" if kind == 2 else "map") / which.hex()


def archive(root):
    """The bytes of the archive whose objects lie in a directory."""
    incarnation = marker((root / "lockbox").read_bytes())
    newest = min(entry.name for entry in (root / incarnation.hex() / "log").iterdir() if not entry.name.startswith("."))
    check(re.fullmatch("[0-9a-f]{16}", newest), "the first name of the log")
    number = 2**64 - 1 - int(newest, 16)
    last = record(path(root, incarnation, (1, number)).read_bytes(), incarnation, number)
    layers = [last["changes"]]
    if last["checkpoint"]:
        data = path(root, incarnation, (3, last["checkpoint"])).read_bytes()
        check(len(data) == last["checkpoint_length"], "a checkpoint's length")
        layers.insert(0, checkpoint(data, incarnation, last["checkpoint"]))
    content, objects, behind = bytearray(last["length"]), {}, []
    for first, count, place in (entry for layer in layers for entry in layer):
        # Blocks of objects behind the end of the archive, where no later entry has zeros.
        behind = [cut for at, end in behind for cut in ((at, min(end, first)), (max(at, first + count), end)) if cut[0] < cut[1]]
        if place and first + count > -(-last["length"] // BLOCK):
            behind.append((max(first, -(-last["length"] // BLOCK)), first + count))
        start, end = (min(block * BLOCK, last["length"]) for block in (first, first + count))
        pages = bytes(end - start)
        if place:
            name, at = place
            if name not in objects:
                data = path(root, incarnation, name).read_bytes()
                check(name[0] != 2 or digest(data) == name[1], "a segment's name")
                objects[name] = data
            pages = objects[name][at * BLOCK : (at + count) * BLOCK]
            check(len(pages) == count * BLOCK, "a segment's length")
        content[start:end] = pages[: end - start]
    check(not behind, "a map of more than the archive has")
    return bytes(content)


if __name__ == "__main__":
    try:
        pathlib.Path(sys.argv[2]).write_bytes(archive(pathlib.Path(sys.argv[1])))
    except Damaged as damage:
        sys.exit(f"damaged: {damage}")
