# Snapshots of mounted archives: taken, listed, removed and pruned through the daemon.
# shellcheck shell=bash disable=SC2317,SC2164

# Without a passphrase: the daemon has the key.
snapshot() {
    lockbox snapshot "$@" </dev/null
}

names() {
    snapshot ls --json "$1" | sed 's/.*"name":"\([^"]*\)".*/\1/' | tr '\n' ' '
}

# Lines with their number, as fast as the mount takes them, each of 100 bytes, into a file that stays open, and others beside it, until the
# third file is there.
write_on() {
    local n=0
    exec 7>>"$1/log"
    while [[ ! -e $3 ]]; do
        n=$((n + 1))
        printf '%099d\n' "$n" >&7
        if ((n % 100 == 0)); then
            head -c $((n % 90000)) /dev/zero >"$1/of$((n / 100 % 50))"
            echo "$n" >"$2.new"
            mv "$2.new" "$2"
        fi
    done
}

beyond() {
    (($(cat "$WORK/count") > $1))
}

case_a_snapshot_of_a_living_mount_has_what_was_written_before_it() {
    local round before lines
    new_archive box
    attach box
    mkdir "$WORK/box/still"
    head -c 3000000 /dev/urandom >"$WORK/box/still/large"
    seq 1000 | split -l 10 - "$WORK/box/still/small"
    ln "$WORK/box/still/large" "$WORK/box/still/link"
    cp -a "$WORK/box/still" "$WORK/copy"
    in_background write_on "$WORK/box" "$WORK/count" "$WORK/enough"
    await test -s "$WORK/count"
    for round in 1 2 3; do
        before=$(cat "$WORK/count")
        same "$(snapshot create "$WORK/box" "round $round")" "round $round"
        echo "$before" >"$WORK/before$round"
        await beyond "$before"
    done
    rm -rf "$WORK/box/still"
    # By the name of the archive as well.
    same "$(snapshot create "$WORK/box.lbx" last)" last
    # Killed, it could leave a program with an open file in the mount.
    touch "$WORK/enough"
    wait "${BACKGROUND[0]}"
    same "$(names "$WORK/box")" "round 1 round 2 round 3 last "
    lockbox status --json "$WORK/box" | shows '"snapshots":4' || fail "status counts others"
    lockbox status --all "$WORK/box" | shows -E '^Snapshots +4, the newest of 20'
    detach box
    lockbox info --json --passfile "$PASSFILE" "$WORK/box.lbx" | shows '"snapshots":4'
    check_full box
    for round in 1 2 3; do
        lockbox extract --privileges --passfile "$PASSFILE" --snapshot "round $round" --to "$WORK/out$round" "$WORK/box.lbx"
        same_tree "$WORK/copy" "$WORK/out$round/still"
        # The whole beginning of what was written, at least what was there when the snapshot was asked for.
        lines=$(wc -l <"$WORK/out$round/log")
        before=$(cat "$WORK/before$round")
        ((lines >= before)) || fail "the snapshot has $lines lines of $before"
        seq "$lines" | xargs printf '%099d\n' | cmp - "$WORK/out$round/log"
    done
    lockbox ls --passfile "$PASSFILE" --snapshot last "$WORK/box.lbx" >"$WORK/listed"
    ! grep -q still "$WORK/listed" || fail "what was deleted before is in the snapshot"
}

# One write to an open file, which only the kernel has so far, and the snapshot: the order that the manual promises.
case_what_the_kernel_caches_is_in_a_snapshot() {
    local round
    new_archive box
    attach box sync=never
    exec 7>>"$WORK/box/file"
    for round in 1 2 3; do
        echo "of round $round" >&7
        snapshot create "$WORK/box" "$round" >"$WORK/name"
        echo "after round $round" >&7
    done
    exec 7>&-
    kill_daemon box
    for round in 1 2 3; do
        same "$(lockbox cat --passfile "$PASSFILE" --snapshot "$round" "$WORK/box.lbx" file | tail -n 1)" "of round $round"
    done
}

case_a_snapshot_that_was_answered_survives_kill_9() {
    local round
    new_archive box
    for round in 1 2 3 4 5; do
        attach box
        echo "$round" >"$WORK/box/file"
        head -c 5000000 /dev/urandom >"$WORK/box/large"
        snapshot create "$WORK/box" "kept $round" >"$WORK/name"
        kill_daemon box
        attach box
        same "$(snapshot ls "$WORK/box" | wc -l)" "$round"
        detach box
        same "$(lockbox cat --passfile "$PASSFILE" --snapshot "kept $round" "$WORK/box.lbx" file)" "$round"
    done
    attach box
    snapshot rm "$WORK/box" 'kept 2' 'kept [45]'
    kill_daemon box
    attach box
    same "$(names "$WORK/box")" "kept 1 kept 3 "
    detach box
    check_full box
}

# Each of them alone gives nothing back.
case_what_two_snapshots_of_a_mount_show_is_held_by_both_together() {
    new_archive box
    attach box
    head -c 20000000 /dev/urandom >"$WORK/box/large"
    snapshot create "$WORK/box" one >"$WORK/name"
    snapshot create "$WORK/box" other >"$WORK/name"
    rm "$WORK/box/large"
    snapshot rm --json --dry-run "$WORK/box" '*' | sed 's/.*"held_bytes":\([0-9]*\).*/\1/' >"$WORK/held"
    same "$(awk '{ print ($1 >= 20000000) }' "$WORK/held" | tr '\n' ' ')" '0 0 1 '
    same "$(names "$WORK/box")" 'one other '
    snapshot ls "$WORK/box.lbx" other | shows '^1 snapshot; removing it frees [0-9]* bytes$'
    snapshot prune --dry-run --keep-last 1 "$WORK/box" | shows '^1 snapshot; removing it frees [0-9]* bytes$'
    detach box
}

# Reads a member of an object of JSON.
member() {
    sed "s/.*\"$1\":\([0-9]*\).*/\1/"
}

case_df_status_info_and_the_list_agree_on_what_snapshots_hold() {
    local held shown
    new_archive box
    attach box
    lockbox status --json "$WORK/box" | shows '"snapshots_held_bytes":0'
    head -c 20000000 /dev/urandom >"$WORK/box/large"
    head -c 3000000 /dev/urandom >"$WORK/box/stays"
    snapshot create "$WORK/box" one >"$WORK/name"
    snapshot create "$WORK/box" other >"$WORK/name"
    rm "$WORK/box/large"
    lockbox purge "$WORK/box"
    held=$(snapshot ls --json "$WORK/box" '*' | tail -n 1 | member held_bytes)
    ((held > 20000000 && held < 21000000))
    lockbox status --json "$WORK/box" >"$WORK/status"
    same "$(member snapshots_held_bytes <"$WORK/status")" "$held"
    lockbox status --all "$WORK/box" | shows -E '^Snapshots +2, the newest of .* UTC, 20[0-9]{6} bytes held$'
    # What df calls used is what the archive has in use, with what snapshots hold.
    shown=$(stat --file-system --format '%b %f %S' "$WORK/box" | awk '{ print ($1 - $2) * $3 }')
    ((shown >= held + 3000000 && shown - $(member used_bytes <"$WORK/status") < 1000000))
    detach box
    lockbox info --json --passfile "$PASSFILE" "$WORK/box.lbx" >"$WORK/info"
    same "$(member snapshots_held_bytes <"$WORK/info")" "$held"
    same "$(snapshot ls --json --passfile "$PASSFILE" "$WORK/box.lbx" '*' | tail -n 1 | member held_bytes)" "$held"
    ((shown - $(member used_bytes <"$WORK/info") < 1000000))
}

case_what_programs_renamed_is_told_as_renamed() {
    new_archive box
    attach box
    mkdir -p "$WORK/box/dir/deep"
    echo one | tee "$WORK/box/dir/deep/file" >"$WORK/box/log"
    echo kept >"$WORK/box/kept"
    snapshot create "$WORK/box" before >"$WORK/name"
    mv "$WORK/box/dir" "$WORK/box/$(printf 'new\ndir')"
    echo more >>"$WORK/box/$(printf 'new\ndir')/deep/file"
    echo more >>"$WORK/box/log"
    mv "$WORK/box/log" "$WORK/box/log.1"
    ln "$WORK/box/kept" "$WORK/box/second"
    snapshot create "$WORK/box" after >"$WORK/name"
    detach box
    same "$(snapshot diff --passfile "$PASSFILE" "$WORK/box.lbx" before after)" \
        $'RM log -> log.1\nR dir -> new\\x0adir\nM new\\x0adir/deep/file\nA second'
    snapshot diff --json --passfile "$PASSFILE" "$WORK/box.lbx" before >"$WORK/told"
    grep -qF '{"change":"renamed","changed":true,"from":"log","path":"log.1"}' "$WORK/told"
    grep -qF '{"change":"renamed","changed":false,"from":"dir","path":"new\ndir"}' "$WORK/told"
}

# What a removed snapshot held is freed in the background, without another word.
case_removing_a_snapshot_of_a_mount_frees_what_it_held() {
    local before
    new_archive box
    LOCKBOX_TEST_CLOCK=10 attach box
    head -c 40000000 /dev/urandom >"$WORK/box/large"
    snapshot create "$WORK/box" "$(printf 'odd\n\377 name')" >"$WORK/name"
    same "$(printf 'odd\n\377 name\n' | od -c)" "$(od -c "$WORK/name")"
    snapshot ls --json "$WORK/box" | shows '"name_hex":"6f64640aff206e616d65"'
    rm "$WORK/box/large"
    lockbox purge "$WORK/box"
    snapshot ls --json "$WORK/box" | sed 's/.*"held_bytes":\([0-9]*\).*/\1/' | awk '{ exit !($1 >= 40000000) }'
    before=$(used)
    expect 2 "has no snapshot 'other'" snapshot rm "$WORK/box" "$(printf 'odd\n\377 name')" other
    same "$(snapshot ls "$WORK/box" | wc -l)" 1
    snapshot rm "$WORK/box" "$(printf 'odd\n\377 name')"
    same "$(snapshot ls "$WORK/box")" ''
    await freed $((before - 39000000))
    detach box
    check_full box
}

# Whoever is in it or has something of it open gets ESTALE for what the kernel does not have, and keeps nothing from being freed.
case_a_snapshot_that_is_removed_under_its_users_is_gone() {
    local before
    new_archive box
    LOCKBOX_TEST_CLOCK=10 attach box
    mkdir "$WORK/box/dir"
    echo kept >"$WORK/box/dir/file"
    head -c 30000000 /dev/urandom >"$WORK/box/dir/large"
    snapshot create "$WORK/box" kept >/dev/null
    snapshot create "$WORK/box" other >/dev/null
    echo now >"$WORK/box/dir/file"
    rm "$WORK/box/dir/large"
    snapshot rm "$WORK/box" other
    lockbox purge "$WORK/box"
    before=$(used)
    mkfifo "$WORK/go"
    cat >"$WORK/hold.py" <<'PYTHON'
import errno
import os
import sys

place, go, ready = sys.argv[1:]
os.chdir(place + "/dir")
file = os.open("large", os.O_RDONLY)
directory = os.open(".", os.O_RDONLY)
assert len(os.pread(file, 10, 0)) == 10
open(ready, "w").close()
# Until the snapshot is gone. To the end: a writer that comes behind a reader which has left would be killed.
open(go).read()


def stale(what, call):
    try:
        call()
    except OSError as error:
        assert error.errno == errno.ESTALE, (what, error)
        return
    raise AssertionError(what + " is answered")


stale("content", lambda: os.pread(file, 4096, 20_000_000))
stale("a listing", lambda: os.listdir(directory))
stale("a name", lambda: os.stat("never looked up"))
PYTHON
    in_background python3 "$WORK/hold.py" "$WORK/box/.snapshots/kept" "$WORK/go" "$WORK/ready"
    await test -e "$WORK/ready"
    snapshot rm "$WORK/box" kept
    await test ! -e "$WORK/box/.snapshots/kept"
    await freed $((before - 29000000))
    echo >"$WORK/go"
    wait "${BACKGROUND[0]}" || fail "who had something of it open was answered otherwise"
    same "$(cat "$WORK/box/dir/file")" now
    detach box
    check_full box
}

used() {
    lockbox status --json "$WORK/box" | sed 's/.*"used_bytes":\([0-9]*\).*/\1/'
}

freed() {
    (($(used) < $1))
}

case_snapshots_of_a_mount_are_pruned_by_rules() {
    local number
    new_archive box
    attach box
    for number in $(seq 1 70); do
        snapshot create "$WORK/box" "number $number" >"$WORK/name"
    done
    # More than fit into one answer.
    same "$(snapshot ls "$WORK/box" | wc -l)" 70
    expect 1 'required' snapshot prune "$WORK/box"
    expect 1 'not in 1' snapshot prune --keep-last 0 "$WORK/box"
    snapshot prune --dry-run --keep-last 2 --keep-yearly 1 "$WORK/box" >"$WORK/plan"
    same "$(grep -c '^remove ' "$WORK/plan")" 68
    grep -q '^keep .* number 70  (last, yearly)$' "$WORK/plan"
    same "$(snapshot ls "$WORK/box" | wc -l)" 70
    same "$(snapshot rm --json "$WORK/box" 'number [12]' | sed 's/.*\("held_bytes":[^,]*\),.*\("name":[^,]*\),.*/\1 \2/')" \
        $'"held_bytes":null "name":"number 1"\n"held_bytes":null "name":"number 2"'
    same "$(snapshot create --json "$WORK/box" 'number 71')" '{"name":"number 71"}'
    snapshot rm "$WORK/box" 'number 71'
    snapshot prune --json --keep-last 2 "$WORK/box.lbx" >"$WORK/plan"
    same "$(grep -c '"kept":false' "$WORK/plan")" 66
    same "$(names "$WORK/box")" "number 69 number 70 "
    detach box
    lockbox snapshot prune --passfile "$PASSFILE" --keep-last 1 "$WORK/box.lbx" >"$WORK/plan"
    same "$(grep -c '^remove .* number 69$' "$WORK/plan")" 1
    check_full box
    attach box
    same "$(names "$WORK/box")" "number 70 "
}

case_what_cannot_be_done_to_snapshots_of_a_mount_says_why() {
    new_archive box
    attach box
    snapshot create "$WORK/box" other >"$WORK/name"
    snapshot create "$WORK/box" kept >"$WORK/name"
    expect 2 "has a snapshot 'kept' already" snapshot create "$WORK/box" kept
    expect 2 'no slash' snapshot create "$WORK/box" a/b
    expect 2 'name of a scheduled snapshot' snapshot create "$WORK/box" auto-2026-11-23T05-42-03Z
    expect 2 'is not the mount point' snapshot ls "$WORK"
    reattach box ro
    same "$(names "$WORK/box")" "other kept "
    expect 2 'mounted read-only' snapshot create "$WORK/box" more
    expect 2 'mounted read-only' snapshot rm "$WORK/box" kept
    expect 2 'mounted read-only' snapshot prune --keep-last 1 "$WORK/box"
    snapshot prune --dry-run --keep-last 1 "$WORK/box" >"$WORK/plan"
    detach box
    attach box snapshot=kept
    same "$(names "$WORK/box.lbx")" "other kept "
    expect 2 "snapshot 'kept' is mounted" snapshot create "$WORK/box" more
    detach box
}

# Root acts on the mount of a user, by its mount point; no other user does.
case_root_takes_snapshots_of_a_users_mount() {
    local home point
    need_user
    home=$(mktemp -d "$WORK/home.XXXXXX")
    point=$home/point
    cp "$PASSFILE" "$home/passphrase"
    mkdir "$point"
    chown -R "$TEST_USER:" "$home"
    as_user lockbox create --weak-kdf --kdf-memory 1 --passfile "$home/passphrase" "$home/box.lbx"
    as_user lockbox mount --passfile "$home/passphrase" "$home/box.lbx" "$point"
    as_user sh -c "echo mine >'$point/file'"
    same "$(snapshot create "$point" 'of root')" 'of root'
    same "$(as_user lockbox snapshot create "$point" 'of the user')" 'of the user'
    same "$(names "$point")" "of root of the user "
    expect 2 'was mounted by user .*: only .* and root may send requests to its daemon' setpriv --reuid nobody --clear-groups lockbox snapshot ls "$point"
    snapshot rm "$point" 'of root'
    same "$(as_user lockbox snapshot ls "$point" | wc -l)" 1
    as_user lockbox umount "$point"
}

# The first comes with the first change, the next one not before the hour is over; rules and prefix decide what is removed (unit tests have the clock).
case_a_mount_takes_snapshots_by_itself() {
    new_archive box
    expect 1 'snapshots= takes' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE,snapshots=hourly:1,dayly:3"
    attach box
    echo content >"$WORK/box/prepared"
    snapshot create "$WORK/box" mine >"$WORK/name"
    detach box
    attach box 'snapshots=hourly:24,daily:7,noexec'
    lockbox status --all "$WORK/box" | shows -E '^Snapshot schedule +hourly:24,daily:7; the next with the first change after 20'
    lockbox status --json "$WORK/box" | shows '"snapshot_schedule":{"failure":null,"next":"20[^"]*","rules":"hourly:24,daily:7"}'
    # Looked at once a second; nothing has changed since the one that a person took.
    await_looks "$(daemon_of "$WORK/box.lbx")" 4 snapshots
    same "$(names "$WORK/box")" "mine "
    # One change: a snapshot between the creation of a file and its first write would have an empty one.
    mv "$WORK/box/prepared" "$WORK/box/file"
    await has_automatic
    same "$(cat "$WORK/box/file")" content
    echo more >"$WORK/box/file"
    lockbox snapshot ls "$WORK/box" >"$WORK/listed"
    same "$(wc -l <"$WORK/listed")" 2
    detach box
    lockbox extract --passfile "$PASSFILE" --snapshot "$(sed -n 's/.* \(auto-.*Z\)$/\1/p' "$WORK/listed")" --to "$WORK/out" "$WORK/box.lbx"
    same "$(cat "$WORK/out/file")" content
    check_full box
}

has_automatic() {
    names "$WORK/box" | shows 'auto-20..-..-..T..-..-..Z'
}

case_a_purge_takes_the_snapshots_of_a_mount_when_it_is_told_to() {
    new_archive box
    attach box
    head -c 3000000 /dev/urandom >"$WORK/box/large"
    snapshot create "$WORK/box" one >/dev/null
    rm "$WORK/box/large"
    snapshot create "$WORK/box" two >/dev/null
    lockbox purge "$WORK/box" </dev/null
    same "$(names "$WORK/box")" "one two "
    lockbox purge --snapshots "$WORK/box" </dev/null
    same "$(names "$WORK/box")" ""
    detach box
    check_full box
    lockbox info --json --passfile "$PASSFILE" "$WORK/box.lbx" >"$WORK/info"
    grep -q '"snapshots":0' "$WORK/info"
    (($(sed 's/.*"used_bytes":\([0-9]*\).*/\1/' "$WORK/info") < 1000000)) || fail "what they showed is still there"
}
