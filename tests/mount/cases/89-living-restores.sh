# Comparing with snapshots and bringing them back on mounts that are in use.
# shellcheck shell=bash disable=SC2317,SC2164

# Without a passphrase: the daemon has the key.
snapshot() {
    lockbox snapshot "$@" </dev/null
}

names() {
    snapshot ls --json "$1" | sed 's/.*"name":"\([^"]*\)".*/\1/'
}

# An archive with a tree that the kernel knows by heart, a snapshot of it, a copy beside it, and much changed since.
begin_restoring() {
    new_archive box
    attach box
    mkdir -p "$WORK/box/tree/deep/er"
    seq 300 | split -l 1 - "$WORK/box/tree/small"
    head -c 3000000 /dev/urandom >"$WORK/box/tree/deep/large"
    head -c 3000000 /dev/urandom >"$WORK/box/tree/mapped"
    ln "$WORK/box/tree/mapped" "$WORK/box/tree/deep/er/mapped"
    ln -s smallaa "$WORK/box/tree/link"
    echo one >"$WORK/box/single"
    chmod 640 "$WORK/box/single"
    touch -d 2001-02-03 "$WORK/box/tree/smallaa" "$WORK/box/tree/deep" "$WORK/box"
    cp -a "$WORK/box" "$WORK/copy"
    snapshot create "$WORK/box" good >/dev/null
    ln "$WORK/box/tree/smallab" "$WORK/box/outside"
    ls -lR "$WORK/box" >/dev/null
    echo changed >"$WORK/box/tree/smallaa"
    rm -r "$WORK/box/tree/deep" "$WORK/box/single"
    mkdir "$WORK/box/single"
    echo new >"$WORK/box/tree/added"
    # Names that are missing are known as well.
    test ! -e "$WORK/box/tree/deep" -a ! -e "$WORK/box/.lockbox-restore-1"
}

case_what_is_mounted_is_compared_with_its_snapshots() {
    begin_restoring
    snapshot diff "$WORK/box" good | sort >"$WORK/living"
    same "$(grep -c . "$WORK/living")" 8
    grep -qx 'D tree/deep/er/mapped' "$WORK/living"
    # By the archive's name it is the same, and between two snapshots.
    snapshot diff "$WORK/box.lbx" good | sort | same_file "$WORK/living" /dev/stdin
    snapshot create "$WORK/box" late >/dev/null
    echo later >"$WORK/box/single/later"
    snapshot diff "$WORK/box" good late | sort | same_file "$WORK/living" /dev/stdin
    same "$(snapshot diff --json "$WORK/box" late)" '{"change":"added","path":"single/later"}'
    says_nothing snapshot diff "$WORK/box" late late
    mv "$WORK/box/tree/mapped" "$WORK/box/moved"
    same "$(snapshot diff "$WORK/box" late)" "$(printf 'R tree/mapped -> moved\nA single/later')"
    same "$(snapshot diff --json "$WORK/box" late | grep moved)" '{"change":"renamed","changed":false,"from":"tree/mapped","path":"moved"}'
    expect 2 "no snapshot 'nothing'" snapshot diff "$WORK/box" nothing
    # More than one line of an answer holds, with names that a terminal would obey.
    mkdir "$WORK/box/many"
    python3 -c 'import os, sys
os.chdir(sys.argv[1])
for n in range(1, 3001):
    open("%d-\x1b[31m%0100d" % (n, n), "w").close()' "$WORK/box/many"
    snapshot diff "$WORK/box" late >"$WORK/many"
    same "$(wc -l <"$WORK/many")" 3003
    if grep -q $'\e' "$WORK/many"; then fail "a terminal would obey"; fi
    reattach box ro
    same "$(snapshot diff "$WORK/box" late | wc -l)" 3003
    detach box
    lockbox snapshot diff --passfile "$PASSFILE" "$WORK/box.lbx" late | same_file "$WORK/many" /dev/stdin
}

case_a_restore_in_a_mount_is_seen_at_once_and_leaves_open_files_alone() {
    local kept hold
    begin_restoring
    cat >"$WORK/hold.py" <<'PYTHON'
import errno
import mmap
import os
import sys

place, go, ready = sys.argv[1:]
os.chdir(place + "/tree")
reads = os.open("smallaa", os.O_RDONLY)
writes = os.open("added", os.O_RDWR)
mapped = open("mapped", "r+b")
memory = mmap.mmap(mapped.fileno(), 0)
before = memory[:100_000]
memory[0:4] = b"mine"
open(ready, "w").close()
open(go).read()

# What is open is what it was.
assert os.pread(reads, 100, 0) == b"changed\n"
assert os.fstat(reads).st_nlink == 0
os.pwrite(writes, b"more", 0)
os.fsync(writes)
assert os.pread(writes, 100, 0) == b"more"
assert memory[:4] == b"mine" and memory[4:100_000] == before[4:]
memory[2_999_000:2_999_004] = b"last"
memory.flush()
# The directory in which it works is gone; its names lead to nothing, and never to something else.
for name in ["smallac", "never looked up", "."]:
    try:
        content = open(name, "rb").read()
    except OSError as error:
        assert error.errno in (errno.ENOENT, errno.ESTALE, errno.EISDIR), (name, error)
    else:
        raise AssertionError(name)
PYTHON
    mkfifo "$WORK/go"
    in_background python3 "$WORK/hold.py" "$WORK/box" "$WORK/go" "$WORK/ready"
    hold=${BACKGROUND[0]}
    await test -e "$WORK/ready"
    kept=$(snapshot restore "$WORK/box" good tree)
    [[ $kept == before-restore-* ]] || fail "it answered: $kept"
    same_tree "$WORK/copy/tree" "$WORK/box/tree"
    same "$(stat -c %h "$WORK/box/outside")" 1
    same "$(cat "$WORK/box/.snapshots/$kept/tree/smallaa")" changed
    same "$(head -c 4 "$WORK/box/.snapshots/$kept/tree/mapped")" mine
    test -d "$WORK/box/single" || fail "what was not meant was restored"
    echo >"$WORK/go"
    wait "$hold" || fail "who had something open was answered otherwise"
    # Everything, also by the name of the archive.
    kept=$(snapshot restore --json "$WORK/box.lbx" good)
    [[ $kept == '{"before":"before-restore-'*'"}' ]] || fail "it answered: $kept"
    same_tree "$WORK/copy" "$WORK/box"
    says_nothing snapshot diff "$WORK/box" good
    # Programs go on in what came back.
    echo appended >>"$WORK/box/tree/deep/large"
    same "$(stat -c %s "$WORK/box/tree/deep/large")" 3000009
    mv "$WORK/box/tree/deep/er" "$WORK/box/er"
    same "$(ls -A "$WORK/box")" "$(printf 'er\nsingle\ntree')"
    # Beside what is there.
    snapshot restore "$WORK/box" good tree single --to back/here >"$WORK/answer"
    same "$(cat "$WORK/answer")" ''
    same "$(snapshot restore --json "$WORK/box" good single --to back/there)" '{"before":null}'
    rm -r "$WORK/box/back/there"
    same_tree "$WORK/copy/tree" "$WORK/box/back/here/tree"
    expect 2 'already exists' snapshot restore "$WORK/box" good single --to back/here
    expect 2 'the snapshot has no nothing' snapshot restore "$WORK/box" good nothing
    # A path as a shell completes it through the mount.
    echo changed >"$WORK/box/tree/smallaa"
    snapshot restore "$WORK/box" good "$WORK/box/tree/smallaa" >/dev/null
    cmp "$WORK/box/tree/smallaa" "$WORK/copy/tree/smallaa"
    cp -a "$WORK/box" "$WORK/last"
    reattach box
    same_tree "$WORK/last" "$WORK/box"
    detach box
    check_full box
}

# Files are told apart by what the kernel believes of them: it keeps the size that it heard first.
case_nobody_learns_of_what_a_restore_builds_before_it_is_whole() {
    local round
    new_archive box
    attach box
    mkdir "$WORK/box/tree"
    for n in $(seq 400); do head -c 70000 /dev/urandom >"$WORK/box/tree/$n"; done
    cp -a "$WORK/box" "$WORK/copy"
    snapshot create "$WORK/box" good >/dev/null
    look() {
        while [[ ! -e $WORK/enough ]]; do
            find "$WORK/box" -type f -size -69k >>"$WORK/found" 2>/dev/null || true
            echo >>"$WORK/rounds"
        done
    }
    in_background look
    await test -s "$WORK/rounds"
    for round in 1 2 3; do
        rm -r "$WORK/box/tree"
        snapshot restore "$WORK/box" good >/dev/null
        du -a --apparent-size "$WORK/box/tree" >/dev/null
        same_tree "$WORK/copy/tree" "$WORK/box/tree"
    done
    touch "$WORK/enough"
    wait "${BACKGROUND[0]}"
    same "$(cat "$WORK/found")" ''
    detach box
    check_full box
}

# Whoever is killed, each path is as it was or as it is to be.
case_a_restore_that_is_killed_leaves_each_path_old_or_new() {
    local round place client
    new_archive box
    attach box
    for place in 1 2 3 4; do
        mkdir "$WORK/box/$place"
        seq 300 | split -a 4 -l 1 - "$WORK/box/$place/f"
    done
    cp -a "$WORK/box" "$WORK/new"
    snapshot create "$WORK/box" good >/dev/null
    old_or_new() {
        for place in 1 2 3 4; do
            diff -r "$WORK/old/$place" "$WORK/box/$place" >/dev/null 2>&1 || same_tree "$WORK/new/$place" "$WORK/box/$place"
        done
    }
    for round in 1 2 3 4 5 6; do
        for place in 1 2 3 4; do
            rm -r "${WORK:?}/box/$place"
            mkdir "$WORK/box/$place"
            echo "$round" >"$WORK/box/$place/only"
        done
        rm -rf "$WORK/old"
        cp -a "$WORK/box" "$WORK/old"
        lockbox snapshot restore "$WORK/box" good >"$WORK/answer" 2>&1 </dev/null &
        client=$!
        # As soon as one of them is there: within the work.
        await test -e "$WORK/box/$((round % 3 + 1))/faaaa"
        # The client may have ended by itself before its signal comes.
        case $round in
        1 | 2) kill -9 "$client" 2>/dev/null || true ;;
        3 | 4) kill -INT "$client" 2>/dev/null || true ;;
        *) kill_daemon box ;;
        esac
        wait "$client" || true
        if ((round > 4)); then
            attach box
        fi
        old_or_new
        # The next one waits for what is still taken back, and removes what was left.
        snapshot restore "$WORK/box" good >/dev/null
        same_tree "$WORK/new" "$WORK/box"
    done
    # Two at once take turns.
    snapshot restore "$WORK/box" good >"$WORK/answer" &
    client=$!
    snapshot restore "$WORK/box" good >/dev/null
    wait "$client" || fail "another restore came between"
    same_tree "$WORK/new" "$WORK/box"
    detach box
    check_full box
}

case_a_restore_goes_by_who_may() {
    local home point
    need_user
    home=$(mktemp -d "$WORK/home.XXXXXX")
    point=$home/point
    cp "$PASSFILE" "$home/passphrase"
    mkdir "$point"
    chown -R "$TEST_USER:" "$home"
    as_user lockbox create --weak-kdf --kdf-memory 1 --passfile "$home/passphrase" "$home/box.lbx"
    as_user lockbox mount --passfile "$home/passphrase" "$home/box.lbx" "$point"
    as_user sh -c "mkdir '$point/docs' && echo mine >'$point/docs/file'"
    snapshot create "$point" kept >/dev/null
    as_user rm -r "$point/docs"
    # A user's daemon has root rename nothing.
    expect 2 'only that user restores there' snapshot restore "$point" kept docs
    same "$(snapshot diff "$point" kept)" "$(printf 'D docs\nD docs/file')"
    as_user lockbox snapshot restore "$point" kept docs >/dev/null
    same "$(as_user cat "$point/docs/file")" mine
    same "$(as_user stat -c %U "$point/docs")" "$TEST_USER"
    as_user lockbox umount "$point"
    new_archive box
    attach box
    snapshot create "$WORK/box" kept >/dev/null
    reattach box ro
    expect 2 'mounted read-only' snapshot restore "$WORK/box" kept
    detach box
}

# Many differences with long names: more than the sockets and the pipe take.
many_differences() {
    new_archive box
    attach box
    lockbox snapshot create "$WORK/box" good </dev/null
    python3 - "$WORK/box" <<'PYTHON'
import sys
for n in range(5000):
    open(f"{sys.argv[1]}/{n:0120}", "w").close()
PYTHON
}

case_differences_in_a_mount_are_told_to_who_reads_slowly() {
    many_differences
    mkfifo "$WORK/pipe"
    # Both ways, so that opening it waits for nobody; what is read from has an end.
    exec 7<>"$WORK/pipe"
    in_background lockbox snapshot diff "$WORK/box" good </dev/null >"$WORK/pipe" 7<&-
    exec 8<"$WORK/pipe" 7<&-
    # By its clock, the daemon has lived longer than the 5 seconds that it waits for who reads nothing that was asked for.
    await_looks "$(daemon_of "$WORK/box.lbx")" 14
    cat <&8 >"$WORK/told"
    exec 8<&-
    wait "${BACKGROUND[-1]}"
    same "$(grep -c '^A ' "$WORK/told")" 5000
    detach box
}

case_a_comparison_whose_reader_sleeps_keeps_no_mount_and_nothing_deleted() {
    many_differences
    head -c 300000 /dev/urandom >"$WORK/box/large"
    mkfifo "$WORK/pipe"
    # Both ways: neither end waits for the other one to be opened.
    exec 7<>"$WORK/pipe"
    in_background lockbox snapshot diff "$WORK/box" good </dev/null >"$WORK/pipe" 2>"$WORK/said"
    # The comparison is over when something is told.
    read -r -u 7
    detach box
    attach box
    detach box
    exec 7<&-
    check_full box
}
