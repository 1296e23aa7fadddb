# Mounts over what the daemon itself works with: the archive, its log, its socket, what it remembers.
# shellcheck shell=bash disable=SC2317,SC2164

# write_durably PATH CONTENT: returns when it is on the disk.
write_durably() {
    python3 - "$1" "$2" <<'PY'
import os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)
os.write(file, sys.argv[2].encode())
os.fsync(file)
PY
}

case_a_mount_that_hides_what_the_daemon_needs_is_refused_by_name() {
    local home=$WORK/home
    mkdir -p "$home/point" "$home/logs" "$WORK/state" "$WORK/run"
    chmod 700 "$WORK/run"
    create "$WORK/box.lbx"
    create "$home/box.lbx"
    refused() {
        expect 15 "$1.*over-archive" mount.lockbox "$2" "$3" -o "passfile=$PASSFILE,log=$home/logs/log"
    }
    (cd "$home" && expect 15 "holds the archive, $home/box.lbx" lockbox mount -o nonempty --passfile "$PASSFILE" box.lbx .)
    refused "holds the archive, $home/box.lbx" "$home/box.lbx" "$home"
    refused 'holds the log' "$WORK/box.lbx" "$home"
    refused "holds this user's rollback records" "$WORK/box.lbx" "$WORK/state"
    XDG_RUNTIME_DIR=$WORK/run refused "holds the daemon's socket, $WORK/run" "$WORK/box.lbx" "$WORK/run"
    refused "holds the daemon's socket, /run" "$WORK/box.lbx" /run
    expect 15 'holds /proc' mount.lockbox "$WORK/box.lbx" / -o "over-archive,passfile=$PASSFILE"
    same "$(mounts_below "$WORK")" ''
    # A neighbour of all that is no mistake.
    mount.lockbox "$home/box.lbx" "$home/point" -o "passfile=$PASSFILE,log=$home/logs/log"
    lockbox umount "$home/point"
}

# Everything lies below the mount point. One event loop, so that a daemon that looks there is stuck at once.
# (Short names: the path of a socket may have 107 bytes.)
case_no_path_once_mounted() {
    local home=$WORK/h pid seen
    mkdir -p "$home/r" "$home/logs"
    chmod 700 "$home/r"
    create "$home/box.lbx"
    export XDG_STATE_HOME=$home/state XDG_RUNTIME_DIR=$home/r
    in_background strace -f -e trace=%file,clone,clone3,fork,vfork,syncfs,fdatasync -o "$WORK/trace" "$SCRATCH_DIR/bin/mount.lockbox" --foreground \
        "$home/box.lbx" "$home" -o "over-archive,threads=1,passfile=$PASSFILE,log=$home/logs/log" 2>"$WORK/strace.log"
    pid=$!
    await mountpoint -q "$home"
    cd /
    timeout 30 bash -c "$(declare -f write_durably); write_durably '$home/file' content"
    same "$(cat "$home/file")" content
    # While it is open for writing, the mount is flushed and committed by the clock, perhaps before the next command runs.
    seen=$(wc -l <"$WORK/trace")
    exec 7>"$home/other"
    echo more >&7
    flushed_and_committed() {
        tail -n "+$((seen + 1))" "$WORK/trace" | awk '/ syncfs\(/ { flushed = 1 } / fdatasync\(/ { committed = flushed } END { exit !committed }'
    }
    await flushed_and_committed
    exec 7>&-
    timeout 30 umount "$home"
    await gone "$pid"
    follow.py "$WORK/trace" || fail 'the daemon looked up paths after it had mounted'
    # The socket went, what is remembered was written, and so was the log.
    same "$(ls "$home/r/lockbox")" ''
    same "$(find "$home/state/lockbox/seen" -name '*.seen' | wc -l)" 1
    test -e "$home/logs/log"
    lockbox check --full --passfile "$PASSFILE" "$home/box.lbx"
    same "$(lockbox cat --passfile "$PASSFILE" "$home/box.lbx" other)" more
}

# In a namespace of its own: all else of the machine stays where it is.
case_places_of_the_system_can_be_mounted_over() {
    local point
    mkdir -p "$WORK/home"
    for point in /tmp /run "$WORK/home" "$XDG_STATE_HOME"; do
        mkdir -p "$point"
        rm -f "$WORK/box.lbx"
        create "$WORK/box.lbx"
        export -f write_durably
        POINT=$point timeout 60 unshare --mount --propagation private bash -euc '
            cd /
            mount.lockbox "$1/box.lbx" "$POINT" -o "over-archive,passfile=$1/passphrase"
            write_durably "$POINT/file" content
            umount "$POINT"
        ' - "$WORK" || fail "over $point"
        unlocked() { lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx" >"$WORK/stdout" 2>&1; }
        await unlocked
        same "$(lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" file)" content
    done
}

case_an_archive_may_lie_in_another_mount() {
    new_archive outer
    attach outer threads=1
    create "$WORK/outer/inner.lbx"
    mkdir "$WORK/inner"
    mount.lockbox "$WORK/outer/inner.lbx" "$WORK/inner" -o "passfile=$PASSFILE,threads=1,log=$WORK/inner.log"
    write_durably "$WORK/inner/file" content
    # In this order it is busy, and nothing is lost by trying.
    expect 13 'busy|open' lockbox umount "$WORK/outer"
    same "$(cat "$WORK/inner/file")" content
    lockbox umount "$WORK/inner"
    detach outer
    attach outer
    same "$(lockbox cat --passfile "$PASSFILE" "$WORK/outer/inner.lbx" file)" content
    detach outer
}

# What nobody can foresee: here root binds a file of the mount over the archive's own name, which every commit looks up.
case_a_daemon_that_waits_for_itself_ends_its_mount() {
    local pid writer
    new_archive box
    attach box threads=1,sandbox=on
    pid=$(daemon_of "$WORK/box.lbx")
    touch "$WORK/box/file"
    # Each round makes the file longer, so that the kernel has to ask for its attributes again. The first one stuck ends with an error.
    in_background python3 -c 'import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
open(sys.argv[2], "w").close()
while True:
    if os.path.getsize(sys.argv[2]):
        os.write(file, os.urandom(1 << 20))
        os.fsync(file)' "$WORK/box/file" "$WORK/go" 2>"$WORK/fsync"
    writer=$!
    await test -e "$WORK/go"
    mount --bind "$WORK/box/file" "$WORK/box.lbx"
    echo go >"$WORK/go"
    await grep -q 'waited for itself' "$WORK/box.log"
    await gone "$pid"
    await gone "$writer"
    umount "$WORK/box.lbx"
    umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
}
