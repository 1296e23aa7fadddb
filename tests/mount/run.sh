#!/usr/bin/env bash
# Runs every case on real mounts with real programs; the last line is "N passed, N failed".
#
#   tests/mount/run.sh [NAME...]     all cases, or those whose name contains one of the words
#
# Needs root, /dev/fuse, and the packages that tests/run.sh installs.
#   PROGRAMS    directory with lockbox, mount-lockbox and lockbox-share (default: target/debug, built when missing)
#   KILLS       rounds of each case that kills (default 3 to 6)
#   FLIPS       bits flipped in the tampering case (default 15)
#   SOURCES     files of the tree of sources (default 1500)
# The cases name the variables of their other long forms; tests/nightly.sh sets all of them.
#   MOUNT_JOBS  cases at a time (default 4: most of a case is waiting)
#   SCRATCH     where archives and trees lie (default $TMPDIR or /tmp); needs about 8 GiB
#   KEEP        when set, the scratch directory and the logs stay
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
CASE_TIMEOUT=${CASE_TIMEOUT:-600}

if [[ ${1-} == --case ]]; then
    # shellcheck source=tests/mount/support.sh
    source "$here/support.sh"
    # shellcheck disable=SC1090
    source "$2"
    set -Eeuo pipefail
    begin_case "$3"
    "case_$3"
    exit 0
fi

# The first process of a case's PID namespace: all that the case started ends with it, and nothing else of the machine can be meant by its kills.
# It has a network and a /run of its own, too: no other case takes its ports, and no daemon of another case is found there.
if [[ ${1-} == --namespace ]]; then
    ip link set lo up
    mount -t tmpfs -o mode=755 none /run
    # In a session of its own, because one outside of the namespace has no number inside; with the signals that are ignored here.
    env --default-signal=HUP,INT,QUIT,TERM setsid bash "$0" --case "$2" "$3" &
    case=$!
    sleep "$CASE_TIMEOUT" &
    wait -n -p ended "$case" $! && code=0 || code=$?
    [[ $ended != "$case" ]] || exit "$code"
    echo "did not end within $CASE_TIMEOUT s:"
    for process in $(pgrep 'lockbox'); do
        timeout 20 gdb --batch -p "$process" -ex 'set print frame-arguments none' -ex 'thread apply all backtrace 12' 2>/dev/null | grep -E '^(Thread|#)'
    done
    ps -eLo pid,ppid,tid,stat,wchan:24,args
    exit 124
fi

if [[ $EUID -ne 0 ]]; then
    echo "tests/mount/run.sh: must run as root (it makes users, file systems and mount namespaces)" >&2
    exit 1
fi

programs=${PROGRAMS:-${CARGO_TARGET_DIR:-$repository/target}/debug}
if [[ -z ${PROGRAMS-} ]]; then
    (cd "$repository" && cargo build --quiet --workspace --bins --tests) || exit 1
fi

jobs=${MOUNT_JOBS:-4}
scratch=$(mktemp -d "${SCRATCH:-${TMPDIR:-/tmp}}/lockbox-mount.XXXXXX")
chmod 755 "$scratch"
mkdir "$scratch/bin" "$scratch/shared" "$scratch/logs"
# Copies, so that an ordinary user reaches them and a rebuild does not change a running daemon.
install -m 755 "$programs/lockbox" "$scratch/bin/lockbox" || exit 1
install -m 755 "$programs/mount-lockbox" "$scratch/bin/mount.lockbox" || exit 1
install -m 755 "$programs/lockbox-share" "$scratch/bin/lockbox-share" || exit 1
install -m 755 "$here"/*.py "$scratch/bin/" || exit 1

finish() {
    if [[ -z ${KEEP-} ]]; then
        rm -rf --one-file-system "$scratch"
    else
        echo "kept: $scratch"
    fi
}
trap finish EXIT
# The cases that run go on to their ends: what one has frozen would stay so and stop every sync of the machine.
trap 'echo "waits for the cases that run" >&2; wait; exit 130' INT TERM

export SCRATCH_DIR=$scratch
export PATH="$scratch/bin:$PATH:/usr/sbin:/sbin"
# Nothing of the caller's own may leak into a case.
unset XDG_RUNTIME_DIR LOCKBOX_PASSFILE LOCKBOX_PASSCOMMAND LOCKBOX_TEST_CLOCK CARGO_TARGET_DIR CARGO_INCREMENTAL CARGO_PROFILE_DEV_DEBUG CARGO_PROFILE_DEV_CODEGEN_UNITS
export LC_ALL=C.UTF-8 TZ=UTC

wanted() {
    local name=$1 word
    shift
    [[ $# -eq 0 ]] && return 0
    for word in "$@"; do
        [[ $name == *"$word"* ]] && return 0
    done
    return 1
}

# Names of the cases of a file; those after a line "# Runs alone: REASON" with a mark.
cases_of() {
    awk '/^# Runs alone: ./ { alone = "!" }
        /^case_[a-z0-9_]*\(\) \{$/ { sub(/^case_/, ""); sub(/\(.*/, ""); print alone $0 }
        /^}$/ { alone = "" }' "$1"
}

# run_case FILE NAME: leaves the exit code and the seconds beside the log.
run_case() {
    local started=$SECONDS code
    trap '' INT TERM
    # Its mounts end with its mount namespace.
    unshare --mount --net --pid --fork --mount-proc --kill-child \
        bash "$here/run.sh" --namespace "$1" "$2" >"$scratch/logs/$2" 2>&1 </dev/null
    code=$?
    [[ -n ${KEEP-} ]] || rm -rf --one-file-system "${scratch:?}/$2"
    echo "$code $((SECONDS - started))" >"$scratch/logs/$2.end"
}

passed=0
failed=0
failures=()
declare -A running=()

# Waits until at most $1 cases run, and tells how those ended that did.
wait_for_cases() {
    local pid name code took log
    while [[ ${#running[@]} -gt $1 ]]; do
        wait -n -p pid
        # Not a case, such as a process substitution.
        [[ -n ${running[$pid]-} ]] || continue
        name=${running[$pid]}
        unset "running[$pid]"
        log=$scratch/logs/$name
        code='' took=''
        read -r code took <"$log.end"
        # A job that was killed leaves no result.
        [[ $code =~ ^[0-9]+$ ]] || code=125
        if [[ $code -eq 0 ]]; then
            passed=$((passed + 1))
            printf 'ok      %-45s %4d s\n' "$name" "$took"
            sed -n 's/^note: /        /p' "$log"
        else
            failed=$((failed + 1))
            failures+=("$name")
            printf 'FAILED  %-45s %4d s, exit code %d\n' "$name" "$took" "$code"
            tail -n $((code == 124 ? 400 : 40)) "$log" | cut -c -400 | sed 's/^/        | /'
        fi
    done
}

# The last files have the longest cases, which come first so that none of them is awaited alone. Cases that run alone come at the end.
begin_cases() {
    local file=$1 alone=$2 most=$3 name
    shift 3
    mapfile -t cases < <(cases_of "$file")
    for name in "${cases[@]}"; do
        [[ ${name%%[a-z]*} == "$alone" ]] || continue
        name=${name#!}
        wanted "$name" "$@" || continue
        wait_for_cases "$most"
        run_case "$file" "$name" &
        running[$!]=$name
    done
}

files=("$here"/cases/*.sh)
for ((number = ${#files[@]} - 1; number >= 0; number--)); do
    begin_cases "${files[number]}" '' $((jobs - 1)) "$@"
done
for file in "${files[@]}"; do
    begin_cases "$file" '!' 0 "$@"
done
wait_for_cases 0
[[ $failed -eq 0 ]] || printf 'failed: %s\n' "${failures[*]}"
echo "$passed passed, $failed failed"
[[ $failed -eq 0 && $passed -gt 0 ]]
