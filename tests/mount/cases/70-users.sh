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
    await gone "$pid"
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
    await gone "$pid"
    as_user lockbox mount --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    same "$(as_user cat "$HOME_DIR/point/file")" before
    as_user lockbox umount "$HOME_DIR/point"
}

case_root_gives_the_mount_of_a_user_no_rights() {
    users_archive
    as_user lockbox mount --passfile "$USER_PASS" "$HOME_DIR/box.lbx" "$HOME_DIR/point"
    # That user chooses what is in it, and may have exchanged the mount since.
    mount.lockbox "$HOME_DIR/box.lbx" "$HOME_DIR/point" -o remount,rw,set-id,devices
    awk -v point="$HOME_DIR/point" '$5 == point && $6 ~ /nosuid/ && $6 ~ /nodev/ { kept = 1 } END { exit !kept }' /proc/self/mountinfo ||
        fail 'the mount of a user may give rights'
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

# The user puts a link in the new file's place as soon as it is there, and a directory of root's in that of the hidden one of an extraction.
case_root_compacts_beside_a_user_who_exchanges_names() {
    local round command code done=0
    users_archive
    head -c 3000000 /dev/urandom >"$WORK/noise"
    lockbox add --passfile "$PASSFILE" "$HOME_DIR/box.lbx" "$WORK/noise"
    echo private >"$WORK/victim"
    chmod 600 "$WORK/victim"
    cat >"$WORK/exchange.py" <<'END'
import itertools, os, sys
home, victim, stop = sys.argv[1:]
os.chdir(home)
moved = None
for number in itertools.count():
    if os.path.exists(stop):
        break
    try:
        if moved:
            os.rename(moved, "precious")
            moved = None
        for name in os.listdir():
            if ".compact-" in name and not os.path.islink(name):
                os.rename(name, "away%d" % number)
                os.symlink(victim, name)
            elif name.startswith(".lockbox-extract-") and not moved:
                os.rename(name, "hidden%d" % number)
                os.rename("precious", name)
                moved = name
    except FileNotFoundError:
        pass
END
    mkdir -m 700 "$HOME_DIR/precious"
    echo private >"$HOME_DIR/precious/file"
    in_background as_user python3 "$WORK/exchange.py" "$HOME_DIR" "$WORK/victim" "$WORK/stop"
    for round in {1..6}; do
        for command in compact 'extract --force --to .'; do
            code=0
            # shellcheck disable=SC2086
            (cd "$HOME_DIR" && lockbox $command --passfile "$PASSFILE" box.lbx) >"$WORK/said" 2>&1 || code=$?
            # 13: somebody else changes the directory.
            [[ $code == 0 || $code == 13 ]] || fail "$command: exit code $code: $(cat "$WORK/said")"
            done=$((done + (code == 0)))
        done
    done
    # After its end no name changes.
    touch "$WORK/stop"
    wait "$!"
    same "$(stat -c '%U %a' "$WORK/victim")" 'root 600'
    # Whichever of its two names it has by now.
    same "$(find "$HOME_DIR" -name file -exec cat {} +)" private 'a directory of root was emptied'
    same "$(stat -c %U "$HOME_DIR/box.lbx")" "$TEST_USER"
    lockbox check --full --passfile "$PASSFILE" "$HOME_DIR/box.lbx"
    note "$done of 12 commands were done"
}

# The kernel removes the capabilities before it asks whether the owner may be "changed"; other file systems refuse before anything is changed.
case_a_refused_chown_takes_no_capabilities_away() {
    need_user
    new_archive box
    mount.lockbox --passfile "$PASSFILE" -o allow_other "$WORK/box.lbx" "$WORK/box"
    chmod 777 "$WORK/box"
    cat >"$WORK/chown.py" <<'P'
import errno, os, pwd, struct, sys
CAPABILITY = struct.pack("<IIIII", 0x02000001, 0x400, 0, 0, 0)
user = pwd.getpwnam(sys.argv[2])
path = os.path.join(sys.argv[1], "file")

def as_user(act):
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            act()
        except OSError as error:
            code = error.errno
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def has_capability():
    return "security.capability" in os.listxattr(path)

for mode in (0o6775, 0o2775, 0o4775, 0o6770):
    with open(path, "wb") as file:
        file.write(b"content")
    os.chown(path, 0, user.pw_gid)
    os.setxattr(path, "security.capability", CAPABILITY)
    os.chmod(path, mode)
    assert as_user(lambda: os.chown(path, -1, -1)) == errno.EPERM, oct(mode)
    assert has_capability() and os.getxattr(path, "security.capability") == CAPABILITY, oct(mode)
    assert os.stat(path).st_mode & 0o7777 == mode, oct(mode)
    # Who may write to it takes them away, once and for all.
    assert as_user(lambda: os.truncate(path, 3)) == 0
    assert not has_capability() and os.stat(path).st_mode & 0o4000 == 0, oct(mode)
    os.unlink(path)
P
    python3 "$WORK/chown.py" "$WORK/box" "$TEST_USER"
    detach box
}
