#!/usr/bin/env python3
"""Interrupts every command of lockbox at seeded moments, on small disks and at limits, and looks at what is left.

    tests/campaign/interrupts.py LOCKBOX [ROUNDS [SEED [COMMAND]]]

The programs mount-lockbox and lockbox-share lie beside LOCKBOX. Run as root in a namespace of its own (it mounts a small tmpfs). Each line that begins with FELL is a finding; the exit code says whether there was one.
With COMMAND, only those whose names contain it, and nothing else.
"""
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from findings import environment, fallen, fell

LOCKBOX = os.path.abspath(sys.argv[1])
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 2
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1
ONLY = sys.argv[4] if len(sys.argv) > 4 else ""
SIGNALS = ["INT", "TERM", "HUP", "KILL", "TSTP", "pipe"]
KDF = ["--kdf-memory", "1", "--kdf-passes", "1", "--weak-kdf"]
DOCUMENTED = {0, 2, 14}


def run(place, *arguments, passfile="pass", stdin=subprocess.DEVNULL):
    return subprocess.run([LOCKBOX, *arguments], cwd=place, env=environment(place, passfile), stdin=stdin, capture_output=True, timeout=120)


def good(place, *arguments, **rest):
    ended = run(place, *arguments, **rest)
    assert ended.returncode == 0, (arguments, ended)
    return ended


def secret(place, name, text):
    with open(f"{place}/{name}", "w", encoding="ascii") as file:
        file.write(text + "\n")
    os.chmod(f"{place}/{name}", 0o600)


def tree(root):
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, root)] = hashlib.sha256(file.read()).hexdigest()
    return found


def build(place):
    """What every round begins with."""
    os.mkdir(place + "/state")
    for name, text in [("pass", "first"), ("next", "second")]:
        secret(place, name, text)
    os.makedirs(place + "/tree/below")
    source = random.Random(7)
    for n in range(6):
        with open(f"{place}/tree/below/{n}", "wb") as file:
            file.write(source.randbytes(1_500_000 + n))
    with open(place + "/extra", "wb") as file:
        file.write(source.randbytes(5_000_000))
    good(place, "create", "a.lbx", *KDF)
    good(place, "add", "a.lbx", "tree")
    # What each moment shows of a directory that changes between them.
    shows = {}
    os.mkdir(place + "/other")
    for moment in ("kept", "later", "live"):
        for n in (0, 1, moment):
            with open(f"{place}/other/{n}", "wb") as file:
                file.write(source.randbytes(400_000))
        shows[moment] = tree(place + "/other")
        good(place, "add", "--mirror", "a.lbx", "other")
        os.remove(f"{place}/other/{moment}")
        if moment != "live":
            good(place, "snapshot", "create", "a.lbx", moment)
        if moment == "later":
            good(place, "backup", "a.lbx", "behind.lbx")
    shutil.rmtree(place + "/other")
    good(place, "key", "add", "a.lbx", "--new-passfile", "next", "--label", "second", *KDF)
    good(place, "header", "backup", "a.lbx", "saved.hdr")
    secret(place, "value", "value")
    with open(place + "/all.tar", "wb") as file:
        file.write(good(place, "export-tar", "a.lbx").stdout)
    return shows


# Name, arguments, names that may be new afterwards, and whether the archive may be changed by it.
COMMANDS = [
    ("create", ["create", "new.lbx", *KDF], {"new.lbx"}),
    ("add", ["add", "a.lbx", "extra"], set()),
    ("import-tar", ["import-tar", "a.lbx", "--to", "imported"], set()),
    ("export-tar", ["export-tar", "a.lbx"], set()),
    ("mirror", ["add", "--mirror", "a.lbx", "tree", "--to", "mirrored"], set()),
    ("extract", ["extract", "a.lbx", "--to", "out"], {"out"}),
    ("cat", ["cat", "a.lbx", "tree/below/0"], set()),
    ("check", ["check", "--full", "a.lbx"], set()),
    ("repair-header", ["check", "--repair-header", "a.lbx"], set()),
    ("passwd", ["passwd", "a.lbx", "--new-passfile", "third", *KDF], set()),
    ("key add", ["key", "add", "a.lbx", "--new-passfile", "third", *KDF], set()),
    ("key rm", ["key", "rm", "a.lbx", "second"], set()),
    ("key test", ["key", "test", "a.lbx"], set()),
    ("key recovery", ["key", "recovery", "a.lbx"], set()),
    ("key rekey", ["key", "rekey", "a.lbx"], set()),
    ("compact", ["compact", "a.lbx"], set()),
    ("header backup", ["header", "backup", "a.lbx", "new.hdr"], {"new.hdr"}),
    ("header restore", ["header", "restore", "a.lbx", "saved.hdr"], set()),
    ("purge", ["purge", "a.lbx"], set()),
    ("rescue", ["rescue", "a.lbx", "--to", "out"], {"out"}),
    ("env set", ["env", "set", "a.lbx", "NAME"], set()),
    ("run", ["run", "a.lbx", "--", "sleep", "0.05"], set()),
    ("ls", ["ls", "-lR", "a.lbx"], set()),
    ("info", ["info", "a.lbx"], set()),
    ("snapshot create", ["snapshot", "create", "a.lbx", "new"], set()),
    ("snapshot rm", ["snapshot", "rm", "a.lbx", "kept"], set()),
    ("snapshot prune", ["snapshot", "prune", "a.lbx", "--keep-last", "1"], set()),
    ("snapshot restore", ["snapshot", "restore", "a.lbx", "kept"], set()),
    ("snapshot restore path", ["snapshot", "restore", "a.lbx", "kept", "other"], set()),
    ("snapshot diff", ["snapshot", "diff", "a.lbx", "kept"], set()),
    ("backup", ["backup", "a.lbx", "copy.lbx"], {"copy.lbx"}),
    ("next backup", ["backup", "a.lbx", "behind.lbx"], set()),
]
# By mount point as well.
LIVING = ["snapshot create", "snapshot rm", "snapshot prune", "snapshot restore", "snapshot restore path", "snapshot diff", "backup", "next backup"]
# What of the moments a command may leave changed: snapshots that come and that go, and which moment the directory that changes is of.
COMES = {"snapshot create": {"new"}, "snapshot restore": {"before-restore"}, "snapshot restore path": {"before-restore"}}
GOES = {"snapshot rm": {"kept"}, "snapshot prune": {"kept"}}
RESTORED = {"snapshot restore", "snapshot restore path"}


def given(name, place):
    """What comes on standard input."""
    return open(f"{place}/{'all.tar' if name == 'import-tar' else 'value'}", "rb")


def usable(place):
    """Only commands that this program takes as they stand here."""
    kept = []
    for name, arguments, new in (one for one in COMMANDS if ONLY in one[0]):
        with tempfile.TemporaryDirectory(dir=os.path.dirname(place)) as copy:
            fresh(place, copy)
            began = time.monotonic()
            ended = run(copy, *arguments, stdin=given(name, copy))
            took = time.monotonic() - began
        if ended.returncode != 0:
            fell(name, "does not work undisturbed:", ended.returncode, ended.stderr.decode(errors="replace").strip()[:300])
        else:
            kept.append((name, arguments, new, took))
    return kept


def fresh(place, copy):
    shutil.copytree(place, copy, dirs_exist_ok=True)
    secret(copy, "third", "third")


def look_at_moments(copy, name, what, door, shows):
    """Each snapshot and each backup is there as a whole or not at all, and shows what it did."""
    listed = run(copy, "snapshot", "ls", "--json", "a.lbx", passfile=door)
    if listed.returncode != 0:
        return fell(what, "its snapshots cannot be listed:", listed.stderr.decode(errors="replace").strip()[:300])
    found = [json.loads(line)["name"] for line in listed.stdout.splitlines()]
    short = {"before-restore" if one.startswith("before-restore-") else one for one in found}
    least = {"kept", "later"} - GOES.get(name, set())
    if not least <= short <= {"kept", "later"} | COMES.get(name, set()):
        fell(what, "the snapshots are", found)

    def other(moments, archive, *arguments):
        shutil.rmtree(copy + "/looked", ignore_errors=True)
        run(copy, "extract", archive, *arguments, "other", "--to", "looked", passfile=door)
        if tree(copy + "/looked/other") not in [shows[moment] for moment in moments]:
            fell(what, archive, *arguments, "shows another moment than", moments)
        shutil.rmtree(copy + "/looked", ignore_errors=True)

    for one in found:
        other([one if one in shows else "live"], "a.lbx", "--snapshot", one)
    other(["kept", "live"] if name in RESTORED else ["live"], "a.lbx")
    for backup in ("behind.lbx", "copy.lbx"):
        if not os.path.exists(f"{copy}/{backup}"):
            continue
        checked = run(copy, "check", "--full", backup, passfile=door)
        # The passphrases of a backup are those of the archive when it was made.
        if checked.returncode == 10:
            continue
        if checked.returncode != 0:
            fell(what, backup, "not sound:", checked.stderr.decode(errors="replace").strip()[:300])
        other({"behind.lbx": ["later", "live"] if name == "next backup" else ["later"], "copy.lbx": ["live"]}[backup], backup)
    if name in ("backup", "next backup"):
        # Again it is done, and clears up what was left of a new file, unless that may be a whole backup.
        again = run(copy, *dict((one, arguments) for one, arguments, _ in COMMANDS)[name], passfile=door)
        if again.returncode != 0:
            fell(what, "cannot be done again:", again.stderr.decode(errors="replace").strip()[:300])
        if b"in the directory of the backup" in again.stderr:
            for left in os.listdir(copy):
                if left.startswith(".") and ".backup-" in left:
                    os.remove(f"{copy}/{left}")
    return None


def look(copy, name, what, names, new, whole, shows):
    """What must hold, whatever happened."""
    doors = [passfile for passfile in ("pass", "next", "third") if run(copy, "info", "a.lbx", passfile=passfile).returncode == 0]
    if not doors:
        return fell(what, "no passphrase opens it any more")
    checked = run(copy, "check", "--full", "a.lbx", passfile=doors[0])
    # A copy of the header that lags behind is told and mended by the next writer.
    if checked.returncode != 0 and b"header" not in checked.stderr:
        fell(what, "not sound:", checked.stderr.decode(errors="replace").strip()[:300])
    shutil.rmtree(copy + "/looked", ignore_errors=True)
    run(copy, "extract", "a.lbx", "tree", "--to", "looked", passfile=doors[0])
    if tree(copy + "/looked/tree") != whole:
        fell(what, "what was in it is not what it was")
    shutil.rmtree(copy + "/looked", ignore_errors=True)
    for left in sorted(set(os.listdir(copy)) - names - new - {"state", "lockbox"}):
        print("left", what, left, flush=True)
    look_at_moments(copy, name, what, doors[0], shows)
    # The same again, and a compaction, clear up.
    if run(copy, "compact", "a.lbx", passfile=doors[0]).returncode != 0:
        fell(what, "cannot be compacted afterwards")
    hidden = [left for left in os.listdir(copy) if left.startswith(".")]
    if hidden:
        fell(what, "left for ever:", hidden)
    return None


def interrupt(copy, name, arguments, how, delay):
    """Exit code, as a shell shows it, and what was said."""
    read, write = os.pipe()
    child = subprocess.Popen(
        [LOCKBOX, *arguments], cwd=copy, env=environment(copy), stdin=given(name, copy), stdout=write if how == "pipe" else subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    )
    os.close(write)
    if how == "pipe":
        os.close(read)
    if how != "pipe":
        time.sleep(delay)
        if how == "TSTP":
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            child.send_signal(signal.SIGCONT)
        else:
            child.send_signal(getattr(signal, "SIG" + how))
        os.close(read)
    _, said = child.communicate(timeout=120)
    code = child.returncode
    # One that ends itself, which is not SIGPIPE's 141, says what it left.
    if code > 128 and how != "pipe" and b"interrupted; " not in said:
        fell(f"[seed {SEED}] {name} {how}", "ends without a word of what it left:", code, said[:300])
    return (128 - code if code < 0 else code), said.decode(errors="replace").strip()


def daemons():
    """Processes of the mount program in this namespace."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm", encoding="ascii") as file:
                name = file.read().strip()
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name in ("mount.lockbox", "mount-lockbox") and state != "Z":
            found.append(int(pid))
    return found


def await_none(what):
    """Whoever mounts or unmounts is gone in some seconds, and no daemon without a mount stays."""
    for _ in range(200):
        if not daemons():
            return
        time.sleep(0.05)
    fell(what, "processes stay:", daemons())


def interrupt_mount(place, chance, base, how, whole, shows):
    """A mount that is begun, and one that is ended, by a command that is stopped meanwhile."""
    copy = tempfile.mkdtemp(dir=base)
    fresh(place, copy)
    os.mkdir(copy + "/point")
    names = set(os.listdir(copy))
    mount = [os.path.join(os.path.dirname(LOCKBOX), "mount-lockbox"), "a.lbx", "point"]
    number = getattr(signal, "SIG" + how)
    delay = chance.uniform(0, 0.15)
    child = subprocess.Popen(mount, cwd=copy, env=environment(copy), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    time.sleep(delay)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    what = f"[seed {SEED}] mount {how} after {delay * 1000:.0f} ms: code {child.returncode}"
    if child.returncode not in (0, -number, 128 + number):
        fell(what, said.decode(errors="replace").strip()[:300])
    # Who started it may have been stopped before it heard that all is well.
    for _ in range(100):
        if os.path.ismount(copy + "/point") or not daemons():
            break
        time.sleep(0.05)
    if os.path.ismount(copy + "/point"):
        with open(copy + "/point/written", "w", encoding="ascii") as file:
            file.write("acknowledged")
            file.flush()
            os.fsync(file.fileno())
        delay = chance.uniform(0, 0.05)
        child = subprocess.Popen([LOCKBOX, "umount", chance.choice(["point", "--all"])], cwd=copy, env=environment(copy), stderr=subprocess.PIPE, start_new_session=True)
        time.sleep(delay)
        child.send_signal(number)
        _, said = child.communicate(timeout=60)
        what += f", umount after {delay * 1000:.0f} ms: code {child.returncode}"
        if child.returncode not in (0, -number, 128 + number):
            fell(what, said.decode(errors="replace").strip()[:300])
        if os.path.ismount(copy + "/point") and child.returncode == 0:
            fell(what, "is said to be unmounted")
        ended = run(copy, "umount", "--all")
        if ended.returncode != 0:
            fell(what, "umount --all:", ended.stderr.decode(errors="replace").strip()[:300])
        await_none(what)
        if run(copy, "cat", "a.lbx", "written").stdout != b"acknowledged":
            fell(what, "what was synced is lost")
    await_none(what)
    look(copy, "mount", what, names, set(), whole, shows)
    shutil.rmtree(copy)


def interrupt_living(place, chance, base, how, name, whole, shows):
    """A command about the moments of a mounted archive: it is stopped, or the daemon is killed that does the work."""
    arguments, new = dict((one, (arguments, new)) for one, arguments, new in COMMANDS)[name]
    copy = tempfile.mkdtemp(dir=base)
    fresh(place, copy)
    os.mkdir(copy + "/point")
    names = set(os.listdir(copy))
    mounted = subprocess.run(
        [os.path.join(os.path.dirname(LOCKBOX), "mount-lockbox"), "a.lbx", "point"], cwd=copy, env=environment(copy),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60,
    )
    if mounted.returncode != 0:
        return fell(f"[seed {SEED}] {name}", "cannot be mounted:", mounted.returncode)
    with open(copy + "/point/written", "w", encoding="ascii") as file:
        file.write("acknowledged")
        file.flush()
        os.fsync(file.fileno())
    daemon = json.loads(good(copy, "status", "--json", "point").stdout)["pid"]
    whom = "the daemon" if how == "KILL" and chance.randrange(2) else "who asks"
    number = getattr(signal, "SIG" + how)
    child = subprocess.Popen(
        [LOCKBOX, *["point" if one == "a.lbx" else one for one in arguments]], cwd=copy, env=environment(copy), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )
    delay = chance.uniform(0, 0.12)
    time.sleep(delay)
    if whom == "the daemon":
        os.kill(daemon, number)
    else:
        child.send_signal(number)
    _, said = child.communicate(timeout=120)
    what = f"[seed {SEED}] {name} of a mount, {how} to {whom} after {delay * 1000:.0f} ms: code {child.returncode}"
    allowed = (0, -number, 128 + number) if whom == "who asks" else (0, 2, 13)
    if child.returncode not in allowed or (child.returncode > 0 and not said):
        fell(what, said.decode(errors="replace").strip()[:300])
    if whom == "the daemon":
        subprocess.run(["umount", "-l", copy + "/point"], check=True)
    else:
        ended = run(copy, "umount", "point")
        if ended.returncode != 0:
            fell(what, "umount:", ended.stderr.decode(errors="replace").strip()[:300])
    await_none(what)
    # Everything else that there was when it began is gone with a restore of everything.
    if name != "snapshot restore" and run(copy, "cat", "a.lbx", "written").stdout != b"acknowledged":
        fell(what, "what was synced is lost")
    look(copy, name, what, names, new, whole, shows)
    shutil.rmtree(copy)
    return None


def serve(place):
    """A share daemon that answers at the socket where the others look for it."""
    socket = place + "/lockbox-share.sock"
    if os.path.exists(socket):
        os.remove(socket)
    program = os.path.join(os.path.dirname(LOCKBOX), "lockbox-share")
    arguments = ["--state-dir", place + "/shares", "--unix-socket", socket, "--listen", "127.0.0.1:0", "--metrics-listen", "none"]
    with open(place + "/daemon.log", "ab") as log:
        daemon = subprocess.Popen([program, "serve", *arguments], cwd=place, env=environment(place), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    for _ in range(400):
        if os.path.exists(socket) or daemon.poll() is not None:
            break
        time.sleep(0.05)
    return daemon


def interrupt_links(chance, base, how):
    """A file is shared and received once, whole, whoever of the three is stopped meanwhile."""
    place = tempfile.mkdtemp(dir=base)
    for name in ("state", "in"):
        os.mkdir(f"{place}/{name}")
    content = chance.randbytes(6_000_000)
    with open(place + "/file", "wb") as file:
        file.write(content)
    number = getattr(signal, "SIG" + how)
    daemon = serve(place)
    what = f"[seed {SEED}] links {how}:"

    def stopped(arguments, stdin, whom):
        child = subprocess.Popen(
            [LOCKBOX, *arguments], cwd=place, env=environment(place), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        child.stdin.write(stdin)
        child.stdin.close()
        child.stdin = None
        time.sleep(chance.uniform(0, 0.15))
        (child if whom == "client" else daemon).send_signal(number)
        if whom == "daemon":
            daemon.wait(60)
        return child, whom

    def ended(child, whom):
        out, said = child.communicate(timeout=180)
        # A client of a daemon that comes again goes on by itself.
        allowed = (0, -number, 128 + number) if whom == "client" else (0, 2, 21)
        if child.returncode not in allowed or (child.returncode > 0 and not said):
            fell(what, child.args[1], "with the", whom, "stopped:", child.returncode, said.decode(errors="replace").strip()[:300])
        return child.returncode, out

    for whom in ("client", "daemon"):
        child, whom = stopped(["share", "file"], b"", whom)
        if whom == "daemon":
            daemon = serve(place)
        code, link = ended(child, whom)
        if code != 0 or not link.strip():
            code, link = 0, good(place, "share", "file").stdout
        child, whom = stopped(["receive", "--socket", place + "/lockbox-share.sock", "-o", "in"], link, whom)
        if whom == "daemon":
            daemon = serve(place)
        code, _ = ended(child, whom)
        if not os.path.exists(place + "/in/file"):
            again = subprocess.run(
                [LOCKBOX, "receive", "--resume", "--socket", place + "/lockbox-share.sock", "-o", "in"],
                cwd=place, env=environment(place), input=link, capture_output=True, timeout=180,
            )
            if again.returncode != 0:
                fell(what, "cannot be gone on with, the", whom, "stopped:", again.returncode, again.stderr.decode(errors="replace").strip()[:300])
                continue
        with open(place + "/in/file", "rb") as file:
            if file.read() != content:
                fell(what, "other content, the", whom, "stopped")
        os.remove(place + "/in/file")
        if os.listdir(place + "/in"):
            fell(what, "left for ever:", os.listdir(place + "/in"))
    daemon.kill()
    daemon.wait()
    shutil.rmtree(place)


def main():
    # What nohup(1) ignores would be ignored by whom it is sent to.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    base = tempfile.mkdtemp(prefix="interrupts.")
    place = base + "/place"
    os.mkdir(place)
    shows = build(place)
    whole = tree(place + "/tree")
    chance = random.Random(SEED)
    commands = usable(place)
    count = 0
    for _ in range(ROUNDS):
        for name, arguments, new, took in commands:
            for how in SIGNALS:
                copy = tempfile.mkdtemp(dir=base)
                fresh(place, copy)
                names = set(os.listdir(copy))
                delay = chance.uniform(0, took)
                code, said = interrupt(copy, name, arguments, how, delay)
                what = f"[seed {SEED}] {name} {how} after {delay * 1000:.0f} ms of {took * 1000:.0f}: code {code}"
                number = 0 if how in ("TSTP", "pipe") else getattr(signal, "SIG" + how)
                allowed = {0} if how == "TSTP" else {0, 2, 141} if how == "pipe" else {0, 128 + number}
                if code not in allowed:
                    fell(what, said[:300])
                look(copy, name, what, names, new, whole, shows)
                shutil.rmtree(copy)
                count += 1
    for name in [one for one in LIVING if ONLY in one] * ROUNDS:
        for how in ["INT", "TERM", "KILL", "KILL"]:
            interrupt_living(place, chance, base, how, name, whole, shows)
            count += 1
    for how in ["INT", "TERM", "HUP", "KILL"] * (0 if ONLY else 4 * ROUNDS):
        interrupt_mount(place, chance, base, how, whole, shows)
        interrupt_links(chance, base, how)
        count += 5
    for name, arguments, new, _ in commands:
        for limit in ("fsize", "disk"):
            copy = tempfile.mkdtemp(dir=base)
            if limit == "disk":
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "none", copy], check=True)
            fresh(place, copy)
            names = set(os.listdir(copy))
            size = os.path.getsize(copy + "/a.lbx")
            before = None
            if limit == "disk":
                free = os.statvfs(copy)
                with open(copy + "/filler", "wb") as filler:
                    filler.write(bytes(max(0, free.f_bavail * free.f_frsize - chance.randrange(400_000))))
                names.add("filler")
            else:
                most = chance.choice([0, 4096, size // 2, size + 4096])
                before = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            ended = subprocess.run(
                [LOCKBOX, *arguments], cwd=copy, env=environment(copy), stdin=given(name, copy), capture_output=True, preexec_fn=before, timeout=120
            )
            what = f"[seed {SEED}] {name} with a {limit} limit: code {ended.returncode}"
            if ended.returncode not in DOCUMENTED or (ended.returncode != 0 and not ended.stderr):
                fell(what, ended.stderr.decode(errors="replace").strip()[:300])
            if limit == "disk":
                small, copy = copy, tempfile.mkdtemp(dir=base)
                shutil.copytree(small, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("filler"))
                subprocess.run(["umount", small], check=True)
            look(copy, name, what, names, new, whole, shows)
            shutil.rmtree(copy)
            count += 1
    shutil.rmtree(base)
    print(f"{count} interruptions of {len(commands)} commands, {len(fallen)} findings")
    sys.exit(1 if fallen else 0)


if __name__ == "__main__":
    main()
