# Mounted archives found again and ended: status, --all, idleness, suspending, and what mounts at boot.
# shellcheck shell=bash disable=SC2317,SC2164

# field FILE EXPRESSION: of a line of JSON, which is `o` in the expression.
field() {
    python3 -c 'import json, sys; o = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"
}

case_status_tells_holder_use_and_memory() {
    local pid day
    new_archive box
    rm "$WORK/box.lbx"
    lockbox create --weak-kdf --kdf-memory 128 --kdf-passes 1 --passfile "$PASSFILE" "$WORK/box.lbx"
    day=$(date -u +%F)
    attach box memory=64M,threads=2
    lockbox status --json "$WORK/box" >"$WORK/memory"
    pid=$(daemon_of "$WORK/box.lbx")
    head -c 3000000 /dev/urandom >"$WORK/box/file"
    sync -f "$WORK/box/file"
    python3 -c 'import os, sys; os.fsync(os.open(sys.argv[1], os.O_RDONLY))' "$WORK/box/file"
    exec 7<"$WORK/box/file"
    cd "$WORK/box"
    ln -s box "$WORK/alias"
    # The kernel tells the daemon of the other closes a moment later.
    is_open_once() { lockbox status --json "$WORK/box" >"$WORK/status" && [[ $(field "$WORK/status" 'o["open_files"]') == 1 ]]; }
    await is_open_once
    local name
    for name in "$WORK/box" "$WORK/box.lbx" "$WORK/alias" .; do
        lockbox status --json "$name" >"$WORK/status"
        same "$(field "$WORK/status" 'o["pid"], o["user"], o["state"], o["open_files"], o["memory_limit"]')" \
            "($pid, 'root', 'mounted', 1, 67108864)"
    done
    cd "$WORK"
    same "$(field "$WORK/status" 'o["mount_point"], o["archive"], o["read_only"], o["latched"]')" \
        "('$WORK/box', '$WORK/box.lbx', False, None)"
    field "$WORK/status" '0 < o["commits"] < o["generation"] and 3000000 < o["used_bytes"] <= o["file_bytes"]' | shows -x True
    field "$WORK/status" '0 < o["memory_bytes"] <= o["memory_limit"] and o["caches"]["nodes"]["hits"] > 0' | shows -x True
    field "$WORK/status" 'o["options"]' | shows 'rw,.*memory=67108864'
    field "$WORK/status" 'o["since"]' | shows -E "^($day|$(date -u +%F))T"
    # A small fsync is an entry of the log until the clock commits, and nothing is left that is not durable.
    stop_clock box
    python3 -c 'import os, sys; f = os.open(sys.argv[1], os.O_WRONLY); os.pwrite(f, b"x", 5); os.fsync(f)' "$WORK/box/file"
    lockbox status --json "$WORK/box" >"$WORK/status"
    field "$WORK/status" 'o["log"]["entries"] > 0 and o["log"]["bytes"] >= o["log"]["used_bytes"] >= 4096 and o["dirty_bytes"] == 0' | shows -x True
    start_clock
    same "$(lockbox status "$WORK/box.lbx")" "$WORK/box  $WORK/box.lbx  mounted, busy"
    exec 7<&-
    # The kernel tells the daemon a moment later.
    is_idle() { [[ $(lockbox status "$WORK/box") == "$WORK/box  $WORK/box.lbx  mounted" ]]; }
    await is_idle
    lockbox status --all "$WORK/box" >"$WORK/status"
    grep -q '^Log  *[1-9]' "$WORK/status"
    grep -q "^Held by  *process $pid (user root)" "$WORK/status"
    grep -q '^Memory .* of 67108864 bytes' "$WORK/status"
    # The mounting command took 128 MiB to derive the key, which is none of the daemon's: that has at most 33 MiB beside its 64 (63-memory.sh).
    field "$WORK/memory" '1 << 20 < o["peak_resident_bytes"] < 128 << 20' | shows -x True
    # All of root's, among them perhaps dead ones of other cases.
    lockbox status >"$WORK/status" || true
    grep -q "^$WORK/box  *$WORK/box.lbx  *mounted\$" "$WORK/status"
    # Detached, and still listed as what it is.
    exec 7<"$WORK/box/file"
    in_background lockbox umount --lazy "$WORK/box" 7<&-
    until_detached() { lockbox status --json "$WORK/box.lbx" >"$WORK/status" && [[ $(field "$WORK/status" 'o["state"]') == detached ]]; }
    await until_detached
    exec 7<&-
    await gone "$pid"
    expect 2 'is not mounted' lockbox status "$WORK/box.lbx"
    # One whose daemon died.
    attach box
    kill_daemon box
    expect 2 'no daemon answers' lockbox status "$WORK/box"
    grep -q "^$WORK/box  $WORK/box.lbx  no daemon answers\$" "$WORK/stdout"
    expect 2 'no daemon answers' lockbox status --all "$WORK/box.lbx"
    grep -q '^Held by  *no daemon that answers' "$WORK/stdout"
    lockbox umount "$WORK/box"
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
    expect 2 'only .* may send requests' as_user lockbox status "$WORK/first"
    expect 13 "already mounted at $WORK/second by process" mount.lockbox "$WORK/second.lbx" "$WORK/first" -o "passfile=$PASSFILE"
    # Root finds a user's daemon by the place of its mount; what it says of its archive anybody could say.
    lockbox status "$users/point" | shows "user $TEST_USER"
    expect 2 "user $TEST_USER has a mount of this name at $users/point" lockbox status "$users/box.lbx"
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
    # A mount that is in two places is one for its user, and goes from both.
    attach third
    mkdir "$WORK/alias"
    mount --bind "$WORK/third" "$WORK/alias"
    lockbox status >"$WORK/status"
    same "$(cut -d ' ' -f 1 "$WORK/status" | sort)" "$WORK/second"$'\n'"$WORK/third"
    same "$(lockbox status --check)" 'LOCKBOX OK: 2 archives mounted'
    same "$(lockbox status --metrics | grep -c '^lockbox_mount_up{.* 1$')" 2
    lockbox status --json "$WORK/alias" >"$WORK/status"
    same "$(field "$WORK/status" 'o["mount_point"], o["state"]')" "('$WORK/third', 'mounted')"
    lockbox umount --all
    same "$(lockbox status --json)" ''
    # A dead mount goes too.
    attach first
    kill -9 "$(daemon_of "$WORK/first.lbx")"
    lockbox umount --all
    same "$(lockbox status --json)" ''
    same "$(mounts_below "$WORK" | grep -vx "$WORK" || true)" ''
    lockbox umount --all
}

# The end of an idle mount is awaited, whatever it takes; what must not be ended is held while others have been.
case_an_idle_mount_is_unmounted_and_one_in_use_is_not() {
    local pid other
    new_archive box
    new_archive open
    new_archive inside
    # Longer than a busy machine takes from the mount to its first use.
    attach open idle=15s
    echo content >"$WORK/open/file"
    exec 7<"$WORK/open/file"
    attach inside idle=15s,ro 7<&-
    (cd "$WORK/inside" && exec sleep 600 7<&-) &
    BACKGROUND+=($!)
    other=$(daemon_of "$WORK/inside.lbx")
    # Last, so that the time of the others has passed too when this one goes.
    attach box idle=15s 7<&-
    pid=$(daemon_of "$WORK/box.lbx")
    echo content >"$WORK/box/file"
    await gone "$pid"
    ! mountpoint -q "$WORK/box" || fail 'the daemon went and the mount stayed'
    grep -q 'the archive was not used' "$WORK/box.log"
    # What is open, and only read from the kernel's cache since, is there still; so is a working directory.
    same "$(cat <&7)" content
    mountpoint -q "$WORK/open" && mountpoint -q "$WORK/inside"
    lockbox status --json "$WORK/open" >"$WORK/status"
    field "$WORK/status" 'o["options"]' | shows idle=15
    exec 7<&-
    kill "${BACKGROUND[0]}"
    await gone "$other"
    await lockbox check --full --passfile "$PASSFILE" "$WORK/open.lbx"
    attach box
    same "$(cat "$WORK/box/file")" content
    detach box
    expect 1 'idle=' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "idle=soon,passfile=$PASSFILE"
}

# A bus of its own with a logind that sleeps on request: the lines of $WORK/logind tell what it saw.
start_logind() {
    command -v dbus-daemon >/dev/null
    mkfifo "$WORK/sleep"
    export DBUS_SYSTEM_BUS_ADDRESS=unix:path=$WORK/bus
    in_background dbus-daemon --session --nofork --nosyslog --address="$DBUS_SYSTEM_BUS_ADDRESS" >/dev/null
    await test -S "$WORK/bus"
    in_background /usr/bin/python3 -u "$SCRATCH_DIR/bin/logind.py" "$WORK/sleep" >"$WORK/logind"
    await grep -q ready "$WORK/logind"
    # Keeps the pipe open, so that each line below is one order.
    exec 8>"$WORK/sleep"
}

case_the_archive_is_locked_before_the_machine_sleeps() {
    local pid
    start_logind
    new_archive box
    new_archive busy
    attach box lock-on-suspend,sync=never
    attach busy lock-on-suspend,sandbox=off
    ! grep -q 'no effect' "$WORK"/*.log || fail 'logind was not heard'
    await grep -q 'inhibited sleep delay lockbox 2' "$WORK/logind"
    pid=$(daemon_of "$WORK/box.lbx")
    head -c 3000000 /dev/urandom >"$WORK/content"
    cp "$WORK/content" "$WORK/box/file"
    cp "$WORK/content" "$WORK/busy/file"
    exec 7<"$WORK/busy/file"
    cat <&7 >/dev/null
    lockbox status --json "$WORK/busy" >"$WORK/before"
    # A signal of somebody else changes nothing.
    dbus-send --bus="$DBUS_SYSTEM_BUS_ADDRESS" --type=signal /org/freedesktop/login1 org.freedesktop.login1.Manager.PrepareForSleep boolean:true
    echo sleep >&8
    # It sleeps when both let go: one archive is closed, the other saved.
    await grep -q 'asleep' "$WORK/logind"
    await gone "$pid"
    same "$(grep -c 'gave up waiting' "$WORK/logind" || true)" 0
    ! mountpoint -q "$WORK/box" || fail 'still mounted'
    lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    mountpoint -q "$WORK/busy"
    grep -q 'in use and stays mounted' "$WORK/busy.log"
    lockbox status --json "$WORK/busy" >"$WORK/after"
    same "$(field "$WORK/after" 'o["dirty_bytes"], o["caches"]["cells"]["bytes"], o["caches"]["heads"]["bytes"]')" '(0, 0, 0)'
    # The kernel's pages are gone too: reading comes to the daemon again.
    same_file "$WORK/content" /proc/self/fd/7
    lockbox status --json "$WORK/busy" >"$WORK/later"
    [[ $(field "$WORK/later" 'o["caches"]["heads"]["misses"]') -gt $(field "$WORK/after" 'o["caches"]["heads"]["misses"]') ]] ||
        fail 'the kernel kept what it had read'
    exec 7<&-
    echo wake >&8
    await grep -q 'inhibited sleep delay lockbox 3' "$WORK/logind"
    pid=$(daemon_of "$WORK/busy.lbx")
    echo sleep >&8
    await gone "$pid"
    # Although a thread still listens to logind when the daemon ends.
    ! grep -q 'ended without closing the archive' "$WORK"/*.log || fail 'an orderly end is taken for a death'
    attach box
    same_file "$WORK/content" "$WORK/box/file"
    detach box
}

case_a_detached_mount_is_saved_before_the_machine_sleeps() {
    start_logind
    new_archive box
    attach box lock-on-suspend,sync=never
    await grep -q 'inhibited sleep delay lockbox 1' "$WORK/logind"
    exec 7>"$WORK/box/file"
    in_background lockbox umount --lazy "$WORK/box" 7>&- 8>&-
    await sh -c "! mountpoint -q '$WORK/box'"
    echo written >&7
    echo sleep >&8
    await grep -q 'asleep' "$WORK/logind"
    same "$(grep -c 'gave up waiting' "$WORK/logind" || true)" 0
    # It never wakes up.
    kill_daemon box
    exec 7>&-
    attach box
    same "$(cat "$WORK/box/file")" written
    detach box
}

case_without_a_bus_the_mount_works_and_says_so() {
    new_archive box
    DBUS_SYSTEM_BUS_ADDRESS=unix:path=$WORK/nothing mount.lockbox "$WORK/box.lbx" "$WORK/box" \
        -o "passfile=$PASSFILE,lock-on-suspend" 2>"$WORK/stderr"
    grep -q 'lock-on-suspend has no effect: logind cannot be reached' "$WORK/stderr"
    echo content >"$WORK/box/file"
    detach box
}

case_a_supervisor_is_told_of_start_and_end() {
    new_archive box
    in_background python3 -uc 'import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
listener.bind(sys.argv[1])
while True:
    print(listener.recv(4096).decode().replace("\n", " "))' "$WORK/notify" >"$WORK/heard"
    await test -S "$WORK/notify"
    # What the unit starts, in the surroundings that systemd gives it.
    mkdir -m 700 "$WORK/credentials"
    install -m 400 "$PASSFILE" "$WORK/credentials/passphrase"
    local start unit
    unit=$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../packaging/systemd/lockbox-mount@.service
    start=$(sed -n 's|^ExecStart=/usr/bin/||p' "$unit")
    [[ $start == 'lockbox mount --foreground '* ]] || fail "the unit starts something else: $start"
    ARCHIVE=$WORK/box.lbx DIRECTORY=$WORK/box OPTIONS=idle=1h,nosuid CREDENTIALS_DIRECTORY=$WORK/credentials \
        NOTIFY_SOCKET=$WORK/notify in_background bash -c "exec $start"
    local pid=$!
    await grep -q "^READY=1 STATUS=mounted at $WORK/box" "$WORK/heard"
    echo content >"$WORK/box/file"
    kill "$pid"
    await grep -q '^STOPPING=1' "$WORK/heard"
    await gone "$pid"
    same "$(lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" file)" content
    expect 2 'cannot reach the supervisor' env NOTIFY_SOCKET="$WORK/nobody" \
        lockbox mount --foreground --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/box"
}

# In a namespace whose /sbin has the links that a package installs, since mount(8) looks nowhere else.
installed() {
    mkdir "$WORK/sbin"
    mount -t tmpfs none "$WORK/sbin"
    mkdir "$WORK/sbin/upper" "$WORK/sbin/work"
    ln -s "$(command -v mount.lockbox)" "$WORK/sbin/upper/mount.lockbox"
    ln -s mount.lockbox "$WORK/sbin/upper/mount.fuse.lockbox"
    ln -s "$(command -v lockbox)" "$WORK/sbin/upper/umount.lockbox"
    ln -s umount.lockbox "$WORK/sbin/upper/umount.fuse.lockbox"
    unshare --mount --propagation private bash -Eeuo pipefail -c '
        source "$1/support.sh"
        case=$2 WORK=$3 PASSFILE=$4 REPOSITORY=$1/../..
        trap "echo \"line \$LINENO: \\\"\$BASH_COMMAND\\\" failed\"" ERR
        mount -t overlay -o "lowerdir=$(realpath /sbin),upperdir=$WORK/sbin/upper,workdir=$WORK/sbin/work" none "$(realpath /sbin)"
        source "$1/cases/85-boot.sh"
        "$case"
    ' - "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." "$1" "$WORK" "$PASSFILE"
    umount "$WORK/sbin"
}

case_mount_8_mounts_from_its_command_line_and_fstab() {
    installed mount_8
}

# Of /proc/self/mountinfo, what mount(8) and desktops look at.
mounted_as() {
    awk -v point="$1" '$5 == point { for (n = 7; $n != "-"; n++); print $6, $(n + 1), $(n + 2) }' /proc/self/mountinfo
}

mount_8() {
    local type words="passfile=$PASSFILE,log=$WORK/box.log"
    new_archive box
    new_archive other
    for type in lockbox fuse.lockbox; do
        mount -t "$type" -o "$words" "$WORK/box.lbx" "$WORK/box"
        [[ $(mounted_as "$WORK/box") == rw,nosuid,nodev,noatime*" fuse.lockbox $WORK/box.lbx" ]] || fail "$(mounted_as "$WORK/box")"
        mount -o remount,ro "$WORK/box"
        expect 1 'read-only' touch "$WORK/box/file"
        # With both names mount(8) passes on nothing of what the mount has.
        mount -t "$type" -o remount,rw "$WORK/box.lbx" "$WORK/box"
        [[ $(mounted_as "$WORK/box") == rw,nosuid,nodev,noatime* ]] || fail "$(mounted_as "$WORK/box")"
        umount "$WORK/box"
    done
    mount -t lockbox -o "$words,ro,noexec,allow_other,default_permissions,noatime" "$WORK/box.lbx" "$WORK/box"
    [[ $(mounted_as "$WORK/box") == ro,nosuid,nodev,noexec,noatime* ]] || fail "$(mounted_as "$WORK/box")"
    findmnt -n -o OPTIONS "$WORK/box" | shows allow_other
    findmnt -n -t fuse.lockbox --source "$WORK/box.lbx" -o TARGET | shows -x "$WORK/box"
    umount "$WORK/box"

    # Exit codes: those of mount(8) through it, our own for who calls the program by its name.
    expect 1 'unknown mount option: bogus' mount -t lockbox -o "$words,bogus" "$WORK/box.lbx" "$WORK/box"
    expect 32 'wrong passphrase' mount -t lockbox -o "passfile=$(wrong_passfile)" "$WORK/box.lbx" "$WORK/box"
    expect 10 'wrong passphrase' mount.lockbox -o "passfile=$(wrong_passfile)" "$WORK/box.lbx" "$WORK/box"
    expect 32 'no such file' mount -t lockbox -o "$words" "$WORK/nothing.lbx" "$WORK/box"
    expect 1 'usage' /sbin/mount.lockbox "$WORK/box.lbx"
    mount -t lockbox -o "$words,nofail" "$WORK/nothing.lbx" "$WORK/box"
    mount -s -t lockbox -o "$words,bogus,quux=1" "$WORK/box.lbx" "$WORK/box"
    exec 7>"$WORK/box/open"
    expect 32 'busy' umount "$WORK/box"
    exec 7>&-
    umount "$WORK/box"
    mount -f -t lockbox -o "$words" "$WORK/box.lbx" "$WORK/box"
    ! mountpoint -q "$WORK/box" || fail 'a fake mount is there'
    expect 1 'idle=' /sbin/mount.lockbox "$WORK/box.lbx" "$WORK/box" -f -o "$words,idle=x"
    /sbin/mount.lockbox "$WORK/box.lbx" "$WORK/box" -n -v -o "rw,$words"
    expect 32 'already mounted' mount -t lockbox -o "$words" "$WORK/box.lbx" "$WORK/other"
    # Into another namespace neither of the two programs reaches, and both say what does.
    expect 1 'nsenter --mount=' mount -N $$ -t lockbox -o "$words" "$WORK/other.lbx" "$WORK/other"
    expect '1|32' 'nsenter --mount=' umount -N $$ "$WORK/box"
    mountpoint -q "$WORK/box"
    umount "$WORK/box"

    cat >"$WORK/fstab" <<END
$WORK/box.lbx $WORK/box lockbox _netdev,nofail,relatime,users,exec,x-gvfs-show,comment=a,$words 0 0
$WORK/other.lbx $WORK/other lockbox auto,noatime,x-systemd.automount,passfile=$PASSFILE 0 2
$WORK/none.lbx $WORK/none lockbox noauto 0 0
END
    mount -T "$WORK/fstab" -a
    mountpoint -q "$WORK/box" && mountpoint -q "$WORK/other"
    echo content >"$WORK/box/file"
    mount -T "$WORK/fstab" -a
    same "$(mounts_below "$WORK" | grep -c -e "^$WORK/box\$" -e "^$WORK/other\$")" 2
    umount -a -t fuse.lockbox -O x-nothing
    mountpoint -q "$WORK/box"
    # Others may have archives mounted: only ours are to go, and nobody else's daemon is to be asked.
    awk -v top="$WORK/" '/ - fuse\.lockbox / && index($5, top) != 1 { print $5 }' /proc/self/mountinfo |
        while read -r point; do umount -i -l "$point"; done
    umount -a -t fuse.lockbox
    same "$(mounts_below "$WORK" | grep -c -e "^$WORK/box\$" -e "^$WORK/other\$" || true)" 0
    mount -T "$WORK/fstab" "$WORK/box"
    same "$(cat "$WORK/box/file")" content
    umount "$WORK/box"
    await lockbox check --full --passfile "$PASSFILE" "$WORK/other.lbx"
}

wrong_passfile() {
    (umask 077 && echo wrong >"$WORK/wrong")
    echo "$WORK/wrong"
}

case_what_mounts_for_others_gives_us_what_it_should() {
    installed by_others
}

by_others() {
    new_archive box
    # automount(8): sloppily, without a terminal, the options before the names.
    setsid mount -t lockbox -s -o "nosuid,nodev,passfile=$PASSFILE" "$WORK/box.lbx" "$WORK/box" </dev/null
    umount "$WORK/box"
    # Its example: the fields of a map.
    read -r _ options archive < <(grep -v '^#' "$REPOSITORY/packaging/examples/auto.lockbox")
    same "$archive" :/srv/secrets.lbx
    options=${options#-fstype=lockbox,}
    setsid mount -t lockbox -s -o "${options//\/etc\/lockbox\/secrets.passphrase/$PASSFILE}" "$WORK/box.lbx" "$WORK/box" </dev/null
    umount "$WORK/box"
    # pam_mount: the password on standard input, without a line end.
    options=$(sed -n 's/.*options="\([^"]*\)".*/\1/p' "$REPOSITORY/packaging/examples/pam_mount.conf.xml")
    printf %s "$PASSPHRASE" | DBUS_SYSTEM_BUS_ADDRESS=unix:path=/nonexistent mount -tlockbox "$WORK/box.lbx" "$WORK/box" "-o$options"
    mountpoint -q "$WORK/box"
    umount "$WORK/box"
    # fstab's example, with the files of the test.
    sed -n "s|^/srv/secrets.lbx  /mnt/secrets|$WORK/box.lbx $WORK/box|p" "$REPOSITORY/packaging/examples/fstab" |
        sed "s|/etc/lockbox/secrets.passphrase|$PASSFILE|" >"$WORK/fstab"
    mount -T "$WORK/fstab" -a
    mountpoint -q "$WORK/box"
    umount "$WORK/box"
}

has_autofs() {
    grep -qw autofs /proc/filesystems || modprobe autofs4 2>/dev/null || {
        note 'not tested: this kernel has no autofs'
        return 1
    }
}

case_an_automounter_mounts_at_the_first_use_and_unmounts_at_the_expiry() {
    has_autofs || return 0
    installed by_an_automounter
}

# autofs lets the automounter's process group alone through to the mount point: any other process of ours would wait for itself.
by_an_automounter() {
    new_archive box
    mount -t lockbox -o "passfile=$PASSFILE" "$WORK/box.lbx" "$WORK/box"
    echo content >"$WORK/box/file"
    umount "$WORK/box"
    timeout "$PATIENCE" automounter.py "$WORK/box.lbx" "$WORK/box" "passfile=$PASSFILE,log=$WORK/box.log" file >"$WORK/read" ||
        fail "exit code $?: $(cat "$WORK/box.log")"
    same "$(cat "$WORK/read")" content
    says_nothing daemons_below "$WORK"
    check_full box
}

# A line with `user`: mount(8) gives up its rights before it calls us, so the mount is the user's own.
case_a_user_mounts_a_line_of_fstab() {
    need_user
    installed by_a_user
}

by_a_user() {
    local users=$WORK/users
    mkdir "$users" "$users/point" "$WORK/sbin/etc" "$WORK/sbin/etc.work"
    chown -R "$TEST_USER:" "$users"
    as_user sh -c "printf '%s\n' '$PASSPHRASE' | lockbox create --weak-kdf --kdf-memory 1 '$users/box.lbx'"
    echo "$users/box.lbx $users/point lockbox noauto,user,exec 0 0" >"$WORK/sbin/etc/fstab"
    mount -t overlay -o "lowerdir=/etc,upperdir=$WORK/sbin/etc,workdir=$WORK/sbin/etc.work" none /etc
    as_user sh -c "printf '%s\n' '$PASSPHRASE' | mount '$users/point'"
    [[ $(mounted_as "$users/point") == rw,nosuid,nodev*" fuse.lockbox $users/box.lbx" ]] || fail "$(mounted_as "$users/point")"
    as_user sh -c "echo mine >'$users/point/file'"
    as_user lockbox status --json "$users/box.lbx" >"$WORK/status"
    same "$(field "$WORK/status" 'o["user"]')" "$TEST_USER"
    as_user umount "$users/point"
    await as_user sh -c "printf '%s\n' '$PASSPHRASE' | lockbox check --full '$users/box.lbx'"
}

# What desktop programs ask for: mount without root by the password on standard input, find the mount by type and archive, unmount
# without root.
case_a_desktop_program_can_mount_and_unmount() {
    need_user
    local users=$WORK/users
    mkdir "$users" "$users/point"
    chown -R "$TEST_USER:" "$users"
    as_user sh -c "printf '%s\n' '$PASSPHRASE' | lockbox create --weak-kdf --kdf-memory 1 '$users/box.lbx'"
    as_user sh -c "printf '%s\n' '$PASSPHRASE' | lockbox mount '$users/box.lbx' '$users/point'"
    [[ $(mounted_as "$users/point") == *" fuse.lockbox $users/box.lbx" ]] || fail "$(mounted_as "$users/point")"
    local pid
    pid=$(daemon_of "$users/box.lbx")
    same "$(awk '{ print $6 }' "/proc/$pid/stat")" "$pid" 'the daemon has no session of its own'
    as_user fusermount3 -u "$users/point"
    await gone "$pid"
    as_user sh -c "printf '%s\n' '$PASSPHRASE' | lockbox check --full '$users/box.lbx'"
}

case_the_units_are_what_systemd_expects() {
    local unit
    for unit in "$(dirname "$(realpath "${BASH_SOURCE[0]}")")"/../../../packaging/systemd/*; do
        sed "s|/usr/bin/lockbox|$(command -v lockbox)|" "$unit" >"$WORK/$(basename "$unit")"
    done
    cp "$WORK/lockbox-mount@.service" "$WORK/lockbox-mount@secrets.service"
    systemd-analyze verify --man=no "$WORK/lockbox-mount@secrets.service" "$WORK/mnt-secrets.mount" "$WORK/mnt-secrets.automount" \
        >"$WORK/verified" 2>&1 || fail "$(cat "$WORK/verified")"
    ! grep -F "$WORK" "$WORK/verified" || fail 'systemd complains of a unit'
}

case_set_id_and_devices_come_through_mount_8() {
    installed rights_by_mount_8
}

rights_by_mount_8() {
    new_archive box
    flags() { awk -v point="$WORK/box" '$5 == point { print $6 }' /proc/self/mountinfo; }
    has_both() {
        [[ ,$(flags), != *,nosuid,* && ,$(flags), != *,nodev,* ]] || fail "$1: $(flags)"
        lockbox umount "$WORK/box"
    }
    mount -t lockbox -o "set-id,devices,passfile=$PASSFILE" "$WORK/box.lbx" "$WORK/box"
    has_both 'command line'
    # One of the two, and the order of the others does not matter.
    mount -t lockbox -o "rw,set-id,exec,passfile=$PASSFILE" "$WORK/box.lbx" "$WORK/box"
    same "$(flags)" rw,nodev,noatime
    lockbox umount "$WORK/box"
    echo "$WORK/box.lbx $WORK/box lockbox noauto,set-id,devices,passfile=$PASSFILE 0 0" >"$WORK/fstab"
    mount -T "$WORK/fstab" "$WORK/box"
    has_both fstab
    # What mount(8) keeps to itself is not lost in silence.
    expect 1 'does not pass the option suid on.*set-id' mount -t lockbox -o "suid,dev,passfile=$PASSFILE" "$WORK/box.lbx" "$WORK/box"
    echo "$WORK/box.lbx $WORK/box lockbox noauto,dev,passfile=$PASSFILE 0 0" >"$WORK/fstab"
    expect 1 'does not pass the option dev on.*devices' mount -T "$WORK/fstab" "$WORK/box"
    ! mountpoint -q "$WORK/box" || fail 'it was mounted all the same'
    # Called by hand, the words have always meant this.
    mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "suid,dev,passfile=$PASSFILE"
    has_both 'by hand'
}

# What systemd mounts has no HOME: who asks a store, and what is kept of it, is root's all the same.
case_without_a_home_in_the_environment_that_of_the_system_has_the_credentials() {
    local code=0
    mkdir -p "$WORK/root/.aws"
    printf '[default]\ncredential_process = touch %s\n' "$WORK/asked" >"$WORK/root/.aws/config"
    awk -F: -v OFS=: -v home="$WORK/root" '$3 == 0 { $6 = home } 1' /etc/passwd >"$WORK/passwd"
    # shellcheck disable=SC2016
    unshare --mount bash -c 'mount --bind "$1" /etc/passwd && shift && exec env -u HOME "$@"' - "$WORK/passwd" AWS_ENDPOINT_URL=http://127.0.0.1:1 \
        lockbox ls --remote allow-http,allow-private,timeout=1s s3://bucket/none >"$WORK/said" 2>&1 || code=$?
    [[ $code == 18 && -e $WORK/asked ]] || fail "$code: $(cat "$WORK/said")"
}
