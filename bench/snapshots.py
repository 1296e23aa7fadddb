"""What snapshots.sh measures: SCRATCH ENTRIES SNAPSHOTS CHANGED ROUNDS; below SCRATCH are the mounts `with` and `without` of the same files.

Prints a line "row, tab, value" for each row."""

import os
import random
import statistics
import subprocess
import sys
import threading
import time

from daemons import written

BODY = 1024


def lockbox(*arguments):
    began = time.perf_counter()
    subprocess.run(["lockbox", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(scratch, entries, snapshots, changed, rounds):
    dice = random.Random(2)
    rows = []

    def path(mount, number):
        return f"{scratch}/{mount}/d{number // 1000}/f{number}"

    def change(mount, numbers, sync_every):
        for turn, number in enumerate(numbers):
            with open(path(mount, number), "r+b") as file:
                file.write(os.urandom(BODY))
                if turn % sync_every == sync_every - 1:
                    file.flush()
                    os.fsync(file.fileno())
        os.sync()

    def fsyncs(mount, stop, latencies):
        file = os.open(f"{scratch}/{mount}/beside", os.O_CREAT | os.O_RDWR, 0o600)
        while not stop.is_set():
            os.pwrite(file, os.urandom(4096), 0)
            began = time.perf_counter()
            os.fsync(file)
            latencies.append(time.perf_counter() - began)
        os.close(file)

    def p99(latencies):
        return sorted(latencies)[len(latencies) * 99 // 100] * 1000

    took, bytes_written = [], []
    for number in range(snapshots):
        some = dice.sample(range(entries), min(10, entries))
        change("without", some, 10)
        change("with", some, 10)
        before = written(f"{scratch}/with")
        took.append(lockbox("snapshot", "create", f"{scratch}/with", f"s{number:03}"))
        bytes_written.append(written(f"{scratch}/with") - before)
    rows.append(("create a snapshot, ms, median (goal 20)", f"{statistics.median(took) * 1000:.1f}"))
    rows.append(("bytes written by it, KiB, median (goal 64)", f"{statistics.median(bytes_written) / 1024:.0f}"))

    rates = {"with": [], "without": []}
    for _ in range(rounds):
        some = dice.sample(range(entries), min(3000, entries))
        for mount, seen in rates.items():
            began = time.perf_counter()
            change(mount, some, 100)
            seen.append(len(some) / (time.perf_counter() - began))
    ratio = statistics.median(rates["with"]) / statistics.median(rates["without"])
    rows.append((f"writing with {snapshots} of them, of the rate without (goal 0.95)", f"{ratio:.2f}"))

    # Cold: mounted anew each time, so that no cache of ours or of the kernel has it.
    listed = {}
    for _ in range(rounds):
        for what, below in (("live", ""), ("snapshot", f"/.snapshots/s{snapshots - 1:03}")):
            lockbox("umount", f"{scratch}/with")
            subprocess.run(["mount.lockbox", f"{scratch}/with.lbx", f"{scratch}/with", "-o", f"passfile={scratch}/passphrase,memory=2048M"], check=True)
            with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
                file.write("3")
            began, seen = time.perf_counter(), 0
            for directory in range(0, min(entries, 200_000), 1000):
                with os.scandir(f"{scratch}/with{below}/d{directory // 1000}") as entries_of:
                    seen += sum(entry.stat(follow_symlinks=False).st_size == BODY for entry in entries_of)
            listed.setdefault(what, []).append(seen / (time.perf_counter() - began))
    ratio = statistics.median(listed["snapshot"]) / statistics.median(listed["live"])
    rows.append(("list and stat of .snapshots/NAME cold, of the live tree (goal 0.9)", f"{ratio:.2f}"))

    change("with", dice.sample(range(entries), min(changed, entries)), changed)
    stop, alone, beside = threading.Event(), [], []
    other = threading.Thread(target=fsyncs, args=("with", stop, alone))
    other.start()
    time.sleep(3)
    stop.set()
    other.join()
    stop = threading.Event()
    other = threading.Thread(target=fsyncs, args=("with", stop, beside))
    other.start()
    removing = lockbox("snapshot", "rm", f"{scratch}/with", "s000")
    stop.set()
    other.join()
    rows.append((f"remove the oldest after {changed:,} files were changed, s (goal 5)", f"{removing:.2f}"))
    if beside:
        rows.append(("p99 of fsync during that, of the p99 alone (goal 2)", f"{p99(beside) / p99(alone):.2f}"))

    # Beside the archive, so on the same disk. What is written is the daemon's.
    copies = []
    for number in range(rounds):
        copy, backup = f"{scratch}/copy", f"{scratch}/backup{number}"
        began = time.perf_counter()
        subprocess.run(["cp", "--reflink=never", f"{scratch}/with.lbx", copy], check=True)
        subprocess.run(["sync", copy], check=True)
        copied = time.perf_counter() - began
        os.unlink(copy)
        copies.append(lockbox("backup", f"{scratch}/with", backup) / copied)
        if number:
            os.unlink(backup)
    rows.append(("first backup, of cp and fsync of the file (goal 1.2)", f"{statistics.median(copies):.2f}"))
    took, bytes_written = [], []
    for _ in range(5):
        change("with", dice.sample(range(entries), min(100, entries)), 100)
        before = written(f"{scratch}/with")
        took.append(lockbox("backup", f"{scratch}/with", f"{scratch}/backup0"))
        bytes_written.append(written(f"{scratch}/with") - before)
    rows.append(("next backup after 100 changed files, ms, median (goal 200)", f"{statistics.median(took) * 1000:.0f}"))
    # The changes themselves are written once, with the leaves that they lie in; that commit is counted here as well.
    rows.append(("bytes written for it, KiB, median (100 files of 1 KiB; goal 3 times what changed)", f"{statistics.median(bytes_written) / 1024:.0f}"))
    stop, during = threading.Event(), []
    other = threading.Thread(target=fsyncs, args=("with", stop, during))
    other.start()
    lockbox("backup", f"{scratch}/with", f"{scratch}/backup-beside")
    stop.set()
    other.join()
    os.unlink(f"{scratch}/backup-beside")
    if during:
        rows.append(("p99 of fsync during a first backup, of the p99 alone (goal 2)", f"{p99(during) / p99(alone):.2f}"))

    lockbox("snapshot", "create", f"{scratch}/with", "a")
    change("with", dice.sample(range(entries), min(100, entries)), 100)
    lockbox("snapshot", "create", f"{scratch}/with", "b")
    lockbox("umount", f"{scratch}/with")
    options = ["--passfile", f"{scratch}/passphrase"]
    # Of one small file; info would count what snapshots hold.
    least = [lockbox("cat", *options, f"{scratch}/with.lbx", "d0/f0") for _ in range(5)]
    took = [lockbox("snapshot", "diff", *options, f"{scratch}/with.lbx", "a", "b") for _ in range(5)]
    rows.append(("diff of two that are 100 changes apart, ms (goal 50)", f"{statistics.median(took) * 1000:.1f}"))
    rows.append(("of that, what any command takes (cat of a small file)", f"{statistics.median(least) * 1000:.1f}"))

    for row, value in rows:
        print(f"{row}\t{value}")


measure(sys.argv[1], *(int(value) for value in sys.argv[2:6]))
