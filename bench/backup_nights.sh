#!/usr/bin/env bash
# Measures ten nights of backups of a directory into an S3 bucket, by lockbox and by restic: commands typed, seconds, requests, bytes sent and bytes stored.
#
#   bench/backup_nights.sh    needs root, python3 and restic; prints a table
#
#   FILES     of the directory (default 20000), with 50 kB on average, half of the bytes text and half noise
#   CHANGED   files that each night rewrites (default 1 %)         DELAY      round trip of the link in ms (default 20)
#   ONLY      candidates (default "lockbox restic")                LEVEL      --compress of lockbox (default best); RESTIC_COMPRESSION is that of restic
#   DISK, PROGRAMS, VERSITYGW   as for remote.sh
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
read -ra candidates <<<"${ONLY:-lockbox restic}"
needed=(python3)
[[ " ${candidates[*]} " != *" restic "* ]] || needed+=(restic)
take_place backup_nights "${needed[@]}"
kept=${CARGO_TARGET_DIR:-$repository/target}/versitygw-v1.8.0
[[ -n ${VERSITYGW-} ]] || KEPT=$kept BUILD_ONLY=1 PROGRAMS=$programs "$repository/tests/campaign/versitygw.sh"
echo "$(nproc) processors; load before $(cut -d' ' -f1-3 /proc/loadavg)" >&2
python3 "$here/backup_nights.py" "$scratch" "${VERSITYGW:-$kept/versitygw}" "${candidates[@]}"
echo "load after $(cut -d' ' -f1-3 /proc/loadavg)" >&2
