#!/usr/bin/env bash
# Measures programs that make little data durable again and again, on the host's disk, gocryptfs and lockbox, in turn.
#
#   bench/synced.sh     needs root, gocryptfs and git; prints a table of medians
#
#   ROUNDS    interleaved rounds (default 3)          PROGRAMS  directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        OPTIONS   mount options for lockbox
#   BEFORE    directory with older programs, measured in turn with the others as "before"
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
take_place synced gocryptfs git
mount_side_by_side
new_archive "$scratch/crashed.lbx"
echo "$(nproc) processors; load before $(cut -d' ' -f1-3 /proc/loadavg)" >&2
python3 "$here/synced.py" "$scratch" "${ROUNDS:-3}" "${candidates[@]}"
echo "load after $(cut -d' ' -f1-3 /proc/loadavg)" >&2
