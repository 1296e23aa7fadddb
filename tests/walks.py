#!/usr/bin/env python3
"""Walks of docs/walks.md: each file of a row exists and defines the functions that the row names."""
import pathlib
import re
import sys

ROW = re.compile(r"\| `([^`]+\.rs)` \| ([^|]+) \|")
faults, counts = [], {}
section = ""
for line in pathlib.Path("docs/walks.md").read_text().splitlines():
    if line.startswith("## "):
        section = line[3:]
    row = ROW.match(line)
    if not row:
        continue
    path, names = pathlib.Path(row[1]), re.findall("`([^`]+)`", row[2])
    source = path.read_text().split("\n#[cfg(test)]\nmod tests {")[0] if path.exists() else ""
    missing = [name for name in names if not re.search(rf"\bfn {re.escape(name)}\b", source)]
    faults += [f"docs/walks.md: {path} has no function {name}" for name in missing]
    if not path.exists():
        faults.append(f"docs/walks.md: {path} does not exist")
    files, functions = counts.get(section, (0, 0))
    counts[section] = (files + 1, functions + len(names))
print(*faults, sep="\n", end="\n" if faults else "")
for section, (files, functions) in counts.items():
    print(f"{section}: {files} files, {functions} functions")
sys.exit(bool(faults) or len(counts) < 6)
