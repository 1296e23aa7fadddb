#!/usr/bin/env python3
"""Returns when the clock of a mount has collected and committed what programs had written before, without any fsync.

    collected.py POINT CONNECTIONS

CONNECTIONS is a mount of fusectl. Each step waits for an event and none for a time:
  1  A probe that nobody syncs is written, and arrives at the daemon: a flush began after what was written before. The kernel writes back by
     itself what is 30 seconds old, so only a probe that arrives within 20 was collected; another one is written in its place.
  2  A second probe arrives: the clock flushes again when its last flush has ended, so that one sent everything.
  3  The kernel counts no request without its answer: everything that was sent has arrived.
  4  Two commits end. The first may have begun before; the second has everything. Times that change give the clock something to commit.
"""
import json
import os
import subprocess
import sys
import time

SIZE = 1 << 20
COLLECTED = 20
PATIENCE = 300


def status(point):
    while True:
        told = json.loads(subprocess.run(["lockbox", "status", "--json", point], check=True, stdout=subprocess.PIPE).stdout)
        if told["used_bytes"] is not None:
            return told


def held(point):
    told = status(point)
    return told["used_bytes"] + told["dirty_bytes"]


def await_so(what, is_so, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            sys.exit(f"{what}: not within {seconds} s")
        time.sleep(0.02)


def arrives(point, probe):
    """Writes a probe; answers whether it was collected."""
    before = held(point)
    os.pwrite(probe, os.urandom(SIZE), 0)
    end = time.monotonic() + COLLECTED
    while held(point) < before + SIZE:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def main():
    point, connections = sys.argv[1:]
    number = os.minor(os.stat(point).st_dev)
    probes = 0
    collected = 0
    while collected < 2:
        if probes == 10:
            sys.exit("the clock does not collect what programs have written")
        probe = os.open(f"{point}/probe{probes}", os.O_CREAT | os.O_RDWR, 0o600)
        # Held open: a close would send it.
        probes += 1
        collected = collected + 1 if arrives(point, probe) else 0

    def none_waits():
        with open(f"{connections}/{number}/waiting", encoding="ascii") as waiting:
            return waiting.read().strip() == "0"

    await_so("requests are answered", none_waits)
    last = status(point)["generation"] + 2

    def committed():
        os.utime(point)
        return status(point)["generation"] >= last

    await_so("two commits", committed)


main()
