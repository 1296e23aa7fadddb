# Backups of directories: an archive, in a file and in a store, with a snapshot of each run.
# shellcheck shell=bash disable=SC2317,SC2164

back_up() {
    lockbox backup --passfile "$PASSFILE" "$@"
}

# night N ARGUMENT...: backs up $WORK/tree to $DEST; keeps a copy of the tree, and the name of the snapshot in NIGHT[N].
night() {
    local said
    cp -a "$WORK/tree" "$WORK/night$1"
    said=$(back_up --json "${@:2}" "$WORK/tree" "$DEST")
    said=${said#*'"snapshot":"'}
    NIGHT[$1]=${said%%'"'*}
}

# The tree of a night is what a snapshot of $DEST shows, to a command and in a mount.
shows_night() {
    rm -rf "$WORK/out"
    lockbox extract --privileges --passfile "$PASSFILE" --snapshot "${NIGHT[$1]}" --to "$WORK/out" "$DEST"
    same_tree "$WORK/night$1" "$WORK/out/tree"
    diff -r "$WORK/night$1" "$WORK/at/.snapshots/${NIGHT[$1]}/tree"
}

case_three_nights_of_a_directory_are_pruned_and_restored() {
    local NIGHT=() DEST round
    export XDG_CACHE_HOME=$WORK/cache
    mkdir "$WORK/at"
    for DEST in "$WORK/b.lbx" "file://$WORK/store"; do
        rm -rf "$WORK"/night* "$WORK/tree"
        mkdir -p "$WORK/tree/letters"
        cp -r "$(dirname "$0")/cases" "$WORK/tree/cases"
        echo 'first draft' >"$WORK/tree/letters/draft"
        echo gone >"$WORK/tree/letters/gone"
        head -c 5000000 /dev/urandom >"$WORK/tree/large"
        create "$DEST"
        lockbox snapshot create --passfile "$PASSFILE" "$DEST" by-hand
        night 0
        night 1
        # Added, changed, deleted and renamed.
        echo 'second draft' >"$WORK/tree/letters/draft"
        rm "$WORK/tree/letters/gone"
        mv "$WORK/tree/large" "$WORK/tree/larger"
        ln "$WORK/tree/larger" "$WORK/tree/again"
        echo new >"$WORK/tree/new"
        night 2 --verify
        mv "$WORK/tree/letters" "$WORK/tree/old-letters"
        echo 'third draft' >"$WORK/tree/old-letters/draft"
        night 3 --keep-last 3
        lockbox snapshot ls --passfile "$PASSFILE" "$DEST" >"$WORK/list"
        for round in by-hand "${NIGHT[@]:1}"; do
            grep -q "  $round\$" "$WORK/list" || fail "$round is gone"
        done
        same 4 "$(wc -l <"$WORK/list")" "the first night was not pruned"
        lockbox snapshot diff --passfile "$PASSFILE" "$DEST" "${NIGHT[1]}" "${NIGHT[2]}" >"$WORK/diff"
        printf '%s\n' 'A tree/again' 'D tree/large' 'A tree/larger' 'M tree/letters/draft' 'D tree/letters/gone' 'A tree/new' |
            LC_ALL=C sort >"$WORK/expected"
        LC_ALL=C sort "$WORK/diff" | diff "$WORK/expected" -
        mount.lockbox "$DEST" "$WORK/at" -o "ro,passfile=$PASSFILE"
        shows_night 1
        shows_night 2
        shows_night 3
        diff -r "$WORK/tree" "$WORK/at/tree"
        # One file of the first night, by its name.
        cp "$WORK/at/.snapshots/${NIGHT[1]}/tree/letters/gone" "$WORK/back"
        same gone "$(cat "$WORK/back")"
        lockbox umount "$WORK/at"
        # The whole of the second night, in place.
        rm -rf "$WORK/tree"
        lockbox extract --privileges --passfile "$PASSFILE" --snapshot "${NIGHT[2]}" --to "$WORK" "$DEST"
        same_tree "$WORK/night2" "$WORK/tree"
        lockbox check --full --passfile "$PASSFILE" "$DEST"
        # And the next night goes on from there.
        rm -rf "$WORK/night3"
        night 3 --keep-last 1
        says_nothing lockbox snapshot diff --passfile "$PASSFILE" "$DEST" "${NIGHT[3]}"
        same 2 "$(lockbox snapshot ls --passfile "$PASSFILE" "$DEST" | wc -l)" 'only the newest and the one by hand are kept'
    done
}

case_a_backup_stays_on_its_file_system_and_prunes_nothing_when_it_misses_something() {
    local said
    create "$WORK/b.lbx"
    mkdir -p "$WORK/tree/other/below" "$WORK/tree/own"
    echo own >"$WORK/tree/own/file"
    echo hidden >"$WORK/tree/other/below/file"
    back_up "$WORK/tree" "$WORK/b.lbx"
    mount -t tmpfs -o size=1m tmpfs "$WORK/tree/other"
    echo mounted >"$WORK/tree/other/mounted"
    back_up --one-file-system "$WORK/tree" "$WORK/b.lbx"
    # Neither copied, nor taken for deleted.
    same hidden "$(lockbox cat --passfile "$PASSFILE" "$WORK/b.lbx" tree/other/below/file)"
    expect 2 'no such file' lockbox cat --passfile "$PASSFILE" "$WORK/b.lbx" tree/other/mounted
    back_up "$WORK/tree" "$WORK/b.lbx"
    same mounted "$(lockbox cat --passfile "$PASSFILE" "$WORK/b.lbx" tree/other/mounted)"
    umount "$WORK/tree/other"
    # A file that gives an error when it is read.
    echo readable >"$WORK/tree/broken"
    mount --bind /proc/self/mem "$WORK/tree/broken"
    rm "$WORK/tree/own/file"
    expect 2 'no snapshot was pruned, because not everything could be copied' back_up --keep-last 1 "$WORK/tree" "$WORK/b.lbx"
    same 4 "$(lockbox snapshot ls --passfile "$PASSFILE" "$WORK/b.lbx" | wc -l)" 'a snapshot, and none less'
    same own "$(lockbox cat --passfile "$PASSFILE" "$WORK/b.lbx" tree/own/file)" 'nothing is deleted'
    umount "$WORK/tree/broken"
    said=$(back_up --keep-last 1 "$WORK/tree" "$WORK/b.lbx")
    shows '3 snapshots pruned' <<<"$said"
    lockbox snapshot ls --passfile "$PASSFILE" "$WORK/b.lbx" >"$WORK/left"
    same 2 "$(wc -l <"$WORK/left")" 'the last complete run, and the last incomplete one'
    same 1 "$(grep -c ' backup-incomplete-\|^backup-incomplete-' "$WORK/left")"
}

case_monitoring_sees_a_mount_and_its_end() {
    local said
    new_archive box
    attach box
    said=$(lockbox status --check "$WORK/box")
    same 'LOCKBOX OK: 1 archive mounted' "$said"
    echo data >"$WORK/box/file"
    # It ends with 2 while a concurrent case has a dead mount.
    lockbox status --metrics >"$WORK/metrics" || same $? 2
    grep -qF "lockbox_mount_up{mount_point=\"$WORK/box\",archive=\"$WORK/box.lbx\"} 1" "$WORK/metrics"
    grep -qF "lockbox_mount_health{mount_point=\"$WORK/box\",archive=\"$WORK/box.lbx\"} 0" "$WORK/metrics"
    same '# EOF' "$(tail -n 1 "$WORK/metrics")"
    kill_daemon box
    said=$(lockbox status --check "$WORK/box") && fail 'a dead mount is healthy'
    same "LOCKBOX CRITICAL: $WORK/box: no daemon answers" "$said"
    umount -l "$WORK/box"
    said=$(lockbox status --check "$WORK/box.lbx") && fail 'a mount that is gone is healthy'
    shows '^LOCKBOX CRITICAL: .* is not mounted' <<<"$said"
}
