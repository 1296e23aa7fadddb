#!/usr/bin/env bash
# Measures what snapshots and backups of a large archive cost.
#
#   bench/snapshots.sh     needs root; prints a table
#
#   ENTRIES   files of 1 KiB (default 1000000)        SNAPSHOTS  in place beside the one without (default 50)
#   CHANGED   files changed before the oldest is removed (default 100000)
#   ROUNDS    interleaved rounds of writing (default 3)
#   PROGRAMS  directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        OPTIONS    mount options (default memory=2048M)
#
# Two archives are made by import-tar: "with" gets its snapshots, ten files changed between any two; "without" the same changes.
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
take_place snapshots
entries=${ENTRIES:-1000000}

for archive in with without; do
    new_archive "$scratch/$archive.lbx"
    python3 "$here/many_files.py" "$entries" 1024 | lockbox import-tar --passfile "$scratch/passphrase" "$scratch/$archive.lbx"
    mkdir "$scratch/$archive"
    mount_archive "$scratch/$archive.lbx" "$scratch/$archive" "${OPTIONS:-memory=2048M}"
done
echo "$(nproc) processors; load before $(cut -d' ' -f1-3 /proc/loadavg)" >&2
python3 "$here/snapshots.py" "$scratch" "$entries" "${SNAPSHOTS:-50}" "${CHANGED:-100000}" "${ROUNDS:-3}"
echo "load after $(cut -d' ' -f1-3 /proc/loadavg)" >&2
