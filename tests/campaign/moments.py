#!/usr/bin/env python3
"""Takes, removes and restores snapshots under churn, compaction, new keys, backups and kills, and compares each with a copy made at its time.

    tests/campaign/moments.py LOCKBOX [ROUNDS [SEED]]

The program mount-lockbox lies beside LOCKBOX. Run as root in a mount namespace of its own. Each line that begins with FELL is a finding; the exit
code says whether there was one.

Every change is made in the mount and in a directory beside it. When a snapshot is taken, both have the same content, and a copy of the mount is made.
From then on until it is removed the snapshot has what the copy has: through .snapshots, as a mount of its own, and extracted. A round ends with an
unmount or with a kill of the daemon under changes; after that the directory beside follows what is there.
"""
import hashlib
import json
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile

from findings import environment, fallen, fell

LOCKBOX = os.path.abspath(sys.argv[1])
MOUNT = os.path.join(os.path.dirname(LOCKBOX), "mount-lockbox")
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1
MOST = 8


def describe(top):
    """Everything that a faithful copy keeps, by path; without times of directories that the copying itself changes."""
    first, found = {}, {}
    for directory, directories, files in os.walk(top):
        for name in directories + files:
            path = os.path.join(directory, name)
            is_ = os.lstat(path)
            short = os.path.relpath(path, top)
            facts = [oct(is_.st_mode), is_.st_uid, is_.st_gid, is_.st_mtime_ns]
            if stat.S_ISREG(is_.st_mode):
                with open(path, "rb") as file:
                    facts += [is_.st_size, hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read()).hexdigest()]
            if not stat.S_ISDIR(is_.st_mode):
                facts += [is_.st_nlink]
                first.setdefault((is_.st_dev, is_.st_ino), []).append(short)
            if stat.S_ISLNK(is_.st_mode):
                facts += [os.readlink(path)]
            for name in sorted(os.listxattr(path, follow_symlinks=False)):
                facts += [name, os.getxattr(path, name, follow_symlinks=False).hex()]
            found[short] = facts
    for names in first.values():
        for name in names:
            found[name].append(sorted(names))
    return found


def same(one, other, what, without_times=False):
    one, other = describe(one), describe(other)
    if without_times:
        for facts in list(one.values()) + list(other.values()):
            facts[3] = None
    for path in sorted(one.keys() | other.keys()):
        if one.get(path) != other.get(path):
            fell(what, f"{path}: {one.get(path)} and {other.get(path)}")
            return False
    return True


class Churn:
    """Changes that are the same in every tree that they are made in: what is chosen depends on the dice and on names alone."""

    def __init__(self, dice, *tops):
        self.dice, self.tops = dice, tops

    def names(self, wanted):
        found = []
        for directory, directories, files in os.walk(self.tops[0]):
            directories.sort()
            for name in sorted(directories if wanted == "directory" else files):
                path = os.path.join(directory, name)
                if wanted == "directory" or not os.path.islink(path):
                    found.append(os.path.relpath(path, self.tops[0]))
        return found

    def step(self):
        dice = self.dice
        directories, files = ["."] + self.names("directory"), self.names("file")
        directory = dice.choice(directories)
        new = os.path.join(directory, f"n{dice.randrange(10**9)}")
        kind = dice.choice(["write"] * 4 + ["over"] * 4 + ["append", "cut", "hole", "copy", "copy", "rename", "link", "symlink", "xattr", "mode", "remove", "remove", "directory", "move", "tree"])
        seed, size, at = dice.randrange(2**32), dice.choice([0, 100, 5000, 70_000, 400_000]), dice.randrange(500_000)
        file, other = (dice.choice(files), dice.choice(files)) if files else (None, None)
        if not files and kind not in ("write", "directory", "tree"):
            kind = "write"
        if len(files) > 120:
            kind = "tree"
        for top in self.tops:
            self.change(top, kind, directory, new, file, other, random.Random(seed).randbytes(size), at)

    def change(self, top, kind, directory, new, file, other, data, at):
        def path(name):
            return os.path.join(top, name)

        if kind == "write":
            with open(path(new), "wb") as made:
                made.write(data)
        elif kind in ("over", "append"):
            with open(path(file), "r+b") as opened:
                opened.seek(at % (os.path.getsize(path(file)) + 1) if kind == "over" else 0, os.SEEK_SET if kind == "over" else os.SEEK_END)
                opened.write(data)
        elif kind in ("cut", "hole"):
            os.truncate(path(file), at % (os.path.getsize(path(file)) + 1) if kind == "cut" else os.path.getsize(path(file)) + at)
        elif kind == "copy":
            with open(path(file), "rb") as source, open(path(new), "wb") as made:
                while os.copy_file_range(source.fileno(), made.fileno(), 1 << 20):
                    pass
        elif kind == "rename":
            if not os.path.samefile(path(file), path(other)):
                os.rename(path(file), path(other))
        elif kind == "link":
            os.link(path(file), path(new))
        elif kind == "symlink":
            os.symlink(file, path(new))
        elif kind == "xattr":
            os.setxattr(path(file), f"user.{at % 3}", data[:700])
        elif kind == "mode":
            os.chmod(path(file), 0o600 + at % 64)
        elif kind == "remove":
            os.unlink(path(file))
        elif kind == "directory":
            os.mkdir(path(new))
        elif kind == "move":
            if directory != ".":
                os.rename(path(directory), path(os.path.basename(new)))
        elif kind == "tree":
            if directory != ".":
                shutil.rmtree(path(directory))
            elif file:
                os.unlink(path(file))


class Campaign:
    def __init__(self):
        self.dice = random.Random(SEED)
        self.place = tempfile.mkdtemp(prefix="moments-")
        self.point, self.beside = self.place + "/point", self.place + "/beside"
        self.archive = self.place + "/a.lbx"
        for directory in (self.point, self.beside, self.place + "/copies"):
            os.mkdir(directory)
        with open(self.place + "/pass", "w", encoding="ascii") as passfile:
            passfile.write("a passphrase\n")
        os.chmod(self.place + "/pass", 0o600)
        self.env = environment(self.place)
        self.copies, self.taken, self.compared, self.did = {}, 0, 0, {}
        self.run(LOCKBOX, "create", "--weak-kdf", "--kdf-memory", "1", self.archive)

    def run(self, *arguments):
        with open(self.place + "/said", "w+b") as said:
            # A daemon keeps what it inherits, so its words go to a file that nobody waits for.
            code = subprocess.run(arguments, cwd=self.place, env=self.env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=300).returncode
            said.seek(0)
            words = said.read().decode(errors="replace")
        assert code == 0, (arguments, code, words)
        return words

    def count(self, what):
        self.did[what] = self.did.get(what, 0) + 1

    def follow(self, source, target):
        # Anew: rsync leaves names linked that are not any more when their content is the same.
        shutil.rmtree(target)
        self.run("cp", "-a", "--sparse=always", source, target)

    def compare(self, name, way):
        self.compared += 1
        self.count(f"compared {way}")
        copy, what = f"{self.place}/copies/{name}", f"seed {SEED} snapshot {name} by {way}:"
        if way == "directory":
            same(copy, f"{self.point}/.snapshots/{name}", what)
        elif way == "mount":
            self.run(MOUNT, self.archive, self.point, "-o", f"snapshot={name}")
            same(copy, self.point, what)
            self.run(LOCKBOX, "umount", self.point)
        else:
            out = self.place + "/out"
            os.mkdir(out)
            self.run(LOCKBOX, "extract", "--snapshot", name, self.archive, "--to", out)
            same(copy, out, what)
            shutil.rmtree(out)

    def take(self):
        name = f"s{self.taken}"
        self.taken += 1
        self.run(LOCKBOX, "snapshot", "create", self.point, name)
        same(self.beside, self.point, f"seed {SEED} before {name}:", without_times=True)
        self.run("cp", "-a", "--sparse=always", self.point, f"{self.place}/copies/{name}")
        self.copies[name] = True

    def forget(self, name):
        del self.copies[name]
        shutil.rmtree(f"{self.place}/copies/{name}")

    def restore(self, name):
        copy = f"{self.place}/copies/{name}"
        whole = self.dice.randrange(3) == 0
        entries = sorted(os.listdir(copy))
        if not entries:
            return
        paths = [] if whole else [self.dice.choice(entries)]
        self.count("restored all" if whole else "restored a path")
        self.run(LOCKBOX, "snapshot", "restore", self.point, name, *paths)
        if whole:
            # Files with names outside of a path are other files after restoring it.
            same(copy, self.point, f"seed {SEED} restored {name}:")
        elif not os.path.islink(f"{copy}/{paths[0]}") and os.path.isdir(f"{copy}/{paths[0]}"):
            self.run("diff", "-r", "--no-dereference", f"{copy}/{paths[0]}", f"{self.point}/{paths[0]}")
        for kept in json_lines(self.run(LOCKBOX, "snapshot", "ls", "--json", self.point)):
            if kept["name"].startswith("before-restore"):
                self.run(LOCKBOX, "snapshot", "rm", self.point, kept["name"])
        self.follow(self.point, self.beside)

    def mounted(self, number):
        self.run(MOUNT, self.archive, self.point)
        status = json.loads(self.run(LOCKBOX, "status", "--json", self.point))
        churn = Churn(self.dice, self.beside, self.point)
        for _ in range(self.dice.randrange(2, 6)):
            for _ in range(self.dice.randrange(5, 60)):
                churn.step()
            chosen = self.dice.choice(["take", "take", "take", "remove", "restore", "compare", "compare"])
            if chosen == "take" and len(self.copies) < MOST:
                self.take()
            elif chosen == "remove" and len(self.copies) > 2:
                name = self.dice.choice(sorted(self.copies))
                self.run(LOCKBOX, "snapshot", "rm", self.point, name)
                self.forget(name)
                self.count("removed")
            elif chosen == "restore" and self.copies:
                self.restore(self.dice.choice(sorted(self.copies)))
            elif self.copies:
                self.compare(self.dice.choice(sorted(self.copies)), "directory")
        if self.dice.randrange(2):
            self.count("unmounted")
            self.run(LOCKBOX, "umount", self.point)
            return
        self.count("killed")
        child = os.fork()
        if child == 0:
            try:
                alone = Churn(random.Random(f"{SEED} {number}"), self.point)
                while True:
                    alone.step()
            except OSError:
                os._exit(0)
        # The moment is the point: any is right.
        select.select([], [], [], self.dice.uniform(0.01, 1.0))
        daemon = os.pidfd_open(status["pid"])
        signal.pidfd_send_signal(daemon, signal.SIGKILL)
        if os.waitpid(child, 0)[1] != 0:
            fell(f"seed {SEED} round {number}: who made changes failed by itself")
        self.run("umount", "-l", self.point)
        # Readable when it is gone, and with it the lock of the archive.
        if not select.select([daemon], [], [], 60)[0]:
            fell(f"seed {SEED} round {number}: the daemon does not die")
        os.close(daemon)
        self.run(MOUNT, self.archive, self.point)
        self.follow(self.point, self.beside)
        for name in sorted(self.copies):
            self.compare(name, "directory")
        self.run(LOCKBOX, "umount", self.point)

    def between(self):
        chosen = self.dice.choice(["compact", "rekey", "backup", "backup", "nothing"])
        self.count(chosen)
        if chosen == "compact":
            self.run(LOCKBOX, "compact", self.archive)
        elif chosen == "rekey":
            self.run(LOCKBOX, "key", "rekey", self.archive)
        elif chosen == "backup":
            self.run(LOCKBOX, "backup", "--verify", self.archive, self.place + "/backup.lbx")
            out = self.place + "/out"
            os.mkdir(out)
            self.run(LOCKBOX, "extract", self.place + "/backup.lbx", "--to", out)
            same(self.beside, out, f"seed {SEED} backup:", without_times=True)
            shutil.rmtree(out)
        if chosen in ("compact", "rekey") and os.path.exists(self.place + "/backup.lbx"):
            # It is of another key or other places then, and begins anew.
            os.unlink(self.place + "/backup.lbx")
        self.run(LOCKBOX, "check", "--full", self.archive)
        for name in sorted(self.copies):
            self.compare(name, self.dice.choice(["mount", "extract"]))
        listed = {kept["name"] for kept in json_lines(self.run(LOCKBOX, "snapshot", "ls", "--json", self.archive))}
        if listed != set(self.copies):
            fell(f"seed {SEED}: the snapshots are {sorted(listed)} and not {sorted(self.copies)}")

    def go(self):
        for number in range(ROUNDS):
            self.mounted(number)
            self.between()
            if fallen:
                print(f"seed {SEED} round {number}: what it was is left in {self.place}")
                return
        shutil.rmtree(self.place)
        did = ", ".join(f"{count} {what}" for what, count in sorted(self.did.items()))
        print(f"seed {SEED}: {ROUNDS} rounds, {self.taken} snapshots taken, {self.compared} comparisons; {did}")


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


Campaign().go()
sys.exit(1 if fallen else 0)
