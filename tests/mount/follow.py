#!/usr/bin/env python3
"""Reads what strace -f wrote of a mount daemon, and names the paths that it looked up after it had mounted.

usage: follow.py TRACE

The trace has at least the calls %file, clone, clone3, fork and vfork. What is looked up in a directory that is held open is no path, and
/proc, /sys and /dev are never mounted over. Ends with 1 when anything else was looked up, or when no mount is in the trace.
"""

import re
import sys

ALLOWED = ("/proc/", "/sys/", "/dev/")
LINE = re.compile(r"(\d+) +(.*)")
CALL = re.compile(r"(\w+)\((.*)")
CREATED = re.compile(r"= (\d+)$")


def looked_up(call, arguments):
    """The path that the kernel walks from the root or the working directory, or None."""
    if call in ("execve", "mount", "umount2"):
        return arguments
    found = re.match(r'"((?:[^"\\]|\\.)*)"', arguments)
    if found:
        return found[1]
    found = re.match(r'(AT_FDCWD|-?\d+), "((?:[^"\\]|\\.)*)"', arguments)
    if not found or not found[2]:
        return None
    return found[2] if found[1] == "AT_FDCWD" or found[2].startswith("/") else None


def main():
    threads, mounted, wrong, unfinished = set(), False, [], {}
    for line in open(sys.argv[1], errors="replace"):
        parts = LINE.match(line.rstrip())
        if not parts:
            continue
        thread, text = int(parts[1]), parts[2]
        threads = threads or {thread}
        resumed = re.match(r"<\.\.\. (\w+) resumed>(.*)", text)
        if resumed:
            text = unfinished.pop(thread, resumed[1] + "(") + resumed[2]
        elif text.endswith("<unfinished ...>"):
            unfinished[thread] = text.removesuffix("<unfinished ...>")
            # It may never come back: that is what is looked for.
        found = CALL.match(text)
        if not found or thread not in threads or resumed and found[1] not in ("clone", "clone3", "mount"):
            continue
        call, arguments = found.groups()
        if call in ("clone", "clone3"):
            created = CREATED.search(text)
            if created and "CLONE_THREAD" in text:
                threads.add(int(created[1]))
        elif call == "mount" and text.endswith("= 0"):
            mounted = True
        elif mounted and call not in ("fork", "vfork"):
            path = looked_up(call, arguments)
            if path is not None and not path.startswith(ALLOWED):
                wrong.append(text)
    for text in wrong:
        print(text)
    if not mounted:
        print("no mount in the trace")
    sys.exit(bool(wrong) or not mounted)


main()
