#!/usr/bin/env bash
# Measures what snapshots and backups of a large archive cost.
#
#   bench/snapshots.sh     needs root; prints a table
#
#   ENTRIES   files of 1 KiB (default 1000000)        SNAPSHOTS  in place beside the one without (default 50)
#   CHANGED   files changed before the oldest is removed (default 100000)
#   ROUNDS    interleaved rounds of writing (default 3)
#   TURNS     how often all of it is done, from new archives on (default 1); the table has the medians
#   PROGRAMS  directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        OPTIONS    mount options (default memory=2048M)
#   BEFORE    directory with older programs, measured in turn with the others as "before"
#
# Two archives are made by import-tar: "with" gets its snapshots, ten files changed between any two; "without" the same changes.
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
take_place snapshots
entries=${ENTRIES:-1000000}

candidates=(lockbox ${BEFORE:+before})

measure() {
    local top=$scratch/turn archive
    mkdir "$top"
    cp "$scratch/passphrase" "$top"
    for archive in with without; do
        new_archive "$top/$archive.lbx"
        python3 "$here/many_files.py" "$entries" 1024 | lockbox import-tar --passfile "$scratch/passphrase" "$top/$archive.lbx"
        mkdir "$top/$archive"
        mount_archive "$top/$archive.lbx" "$top/$archive" "${OPTIONS:-memory=2048M}"
    done
    python3 "$here/snapshots.py" "$top" "$entries" "${SNAPSHOTS:-50}" "${CHANGED:-100000}" "${ROUNDS:-3}" >>"$1"
    lockbox umount "$top/without"
    rm -rf --one-file-system "$top"
}

echo "$(nproc) processors; load before $(cut -d' ' -f1-3 /proc/loadavg)" >&2
for ((turn = 1; turn <= ${TURNS:-1}; turn++)); do
    for name in $(in_turn "$turn" "${candidates[@]}"); do
        echo "turn $turn of ${TURNS:-1}: $name" >&2
        with_programs_of "$name" measure "$scratch/$name.rows"
    done
done
echo "load after $(cut -d' ' -f1-3 /proc/loadavg)" >&2
python3 - "$scratch" "$entries" "${candidates[@]}" <<'END'
import collections, sys
scratch, entries, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
found = collections.defaultdict(lambda: collections.defaultdict(list))
for name in names:
    for line in open(f"{scratch}/{name}.rows", encoding="ascii"):
        row, value = line.rstrip("\n").split("\t")
        found[row][name].append(value)
print(f"| {entries:,} files | " + " | ".join(names) + " |\n|---" + "|---:" * len(names) + "|")
def median(values):
    return sorted(values, key=float)[len(values) // 2] if values else "-"
for row, values in found.items():
    print(f"| {row} | " + " | ".join(median(values[name]) for name in names) + " |")
END
