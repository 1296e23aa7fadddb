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
    await 30 test -s "$WORK/count"
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
        await 30 beyond "$before"
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
    grep -q 'or a backup that was written to since; it was left as it is' "$WORK/told"
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
    head -c 20000000 /dev/urandom >"$WORK/box/large"
    echo 0 >"$WORK/box/both/one"
    echo 0 >"$WORK/box/both/two"
    backup "$WORK/box" "$WORK/copy.lbx" >/dev/null
    for round in $(seq 12); do
        echo "$round" >"$WORK/box/both/one"
        head -c 5000000 /dev/urandom >"$WORK/box/of$((round % 4))"
        echo "$round" >"$WORK/box/both/two"
        in_background backup "$WORK/box" "$WORK/copy.lbx"
        kill=${BACKGROUND[-1]}
        await 30 asks "$kill"
        perl -e "select(undef, undef, undef, $round * 0.008)"
        if ((round % 3 == 0)); then
            kill_daemon box
            wait "$kill" 2>/dev/null || true
            attach box
        else
            kill_asking "$kill"
        fi
        # The daemon notices that nobody waits, and lets the file go.
        await 30 lockbox check --full --passfile "$PASSFILE" "$WORK/copy.lbx" >/dev/null 2>&1
        same "$(lockbox cat --passfile "$PASSFILE" "$WORK/copy.lbx" both/one 2>/dev/null)" \
            "$(lockbox cat --passfile "$PASSFILE" "$WORK/copy.lbx" both/two 2>/dev/null)"
    done
    backup --verify "$WORK/box" "$WORK/copy.lbx" >/dev/null
    same "$(lockbox cat --passfile "$PASSFILE" "$WORK/copy.lbx" both/one 2>/dev/null)" 12
    # A new file that was not finished has no name that counts, and goes with the next run.
    in_background backup "$WORK/box" "$WORK/other.lbx"
    await 30 asks "${BACKGROUND[-1]}"
    kill_asking "${BACKGROUND[-1]}"
    backup "$WORK/box" "$WORK/other.lbx" >/dev/null
    lockbox check --full --passfile "$PASSFILE" "$WORK/other.lbx" >/dev/null
    detach box
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
    grep -q "precious: it is no archive; it was left as it is" "$WORK/told"
    same "$(cat "$WORK/precious")" precious
    new_archive other
    before=$(sha256sum <"$WORK/other.lbx")
    ! backup "$WORK/box" "$WORK/other.lbx" 2>"$WORK/told" || fail "an archive was replaced"
    grep -q 'another archive; it was left as it is' "$WORK/told"
    same "$(sha256sum <"$WORK/other.lbx")" "$before"
    ! backup "$WORK/box" "$WORK/box.lbx" 2>"$WORK/told" || fail "the archive itself"
    detach box
    ! backup --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/box.lbx" 2>"$WORK/told" || fail "the archive itself"
    grep -q 'box.lbx is the archive itself' "$WORK/told"
}
