# What other users of the machine say to root's commands, and to those of each other.
# shellcheck shell=bash disable=SC2317,SC2164

# impostor ARGUMENT...: a false mount, in the background.
impostor() {
    impostor.py "$TEST_USER" "$@" >"$WORK/impostor" &
    BACKGROUND+=($!)
    await grep -q ready "$WORK/impostor"
}

end_impostors() {
    kill "${BACKGROUND[@]}" 2>/dev/null || true
    awk -v top="$WORK/users/" '/ - fuse\.lockbox / && index($5, top) == 1 { print $5 }' /proc/self/mountinfo |
        while read -r point; do umount -i -l "$point"; done
    wait 2>/dev/null || true
}

case_root_takes_away_the_mount_that_it_found_and_no_other() {
    need_user
    install -d -o "$TEST_USER" "$WORK/users"
    alone a_swapped_parent_is_no_way
}

a_swapped_parent_is_no_way() {
    mkdir -p "$WORK/victim/point"
    mount -t tmpfs none "$WORK/victim/point"
    as_user mkdir -p "$WORK/users/parent/point"
    impostor "$WORK/users/parent/point" /any.lbx swap "$WORK/users/parent" "$WORK/victim"
    lockbox umount --all 2>"$WORK/stderr" || true
    [[ -L $WORK/users/parent ]] || fail 'the parent was not swapped, so nothing was proved'
    mountpoint -q "$WORK/victim/point" || fail "root took away what a link led to: $(cat "$WORK/stderr")"
    ! mountpoint -q "$WORK/users/parent.before/point" || fail "the false mount is still there: $(cat "$WORK/stderr")"
    end_impostors
}

case_what_lies_in_the_place_of_roots_mount_is_not_opened() {
    local pid before
    commits() { lockbox status --json "$WORK/box.lbx" | python3 -c 'import json, sys; print(json.load(sys.stdin)["commits"])'; }
    went_on() { (($(commits) > before)); }
    need_user
    install -d -o "$TEST_USER" "$WORK/users"
    new_archive box
    as_user mkdir -p "$WORK/users/parent/point"
    LOCKBOX_TEST_CLOCK=10 lockbox mount --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/users/parent/point"
    pid=$(daemon_of "$WORK/box.lbx")
    # Only with a writer does the daemon send for what the kernel caches.
    exec 5>"$WORK/users/parent/point/file"
    echo content >&5
    as_user mv "$WORK/users/parent" "$WORK/users/parent.before"
    as_user mkdir "$WORK/users/parent"
    # Opening it waits for somebody who writes to it.
    as_user mkfifo "$WORK/users/parent/point"
    before=$(commits)
    echo more >&5
    await went_on
    exec 5>&-
    # Where the clock flushes just then, the mount is busy.
    await umount -i "$WORK/users/parent.before/point"
    await gone "$pid"
    attach box
    same "$(cat "$WORK/box/file")" $'content\nmore'
    detach box
}

case_another_users_daemon_is_believed_where_it_is_mounted_only() {
    need_user
    install -d -o "$TEST_USER" "$WORK/users"
    alone a_false_daemon_names_roots_archive
}

a_false_daemon_names_roots_archive() {
    local name runtime point=$WORK/users/point
    new_archive box
    new_archive dead
    echo 'not the passphrase' >"$WORK/wrong"
    chmod 600 "$WORK/wrong"
    as_user mkdir "$point"
    name=$(stat -c %D-%i "$WORK/box.lbx").sock
    runtime=/tmp/lockbox-$(id -u "$TEST_USER")
    impostor "$point" "$WORK/box.lbx" control "$runtime/lockbox/$name" \
        "{\"archive\": \"$WORK/box.lbx\", \"mount_point\": \"$point\", \"options\": \"rw\\u001b[31m\\u009b31m\\u202e\", \"latched\": \"\\u001b]0;x\\u0007\\nlockbox: done\"}"
    # The archive is opened, and not what another user says of it believed.
    expect 10 'wrong passphrase' lockbox purge --passfile "$WORK/wrong" "$WORK/box.lbx"
    lockbox purge --passfile "$PASSFILE" "$WORK/box.lbx"
    expect 2 "user $TEST_USER has a mount of this name" lockbox status "$WORK/box.lbx"
    expect 2 "user $TEST_USER has a mount of this name" lockbox umount "$WORK/box.lbx"
    attach box
    detach box
    # By its mount point it is asked, and what it says drives no terminal and makes no line of its own.
    # It claims to have become read-only after a failure, so the status ends with 2.
    ! lockbox status --all "$point" >"$WORK/shown" || fail 'status ended with 0'
    grep -q "user $TEST_USER" "$WORK/shown"
    terminal.py -- lockbox status --all "$point" >>"$WORK/shown" || true
    terminal.py -- lockbox status "$point" >>"$WORK/shown" || true
    lockbox status --json "$point" >"$WORK/json" || true
    ! LC_ALL=C grep -aP '[\x00-\x09\x0b-\x1f\x7f]|\xc2\x9b|\xe2\x80\xae|^lockbox:' "$WORK/shown" "$WORK/json" ||
        fail 'what a stranger says reaches the terminal'
    same "$(grep -cF 'rw\x1b[31m\xc2\x9b31m\xe2\x80\xae' "$WORK/shown")" 2
    python3 -c 'import json, sys; assert json.load(open(sys.argv[1]))["options"] == "rw\x1b[31m\x9b31m\u202e"' "$WORK/json"
    # Nor does the name of a file that a shell put into a command line.
    terminal.py -- lockbox ls a b $'\e[2J\e]0;x\a' >"$WORK/shown" || true
    terminal.py -- mount.lockbox a b $'\e[2J' >>"$WORK/shown" || true
    same "$(grep -c 'unexpected argument' "$WORK/shown")" 2
    ! grep -q $'\e' "$WORK/shown" || fail 'an argument reaches the terminal'
    # One that does not stop keeps no other mount from its end.
    attach dead
    kill_daemon dead
    in_background lockbox umount --all
    dead_is_cleared() { ! mountpoint -q "$WORK/dead"; }
    await dead_is_cleared
    end_impostors
}

# The archive's owner chooses its content: files of root's, and which directory the path leads to.
case_root_mounts_a_users_archive_over_nothing_of_others() {
    local users=$WORK/users
    need_user
    install -d -o "$TEST_USER" "$users" "$users/own" "$users/full"
    mkdir "$WORK/roots"
    new_archive box
    mv "$WORK/box.lbx" "$users/"
    chown "$TEST_USER:" "$users/box.lbx"
    touch "$users/full/file"
    as_user ln -s /etc "$users/secrets"
    refused() {
        local archive=$1 point=$2 before
        before=$(stat -c %d "$point" 2>/dev/null || true)
        shift 2
        expect 15 "belongs to $TEST_USER, and the directory (belongs to root|would belong to root|is not empty).*trust-owner" \
            mount.lockbox --passfile "$PASSFILE" "$archive" "$point" "$@"
        same "$(stat -c %d "$point" 2>/dev/null || true)" "$before" "mounted: $point"
    }
    refused "$users/box.lbx" "$users/secrets" -o allow_other
    refused "$users/box.lbx" "$WORK/roots"
    refused "$users/box.lbx" "$users/full"
    refused "$users/box.lbx" "$WORK/missing" --make-directory
    # By another path of the same file, and in the foreground, where no other process looks.
    ln "$users/box.lbx" "$WORK/linked.lbx"
    refused "$WORK/linked.lbx" "$WORK/roots"
    refused "$WORK/linked.lbx" "$WORK/roots" --foreground
    mount.lockbox --passfile "$PASSFILE" "$users/box.lbx" "$users/own"
    mountpoint -q "$users/own"
    lockbox umount "$users/own"
    mount.lockbox --passfile "$PASSFILE" -o trust-owner "$users/box.lbx" "$WORK/roots"
    mountpoint -q "$WORK/roots"
    lockbox umount "$WORK/roots"
    # Nobody else sees the mount of exec.
    lockbox exec --passfile "$PASSFILE" "$users/box.lbx" -- true
    # An archive of root's is root's to mount.
    chown root: "$users/box.lbx"
    mount.lockbox --passfile "$PASSFILE" "$users/box.lbx" "$WORK/roots"
    lockbox umount "$WORK/roots"
}

case_a_name_in_tmp_that_another_user_made_keeps_nobody_from_mounting() {
    need_user
    install -d -o "$TEST_USER" "$WORK/users"
    alone the_name_in_tmp_is_taken
}

the_name_in_tmp_is_taken() {
    local users=$WORK/users taken
    taken=/tmp/lockbox-$(id -u "$TEST_USER")
    new_archive box
    mv "$WORK/box.lbx" "$users/"
    cp "$PASSFILE" "$users/pass"
    chown "$TEST_USER:" "$users/box.lbx" "$users/pass"
    setpriv --reuid 65534 --regid 65534 --clear-groups mkdir -m 777 "$taken"
    as_user mkdir "$users/point"
    as_user mount.lockbox --passfile "$users/pass" "$users/box.lbx" "$users/point"
    # Other cases leave dead mounts of theirs, of which the exit code tells.
    { as_user lockbox status || true; } | shows "$users/point"
    { lockbox status --all || true; } | shows "$users/point"
    same "$(find "$taken" -mindepth 1 | wc -l)" 0 'nothing lies in the directory of another user'
    same "$(find /tmp -maxdepth 1 -name "${taken##*/}.*" -user "$TEST_USER" -perm 700 | wc -l)" 1
    as_user lockbox umount "$users/point"
}

case_an_owners_token_goes_to_no_socket_that_another_user_made() {
    need_user
    install -d -o "$TEST_USER" "$WORK/users"
    alone a_stranger_listens
}

a_stranger_listens() {
    local users=$WORK/users directory daemon stranger
    directory=/tmp/lockbox-$(id -u "$TEST_USER")
    # No function in the background: its shell would be what is ended.
    setpriv --reuid "$TEST_USER" --regid "$TEST_USER" --init-groups env -i HOME="$users" PATH="$PATH" \
        lockbox-share serve --state-dir "$users/store" --listen 127.0.0.1:0 --metrics-listen none >"$WORK/served" 2>&1 &
    daemon=$!
    await 30 grep -q ready=1 "$WORK/served"
    echo hello | as_user env HOME="$users" lockbox share --text --expires 1h >/dev/null
    as_user env HOME="$users" lockbox share ls --json | shows '"state"'
    kill "$daemon"
    wait "$daemon" || true
    rm -rf "$directory"
    # /tmp was emptied, and another user is the first to make the name.
    cat >"$WORK/listen.py" <<'P'
import os, socket, sys
os.mkdir(sys.argv[1])
os.chmod(sys.argv[1], 0o755)
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1] + "/lockbox-share.sock")
os.chmod(sys.argv[1] + "/lockbox-share.sock", 0o777)
listening.listen(8)
print("ready", flush=True)
while True:
    connection, _ = listening.accept()
    print("heard", connection.recv(65536), flush=True)
    connection.close()
P
    chmod 644 "$WORK/listen.py"
    setpriv --reuid 65534 --regid 65534 --clear-groups /usr/bin/python3 "$WORK/listen.py" "$directory" >"$WORK/heard" &
    stranger=$!
    await 30 grep -q ready "$WORK/heard"
    expect 21 'user 65534 listens there' as_user env HOME="$users" lockbox share ls
    expect 21 'no share daemon runs' as_user env HOME="$users" lockbox share --text </dev/null
    # The stranger hears one connection after the other: with this one it has printed all earlier ones.
    python3 -c 'import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(b"last")' "$directory/lockbox-share.sock"
    await grep -q "heard b'last'" "$WORK/heard"
    ! grep -aq Bearer "$WORK/heard" || fail 'the token went to a stranger'
    same "$(grep -c 'heard b..' "$WORK/heard" | cat)" "$(grep -Ec "heard b'(last)?'" "$WORK/heard" | cat)" 'not a byte'
    kill "$stranger"
}
