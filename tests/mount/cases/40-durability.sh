# What is promised when a daemon dies, stops or is busy.
# shellcheck shell=bash disable=SC2317,SC2164

case_fsynced_bytes_survive_kill_9() {
    local profile
    for profile in periodic always; do
        new_archive "$profile"
        attach "$profile" "sync=$profile"
        mkdir -p "$WORK/$profile/a/b/c"
        dd if=/dev/urandom of="$WORK/$profile/a/b/c/file" bs=1M count=5 conv=fsync status=none
        sha256sum <"$WORK/$profile/a/b/c/file" >"$WORK/sum"
        kill_daemon "$profile"
        # The dead mount still lies there: the next mount takes it away.
        attach "$profile" "sync=$profile"
        sha256sum <"$WORK/$profile/a/b/c/file" | diff - "$WORK/sum"
        detach "$profile"
        check_full "$profile"
    done
}

# An fsync waits for what others wrote before it: the kernel may not hold back more of that on a machine with more memory, and less while
# programs sync. And it reads ahead as much as one request takes. The files are opened for root before the sandbox closes /sys.
case_the_kernel_reads_ahead_and_holds_back_as_it_should() {
    local device
    new_archive box
    LOCKBOX_TEST_CLOCK=10 attach box
    device=/sys/class/bdi/$(mountpoint -d "$WORK/box")
    if [[ ! -w $device/max_bytes ]]; then
        note "$device/max_bytes cannot be written on this machine: not tried"
        detach box
        return 0
    fi
    # The kernel rounds to a part of its memory.
    (($(cat "$device/max_bytes") <= 17 << 20)) || fail "the kernel may hold back $(cat "$device/max_bytes") bytes"
    [[ $(cat "$device/read_ahead_kb") == 1024 ]] || fail "the kernel reads ahead $(cat "$device/read_ahead_kb") KiB"
    holds_back() { (($(cat "$device/max_bytes") $1 10 << 20)); }
    holds_back '>' || fail 'the kernel holds back too little while nobody syncs'
    dd if=/dev/zero of="$WORK/box/synced" bs=4k count=1 conv=fsync status=none
    await holds_back '<'
    # Until two periodic commits have followed.
    dirty_and_more() { date +%N >"$WORK/box/written" && holds_back '>'; }
    await dirty_and_more
    detach box
}

# With two event loops, eight callers: those that come while a commit runs are counted in, not held in a loop each.
case_callers_of_fsync_share_commits() {
    local before after
    new_archive box
    attach box threads=2
    mkdir "$WORK/box/d"
    sync "$WORK/box/d"
    before=$(commits_of box)
    python3 - "$WORK/box/d" <<'END'
import os, sys, threading
errors = []
def write(name):
    try:
        file = os.open(os.path.join(sys.argv[1], name), os.O_CREAT | os.O_WRONLY, 0o600)
        for n in range(100):
            os.pwrite(file, b"%06d" % n, 6 * n)
            os.fsync(file)
        os.close(file)
    except OSError as error:
        errors.append(error)
threads = [threading.Thread(target=write, args=(str(n),)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(f"{errors}" if errors else 0)
END
    after=$(commits_of box)
    note "$((after - before)) commits and entries for 800 fsyncs"
    [[ $((after - before)) -le 400 ]] || fail "$((after - before)) commits and entries for 800 fsyncs"
    kill_daemon box
    attach box
    same "$(cat "$WORK"/box/d/* | wc -c)" 4800
    detach box
}

commits_of() {
    lockbox status --json "$WORK/$1.lbx" |
        python3 -c 'import json, sys; status = json.load(sys.stdin); print(status["commits"] + status["log"]["entries"])'
}

# sync_one FILE [PROCESS]: writes more than the log takes, and asks for its durability; then the process dies at once.
sync_one() {
    python3 - "$@" <<'END'
import os, signal, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)
os.write(file, os.urandom(3 << 20))
os.fsync(file)
for process in sys.argv[2:]: os.kill(int(process), signal.SIGKILL)
END
}

generation_of() {
    lockbox status --json "$WORK/$1.lbx" | python3 -c 'import json, sys; print(json.load(sys.stdin)["generation"])'
}

# A commit without pages follows when the mount comes to rest, and tells: what the one before it loses from then on is damage.
case_a_commit_that_came_to_rest_is_not_undone() {
    local before synced
    new_archive box
    attach box
    sync_one "$WORK/box/one"
    sync_one "$WORK/box/two"
    reattach box
    stop_clock box
    cp "$WORK/box.lbx" "$WORK/before"
    before=$(generation_of box)
    sync_one "$WORK/box/three"
    synced=$(generation_of box)
    # One commit began the session, and the next one has the file.
    same "$synced" $((before + 2)) 'commits'
    start_clock
    confirmed() { [[ $(generation_of box) -gt $synced ]]; }
    await confirmed
    kill_daemon box
    umount -l "$WORK/box"
    archive.py rot "$WORK/box.lbx" "$WORK/before"
    export XDG_STATE_HOME=$WORK/stranger
    expect 12 'damaged archive' lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    ! grep -q sound "$WORK/stdout" || fail "called sound: $(cat "$WORK/stdout")"
    expect 12 'damaged' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE"
    ! mountpoint -q "$WORK/box" || fail mounted
}

# Before that commit nobody can tell damage from a crash, and both are said.
case_an_incomplete_commit_is_told_where_it_is_met() {
    local pid
    new_archive box
    attach box
    stop_clock box
    cp "$WORK/box.lbx" "$WORK/before"
    pid=$(daemon_of "$WORK/box.lbx")
    sync_one "$WORK/box/one" "$pid"
    await gone "$pid"
    umount -l "$WORK/box"
    archive.py rot "$WORK/box.lbx" "$WORK/before"
    lockbox check --passfile "$PASSFILE" "$WORK/box.lbx" >"$WORK/stdout" 2>"$WORK/stderr"
    grep -q 'sound as commit .* left it, but newer changes may be missing' "$WORK/stdout" || fail "$(cat "$WORK/stdout" "$WORK/stderr")"
    grep -q 'is incomplete .*interrupted, or damaged since; .*may be missing' "$WORK/stderr" || fail "$(cat "$WORK/stderr")"
    attach box 2>"$WORK/stderr"
    grep -q 'is incomplete .*interrupted, or damaged since; .*may be missing' "$WORK/stderr" || fail "$(cat "$WORK/stderr")"
    lockbox status --all "$WORK/box" | shows '^When mounted  *commit .* is incomplete' || fail "$(lockbox status --all "$WORK/box")"
    lockbox status "$WORK/box" | shows '  mounted; when mounted: commit .* is incomplete' || fail "$(lockbox status "$WORK/box")"
    lockbox status --json "$WORK/box" | shows '"fallback": *"commit .* is incomplete' || fail "$(lockbox status --json "$WORK/box")"
    detach box
    attach box
    lockbox status --json "$WORK/box" | shows '"fallback": *null' || fail "$(lockbox status --json "$WORK/box")"
    detach box
}

case_killed_at_any_moment_the_archive_is_whole() {
    local round rounds=${KILLS:-6} pid before
    new_archive box
    : >"$WORK/notes"
    for round in $(seq "$rounds"); do
        attach box
        workload.py verify "$WORK/box" "$WORK/notes"
        before=$(wc -l <"$WORK/notes")
        in_background workload.py change "$WORK/box" "$WORK/notes" "$round"
        local worker=$!
        pid=$(daemon_of "$WORK/box.lbx")
        # The moment is the point: any is right.
        await has_lines "$WORK/notes" $((before + RANDOM % 150))
        kill -9 "$pid"
        await gone "$pid"
        wait "$worker" || fail "the workload failed by itself in round $round"
        umount -l "$WORK/box"
        check_full box
        # Also without the check's own opening in between, every other time.
        if [[ $((round % 2)) -eq 0 ]]; then
            attach box
            kill_daemon box
        fi
    done
    attach box
    workload.py verify "$WORK/box" "$WORK/notes"
    note "$rounds kills, $(grep -c ^file "$WORK/notes") acknowledged files, $(grep -c ^going "$WORK/notes") deletions"
    detach box
    check_full box
}

case_sigterm_saves_what_the_kernel_holds() {
    local pid
    new_archive box
    attach box sync=never
    head -c 10000000 /dev/urandom >"$WORK/content"
    cp "$WORK/content" "$WORK/box/file"
    pid=$(daemon_of "$WORK/box.lbx")
    kill -TERM "$pid"
    await gone "$pid"
    ! mountpoint -q "$WORK/box" || fail 'still mounted after SIGTERM'
    attach box
    same_file "$WORK/content" "$WORK/box/file"
    detach box
    check_full box
}

case_sigterm_of_a_busy_mount_waits_for_the_last_user() {
    local pid
    new_archive box
    attach box sync=never
    exec 7>"$WORK/box/open"
    echo early >&7
    pid=$(daemon_of "$WORK/box.lbx")
    kill -TERM "$pid"
    await sh -c "! mountpoint -q '$WORK/box'"
    echo late >&7
    ! gone "$pid" || fail 'the daemon did not wait for the open file'
    # What lies beside the former mount point does not lie in the archive.
    lockbox backup "$WORK/box.lbx" "file://$WORK/objects"
    exec 7>&-
    await gone "$pid"
    attach box
    same "$(cat "$WORK/box/open")" $'early\nlate'
    detach box
}

case_who_is_cut_off_keeps_what_was_written() {
    local pid
    new_archive box
    attach box sync=never,stop_timeout=3
    exec 7>"$WORK/box/open"
    echo written >&7
    pid=$(daemon_of "$WORK/box.lbx")
    kill -TERM "$pid"
    await gone "$pid"
    grep -q '; forcing unmount' "$WORK/box.log" || fail 'nobody was cut off'
    exec 7>&-
    attach box
    same "$(cat "$WORK/box/open")" written
    detach box
    check_full box
}

# detach_lazily NAME: with files open in descriptor 7, which the command does not hold.
detach_lazily() {
    in_background lockbox umount --lazy "$WORK/$1" 7>&-
    await sh -c "! mountpoint -q '$WORK/$1'"
}

case_a_detached_mount_is_committed_every_few_seconds() {
    head -c 1M /dev/urandom >"$WORK/content"
    new_archive box
    LOCKBOX_TEST_CLOCK=10 attach box
    exec 7>"$WORK/box/open"
    detach_lazily box
    python3 -c 'import os, sys; os.write(7, open(sys.argv[1], "rb").read())' "$WORK/content"
    # The kernel has all of it for some 30 seconds if nobody asks.
    committed() {
        lockbox status --json "$WORK/box.lbx" | python3 -c '
import json, sys
status = json.load(sys.stdin)
sys.exit(not (status["used_bytes"] > 1 << 20 and status["dirty_bytes"] == 0))'
    }
    await committed
    kill_daemon box
    exec 7>&-
    attach box
    same_file "$WORK/content" "$WORK/box/open"
    detach box
    check_full box
}

case_umount_of_a_busy_mount_is_refused() {
    local pid
    new_archive box
    attach box
    exec 7>"$WORK/box/open"
    echo early >&7
    pid=$(daemon_of "$WORK/box.lbx")
    expect 13 'busy.*open' lockbox umount "$WORK/box"
    mountpoint -q "$WORK/box" || fail 'unmounted although busy'
    ! gone "$pid" || fail 'the daemon went away from a busy mount'
    echo late >&7
    exec 7>&-
    detach box
    attach box
    same "$(cat "$WORK/box/open")" $'early\nlate'
    detach box
}

case_a_mount_whose_agent_was_killed_can_be_left() {
    local pid
    new_archive box
    attach box
    echo saved >"$WORK/box/file"
    pid=$(daemon_of "$WORK/box.lbx")
    kill -9 "$(pgrep --parent "$pid")"
    exec 9>"$WORK/box/open"
    expect 2 "'fusermount3 -u'" lockbox snapshot create "$WORK/box" now
    exec 9>&-
    expect 2 "'fusermount3 -u'" lockbox umount "$WORK/box"
    mountpoint -q "$WORK/box" || fail 'unmounted, and said that it was not'
    fusermount3 -u "$WORK/box"
    await gone "$pid"
    attach box
    same "$(cat "$WORK/box/file")" saved
    detach box
}

case_an_unlinked_file_lives_while_it_is_open() {
    local after
    new_archive box
    attach box
    python3 - "$WORK/box" <<'END'
import os, sys
os.chdir(sys.argv[1])
file = os.open("gone", os.O_RDWR | os.O_CREAT, 0o600)
os.write(file, b"a" * 5_000_000)
os.unlink("gone")
os.fsync(file)
assert os.fstat(file).st_nlink == 0 and os.listdir(".") == []
os.pwrite(file, b"after", 4_000_000)
os.ftruncate(file, 4_000_100)
assert os.pread(file, 5, 4_000_000) == b"after" and os.fstat(file).st_size == 4_000_100
keep = os.open("kept", os.O_RDWR | os.O_CREAT, 0o600)
os.write(keep, b"old")
number = os.fstat(keep).st_ino
with open("new", "w") as new:
    new.write("new")
os.rename("new", "kept")
status = os.fstat(keep)
assert (status.st_ino, status.st_nlink, status.st_size) == (number, 0, 3), status
assert os.pread(keep, 100, 0) == b"old"
os.pwrite(keep, b"OLD", 0)
os.fsync(keep)
assert os.pread(keep, 100, 0) == b"OLD" and open("kept").read() == "new"
assert os.stat("kept").st_ino != number
END
    same "$(cat "$WORK/box/kept")" new
    # Reclaimed also when the daemon dies while the file is open.
    exec 7>"$WORK/box/lost"
    head -c 40000000 /dev/urandom >&7
    rm "$WORK/box/lost"
    python3 -c 'import os, sys; os.fsync(7); d = os.open(sys.argv[1], os.O_RDONLY); os.fsync(d)' "$WORK/box"
    kill_daemon box
    exec 7>&-
    attach box
    detach box
    check_full box
    after=$(du -m "$WORK/box.lbx" | cut -f1)
    [[ $after -lt 25 ]] || fail "the unlinked file still takes space: $after MiB"
}

# There is nothing to make durable, and programs that sync what they read do not fail for it.
case_fsync_and_close_of_a_mount_for_reading_succeed() {
    local profile
    new_archive box
    attach box
    mkdir "$WORK/box/d"
    echo content >"$WORK/box/d/file"
    detach box
    for profile in always periodic never; do
        attach box "ro,sync=$profile"
        same "$(cat "$WORK/box/d/file")" content
        python3 - "$WORK/box/d" <<'END'
import os, sys
for path in (os.path.join(sys.argv[1], "file"), sys.argv[1]):
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    os.fdatasync(opened)
    os.close(opened)
END
        sync -f "$WORK/box/d/file"
        detach box
    done
    check_full box
}

# Bytes of entries that no commit contains yet; all of the log, where an archive was opened for reading that has some.
logged_of() {
    lockbox status --json "$WORK/$1.lbx" | python3 -c 'import json, sys; print(json.load(sys.stdin)["log"]["used_bytes"])'
}

# Nobody calls anything: the clock commits what the log has, and overwrites it.
case_the_log_of_an_idle_mount_empties_by_itself() {
    local before caught=
    new_archive box
    attach box
    echo content >"$WORK/box/file"
    sync "$WORK/box/file"
    for _ in {1..20}; do
        before=$(generation_of box)
        printf x >>"$WORK/box/file"
        sync "$WORK/box/file"
        dd if="$WORK/box.lbx" of="$WORK/first" bs=4096 skip=65 count=1 status=none
        # Else the clock came between.
        [[ $(logged_of box) -eq 0 || $(generation_of box) -ne $before ]] || { caught=1 && break; }
    done
    [[ -n $caught ]] || fail 'too slow a machine'
    empty() { [[ $(logged_of box) -eq 0 && $(generation_of box) -gt $before ]]; }
    overwritten() { ! dd if="$WORK/box.lbx" bs=4096 skip=65 count=1 status=none | cmp -s - "$WORK/first"; }
    await empty
    await overwritten
    # What it had is in a commit: nothing is laid over that after a death.
    cp "$WORK/box/file" "$WORK/file"
    kill_daemon box
    attach box ro
    same "$(logged_of box)" 0 'bytes of the log after it was empty'
    same_file "$WORK/file" "$WORK/box/file"
    detach box
    check_full box
}
