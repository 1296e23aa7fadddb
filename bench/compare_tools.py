"""What remote.sh measures with `--beside`: SCRATCH VERSITYGW ROUNDS CANDIDATE... ; lockbox and other encrypted folders in the same store behind the same link.

A step is done when all of it is in the store: for lockbox when an fsync of the root directory returns (sync(2) reaches no FUSE daemon), for s3backer when it counts no
dirty block any more, and for rclone when the server has the objects, since their fsync does not wait for that.
"""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback

from object_store import KEYS, Far, Mounted, fill, forget, lockbox, read_through

scratch, versitygw, rounds, names = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
SIZE = int(os.environ.get("SIZE_MIB", "256"))
COUNT = int(os.environ.get("SMALL", "1000"))
STEPS = ["made, and opened", f"{COUNT} files of 1 KiB in", f"{SIZE} MiB in", "closed", "opened, cold", f"{COUNT} files out", f"{SIZE} MiB out", "4 KiB in the midst of it changed", "closed again"]
found = {}


def run(*words, **options):
    return subprocess.run(words, check=True, timeout=600, stdout=subprocess.DEVNULL, **options)


def until(what, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError("it did not come")
        time.sleep(0.005)


class Lockbox:
    def __init__(self, number):
        self.url, self.mounted = f"s3://bucket/lockbox{number}", None

    def make(self):
        lockbox("create", "--weak-kdf", "--kdf-memory", "1", "--passfile", f"{scratch}/passphrase", "--remote", "allow-http,allow-private", self.url)
        self.open()

    def open(self):
        self.mounted = Mounted(far, self.url)
        self.point = self.mounted.point

    def synced(self, _):
        root = os.open(self.point, os.O_RDONLY)
        os.fsync(root)
        os.close(root)

    def close(self):
        self.mounted.__exit__()


class Rclone:
    """`rclone mount` of `crypt`, with a cache on disk, since files could only be written from their start to their end without, and no delay before an upload."""

    def __init__(self, number):
        self.number, self.point, self.mounted, self.before = number, f"{scratch}/rclone", None, []

    def make(self):
        os.makedirs(self.point, exist_ok=True)
        words = subprocess.run(["rclone", "obscure", "a passphrase"], check=True, capture_output=True, text=True).stdout
        with open(f"{scratch}/rclone.conf", "w", encoding="ascii") as file:
            file.write(
                f"[far]\ntype = s3\nprovider = Other\nendpoint = {far.endpoint}\nregion = {KEYS['AWS_REGION']}\naccess_key_id = key\nsecret_access_key = secret\n"
                f"[crypt]\ntype = crypt\nremote = far:bucket/rclone{self.number}\npassword = {words}"
            )
        self.open()

    def open(self):
        self.cache = f"{scratch}/rclone.cache"
        words = ["rclone", "mount", "crypt:", self.point, "--config", f"{scratch}/rclone.conf", "--vfs-cache-mode", "full", "--vfs-write-back", "0s", "--cache-dir", self.cache]
        self.mounted = subprocess.Popen(words, stderr=open(f"{scratch}/rclone.log", "ab"))
        until(lambda: os.path.ismount(self.point) or self.mounted.poll() is not None)
        if self.mounted.poll() is not None:
            raise OSError("rclone ended")

    def objects(self):
        """What the server has of it: name, length and when it came."""
        found = []
        for directory, _, names in os.walk(f"{scratch}/store/bucket/rclone{self.number}"):
            found += [(name, *os.stat(f"{directory}/{name}")[6:9:2]) for name in names]
        return sorted(found)

    def synced(self, files):
        """So many new objects, each as a whole: the server gives them their names at the end."""
        before = set(self.before)
        until(lambda: len([one for one in self.objects() if one not in before]) >= files, 600)
        self.before = self.objects()

    def close(self):
        run("umount", self.point)
        self.mounted.wait(120)
        shutil.rmtree(self.cache)


class S3backer:
    """gocryptfs on ext4 on a device whose blocks of 128 KiB are objects."""

    def __init__(self, number):
        self.number, self.device, self.disk, self.point = number, f"{scratch}/device", f"{scratch}/disk", f"{scratch}/s3backer"

    def make(self):
        for place in self.device, self.disk, self.point:
            os.makedirs(place, exist_ok=True)
        self.attach()
        run("mkfs.ext4", "-q", "-F", "-E", "nodiscard", f"{self.device}/file")
        run("mount", "-o", "loop", f"{self.device}/file", self.disk)
        os.mkdir(f"{self.disk}/store")
        run("gocryptfs", "-q", "-init", "-scryptn", "10", "-passfile", f"{scratch}/passphrase", f"{self.disk}/store")
        self.mount()

    def attach(self):
        words = ["s3backer", "-f", f"--baseURL={far.endpoint}/", "--accessId=key", "--accessKey=secret", "--authVersion=aws4"]
        words += ["--size=2g", "--blockSize=128k", f"--prefix=s3backer{self.number}/", "--statsFilename=stats", "--listBlocks", "bucket", self.device]
        self.mounted = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=open(f"{scratch}/s3backer.log", "ab"))
        until(lambda: os.path.ismount(self.device) or self.mounted.poll() is not None)
        if self.mounted.poll() is not None:
            raise OSError("s3backer ended")

    def mount(self):
        run("gocryptfs", "-q", "-passfile", f"{scratch}/passphrase", f"{self.disk}/store", self.point)

    def open(self):
        self.attach()
        run("mount", "-o", "loop", f"{self.device}/file", self.disk)
        self.mount()

    def synced(self, _):
        run("sync", "-f", self.point)
        run("sync", "-f", self.disk)

        def dirty():
            with open(f"{self.device}/stats", encoding="utf-8") as file:
                return [line.split()[1] for line in file if line.startswith("block_cache_dirty_ratio")]

        until(lambda: dirty() == ["0.0000"], 600)

    def close(self):
        run("umount", self.point)
        # Whoever serves a mount ends a moment after it.
        until(lambda: subprocess.run(["umount", self.disk], stderr=subprocess.DEVNULL, check=False).returncode == 0)
        until(lambda: subprocess.run(["umount", self.device], stderr=subprocess.DEVNULL, check=False).returncode == 0)
        self.mounted.wait(120)


KINDS = {"lockbox": Lockbox, "rclone": Rclone, "s3backer": S3backer}


def measure(one, name):
    def step(what, work):
        with far.asked() as told:
            work()
        found.setdefault(what, {}).setdefault(name, []).append(told)

    def small_in():
        os.mkdir(f"{one.point}/small")
        for number in range(COUNT):
            with open(f"{one.point}/small/{number}", "wb") as file:
                file.write(b"%4d" % number * 256)
        one.synced(COUNT)

    def small_out():
        for number in range(COUNT):
            with open(f"{one.point}/small/{number}", "rb") as file:
                if file.read() != b"%4d" % number * 256:
                    raise ValueError("a file has something else")

    def large_in():
        fill(f"{one.point}/large", SIZE)
        one.synced(1)

    def edit():
        with open(f"{one.point}/large", "r+b", buffering=0) as file:
            file.seek(SIZE << 19)
            file.write(os.urandom(4096))
        one.synced(1)

    def opened():
        one.open()
        os.listdir(one.point)

    steps = [one.make, small_in, large_in, one.close, opened, small_out, lambda: read_through(f"{one.point}/large"), edit, one.close]
    for what, work in zip(STEPS, steps):
        if what == "opened, cold":
            forget()
        step(what, work)


def clear(one=None):
    """Whatever a candidate left."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        points = [line.split()[4] for line in file]
    for point in reversed([point for point in points if point.startswith(f"{scratch}/")]):
        subprocess.run(["umount", "-l", point], check=False)
    if isinstance(getattr(one, "mounted", None), subprocess.Popen):
        one.mounted.kill()
        one.mounted.wait()


def table():
    print("| | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names))
    for what, by in found.items():
        cells = []
        for name in names:
            told = by.get(name, [])
            if len(told) < rounds:
                cells.append("failed")
                continue
            middle = lambda key: statistics.median(one[key] for one in told)
            cells.append(f"{middle('seconds'):.2f} s, {middle('requests'):.0f} requests, {(middle('up') + middle('down')) / (1 << 20):.1f} MiB")
        print(f"| {what} | " + " | ".join(cells) + " |")


# rclone 1.60 does not start with it.
os.environ.pop("AWS_CA_BUNDLE", None)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
far = Far(scratch, versitygw)
far.delay(20)
try:
    for number in range(rounds):
        for name in names:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr)
            one = KINDS[name](number)
            try:
                measure(one, name)
            except (OSError, ValueError, subprocess.SubprocessError):
                traceback.print_exc()
                clear(one)
    table()
finally:
    clear()
    far.close()
