#!/usr/bin/env python3
"""Stops the clock of a mount daemon: its thread "ticker", and nothing else of it. It goes on when this program ends.

    clock.py PID

Says "stopped" when it stands still. It is stopped between two looks, where it waits for a second to pass and holds no lock.
"""
import contextlib
import ctypes
import glob
import os
import platform
import sys
import time

CONTINUE, SEIZE, INTERRUPT, ANY_THREAD = 7, 0x4206, 0x4207, 0x40000000
FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
# Seconds, as in support.sh.
PATIENCE = 300
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
LIBC.ptrace.restype = ctypes.c_long


def clock_of(pid):
    """Waits for the thread: the daemon starts it after it has reported that it is ready."""
    deadline = time.monotonic() + PATIENCE
    while os.path.isdir(f"/proc/{pid}") and time.monotonic() < deadline:
        for path in glob.glob(f"/proc/{pid}/task/*/comm"):
            # A thread may end between the listing and its turn.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(path, encoding="ascii") as name:
                    if name.read() == "ticker\n":
                        return int(path.split("/")[-2])
        time.sleep(0.01)
    sys.exit(f"process {pid} has no clock")


def trace(request, thread):
    if LIBC.ptrace(request, thread, None, None) < 0:
        sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")


def waits(thread):
    """Whether it is in a futex(2) with a time limit: who waits for a lock has none."""
    with open(f"/proc/{thread}/syscall", encoding="ascii") as call:
        words = call.read().split()
    return words[0] == str(FUTEX) and int(words[4], 16) != 0


def main():
    thread = clock_of(sys.argv[1])
    trace(SEIZE, thread)
    while True:
        trace(INTERRUPT, thread)
        os.waitpid(thread, ANY_THREAD)
        if waits(thread):
            break
        trace(CONTINUE, thread)
        time.sleep(0.01)
    print("stopped", flush=True)
    # Until it is killed with its process, which is not over before that was seen here.
    os.waitpid(thread, ANY_THREAD)


main()
