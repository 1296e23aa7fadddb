#!/usr/bin/env bash
# Load: stress-ng's file stressors with --verify, dbench, and fio with checksums in several programs and threads.
#
#   tests/suites/stress.sh [STRESSOR...]
#   SECONDS_EACH=3     how long each pair of stressors runs; 30 is the long form
#   WORKERS=2          processes of each stressor
#   BESIDE=DIRECTORY   runs there instead of on a mount, for comparison
set -uo pipefail
# shellcheck source=tests/suites/support/suite.sh
source "$(dirname "${BASH_SOURCE[0]}")/support/suite.sh"

SECONDS_EACH=${SECONDS_EACH:-3}
WORKERS=${WORKERS:-2}
# Two run at a time, so that each meets another kind of load. Not among them: io, which calls sync(2) and syncfs(2) for
# every file system of the machine, getdent, which walks /, /proc and /tmp and waits for any stopped mount there, and
# seal, whose files are not on this one.
STRESSORS=(access aio aiol chdir chattr chmod chown copy-file dentry dir dirdeep dirmany dup fallocate fcntl fiemap
    file-ioctl filename flock fsize fstat handle hdd inode-flags inotify iomix lease link locka lockf lockofd
    mknod mmap msync open readahead rename revio seek sendfile splice symlink sync-file touch utime verity)
# These may do nothing at all, for the reason that is printed. Everybody else must get something done.
declare -A ABSENT=(
    [inode-flags]='counts nothing on ext4 either'
    [fiemap]='FUSE has no request for extent maps'
    [verity]='FUSE passes fs-verity to the server, and an archive is authenticated whole'
)
PASSED=0 FAILED=0 SKIPPED=()

# arguments_of NAME: sizes that fit a short run.
arguments_of() {
    echo "--$1 $WORKERS"
    case $1 in
    copy-file) echo '--copy-file-bytes 128M' ;;
    fallocate | hdd | iomix | msync | readahead | sync-file) echo "--$1-bytes 16M" ;;
    mmap) echo '--mmap-file --mmap-bytes 16M' ;;
    seek) echo '--seek-size 16M' ;;
    esac
}

# stress SECONDS NAME...: at the same time; counts each as passed, failed or skipped.
stress() {
    local seconds=$1 name arguments=() code=0 operations log
    shift
    # One of a pair may be run again before the other is judged by what both left.
    log=$WORK/stress-ng.$seconds.$1
    for name in "$@"; do
        # shellcheck disable=SC2207
        arguments+=($(arguments_of "$name"))
    done
    timeout --kill-after=10 $((seconds * 4 + 120)) stress-ng "${arguments[@]}" --verify --metrics \
        --timeout "$seconds" --temp-path "$DIRECTORY" >"$log" 2>&1 || code=$?
    for name in "$@"; do
        operations=$(awk -v name="$name" '$2 == "metrc:" && $4 == name && $5 ~ /^[0-9]+$/ { print $5 }' "$log")
        if [[ $code -ne 0 || -z $operations ]] || grep -Eq "(fail|error): +\[[0-9]+\] $name: " "$log"; then
            FAILED=$((FAILED + 1))
            printf 'FAILED   %-12s exit code %s\n' "$name" "$code"
            grep -E "(fail|error): " "$log" | head -n 10 || tail -n 5 "$log"
        elif [[ $operations -gt 0 ]]; then
            PASSED=$((PASSED + 1))
            printf 'passed   %-12s %8d operations\n' "$name" "$operations"
        elif [[ -n ${ABSENT[$name]-} ]]; then
            SKIPPED+=("$name")
            printf 'skipped  %-12s %s\n' "$name" "${ABSENT[$name]}"
        elif [[ $seconds -lt 20 ]]; then
            # A busy machine may have kept it from finishing its first round.
            stress 20 "$name"
        else
            FAILED=$((FAILED + 1))
            printf 'FAILED   %-12s got nothing done\n' "$name"
            grep -v metrc: "$log" | tail -n 10
        fi
    done
}

run_stressors() {
    while [[ $# -gt 0 ]]; do
        stress "$SECONDS_EACH" "${@:1:2}"
        shift $(($# > 1 ? 2 : 1))
    done
}

# One operation of this stressor is 50,000 calls, so it gets until that is done.
run_xattr() {
    local log=$WORK/stress-ng
    stress-ng --xattr 1 --xattr-ops 1 --verify --metrics --timeout 150 --temp-path "$DIRECTORY" >"$log" 2>&1 || true
    if grep -Eq 'metrc: .* xattr +1 ' "$log" && ! grep -q 'fail: ' "$log"; then
        PASSED=$((PASSED + 1))
        echo 'passed   xattr               1 operation'
    else
        FAILED=$((FAILED + 1))
        echo 'FAILED   xattr'
        tail -n 10 "$log"
    fi
}

# The load of an office's file server, replayed by four clients.
run_dbench() {
    local code=0
    dbench --directory="$DIRECTORY" --timelimit="${DBENCH_SECONDS:-10}" --loadfile=/usr/share/dbench/client.txt 4 >"$WORK/dbench" 2>&1 || code=$?
    # It takes the number 0 of a semaphore, which is that of the machine's first one, for a failure, says so, and goes on with it.
    sed -i '/^failed to create barrier semaphore *$/d' "$WORK/dbench"
    if [[ $code -eq 0 ]] && ! grep -Eiq 'failed|error|mismatch' "$WORK/dbench"; then
        PASSED=$((PASSED + 1))
        echo "passed   dbench       $(grep Throughput "$WORK/dbench")"
    else
        FAILED=$((FAILED + 1))
        echo "FAILED   dbench, exit code $code"
        grep -Ein 'failed|error|mismatch' "$WORK/dbench" | head -n 20
        tail -n 20 "$WORK/dbench"
    fi
}

# checked NAME OPTION...: random overwrites, each block with its checksum, all of it read back and compared. With AGAIN
# set nothing is written: what such a run before left is compared.
checked() {
    local name=$1
    shift
    if (cd "$WORK" && fio --name="$name" --directory="$DIRECTORY" --rw=randwrite --norandommap --randrepeat=1 \
        --verify=crc32c --verify_fatal=1 --do_verify=1 ${AGAIN:+--verify_only} --output-format=terse --output="$WORK/fio.$name" "$@" \
        >"$WORK/fio.$name.err" 2>&1) && ! grep -Eq 'verify:|err=' "$WORK/fio.$name.err"; then
        PASSED=$((PASSED + 1))
        echo "passed   fio $name${AGAIN:+, read again from another mount}"
    else
        FAILED=$((FAILED + 1))
        echo "FAILED   fio $name${AGAIN:+, read again from another mount}"
        tail -n 20 "$WORK/fio.$name.err" "$WORK/fio.$name"
    fi
}

run_fio() {
    checked psync --ioengine=psync --bs=1k-64k --bs_unaligned=1 --size=48M --io_size=96M --fsync=64
    checked libaio --ioengine=libaio --iodepth=16 --direct=1 --bs=4k-64k --size=48M --io_size=96M
    checked mmap --ioengine=mmap --bs=4k-32k --size=48M --io_size=96M
    # Two programs, four threads each, on one file: every thread has its own part, and the parts are no whole pages. The
    # file is there before: fio would replace one that is shorter than its own part needs, also when the other writes it.
    truncate -s 64000000 "$DIRECTORY/shared"
    local shared=(--filename=shared --thread --numjobs=4 --offset_increment=8000000 --size=8000000 --io_size=16000000 --group_reporting)
    checked first --ioengine=psync --bs=500-40000 --bs_unaligned=1 "${shared[@]}" >"$WORK/first" &
    local other=$!
    checked second --ioengine=psync --bs=500-40000 --bs_unaligned=1 --offset=32000000 "${shared[@]}" --fsync=100
    wait "$other"
    cat "$WORK/first"
    # A subshell's count is lost with it.
    if grep -q '^passed' "$WORK/first"; then PASSED=$((PASSED + 1)); else FAILED=$((FAILED + 1)); fi
}

AGAIN=
begin_suite stress
if [[ -n ${BESIDE-} ]]; then
    DIRECTORY=$(mktemp -d "$BESIDE/stress.XXXXXX")
    at_end "rm -rf '$DIRECTORY'"
else
    new_archive box
    attach box allow_other,suid,dev
    mkdir "$WORK/box/stress"
    DIRECTORY=$WORK/box/stress
fi
if [[ $# -gt 0 ]]; then
    run_stressors "$@"
else
    run_stressors "${STRESSORS[@]}"
    run_xattr
    run_dbench
    run_fio
fi
if [[ -z ${BESIDE-} ]]; then
    # Nothing that went wrong while pages were written back may have been kept from the callers.
    sync --file-system "$DIRECTORY" || fail 'an error of writing back was kept for syncfs'
    # grep's exit code is 1 for none.
    errors=$(grep -c ERROR "$WORK/box.log" || true)
    same "$errors" "$(grep -c 'ERROR Failed to send FUSE reply' "$WORK/box.log" || true)" 'errors in the log'
    if [[ $# -eq 0 ]]; then
        # What fio compared may have come from the kernel's cache, and what it mapped was nowhere else yet.
        reattach box allow_other,suid,dev
        AGAIN=yes run_fio
    fi
    detach box
    check_full box
fi
line="stress-ng $(stress-ng --version | sed 's/.*version \([0-9.]*\).*/\1/'), dbench, fio: $PASSED passed, $FAILED failed, ${#SKIPPED[@]} skipped (${SKIPPED[*]})"
[[ $FAILED -eq 0 ]] || fail "$line"
summary "$line"
