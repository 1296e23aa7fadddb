"""An interactive shell on a terminal of its own, what a person sees there, and typing. The stories are told and the pictures are made with it."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

LINES, COLUMNS = 40, 100
# Ends the exit code of the last command, which the terminal does not show.
CODE = re.compile(r"\x1b\]code;(\d+)\x07")
PIECES = re.compile(r"\x1b\][^\x07\x1b]*\x07|\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[^\x1b]|\x1b")


class Stuck(Exception):
    """What was waited for does not come."""


class Screen:
    """What a terminal of endless width and length shows of the few sequences that shells, lockbox and its like send."""

    def __init__(self):
        self.lines, self.column = [""], 0

    def feed(self, text):
        for piece in PIECES.findall(text):
            line = self.lines[-1]
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self.lines.append("")
                self.column = 0
            elif piece == "\b":
                self.column = max(0, self.column - 1)
            elif piece == "\t":
                self.column += 8 - self.column % 8
                self.lines[-1] = line.ljust(self.column)
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
    """`become` is put before the shell: what makes the process another user's. `root` is where it lives."""

    def __init__(self, prompt, home, environment, patience, become=(), root="/", columns=COLUMNS):
        self.prompt, self.patience, self.code = prompt, patience, None
        command = [*become, "env", "-i", *(f"{name}={value}" for name, value in environment.items()), rf"PS1=\[\e]code;$?\a\]{prompt} ",
                   "TERM=xterm", "LC_ALL=C.UTF-8", "TZ=UTC", "HISTFILE=", "bash", "--norc", "--noprofile", "--noediting", "+H", "-i"]  # fmt: skip
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            try:
                os.chroot(root)
                os.chdir(home)
                os.execvp(command[0], command)
            finally:
                os._exit(127)
        # Or the next shell has it as well, and this terminal is never hung up.
        os.set_inheritable(self.terminal, False)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self.begin()
        self.until_prompt()

    def begin(self):
        self.screen, self.code, self.rest = Screen(), None, ""

    def read(self, end):
        if not select.select([self.terminal], [], [], max(0, end - time.monotonic()))[0]:
            raise Stuck("nothing more came")
        try:
            text = self.decode(os.read(self.terminal, 65536))
        except OSError:
            text = ""
        if not text:
            raise Stuck("the shell ended")
        # A sequence may come in two parts.
        text = self.rest + text
        begun = re.search(r"\x1b(\[[0-9;?]*|\][^\x07\x1b]*)?$", text)
        text, self.rest = (text[: begun.start()], begun[0]) if begun else (text, "")
        if code := CODE.search(text):
            self.screen.feed(text[: code.start()])
            self.code = int(code[1])
            self.after = text[code.end() :]
        elif self.code is None:
            self.screen.feed(text)
        else:
            self.after += text

    def until(self, seen):
        """Reads until what is seen is so, or the command has ended. Which of both is the answer."""
        end = time.monotonic() + self.patience
        while not seen():
            if self.code is not None:
                return False
            self.read(end)
        return True

    def until_prompt(self):
        end = time.monotonic() + self.patience
        while self.code is None or not self.after.endswith(f"{self.prompt} "):
            self.read(end)

    def command(self, text):
        """Types a command. The line with it is seen first."""
        self.begin()
        os.write(self.terminal, text.encode() + b"\n")
        self.screen.feed(f"{self.prompt} ")
        self.until(lambda: len(self.screen.lines) > 1)

    def answer(self, text, seen):
        """Types the answer to a question that stands there. When it is not to be seen, the terminal is to have been told so."""
        end = time.monotonic() + self.patience
        while not seen and termios.tcgetattr(self.terminal)[3] & termios.ECHO:
            if time.monotonic() > end:
                raise Stuck("a secret would be seen here")
            select.select([self.terminal], [], [], 0.01)
        keys = {"^C": b"\x03", "^D": b"\x04"}.get(text, text.encode() + b"\n")
        before = len(self.screen.lines)
        os.write(self.terminal, keys)
        # A question that is asked again stands on another line.
        if keys[-1:] == b"\n":
            self.until(lambda: len(self.screen.lines) > before)

    def close(self):
        """Hangs up, and ends what the shell leaves behind in its session."""
        os.close(self.terminal)
        for process in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{process}/stat") as stat:
                    session = int(stat.read().rpartition(")")[2].split()[3])
                if session == self.pid:
                    os.kill(int(process), signal.SIGKILL)
            except OSError:
                continue
        os.waitpid(self.pid, 0)
