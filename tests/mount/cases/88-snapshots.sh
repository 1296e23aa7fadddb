# Snapshots of an archive that is mounted between them, read by mounts and by commands.
# shellcheck shell=bash disable=SC2317,SC2164

snapshot() {
    local command=$1
    shift
    lockbox snapshot "$command" --passfile "$PASSFILE" "$WORK/box.lbx" "$@"
}

# Those with names that a line can hold.
files() {
    find "$WORK/box/tree" -path "$WORK/box/tree/odd" -prune -o -type f "$@" -print | LC_ALL=C sort
}

# Overwrites, cuts, removes and renames what there is, and adds to it; $1 is a number.
change_everything() {
    local top=$WORK/box/tree file
    files >"$WORK/files"
    files -size +100k | awk 'NR <= 20' | while read -r file; do
        head -c 100000 /dev/urandom | dd of="$file" bs=4096 seek=3 conv=notrunc status=none
    done
    files -size +8k | awk 'NR > 20 && NR <= 60' | xargs -r -d '\n' truncate -s 5000
    awk 'NR % 3 == 0 && NR < 400' "$WORK/files" | grep -v '/large$' | xargs -r -d '\n' rm -f
    rm -rf "$top/odd/"*"$1"*
    files | awk 'NR % 5 == 0 && NR < 300' | grep -v '/large$' | while read -r file; do
        setfattr -n user.changed -v "in round $1" "$file"
        mv "$file" "$file.moved$1"
    done
    fallocate --punch-hole --offset 10000 --length 500000 "$top/large"
    cp --reflink=auto "$top/large" "$top/copy$1"
    mkdir "$top/new$1"
    head -c 300000 /dev/urandom >"$top/new$1/file"
}

case_a_snapshot_shows_what_was_there() {
    local tree round name
    tree=$(source_tree)
    new_archive box
    attach box
    mkdir "$WORK/box/tree"
    cp -a "$tree/odd" "$WORK/box/tree/"
    find "$tree" -mindepth 1 -maxdepth 1 -type d ! -name odd | LC_ALL=C sort | awk 'NR <= 6' | xargs -I{} cp -a {} "$WORK/box/tree/"
    head -c 3000000 /dev/urandom >"$WORK/box/tree/large"
    for round in 1 2 3; do
        cp -a "$WORK/box" "$WORK/copy$round"
        detach box
        snapshot create "moment $round"
        attach box
        change_everything "$round"
    done
    detach box
    lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    for round in 3 1 2; do
        name="moment $round"
        case $round in
            1) lockbox compact --passfile "$PASSFILE" "$WORK/box.lbx" ;;
            2) lockbox key rekey --passfile "$PASSFILE" "$WORK/box.lbx" ;;
        esac
        attach box "snapshot=$name"
        same_tree "$WORK/copy$round" "$WORK/box"
        ! touch "$WORK/box/tree/large" 2>"$WORK/refused" || fail "a snapshot was written to"
        grep -q 'Read-only file system' "$WORK/refused"
        lockbox status "$WORK/box" --json | shows "snapshot=$name"
        expect 15 'mounted read-only' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o remount,rw
        detach box
        lockbox extract --privileges --passfile "$PASSFILE" --snapshot "$name" --to "$WORK/out$round" "$WORK/box.lbx"
        same_tree "$WORK/copy$round/tree" "$WORK/out$round/tree"
        rm -rf "$WORK/out$round"
    done
    snapshot rm 'moment 2'
    expect 2 "has no snapshot 'moment 2'" mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE,snapshot=moment 2"
    attach box 'snapshot=moment 1'
    same_tree "$WORK/copy1" "$WORK/box"
    detach box
    snapshot rm 'moment 3' 'moment 1'
    lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    lockbox compact --passfile "$PASSFILE" "$WORK/box.lbx"
}

# Killed at any moment: what is named is whole, and the next mount frees what is not.
case_a_killed_removal_is_ended_by_the_next_mount() {
    local round listed before
    new_archive box
    attach box
    # Six letters of 676 files each, four of which go.
    head -c 16224000 /dev/urandom | split -a 4 -b 4000 - "$WORK/box/small"
    detach box
    for round in 1 2 3 4; do
        snapshot create kept >/dev/null
        attach box
        rm -rf "$WORK"/box/small?"$(printf '%s' abcd | cut -c "$round")"*
        detach box
        before=$(lockbox info --json --passfile "$PASSFILE" "$WORK/box.lbx" | sed 's/.*"used_bytes":\([0-9]*\).*/\1/')
        # It makes eight writes or more.
        killed_at pwrite64 $((RANDOM % 8 + 1)) lockbox snapshot rm --passfile "$PASSFILE" "$WORK/box.lbx" kept
        listed=$(snapshot ls)
        [[ -z $listed ]] || snapshot rm kept
        LOCKBOX_TEST_CLOCK=10 attach box
        sync -f "$WORK/box"
        await freed "$before"
        detach box
        lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    done
    note "$KILLED of 4 removals were killed"
    ((KILLED > 0)) || fail 'no removal was killed'
}

freed() {
    (($(lockbox status --json "$WORK/box" | sed 's/.*"used_bytes":\([0-9]*\).*/\1/') < $1))
}

# One archive is mounted once, whatever of it: who has it is named, and nothing of the first mount changes.
case_an_archive_is_mounted_once_whatever_its_mounts_show() {
    local second
    new_archive box
    attach box
    echo before >"$WORK/box/file"
    lockbox snapshot create "$WORK/box" one >/dev/null
    lockbox snapshot create "$WORK/box" two >/dev/null
    echo after >"$WORK/box/file"
    mkdir "$WORK/second"
    second() {
        expect 13 "already mounted at $WORK/box by process" mount.lockbox "$WORK/box.lbx" "$WORK/second" -o "passfile=$PASSFILE${1:+,$1}"
        ! mountpoint -q "$WORK/second" || fail 'it was mounted twice'
    }
    second snapshot=one
    second ro
    same "$(cat "$WORK/box/file")" after
    echo still >"$WORK/box/file"
    detach box
    attach box snapshot=one
    second
    second snapshot=two
    second snapshot=one
    same "$(cat "$WORK/box/file")" before
    expect 2 'can only be read|mounted here, read-only' lockbox snapshot rm "$WORK/box" two
    detach box
    attach box
    same "$(cat "$WORK/box/file")" still
}
