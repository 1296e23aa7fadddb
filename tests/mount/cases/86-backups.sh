# Backups of archives, mounted and not, that are read, brought up to date, interrupted and killed.
# shellcheck shell=bash disable=SC2317,SC2164

# Without a passphrase: the daemon has the key.
backup() {
    lockbox backup "$@" </dev/null
}

# Numbers that rise, and what grows and goes beside them, until the third file is there.
write_on() {
    local n=0
    while [[ ! -e $3 ]]; do
        n=$((n + 1))
        echo "$n" >"$1/both/new"
        ln -f "$1/both/new" "$1/both/newer"
        mv "$1/both/new" "$1/both/one"
        head -c $((n * 7919 % 200000)) /dev/urandom >"$1/of$((n % 50))"
        echo "$n" >"$2.new"
        mv "$2.new" "$2"
    done
}

beyond() {
    (($(cat "$WORK/count") > $1))
}

case_a_backup_of_a_mount_that_is_written_is_one_moment() {
    local round before said
    new_archive box
    attach box
    mkdir "$WORK/box/both" "$WORK/box/still"
    head -c 3000000 /dev/urandom >"$WORK/box/still/large"
    seq 1000 | split -l 10 - "$WORK/box/still/small"
    cp -a "$WORK/box/still" "$WORK/copy"
    in_background write_on "$WORK/box" "$WORK/count" "$WORK/enough"
    await test -s "$WORK/count"
    for round in 1 2 3 4; do
        before=$(cat "$WORK/count")
        # By the mount point, and by the archive's name.
        if ((round % 2)); then said=$WORK/box; else said=$WORK/box.lbx; fi
        backup --verify --json "$said" "$WORK/copy.lbx" >"$WORK/said"
        if ((round == 1)); then grep -q '"whole":true' "$WORK/said"; else grep -q '"whole":false' "$WORK/said"; fi
        lockbox cat --passfile "$PASSFILE" "$WORK/copy.lbx" both/one >"$WORK/one" 2>"$WORK/told"
        grep -q 'this is a backup: the archive as it was at commit' "$WORK/told"
        (($(cat "$WORK/one") >= before)) || fail "what was there before is not in the backup"
        lockbox check --full --passfile "$PASSFILE" "$WORK/copy.lbx"
        lockbox extract --privileges --passfile "$PASSFILE" --to "$WORK/out$round" "$WORK/copy.lbx" 2>/dev/null
        same_tree "$WORK/copy" "$WORK/out$round/still"
        await beyond "$before"
    done
    touch "$WORK/enough"
    wait "${BACKGROUND[0]}"
    backup "$WORK/box" - >"$WORK/piped.lbx"
    detach box
    lockbox extract --privileges --passfile "$PASSFILE" --to "$WORK/outpiped" "$WORK/piped.lbx" 2>/dev/null
    lockbox extract --privileges --passfile "$PASSFILE" --to "$WORK/outbox" "$WORK/box.lbx"
    diff -r "$WORK/outbox" "$WORK/outpiped"
    same_tree "$WORK/outbox/both" "$WORK/outpiped/both"
    # Read by a mount too; what is written to makes it an archive of its own.
    mkdir "$WORK/piped"
    attach piped ro
    diff -r "$WORK/outbox" "$WORK/piped"
    detach piped
    backup --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/piped.lbx"
    # By somebody else, who does not remember it as the archive.
    XDG_STATE_HOME=$WORK/others lockbox add --passfile "$PASSFILE" "$WORK/piped.lbx" "$WORK/said" 2>/dev/null
    ! backup --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/piped.lbx" 2>"$WORK/told" || fail "what was written is replaced"
    grep -q 'or a backup that was written to since; it was left unchanged' "$WORK/told"
    XDG_STATE_HOME=$WORK/others lockbox cat --passfile "$PASSFILE" "$WORK/piped.lbx" said >"$WORK/one" || fail "it was not left"
}

# Whether the command has begun, or is over.
asks() {
    pgrep --parent "$1" >/dev/null || ! kill -0 "$1" 2>/dev/null
}

kill_asking() {
    # shellcheck disable=SC2046
    kill -9 $(pgrep --parent "$1") "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}

# Neither the one who asks nor the daemon lives to the end.
case_a_backup_that_is_killed_shows_one_of_two_moments() {
    local round kill
    new_archive box
    attach box
    mkdir "$WORK/box/both"
    head -c 5000000 /dev/urandom >"$WORK/box/large"
    echo 0 >"$WORK/box/both/one"
    echo 0 >"$WORK/box/both/two"
    backup "$WORK/box" "$WORK/copy.lbx" >/dev/null
    for round in $(seq 12); do
        echo "$round" >"$WORK/box/both/one"
        head -c 5000000 /dev/urandom >"$WORK/box/of$((round % 2))"
        echo "$round" >"$WORK/box/both/two"
        in_background backup "$WORK/box" "$WORK/copy.lbx"
        kill=${BACKGROUND[-1]}
        await asks "$kill"
        perl -e "select(undef, undef, undef, $round * 0.008)"
        if ((round % 3 == 0)); then
            kill_daemon box
            wait "$kill" 2>/dev/null || true
            attach box
        else
            kill_asking "$kill"
        fi
        # The daemon notices that nobody waits, and lets the file go.
        await lockbox check --full --passfile "$PASSFILE" "$WORK/copy.lbx" >/dev/null 2>&1
        same "$(lockbox cat --passfile "$PASSFILE" "$WORK/copy.lbx" both/one 2>/dev/null)" \
            "$(lockbox cat --passfile "$PASSFILE" "$WORK/copy.lbx" both/two 2>/dev/null)"
    done
    backup --verify "$WORK/box" "$WORK/copy.lbx" >/dev/null
    # What the last round wrote without fsync may have gone with its daemon.
    same "$(lockbox cat --passfile "$PASSFILE" "$WORK/copy.lbx" both/one 2>/dev/null)" "$(cat "$WORK/box/both/one")"
    # A new file that was not finished has no name that counts, and goes with the next run.
    in_background backup "$WORK/box" "$WORK/other.lbx"
    await asks "${BACKGROUND[-1]}"
    kill_asking "${BACKGROUND[-1]}"
    backup "$WORK/box" "$WORK/other.lbx" >/dev/null
    lockbox check --full --passfile "$PASSFILE" "$WORK/other.lbx" >/dev/null
    detach box
}

# Nobody is to look for damage where there is none.
case_damage_of_a_backup_is_not_told_of_the_archive() {
    local from blocks
    new_archive box
    attach box
    head -c 3000000 /dev/urandom >"$WORK/box/large"
    backup "$WORK/box" "$WORK/copy.lbx" >/dev/null
    # Header, records and log stay, and name what is not there any more.
    blocks=$(($(stat -c %s "$WORK/copy.lbx") / 4096))
    dd if=/dev/zero of="$WORK/copy.lbx" bs=4096 seek=385 count=$((blocks - 385)) conv=notrunc status=none
    cp "$WORK/copy.lbx" "$WORK/damaged"
    echo more >"$WORK/box/more"
    for from in "$WORK/box" "$WORK/box.lbx"; do
        expect 12 "^lockbox: $WORK/copy.lbx: damaged backup: .*; make one under another name" backup "$from" "$WORK/copy.lbx"
    done
    detach box
    expect 12 "^lockbox: $WORK/copy.lbx: damaged backup: .*; make one under another name" \
        backup --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/copy.lbx"
    cmp "$WORK/copy.lbx" "$WORK/damaged"
    check_full box
}

# mount_of FILE|DIR: the mount point that `status` tells.
mount_of() {
    lockbox status --json "$1" | python3 -c 'import json, sys; print(json.load(sys.stdin)["mount_point"])'
}

case_a_backup_is_mounted_beside_its_archive() {
    local name
    new_archive box
    attach box
    echo before >"$WORK/box/file"
    backup "$WORK/box" "$WORK/copy.lbx" >/dev/null
    backup "$WORK/box" "$WORK/third.lbx" >/dev/null
    mkdir "$WORK/copy" "$WORK/third"
    attach copy ro
    # One that is written to is an archive of its own, with the same id.
    attach third accept-older
    echo after >"$WORK/box/file"
    echo third >"$WORK/third/file"
    same "$(cat "$WORK/box/file" "$WORK/copy/file" "$WORK/third/file" | tr '\n' ' ')" 'after before third '
    # Each daemon is found by its own file and its own mount point, and answers for that alone.
    for name in box copy third; do
        same "$(mount_of "$WORK/$name.lbx")" "$WORK/$name"
        same "$(mount_of "$WORK/$name")" "$WORK/$name"
    done
    same "$( (lockbox status --json || true) | grep -o "\"mount_point\": *\"$WORK/[a-z]*" | wc -l)" 3
    expect 13 "copy.lbx is in use: process $(daemon_of "$WORK/copy.lbx") serves it at $WORK/copy" \
        lockbox passwd --passfile "$PASSFILE" "$WORK/copy.lbx"
    mkdir "$WORK/again"
    expect 13 "already mounted at $WORK/third" mount.lockbox "$WORK/third.lbx" "$WORK/again" -o "passfile=$PASSFILE"
    lockbox snapshot create "$WORK/box.lbx" of-box
    lockbox snapshot create "$WORK/third.lbx" of-third
    same "$(lockbox snapshot ls --json "$WORK/box" | grep -o 'of-[a-z]*')" of-box
    same "$(lockbox snapshot ls --json "$WORK/third" | grep -o 'of-[a-z]*')" of-third
    expect 2 'read-only' lockbox snapshot create "$WORK/copy.lbx" of-copy
    detach third
    same "$(cat "$WORK/box/file" "$WORK/copy/file" | tr '\n' ' ')" 'after before '
    # What came to the name of a mounted archive is another file: each is found by its own mount, the name means the new one.
    mv "$WORK/third.lbx" "$WORK/copy.lbx"
    mount.lockbox "$WORK/copy.lbx" "$WORK/third" -o "passfile=$PASSFILE,accept-older,accept-fork"
    same "$(mount_of "$WORK/copy.lbx")" "$WORK/third"
    same "$(cat "$WORK/third/file" "$WORK/copy/file" | tr '\n' ' ')" 'third before '
    lockbox umount "$WORK/copy.lbx"
    ! mountpoint -q "$WORK/third" || fail "the mount of the new file is still there"
    lockbox umount "$WORK/copy"
    same "$(mount_of "$WORK/box.lbx")" "$WORK/box"
    detach box
    same "$(lockbox cat --passfile "$PASSFILE" --accept-older --accept-fork "$WORK/box.lbx" file)" after
}

# The one that is waited for is opened by what runs beside: opening a pipe waits for its reader.
into_pipe() {
    TMPDIR=$WORK/tmp exec lockbox backup --passfile "$PASSFILE" "$1" - >"$WORK/pipe"
}

case_a_backup_into_a_pipe_leaves_nothing_behind() {
    local said killed=$WORK/tmp/.lockbox.pipe-0123456789abcdef
    new_archive box
    attach box
    head -c 3000000 /dev/urandom >"$WORK/box/large"
    mkdir "$WORK/tmp"
    mkfifo "$WORK/pipe"
    for said in "$WORK/box" "$WORK/box.lbx"; do
        [[ $said == "$WORK/box" ]] || detach box
        # As a run leaves it that is killed while it makes or verifies the file.
        cp "$WORK/box.lbx" "$killed"
        in_background into_pipe "$said"
        exec 7<"$WORK/pipe"
        # More than what a pipe holds is still to come.
        head -c 1 <&7 >/dev/null
        same "$(ls -A "$WORK/tmp")" '' 'while it is written to the pipe'
        kill -9 "${BACKGROUND[-1]}"
        await gone "${BACKGROUND[-1]}"
        exec 7<&-
        same "$(ls -A "$WORK/tmp")" '' 'after it was killed'
    done
}

case_a_backup_goes_nowhere_but_into_its_own() {
    local before
    new_archive box
    attach box
    echo text >"$WORK/box/file"
    mkdir "$WORK/small"
    mount -t tmpfs -o size=4m none "$WORK/small"
    backup "$WORK/box" "$WORK/small/copy.lbx" >/dev/null
    head -c 6000000 /dev/urandom >"$WORK/box/large"
    ! backup "$WORK/box" "$WORK/small/copy.lbx" 2>"$WORK/told" || fail "there is no room"
    same "$(lockbox cat --passfile "$PASSFILE" "$WORK/small/copy.lbx" file 2>/dev/null)" text
    ! lockbox cat --passfile "$PASSFILE" "$WORK/small/copy.lbx" large >/dev/null 2>&1 || fail "half a moment"
    rm "$WORK/small/copy.lbx"
    ! backup "$WORK/box" "$WORK/small/copy.lbx" 2>"$WORK/told" || fail "there is no room"
    same "$(ls -A "$WORK/small")" ''
    umount "$WORK/small"
    ! backup "$WORK/box" "$WORK/box/within.lbx" 2>"$WORK/told" || fail "a backup within"
    grep -q 'lies in the archive that is to be backed up' "$WORK/told"
    echo precious >"$WORK/precious"
    ! backup "$WORK/box" "$WORK/precious" 2>"$WORK/told" || fail "a file was replaced"
    grep -q "precious: it is not an archive; it was left unchanged" "$WORK/told"
    same "$(cat "$WORK/precious")" precious
    new_archive other
    before=$(sha256sum <"$WORK/other.lbx")
    ! backup "$WORK/box" "$WORK/other.lbx" 2>"$WORK/told" || fail "an archive was replaced"
    grep -q 'another archive; it was left unchanged' "$WORK/told"
    same "$(sha256sum <"$WORK/other.lbx")" "$before"
    ! backup "$WORK/box" "$WORK/box.lbx" 2>"$WORK/told" || fail "the archive itself"
    detach box
    ! backup --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/box.lbx" 2>"$WORK/told" || fail "the archive itself"
    grep -q 'box.lbx is the archive itself' "$WORK/told"
}
