#!/usr/bin/env python3
"""Tells stories: types their commands on terminals, answers what is asked there, and compares exit codes and everything that is seen.

    tell.py [--root DIR] [--user NAME] [--patience SECONDS] [--tasks TABLE] STORY...

as root; with lockbox and mount.lockbox in PATH and /sbin, or installed by the first story. --root is where the system of the story lives.

A story is text with lines `ann$ COMMAND` (typed by the user into a shell of hers, which begins in her home /srv/ann) and `root# COMMAND` (into
another). The lines after a command, up to an empty line or another command, are what the terminal shows then:

    *  ?             any text, any letter; every other letter is itself
    ...              any number of lines, also none; a line that is empty there is * here, since an empty one ends what is shown
    <name>           a word or words that are not the same each time; where the name comes again, in commands and answers too, it is that text
    {{answer}}       is typed here, and must not be seen: a secret. ^C and ^D are these keys
    {=answer=}       is typed here, and is seen
    [N]              at last, an exit code other than 0

A line "Task: NAME" begins what is counted: commands, and questions that wait for an answer, until a line of text that is neither command nor what is
shown. A story with tasks has all that the table has, whose rows begin `| NAME | COMMANDS, QUESTIONS`.

Each story begins and ends with an empty home. Every story is told, also after one that fails.
"""

import argparse
import difflib
import os
import pathlib
import re
import subprocess
import sys

from shell import Shell, Stuck

HOME = "/srv/ann"
# So wide that no message is wrapped.
WIDE = 400
TYPED = re.compile(r"\{\{(.*?)\}\}|\{=(.*?)=\}")
NAMED = re.compile(r"<([a-z]+)>")


class Failed(Exception):
    """The story is not as it was told."""


class Story:
    def __init__(self, root, user, patience):
        self.root, self.user, self.patience = root, user, patience
        self.shells, self.known, self.count = {}, {}, 0
        self.task, self.tasks = None, {}

    def shell(self, who):
        if who not in self.shells:
            path = os.environ["PATH"] if self.root == "/" else "/usr/sbin:/usr/bin:/sbin:/bin"
            environment = {"PATH": path, "HOME": HOME if who == "ann$" else "/root"}
            if who != "ann$":
                # A story begins without a memory of the archives of the one before.
                environment["XDG_STATE_HOME"] = os.path.join(HOME, ".root-state")
            become = ()
            if who == "ann$":
                become = ("setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--init-groups", "--inh-caps=-all")
                environment["XDG_RUNTIME_DIR"] = f"/run/user/{inside(self.root, 'id', '-u', self.user)}"
            else:
                environment["DEBIAN_FRONTEND"] = "noninteractive"
            self.shells[who] = Shell(who, HOME, environment, self.patience, become, self.root, WIDE)
        return self.shells[who]

    def named(self, text):
        return NAMED.sub(lambda found: self.known.get(found[1], found[0]), text)

    def pattern(self, line):
        """A regular expression of a line, with what is typed in it."""
        expression, at, groups = "", 0, set()
        for special in re.finditer(rf"{TYPED.pattern}|{NAMED.pattern}|[*?]", line):
            expression += re.escape(line[at : special.start()])
            at = special.end()
            _, seen, name = special.groups()
            if special[0] in "*?":
                expression += {"*": ".*?", "?": "."}[special[0]]
            elif seen is not None:
                expression += re.escape(self.named(seen))
            elif name in self.known:
                expression += re.escape(self.known[name])
            elif name in groups:
                expression += f"(?P={name})"
            elif name:
                groups.add(name)
                expression += f"(?P<{name}>.+?)"
        # What stands before a secret ends with a space, of which nothing is seen.
        return (expression + re.escape(line[at:])).removesuffix(r"\ ")

    def whole(self, lines):
        return re.compile("".join("(?:.*\n)*?" if line == "..." else self.pattern(line) + "\n" for line in lines))

    def do(self, who, command, lines):
        """Types a command and the answers, and compares."""
        code = 0
        if lines and (last := re.fullmatch(r"\[(\d+)\]", lines[-1])):
            code, lines = int(last[1]), lines[:-1]
        shell, command = self.shell(who), self.named(command)
        shell.command(command)
        for number, line in enumerate(lines):
            for question in TYPED.finditer(line):
                asked = re.compile(self.pattern(line[: question.start()]))
                if not shell.until(lambda asked=asked: asked.fullmatch(shell.screen.lines[-1].rstrip())):
                    break
                # What was seen of words for the first time may be typed at once.
                if begun := self.whole(lines[:number]).fullmatch(as_text(shell.screen.lines[1:-1])):
                    self.known |= begun.groupdict()
                secret, seen = question.groups()
                shell.answer(self.named(secret if seen is None else seen), seen is not None)
        shell.until_prompt()
        self.count += 1
        if self.task:
            commands, questions = self.tasks[self.task]
            self.tasks[self.task] = (commands + 1, questions + sum(len(TYPED.findall(line)) for line in lines))
        shown = below(shell.screen.lines)
        print(shown, end="")
        matched = self.whole(lines).fullmatch(shown)
        if matched:
            self.known |= matched.groupdict()
        if shell.code != code:
            raise Failed(f"exit code {shell.code}, and the story has {code}")
        if not matched:
            told = [self.named(TYPED.sub(lambda it: it[2] or "", line)).rstrip() for line in lines]
            raise Failed("\n".join(difflib.unified_diff(told, shown.splitlines(), "the story", "the terminal", lineterm="")))

    def tell(self, file):
        who, command, lines = None, None, []
        for line in [*file.read_text().splitlines(), ""]:
            begins = re.match(r"(ann\$|root#) (.*)", line)
            if who and not begins and line:
                lines.append(line)
                continue
            if who:
                self.do(who, command, lines)
                who, lines = None, []
            if begins:
                who, command = begins.groups()
            elif re.match(r"\S*[$#] ", line):
                raise Failed(f"nobody types this: {line}")
            elif line:
                self.begin_task(line)
            print(line, flush=True)
        if not self.count:
            raise Failed("nothing was typed")
        if left := self.mounts():
            raise Failed(f"mounted still: {' '.join(left)}")

    def begin_task(self, line):
        self.task = line.removeprefix("Task: ") if line.startswith("Task: ") else None
        if self.task:
            self.tasks.setdefault(self.task, (0, 0))

    def mounts(self):
        """Mount points in the home, the last first."""
        lines = reversed(pathlib.Path("/proc/self/mountinfo").read_text().splitlines())
        points = [line.split()[4] for line in lines if " - fuse.lockbox " in line]
        return [point for point in points if point.startswith(os.path.join(self.root, HOME[1:]) + "/")]

    def end(self):
        """What a story that breaks off leaves running ends with it."""
        for shell in self.shells.values():
            shell.close()
        for point in self.mounts():
            subprocess.run(["umount", "-i", "-l", point], check=True)
        # Not shutil.rmtree, which fails when a directory goes by itself: that of a mount does.
        subprocess.run(["rm", "-rf", "--one-file-system", os.path.join(self.root, HOME[1:])], check=True)


def compare_tasks(counted, table):
    """Every row of the table with what was counted; neither has a task that the other has not. In none another program needs less."""
    text = table.read_text() if table else ""
    rows = re.findall(r"^\| ([^|]+?) \| (\d+), (\d+)(?: |$)", text, re.MULTILINE)
    written = {name: (int(commands), int(questions)) for name, commands, questions in rows}
    for name in sorted(counted.keys() | written.keys()):
        if counted.get(name) != written.get(name):
            raise Failed(f"task {name}: (commands, questions) are {counted.get(name)}, and the table has {written.get(name)}")
    for name, own in written.items():
        row = re.search(rf"^\| {re.escape(name)} \|(.*)$", text, re.MULTILINE)[1]
        others = [(int(commands), int(questions)) for commands, questions in re.findall(r"\| \W*(\d+), (\d+)", row)]
        if any(other[0] < own[0] or other[1] < own[1] for other in others):
            raise Failed(f"task {name}: another program needs less")


def below(lines):
    """What stands below the command."""
    lines = lines[1:]
    # The prompt comes on a line of its own, unless the last one had no end.
    if lines and not lines[-1].rstrip():
        lines = lines[:-1]
    return as_text(lines)


def as_text(lines):
    return "".join(f"{line.rstrip()}\n" for line in lines)


def inside(root, *command):
    enter = () if root == "/" else ("chroot", root)
    return subprocess.run([*enter, *command], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def new_home(root, user):
    home = pathlib.Path(root) / HOME[1:]
    if home.exists() and os.listdir(home):
        raise SystemExit(f"{home} is somebody's already")
    runtime = f"/run/user/{inside(root, 'id', '-u', user)}"
    inside(root, "mkdir", "-p", HOME, runtime)
    inside(root, "chown", f"{user}:", HOME, runtime)
    inside(root, "chmod", "700", runtime)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--root", default="/")
    arguments.add_argument("--user", default="ann")
    arguments.add_argument("--patience", default=120, type=float, help="seconds until something is to come")
    arguments.add_argument("--tasks", type=pathlib.Path, help="a table, as docs/tasks.md has it")
    arguments.add_argument("story", nargs="+", type=pathlib.Path)
    given = arguments.parse_args()
    count, failed = 0, 0
    for file in given.story:
        new_home(given.root, given.user)
        story = Story(given.root, given.user, given.patience)
        try:
            story.tell(file)
            if story.tasks:
                compare_tasks(story.tasks, given.tasks)
        except (Failed, Stuck) as failure:
            failed += 1
            for shell in story.shells.values() if isinstance(failure, Stuck) else ():
                print(shell.screen.text)
            print(f"{file.name}: {failure}")
        finally:
            story.end()
        count += story.count
    print(f"told {len(given.story)} stories with {count} commands, and {failed} are not so")
    sys.exit(1 if failed else 0)


main()
