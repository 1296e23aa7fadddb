"""What synced.sh measures: SCRATCH ROUNDS CANDIDATE... ; each candidate is a directory below SCRATCH."""

import glob
import json
import os
import random
import select
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time

from daemons import daemons, written

scratch, rounds, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
found = {}


def note(row, name, value):
    found.setdefault(row, {}).setdefault(name, []).append(value)


def writers(name, count, each):
    latencies = []
    ready = threading.Barrier(count + 1)

    def one(number):
        file = os.open(f"{scratch}/{name}/w{number}", os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(file).st_size == 0:
            for _ in range(16):
                os.write(file, os.urandom(1 << 20))
        os.fsync(file)
        places, data, own = random.Random(number), os.urandom(4096), []
        ready.wait()
        for _ in range(each):
            began = time.perf_counter()
            os.pwrite(file, data, places.randrange(4096) * 4096)
            os.fsync(file)
            own.append(time.perf_counter() - began)
        os.close(file)
        latencies.extend(own)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    began, before = time.perf_counter(), written(f"{scratch}/{name}")
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    latencies.sort()
    row = f"4 KiB + fsync, {count} writer{'s' if count > 1 else ''}"
    note(f"{row}, a second", name, count * each / took)
    note(f"{row}, p50 us", name, latencies[len(latencies) // 2] * 1e6)
    note(f"{row}, p99 us", name, latencies[int(len(latencies) * 0.99)] * 1e6)
    if name in ("lockbox", "before"):
        note(f"{row}, KiB to the disk for each", name, (written(f"{scratch}/{name}") - before) / 1024 / count / each)


def transactions(name, mode):
    for left in glob.glob(f"{scratch}/{name}/db*"):
        os.unlink(left)
    base = sqlite3.connect(f"{scratch}/{name}/db", isolation_level=None)
    base.execute(f"pragma journal_mode={mode}")
    base.execute("pragma synchronous=full")
    base.execute("create table t (a integer primary key, b text)")
    began = time.perf_counter()
    for _ in range(1500):
        base.execute("insert into t (b) values (?)", ("x" * 100,))
    note(f"SQLite {mode}, 1,500 transactions, s", name, time.perf_counter() - began)
    base.close()


def mail(name):
    box = f"{scratch}/{name}/mail"
    shutil.rmtree(box, ignore_errors=True)
    os.mkdir(box)
    directory, data = os.open(box, os.O_RDONLY), os.urandom(1024)
    began = time.perf_counter()
    for number in range(500):
        file = os.open(f"{box}/new", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(file, data)
        os.fsync(file)
        os.close(file)
        os.rename(f"{box}/new", f"{box}/{number}")
        os.fsync(directory)
    note("create 1 KiB, fsync, rename, fsync of the directory, a second", name, 500 / (time.perf_counter() - began))
    os.close(directory)


def commits(name):
    tree = f"{scratch}/{name}/tree"
    shutil.rmtree(tree, ignore_errors=True)
    git = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.fsync=all"]
    subprocess.run(["git", "init", "--quiet", tree], check=True)
    began = time.perf_counter()
    for number in range(40):
        open(f"{tree}/file", "w").write(f"{number}\n" * 100)
        subprocess.run([*git, "add", "file"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", str(number)], check=True)
    note("git add and commit with core.fsync=all, a second", name, 40 / (time.perf_counter() - began))


def mounts(archive):
    """What the log costs whoever mounts after a crash: mounted anew after a clean end, then after a kill when the log of 1 MiB was nearly full."""
    point = f"{scratch}/crashed"
    os.makedirs(point, exist_ok=True)
    mount = ["mount.lockbox", archive, point, "-o", f"passfile={scratch}/passphrase"]

    def timed():
        began = time.perf_counter()
        subprocess.run(mount, check=True)
        os.listdir(point)
        return (time.perf_counter() - began) * 1000

    subprocess.run(mount, check=True)
    file = os.open(f"{point}/w", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(file, os.urandom(16 << 20))
    os.fsync(file)
    os.close(file)
    subprocess.run(["lockbox", "umount", point], check=True)
    note("mount after a clean end, ms", "lockbox", timed())
    file, data, places, used = os.open(f"{point}/w", os.O_RDWR), os.urandom(4096), random.Random(1), 0
    while used < 800 << 10:
        os.pwrite(file, data, places.randrange(4096) * 4096)
        os.fsync(file)
        told = subprocess.run(["lockbox", "status", "--json", point], check=True, capture_output=True)
        used = json.loads(told.stdout)["log"]["used_bytes"]
    for daemon in list(daemons(point)):
        ended = os.pidfd_open(daemon)
        os.kill(daemon, signal.SIGKILL)
        select.select([ended], [], [])
        os.close(ended)
    os.close(file)
    subprocess.run(["umount", point], check=True)
    note("mount after a kill with 800 KiB in the log, ms (goal: 50 more)", "lockbox", timed())
    subprocess.run(["lockbox", "umount", point], check=True)


for number in range(rounds):
    for name in names[:: -1 if number % 2 else 1]:
        print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr)
        writers(name, 1, 1500)
        writers(name, 4, 700)
        transactions(name, "wal")
        transactions(name, "delete")
        mail(name)
        commits(name)
    mounts(f"{scratch}/crashed.lbx")

others = [name for name in ("gocryptfs", "before") if name in names]
print("| | " + " | ".join(names + [f"lockbox / {other}" for other in others]) + " |")
print("|---|" + "---:|" * (len(names) + len(others)))
for row, values in found.items():
    medians = {name: statistics.median(values[name]) for name in values}
    cells = [f"{medians[name]:.2f}" if name in medians else "" for name in names]
    cells += [f"{medians['lockbox'] / medians[other]:.2f}" if other in medians else "" for other in others]
    print(f"| {row} | " + " | ".join(cells) + " |")
