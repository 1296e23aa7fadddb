"""What remote.sh measures: SCRATCH VERSITYGW ROUNDS."""

import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from object_store import RATE, Far, Mounted, Room, fill, forget, lockbox, read_through

scratch, versitygw, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
SIZE = int(os.environ.get("SIZE_MIB", "1024"))
FILES = int(os.environ.get("FILES", "1000000"))
CREATE = ["--weak-kdf", "--kdf-memory", "1", "--passfile", f"{scratch}/passphrase"]
THERE = ["--remote", "allow-http,allow-private", "--passfile", f"{scratch}/passphrase"]
found, goals = {}, {}


def note(row, value, goal=None):
    """A goal is a comparison and a number, such as "<= 5"."""
    found.setdefault(row, []).append(value)
    goals[row] = goal or None


def openings(url, what, requests, trips):
    """By who knows nothing."""
    far.delay(100)

    def opened(how, told, *goals):
        note(f"{how} of {what}: requests", told["requests"], goals and f"<= {goals[0]}")
        note(f"{how} of {what}: of them one after the other", told["one_after_the_other"], goals and f"<= {goals[1]}")
        note(f"{how} of {what}: KiB that came", told["down"] / 1024)

    with tempfile.TemporaryDirectory(dir=scratch) as cache, far.asked() as told:
        lockbox("ls", *THERE, url, stdout=subprocess.DEVNULL, env={**os.environ, "XDG_CACHE_HOME": cache})
    opened("cold `lockbox ls`", told, requests, trips)
    # What is asked at the end of a mount for writing is not counted.
    for how in ("ro", "rw") if what == "a bucket" else ("ro",):
        far.tell("reset")
        with Mounted(far, url, how) as mounted:
            os.listdir(mounted.point)
            opened(f"cold mount ({how})", far.tell("report"))


def fsyncs(point, size, count, delay, step):
    """Writes of so many bytes at multiples of `step`, each made durable, in round trips."""
    far.delay(delay)
    places, latencies, requests, data = random.Random(1), [], [], os.urandom(size)
    file = os.open(f"{point}/synced", os.O_RDWR | os.O_CREAT, 0o600)
    if os.fstat(file).st_size == 0:
        fill(f"{point}/synced", 16)
    for _ in range(count):
        os.pwrite(file, data, places.randrange(((16 << 20) - size) // step) * step)
        with far.asked() as told:
            os.fsync(file)
        latencies.append(told["seconds"] * 1000 / delay)
        requests.append(told["requests"])
    os.close(file)
    latencies.sort()
    requests.sort()
    whole = step == 131072
    what = f"fsync of {size >> 10} KiB{' of whole pages' if whole else ''} at {delay} ms"
    small = size == 4096
    note(f"{what}: requests, median", requests[count // 2], "<= 1" if small or whole else None)
    note(f"{what}: requests, most", requests[-1])
    # What a link takes for the bytes is no round trip.
    time_of_bytes = size / (RATE * (1 << 20)) * 1000 / delay
    note(f"{what}: p50, round trips beside the time of its bytes", latencies[count // 2] - time_of_bytes, "<= 1.25" if small else None)
    note(f"{what}: p99, round trips beside the time of its bytes", latencies[int(count * 0.99)] - time_of_bytes, "<= 2" if small else None)


def pages(url):
    """4 KiB here and there in the large file, of a mount that knows nothing yet."""
    far.delay(100)
    with Mounted(far, url, "ro") as mounted:
        places = random.Random(2)
        file = os.open(f"{mounted.point}/large", os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        asked = []
        for _ in range(24):
            with far.asked() as told:
                os.pread(file, 4096, places.randrange(SIZE << 8) << 12)
            asked.append((told["one_after_the_other"], told["requests"]))
        os.close(file)
    note("cold page, tree unknown: round trips", asked[0][0], "<= 4")
    note("cold page, tree unknown: requests", asked[0][1])
    note("cold page, tree known: round trips", statistics.median(one for one, _ in asked[8:]), "<= 1")
    note("cold page, tree known: requests", statistics.median(one for _, one in asked[8:]))


def freshness(url):
    """From a writer's fsync to the sight of a reader on another mount, at any time of its own looks."""
    chance = random.Random(6)
    far.delay(20)
    with Mounted(far, url) as writer, Mounted(far, url, "ro", point="reader") as reader:
        for delay in 20, 100:
            far.delay(delay)
            took = []
            for number in range(10):
                time.sleep(chance.random())
                said = b"%d of %d" % (number, delay)
                with open(f"{writer.point}/said", "wb") as file:
                    file.write(said)
                    file.flush()
                    os.fsync(file.fileno())
                synced = time.monotonic()
                while True:
                    with contextlib.suppress(FileNotFoundError), open(f"{reader.point}/said", "rb") as file:
                        if file.read() == said:
                            break
                    if time.monotonic() - synced > 60:
                        sys.exit("the reader does not see what the writer wrote")
                    time.sleep(0.005)
                took.append(time.monotonic() - synced)
            note(f"reader's freshness at {delay} ms: seconds beside a round trip, median", statistics.median(took) - delay / 1000)
            note(f"reader's freshness at {delay} ms: seconds beside a round trip, most", max(took) - delay / 1000, "<= 2")


def random_reads(point, size, count):
    """MiB a second."""
    places, began = random.Random(3), time.monotonic()
    file = os.open(f"{point}/large", os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    for _ in range(count):
        os.pread(file, size, places.randrange((SIZE << 20) // size) * size)
    os.close(file)
    return size * count / (1 << 20) / (time.monotonic() - began)


def warm(archive, cache=None):
    """What is read again after all was forgotten but what is on disk."""
    forget()
    rates = {}
    with Mounted(far, archive, "ro", cache) as mounted, far.asked() as told:
        os.listdir(mounted.point)
        # The first pages of the tree.
        random_reads(mounted.point, 65536, 16)
        far.tell("reset")
        rates["sequential"] = read_through(f"{mounted.point}/large")
        forget()
        for size, count in (65536, 1024), (262144, 512), (1 << 20, 256):
            rates[f"random {size >> 10} KiB"] = random_reads(mounted.point, size, count)
            forget()
    return rates, told


def large(number):
    """An archive that lives there, from its making to its reading, and the same of one that lies here."""
    url, local = f"s3://bucket/large{number}", f"{scratch}/local.lbx"
    memory, cache = {}, f"{scratch}/cache"
    far.delay(20)
    lockbox("create", *CREATE, "--remote", "allow-http,allow-private", url)
    with Mounted(far, url) as mounted:
        with far.asked() as told:
            fill(f"{mounted.point}/large", SIZE)
        note("bulk write at 20 ms: share of the link", told["up"] / (1 << 20) / told["seconds"] / RATE, ">= 0.8")
        note("bulk write: bytes sent / bytes of data", told["up"] / (SIZE << 20), "<= 1.02")
        note("bulk write: bytes sent / sealed pages (33/32 of the data)", told["up"] / (SIZE << 20) * 32 / 33, "<= 1.02")
        memory["in"] = mounted.memory()
        fsyncs(mounted.point, 4096, 300, 20, 4096)
        fsyncs(mounted.point, 4096, 100, 100, 4096)
        fsyncs(mounted.point, 1 << 20, 20, 20, 131072)
        fsyncs(mounted.point, 1 << 20, 20, 20, 4096)
        fsyncs(mounted.point, 7 << 19, 20, 20, 131072)
        far.delay(20)
        far.tell("reset")
    told = far.tell("report")
    note("unmount at 20 ms: requests", told["requests"])
    note("unmount at 20 ms: of them one after the other", told["one_after_the_other"])
    openings(url, "a bucket", 5, 4)
    pages(url)
    freshness(url)
    for delay in 100, 20:
        shutil.rmtree(cache, ignore_errors=True)
        os.mkdir(cache)
        far.delay(delay)
        forget()
        with Mounted(far, url, "ro", cache) as mounted:
            with far.asked() as told:
                read_through(f"{mounted.point}/large")
            memory["out"] = max(memory.get("out", 0), mounted.memory())
        note(f"sequential read at {delay} ms: share of the link", told["down"] / (1 << 20) / told["seconds"] / RATE, ">= 0.8")
        note(f"sequential read at {delay} ms: bytes that came / bytes of data", told["down"] / (SIZE << 20))
    lockbox("create", *CREATE, local)
    with Mounted(far, local) as mounted:
        fill(f"{mounted.point}/large", SIZE)
        here = mounted.memory()
    with Mounted(far, local, "ro") as mounted:
        read_through(f"{mounted.point}/large")
        note("memory above a local mount, MiB out", memory["out"] - mounted.memory(), "<= 64")
    note("memory above a local mount, MiB in", memory["in"] - here, "<= 64")
    rates, told = warm(url, cache)
    beside, _ = warm(local)
    note("warm read: requests", told["requests"], "<= 0")
    for what, rate in rates.items():
        note(f"warm read, {what}: ratio to a local archive", rate / beside[what], ">= 0.9")
    os.unlink(local)
    shutil.rmtree(f"{scratch}/store/bucket/large{number}")


def plain(number):
    """An archive that is one file there."""
    local = f"{scratch}/plain.lbx"
    lockbox("create", *CREATE, local)
    with Mounted(far, local) as mounted:
        fill(f"{mounted.point}/large", 64)
    put = ["curl", "--silent", "--show-error", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "key:secret"]
    put += ["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "--upload-file", local]
    subprocess.run([*put, f"{far.endpoint}/bucket/plain{number}.lbx"], check=True)
    os.unlink(local)
    openings(f"s3://bucket/plain{number}.lbx", "a plain file", 8, 5)


def member(name, content):
    """A file in a tar, which tarfile takes four times as long for."""
    head = bytearray(512)
    fields = {0: name.encode(), 100: b"0000600", 108: b"0000000", 116: b"0000000", 124: b"%011o" % len(content), 136: b"0" * 11, 148: b" " * 8, 156: b"0", 257: b"ustar\00000"}
    for at, field in fields.items():
        head[at : at + len(field)] = field
    head[148:155] = b"%06o\0" % sum(head)
    return bytes(head) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def push():
    """Some files of many are changed, and a backup brings that up."""
    local, url, each = f"{scratch}/many.lbx", "s3://bucket/many", 1000
    lockbox("create", *CREATE, local)
    command = ["lockbox", "import-tar", "--passfile", f"{scratch}/passphrase", local]
    # As a stream, since the host would take longer for so many files than all that is measured.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as importing:
        for number in range(FILES):
            importing.stdin.write(member(f"tree/{number // each}/{number % each}", b"%d\n" % number))
        importing.stdin.write(bytes(1024))
    if importing.returncode != 0:
        sys.exit("the files were not imported")
    far.delay(20)
    with far.asked() as told:
        lockbox("backup", *THERE, local, url, stdout=subprocess.DEVNULL)
    print(f"{FILES} files: the first backup took {told}; {os.path.getsize(local) >> 20} MiB", file=sys.stderr)
    places = random.Random(4)
    for size in (64 << 10, 4096):
        for _ in range(rounds):
            with Mounted(far, local) as mounted:
                for _ in range(100):
                    name = f"{mounted.point}/tree/{places.randrange(FILES // each)}/{places.randrange(each)}"
                    with open(name, "wb") as file:
                        file.write(os.urandom(size))
            with far.asked() as told:
                lockbox("backup", *THERE, local, url, stdout=subprocess.DEVNULL)
            what = f"push of 100 files of {size >> 10} KiB among {FILES}"
            note(f"{what}: bytes sent / bytes of these files", told["up"] / (100 * size), "<= 3")
            note(f"{what}: requests", told["requests"])
            note(f"{what}: seconds, without the time of its bytes", told["seconds"] - told["up"] / (RATE * (1 << 20)), "<= 2")


def little():
    """Many gigabytes go in and out through a mount that has 256 MiB of memory for all of it."""
    url, room, size = "s3://bucket/little", Room(256), int(os.environ.get("GIB", "10")) << 10
    far.delay(0)
    lockbox("create", *CREATE, *THERE[:2], url)
    for options in "rw", "ro":
        with Mounted(far, url, options, room=room) as mounted:
            if options == "rw":
                fill(f"{mounted.point}/large", size)
            else:
                read_through(f"{mounted.point}/large")
            memory = mounted.memory()
        note(f"{size >> 10} GiB {'in' if options == 'rw' else 'out'} with 256 MiB: killed", room.killed(), "<= 0")
        note(f"{size >> 10} GiB {'in' if options == 'rw' else 'out'} with 256 MiB: most that its processes held, MiB", memory)
    room.close()
    shutil.rmtree(f"{scratch}/store/bucket/little")


def overwrites():
    """Random overwrites: what is sent, the writer's last words included, and what the store has in the end."""
    url, size, times = "s3://bucket/overwrites", 1024, int(os.environ.get("GIB", "10"))
    far.delay(0)
    lockbox("create", *CREATE, *THERE[:2], url)
    with Mounted(far, url) as mounted:
        fill(f"{mounted.point}/large", size)
    for piece, share in (131072, 1), (4096, 16):
        places, data, written = random.Random(5), os.urandom(piece), (times << 30) // share
        with far.asked() as told:
            for _ in range(4):
                with Mounted(far, url) as mounted:
                    file = os.open(f"{mounted.point}/large", os.O_RDWR)
                    for _ in range(written // piece // 4):
                        os.pwrite(file, data, places.randrange((size << 20) // piece) * piece)
                    os.fsync(file)
                    os.close(file)
        what = f"{written >> 20} MiB of random overwrites by {piece >> 10} KiB in {size >> 10} GiB"
        note(f"{what}: bytes sent / bytes written", told["up"] / written, "<= 2.2" if share == 1 else None)
        note(f"{what}: requests", told["requests"])


def table():
    print("| | goal | median | least and most | |\n|---|---:|---:|---:|---|")
    for row, values in found.items():
        median, goal = statistics.median(values), goals[row]
        reached = ""
        if goal:
            compared, number = goal.split()
            reached = "reached" if (median <= float(number) if compared == "<=" else median >= float(number)) else "**missed**"
        shown = [f"{value:.2f}" if value < 10 and value != int(value) else f"{value:.0f}" for value in (median, min(values), max(values))]
        print(f"| {row} | {goal or ''} | {shown[0]} | {shown[1]} to {shown[2]} | {reached} |")


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
far = Far(scratch, versitygw)
parts = os.environ.get("PARTS", "large plain push").split()
try:
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        if "large" in parts:
            large(number)
        if "plain" in parts:
            plain(number)
    for part in push, little, overwrites:
        if part.__name__ in parts:
            part()
finally:
    # What was measured until something failed, too.
    table()
    for point in "reader", "mounted":
        subprocess.run(["lockbox", "umount", f"{scratch}/{point}"], stderr=subprocess.DEVNULL, timeout=60, check=False)
    far.close()
