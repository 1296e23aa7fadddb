# What `lockbox mount` does for people: directories that come and go, nothing that is hidden unasked, media that cannot be written.
# shellcheck shell=bash disable=SC2317,SC2164

case_a_mount_makes_its_directory_and_takes_it_away() {
    local pid
    new_archive box
    rmdir "$WORK/box"
    cd "$WORK"
    # Without a directory: beside the archive, under its name.
    lockbox mount --passfile "$PASSFILE" box.lbx 2>stderr
    same "$(cat stderr)" '' 'a script is told something'
    mountpoint -q box || fail 'not mounted beside the archive'
    echo content >box/file
    lockbox umount box
    [[ ! -e box ]] || fail 'the directory stayed'
    # A missing one that is named; a signal ends the mount.
    lockbox mount --passfile "$PASSFILE" -o "log=$WORK/box.log" box.lbx elsewhere
    same "$(cat elsewhere/file)" content
    pid=$(daemon_of "$WORK/box.lbx")
    kill "$pid"
    await gone "$pid"
    [[ ! -e elsewhere ]] || fail 'the directory stayed after a signal'
    # Detached while it is in use, it goes at the end.
    lockbox mount --passfile "$PASSFILE" box.lbx
    pid=$(daemon_of "$WORK/box.lbx")
    exec 7>box/open
    lockbox umount --lazy box 2>/dev/null 7>&-
    [[ -d box && ! -e box/open ]] || fail 'it went while it was in use'
    exec 7>&-
    await gone "$pid"
    [[ ! -e box ]] || fail 'the directory stayed after a lazy end'
    # In the foreground as well.
    in_background lockbox mount --foreground --passfile "$PASSFILE" box.lbx
    await mountpoint -q box
    lockbox umount box
    wait "${BACKGROUND[-1]}"
    [[ ! -e box ]] || fail 'the directory stayed after the foreground'
    # What was there before stays, and so does what somebody put in its place meanwhile.
    mkdir box
    lockbox mount --passfile "$PASSFILE" box.lbx
    lockbox umount box
    [[ -d box ]] || fail 'a directory that was there is gone'
    rmdir box
    # mount(8) and its program make nothing.
    expect 15 'no such file' mount.lockbox -o "passfile=$PASSFILE" box.lbx box
    # Nothing is left of a mount that failed.
    echo 'another one' >wrong
    chmod 600 wrong
    expect 10 'wrong passphrase' lockbox mount --passfile wrong box.lbx
    [[ ! -e box ]] || fail 'a failed mount left its directory'
    expect 15 '/dev/fuse is missing' unshare --mount bash -c '
        mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && mknod /dev/random c 1 8 || exit 99
        exec lockbox mount --passfile "$1" box.lbx' - "$PASSFILE"
    [[ ! -e box ]] || fail 'a failed mount left its directory'
    expect 15 'no such file' lockbox mount --passfile "$PASSFILE" box.lbx no/such
    mv box.lbx box
    expect 1 'box has no suffix' lockbox mount --passfile "$PASSFILE" box
    expect 1 'name the directory to mount it on' lockbox mount https://localhost/box.lbx
    ln -s nowhere link
    expect 15 'no such file' lockbox mount --passfile "$PASSFILE" box link
    [[ -L link && ! -e nowhere ]] || fail 'a link was followed'
    terminal.py -- lockbox mount --passfile "$PASSFILE" box point >screen || fail "$(cat screen)"
    # Wrapped at the terminal's width.
    same "$(tr -s '\r\n ' ' ' <screen)" \
        "Your files are in $WORK/point. To close: lockbox umount $WORK/point (the folder disappears, the files stay in box) "
    lockbox umount point
    same "$(terminal.py -- lockbox mount --quiet --passfile "$PASSFILE" box point)" ''
    lockbox umount point
}

case_a_mount_hides_nothing_unasked() {
    new_archive box
    cd "$WORK"
    echo precious >box/file
    expect 15 'box is not empty, .*-o nonempty' lockbox mount --passfile "$PASSFILE" box.lbx
    expect 15 'box is not empty, .*-o nonempty' lockbox mount --passfile "$PASSFILE" box.lbx box
    ! mountpoint -q box || fail 'mounted all the same'
    lockbox mount --passfile "$PASSFILE" -o ro,nonempty box.lbx box
    [[ ! -e box/file ]] || fail 'not mounted'
    # What is mounted there already is told as ever.
    expect 13 'already mounted at' lockbox mount --passfile "$PASSFILE" box.lbx box
    lockbox umount box
    same "$(cat box/file)" precious
}

case_mounting_ends_with_codes_of_lockbox_wherever_its_program_is_installed() {
    alone where_mount_8_looks
}

where_mount_8_looks() {
    local lockbox program
    new_archive box
    cd "$WORK"
    (umask 077 && echo wrong >wrong)
    mkdir bin
    lockbox=$(type -P lockbox)
    program=$(type -P mount.lockbox)
    cp "$lockbox" bin/lockbox
    mount -t tmpfs tmpfs /usr/sbin
    cp "$program" /usr/sbin/mount.lockbox
    export PATH=/usr/sbin:/usr/bin
    expect 10 'wrong passphrase' bin/lockbox mount --passfile wrong box.lbx box
    expect 10 'wrong passphrase' bin/lockbox exec --passfile wrong box.lbx -- true
    # Who goes by its path, as mount(8), gets that one's.
    expect 32 'wrong passphrase' /usr/sbin/mount.lockbox -o "passfile=$WORK/wrong" box.lbx box
}

case_an_archive_on_a_read_only_medium_is_mounted_read_only() {
    new_archive box
    cd "$WORK"
    mkdir medium
    truncate -s 16M image
    mkfs.ext4 -q image
    mount -o loop image medium
    cp box.lbx medium/
    mount -o remount,ro medium
    lockbox mount --passfile "$PASSFILE" medium/box.lbx box 2>stderr
    same "$(cat stderr)" "mount.lockbox: $WORK/medium/box.lbx is on a read-only medium, so it is mounted read-only"
    expect 1 'read-only file system' touch box/file
    lockbox umount box
    # Who wants that is told nothing.
    lockbox mount --passfile "$PASSFILE" -o ro medium/box.lbx box 2>stderr
    same "$(cat stderr)" ''
    lockbox umount box
    # Beside it there is no place for a directory.
    expect 15 'cannot create the directory .*medium/box: Read-only' lockbox mount --passfile "$PASSFILE" medium/box.lbx
    umount medium
}

case_root_makes_no_directory_where_another_user_may_exchange_it() {
    need_user
    new_archive box
    mkdir "$WORK/theirs"
    cp "$WORK/box.lbx" "$WORK/theirs/"
    chown "$TEST_USER" "$WORK/theirs"
    expect 15 'cannot create the directory .*/theirs/box: other users may change its path' \
        lockbox mount --passfile "$PASSFILE" "$WORK/theirs/box.lbx"
    [[ ! -e $WORK/theirs/box ]] || fail 'made all the same'
}
