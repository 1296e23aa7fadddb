#!/usr/bin/env bash
# Measures archives in an object store behind a link of 20 and 100 ms and 1 Gbit/s: requests, bytes and times beside what they are to be.
#
#   bench/remote.sh [--beside]   needs root, python3 and curl; prints a table of medians
#
#   --beside  measures lockbox, rclone with crypt, and gocryptfs on s3backer in turn instead (compare_tools.py); needs rclone, s3backer, gocryptfs and e2fsprogs
#
#   ROUNDS    rounds (default 3)                      PROGRAMS   directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        VERSITYGW  the server (default: what tests/campaign/versitygw.sh builds in target/)
#   SIZE_MIB  of the large file (default 1024)        FILES      of the archive that is pushed (default 1000000)
#   PARTS     what of it (default "large plain push"; also "little", GIB (10) in and out with 256 MiB of memory, and "overwrites", as many at random)
#   ONLY      candidates of --beside (default "lockbox rclone s3backer"), with SMALL files of 1 KiB (1000) and one of SIZE_MIB (256)
#
# The server and the link (link.py) run on this machine, and take their share of its processors: requests and bytes are exact, times are at most as good as a quiet
# machine makes them.
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
needed=(python3 curl) script=remote.py
case ${1-} in
    '') ;;
    --beside)
        read -ra candidates <<<"${ONLY:-lockbox rclone s3backer}"
        needed=(python3) script=compare_tools.py
        for name in "${candidates[@]}"; do
            case $name in
                rclone) needed+=(rclone) ;;
                s3backer) needed+=(s3backer gocryptfs mkfs.ext4) ;;
            esac
        done
        ;;
    *)
        echo "bench/remote.sh: unknown argument '$1'" >&2
        exit 2
        ;;
esac
take_place remote "${needed[@]}"
kept=${CARGO_TARGET_DIR:-$repository/target}/versitygw-v1.8.0
[[ -n ${VERSITYGW-} ]] || KEPT=$kept BUILD_ONLY=1 PROGRAMS=$programs "$repository/tests/campaign/versitygw.sh"
echo "$(nproc) processors; load before $(cut -d' ' -f1-3 /proc/loadavg)" >&2
python3 "$here/$script" "$scratch" "${VERSITYGW:-$kept/versitygw}" "${ROUNDS:-3}" ${candidates[@]+"${candidates[@]}"}
echo "load after $(cut -d' ' -f1-3 /proc/loadavg)" >&2
