# A host that is full, or fails, under a mount: errors come where programs look for them, and nothing acknowledged is lost.
# shellcheck shell=bash disable=SC2317,SC2164

# ext4 of 300 MB in a file.
loop_host() {
    mkdir -p "$WORK/host" "$WORK/box"
    truncate -s 300M "$WORK/host.image"
    mkfs.ext4 -q -m 0 "$WORK/host.image"
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
        await 30 free "$WORK/host/box.lbx"
        lockbox info --json --passfile "$PASSFILE" "$WORK/host/box.lbx" >"$WORK/info"
        # Else the clock came between.
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
case_a_failing_host_makes_the_archive_read_only() {
    local code=0 inner
    new_archive outer
    attach outer sync=always
    mkdir "$WORK/host" "$WORK/box"
    mount --bind "$WORK/outer" "$WORK/host"
    create "$WORK/host/box.lbx"
    attach_hosted
    inner=$(daemons_below "$WORK/host")
    head -c 300000 /dev/urandom >"$WORK/kept"
    cp "$WORK/kept" "$WORK/box/kept"
    sync "$WORK/box/kept"
    kill_daemon outer
    PYTHONPATH=$SCRATCH_DIR/bin python3 - "$WORK/box" <<'END'
import errno, os, sys
from calls import code
os.chdir(sys.argv[1])
file = os.open("kept", os.O_RDWR)
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
    same "$(grep -c 'read-only from now on' "$WORK/box.log")" 1 'lines in the log about it'
    lockbox umount "$WORK/box" 2>"$WORK/stderr" || code=$?
    same "$code" 2 'exit code of lockbox umount'
    grep -q 'read-only' "$WORK/stderr" || fail "lockbox umount said: $(cat "$WORK/stderr")"
    await 30 gone "$inner"
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
