#!/usr/bin/env bash
# Measures lockbox beside the disk's own file system, gocryptfs, and a FUSE file system in memory that does nothing else.
#
#   bench/run.sh [--all]  needs root; prints a table, writes bench/results/DATE.md, latest.json and latest.svg
#
#   --all    also CryFS and EncFS
#   SIZE     of the large file (default 256M)         FILES   small files of 1 KiB (default 5000)
#   ROUNDS   interleaved rounds (default 3)           DISK    directory on the disk to measure (default $TMPDIR or /tmp)
#   ONLY     candidates, such as "ceiling lockbox"    OPTIONS mount options for lockbox
#   SECONDS_EACH  of the timed jobs (default 5)       PROGRAMS  directory with all programs of the workspace (default target/release, built)
#   BEFORE   directory with older programs, measured in turn with the others as "before"
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
export SIZE=${SIZE:-256M} SECONDS_EACH=${SECONDS_EACH:-5}
FILES=${FILES:-5000}
ROUNDS=${ROUNDS:-3}
everybody='disk ceiling gocryptfs lockbox'
case ${1-} in
    '') ;;
    --all) everybody='disk ceiling gocryptfs cryfs encfs lockbox' ;;
    *)
        echo "bench/run.sh: unknown argument '$1'" >&2
        exit 2
        ;;
esac
read -ra candidates <<<"${ONLY:-$everybody${BEFORE:+ before}}"

take_place run
missing=()
command -v fio >/dev/null || missing+=(fio)
for program in gocryptfs cryfs encfs; do
    [[ " ${candidates[*]} " != *" $program "* ]] || command -v "$program" >/dev/null || missing+=("$program")
done
command -v fusermount3 >/dev/null || missing+=(fuse3)
if [[ ${#missing[@]} -gt 0 ]]; then
    apt-get -q update
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
fi

install "$programs/ceiling" "$scratch/bin/ceiling"
ceiling_pid=

# Each candidate has a directory; new makes its store, open mounts it, close unmounts it durably.
new_candidate() {
    local store=$scratch/$1.store
    rm -rf --one-file-system "$store"
    mkdir -p "$store" "$scratch/$1"
    case $1 in
        disk | ceiling) ;;
        gocryptfs) new_gocryptfs "$store" ;;
        # Made by the first mount. CryFS refuses a new store where it remembers another.
        cryfs) rm -rf --one-file-system "$scratch/cryfs.state" ;;
        encfs) ;;
        lockbox | before) with_programs_of "$1" new_archive "$store/box.lbx" ;;
    esac
}

open_candidate() {
    local store=$scratch/$1.store point=$scratch/$1
    case $1 in
        disk) mount --bind "$store" "$point" ;;
        ceiling)
            # In memory only, so it stays mounted for the whole round.
            [[ -z $ceiling_pid ]] || return 0
            ceiling "$point" &
            ceiling_pid=$!
            until mountpoint -q "$point"; do
                kill -0 "$ceiling_pid"
                sleep 0.01
            done
            ;;
        gocryptfs) mount_gocryptfs "$store" "$point" ;;
        cryfs)
            CRYFS_FRONTEND=noninteractive CRYFS_NO_UPDATE_CHECK=true CRYFS_LOCAL_STATE_DIR=$scratch/cryfs.state \
                cryfs "$store" "$point" <"$scratch/passphrase" >/dev/null
            ;;
        encfs) encfs --standard --stdinpass "$store" "$point" <"$scratch/passphrase" >/dev/null ;;
        lockbox | before) with_programs_of "$1" mount_archive "$store/box.lbx" "$point" "${OPTIONS-}" ;;
    esac
}

close_candidate() {
    local point=$scratch/$1
    case $1 in
        lockbox | before) with_programs_of "$1" lockbox umount "$point" ;;
        ceiling)
            [[ -n $ceiling_pid ]] || return 0
            kill "$ceiling_pid"
            wait "$ceiling_pid" || true
            ceiling_pid=
            ;;
        *)
            sync -f "$point"
            umount "$point"
            ;;
    esac
}

# What was read or written before must not help.
make_cold() {
    if [[ $1 != ceiling ]]; then
        close_candidate "$1"
        open_candidate "$1"
    fi
    sync
    echo 3 >/proc/sys/vm/drop_caches
}

# fio_job NAME FIELD: runs the job in the current directory and prints a number of its report.
fio_job() {
    fio --output-format=json "$here/fio/$1.fio" | python3 -c '
import json, sys
job = json.load(sys.stdin)["jobs"][0]
side, field = sys.argv[1].split(".")
if job["error"]:
    sys.exit("fio failed")
# The time of the final fsync belongs to the writing.
if sys.argv[1] == "write.total":
    print("%.1f" % (job["write"]["io_bytes"] / 1048576 / (job["job_runtime"] / 1000)))
elif sys.argv[1] == "write.operations":
    print("%.1f" % (job["write"]["total_ios"] / (job["job_runtime"] / 1000)))
else:
    print("%.1f" % (job[side][field] / (1048576 if field == "bw_bytes" else 1)))' "$2"
}

# name | what is asked of lockbox against the ceiling | against gocryptfs | against the disk
measurements=(
    'sequential write + fsync, MiB/s|0.75|2.0|'
    'sequential read, cold, MiB/s|0.70|2.5|'
    'sequential read, warm, MiB/s|0.95|3|'
    'random read 4 KiB, O_DIRECT, depth 1, IOPS|0.6|1.5|'
    'random read 4 KiB, O_DIRECT, depth 16, IOPS|0.6|5|'
    'random write 4 KiB, one fsync at the end, IOPS|0.4|2.5|'
    'random write 4 KiB, fsync each, IOPS||1.0|0.7'
    'the same by four writers, IOPS||1.5|0.9'
    'create 1 KiB files, fsync of directories, files/s|0.8|1.5|'
    'walk and stat, cold, files/s|0.8|2|'
    'read 1 KiB files, cold, files/s|0.8|1.5|'
    'delete tree, files/s|0.8|1.5|'
)

# measure CANDIDATE: prints one number for each measurement.
measure() {
    local point=$scratch/$1
    new_candidate "$1"
    open_candidate "$1"
    cd "$point"
    fio_job sequential-write write.total
    cd /
    make_cold "$1"
    cd "$point"
    fio_job sequential-read read.bw_bytes
    fio_job sequential-read read.bw_bytes
    fio_job random-read read.iops
    fio_job random-read-deep read.iops
    fio_job random-write write.operations
    fio_job synced-write write.iops
    fio_job synced-writers write.iops
    cd /
    "$here/small_files.py" create "$point/small" "$FILES"
    make_cold "$1"
    "$here/small_files.py" stat "$point/small" "$FILES"
    make_cold "$1"
    "$here/small_files.py" read "$point/small" "$FILES"
    "$here/small_files.py" delete "$point/small" "$FILES"
    close_candidate "$1"
    rm -rf --one-file-system "$scratch/$1.store"
}

# Memory that a virtual machine never touched costs milliseconds for each MiB, which the first candidate would pay.
python3 -c 'import mmap, re
available = int(re.search(r"MemAvailable: *([0-9]+)", open("/proc/meminfo").read())[1]) * 1024
memory = mmap.mmap(-1, available // 2)
for at in range(0, len(memory), 4096):
    memory[at] = 1'

for round in $(seq "$ROUNDS"); do
    for name in $(in_turn "$round" "${candidates[@]}"); do
        echo "round $round of $ROUNDS: $name" >&2
        # Not in a subshell: the ceiling's process id has to be kept.
        measure "$name" >"$scratch/numbers"
        paste -s -d ' ' "$scratch/numbers" >>"$scratch/$name.numbers"
    done
done

result=$here/results/$(date -u +%Y-%m-%d).md
mkdir -p "$here/results"
{
    echo "# $(date -u '+%Y-%m-%d %H:%M') UTC"
    echo
    echo "- commit $(git -C "$repository" describe --always --dirty 2>/dev/null || echo unknown)"
    echo "- $(nproc) processors ($(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)), $(awk '/MemTotal/ { print int($2 / 1048576) }' /proc/meminfo) GiB, kernel $(uname -r), disk $(stat -f -c %T "$scratch")"
    echo "- $(! command -v gocryptfs >/dev/null || gocryptfs -version | head -n 1 | sed 's/$/; /')$(fio --version); $(rustc --version)"
    echo "- SIZE=$SIZE FILES=$FILES ROUNDS=$ROUNDS OPTIONS=${OPTIONS-}"
    echo
    printf '%s\n' "${measurements[@]}" | python3 "$here/table.py" "$scratch" "$here/results/latest.json" "${candidates[@]}"
} | tee "$result"
if [[ -x $programs/plot ]]; then
    "$programs/plot" "$here/results/latest.json" "$here/results/latest.svg"
else
    echo "not drawn: $programs has no program 'plot', of the package lockbox-bench" >&2
fi
echo "written to $result" >&2
