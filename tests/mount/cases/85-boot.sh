# Mounted archives found again and ended: status, --all, idleness, suspending, and what mounts at boot.
# shellcheck shell=bash disable=SC2317,SC2164

# field FILE EXPRESSION: of a line of JSON, which is `o` in the expression.
field() {
    python3 -c 'import json, sys; o = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"
}

case_status_tells_holder_use_and_memory() {
    local pid
    new_archive box
    attach box memory=64M
    pid=$(daemon_of "$WORK/box.lbx")
    head -c 3000000 /dev/urandom >"$WORK/box/file"
    sync -f "$WORK/box/file"
    python3 -c 'import os, sys; os.fsync(os.open(sys.argv[1], os.O_RDONLY))' "$WORK/box/file"
    exec 7<"$WORK/box/file"
    cd "$WORK/box"
    ln -s box "$WORK/alias"
    local name
    for name in "$WORK/box" "$WORK/box.lbx" "$WORK/alias" .; do
        lockbox status --json "$name" >"$WORK/status"
        same "$(field "$WORK/status" 'o["pid"], o["user"], o["state"], o["open_files"], o["memory_limit"]')" \
            "($pid, 'root', 'mounted', 1, 67108864)"
    done
    cd "$WORK"
    same "$(field "$WORK/status" 'o["mount_point"], o["archive"], o["read_only"], o["latched"]')" \
        "('$WORK/box', '$WORK/box.lbx', False, None)"
    field "$WORK/status" '0 < o["commits"] < o["generation"] and 3000000 < o["used_bytes"] <= o["file_bytes"]' | grep -qx True
    field "$WORK/status" '0 < o["memory_bytes"] <= o["memory_limit"] and o["caches"]["nodes"]["hits"] > 0' | grep -qx True
    field "$WORK/status" 'o["options"]' | grep -q 'rw,.*memory=67108864'
    field "$WORK/status" 'o["since"]' | grep -q "^$(date -u +%Y-%m-%dT)"
    exec 7<&-
    lockbox status "$WORK/box" >"$WORK/status"
    grep -q "^Held by  *process $pid (user root)" "$WORK/status"
    grep -q '^Memory .* of 64 MiB' "$WORK/status"
    lockbox status >"$WORK/status"
    grep -q "^Mount point  *$WORK/box\$" "$WORK/status"
    # Detached, and still listed as what it is.
    exec 7<"$WORK/box/file"
    in_background lockbox umount --lazy "$WORK/box" 7<&-
    until_detached() { lockbox status --json "$WORK/box.lbx" >"$WORK/status" && [[ $(field "$WORK/status" 'o["state"]') == detached ]]; }
    await 20 until_detached
    exec 7<&-
    await 20 gone "$pid"
    expect 2 'neither a mounted archive' lockbox status "$WORK/box.lbx"
    # One whose daemon died.
    attach box
    kill_daemon box
    expect 2 'no daemon answers' lockbox status "$WORK/box"
    expect 2 'no daemon answers' lockbox status "$WORK/box.lbx"
    lockbox umount "$WORK/box"
}

# In a namespace of its own, with other mounts of archives and other runtime directories out of sight: --all means all.
alone() {
    unshare --mount --propagation private bash -Eeuo pipefail -c '
        source "$1/support.sh"
        case=$2
        mount -t tmpfs none /mnt
        mkdir /mnt/work /mnt/bin
        mount --bind "$3" /mnt/work
        mount --bind "$SCRATCH_DIR/bin" /mnt/bin
        awk "/ - fuse\.lockbox / { print \$5 }" /proc/self/mountinfo | while read -r point; do umount -l "$point"; done
        mount -t tmpfs none /run
        mount -t tmpfs -o mode=1777 none /tmp
        export PATH=/mnt/bin:$PATH
        WORK=/mnt/work PASSFILE=/mnt/work/passphrase
        trap "echo \"line \$LINENO: \\\"\$BASH_COMMAND\\\" failed\"" ERR
        cd /mnt/work
        source "$1/cases/85-boot.sh"
        "$case"
    ' - "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." "$1" "$WORK"
}

case_umount_all_leaves_only_what_is_busy() {
    need_user
    alone all_is_unmounted
}

all_is_unmounted() {
    local users=$WORK/users status=0
    new_archive first
    new_archive second
    new_archive third
    mkdir "$users" "$users/point"
    cp "$PASSFILE" "$users/passphrase"
    chown -R "$TEST_USER:" "$users"
    as_user lockbox create --weak-kdf --kdf-memory 1 --passfile "$users/passphrase" "$users/box.lbx"
    attach first
    # As a login shell of root would, whose runtime directory is not that of the boot.
    mkdir -p -m 700 /run/user/0
    XDG_RUNTIME_DIR=/run/user/0 attach second
    attach third
    as_user lockbox mount --passfile "$users/passphrase" "$users/box.lbx" "$users/point"
    # Root sees all, the user only what is the user's.
    same "$(lockbox status --json | wc -l)" 4
    as_user lockbox status --json >"$WORK/status"
    same "$(field "$WORK/status" 'o["mount_point"], o["user"]')" "('$users/point', '$TEST_USER')"
    expect 2 'only .* may ask' as_user lockbox status "$WORK/first"
    expect 13 "already mounted at $WORK/second by process" mount.lockbox "$WORK/second.lbx" "$WORK/first" -o "passfile=$PASSFILE"
    # Root finds a user's daemon by name.
    lockbox status "$users/box.lbx" | grep -q "user $TEST_USER"
    exec 7>"$WORK/second/file"
    lockbox umount --all 2>"$WORK/stderr" || status=$?
    same "$status" 13
    same "$(grep -c busy "$WORK/stderr")" 1
    grep -q "$WORK/second is busy" "$WORK/stderr"
    same "$(lockbox status --json | wc -l)" 1
    exec 7>&-
    as_user lockbox mount --passfile "$users/passphrase" "$users/box.lbx" "$users/point"
    as_user lockbox umount --all
    mountpoint -q "$WORK/second" || fail 'a user unmounted what is not theirs'
    as_user lockbox mount --passfile "$users/passphrase" "$users/box.lbx" "$users/point"
    lockbox umount "$users/point"
    # A dead mount goes too.
    attach first
    kill -9 "$(daemon_of "$WORK/first.lbx")"
    lockbox umount --all
    same "$(lockbox status --json)" ''
    same "$(mounts_below "$WORK" | grep -vx "$WORK" || true)" ''
    lockbox umount --all
}
