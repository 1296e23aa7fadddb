"""What the daemons of mounts have done, as the kernel counts it."""

import glob


def daemons(point):
    """The processes that serve a mount of ours."""
    for status in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(status, "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if words[0].endswith((b"mount.lockbox", b"mount-lockbox")) and point.encode() in words:
            yield int(status.split("/")[2])


def written(point):
    """Bytes that the mount's daemon sent to the disk."""
    total = 0
    for pid in daemons(point):
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("write_bytes"))
    return total
