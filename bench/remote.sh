#!/usr/bin/env bash
# Measures archives in an object store behind a link of 20 and 100 ms and 1 Gbit/s: requests, bytes and times beside what they are to be.
#
#   bench/remote.sh     needs root, python3 and curl; prints a table of medians
#
#   ROUNDS    rounds (default 3)                      PROGRAMS   directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        VERSITYGW  the server (default: what tests/campaign/versitygw.sh builds in target/)
#   SIZE_MIB  of the large file (default 1024)        FILES      of the archive that is pushed (default 1000000)
#   PARTS     what of it (default "large plain push")
#
# The server and the link (link.py) run on this machine, and take their share of its processors: requests and bytes are exact, times are at most as good as a quiet
# machine makes them.
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=place.sh
source "$here/place.sh"
take_place remote python3 curl
kept=${CARGO_TARGET_DIR:-$repository/target}/versitygw-v1.8.0
[[ -n ${VERSITYGW-} ]] || KEPT=$kept BUILD_ONLY=1 PROGRAMS=$programs "$repository/tests/campaign/versitygw.sh"
echo "$(nproc) processors; load before $(cut -d' ' -f1-3 /proc/loadavg)" >&2
python3 "$here/remote.py" "$scratch" "${VERSITYGW:-$kept/versitygw}" "${ROUNDS:-3}"
echo "load after $(cut -d' ' -f1-3 /proc/loadavg)" >&2
