# What goes wrong is said in a sentence, with the right exit code, and loses nothing.
# shellcheck shell=bash disable=SC2317,SC2164

# refused CODE PATTERN: all commands that open the archive agree.
refused() {
    mkdir -p "$WORK/point"
    expect "$1" "$2" mount.lockbox "$WORK/box.lbx" "$WORK/point" -o "passfile=$PASSFILE"
    expect "$1" "$2" lockbox mount --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/point"
    expect "$1" "$2" lockbox ls --passfile "$PASSFILE" "$WORK/box.lbx"
    expect "$1" "$2" lockbox check --passfile "$PASSFILE" "$WORK/box.lbx"
    ! mountpoint -q "$WORK/point" || fail 'mounted'
}

case_a_wrong_password_is_refused() {
    local before
    new_archive box
    before=$(sha256sum <"$WORK/box.lbx")
    cp "$PASSFILE" "$WORK/right"
    echo 'another one' >"$PASSFILE"
    refused 10 'wrong passphrase'
    same "$(sha256sum <"$WORK/box.lbx")" "$before" 'the archive was changed'
    cp "$WORK/right" "$PASSFILE"
    attach box
    detach box
}

case_missing_and_other_files_are_no_archives() {
    refused 19 'no such file'
    head -c 3000000 /dev/urandom >"$WORK/box.lbx"
    refused 11 'not a lockbox archive'
    : >"$WORK/box.lbx"
    refused 11 'not a lockbox archive'
    echo short >"$WORK/box.lbx"
    refused 11 'not a lockbox archive'
    rm "$WORK/box.lbx"
    mkdir "$WORK/box.lbx"
    mkdir -p "$WORK/point"
    expect '2|11' '[a-z]' mount.lockbox "$WORK/box.lbx" "$WORK/point" -o "passfile=$PASSFILE"
}

case_truncated_archives_are_damaged() {
    local size
    new_archive box
    attach box
    head -c 5000000 /dev/urandom >"$WORK/box/file"
    detach box
    cp "$WORK/box.lbx" "$WORK/whole"
    size=$(stat -c %s "$WORK/whole")
    local length
    for length in $((size / 2)) $((320 * 4096)) 200000; do
        cp "$WORK/whole" "$WORK/box.lbx"
        truncate -s "$length" "$WORK/box.lbx"
        refused 12 'truncated|damaged'
    done
    # Only the last page misses, so it may open; reading everything must not.
    cp "$WORK/whole" "$WORK/box.lbx"
    truncate -s $((3 * 1024 * 1024)) "$WORK/box.lbx"
    expect 12 'truncated|damaged' lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
}

case_unknown_versions_and_features_are_refused() {
    new_archive box
    cp "$WORK/box.lbx" "$WORK/whole"
    archive.py header "$WORK/box.lbx" 16 02000000
    refused 11 'version'
    cp "$WORK/whole" "$WORK/box.lbx"
    archive.py header "$WORK/box.lbx" 24 0000000000000080
    refused 11 'feature'
    cp "$WORK/whole" "$WORK/box.lbx"
    archive.py header "$WORK/box.lbx" 20 0900
    refused 11 'suite'
}

case_a_header_that_was_tampered_with_is_refused() {
    new_archive box
    # A compatible feature bit: nobody has to know it, but the key's MAC covers it.
    archive.py header "$WORK/box.lbx" 40 0100000000000000
    refused 12 'header|damaged'
}

case_one_damaged_header_copy_is_repaired() {
    local copy
    for copy in 0 320; do
        new_archive "box$copy"
        dd if=/dev/urandom of="$WORK/box$copy.lbx" bs=4096 seek="$copy" count=33 conv=notrunc status=none
        expect 12 'copy . of the header is lost' lockbox check --passfile "$PASSFILE" "$WORK/box$copy.lbx"
        attach "box$copy" 2>"$WORK/said"
        grep -q 'of the header is lost .*rewritten' "$WORK/said" || fail "the mount did not say what it mended: $(cat "$WORK/said")"
        echo content >"$WORK/box$copy/file"
        detach "box$copy"
        dd if=/dev/urandom of="$WORK/box$copy.lbx" bs=4096 seek=$((320 - copy)) count=33 conv=notrunc status=none
        attach "box$copy"
        same "$(cat "$WORK/box$copy/file")" content
        detach "box$copy"
    done
}

# A small file system that fills up for real, with what is promised when it does.
small_host() {
    mkdir "$WORK/host"
    truncate -s "$1" "$WORK/host.image"
    mkfs.ext4 -q -m 0 "$WORK/host.image"
    mount -o loop "$WORK/host.image" "$WORK/host"
}

case_a_full_disk_is_an_error_and_loses_nothing() {
    small_host 48M
    create "$WORK/host/box.lbx"
    mkdir "$WORK/box"
    mount_it() {
        mount.lockbox "$WORK/host/box.lbx" "$WORK/box" -o "passfile=$PASSFILE,log=$WORK/box.log"
    }
    mount_it
    head -c 6000000 /dev/urandom >"$WORK/kept"
    dd if="$WORK/kept" of="$WORK/box/kept" bs=1M conv=fsync status=none
    # The kernel takes the bytes first, so the error comes at the write, the fsync or the close.
    expect 1 'no space left' dd if=/dev/urandom of="$WORK/box/filler" bs=1M count=200 conv=fsync
    same_file "$WORK/kept" "$WORK/box/kept"
    # What is fsynced after the failure is as good as before it.
    rm "$WORK/box/filler"
    python3 -c 'import os, sys; os.fsync(os.open(sys.argv[1], os.O_RDONLY))' "$WORK/box"
    await dd if=/dev/urandom of="$WORK/box/again" bs=1M count=6 conv=fsync status=none
    cp "$WORK/box/again" "$WORK/again"
    # Full again, now by small files, and deleted to the last.
    mkdir "$WORK/box/small"
    python3 - "$WORK/box/small" <<'END'
import errno, os, sys
os.chdir(sys.argv[1])
try:
    for number in range(100_000):
        with open("file%d" % number, "wb", buffering=0) as file:
            file.write(os.urandom(20_000))
            os.fsync(file.fileno())
    sys.exit("the disk never became full")
except OSError as error:
    assert error.errno == errno.ENOSPC, error
END
    rm -r "$WORK/box/small"
    lockbox umount "$WORK/box"
    mount_it
    same_file "$WORK/kept" "$WORK/box/kept"
    same_file "$WORK/again" "$WORK/box/again"
    lockbox umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    expect 14 'no space left' lockbox add --passfile "$PASSFILE" "$WORK/host/box.lbx" "$(source_tree)" "$WORK/host.image"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    # What was added before the disk was full is whole and stays; what was there is untouched.
    lockbox cat --passfile "$PASSFILE" "$WORK/host/box.lbx" kept | cmp - "$WORK/kept"
    lockbox cat --passfile "$PASSFILE" "$WORK/host/box.lbx" again | cmp - "$WORK/again"
    umount "$WORK/host"
}

case_what_is_written_to_a_full_disk_is_no_space_and_leaves_nothing() {
    new_archive box
    head -c 9000000 /dev/urandom >"$WORK/large"
    lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/large"
    small_host 8M
    expect 14 'no space left' lockbox extract --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/host"
    expect 14 'no space left' lockbox backup --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/host/backup.lbx"
    same "$(find "$WORK/host" -mindepth 1 ! -name lost+found)" '' 'something was left'
    full() { "$@" >"$WORK/host/out"; }
    expect 14 'no space left' full lockbox export-tar --passfile "$PASSFILE" "$WORK/box.lbx"
    expect 14 'no space left' full lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" large
    umount "$WORK/host"
}

case_a_mount_that_was_lost_is_told_as_one() {
    new_archive box
    attach box
    kill_daemon box
    cd "$WORK"
    expect 2 'no daemon answers for .*/box: it died' lockbox snapshot ls box
    expect 2 'no daemon answers for .*/box: it died' lockbox backup box copy.lbx
    # Also while the kernel knows the directory from its cache, or does not.
    expect '2|11' 'box is where .*/box.lbx is mounted: name the archive' lockbox add --passfile "$PASSFILE" box "$PASSFILE"
    expect '2|11' 'box is where .*/box.lbx is mounted: name the archive' lockbox info --passfile "$PASSFILE" box
    lockbox umount box
    attach box
    expect 11 'box is where .*/box.lbx is mounted: name the archive' lockbox ls --passfile "$PASSFILE" box
    cd /
    detach box
}

case_create_on_a_full_disk_leaves_nothing_behind() {
    small_host 8M
    dd if=/dev/zero of="$WORK/host/filler" bs=64k status=none || true
    expect 14 'no space left' create "$WORK/host/box.lbx"
    [[ ! -e $WORK/host/box.lbx ]] || fail 'half an archive was left'
    umount "$WORK/host"
}

case_a_read_only_directory_is_an_error_but_reading_works() {
    mkdir "$WORK/host" "$WORK/point"
    mount -t tmpfs none "$WORK/host"
    create "$WORK/host/box.lbx"
    mount -o remount,ro "$WORK/host"
    expect 2 'read-only' create "$WORK/host/other.lbx"
    # Media that cannot be written are mounted read-only, and whoever did not ask for that is told.
    mount.lockbox "$WORK/host/box.lbx" "$WORK/point" -o "passfile=$PASSFILE" 2>"$WORK/stderr"
    grep -q 'it is mounted read-only' "$WORK/stderr"
    lockbox umount "$WORK/point"
    expect 2 'read-only' lockbox add --passfile "$PASSFILE" "$WORK/host/box.lbx" "$PASSFILE"
    mount.lockbox "$WORK/host/box.lbx" "$WORK/point" -o "ro,passfile=$PASSFILE"
    lockbox umount "$WORK/point"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    umount "$WORK/host"
}

case_a_missing_fuse_device_is_explained() {
    new_archive box
    expect 15 '/dev/fuse is missing' unshare --mount bash -c '
        mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && mknod /dev/random c 1 8 || exit 99
        exec mount.lockbox "$@"' - "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE"
    attach box
    detach box
}

case_bad_mount_points_and_options_are_refused() {
    new_archive box
    expect 15 'no such file' mount.lockbox "$WORK/box.lbx" "$WORK/nowhere" -o "passfile=$PASSFILE"
    expect 15 'not a directory' mount.lockbox "$WORK/box.lbx" "$PASSFILE" -o "passfile=$PASSFILE"
    expect 1 'unknown mount option: bogus' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "bogus,passfile=$PASSFILE"
    expect 1 'memory=' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "memory=1,passfile=$PASSFILE"
    expect 1 'usage' mount.lockbox "$WORK/box.lbx"
    expect 1 'usage' lockbox frobnicate
    expect 2 'already exists' create "$WORK/box.lbx"
    chmod 644 "$PASSFILE"
    expect 2 'read by others' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE"
    expect 2 'is not mounted' lockbox umount "$WORK/box"
}

case_a_second_mount_is_refused_naming_the_holder() {
    local pid
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    mkdir "$WORK/second"
    expect 13 "$WORK/box by process $pid" mount.lockbox "$WORK/box.lbx" "$WORK/second" -o "passfile=$PASSFILE"
    ln -s box.lbx "$WORK/alias.lbx"
    expect 13 "process $pid" mount.lockbox "$WORK/alias.lbx" "$WORK/second" -o "passfile=$PASSFILE"
    ln "$WORK/box.lbx" "$WORK/hard.lbx"
    expect 13 "process $pid" mount.lockbox "$WORK/hard.lbx" "$WORK/second" -o "passfile=$PASSFILE"
    expect 13 "process $pid" lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$PASSFILE"
    expect 13 "process $pid" lockbox passwd --weak-kdf --kdf-memory 1 --passfile "$PASSFILE" --new-passfile "$PASSFILE" "$WORK/box.lbx"
    echo still here >"$WORK/box/file"
    detach box
    attach box
    detach box
}

case_a_read_only_mount_changes_nothing() {
    local before
    new_archive box
    attach box
    echo content >"$WORK/box/file"
    detach box
    before=$(sha256sum <"$WORK/box.lbx")
    attach box ro
    expect 1 'read-only file system' touch "$WORK/box/other"
    expect 1 'read-only file system' rm "$WORK/box/file"
    same "$(cat "$WORK/box/file")" content
    # Two readers at once are fine.
    mkdir "$WORK/second"
    lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" file
    detach box
    same "$(sha256sum <"$WORK/box.lbx")" "$before" 'a read-only mount changed the archive'
}

case_a_daemon_that_was_killed_is_named_in_the_log() {
    local lost='/box: the daemon ended without closing the archive'
    new_archive box
    attach box
    reattach box
    ! grep -qF "$lost" "$WORK/box.log" || fail "an orderly end is taken for a death: $(cat "$WORK/box.log")"
    kill_daemon box
    await grep -qF "$lost" "$WORK/box.log"
    same "$(grep -cF "$lost" "$WORK/box.log")" 1
    umount -l "$WORK/box"
    # In the foreground it is said where the rest is said.
    in_background mount.lockbox --foreground "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE" 2>"$WORK/said"
    await mountpoint -q "$WORK/box"
    kill -9 "${BACKGROUND[-1]}"
    await grep -qF "$lost" "$WORK/said"
    umount -l "$WORK/box"
}

case_the_log_tells_who_ended_the_mount() {
    local pid
    new_archive box
    attach box
    detach box
    same "$(cat "$WORK/box.log")" '' 'an unmount by lockbox umount is no news'
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    kill -TERM "$pid"
    await gone "$pid"
    grep -q 'SIGTERM: stopping' "$WORK/box.log"
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    fusermount3 -u "$WORK/box"
    await gone "$pid"
    same "$(grep -c 'another program unmounted the archive' "$WORK/box.log")" 1
}

# Otherwise a power cut may leave neither the old file nor the new one.
case_an_extracted_file_is_durable_before_it_replaces_another() {
    new_archive box
    head -c 100000 /dev/urandom >"$WORK/file"
    lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/file"
    chmod 200 "$WORK/file"
    strace -f -o "$WORK/trace" -e trace=fsync,syncfs,renameat,renameat2 \
        lockbox extract --force --passfile "$PASSFILE" "$WORK/box.lbx" file --to "$WORK"
    grep -E 'fsync\(|syncfs\(|rename.*"file"' "$WORK/trace" | head -n 1 | shows sync || fail "$(<"$WORK/trace")"
    grep -Eq 'renameat.*"file"' "$WORK/trace"
    mkdir "$WORK/rescued"
    strace -f -o "$WORK/trace" -e trace=syncfs,renameat,renameat2 \
        lockbox rescue --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/rescued"
    grep -E 'syncfs\(|rename' "$WORK/trace" | tail -n 1 | shows syncfs || fail "$(<"$WORK/trace")"
}

# Some hosts end an fsync(2) with EINTR, which is no error of the file.
case_host_calls_that_a_signal_interrupts_are_made_again() {
    local calls=fdatasync,fsync,fallocate,ftruncate,syncfs,pwritev2 traced
    traced=(strace -f -e "trace=$calls" -e "inject=$calls:error=EINTR:when=1+3")
    new_archive box
    head -c 5000000 /dev/urandom >"$WORK/large"
    "${traced[@]}" -o "$WORK/trace.add" lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/large"
    "${traced[@]}" -o "$WORK/trace.extract" lockbox extract --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/out"
    same_file "$WORK/large" "$WORK/out/large"
    "${traced[@]}" -o "$WORK/trace.compact" lockbox compact --passfile "$PASSFILE" "$WORK/box.lbx"
    # On ext4 and XFS the daemon syncs its log with pwritev2(2).
    "${traced[@]}" -o "$WORK/trace.exec" lockbox exec --passfile "$PASSFILE" "$WORK/box.lbx" -- \
        sh -c 'for n in 1 2 3 4 5; do echo $n | dd of=synced oflag=append,sync conv=notrunc status=none; done'
    lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    same "$(lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" /synced)" $'1\n2\n3\n4\n5'
    local call
    local hit=(fdatasync fsync fallocate ftruncate)
    # Not on 9p, which reports the type of its server and has no block device.
    [[ $(findmnt -no MAJ:MIN -T "$WORK") == 0:* ]] ||
        case $(stat -f -c %T "$WORK") in ext2/ext3 | xfs) hit+=(pwritev2) ;; esac
    for call in "${hit[@]}"; do
        grep -Eq "$call\(.*EINTR.*INJECTED" "$WORK"/trace.* || fail "$call was never interrupted"
    done
}
