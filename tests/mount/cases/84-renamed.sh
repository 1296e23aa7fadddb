# Mounts and archives that are found wherever they are by now: renamed, moved, linked, named without UTF-8, seen from another namespace.
# shellcheck shell=bash disable=SC2317,SC2164

# An archive and its mount below a directory that can be renamed.
below_old() {
    # The new archive takes the place of an earlier one of the case, which would be refused.
    rm -rf "$XDG_STATE_HOME"
    mkdir -p "$WORK/old/m"
    create "$WORK/old/a.lbx"
    mount.lockbox "$WORK/old/a.lbx" "$WORK/old/m" -o "passfile=$PASSFILE,log=$WORK/a.log${1:+,$1}"
    DAEMON=$(daemon_of "$WORK/old/a.lbx")
    echo before >"$WORK/old/m/file"
}

# answers POINT ARCHIVE: what asks the daemon finds it by each of the two.
answers() {
    local what
    for what in "$@"; do
        lockbox status "$what" | shows "^$1  " || fail "status $what: $(lockbox status "$what")"
        lockbox snapshot create "$what" "s$((++SNAPSHOTS))"
        rm -f "$WORK/copy.lbx"
        lockbox backup --quiet "$what" "$WORK/copy.lbx"
    done
    # It exits with an error if a daemon of another case was killed.
    { lockbox status || true; } | shows "^$1  .*mounted"
}

ended() {
    gone "$DAEMON" || fail "the daemon $DAEMON is still there"
    ! mountpoint -q "$1" || fail "still mounted: $1"
    lockbox check --full --passfile "$PASSFILE" "$2"
    same "$(lockbox cat --passfile "$PASSFILE" "$2" file)" before
}

case_a_mount_below_a_renamed_directory_is_found_and_ended() {
    local SNAPSHOTS=0 what
    for what in m a.lbx; do
        below_old
        mv "$WORK/old" "$WORK/new"
        answers "$WORK/new/m" "$WORK/new/a.lbx"
        lockbox umount "$WORK/new/$what"
        ended "$WORK/new/m" "$WORK/new/a.lbx"
        rm -r "$WORK/new"
    done
    below_old
    mv "$WORK/old" "$WORK/new"
    kill "$DAEMON"
    await 30 gone "$DAEMON"
    ended "$WORK/new/m" "$WORK/new/a.lbx"
    rm -r "$WORK/new"
    below_old idle=5s
    mv "$WORK/old" "$WORK/new"
    await 60 gone "$DAEMON"
    ended "$WORK/new/m" "$WORK/new/a.lbx"
}

case_a_users_mount_below_a_renamed_directory_is_ended() {
    need_user
    mkdir "$WORK/home"
    below_old
    lockbox umount "$WORK/old/m"
    cp "$PASSFILE" "$WORK/home/pass"
    mv "$WORK/old" "$WORK/home/old"
    chown -R "$TEST_USER" "$WORK/home"
    for what in umount archive signal; do
        as_user mount.lockbox "$WORK/home/old/a.lbx" "$WORK/home/old/m" -o "passfile=$WORK/home/pass"
        DAEMON=$(daemon_of "$WORK/home/old/a.lbx")
        mv "$WORK/home/old" "$WORK/home/new"
        case $what in
            umount) as_user lockbox umount "$WORK/home/new/m" ;;
            archive) as_user lockbox umount "$WORK/home/new/a.lbx" ;;
            signal)
                kill "$DAEMON"
                await 30 gone "$DAEMON"
                ;;
        esac
        ended "$WORK/home/new/m" "$WORK/home/new/a.lbx"
        mv "$WORK/home/new" "$WORK/home/old"
    done
}

moved() {
    local SNAPSHOTS=0
    # Of a mount that others share nothing is moved.
    mkdir "$WORK/private" "$WORK/else"
    mount -t tmpfs none "$WORK/private"
    mkdir "$WORK/private/m"
    create "$WORK/private/a.lbx"
    mount.lockbox "$WORK/private/a.lbx" "$WORK/private/m" -o "passfile=$PASSFILE,log=$WORK/a.log"
    DAEMON=$(daemon_of "$WORK/private/a.lbx")
    echo before >"$WORK/private/m/file"
    mount --move "$WORK/private/m" "$WORK/else"
    answers "$WORK/else" "$WORK/private/a.lbx"
    lockbox umount "$WORK/else"
    ended "$WORK/else" "$WORK/private/a.lbx"
}

case_a_mount_that_was_moved_is_found_and_ended() {
    alone moved
}

case_an_archive_is_known_by_its_file_and_not_by_its_name() {
    local SNAPSHOTS=0 name
    mkdir "$WORK/bind"
    below_old
    ln "$WORK/old/a.lbx" "$WORK/hard.lbx"
    ln -s old/a.lbx "$WORK/link.lbx"
    ln -s old/m "$WORK/link"
    mount --bind "$WORK/old" "$WORK/bind"
    answers "$WORK/old/m" "$WORK/hard.lbx" "$WORK/link.lbx" "$WORK/link" "$WORK/bind/a.lbx"
    umount "$WORK/bind"
    mv "$WORK/old/a.lbx" "$WORK/old/b.lbx"
    answers "$WORK/old/m" "$WORK/old/b.lbx"
    expect 13 'in use: process .* serves it at' lockbox ls --passfile "$PASSFILE" "$WORK/old/b.lbx"
    # Another archive takes the name that it had.
    cp "$WORK/copy.lbx" "$WORK/old/a.lbx"
    expect 2 'is not the file that was mounted at' lockbox umount "$WORK/old/a.lbx"
    lockbox ls --passfile "$PASSFILE" "$WORK/old/a.lbx" | shows file
    lockbox umount "$WORK/old/b.lbx"
    ended "$WORK/old/m" "$WORK/old/b.lbx"
}

case_paths_that_are_not_utf_8_are_known_by_their_bytes() {
    local name=$'caf\xe9' SNAPSHOTS=0 point archive
    for where in archive point both; do
        mkdir "$WORK/$where"
        point=$WORK/$where/m archive=$WORK/$where/a.lbx
        [[ $where == archive ]] || point=$WORK/$where/$name
        [[ $where == point ]] || archive=$WORK/$where/$name.lbx
        create "$archive"
        lockbox mount --passfile "$PASSFILE" -o "log=$WORK/a.log" "$archive" "$point"
        echo before >"$point/file"
        DAEMON=$(lockbox status --json "$point" | python3 -c '
import json, os, sys
status = json.load(sys.stdin)
for key, path in (("mount_point", sys.argv[1]), ("archive", sys.argv[2])):
    raw = os.fsencode(path)
    text = raw.decode("utf-8", "replace")
    assert status[key] == text, (status[key], text)
    is_text = text.encode() == raw
    assert (key + "_hex" in status) != is_text, status
    assert is_text or bytes.fromhex(status[key + "_hex"]) == raw, status
print(status["pid"])' "$point" "$archive")
        lockbox snapshot create "$point" "s$((++SNAPSHOTS))"
        lockbox backup --quiet "$archive" "$WORK/$where.lbx"
        lockbox umount "$point"
        ended "$point" "$archive"
    done
}

case_the_last_copy_of_a_removed_archive_is_not_thrown_away() {
    below_old
    rm "$WORK/old/a.lbx"
    echo after >"$WORK/old/m/after"
    expect 2 "only this mount.*copy the files" lockbox umount "$WORK/old/m"
    expect 2 "only this mount.*copy the files" lockbox umount --lazy "$WORK/old/m"
    mountpoint -q "$WORK/old/m" || fail "it is gone"
    cp -a "$WORK/old/m" "$WORK/saved"
    same "$(cat "$WORK/saved/file" "$WORK/saved/after")" $'before\nafter'
    lockbox umount --abandon "$WORK/old/m"
    gone "$DAEMON" || fail "the daemon is still there"
}

case_a_process_that_keeps_a_mount_in_another_namespace_is_named() {
    local keeper
    below_old stop_timeout=3600
    in_background unshare --mount --propagation private sleep 600
    keeper=$!
    is_apart() { [[ $(readlink "/proc/$keeper/ns/mnt") != $(readlink /proc/self/ns/mnt) ]]; }
    await 30 is_apart
    in_background lockbox umount "$WORK/old/m" 2>"$WORK/told"
    local umounting=$!
    await 60 grep -q "also mounted in another namespace: .*process $keeper (sleep) has it at $WORK/old/m" "$WORK/told"
    kill "$keeper"
    wait "$umounting"
    ended "$WORK/old/m" "$WORK/old/a.lbx"
}
