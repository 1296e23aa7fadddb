# What the cases share: archives, mounts, daemons, waiting, assertions. Sourced by run.sh, one process per case.
# shellcheck shell=bash

PASSPHRASE='a passphrase of the tests'
TEST_USER=lockbox-test
# How long anything is awaited, in seconds: it ends a hang and measures nothing, so a loaded machine does not reach it.
PATIENCE=300

# Gives the case its own directory.
begin_case() {
    WORK=$SCRATCH_DIR/$1
    mkdir "$WORK"
    SHARED=$SCRATCH_DIR/shared
    PASSFILE=$WORK/passphrase
    printf '%s\n' "$PASSPHRASE" >"$PASSFILE"
    chmod 600 "$PASSFILE"
    # The ids of the processes that the case started in the background.
    BACKGROUND=()
    # How many commands killed_at has killed.
    KILLED=0
    # What the case chooses at random, the same again with the same SEED. (In a subshell bash begins anew: there RANDOM is given a value first.)
    SEED=${SEED:-$SRANDOM}
    RANDOM=$SEED
    trap 'echo "line $LINENO: \"$BASH_COMMAND\" failed with exit code $?"' ERR
    trap end_case EXIT
    # What one case saw of an archive is nothing to the others, and nothing to the machine.
    export XDG_STATE_HOME=$WORK/state
    cd "$WORK" || exit 1
}

# A port for a server of the case: the network is the case's own, and clients get higher ones. Each call returns another.
free_port() {
    echo >>"$WORK/ports"
    echo $((10000 + $(wc -l <"$WORK/ports")))
}

end_case() {
    local code=$?
    trap - ERR EXIT
    [[ $code -eq 0 ]] || show_logs
    exit "$code"
}

show_logs() {
    cat "$WORK"/*.log "$WORK"/log 2>/dev/null | tail -n 20 | sed 's/^/daemon: /'
    echo "SEED=$SEED"
}

# Names the line of the case.
fail() {
    local frame=1
    while [[ ${FUNCNAME[frame]-case_} != case_* ]]; do frame=$((frame + 1)); done
    echo "line ${BASH_LINENO[frame - 1]}: $*"
    # Through the exit trap.
    exit 1
}

# shows [OPTION] PATTERN: whether a line of standard input has it. It reads to the end: what writes to `grep -q` is killed by its first
# match or not, as it comes, and a pipe with a killed program has failed.
shows() {
    local told
    told=$(cat)
    grep -q "$@" <<<"$told"
}

# A line that the runner shows also when the case passes.
note() {
    echo "note: $*"
}

mounts_below() {
    awk -v top="$1/" 'index($5 "/", top) == 1 { print $5 }' /proc/self/mountinfo
}

# Daemons are recognised by their arguments: mount.lockbox --daemon ARCHIVE POINT.
daemons_below() {
    local process words
    for process in /proc/[0-9]*; do
        mapfile -d '' -t words 2>/dev/null <"$process/cmdline" || continue
        [[ ${words[1]-} != --daemon || ${words[2]-} != "$1"/* ]] || echo "${process#/proc/}"
    done
}

daemon_of() {
    local archive=$1 pid words
    for pid in $(daemons_below "$(dirname "$archive")"); do
        mapfile -d '' -t words 2>/dev/null <"/proc/$pid/cmdline" || continue
        if [[ ${words[2]-} == "$archive" ]]; then
            echo "$pid"
            return 0
        fi
    done
    echo "no daemon serves $archive" >&2
    return 1
}

# await [SECONDS] COMMAND...: waits until the command succeeds, for $PATIENCE seconds or longer.
await() {
    local seconds=$PATIENCE deadline
    if [[ $1 =~ ^[0-9]+$ ]]; then
        seconds=$(($1 > PATIENCE ? $1 : PATIENCE))
        shift
    fi
    deadline=$((SECONDS + seconds))
    until "$@"; do
        if ((SECONDS >= deadline)); then
            echo "not within $seconds s: $*" >&2
            return 1
        fi
        sleep 0.02
    done
}

# says_nothing COMMAND...: the command succeeds and prints nothing.
says_nothing() {
    local said
    said=$("$@") || fail "exit code $?: $*"
    same "$said" ''
}

# has_lines FILE NUMBER: whether it has so many or more.
has_lines() {
    (($(wc -l <"$1") >= $2))
}

gone() {
    [[ ! -d /proc/$1 ]] || [[ $(awk '$1 == "State:" { print $2 }' "/proc/$1/status" 2>/dev/null) =~ ^[ZX]?$ ]]
}

# The cheapest key derivation that the program accepts: what a passphrase costs is not what these cases are about.
create() {
    lockbox create --weak-kdf --kdf-memory 1 --passfile "$PASSFILE" "$@"
}

# new_archive NAME: creates $WORK/NAME.lbx and the mount point $WORK/NAME.
new_archive() {
    create "$WORK/$1.lbx"
    mkdir -p "$WORK/$1"
}

# attach NAME [OPTIONS]: mounts $WORK/NAME.lbx on $WORK/NAME.
attach() {
    mount.lockbox ${VERBOSE:+-v} "$WORK/$1.lbx" "$WORK/$1" -o "passfile=$PASSFILE,log=$WORK/$1.log${2:+,$2}"
    mountpoint -q "$WORK/$1"
}

# detach NAME: unmounts and proves that the daemon is gone when the command returns.
detach() {
    local pid
    pid=$(daemon_of "$WORK/$1.lbx")
    lockbox umount "$WORK/$1"
    gone "$pid" || fail "lockbox umount returned before its daemon $pid ended"
    ! mountpoint -q "$WORK/$1" || fail "still mounted: $WORK/$1"
}

reattach() {
    detach "$1"
    attach "$@"
}

# kill_daemon NAME: as the power of an operator or the kernel would. The dead mount is left for the next mount to clear.
kill_daemon() {
    local pid
    pid=$(daemon_of "$WORK/$1.lbx")
    kill -9 "$pid"
    await gone "$pid"
}

# stop_process PID: returns when no thread of it runs. One that still ran could take a request of the kernel, and whatever waits for the answer to a
# request that was taken cannot be killed.
stop_process() {
    kill -STOP "$1"
    is_stopped() {
        local states
        # A thread may end between the listing and its turn.
        states=$(grep -hs '^State:' "/proc/$1"/task/*/status || true)
        ! grep -qv 'T (stopped)' <<<"$states"
    }
    await is_stopped "$1"
}

# killed_at CALL NUMBER COMMAND...: kills the command as one of its threads makes the system call for that time, and counts it in KILLED. With fewer calls it ends by itself.
killed_at() {
    local call=$1 number=$2 code=0
    shift 2
    strace -f -qq -o /dev/null -e trace="$call" -e signal=none -e inject="$call:signal=KILL:when=$number" "$@" >"$WORK/killed" 2>&1 || code=$?
    # strace(1) ends as the command does. With --seccomp-bpf it ignores the signal of an injection.
    [[ $code == 0 || $code == 137 ]] || fail "exit code $code: $* ($(<"$WORK/killed"))"
    KILLED=$((KILLED + (code == 137)))
}

# The clock of a mount looks once a second (with LOCKBOX_TEST_CLOCK=10 in the environment of a debug daemon: ten times) whether there is something to flush, to commit or to erase, and is awake for nothing else.
# looks PID [THREAD]: how often it, or another thread that looks once a second, went to sleep again.
looks() {
    local task
    for task in /proc/"$1"/task/*; do
        if [[ $(cat "$task/comm") == "${2:-ticker}" ]]; then
            awk '$1 == "voluntary_ctxt_switches:" { print $2 }' "$task/status"
        fi
    done
}

# await_looks PID [NUMBER [THREAD]]: returns when the clock has looked so often; without a number, when all that it does now and then had its turn. It flushes
# every fifth time and commits with the next one. Where it waits for others in between it counts more than once, so these are three rounds or two.
await_looks() {
    local goal
    goal=$(($(looks "$1" "${3-}") + ${2:-21}))
    looked() { (($(looks "$1" "$3") >= $2)); }
    await looked "$1" "$goal" "${3-}"
}

# stop_clock NAME: the clock of the mount stands still until start_clock or the death of the daemon.
stop_clock() {
    stop_clock_of "$(daemon_of "$WORK/$1.lbx")"
}

stop_clock_of() {
    in_background clock.py "$1" >"$WORK/clock"
    CLOCK=$!
    stopped_or_over() { grep -q stopped "$WORK/clock" || gone "$CLOCK"; }
    await stopped_or_over
    grep -q stopped "$WORK/clock" || fail 'the clock cannot be stopped'
}

start_clock() {
    kill "$CLOCK"
    wait "$CLOCK" || true
}

# await_collected NAME: returns when the clock has made durable what programs had written to the mount before, without their asking for it.
# The mount was attached with VERBOSE set and has a file open for writing. The second flush from now on began after what was written before and
# sent it, the kernel counts no request without its answer when all of it has arrived, and a commit lies between two flushes after that.
await_collected() {
    local flushes
    if [[ ! -d $WORK/connections ]]; then
        mkdir "$WORK/connections"
        mount -t fusectl none "$WORK/connections"
    fi
    flushes_of() { awk '/flushed dirty pages of the kernel/ { count++ } END { print count + 0 }' "$WORK/$1.log"; }
    flushed() { (($(flushes_of "$1") >= $2)); }
    answered() { grep -qx 0 "$1"; }
    flushes=$(flushes_of "$1")
    await flushed "$1" $((flushes + 2))
    await answered "$WORK/connections/$(stat -c %Ld "$WORK/$1")/waiting"
    await flushed "$1" $((flushes + 4))
}

check_full() {
    lockbox check --full --passfile "$PASSFILE" "$WORK/$1.lbx" || fail "check --full found damage in $1.lbx"
}

# in_background COMMAND...: its process id is then in $! and the last of BACKGROUND.
in_background() {
    "$@" &
    BACKGROUND+=($!)
}

# expect CODE PATTERN COMMAND...: the command ends with the code and says a sentence that matches, on standard error only.
expect() {
    local code=$1 pattern=$2 got=0
    shift 2
    "$@" >"$WORK/stdout" 2>"$WORK/stderr" </dev/null || got=$?
    if [[ ! $got =~ ^($code)$ ]]; then
        fail "exit code $got instead of $code: $* ($(tr '\n' ' ' <"$WORK/stderr"))"
    fi
    grep -Eiq -- "$pattern" "$WORK/stderr" || fail "nothing like '$pattern' in: $(cat "$WORK/stderr")"
    ! grep -Eq 'panicked|RUST_BACKTRACE' "$WORK/stderr" || fail "a panic: $(cat "$WORK/stderr")"
}

same() {
    [[ $1 == "$2" ]] || fail "${3:-values differ}: '$1' and '$2'"
}

same_file() {
    cmp "$1" "$2" || fail "$1 and $2 differ"
}

# same_listing A B: names, types, modes, owners, sizes, times, links, devices and xattrs.
same_listing() {
    listing.py "$1" >"$WORK/listing.a"
    listing.py "$2" >"$WORK/listing.b"
    diff -a "$WORK/listing.a" "$WORK/listing.b" | head -n 20 || true
    cmp -s "$WORK/listing.a" "$WORK/listing.b" || fail "the listings of $1 and $2 differ"
}

same_tree() {
    # diff calls two FIFOs a difference; the listing compares them.
    diff -r --no-dereference --exclude=fifo "$1" "$2" | head -n 20 || true
    diff -rq --no-dereference --exclude=fifo "$1" "$2" >/dev/null || fail "the contents of $1 and $2 differ"
    same_listing "$1" "$2"
}

# The tree of real sources that several cases use: at least 1,500 files (SOURCES), with all that metadata can be. Made once.
source_tree() {
    local tree=$SHARED/sources
    (
        # Two cases at a time may want it.
        flock 9
        if [[ ! -e $SHARED/sources.done ]]; then
            rm -rf "$tree"
            sources.py "${CARGO_HOME:-$HOME/.cargo}/registry/src" "$tree" >&2
            touch "$SHARED/sources.done"
        fi
    ) 9>"$SHARED/sources.lock"
    echo "$tree"
}

need_user() {
    # What udev's rule for the device says; bare containers have it for root alone.
    chmod 666 /dev/fuse
    (
        flock 9
        id "$TEST_USER" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$TEST_USER"
    ) 9>"$SHARED/user.lock"
}

# as_user COMMAND...: as an ordinary user, without any of root's groups and rights.
as_user() {
    setpriv --reuid "$TEST_USER" --regid "$TEST_USER" --init-groups --inh-caps=-all \
        env -u XDG_RUNTIME_DIR -u XDG_STATE_HOME HOME="$(getent passwd "$TEST_USER" | cut -d: -f6)" "$@"
}

# alone FUNCTION: in a namespace of its own, with other mounts of archives and other runtime directories out of sight: --all means all.
alone() {
    unshare --mount --propagation private bash -Eeuo pipefail -c '
        # Before what they may lie in is hidden.
        source "$1/support.sh"
        source "$4"
        case=$2
        mount -t tmpfs none /mnt
        mkdir /mnt/work /mnt/bin
        mount --bind "$3" /mnt/work
        mount --bind "$SCRATCH_DIR/bin" /mnt/bin
        # A directory that another case removes takes the mount with it, and one that it renames is tried by its new name.
        mounts_of_others_gone() {
            awk "/ - fuse\.lockbox / { print \$5 }" /proc/self/mountinfo | while read -r point; do umount -i -l "$point" || true; done
            ! grep --text " - fuse\.lockbox " /proc/self/mountinfo
        }
        await mounts_of_others_gone
        mount -t tmpfs none /run
        mount -t tmpfs -o mode=1777 none /tmp
        if id "$TEST_USER" >/dev/null 2>&1; then
            # What the user remembers of archives is of this case alone, since all of them have the same path here.
            mount -t tmpfs -o "mode=700,uid=$(id -u "$TEST_USER"),gid=$(id -g "$TEST_USER")" none \
                "$(getent passwd "$TEST_USER" | cut -d: -f6)"
        fi
        export PATH=/mnt/bin:$PATH
        WORK=/mnt/work PASSFILE=/mnt/work/passphrase
        trap "echo \"line \$LINENO: \\\"\$BASH_COMMAND\\\" failed\"" ERR
        cd /mnt/work
        "$case"
    ' - "$(dirname "$(realpath "${BASH_SOURCE[0]}")")" "$1" "$WORK" "$(realpath "${BASH_SOURCE[1]}")"
}

# Largest resident memory of a process so far, in MiB.
peak_memory() {
    awk '$1 == "VmHWM:" { print int($2 / 1024) }' "/proc/$1/status"
}
