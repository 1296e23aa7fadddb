# Backups in object stores: a directory (file://) stands for one; what a real server says is the work of tests/campaign/versitygw.sh.
# shellcheck shell=bash disable=SC2317,SC2164

# Names of the objects below $STORE that match.
objects() {
    (cd "$STORE" && find . -type f -path "$1" | sort)
}

# prepare_store [BYTES]: an archive at $BOX with a tree and a large file, and the place for its backups.
prepare_store() {
    export XDG_CACHE_HOME=$WORK/cache
    STORE=$WORK/store
    URL=file://$STORE
    BOX=$WORK/a.lbx
    mkdir -p "$WORK/src"
    new_archive a
    cp -r "$(dirname "$0")/cases" "$WORK/src/tree"
    head -c "${1:-30000000}" /dev/urandom >"$WORK/src/large"
    lockbox add --passfile "$PASSFILE" "$BOX" "$WORK/src/tree" "$WORK/src/large"
}

back_up() {
    lockbox backup --passfile "$PASSFILE" "$@"
}

case_a_backup_in_an_object_store_is_made_brought_up_to_date_and_read() {
    local before after python=${READER_PYTHON:?set by tests/run.sh: a python with the packages of format-spec/reader}
    prepare_store
    back_up "$BOX" "$URL" | shows 'everything was copied'
    lockbox check --full --passfile "$PASSFILE" "$URL"
    mkdir "$WORK/out" "$WORK/dir"
    lockbox extract --passfile "$PASSFILE" "$URL" --to "$WORK/out"
    diff -r "$WORK/src" "$WORK/out"
    # What changed, and little more.
    echo new >"$WORK/src/new"
    lockbox add --passfile "$PASSFILE" "$BOX" "$WORK/src/new"
    before=$(du -sb "$STORE" | cut -f1)
    back_up --verify "$BOX" "$URL" | shows 'only the changes were copied'
    after=$(du -sb "$STORE" | cut -f1)
    ((after - before < 1000000)) || fail "$((after - before)) bytes for a small change"
    # A mount, which is written to meanwhile and whose daemon reaches no directory.
    attach a
    rm -r "$WORK/a/tree"
    echo more >"$WORK/a/more"
    lockbox backup "$WORK/a" "$URL" | shows 'only the changes were copied'
    echo later >"$WORK/a/more"
    lockbox backup --verify "$WORK/a" "$URL"
    # Read by a mount, beside its archive's.
    mount.lockbox "$URL" "$WORK/dir" -o "passfile=$PASSFILE"
    diff -r "$WORK/a" "$WORK/dir"
    ! touch "$WORK/dir/new" 2>/dev/null || fail "it can be written"
    lockbox umount "$WORK/dir"
    detach a
    # Back into a file, and that up to date again.
    back_up "$URL" "$WORK/back.lbx" | shows 'everything'
    back_up "$URL" "$WORK/back.lbx" | shows 'the changes were copied'
    same "$(lockbox cat --passfile "$PASSFILE" "$WORK/back.lbx" more)" later
    expect 2 'a web server can only be read' back_up "$BOX" https://example.org/a.lbx
    expect 19 'No such file' lockbox ls --passfile "$PASSFILE" "$URL/none"
    expect 11 'in a file, use its path' lockbox ls --passfile "$PASSFILE" "file://$BOX"
    # Who has the objects and the page about them has the archive.
    "$python" "$(dirname "$READER")/lockbox_bucket.py" "$STORE" "$WORK/together.lbx"
    same "$(lockbox cat --passfile "$PASSFILE" "$WORK/together.lbx" more)" later
    # Another archive's backup stays what it is.
    create "$WORK/b.lbx"
    expect 2 'another archive' back_up "$WORK/b.lbx" "$URL"
    same "$(lockbox cat --passfile "$PASSFILE" "$URL" more)" later
}

case_a_backup_into_a_store_that_is_killed_at_any_moment_leaves_the_one_before() {
    local i pid killed=0 before kills=${KILLS:-5}
    prepare_store 5000000
    back_up "$BOX" "$URL"
    cp -r "$WORK/src" "$WORK/was"
    # How many end before the signal comes is chance.
    for i in $(seq 1 $((12 * kills))); do
        ((killed < kills)) || break
        head -c 3000000 /dev/urandom >"$WORK/src/large$((i % 8))"
        lockbox add --force --passfile "$PASSFILE" "$BOX" "$WORK/src/large$((i % 8))"
        before=$(files)
        lockbox backup --passfile "$PASSFILE" "$BOX" "$URL" >/dev/null 2>&1 &
        pid=$!
        # When it has said that it came, when it writes, and near its end.
        await far_enough $((before + i % 3)) "$pid"
        kill -9 "$pid" 2>/dev/null && killed=$((killed + 1))
        wait "$pid" || true
        rm -rf "$WORK/out"
        mkdir "$WORK/out"
        lockbox extract --passfile "$PASSFILE" "$URL" --to "$WORK/out"
        # The one before or, when it was done, this one.
        diff -r "$WORK/was" "$WORK/out" >/dev/null || diff -r "$WORK/src" "$WORK/out"
        rm -r "$WORK/was"
        cp -r "$WORK/out" "$WORK/was"
    done
    ((killed == kills)) || fail "only $killed were killed while they worked"
    # The same machine goes on by itself.
    back_up --verify "$BOX" "$URL"
    rm -rf "$WORK/out"
    mkdir "$WORK/out"
    lockbox extract --passfile "$PASSFILE" "$URL" --to "$WORK/out"
    diff -r "$WORK/src" "$WORK/out"
    lockbox check --full --passfile "$PASSFILE" "$URL"
}

files() {
    find "$STORE" -type f | wc -l
}

far_enough() {
    (($(files) > $1)) || gone "$2"
}

# Each object of each kind is gone, cut and altered in remote/src/bucket/tests/inventory.rs, a segment in cli/tests/program/elsewhere.rs too.
case_objects_that_are_gone_or_cut_are_told_and_links_lead_nowhere() {
    local object kept failed=0 segment=
    prepare_store
    back_up "$BOX" "$URL"
    kept=$WORK/kept
    for object in $(objects '*'); do
        cp "$STORE/$object" "$kept"
        # Of the two records the older one says that a writer came, and nobody reads it.
        [[ $object == "$(objects './*/log/*' | tail -1)" ]] && continue
        if [[ $object == */seg/* && -z $segment ]]; then
            segment=$object
            rm "$STORE/$object"
            expect 12 '' lockbox check --full --passfile "$PASSFILE" "$URL"
            # It may end with what the archive has no use for.
            head -c 1 "$kept" >"$STORE/$object"
            expect 12 '' lockbox check --full --passfile "$PASSFILE" "$URL"
        fi
        # What somebody else may put there is not followed.
        rm "$STORE/$object"
        ln -s "$kept" "$STORE/$object"
        ! lockbox check --full --passfile "$PASSFILE" "$URL" >/dev/null 2>&1 || fail "$object was followed"
        rm "$STORE/$object"
        cp "$kept" "$STORE/$object"
        failed=$((failed + 1))
    done
    [[ -n $segment ]] || fail 'no segment'
    ((failed > 4)) || fail "only $failed objects"
    lockbox check --full --passfile "$PASSFILE" "$URL"
    # A directory that is a link now.
    mv "$STORE"/*/log "$WORK/elsewhere"
    ln -s "$WORK/elsewhere" "$(dirname "$STORE"/*/seg)/log"
    ! back_up "$BOX" "$URL" >/dev/null 2>&1 || fail "a link was followed"
    same "$(find "$WORK/elsewhere" -type f | wc -l)" 2
}

case_a_backup_that_another_machine_writes_is_told_with_its_remedy() {
    prepare_store 1000000
    back_up "$BOX" "$URL"
    expect 1 'take-over is for backups in object stores' back_up --take-over "$BOX" "$WORK/file.lbx"
    expect 1 'take-over is for backups in object stores' back_up --take-over "$BOX" -
    # A mount that reads it is not who writes there.
    mkdir "$WORK/dir"
    mount.lockbox "$URL" "$WORK/dir" -o "passfile=$PASSFILE"
    echo new >"$WORK/src/new"
    lockbox add --passfile "$PASSFILE" "$BOX" "$WORK/src/new"
    # Where processes have other numbers nobody here knows that it is gone; and that it went nobody says.
    unshare --pid --fork --mount-proc lockbox backup --passfile "$PASSFILE" "$BOX" "$URL"
    rm "$STORE/$(objects './*/log/*' | head -1)"
    expect 13 'a writer on .*; --take-over goes on in its place' back_up "$BOX" "$URL"
    lockbox remote ls "$URL" | shows "$URL  (record .*, the writer on .* has not signed off)"
    expect 13 'a writer on .*; --take-over goes on in its place' lockbox remote collect "$URL"
    lockbox remote check --full "$URL"
    back_up --take-over "$BOX" "$URL"
    lockbox umount "$WORK/dir"
    lockbox check --full --passfile "$PASSFILE" "$URL"
    same "$(lockbox cat --passfile "$PASSFILE" "$URL" new)" new
}

case_a_store_inside_of_the_mounted_archive_is_refused_and_root_follows_no_link_beside_a_users_mount() {
    prepare_store 1000000
    mkdir "$WORK/dir" "$WORK/elsewhere"
    mount.lockbox "$BOX" "$WORK/dir" -o "passfile=$PASSFILE"
    expect 1 'lies in the archive that is to be backed up' lockbox backup "$WORK/dir" "file://$WORK/dir/store"
    mkdir "$WORK/dir/store"
    expect 1 'lies in the archive that is to be backed up' lockbox backup "$WORK/dir" "file://$WORK/dir/store"
    same "$(ls "$WORK/dir/store")" ''
    # What is no directory is told, and not waited for.
    mkfifo "$WORK/fifo"
    expect 11 'not a directory' timeout -s KILL 20 lockbox backup "$WORK/dir" "file://$WORK/fifo"
    # The mount is this user's own, and so is the link.
    ln -s elsewhere "$WORK/link"
    lockbox backup "$WORK/dir" "file://$WORK/link" | shows 'everything was copied'
    lockbox umount "$WORK/dir"
    need_user
    mkdir "$WORK/home" "$WORK/home/dir" "$WORK/secret"
    cp "$BOX" "$PASSFILE" "$WORK/home"
    ln -s "$WORK/secret" "$WORK/home/store"
    chown -hR "$TEST_USER:" "$WORK/home"
    as_user lockbox mount --passfile "$WORK/home/$(basename "$PASSFILE")" "$WORK/home/a.lbx" "$WORK/home/dir"
    expect 11 'not a directory' lockbox backup "$WORK/home/dir" "file://$WORK/home/store"
    same "$(ls "$WORK/secret")" ''
    lockbox backup "$WORK/home/dir" "$URL" | shows 'everything was copied'
    as_user lockbox umount "$WORK/home/dir"
}
