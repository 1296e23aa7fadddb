# Ordinary users, and several users on one mount.
# shellcheck shell=bash disable=SC2317,SC2164

# The user's own directory with an archive in it.
users_archive() {
    need_user
    HOME_DIR=$WORK/home
    mkdir "$HOME_DIR" "$HOME_DIR/point"
    cp "$PASSFILE" "$HOME_DIR/passphrase"
    chown -R "$TEST_USER:" "$HOME_DIR"
    USER_PASS=$HOME_DIR/passphrase
    as_user lockbox create --weak-kdf --kdf-memory 1 --passfile "$USER_PASS" "$HOME_DIR/box.lbx"
}

case_an_ordinary_user_mounts_through_fusermount3() {
    users_archive
    as_user lockbox mount --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    as_user sh -c "echo mine >'$HOME_DIR/point/file' && mkdir '$HOME_DIR/point/directory'"
    same "$(as_user stat -c %U "$HOME_DIR/point/file")" "$TEST_USER"
    # The kernel keeps everybody else out, root included.
    expect 1 'permission denied' cat "$HOME_DIR/point/file"
    expect 1 'permitted' as_user chown root "$HOME_DIR/point/file"
    as_user lockbox umount "$HOME_DIR/point"
    ! mountpoint -q "$HOME_DIR/point" || fail 'still mounted'
    as_user lockbox mount --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    same "$(as_user cat "$HOME_DIR/point/file")" mine
    expect 13 'already mounted|in use' as_user lockbox mount --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    as_user lockbox umount "$HOME_DIR/box.lbx"
    as_user lockbox check --full --passfile "$USER_PASS" "$HOME_DIR/box.lbx"
}

case_a_users_dead_mount_is_cleared_by_the_next() {
    local pid
    users_archive
    as_user lockbox mount --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    as_user dd if=/dev/urandom of="$HOME_DIR/point/file" bs=100k count=1 conv=fsync status=none
    pid=$(daemon_of "$HOME_DIR/box.lbx")
    as_user kill -9 "$pid"
    await 30 gone "$pid"
    as_user lockbox mount --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    same "$(as_user stat -c %s "$HOME_DIR/point/file")" 102400
    as_user lockbox umount "$HOME_DIR/point"
}

case_what_root_makes_read_only_of_a_user_is_durable() {
    local pid
    users_archive
    as_user lockbox mount -o sync=never --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    as_user sh -c "echo before >'$HOME_DIR/point/file'"
    mount.lockbox "$HOME_DIR/box.lbx" "$HOME_DIR/point" -o remount,ro,nosuid,nodev
    expect 1 'read-only file system' as_user touch "$HOME_DIR/point/other"
    pid=$(daemon_of "$HOME_DIR/box.lbx")
    kill -9 "$pid"
    await 30 gone "$pid"
    as_user lockbox mount --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    same "$(as_user cat "$HOME_DIR/point/file")" before
    as_user lockbox umount "$HOME_DIR/point"
}

case_a_missing_fusermount3_is_explained() {
    users_archive
    expect 15 'fusermount3 is missing' as_user env PATH="$SCRATCH_DIR/bin" \
        "$SCRATCH_DIR/bin/mount.lockbox" "$HOME_DIR/box.lbx" "$HOME_DIR/point" -o "passfile=$USER_PASS"
    as_user lockbox check --passfile "$USER_PASS" "$HOME_DIR/box.lbx"
}

case_permissions_hold_between_users() {
    need_user
    new_archive box
    attach box allow_other
    chmod 755 "$WORK/box"
    echo public >"$WORK/box/public"
    echo private >"$WORK/box/private"
    chmod 600 "$WORK/box/private"
    mkdir -m 1777 "$WORK/box/everybody"
    mkdir -m 2775 "$WORK/box/group"
    chgrp 4242 "$WORK/box/group"
    same "$(as_user cat "$WORK/box/public")" public
    expect 1 'permission denied' as_user cat "$WORK/box/private"
    expect 2 'permission denied' as_user sh -c "echo x >'$WORK/box/public'"
    as_user sh -c "umask 027; echo theirs >'$WORK/box/everybody/file'"
    same "$(stat -c '%U %a' "$WORK/box/everybody/file")" "$TEST_USER 640"
    echo roots >"$WORK/box/everybody/roots"
    expect 1 'not permitted' as_user rm -f "$WORK/box/everybody/roots"
    touch "$WORK/box/group/file"
    same "$(stat -c %g "$WORK/box/group/file")" 4242
    setfacl -m "u:$TEST_USER:r" "$WORK/box/private"
    same "$(as_user cat "$WORK/box/private")" private
    detach box
}
