#!/usr/bin/env bash
# Random operations on one file of a real mount, compared byte by byte with what the file ought to hold.
#
#   tests/suites/fsx.sh [--operations N] [--seeds N] [--first-seed N] [--jobs N] [PROFILE...]
#
# By default 20,000 operations with one seed in each of nine profiles, about a minute on two cores. The seed is today's date, or SEED.
# The long run, some hours:
#
#   tests/suites/fsx.sh --operations 1000000 --seeds 20
#
# Ends with 0 only when nothing differed and no operation was refused; then every archive has also passed check --full.
#
# Seven profiles are the crate fsx 0.3.2 with one configuration each. It has no O_DIRECT, no ZERO_RANGE, no KEEP_SIZE, no SEEK_DATA, no second
# file and cannot go on with a file after a remount: the profiles remount and direct, and these operations, are ranges.py beside this file.
#
# fsx never gives a mapping back, and the kernel allows 65,530 of them: a run of more than 50,000 operations is that of one process after the
# other, on the same file of the same archive, each with a seed of its own.
#
# What a program reads comes from the kernel's cache as long as it is there, so that a file system could store anything else. Hence support/evict.py
# drops the file's pages again and again meanwhile, and after each process the file is read once more from a new mount.
#
# Needs root, /dev/fuse, python3 and cargo.
# The variables of support/suite.sh, and BUILD_ONLY, which builds the tool and runs nothing.
set -Eeuo pipefail

# shellcheck source=tests/suites/support/suite.sh
source "$(dirname "${BASH_SOURCE[0]}")/support/suite.sh"

FSX_VERSION=0.3.2
PART=50000
operations=20000
seeds=1
first=${SEED:-$(date -u +%Y%m%d)}
jobs=2
profiles=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --operations) operations=$2 && shift 2 ;;
    --seeds) seeds=$2 && shift 2 ;;
    --first-seed) first=$2 && shift 2 ;;
    --jobs) jobs=$2 && shift 2 ;;
    -*) echo "fsx.sh: unknown option $1" >&2 && exit 2 ;;
    *) profiles+=("$1") && shift ;;
    esac
done
[[ ${#profiles[@]} -gt 0 ]] || profiles=(plain mmap reopen remount holes copy direct all large)

# An operation of no length is refused by every file system when it is fallocate(2), which fsx takes for a fault: hence the least length of 1.
# configuration PROFILE: fsx's weights; what is not named has the weight 0, except write, read, truncate, mapread and mapwrite.
configuration() {
    case $1 in
    plain) printf '%s\n' '[weights]' mapread=0 mapwrite=0 write=10 read=10 truncate=5 fsync=0.5 fdatasync=0.5 ;;
    mmap) printf '%s\n' nomsyncafterwrite=true '[weights]' mapread=10 mapwrite=10 write=5 read=5 truncate=3 invalidate=1 ;;
    reopen) printf '%s\n' '[weights]' mapread=2 mapwrite=2 write=10 read=10 truncate=5 close_open=5 fsync=0.5 ;;
    holes) printf '%s\n' '[opsize]' min=1 '[weights]' mapread=2 mapwrite=2 write=10 read=10 truncate=3 punch_hole=8 posix_fallocate=4 fsync=0.5 ;;
    copy) printf '%s\n' '[weights]' mapread=2 mapwrite=2 write=8 read=10 truncate=3 copy_file_range=10 punch_hole=1 fsync=0.5 ;;
    all) printf '%s\n' '[opsize]' min=1 '[weights]' mapread=5 mapwrite=5 write=10 read=10 truncate=5 close_open=1 invalidate=1 fsync=0.5 \
        fdatasync=0.5 posix_fallocate=3 punch_hole=4 sendfile=2 posix_fadvise=1 copy_file_range=5 ;;
    large) printf '%s\n' flen=16777216 '[opsize]' min=1 max=262144 '[weights]' mapread=2 mapwrite=2 write=10 read=10 truncate=1 \
        close_open=1 punch_hole=4 posix_fallocate=1 copy_file_range=6 fsync=0.2 ;;
    *) echo "fsx.sh: unknown profile $1" >&2 && return 1 ;;
    esac
}

begin_suite fsx
installed_crate fsx "$FSX_VERSION"
[[ -z ${BUILD_ONLY-} ]] || exit 0
fsx=$TOOLS/bin/fsx
export PASSFILE

# The remount that ranges.py asks for.
remount=$WORK/remount
printf '#!/bin/bash\nset -e\nlockbox umount "$1"\nexec mount.lockbox "$1.lbx" "$1" -o "passfile=%s,log=$1.log"\n' "$PASSFILE" >"$remount"
chmod 755 "$remount"

run() {
    local profile=$1 seed=$2 name=$1-$2
    local count=$operations done evictor content
    new_archive "$name"
    attach "$name"
    case $profile in
    remount) python3 "$SUITES/ranges.py" --seed "$seed" --operations "$count" --remount "$remount" "$WORK/$name" ;;
    direct) python3 "$SUITES/ranges.py" --seed "$seed" --operations "$count" --direct "$WORK/$name" ;;
    *)
        configuration "$profile" >"$WORK/$name.toml"
        mkdir "$WORK/$name.artifacts"
        for ((done = 0; done < count; done += PART)); do
            python3 "$SUITES/support/evict.py" --seed $((seed + done)) "$WORK/$name/file" &
            evictor=$!
            "$fsx" -S $((seed + done)) -N $((count - done < PART ? count - done : PART)) -f "$WORK/$name.toml" -P "$WORK/$name.artifacts" "$WORK/$name/file"
            kill "$evictor"
            wait "$evictor" || [[ $? == 143 ]]
            content=$(sha256sum <"$WORK/$name/file")
            reattach "$name"
            same "$(sha256sum <"$WORK/$name/file")" "$content"
        done
        # With what fsx cannot do.
        [[ $profile != all ]] || python3 "$SUITES/ranges.py" --seed "$seed" --operations $((count / 4)) --direct --remount "$remount" "$WORK/$name"
        ;;
    esac
    detach "$name"
    check_full "$name"
    rm -rf "$WORK/$name.lbx" "$WORK/$name.artifacts"
}

# finish PROFILE SEED PID STARTED: ends the whole run when that one failed.
finish() {
    local code=0
    wait "$3" || code=$?
    if [[ $code -ne 0 ]]; then
        tail -n 40 "$WORK/$1-$2.output"
        sed 's/^/daemon: /' "$WORK/$1-$2.log" | tail -n 20
        fail "FAILED: profile=$1 seed=$2 operations=$operations"
    fi
    printf 'ok  %-8s seed %-4d %d operations, %d s\n' "$1" "$2" "$operations" $((SECONDS - $4))
}

# Two at a time: each is one program and one daemon that take turns.
waiting=()
for ((seed = first; seed < first + seeds; seed++)); do
    for profile in "${profiles[@]}"; do
        # As a job of its own and not in a condition, which would switch set -e off within.
        (
            set -Eeuo pipefail
            run "$profile" "$seed"
        ) >"$WORK/$profile-$seed.output" 2>&1 &
        waiting+=("$profile $seed $! $SECONDS")
        if [[ ${#waiting[@]} -ge $jobs ]]; then
            # shellcheck disable=SC2086
            finish ${waiting[0]}
            waiting=("${waiting[@]:1}")
        fi
    done
done
for entry in "${waiting[@]}"; do
    # shellcheck disable=SC2086
    finish $entry
done
echo "summary: fsx $FSX_VERSION and ranges.py, from seed $first on: $((seeds * ${#profiles[@]})) runs of $operations operations in ${#profiles[@]} profiles, none differing or refused"
