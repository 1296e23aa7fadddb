# The commands that work without a mount, beside a mount of the same archive.
# shellcheck shell=bash disable=SC2317,SC2164

case_add_extract_and_mount_agree() {
    local tree
    tree=$(source_tree)
    new_archive box
    lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$tree" --to /
    lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    attach box
    same_tree "$tree" "$WORK/box/sources"
    mkdir "$WORK/box/more"
    cp -a "$tree/odd" "$WORK/box/more/odd"
    detach box
    lockbox extract --privileges --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/out"
    same_tree "$tree" "$WORK/out/sources"
    same_tree "$tree/odd" "$WORK/out/more/odd"
    lockbox extract --passfile "$PASSFILE" "$WORK/box.lbx" more/odd/random --to "$WORK/single"
    find "$WORK/single" -name random -exec cmp {} "$tree/odd/random" \;
    lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" more/odd/random | cmp - "$tree/odd/random"
}

case_listings_are_right_and_readable_for_programs() {
    new_archive box
    attach box
    mkdir "$WORK/box/directory"
    printf 'twelve bytes' >"$WORK/box/directory/file"
    touch -d '2001-02-03T04:05:06.789Z' "$WORK/box/directory/file"
    ln -s target "$WORK/box/link"
    detach box
    local ask=(--passfile "$PASSFILE" "$WORK/box.lbx")
    same "$(lockbox ls "${ask[@]}")" $'directory\nlink'
    lockbox ls -lR "${ask[@]}" | shows '^-rw-r--r-- *1 *root *root *12 2001-02-03 04:05:06.*file$'
    lockbox ls -R --json "${ask[@]}" | python3 -c '
import json, sys
objects = {o["path"]: o for o in map(json.loads, sys.stdin)}
assert objects["/directory/file"]["size"] == 12, objects
assert objects["/directory/file"]["mtime"].startswith("2001-02-03T04:05:06.789"), objects
assert objects["/link"]["target"] == "target", objects'
    lockbox info --json "${ask[@]}" | python3 -c '
import json, sys
info = json.load(sys.stdin)
assert info["format_version"] == 1 and info["closed"] is True and info["fallback"] is None, info'
    lockbox check --json --full "${ask[@]}" | python3 -c '
import json, sys
report = json.load(sys.stdin)
assert report["sound"] is True and report["findings"] == [], report'
    expect 2 'no such file' lockbox cat "${ask[@]}" nothing
}

# The reader that was written from the specification alone.
case_what_is_mounted_in_a_left_stage_is_not_emptied() {
    alone a_mount_in_a_left_stage
}

a_mount_in_a_left_stage() {
    local left=$WORK/out/.lockbox-extract-0123456789abcdef other=$WORK/out/.lockbox-extract-fedcba9876543210
    new_archive box
    echo small >"$WORK/small"
    lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/small"
    mkdir -p "$left/deep/below" "$other" "$WORK/precious/mine" "$WORK/held"
    echo precious >"$WORK/precious/mine/file"
    chmod 500 "$WORK/precious"
    # Of the same file system, so that device numbers tell nothing; and of another one; and over a left stage itself.
    mount --bind "$WORK/precious" "$left/deep/below"
    mount -t tmpfs none "$WORK/held"
    echo held >"$WORK/held/file"
    mkdir "$left/held"
    mount --bind "$WORK/held" "$left/held"
    mount --bind "$WORK/precious" "$other"
    lockbox extract --passfile "$PASSFILE" "$WORK/box.lbx" small --to "$WORK/out" 2>"$WORK/stderr"
    grep -q 'cannot remove a leftover of an earlier extraction' "$WORK/stderr" || fail "nothing was said: $(cat "$WORK/stderr")"
    [[ $(cat "$WORK/precious/mine/file" "$WORK/held/file") == $'precious\nheld' && $(stat -c %a "$WORK/precious") == 500 ]] ||
        fail 'what was mounted in a left stage was emptied or changed'
    umount "$left/deep/below" "$left/held" "$other"
    lockbox extract --force --passfile "$PASSFILE" "$WORK/box.lbx" small --to "$WORK/out"
    [[ $(ls -A "$WORK/out") == small ]] || fail 'a left stage stayed'
}

case_the_independent_reader_extracts_the_same() {
    local tree python=${READER_PYTHON:?set by tests/run.sh: a python with the packages of format-spec/reader}
    tree=$(source_tree)
    new_archive box
    attach box
    rsync -aHX --sparse "$tree/" "$WORK/box/sources/"
    # Something to split, trim and free: not only what a fresh copy looks like.
    rm -r "$WORK"/box/sources/a*
    printf changed | dd of="$WORK/box/sources/odd/random" bs=1 seek=1000000 conv=notrunc status=none
    truncate -s 2000000 "$WORK/box/sources/odd/random"
    reattach box
    # Not by rsync, which leaves the time of the topmost directory as the copying made it.
    cp -a "$WORK/box/sources" "$WORK/expected"
    detach box
    lockbox extract --privileges --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/ours"
    "$python" "$READER" --passfile "$PASSFILE" ls "$WORK/box.lbx" >"$WORK/list"
    "$python" "$READER" --passfile "$PASSFILE" extract "$WORK/box.lbx" "$WORK/theirs"
    same_tree "$WORK/expected" "$WORK/ours/sources"
    same_tree "$WORK/expected" "$WORK/theirs/sources"
    [[ $(wc -l <"$WORK/list") -ge $(find "$WORK/expected" | wc -l) ]] || fail 'the list is short'
}

# Deleting seven of every eight files of each shared page gives their space back, by a purge and by waiting.
case_small_files_that_shared_pages_are_erased() {
    local full n how speed
    new_archive box
    for how in purge wait; do
        # What is waited for comes with the clock.
        speed=1
        [[ $how == purge ]] || speed=10
        LOCKBOX_TEST_CLOCK=$speed attach box
        mkdir "$WORK/box/$how"
        head -c 24000000 /dev/urandom >"$WORK/noise"
        split -b 3000 -a 4 -d "$WORK/noise" "$WORK/box/$how/f"
        sync -f "$WORK/box/$how"
        detach box
        LOCKBOX_TEST_CLOCK=$speed attach box
        full=$(stat -c %b "$WORK/box.lbx")
        for ((n = 0; n < 8000; n++)); do
            [[ $((n % 8)) == 0 ]] || printf '%s/f%04d\0' "$WORK/box/$how" "$n"
        done | xargs -0 rm
        sync -f "$WORK/box/$how"
        [[ $how == wait ]] || lockbox purge "$WORK/box"
        # 41,000 of the 46,900 sectors of the files' content are to go; pages that only wait for others would keep them all. What the archive
        # keeps allocated ahead of need is some MiB.
        given_back() { ((full - $(stat -c %b "$WORK/box.lbx") >= 20000)); }
        if [[ $how == wait ]]; then await 300 given_back; fi
        given_back || fail "$how: too little was given back: before=$full after=$(stat -c %b "$WORK/box.lbx")"
        python3 - "$WORK/noise" "$WORK/box/$how" <<'END'
import sys
noise = open(sys.argv[1], "rb").read()
for n in range(0, 8000, 8):
    with open("%s/f%04d" % (sys.argv[2], n), "rb") as file:
        assert file.read() == noise[n * 3000:(n + 1) * 3000], "file %d differs" % n
END
        detach box
        lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    done
}

case_a_compaction_without_room_leaves_the_archive_alone() {
    local before
    mkdir "$WORK/small"
    mount -t tmpfs -o size=64m tmpfs "$WORK/small"
    new_archive box
    head -c 36000000 /dev/urandom >"$WORK/large"
    lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/large"
    # The second half is what only a snapshot shows.
    lockbox snapshot create --passfile "$PASSFILE" "$WORK/box.lbx" kept
    head -c 18000000 "$WORK/large" >"$WORK/half" && mv "$WORK/half" "$WORK/large"
    lockbox add --force --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/large"
    cp "$WORK/box.lbx" "$WORK/small/box.lbx"
    before=$(sha256sum <"$WORK/small/box.lbx")
    if lockbox compact --passfile "$PASSFILE" "$WORK/small/box.lbx" 2>"$WORK/complaint"; then
        umount "$WORK/small"
        fail 'there was room'
    fi
    cat "$WORK/complaint"
    [[ $(ls -A "$WORK/small") == box.lbx && $(sha256sum <"$WORK/small/box.lbx") == "$before" ]] || {
        umount "$WORK/small"
        fail 'something was left or changed'
    }
    umount "$WORK/small"
}

case_purge_erases_on_a_mount_and_damage_is_rescued() {
    local tree before after
    tree=$(source_tree)
    new_archive box
    attach box
    head -c 20000000 /dev/urandom >"$WORK/box/secret"
    cp -a "$tree/odd" "$WORK/box/odd"
    sync -f "$WORK/box/secret"
    before=$(stat -c %b "$WORK/box.lbx")
    rm "$WORK/box/secret"
    lockbox purge "$WORK/box"
    after=$(stat -c %b "$WORK/box.lbx")
    [[ $((before - after)) -gt 30000 ]] || fail "purge gave back too little: before=$before after=$after"
    lockbox purge "$WORK/box.lbx"
    detach box
    # Every record of the ring, and one header copy.
    dd if=/dev/urandom of="$WORK/box.lbx" bs=4096 count=65 conv=notrunc status=none
    dd if=/dev/urandom of="$WORK/box.lbx" bs=4096 seek=353 count=32 conv=notrunc status=none
    lockbox rescue --privileges --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/out"
    same_tree "$tree/odd" "$WORK/out/odd"
}

# umount(8) leaves a mount to umount.lockbox, which it looks for in /sbin alone: a private /sbin has it.
case_umount_8_waits_for_the_daemon() {
    local pid
    new_archive box
    mkdir "$WORK/sbin"
    mount -t tmpfs none "$WORK/sbin"
    mkdir "$WORK/sbin/upper" "$WORK/sbin/work"
    ln -s "$(command -v lockbox)" "$WORK/sbin/upper/umount.lockbox"
    unshare --mount --propagation private bash -Eeuo pipefail -c '
        source "$1/support.sh"
        WORK=$2 PASSFILE=$3
        mount -t overlay -o "lowerdir=$(realpath /sbin),upperdir=$WORK/sbin/upper,workdir=$WORK/sbin/work" none "$(realpath /sbin)"
        attach box sync=never
        pid=$(daemon_of "$WORK/box.lbx")
        head -c 30000000 /dev/urandom >"$WORK/content"
        cp "$WORK/content" "$WORK/box/file"
        # The result of the daemon is that of umount(8).
        exec 7>"$WORK/box/open"
        ! umount "$WORK/box" 2>"$WORK/stderr" || fail "unmounted although busy"
        grep -q busy "$WORK/stderr"
        exec 7>&-
        umount "$WORK/box"
        gone "$pid" || fail "umount(8) returned before the daemon ended"
        ! grep -q "$WORK/box" /run/mount/utab || fail "the table still has the mount"
        attach box
        same_file "$WORK/content" "$WORK/box/file"
        umount "$WORK/box"
        # From a session with another runtime directory it is found all the same.
        attach box
        pid=$(daemon_of "$WORK/box.lbx")
        mkdir "$WORK/runtime"
        XDG_RUNTIME_DIR=$WORK/runtime umount "$WORK/box"
        gone "$pid" || fail "umount(8) did not find the daemon"
        # Without its socket the daemon cannot be asked, but umount(8) works as without us.
        attach box
        mount -t tmpfs none /run/lockbox
        umount "$WORK/box" 2>"$WORK/stderr"
        grep -q "is unreachable" "$WORK/stderr"
    ' - "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." "$WORK" "$PASSFILE"
    umount "$WORK/sbin"
    await lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
}

case_umount_waits_until_nobody_uses_the_mount() {
    new_archive box
    attach box
    exec 7>"$WORK/box/file"
    expect 13 "box is busy: process $$ " lockbox umount --wait=1s "$WORK/box"
    expect 13 "box is busy: process $$ " lockbox umount --all --wait=0s
    expect 1 'such as 30s' lockbox umount --wait=soon "$WORK/box"
    expect 1 'cannot be used with' lockbox umount --wait --lazy "$WORK/box"
    # On a terminal it says what it waits for. Twice: the user goes, and somebody else ends the mount.
    wait_on_a_terminal() {
        python3 -c '
import os, pty, subprocess, sys
ours, theirs = pty.openpty()
waiting = subprocess.Popen(["lockbox", "umount", "--wait", sys.argv[1]], stdin=subprocess.DEVNULL, stderr=theirs)
os.close(theirs)
said = b""
while b"with --wait" not in said:
    said += os.read(ours, 1000)
assert said.startswith(b"lockbox: waiting: ") and b" open; " in said, said
subprocess.run(sys.argv[2], shell=True, check=True)
sys.exit(waiting.wait())' "$WORK/box" "$1"
    }
    exec 7>&-
    sleep 600 7>"$WORK/box/former" &
    BACKGROUND+=($!)
    await test -e "$WORK/box/former"
    wait_on_a_terminal "kill $!" || fail 'the wait did not end well'
    ! mountpoint -q "$WORK/box" || fail 'still mounted'
    attach box
    sleep 600 7>"$WORK/box/later" &
    BACKGROUND+=($!)
    await test -e "$WORK/box/later"
    # Asked again, the daemon would cut the user off after a minute.
    wait_on_a_terminal "lockbox umount --lazy $WORK/box 2>/dev/null; ! mountpoint -q $WORK/box && kill -0 $! && kill $!" ||
        fail 'the wait did not end well when the mount was gone'
    ! grep -q 'cut off' "$WORK/box.log" || fail 'the wait cut somebody off'
}

case_a_lazy_unmount_returns_at_once_and_names_the_users() {
    local pid
    new_archive box
    # A deadline of no seconds would have passed when the command returns.
    attach box sync=never,stop_timeout=0
    pid=$(daemon_of "$WORK/box.lbx")
    exec 7>"$WORK/box/file"
    # In the foreground, with the file open: it would wait for ever.
    timeout 60 lockbox umount --lazy "$WORK/box" 2>"$WORK/stderr" 7>&-
    grep -q "box is detached; its archive stays open until its last user is gone (process $$ (bash) has $WORK/box/file open)" "$WORK/stderr" ||
        fail "$(cat "$WORK/stderr")"
    ! mountpoint -q "$WORK/box" || fail 'still mounted'
    timeout 60 lockbox umount --lazy "$WORK/box.lbx" 2>"$WORK/stderr" || fail 'a second time'
    echo written >&7
    ! gone "$pid" || fail 'the daemon did not wait for the open file'
    exec 7>&-
    await gone "$pid"
    # What nobody uses is ended as without the option: when the command returns, the archive is closed.
    attach box
    same "$(cat "$WORK/box/file")" written
    pid=$(daemon_of "$WORK/box.lbx")
    lockbox umount --lazy "$WORK/box" 2>"$WORK/stderr"
    same "$(cat "$WORK/stderr")" ''
    gone "$pid" || fail 'the daemon was not waited for'
}

case_busy_is_what_is_said_and_a_bind_mount_goes_alone() {
    local pid child
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    for child in "$pid" $(pgrep -P "$pid"); do
        same "$(cat "/proc/$child/comm")" mount.lockbox 'the name of a process'
    done
    (cd "$WORK/box" && exec sleep 600) &
    BACKGROUND+=($!)
    sleeps_inside() { [[ $(cat "/proc/${BACKGROUND[0]}/comm") == sleep && $(readlink "/proc/${BACKGROUND[0]}/cwd") == "$WORK/box" ]]; }
    await sleeps_inside
    expect 13 "box is busy: process ${BACKGROUND[0]} \(sleep\) has its working directory at $WORK/box; end that use" lockbox umount "$WORK/box"
    kill "${BACKGROUND[0]}"
    wait "${BACKGROUND[0]}" || true
    exec 7>"$WORK/box/file"
    expect 13 "box is busy: process $$ \(bash\) has $WORK/box/file open" lockbox umount "$WORK/box"
    same "$(exec 7>&-; lockbox status --all "$WORK/box" | grep '^Used by')" "Used by            process $$ (bash) has $WORK/box/file open"
    lockbox status --json "$WORK/box" | python3 -c '
import json, sys
mount = json.load(sys.stdin)
assert {"pid": int(sys.argv[1]), "name": "bash", "kind": "file", "path": sys.argv[2] + "/box/file"} in mount["users"], mount["users"]' $$ "$WORK"
    truncate -s 4096 "$WORK/box/file"
    exec 7>&-
    # What is mapped, with nothing open any more.
    in_background python3 -c '
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 4096)
file = None
open(sys.argv[2], "w").close()
time.sleep(600)' "$WORK/box/file" "$WORK/mapped"
    await test -e "$WORK/mapped"
    expect 13 "box is busy: process ${BACKGROUND[-1]} \(python3[^)]*\) has $WORK/box/file (open|mapped into memory)" lockbox umount "$WORK/box"
    kill "${BACKGROUND[-1]}"
    wait "${BACKGROUND[-1]}" || true
    mkdir "$WORK/box/below" "$WORK/alias"
    mount -t tmpfs none "$WORK/box/below"
    expect 13 "box is busy: something is mounted at $WORK/box/below" lockbox umount "$WORK/box"
    umount "$WORK/box/below"
    # Its file system is still mounted elsewhere, so the daemon has no end to come to.
    mount --bind "$WORK/box" "$WORK/alias"
    ln -s "$(command -v lockbox)" "$WORK/umount.lockbox"
    "$WORK/umount.lockbox" "$WORK/alias" 2>"$WORK/stderr"
    same "$(cat "$WORK/stderr")" "lockbox: unmounted $WORK/alias; the archive is still mounted at $WORK/box"
    ! mountpoint -q "$WORK/alias" || fail 'the bind mount is still there'
    mount --bind "$WORK/box/below" "$WORK/alias"
    exec 7>"$WORK/alias/file"
    expect 13 "alias is busy: process $$ \(bash\) has $WORK/alias/file open" lockbox umount "$WORK/alias"
    exec 7>&-
    lockbox umount "$WORK/alias"
    detach box
}

# hold FILE: takes the lock of an archive until somebody writes to $WORK/release.
hold() {
    python3 -c 'import fcntl, struct, sys
archive = open(sys.argv[1], "r+b")
fcntl.fcntl(archive, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))  # F_OFD_SETLK
print("held", flush=True)
open(sys.argv[2]).read()' "$1" "$WORK/release" >"$WORK/holding"
}

case_a_mount_waits_for_the_end_of_the_former() {
    local round
    new_archive box
    attach box
    for round in 1 2 3 4 5; do
        head -c 3000000 /dev/urandom >"$WORK/box/file$round"
        # As somebody who does not know of the daemon: it closes the archive after this has returned.
        await umount -i "$WORK/box"
        attach box
    done
    same "$(ls "$WORK/box" | wc -l)" 5
    expect 13 "already mounted at $WORK/box" mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE"
    ! grep -q waiting "$WORK/stderr" || fail 'waited for a mount that is used'
    detach box
    mkfifo "$WORK/release"
    in_background hold "$WORK/box.lbx"
    await grep -q held "$WORK/holding"
    in_background attach box 2>"$WORK/mounting"
    await grep -q 'waiting for the lock' "$WORK/mounting"
    echo >"$WORK/release"
    wait "${BACKGROUND[1]}" || fail "refused: $(cat "$WORK/mounting")"
    detach box
    # Who goes on is not waited for.
    rm "$WORK/holding"
    in_background hold "$WORK/box.lbx"
    await grep -q held "$WORK/holding"
    expect 13 'in use by another process' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE"
    grep -q 'waiting for the lock' "$WORK/stderr"
    echo >"$WORK/release"
}
