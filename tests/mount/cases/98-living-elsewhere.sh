# Mounts of archives that live in a store and are written to, and mounts that follow them: a directory (file://), and a store that speaks S3 (store.py).
# shellcheck shell=bash disable=SC2317,SC2164

# An archive at $URL, and options for mounts of it in $OPTIONS.
prepare_directory() {
    export XDG_CACHE_HOME=$WORK/cache
    URL=file://$WORK/store
    OPTIONS=passfile=$PASSFILE
    REMOTE=()
    lockbox create --passfile "$PASSFILE" --kdf-memory 1 --kdf-passes 1 --weak-kdf "$URL"
    mkdir "$WORK/dir"
}

serve_store() {
    store.py "$PORT" "$WORK/objects" 2>"$WORK/store.log" &
    SERVER=$!
    await bash -c "(: >/dev/tcp/127.0.0.1/$PORT) 2>/dev/null"
}

# prepare_store [TIMEOUT]: mounts and commands wait so long for the store; "hard" (no limit) where no outage is the subject, because a busy machine answers late.
prepare_store() {
    local timeout=${1:-5s}
    export XDG_CACHE_HOME=$WORK/cache AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_REGION=x
    PORT=$(free_port)
    export AWS_ENDPOINT_URL=http://127.0.0.1:$PORT
    serve_store
    # A case may have several.
    URL=s3://bucket/notes-$PORT
    OPTIONS=passfile=$PASSFILE,allow-http,allow-private,timeout=$timeout
    REMOTE=(--remote "allow-http,allow-private,timeout=$timeout")
    lockbox create --passfile "$PASSFILE" "${REMOTE[@]}" --kdf-memory 1 --kdf-passes 1 --weak-kdf "$URL"
    mkdir "$WORK/dir"
}

# The daemon of the mount: the end of a case finds only those of files below $WORK.
daemon_there() {
    lockbox status --json "$WORK/dir" | python3 -c 'import json, sys; print(json.load(sys.stdin)["pid"])'
}

# What a machine finds that has nothing but the store.
found() {
    rm -rf "$WORK/cache"
    lockbox cat --passfile "$PASSFILE" "${REMOTE[@]}" "$URL" "$1"
}

case_a_mount_writes_to_an_archive_that_lives_in_a_store() {
    local where fetcher
    for where in directory store; do
        prepare_$where hard
        mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
        # Its allocator is told to keep little, whatever the daemon's is told.
        fetcher=$(pgrep --parent "$(daemon_there)" --full -- --fetcher)
        tr '\0' '\n' <"/proc/$fetcher/environ" | grep -x MALLOC_ARENA_MAX=1 >/dev/null || fail "it was not told"
        cp -r "$(dirname "$0")/cases" "$WORK/dir/tree"
        head -c 9000000 /dev/urandom >"$WORK/large"
        dd if="$WORK/large" of="$WORK/dir/large" bs=1M conv=fsync status=none
        # What fsync said is durable is found by a fresh machine while the mount lives.
        found large | cmp - "$WORK/large"
        expect 13 'serves it at' lockbox mkdir --passfile "$PASSFILE" "${REMOTE[@]}" "$URL:/other"
        rm "$WORK/dir/tree/97-buckets.sh"
        lockbox snapshot create "$WORK/dir" kept
        lockbox umount "$WORK/dir"
        # Nobody is there any more when the unmount has returned.
        lockbox mkdir --passfile "$PASSFILE" "${REMOTE[@]}" "$URL:/other"
        lockbox check --full --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
        mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
        cmp "$WORK/large" "$WORK/dir/large"
        [[ -d $WORK/dir/other && ! -e $WORK/dir/tree/97-buckets.sh ]] || fail "the tree is another one"
        lockbox umount "$WORK/dir"
        # For reading, beside each other.
        mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS,ro"
        ! touch "$WORK/dir/new" 2>/dev/null || fail "it can be written"
        lockbox umount "$WORK/dir"
        rmdir "$WORK/dir"
    done
}

case_a_mount_that_was_taken_over_from_is_read_only_and_says_why() {
    prepare_directory
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    echo mine >"$WORK/dir/mine"
    sync "$WORK/dir/mine"
    # Its next commit would meet the other writer before anything is lost.
    stop_clock_of "$(daemon_there)"
    lockbox mkdir --take-over --passfile "$PASSFILE" "$URL:/theirs"
    ! { echo lost >"$WORK/dir/lost" && sync "$WORK/dir/lost"; } 2>/dev/null || fail "it was written"
    start_clock
    same "$(cat "$WORK/dir/mine")" mine
    await bash -c "lockbox status '$WORK/dir' | grep -q 'read-only because .*another writer took over'"
    ! lockbox status "$WORK/dir" >/dev/null || fail 'status ended with 0'
    expect 2 'another writer took over' lockbox umount "$WORK/dir"
    same "$(lockbox ls --passfile "$PASSFILE" "$URL" | tr '\n' ' ')" 'mine theirs '
    # What it wrote last is read where it was written.
    lockbox remote unsent | grep "$URL  (superseded by another writer)" >/dev/null
    same "$(lockbox cat --passfile "$PASSFILE" --remote unsent "$URL:/lost")" lost
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS,unsent"
    same "$(cat "$WORK/dir/mine" "$WORK/dir/lost" | tr '\n' ' ')" 'mine lost '
    ! touch "$WORK/dir/new" 2>/dev/null || fail "it can be written"
    lockbox umount "$WORK/dir"
    expect 2 'unsent data is read-only' lockbox mkdir --passfile "$PASSFILE" --remote unsent "$URL:/other"
    lockbox remote unsent --forget "$URL"
    says_nothing lockbox remote unsent
    expect 19 'all data written on this machine was sent' lockbox ls --passfile "$PASSFILE" --remote unsent "$URL"
    # The other way round: a mount that takes over.
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    mkdir "$WORK/dir2"
    on_another_machine() {
        XDG_CACHE_HOME=$WORK/other XDG_STATE_HOME=$WORK/other unshare --mount sh -c 'mount -t tmpfs none /run && exec "$@"' sh "$@"
    }
    expect 13 'take-over goes on in its place' on_another_machine mount.lockbox "$URL" "$WORK/dir2" -o "$OPTIONS"
    # Nothing is taken over from a mount of this machine: it would become read-only, and the other would not be mounted.
    expect 13 "already mounted at $WORK/dir by process" mount.lockbox "$URL" "$WORK/dir2" -o "$OPTIONS,take-over"
    echo still >"$WORK/dir/still"
    sync "$WORK/dir/still"
    lockbox umount "$WORK/dir"
}

case_what_a_mount_in_a_store_acknowledged_survives_the_death_of_its_daemon() {
    local i
    prepare_directory
    for i in $(seq 1 "${KILLS:-4}"); do
        # Its process on this machine is known to be gone.
        mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
        echo "$i" >"$WORK/dir/file$i"
        sync "$WORK/dir/file$i"
        echo "$i" >"$WORK/dir/not-synced"
        kill -9 "$(daemon_there)"
        await bash -c "! mountpoint -q '$WORK/dir' || umount -l '$WORK/dir'"
        same "$(found "file$i")" "$i"
    done
    lockbox check --full --passfile "$PASSFILE" "$URL"
}

# Whether a process waits in the kernel for what it reads.
waits_for_pages() {
    grep -q 'folio\|page\|fuse' "/proc/$1/wchan"
}

case_a_mount_waits_for_a_store_that_is_away_and_goes_on_by_itself() {
    local writer reader part code=0 readers=() counter
    prepare_store
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    head -c 8M /dev/urandom >"$WORK/dir/large"
    lockbox umount "$WORK/dir"
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    echo before >"$WORK/dir/before"
    sync "$WORK/dir/before"
    kill "$SERVER"
    wait "$SERVER" || true
    # A program that wants its data durable waits; what is here is read meanwhile.
    { echo during >"$WORK/dir/during" && sync "$WORK/dir/during" && : >"$WORK/done"; } &
    writer=$!
    await bash -c "lockbox status '$WORK/dir' | grep -q 'does not answer since'"
    same "$(cat "$WORK/dir/before")" before
    # Those who read what is not here wait as well, and keep nobody else from an answer.
    for part in 1 3 5; do
        dd if="$WORK/dir/large" of=/dev/null bs=1M skip="$part" count=1 status=none 2>/dev/null &
        readers+=("$!")
    done
    # One that was awaited late has given up.
    waits_or_over() { waits_for_pages "$1" || gone "$1"; }
    for reader in "${readers[@]}"; do
        await waits_or_over "$reader"
    done
    timeout 20 stat "$WORK/dir/missing" >/dev/null 2>&1 || code=$?
    same "$code" 1
    # At the store's place somebody counts what is asked, and answers nothing: three times the daemon asked for what was written to be taken.
    in_background python3 -c 'import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    with server.accept()[0] as asking:
        print(asking.recv(4096).split(b" ")[0].decode(), flush=True)' "$PORT" >"$WORK/asked"
    counter=$!
    asked_three_times() { [[ $(grep -c '^PUT$' "$WORK/asked" || true) -ge 3 ]]; }
    await asked_three_times
    [[ ! -e $WORK/done ]] || fail "success without the store's word"
    kill "$counter"
    wait "$counter" || true
    serve_store
    wait "$writer"
    # They may have given up meanwhile.
    wait "${readers[@]}" || true
    [[ -e $WORK/done ]]
    same "$(found during)" during
    lockbox umount "$WORK/dir"
    lockbox check --full --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
}

# A mount at $WORK/dir that ended while its store was away, and has written $1 since.
leave_while_the_store_is_away() {
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    # The first change of a mount waits until the store knows of it.
    echo before >"$WORK/dir/before-$1"
    kill "$SERVER"
    wait "$SERVER" || true
    echo "$1" >"$WORK/dir/$1"
    lockbox umount "$WORK/dir" 2>"$WORK/told"
    grep 'are kept on this machine; the next mount here' "$WORK/told" >/dev/null
    lockbox remote unsent | grep "$URL  (the next writer here sends it)" >/dev/null
}

case_a_mount_that_ends_while_its_store_is_away_keeps_what_was_written_for_the_next_one() {
    prepare_store
    leave_while_the_store_is_away one
    # Nothing of it was seen by anybody, here either: what the store has is no older copy of it.
    serve_store
    ! lockbox ls --passfile "$PASSFILE" "${REMOTE[@]}" "$URL" | grep -x one || fail "it was sent"
    same "$(lockbox cat --passfile "$PASSFILE" --remote allow-http,allow-private,unsent "$URL:/one")" one
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    same "$(cat "$WORK/dir/one")" one
    same "$(found one)" one
    lockbox umount "$WORK/dir"
    says_nothing lockbox remote unsent
    # A command sends it as well.
    leave_while_the_store_is_away two
    serve_store
    lockbox remote collect "${REMOTE[@]}" "$URL"
    same "$(found two)" two
    # Another machine that comes first is not overtaken, and what it came before is told and kept.
    leave_while_the_store_is_away three
    serve_store
    XDG_STATE_HOME=$WORK/elsewhere lockbox mkdir --passfile "$PASSFILE" "${REMOTE[@]}" --take-over "$URL:/theirs"
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS" 2>"$WORK/told"
    grep "another writer took over before the last writes of this machine were sent" "$WORK/told" >/dev/null
    [[ -d $WORK/dir/theirs && -e $WORK/dir/two && ! -e $WORK/dir/three ]] || fail "the tree is another one"
    lockbox umount "$WORK/dir"
    same "$(lockbox cat --passfile "$PASSFILE" --remote allow-http,allow-private,unsent "$URL:/three")" three
    lockbox remote unsent --forget "$URL"
    lockbox check --full --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
}

case_umount_by_force_ends_a_mount_that_waits_for_its_store_and_says_what_is_kept() {
    local daemon waits
    prepare_store
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    echo before >"$WORK/dir/before"
    sync "$WORK/dir/before"
    daemon=$(daemon_there)
    kill "$SERVER"
    wait "$SERVER" || true
    echo during >"$WORK/dir/during"
    sync "$WORK/dir/during" 2>/dev/null &
    waits=$!
    await bash -c "lockbox status '$WORK/dir' | grep -q 'does not answer since'"
    expect 13 'with --wait, --lazy or --force' lockbox umount "$WORK/dir"
    lockbox umount --force "$WORK/dir" 2>"$WORK/told"
    grep "are kept on this machine; the next mount here, .* 'lockbox remote unsent' lists them" "$WORK/told" >/dev/null
    ! wait "$waits" || fail "success without the store's word"
    await gone "$daemon"
    lockbox remote unsent | grep "$URL  (the next writer here sends it)" >/dev/null
    serve_store
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    same "$(found during)" during
    # In use, and with a store that answers.
    exec 9>"$WORK/dir/open"
    echo more >&9
    lockbox umount --force "$WORK/dir" 2>"$WORK/told"
    exec 9>&- || true
    grep 'has all that was written to it' "$WORK/told" >/dev/null
    says_nothing lockbox remote unsent
    same "$(found open)" more
}

case_a_commit_that_waits_for_its_store_outlives_the_daemon() {
    prepare_store
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    echo before >"$WORK/dir/before"
    # Else a commit without the file that is written next could be the one that waits.
    sync "$WORK/dir/before"
    # Nor may the clock commit that file without its content.
    stop_clock_of "$(daemon_there)"
    kill "$SERVER"
    wait "$SERVER" || true
    { echo waits >"$WORK/dir/waits" && sync "$WORK/dir/waits"; } &
    await bash -c "lockbox remote unsent | grep -q 'a mount sends it when the store answers'"
    kill -9 "$(daemon_there)"
    await bash -c "! mountpoint -q '$WORK/dir' || umount -l '$WORK/dir'"
    await bash -c "lockbox remote unsent | grep -q 'the next writer here sends it'"
    serve_store
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    same "$(cat "$WORK/dir/waits")" waits
    lockbox umount "$WORK/dir"
}

case_a_mount_of_which_a_request_waits_for_its_store_ends_by_a_signal() {
    local daemon
    prepare_store
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS,stop_timeout=1"
    daemon=$(daemon_there)
    kill "$SERVER"
    wait "$SERVER" || true
    # The first change of a mount waits until the store knows of it, in an event loop.
    { echo first >"$WORK/dir/first"; } &
    await bash -c "lockbox remote unsent | grep -q 'a mount sends it when the store answers'"
    kill "$daemon"
    await bash -c "! kill -0 $daemon 2>/dev/null"
    # The process that fetches ends after its daemon.
    await bash -c "lockbox remote unsent | grep -q '$URL  (the next writer here sends it)'"
    serve_store
    lockbox remote collect "${REMOTE[@]}" "$URL"
    lockbox check --full --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
}

case_a_mount_of_which_its_own_commit_waits_for_its_store_ends() {
    local end daemon
    for end in umount signal; do
        prepare_store
        LOCKBOX_TEST_CLOCK=10 mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
        daemon=$(daemon_there)
        echo before >"$WORK/dir/before"
        kill "$SERVER"
        wait "$SERVER" || true
        # Nobody asks for it: it is committed some seconds later, and that waits.
        echo waits >"$WORK/dir/waits"
        await bash -c "lockbox remote unsent | grep -q 'a mount sends it when the store answers'"
        if [[ $end == umount ]]; then
            timeout 60 lockbox umount "$WORK/dir" 2>"$WORK/told" || fail "it did not end"
            grep 'are kept on this machine; the next mount here' "$WORK/told" >/dev/null
        else
            kill "$daemon"
            await bash -c "! kill -0 $daemon 2>/dev/null"
        fi
        # The process that fetches ends after its daemon.
        await bash -c "lockbox remote unsent | grep -q '$URL  (the next writer here sends it)'"
        serve_store
        lockbox remote collect "${REMOTE[@]}" "$URL"
        same "$(found waits)" waits
        lockbox check --full --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
        kill "$SERVER"
        wait "$SERVER" || true
        rmdir "$WORK/dir"
    done
}

case_a_mount_whose_event_loop_and_agent_wait_for_its_store_ends_by_force_and_by_a_signal() {
    local end daemon agent writer asker name=0
    # The loop answers no lookup.
    loop_waits() {
        local code=0
        name=$((name + 1))
        timeout 5 stat "$WORK/dir/missing$name" >/dev/null 2>&1 || code=$?
        [[ $code == 124 ]]
    }
    agent_waits() { grep -q 'fuse\|request_wait_answer' "/proc/$agent/wchan"; }
    for end in force signal; do
        prepare_store
        mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS,threads=1,stop_timeout=1"
        daemon=$(daemon_there)
        agent=$(pgrep --parent "$daemon" --full -- --unmounter)
        exec 9>"$WORK/dir/open"
        kill "$SERVER"
        wait "$SERVER" || true
        dd if=/dev/urandom of="$WORK/dir/big" bs=1M count=300 status=none 2>/dev/null &
        writer=$!
        await loop_waits
        # The agent flushes the kernel's pages first, and for that opens the root.
        lockbox snapshot create "$WORK/dir" kept 2>/dev/null &
        asker=$!
        await agent_waits
        if [[ $end == force ]]; then
            timeout 60 lockbox umount --force "$WORK/dir" 2>"$WORK/told" || fail "it did not end: $(cat "$WORK/told")"
        else
            kill "$daemon"
        fi
        await gone "$daemon"
        ! mountpoint -q "$WORK/dir" || fail "a dead mount is left"
        ! wait "$writer" || fail "success without the store's word"
        wait "$asker" || true
        exec 9>&- || true
        serve_store
        lockbox remote collect "${REMOTE[@]}" "$URL"
        lockbox check --full --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
        kill "$SERVER"
        wait "$SERVER" || true
        rmdir "$WORK/dir"
    done
}

case_who_waits_for_a_store_with_fsync_keeps_no_event_loop() {
    local i
    prepare_store
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS,threads=1"
    for i in 1 2 3; do echo before >"$WORK/dir/$i"; done
    sync "$WORK/dir/1"
    kill "$SERVER"
    wait "$SERVER" || true
    for i in 1 2 3; do
        { echo during >"$WORK/dir/$i" && : >"$WORK/wrote$i" && sync "$WORK/dir/$i" && : >"$WORK/done$i"; } &
    done
    for i in 1 2 3; do await test -e "$WORK/wrote$i"; done
    await bash -c "lockbox status '$WORK/dir' | grep -q 'does not answer since'"
    echo 3 >/proc/sys/vm/drop_caches
    same "$(timeout 20 cat "$WORK/dir/2")" during
    [[ ! -e $WORK/done1 && ! -e $WORK/done2 && ! -e $WORK/done3 ]] || fail "success without the store's word"
    serve_store
    for i in 1 2 3; do await test -e "$WORK/done$i"; done
    same "$(found 3)" during
    lockbox umount "$WORK/dir"
}

# METHODS STATUS [once]: a portal on the way answers in the store's place.
stand_between() {
    echo "$*" >"$WORK/portal"
    mv "$WORK/portal" "$WORK/objects/.portal"
}

# Each request meets each status in remote/src/bucket/tests/captive_portal.rs.
case_a_portals_answer_in_the_stores_place_acknowledges_nothing() {
    local status statuses=(200 302 404 412) seen
    prepare_store
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS,log=$WORK/log"
    for status in "${statuses[@]}"; do
        stand_between PUT "$status" once
        echo "$status" >"$WORK/dir/file$status"
        sync "$WORK/dir/file$status"
        [[ ! -e $WORK/objects/.portal ]] || fail "the portal was asked for nothing"
        same "$(found "file$status")" "$status"
        stand_between GET "$status" once
        same "$(found "file$status")" "$status"
        [[ ! -e $WORK/objects/.portal ]] || fail "the portal was asked for nothing"
    done
    refusals() { grep -c 'is not from this store (status 200)' "$WORK/log" || true; }
    seen=$(refusals)
    stand_between PUT 200
    { echo waits >"$WORK/dir/waits" && sync "$WORK/dir/waits" && : >"$WORK/done"; } &
    refused_again() { (($(refusals) > seen)); }
    await refused_again
    [[ ! -e $WORK/done ]] || fail "success without the store's word"
    rm "$WORK/objects/.portal"
    await test -e "$WORK/done"
    same "$(found waits)" waits
    lockbox umount "$WORK/dir"
    lockbox check --full --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
    for status in "${statuses[@]}"; do
        stand_between GET "$status"
        expect 17 "does not answer: the response is not from this store .status $status." \
            lockbox ls --passfile "$PASSFILE" --remote allow-http,allow-private,timeout=3s "$URL"
    done
}

give_credentials() {
    printf '[default]\naws_access_key_id = %s\naws_secret_access_key = secret\n' "$1" >"$WORK/credentials"
}

case_credentials_that_expire_under_a_mount_are_read_anew() {
    local writer
    prepare_store
    unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY
    export AWS_SHARED_CREDENTIALS_FILE=$WORK/credentials
    give_credentials first
    mount_both
    echo before >"$WORK/dir/file"
    sync "$WORK/dir/file"
    await shows file before
    echo first >"$WORK/objects/.refused"
    { echo after >"$WORK/dir/file" && : >"$WORK/wrote" && sync "$WORK/dir/file" && : >"$WORK/done"; } &
    writer=$!
    await test -e "$WORK/wrote"
    # Both are refused, and what is here is read meanwhile.
    await grep -q 'cannot show newer changes of the archive, so the mount keeps its earlier state: .*refuses the request' "$WORK/reader.log"
    shows file before
    same "$(timeout 20 cat "$WORK/dir/file")" after
    [[ ! -e $WORK/done ]] || fail "success without the store's word"
    give_credentials second
    wait "$writer"
    [[ -e $WORK/done ]]
    await shows file after
    same "$(found file)" after
    # The program that goes on with the next ones has them from the start.
    echo 'first second' >"$WORK/objects/.refused"
    expect 18 'cannot access .*: it refuses' lockbox ls --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
    give_credentials third
    lockbox umount "$WORK/reader"
    lockbox umount "$WORK/dir"
    lockbox check --full --passfile "$PASSFILE" "${REMOTE[@]}" "$URL"
}

# A mount of the archive at $URL for writing at $WORK/dir, and one that follows it at $WORK/reader.
mount_both() {
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    mkdir -p "$WORK/reader"
    mount.lockbox "$URL" "$WORK/reader" -o "$OPTIONS,ro,log=$WORK/reader.log"
}

daemon_at() {
    lockbox status --json "$WORK/$1" | python3 -c 'import json, sys; print(json.load(sys.stdin)["pid"])'
}

shows() {
    [[ $(cat "$WORK/reader/$1" 2>/dev/null) == "$2" ]]
}

# In a store; the next case follows a directory.
case_a_mount_for_reading_follows_who_writes_elsewhere() {
    local tail pages
    prepare_store hard
    mkdir -p "$WORK/reader"
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    mkdir "$WORK/dir/sub"
    echo one >"$WORK/dir/file"
    head -c 3000000 /dev/zero >"$WORK/dir/large"
    touch -d @1000000000 "$WORK/dir/large"
    sync "$WORK/dir/large"
    lockbox umount "$WORK/dir"
    mount_both
    shows file one
    [[ ! -e $WORK/reader/new ]]
    same "$(stat -c %Y "$WORK/reader/large")" 1000000000
    cmp "$WORK/dir/large" "$WORK/reader/large"
    # What is new, changed and gone, also where a program asked before.
    echo two >"$WORK/dir/new"
    echo one and more >>"$WORK/dir/file"
    rmdir "$WORK/dir/sub"
    sync "$WORK/dir/file"
    await shows new two
    # A name that was asked for is believed for a second.
    await shows file $'one\none and more'
    await test ! -e "$WORK/reader/sub"
    # Of the same size and with the time that it had.
    exec 7<"$WORK/reader/large"
    printf xyz | dd of="$WORK/dir/large" bs=1 seek=1500000 conv=notrunc status=none
    touch -d @1000000000 "$WORK/dir/large"
    echo three >"$WORK/dir/new"
    sync "$WORK/dir/large" "$WORK/dir/new"
    await shows new three
    await cmp -s "$WORK/dir/large" "$WORK/reader/large"
    exec 7<&-
    # Who has a file open reads what is added to it, and all of it when it is gone.
    tail -f -c +1 "$WORK/reader/file" >"$WORK/tail" &
    tail=$!
    echo added >>"$WORK/dir/file"
    sync "$WORK/dir/file"
    await grep -q added "$WORK/tail"
    kill "$tail"
    exec 7<"$WORK/reader/large"
    pages=$(sha256sum <"$WORK/dir/large")
    rm "$WORK/dir/large"
    echo four >"$WORK/dir/new"
    sync "$WORK/dir/new"
    await shows new four
    await test ! -e "$WORK/reader/large"
    echo 3 >/proc/sys/vm/drop_caches
    same "$(stat -L -c %s /dev/fd/7)" 3000000
    same "$(sha256sum <&7)" "$pages"
    exec 7<&-
    # Beside both, somebody who wants one moment, and one who may be anywhere.
    lockbox snapshot create "$WORK/dir" kept
    mkdir "$WORK/fixed"
    mount.lockbox "$URL" "$WORK/fixed" -o "$OPTIONS,ro,follow=off"
    await test -d "$WORK/reader/.snapshots/kept"
    echo five >"$WORK/dir/new"
    sync "$WORK/dir/new"
    await shows new five
    same "$(cat "$WORK/fixed/new")" four
    same "$(cat "$WORK/reader/.snapshots/kept/new")" four
    expect 1 'Read-only file system' touch "$WORK/reader/mine"
    lockbox umount "$WORK/fixed"
    # Nothing was wrong; whoever is killed while it asks is answered all the same.
    ! grep -v 'Failed to send FUSE reply' "$WORK/reader.log" >"$WORK/wrong" || fail "$(cat "$WORK/wrong")"
    lockbox umount "$WORK/reader"
    lockbox umount "$WORK/dir"
}

case_a_follower_shows_moments_in_their_order_and_lets_go_of_them() {
    local i first second before after
    prepare_directory
    mount_both
    for i in 1 2; do echo 0 >"$WORK/dir/$i"; done
    sync "$WORK/dir/1" "$WORK/dir/2"
    await shows 2 0
    before=$(ls "/proc/$(daemon_at reader)/fd" | wc -l)
    # The first is always as new as the second.
    {
        for i in $(seq 1 100000); do
            echo "$i" >"$WORK/dir/1" && sync "$WORK/dir/1"
            echo "$i" >"$WORK/dir/2" && sync "$WORK/dir/2"
            [[ ! -e $WORK/enough ]] || break
        done
        : >"$WORK/ended"
    } &
    second=0
    while [[ $second -lt 40 ]]; do
        second=$(cat "$WORK/reader/2")
        first=$(cat "$WORK/reader/1")
        # A file that is written over is empty for a moment.
        [[ -z $first || -z $second || $first -ge $second ]] || fail "$first of the first file, and then was $second of the second"
        second=${second:-0}
    done
    : >"$WORK/enough"
    await test -e "$WORK/ended"
    await shows 2 "$(cat "$WORK/dir/2")"
    after=$(ls "/proc/$(daemon_at reader)/fd" | wc -l)
    [[ $after -le $((before + 40)) ]] || fail "$before descriptors, and then $after"
    # A writer that was killed is followed by the next one, and so is that.
    kill -9 "$(daemon_there)"
    await bash -c "! mountpoint -q '$WORK/dir' || umount -l '$WORK/dir'"
    mount.lockbox "$URL" "$WORK/dir" -o "$OPTIONS"
    echo later >"$WORK/dir/1"
    sync "$WORK/dir/1"
    await shows 1 later
    [[ ! -s $WORK/reader.log ]] || fail "$(cat "$WORK/reader.log")"
    lockbox umount "$WORK/reader"
    lockbox umount "$WORK/dir"
}

case_a_follower_stays_at_its_moment_while_the_store_is_away_and_goes_on_by_itself() {
    prepare_store
    mount_both
    echo before >"$WORK/dir/file"
    sync "$WORK/dir/file"
    await shows file before
    kill "$SERVER"
    wait "$SERVER" || true
    await grep -q 'cannot show newer changes of the archive, so the mount keeps its earlier state: .*does not answer' "$WORK/reader.log"
    shows file before
    lockbox status "$WORK/reader" | grep 'shows an earlier state because .*does not answer' >/dev/null
    serve_store
    echo after >"$WORK/dir/file"
    sync "$WORK/dir/file"
    await shows file after
    await grep -q 'is followed again' "$WORK/reader.log"
    same "$(lockbox status --json "$WORK/reader" | python3 -c 'import json, sys; print(json.load(sys.stdin)["follows"]["failure"])')" None
    same "$(wc -l <"$WORK/reader.log")" 2
    lockbox umount "$WORK/reader"
    lockbox umount "$WORK/dir"
}
