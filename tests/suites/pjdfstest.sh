#!/usr/bin/env bash
# pjdfstest (the crate): POSIX semantics of every file call; alone with the read-only cases by remount, then many at once.
#
#   tests/suites/pjdfstest.sh
#   JOBS="6 16"    how many run at once, each the whole set in its own directory
#   ROUNDS=1       how often each of these is repeated
#   BUILD_ONLY=    when set, builds the tool and runs nothing
#   BESIDE=        "ext4 gocryptfs": run on these first, for the table in tests/SUITES.md
set -uo pipefail
# shellcheck source=tests/suites/support/suite.sh
source "$(dirname "${BASH_SOURCE[0]}")/support/suite.sh"

VERSION=0.2.2
# All cases that the crate has on Linux; a version that registers fewer must not look better.
CASES=398
# Cases that ask whether a read-only file system refuses. They remount, so they run in a process of their own: other cases
# leave descriptors open for writing in theirs, and such a file system cannot be made read-only (on ext4 neither).
READ_ONLY=(chmod::erofs_named chown::erofs_named chown::lchown::erofs_named link::erofs_named mkdir::erofs_new_file
    mkfifo::erofs_new_file open::erofs_named open::erofs_new_file rename::erofs_named rmdir::erofs_named
    symlink::erofs_new_file truncate::erofs_named unlink::erofs_named)
# The C library answers pathconf(_PC_LINK_MAX) from a table of file systems in which FUSE does not stand.
UNKNOWN_TO_LIBC=(link::link_count_max)
JOBS=${JOBS-6 16}
ROUNDS=${ROUNDS:-1}

# configuration FILE REMOUNT
configuration() {
    cat >"$1" <<END
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.01
allow_remount = $2
[dummy_auth]
entries = [["${DUMMIES[0]}", "${DUMMIES[0]}"], ["${DUMMIES[1]}", "${DUMMIES[1]}"]]
END
}

make_users() {
    local name
    DUMMIES=("lbx-pjd-a" "lbx-pjd-b")
    for name in "${DUMMIES[@]}"; do
        id "$name" >/dev/null 2>&1 || useradd --system --no-create-home --user-group --shell /usr/sbin/nologin "$name"
        at_end "userdel $name"
    done
}

# mount(8) finds the program for a living mount by the type in the kernel's table.
make_remount_work() {
    local link=/sbin/mount.fuse.lockbox
    if [[ ! -e $link ]]; then
        ln -sfn "$SCRATCH_DIR/bin/mount.lockbox" "$link"
        at_end "rm -f $link"
    fi
}

# run_once LOG CONFIGURATION DIRECTORY [PATTERN]
run_once() {
    # The log says more than the exit code.
    "$TOOLS/bin/pjdfstest" -c "$2" -p "$3" -s "$WORK/second" "${@:4}" 2>&1 | sed 's/\x1b\[[0-9;]*m//g' >"$1" || true
}

# counted LOG: sets PASSED, FAILED and SKIPPED (sorted names).
counted() {
    PASSED=$(grep -c ' ok$' "$1" || true)
    FAILED=$(grep -c ' FAILED$' "$1" || true)
    SKIPPED=$(sed -n 's/ *skipped$//p' "$1" | sort | tr '\n' ' ')
}

names() {
    [[ $# -eq 0 ]] || printf '%s\n' "$@" | sort | tr '\n' ' '
}

# judge LOG CASES SKIPS...: every case ran, none failed, and exactly those named were skipped.
judge() {
    local log=$1 cases=$2
    shift 2
    counted "$log"
    if [[ $FAILED -gt 0 || $SKIPPED != "$(names "$@")" || $((PASSED + $#)) -ne $cases ]]; then
        grep -A 3 ' FAILED$' "$log" | head -n 40 || true
        tail -n 2 "$log"
        fail "$PASSED of $cases passed, $FAILED failed, skipped: $SKIPPED(expected: $(names "$@"))"
    fi
}

# at_once JOBS DIRECTORY: the whole set in that many directories at the same time.
at_once() {
    local number pids=() pid
    for number in $(seq "$1"); do
        mkdir -p "$2/$number"
        chmod 755 "$2/$number"
        run_once "$WORK/at_once.$number" "$WORK/many.toml" "$2/$number" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || true
    done
}

# beside NAME DIRECTORY: the same on another file system, counted and not judged.
beside() {
    local number
    run_once "$WORK/beside" "$WORK/many.toml" "$2"
    counted "$WORK/beside"
    echo "$1 alone: $PASSED passed, $FAILED failed: $(sed -n 's/ *FAILED$//p' "$WORK/beside" | tr '\n' ' ')skipped: $SKIPPED"
    run_once "$WORK/beside" "$WORK/remount.toml" "$2" erofs
    counted "$WORK/beside"
    echo "$1 read-only: $PASSED passed, $FAILED failed"
    at_once 6 "$2"
    for number in $(seq 6); do
        sed -n 's/ *FAILED$//p' "$WORK/at_once.$number"
    done | sort | uniq -c | sort -rn >"$WORK/differing"
    echo "$1, 6 at once: $(awk '{ sum += $1 } END { print sum + 0 }' "$WORK/differing") failed"
    sed 's/^/    /' "$WORK/differing"
}

run_beside() {
    if [[ " ${BESIDE-} " == *' ext4 '* ]]; then
        truncate -s 1G "$WORK/ext4.img"
        mkfs.ext4 -q "$WORK/ext4.img"
        mkdir "$WORK/ext4"
        mount -o loop "$WORK/ext4.img" "$WORK/ext4"
        beside ext4 "$WORK/ext4"
    fi
    if [[ " ${BESIDE-} " == *' gocryptfs '* ]]; then
        mkdir "$WORK/cipher" "$WORK/gocryptfs"
        gocryptfs -init -q -scryptn 10 -passfile "$PASSFILE" "$WORK/cipher"
        gocryptfs -q -allow_other -suid -dev -passfile "$PASSFILE" "$WORK/cipher" "$WORK/gocryptfs"
        chmod 755 "$WORK/gocryptfs"
        beside gocryptfs "$WORK/gocryptfs"
        umount "$WORK/gocryptfs"
    fi
}

# Short, as the addresses of sockets below it are limited to 107 bytes.
begin_suite p
installed_crate pjdfstest "$VERSION"
[[ -z ${BUILD_ONLY-} ]] || exit 0
make_users
make_remount_work
mkdir "$WORK/second"
mount -t tmpfs none "$WORK/second"
configuration "$WORK/remount.toml" true
configuration "$WORK/many.toml" false
run_beside

new_archive box
attach box allow_other,suid,dev
chmod 755 "$WORK/box"
run_once "$WORK/alone" "$WORK/many.toml" "$WORK/box"
judge "$WORK/alone" $CASES "${UNKNOWN_TO_LIBC[@]}" "${READ_ONLY[@]}"
alone=$PASSED
echo "alone: $PASSED of $CASES passed, skipped: ${UNKNOWN_TO_LIBC[*]}; the ${#READ_ONLY[@]} that need a read-only mount follow"
run_once "$WORK/read-only" "$WORK/remount.toml" "$WORK/box" erofs
judge "$WORK/read-only" "${#READ_ONLY[@]}"
echo "by 'mount -o remount,ro': $PASSED of ${#READ_ONLY[@]} passed"
alone=$((alone + PASSED))
total=0
for jobs in $JOBS; do
    for round in $(seq "$ROUNDS"); do
        mkdir "$WORK/box/$jobs.$round"
        chmod 755 "$WORK/box/$jobs.$round"
        at_once "$jobs" "$WORK/box/$jobs.$round"
        for number in $(seq "$jobs"); do
            judge "$WORK/at_once.$number" $CASES "${UNKNOWN_TO_LIBC[@]}" "${READ_ONLY[@]}"
            total=$((total + PASSED))
        done
        echo "$jobs at once, round $round: every one passed all of its $PASSED"
    done
done
detach box
check_full box
summary "pjdfstest $VERSION: $alone of $CASES alone (skipped: ${UNKNOWN_TO_LIBC[*]}), $total of $total with $JOBS at once"
