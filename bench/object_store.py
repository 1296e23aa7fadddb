"""A store that speaks S3 behind a link (link.py), and what asks it."""

import contextlib
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from daemons import daemons

HERE = os.path.dirname(os.path.abspath(__file__))
RATE = 119.2
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
# Random, so that nothing about it is smaller than it is.
PATTERN = os.urandom(16 << 20)


class Far:
    """The server and the link to it: SCRATCH, and the server's program."""

    def __init__(self, scratch, versitygw):
        self.scratch = scratch
        os.makedirs(f"{scratch}/store/bucket")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        keys = {"ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"]}
        command = [versitygw, "--quiet", "--keep-alive", "--port", f"127.0.0.1:{port}", "posix", f"{scratch}/store"]
        self.server = subprocess.Popen(command, env={**os.environ, **keys}, stdout=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if self.server.poll() is not None:
                    sys.exit("the server ended")
                time.sleep(0.05)
        command = [sys.executable, f"{HERE}/link.py", str(port), str(RATE)]
        self.link = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.link.stdout.readline())
        self.endpoint = f"http://127.0.0.1:{self.port}"
        os.environ.update(KEYS, AWS_ENDPOINT_URL=self.endpoint)

    def tell(self, line):
        self.link.stdin.write(line + "\n")
        self.link.stdin.flush()
        return json.loads(self.link.stdout.readline())

    def delay(self, milliseconds):
        self.tell(f"delay {milliseconds}")

    @contextlib.contextmanager
    def asked(self):
        """What was asked, and how long it took, when the block has ended."""
        told = {}
        self.tell("reset")
        began = time.monotonic()
        yield told
        told["seconds"] = time.monotonic() - began
        told.update(self.tell("report"))

    def close(self):
        for process in self.link, self.server:
            process.terminate()
            process.wait()


class Mounted:
    """A mount, of an archive there or here, with a cache of its own unless one is given."""

    def __init__(self, far, archive, options="", cache=None, room=None, point="mounted"):
        self.point = f"{far.scratch}/{point}"
        os.makedirs(self.point, exist_ok=True)
        self.own = None if cache else tempfile.mkdtemp(dir=far.scratch)
        words = f"passfile={far.scratch}/passphrase" + (",allow-http,allow-private" if ":" in archive else "")
        command = ["mount.lockbox", archive, self.point, "-o", f"{words},{options}" if options else words]
        enter = room and room.enter
        subprocess.run(command, check=True, timeout=300, env={**os.environ, "XDG_CACHE_HOME": cache or self.own}, preexec_fn=enter)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["lockbox", "umount", self.point], check=True, timeout=600)
        if self.own:
            shutil.rmtree(self.own)

    def memory(self):
        """Most MiB that its processes held, each at its own time."""
        own = list(daemons(self.point))
        theirs = [child for pid in own for file in glob.glob(f"/proc/{pid}/task/*/children") for child in open(file).read().split()]
        total = 0
        for pid in {*map(str, own), *theirs}:
            with open(f"/proc/{pid}/status", encoding="ascii") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
        return total / 1024


class Room:
    """A control group with so many MiB of memory, whichever version the machine has."""

    def __init__(self, mebibytes):
        first = "/sys/fs/cgroup/memory"
        self.is_first = os.path.exists(f"{first}/memory.limit_in_bytes")
        self.path = f"{first if self.is_first else '/sys/fs/cgroup'}/lockbox-bench-{os.getpid()}"
        os.mkdir(self.path)
        self.put("memory.limit_in_bytes" if self.is_first else "memory.max", mebibytes << 20)
        with contextlib.suppress(OSError):
            self.put("memory.memsw.limit_in_bytes" if self.is_first else "memory.swap.max", mebibytes << 20 if self.is_first else 0)

    def put(self, name, value):
        with open(f"{self.path}/{name}", "w", encoding="ascii") as file:
            file.write(str(value))

    def enter(self):
        self.put("cgroup.procs", os.getpid())

    def killed(self):
        """How many of its processes were killed for want of memory."""
        with open(f"{self.path}/{'memory.oom_control' if self.is_first else 'memory.events'}", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))

    def close(self):
        os.rmdir(self.path)


def lockbox(*words, **options):
    return subprocess.run(["lockbox", *words], check=True, timeout=1800, **options)


def forget():
    """What the kernel has of files."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
        file.write("3")


def fill(path, mebibytes):
    with open(path, "wb", buffering=0) as file:
        for number in range(mebibytes):
            at = number % 16 << 20
            file.write(PATTERN[at : at + (1 << 20)])
        os.fsync(file.fileno())


def read_through(path):
    """Reads it as it was filled, and gives MiB a second."""
    began, buffer, total, pattern = time.monotonic(), bytearray(1 << 20), 0, memoryview(PATTERN)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            at = total % len(pattern)
            if count != 1 << 20 or pattern[at : at + count] != buffer:
                sys.exit(f"{path} has something else at {total}")
            total += count
    return (total >> 20) / (time.monotonic() - began)
