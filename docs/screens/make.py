#!/usr/bin/env python3
"""Makes the pictures of terminals in this directory: types commands into a real shell on a real terminal, and draws what is seen.

    docs/screens/make.py [PROGRAMS]     as root, or a user who may mount; PROGRAMS has lockbox and mount-lockbox (default: target/release)
"""

import fcntl
import os
import pathlib
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from xml.sax.saxutils import escape

HOME = pathlib.Path("/home/ann")
HERE = pathlib.Path(__file__).resolve().parent
COLUMNS = 100
PROMPT = "$ "
# Seconds until a command that says nothing more is given up.
PATIENCE = 60
PASSPHRASE = "the mill at the old bridge, 1874"

# What is typed, and for each question of the command what is answered.
SCREENS = {
    "create": [
        ("lockbox create secrets.lbx", [PASSPHRASE, PASSPHRASE]),
    ],
    "mount": [
        ("lockbox mount secrets.lbx", [PASSPHRASE]),
        ('echo "meet me at the bridge" > secrets/letter.txt', []),
        ("lockbox status", []),
        ("lockbox umount secrets", []),
        ("ls -sh", []),
    ],
    "undo": [
        ("lockbox snapshot create secrets before-cleaning", []),
        ("rm secrets/letter.txt", []),
        ("lockbox snapshot diff secrets before-cleaning", []),
        ("lockbox snapshot restore secrets before-cleaning letter.txt", []),
        ("cat secrets/letter.txt", []),
    ],
}
# Typed before a picture begins, and after it.
AROUND = {
    "undo": ([("lockbox mount --quiet secrets.lbx", [PASSPHRASE])], [("lockbox umount secrets", [])]),
}


class Screen:
    """What a terminal of endless length shows of the few sequences that a shell and lockbox send."""

    def __init__(self):
        self.lines, self.column = [""], 0

    def feed(self, text):
        for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[^\x1b]|\x1b", text):
            line = self.lines[-1]
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self.lines.append("")
            elif piece == "\b":
                self.column = max(0, self.column - 1)
            elif re.fullmatch(r"\x1b\[[012]?K", piece):
                self.lines[-1] = "" if piece[2] == "2" else line[: self.column]
            elif piece.startswith("\x1b") or piece < " ":
                continue
            else:
                self.lines[-1] = line[: self.column].ljust(self.column) + piece + line[self.column + 1 :]
                self.column += 1

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.lines)


class Shell:
    def __init__(self, place, programs):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(HOME)
            os.execve("/bin/bash", ["bash", "--norc", "--noprofile"], {
                "PATH": f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(HOME), "PS1": PROMPT, "TERM": "xterm",
                "XDG_RUNTIME_DIR": str(place / "run"), "XDG_STATE_HOME": str(place / "state"), "LC_ALL": "C.UTF-8", "TZ": "UTC",
                "PROMPT_COMMAND": "", "BASH_SILENCE_DEPRECATION_WARNING": "1",
            })  # fmt: skip
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        self.screen = Screen()
        self.until(lambda line: line == PROMPT.rstrip())

    def until(self, so):
        """Reads until the last line is so."""
        end = time.monotonic() + PATIENCE
        while not so(self.screen.lines[-1].rstrip()):
            if not select.select([self.terminal], [], [], max(0, end - time.monotonic()))[0]:
                raise SystemExit(f"nothing more came after:\n{self.screen.text}")
            self.screen.feed(os.read(self.terminal, 4096).decode())

    def type(self, command, answers):
        os.write(self.terminal, command.encode() + b"\n")
        self.until(lambda line: command in "\n".join(self.screen.lines[-3:]) and line != PROMPT + command)
        for answer in answers:
            self.until(lambda line: line.endswith(":"))
            # A question comes after the echo was taken away, and what is typed before that is dropped with it.
            time.sleep(0.3)
            os.write(self.terminal, answer.encode() + b"\n")
            before = len(self.screen.lines)
            self.until(lambda line: len(self.screen.lines) > before)
        self.until(lambda line: line == PROMPT.rstrip())


def draw(lines):
    width, height = COLUMNS * 8.4 + 32, len(lines) * 19 + 28
    rows = []
    for number, line in enumerate(lines):
        kind = "typed" if line.startswith(PROMPT) else "said"
        rows.append(f'<text class="{kind}" x="16" y="{number * 19 + 28}" xml:space="preserve">{escape(line)}</text>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}">',
        "<style>text { font: 14px ui-monospace, 'DejaVu Sans Mono', monospace; fill: #d7dde5 } .typed { fill: #fff; font-weight: 600 }</style>",
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1d2430"/>', *rows, "</svg>", "",
    ])  # fmt: skip


def main():
    given = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parent.parent / "target/release").resolve()
    with tempfile.TemporaryDirectory(prefix="lockbox-screens.") as directory:
        place = pathlib.Path(directory)
        for name in ["run", "bin"]:
            (place / name).mkdir(mode=0o700)
        # A short way to stand in the pictures.
        HOME.mkdir(mode=0o700)
        shutil.copy(given / "lockbox", place / "bin/lockbox")
        shutil.copy(given / "mount-lockbox", place / "bin/mount.lockbox")
        shell = Shell(place, place / "bin")
        try:
            for name, commands in SCREENS.items():
                before, after = AROUND.get(name, ([], []))
                for command in before:
                    shell.type(*command)
                shell.screen = Screen()
                shell.screen.feed(PROMPT)
                for command in commands:
                    shell.type(*command)
                lines = [line.rstrip() for line in shell.screen.lines[:-1]]
                (HERE / f"{name}.svg").write_text(draw(lines))
                print("\n".join(lines), end="\n\n")
                for command in after:
                    shell.type(*command)
        finally:
            os.close(shell.terminal)
            os.waitpid(shell.pid, 0)
            if os.path.ismount(HOME / "secrets"):
                subprocess.run(["umount", HOME / "secrets"], check=False)
            shutil.rmtree(HOME)


main()
