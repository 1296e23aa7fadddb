#!/usr/bin/env python3
"""Manual pages: mandoc finds no fault, and every line fits 80 columns. Needs mandoc."""
import pathlib
import re
import subprocess
import sys

# Lines that cannot be divided: of fstab(5), of units, and links.
WHOLE = re.compile(r" 0 0$|,\\$|^ *ExecStart=|^ *https://")
faults = []
pages = sorted(pathlib.Path("man").glob("*.[1-8]"))
for page in pages:
    lint = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", page], capture_output=True, text=True)
    faults += (lint.stdout + lint.stderr).splitlines()
    shown = subprocess.run(["mandoc", "-T", "utf8", "-O", "width=80", page], capture_output=True, text=True, check=True)
    for line in re.sub(".\b", "", shown.stdout).splitlines():
        if len(line) > 80 and not WHOLE.search(line):
            faults.append(f"{page}: {len(line)} columns: {line.strip()}")
print(*faults, sep="\n", end="\n" if faults else "")
print(f"{len(pages)} pages, {len(faults)} faults")
sys.exit(bool(faults) or len(pages) < 15)
