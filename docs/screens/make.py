#!/usr/bin/env python3
"""Makes the pictures of terminals in this directory: types commands into a real shell on a real terminal, and draws what is seen.

    docs/screens/make.py [PROGRAMS]     as root, or a user who may mount; PROGRAMS has lockbox and mount-lockbox (default: target/release)
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from xml.sax.saxutils import escape

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/story"))
from shell import COLUMNS, Shell  # noqa: E402

HOME = pathlib.Path("/home/ann")
HERE = pathlib.Path(__file__).resolve().parent
PROMPT = "$"
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


def type_in(shell, commands):
    """Types commands and the answers to what they ask, and gives what is seen."""
    seen = []
    for command, answers in commands:
        shell.command(command)
        for answer in answers:
            shell.until(lambda: shell.screen.lines[-1].rstrip().endswith(":"))
            shell.answer(answer, seen=False)
        shell.until_prompt()
        seen += shell.screen.text.splitlines()
    return seen


def draw(lines):
    width, height = COLUMNS * 8.4 + 32, len(lines) * 19 + 28
    rows = []
    for number, line in enumerate(lines):
        kind = "typed" if line.startswith(f"{PROMPT} ") else "said"
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
        environment = {
            "PATH": f"{place / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(HOME),
            "XDG_RUNTIME_DIR": str(place / "run"), "XDG_STATE_HOME": str(place / "state"),
        }  # fmt: skip
        shell = Shell(PROMPT, HOME, environment, PATIENCE)
        try:
            for name, commands in SCREENS.items():
                before, after = AROUND.get(name, ([], []))
                type_in(shell, before)
                lines = type_in(shell, commands)
                (HERE / f"{name}.svg").write_text(draw(lines))
                print("\n".join(lines), end="\n\n")
                type_in(shell, after)
        finally:
            shell.close()
            if os.path.ismount(HOME / "secrets"):
                subprocess.run(["umount", HOME / "secrets"], check=False)
            shutil.rmtree(HOME)


main()
