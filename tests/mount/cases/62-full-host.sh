# A host that is full, or fails, under a mount: errors come where programs look for them, and nothing acknowledged is lost.
# shellcheck shell=bash disable=SC2317,SC2164

# ext4 of 160 MB in a file.
# loop_host [OPTION...]: of mkfs.
loop_host() {
    mkdir -p "$WORK/host" "$WORK/box"
    truncate -s 160M "$WORK/host.image"
    mkfs.ext4 -q -m 0 "$@" "$WORK/host.image"
    mount -o loop "$WORK/host.image" "$WORK/host"
    create "$WORK/host/box.lbx"
}

attach_hosted() {
    mount.lockbox "$WORK/host/box.lbx" "$WORK/box" -o "passfile=$PASSFILE,log=$WORK/box.log${1:+,$1}"
}

# Nobody may have been told that the archive is read-only.
not_latched() {
    ! grep -q 'read-only from now on' "$WORK/box.log" || fail "latched: $(grep 'read-only' "$WORK/box.log")"
}

case_a_full_host_refuses_writes_and_nothing_else() {
    loop_host
    attach_hosted
    python3 - "$WORK/box" "$WORK/host" "$WORK/sums" <<'END'
import errno, hashlib, json, os, sys
box, host, sums = sys.argv[1:]
os.chdir(box)
acknowledged = {}
def keep(name, data, how):
    file = os.open(name, os.O_CREAT | os.O_RDWR | how)
    try:
        os.write(file, data)
        os.fsync(file)
        acknowledged[name] = hashlib.sha256(data).hexdigest()
    finally:
        os.close(file)
keep("before", os.urandom(5_000_000), 0)
other = os.open("other", os.O_CREAT | os.O_RDWR)
os.write(other, b"first")
os.fsync(other)
# An open file with bytes that nobody synced when the host fills up: they were accepted by the kernel alone.
with open(host + "/filler", "wb", buffering=0) as filler:
    try:
        while filler.write(b"\0" * 65536) == 65536:
            pass
        filler.write(b"\0")
    except OSError as error:
        assert error.errno == errno.ENOSPC
failures = set()
for number in range(2000):
    name = "fill%04d" % number
    try:
        file = os.open(name, os.O_CREAT | os.O_RDWR | (os.O_SYNC if number % 3 == 0 else 0))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        failures.add("open")
        break
    data = os.urandom(400_000)
    step = "write"
    try:
        os.write(file, data)
        if number % 3 == 1:
            step = "fsync"
            os.fsync(file)
        step = "close"
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        failures.add(step)
        os.close(file)
        if len(failures) > 1 or number > 1500:
            break
        continue
    try:
        os.close(file)
        if number % 3 < 2:
            acknowledged[name] = hashlib.sha256(data).hexdigest()
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        failures.add("close")
        if len(failures) > 1:
            break
assert failures, "the disk never became full"
print("note: no space showed at", ", ".join(sorted(failures)))
# fsync of a file that needs no new data works, on a full disk.
os.fsync(other)
# What was acknowledged before the disk was full, and while it was, is there.
for name, digest in acknowledged.items():
    assert hashlib.sha256(open(name, "rb").read()).hexdigest() == digest, name
# Deleting works, and what it frees can be used again.
deleted = [name for name in sorted(os.listdir(".")) if name.startswith("fill")][::2]
for name in deleted:
    os.unlink(name)
    acknowledged.pop(name, None)
directory = os.open(".", os.O_RDONLY)
os.fsync(directory)
os.pwrite(other, b"second", 0)
os.fsync(other)
os.close(other)
acknowledged["other"] = hashlib.sha256(b"second").hexdigest()
assert not set(deleted) & set(os.listdir("."))
json.dump(acknowledged, open(sums, "w"))
END
    not_latched
    lockbox umount "$WORK/box"
    # Full all the time: opening, deleting and closing have what they need.
    attach_hosted
    acknowledged_is_there
    rm -f "$WORK"/box/fill*1
    lockbox umount "$WORK/box"
    not_latched
    rm "$WORK/host/filler"
    # ext4 frees its blocks with the next commit of the journal.
    sync -f "$WORK/host"
    attach_hosted
    acknowledged_is_there deleted
    dd if=/dev/urandom of="$WORK/box/after" bs=1M count=50 conv=fsync status=none
    lockbox umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    umount "$WORK/host"
}

# acknowledged_is_there [deleted]: with the word, what the case deleted since may be missing.
acknowledged_is_there() {
    python3 - "$WORK/box" "$WORK/sums" "${1-}" <<'END'
import hashlib, json, os, sys
os.chdir(sys.argv[1])
for name, digest in json.load(open(sys.argv[2])).items():
    if sys.argv[3] and name.startswith("fill") and name.endswith("1"):
        assert not os.path.exists(name), name
        continue
    assert hashlib.sha256(open(name, "rb").read()).hexdigest() == digest, name
END
}

fill_host() {
    dd if=/dev/zero of="$WORK/host/filler" bs=1M status=none 2>/dev/null || true
    dd if=/dev/zero of="$WORK/host/filler" bs=4k oflag=append conv=notrunc status=none 2>/dev/null || true
}

# leave_a_log: many small fsyncs, all of which are in the log, and in no commit, when the daemon is killed; their sums are in $WORK/sums.
leave_a_log() {
    local before
    for _ in {1..20}; do
        attach_hosted
        stop_clock host/box
        python3 - "$WORK/box" "$WORK/sums" <<'END'
import hashlib, json, os, sys
os.chdir(sys.argv[1])
acknowledged = {}
def synced(name, data, offset=0):
    file = os.open(name, os.O_CREAT | os.O_RDWR)
    os.pwrite(file, data, offset)
    os.fsync(file)
    os.close(file)
# Everything before is in a commit, which is what the log goes on from.
synced("large", os.urandom(8_000_000))
large = bytearray(open("large", "rb").read())
for number in range(40):
    data = os.urandom(4096)
    # One in each frame of 128 KiB: each takes a page of its own.
    synced("large", data, number << 17)
    large[number << 17:(number << 17) + 4096] = data
    synced("file%02d" % number, data[:1000])
    acknowledged["file%02d" % number] = hashlib.sha256(data[:1000]).hexdigest()
acknowledged["large"] = hashlib.sha256(large).hexdigest()
json.dump(acknowledged, open(sys.argv[2], "w"))
END
        lockbox status --json "$WORK/box" >"$WORK/status"
        kill -9 "$(daemon_of "$WORK/host/box.lbx")"
        umount -l "$WORK/box"
        await free "$WORK/host/box.lbx"
        lockbox info --json --passfile "$PASSFILE" "$WORK/host/box.lbx" >"$WORK/info"
        # Else a commit came between.
        if python3 - "$WORK/status" "$WORK/info" <<'END'
import json, sys
status, info = (json.load(open(name)) for name in sys.argv[1:])
sys.exit(not (status["log"]["used_bytes"] > 40 * 4096 and status["generation"] == info["generation"]))
END
        then
            return
        fi
    done
    fail 'too slow a machine'
}

free() {
    lockbox info --passfile "$PASSFILE" "$1" >"$WORK/info" 2>&1
}

case_what_a_log_has_is_there_on_a_host_that_is_full_since() {
    loop_host
    leave_a_log
    fill_host
    sha256sum <"$WORK/host/box.lbx" >"$WORK/sum"
    attach_hosted ro
    acknowledged_is_there
    lockbox umount "$WORK/box"
    sha256sum <"$WORK/host/box.lbx" | diff - "$WORK/sum"
    # Room for what the log has was promised before it was acknowledged, so the host is asked for none.
    attach_hosted
    acknowledged_is_there
    lockbox umount "$WORK/box"
    not_latched
    rm "$WORK/host/filler"
    attach_hosted
    acknowledged_is_there
    lockbox umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    umount "$WORK/host"
}

case_bytes_that_only_the_kernel_had_are_refused_at_fsync_and_close() {
    loop_host
    attach_hosted sync=never
    dd if=/dev/zero of="$WORK/host/filler" bs=1M status=none || true
    PYTHONPATH=$SCRATCH_DIR/bin python3 - "$WORK/box" <<'END'
import errno, os, sys
from calls import code
os.chdir(sys.argv[1])
# More than the archive has of its own, accepted by the kernel's cache.
file = os.open("big", os.O_CREAT | os.O_RDWR)
for _ in range(64):
    written = code(os.write, file, os.urandom(1 << 20))
    assert written in (0, errno.ENOSPC), written
    if written:
        break
synced, closed = code(os.fsync, file), code(os.close, file)
assert errno.ENOSPC in (written, synced, closed), (written, synced, closed)
assert {written, synced, closed} <= {0, errno.ENOSPC}
os.unlink("big")
os.mkdir("directory")
END
    not_latched
    lockbox umount "$WORK/box"
    rm "$WORK/host/filler"
    attach_hosted
    [[ -d $WORK/box/directory && ! -e $WORK/box/big ]] || fail 'what was done on the full host is not there'
    lockbox umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    umount "$WORK/host"
}

# A limit on the size of files (RLIMIT_FSIZE; FAT has one of 4 GiB) is no space, not a failing host.
case_a_limit_on_the_size_of_files_is_no_space() {
    local pid
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    prlimit --pid "$pid" --fsize=20000000
    echo kept >"$WORK/box/kept"
    expect 1 'no space left' dd if=/dev/urandom of="$WORK/box/filler" bs=1M count=40 conv=fsync
    ! gone "$pid" || fail 'the daemon died of the limit'
    not_latched
    rm "$WORK/box/filler"
    dd if=/dev/urandom of="$WORK/box/small" bs=100k count=1 conv=fsync status=none
    same "$(cat "$WORK/box/kept")" kept
    detach box
    check_full box
    head -c 30000000 /dev/urandom >"$WORK/large"
    expect 14 'no space left' prlimit --fsize=20000000 lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/large"
    check_full box
}

# The kernel has no failing device for everybody, so the host is another archive's mount, whose daemon dies: every call on
# the file of the inner archive fails from then on, but for what the kernel has of it.
attach_in_another_archive() {
    new_archive outer
    attach outer sync=always
    mkdir "$WORK/host" "$WORK/box"
    mount --bind "$WORK/outer" "$WORK/host"
    create "$WORK/host/box.lbx"
    attach_hosted
}

case_a_failing_host_makes_the_archive_read_only() {
    local code=0 inner
    attach_in_another_archive
    inner=$(daemons_below "$WORK/host")
    head -c 300000 /dev/urandom >"$WORK/kept"
    cp "$WORK/kept" "$WORK/box/kept"
    sync "$WORK/box/kept"
    # Else a commit of the clock could meet the error before fsync does.
    stop_clock host/box
    PYTHONPATH=$SCRATCH_DIR/bin python3 - "$WORK/box" "$(daemon_of "$WORK/outer.lbx")" <<'END'
import errno, mmap, os, select, signal, sys
from calls import code
os.chdir(sys.argv[1])
file = os.open("kept", os.O_RDWR)
# Mapped pages stay in the kernel's cache when other tests drop it.
mapped = mmap.mmap(file, 300000, prot=mmap.PROT_READ)
assert len(mapped[:]) == 300000
outer = os.pidfd_open(int(sys.argv[2]))
signal.pidfd_send_signal(outer, signal.SIGKILL)
select.select([outer], [], [])
os.pwrite(file, b"lost", 0)
first = code(os.fsync, file)
# Whoever asks first learns why; from now on every change is refused, and reading goes on.
assert first == errno.EIO, first
assert code(os.mkdir, "new") == errno.EROFS, code(os.mkdir, "new")
assert code(os.fsync, file) == errno.EROFS, code(os.fsync, file)
assert os.listdir(".") == ["kept"] and os.stat("kept").st_size == 300000
assert len(os.pread(file, 300000, 0)) == 300000
print("note: fsync of a failing host gets %s, changes after it %s" % (errno.errorcode[first], errno.errorcode[code(os.mkdir, "new")]))
END
    start_clock
    same "$(grep -c 'read-only from now on' "$WORK/box.log")" 1 'lines in the log about it'
    lockbox umount "$WORK/box" 2>"$WORK/stderr" || code=$?
    same "$code" 2 'exit code of lockbox umount'
    grep -q 'read-only' "$WORK/stderr" || fail "lockbox umount said: $(cat "$WORK/stderr")"
    await gone "$inner"
    umount -l "$WORK/host"
    umount -l "$WORK/outer"
    # What was acknowledged before is there.
    attach outer
    mount --bind "$WORK/outer" "$WORK/host"
    attach_hosted
    same_file "$WORK/kept" "$WORK/box/kept"
    lockbox umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    umount "$WORK/host"
    detach outer
}

# Without a passphrase: the daemon has the key.
snapshot() {
    lockbox snapshot "$@" </dev/null
}

# done_or_full COMMAND...: whether it was done; otherwise it says that there is no space, and exits so.
done_or_full() {
    local code=0
    "$@" >"$WORK/answer" 2>"$WORK/stderr" || code=$?
    [[ $code == 0 ]] || { [[ $code == 14 ]] && grep -q 'no space left' "$WORK/stderr"; } || fail "$*: $code, $(cat "$WORK/stderr")"
    return "$code"
}

fill_host() {
    dd if=/dev/zero of="$WORK/host/filler" bs=64k status=none 2>/dev/null || true
    dd if=/dev/zero of="$WORK/host/filler" bs=1 count=4096 oflag=append conv=notrunc status=none 2>/dev/null || true
}

kept_is_there() {
    same "$(lockbox cat --passfile "$PASSFILE" --snapshot kept "$WORK/host/box.lbx" large | sha256sum)" "$1"
}

# Host and archive: nothing but what is kept for giving room back.
case_a_full_archive_with_snapshots_gives_room_back_and_loses_none() {
    local sum listed name at
    # With blocks of 1 KiB a host without a single free one may refuse what it has allocated, for want of room for its own lists.
    loop_host -b 4096
    attach_hosted
    head -c 20000000 /dev/urandom >"$WORK/box/large"
    echo old >"$WORK/box/file"
    sum=$(sha256sum <"$WORK/box/large")
    snapshot create "$WORK/box" kept >/dev/null
    snapshot create "$WORK/box" other >/dev/null
    lockbox backup "$WORK/box" "$WORK/host/backup.lbx" >/dev/null </dev/null
    rm "$WORK/box/large"
    head -c 10000000 /dev/urandom >"$WORK/box/grown"
    echo new >"$WORK/box/file"
    sync -f "$WORK/box"
    fill_host
    # The kernel takes what the daemon refuses, for as long as nobody asks: so it is asked for more than there can be, and no more than that.
    dd if=/dev/urandom of="$WORK/box/fill" bs=1M count=64 status=none 2>/dev/null || true
    sync "$WORK/box/fill" 2>/dev/null || true
    # Through the daemon, then by commands that open the archive themselves.
    for at in "$WORK/box" "$WORK/host/box.lbx"; do
        [[ $at == "$WORK/box" ]] || lockbox umount "$WORK/box"
        name=new-$(basename "$at")
        listed=$(lockbox snapshot ls --passfile "$PASSFILE" "$at" | wc -l)
        if done_or_full lockbox snapshot create --passfile "$PASSFILE" "$at" "$name"; then listed=$((listed + 1)); fi
        same "$(lockbox snapshot ls --passfile "$PASSFILE" "$at" | wc -l)" "$listed"
        # It takes room for what it was before, or for what comes back.
        if done_or_full lockbox snapshot restore --passfile "$PASSFILE" "$at" kept file; then
            note "a restore of one file found room at $at"
        fi
        if [[ $at == "$WORK/box" ]]; then
            grep -Eqx 'old|new' "$WORK/box/file"
        else
            lockbox cat --passfile "$PASSFILE" "$at" file | grep -Eqx 'old|new'
        fi
        done_or_full lockbox snapshot restore --passfile "$PASSFILE" "$at" kept large --to "back-$name" || true
        # What is too large for the host leaves what there was, and nothing beside it.
        ! done_or_full lockbox backup --passfile "$PASSFILE" "$at" "$WORK/host/second.lbx" || fail 'a backup without room'
        ! done_or_full lockbox backup --passfile "$PASSFILE" "$at" "$WORK/host/backup.lbx" || fail 'a next backup without room'
        same "$(ls -A "$WORK/host" | grep -v lost+found | tr '\n' ' ')" 'backup.lbx box.lbx filler '
        same "$(lockbox cat --passfile "$PASSFILE" "$WORK/host/backup.lbx" large 2>/dev/null | sha256sum)" "$sum"
    done
    kept_is_there "$sum"
    # Removing finds room in any case, first without a mount: what both showed is given back with the second.
    lockbox snapshot rm --passfile "$PASSFILE" "$WORK/host/box.lbx" other
    attach_hosted
    # What was restored beside shares the pages with the snapshots.
    rm -rf "$WORK/box"/back-*
    snapshot rm "$WORK/box" '*'
    says_nothing snapshot ls "$WORK/box"
    await written_again
    not_latched
    lockbox umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/backup.lbx"
    # With room the same backup is brought up to date, and a snapshot is taken.
    rm "$WORK/host/filler"
    lockbox snapshot create --passfile "$PASSFILE" "$WORK/host/box.lbx" last
    lockbox backup --verify --passfile "$PASSFILE" "$WORK/host/box.lbx" "$WORK/host/backup.lbx" >/dev/null
    umount "$WORK/host"
}

# Into what the snapshots held, while the host is as full as it was.
written_again() {
    dd if=/dev/urandom of="$WORK/box/again" bs=1M count=10 conv=fsync status=none 2>/dev/null
}

is_read_only_by_now() {
    ! snapshot create "$WORK/box" new 2>"$WORK/stderr" && grep -q read-only "$WORK/stderr"
}

case_what_a_failing_host_refuses_of_snapshots_is_said_and_nothing_of_them_is_lost() {
    local inner
    attach_in_another_archive
    inner=$(daemons_below "$WORK/host")
    head -c 300000 /dev/urandom >"$WORK/large"
    cp "$WORK/large" "$WORK/box/large"
    snapshot create "$WORK/box" kept >/dev/null
    snapshot create "$WORK/box" next >/dev/null
    rm "$WORK/box/large"
    echo more >"$WORK/box/more"
    sync "$WORK/box/more"
    echo last >"$WORK/box/last"
    kill_daemon outer
    # Who asks for a commit learns why there is none, and soon that the archive is read-only.
    expect 2 'cannot|Transport|not connected|Input/output' snapshot create "$WORK/box" new
    await is_read_only_by_now
    expect 2 'read-only' snapshot rm "$WORK/box" kept
    expect 2 'read-only' snapshot prune --keep-last 1 "$WORK/box"
    expect 2 'read-only|Input/output error|not connected' snapshot restore "$WORK/box" kept
    expect 2 'read-only|not connected' lockbox backup "$WORK/box" "$WORK/copy.lbx"
    [[ ! -e $WORK/copy.lbx ]] || fail 'a backup of what cannot be read'
    lockbox umount "$WORK/box" 2>"$WORK/stderr" || true
    await gone "$inner"
    umount -l "$WORK/host"
    umount -l "$WORK/outer"
    attach outer
    mount --bind "$WORK/outer" "$WORK/host"
    same "$(lockbox snapshot ls --json --passfile "$PASSFILE" "$WORK/host/box.lbx" | grep -o '"name":"[^"]*"' | tr '\n' ' ')" '"name":"kept" "name":"next" '
    attach_hosted
    same_file "$WORK/large" "$WORK/box/.snapshots/kept/large"
    snapshot restore "$WORK/box" kept large >/dev/null
    same_file "$WORK/large" "$WORK/box/large"
    same "$(cat "$WORK/box/more")" more
    snapshot rm "$WORK/box" '*'
    lockbox backup --verify "$WORK/box" "$WORK/copy.lbx" >/dev/null </dev/null
    lockbox umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    umount "$WORK/host"
    detach outer
}

# The kernel takes into its cache what the daemon refuses, and tells by fsync and close alone: who asks for neither is stopped all the same.
case_who_writes_on_without_asking_meets_the_full_host() {
    loop_host
    attach_hosted
    echo before >"$WORK/box/before"
    touch "$WORK/box/log"
    fill_host
    # Without an end by itself.
    expect 1 'No space left on device' timeout 120 dd if=/dev/urandom of="$WORK/box/fill" bs=64k
    # A log that stays open, and is appended to line by line.
    PYTHONPATH=$SCRATCH_DIR/bin timeout 120 python3 - "$WORK/box" "$WORK/host/filler" <<'END'
import errno, os, sys, time
from calls import code
os.chdir(sys.argv[1])
log = os.open("log", os.O_WRONLY | os.O_APPEND)
line = os.urandom(4096)
while (met := code(os.write, log, line)) == 0:
    pass
assert met == errno.ENOSPC, met
# Everything else goes on, also with this file.
assert os.stat("log").st_size > 0 and os.fstat(log).st_size > 0
read = os.open("log", os.O_RDONLY)
assert os.read(read, 4096)
# The kernel tells whoever closes first.
assert code(os.close, read) in (0, errno.ENOSPC)
assert open("before").read() == "before\n"
assert code(os.fsync, log) == errno.ENOSPC
# As soon as there is room, by the same handle. A busy ext4 may refuse blocks for a moment after they were freed.
os.unlink("fill")
os.unlink(sys.argv[2])
os.ftruncate(log, 0)
deadline = time.monotonic() + 10
while (met := code(os.write, log, b"after\n")) == errno.ENOSPC and time.monotonic() < deadline:
    time.sleep(0.01)
assert met == 0, met
assert code(os.fsync, log) == 0
assert open("log").read() == "after\n"
END
    not_latched
    lockbox umount "$WORK/box"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    umount "$WORK/host"
}

# btrfs of 400 MB in a file, with a quota of 200 MB when one is asked for. Writing over what is there takes room on it.
# btrfs_host [quota]
btrfs_host() {
    mkdir -p "$WORK/btrfs" "$WORK/box"
    truncate -s 400M "$WORK/btrfs.image"
    mkfs.btrfs -q "$WORK/btrfs.image" >"$WORK/mkfs"
    mount -o loop "$WORK/btrfs.image" "$WORK/btrfs"
    btrfs subvolume create "$WORK/btrfs/part" >"$WORK/mkfs"
    if [[ ${1-} == quota ]]; then
        btrfs quota enable "$WORK/btrfs"
        btrfs qgroup limit 200M "$WORK/btrfs/part"
    fi
    ln -s btrfs/part "$WORK/host"
    create "$WORK/host/box.lbx"
}

has_btrfs() {
    grep -qw btrfs /proc/filesystems || modprobe btrfs 2>/dev/null || {
        note 'not tested: this kernel has no btrfs'
        return 1
    }
}

# With what the host takes still, down to the last block.
fill_btrfs() {
    fill_host
    sync -f "$WORK/host/filler" || true
    fill_host
}

case_an_archive_on_a_full_btrfs_is_emptied() {
    has_btrfs || return 0
    btrfs_host
    attach_hosted
    local name
    for name in {1..6}; do
        dd if=/dev/urandom of="$WORK/box/file$name" bs=1M count=10 conv=fsync status=none
    done
    # A daemon with nothing left to write, whose background work cannot use the reserve while the disk is filled.
    lockbox umount "$WORK/box"
    attach_hosted
    fill_btrfs
    rm "$WORK/box/file1" "$WORK/box/file2"
    sync "$WORK/box"
    not_latched
    lockbox umount "$WORK/box"
    not_latched
    # Whatever came back is taken by others while nobody has the archive open.
    fill_btrfs
    lockbox rm --passfile "$PASSFILE" "$WORK/host/box.lbx:file3"
    fill_btrfs
    lockbox rm --passfile "$PASSFILE" "$WORK/host/box.lbx:file4"
    rm "$WORK/host/filler"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    same "$(lockbox ls --passfile "$PASSFILE" "$WORK/host/box.lbx" | grep -c file)" 2
    umount "$WORK/btrfs"
}

# There even truncating the archive is refused, so what was accepted waits until its user makes room elsewhere.
case_an_archive_at_a_quota_of_btrfs_latches_nothing() {
    has_btrfs || return 0
    btrfs_host quota
    attach_hosted
    dd if=/dev/urandom of="$WORK/box/old" bs=1M count=20 conv=fsync status=none
    fill_btrfs
    rm "$WORK/box/old"
    local code round
    for round in 1 2 3; do
        code=0
        sync "$WORK/box" 2>"$WORK/sync" || code=$?
        [[ $code -eq 0 ]] || grep -qi 'no space' "$WORK/sync" || fail "round $round: $(cat "$WORK/sync")"
    done
    not_latched
    rm "$WORK/host/filler"
    sync -f "$WORK/host/"
    sync "$WORK/box"
    echo content >"$WORK/box/new"
    sync "$WORK/box/new"
    lockbox umount "$WORK/box"
    not_latched
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    same "$(lockbox ls --passfile "$PASSFILE" "$WORK/host/box.lbx")" new
    umount "$WORK/btrfs"
}
