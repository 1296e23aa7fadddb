#!/usr/bin/env python3
"""Runs a program on a terminal of its own, types answers to its questions, and prints what stood on the terminal.

    terminal.py [QUESTION ANSWER]... -- PROGRAM ARGUMENT...

QUESTION is a regular expression; ^C and ^D in an ANSWER are those keys, and every other answer ends with the return key; \\1 in it is what the
first group of this or an earlier question found. Ends with the exit code of the program, and with 99 when a question was not asked within 30
seconds.
"""

import os
import pty
import re
import select
import struct
import sys
import termios
import time
import fcntl

DEADLINE = 120


def main():
    split = sys.argv.index("--")
    words, command = sys.argv[1:split], sys.argv[split + 1 :]
    questions = [(re.compile(q.encode()), key(a)) for q, a in zip(words[::2], words[1::2])]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown, start, missed, group = b"", 0, False, b"\\1"
    for question, answer in questions:
        deadline = time.time() + DEADLINE
        while not (found := question.search(shown, start)):
            more = read(terminal, deadline)
            if not more:
                missed = True
                break
            shown += more
        if missed:
            break
        start = found.end()
        wait_for_silence(terminal)
        group = found[1] if question.groups else group
        os.write(terminal, answer.replace(b"\\1", group))
    while not missed and (more := read(terminal, time.time() + 10 * DEADLINE)):
        shown += more
    sys.stdout.buffer.write(shown.replace(b"\r\n", b"\n"))
    sys.stdout.flush()
    if missed:
        os.close(terminal)
        print("\n%r was not asked" % question.pattern.decode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sys.exit(99 if missed else status if status >= 0 else 128 - status)


def key(answer):
    return {"^C": b"\x03", "^D": b"\x04"}.get(answer, answer.encode() + b"\n")


def wait_for_silence(terminal):
    """What is asked secretly is typed when the echo is off; a person is slower than the program, and this is not."""
    for _ in range(30):
        if not termios.tcgetattr(terminal)[3] & termios.ECHO:
            return
        time.sleep(0.01)


def read(terminal, deadline):
    if not select.select([terminal], [], [], max(0, deadline - time.time()))[0]:
        return b""
    try:
        return os.read(terminal, 65536)
    except OSError:
        # The program is gone.
        return b""


main()
