# Bad input at the border: names, paths and sizes at their limits, and no space in the middle of each operation.
# shellcheck shell=bash disable=SC2317,SC2164

case_names_and_paths_are_limited_where_posix_says() {
    new_archive box
    attach box
    cat >"$WORK/names.py" <<'END'
import errno, os, resource, signal, sys
os.chdir(sys.argv[1])
def refused(code, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except OSError as error:
        assert error.errno == code, (error, call, arguments)
        return
    raise AssertionError("not refused: %r %r" % (call, arguments))
odd = [b"new\nline", b"\xff\xfe\x80", b"...", b"dots...", b" ", b"-rf", b"*", b"\x01\x1f\x7f", b"a" * 255, b"\xc3" * 255,
       b"\xc3\xa9", b"e\xcc\x81", b"con", b"name.", b"back\\slash"]
if sys.argv[2] == "make":
    for name in odd:
        with open(name, "wb") as file:
            file.write(name)
    refused(errno.ENAMETOOLONG, open, b"a" * 256, "w")
    refused(errno.ENAMETOOLONG, os.mkdir, b"a" * 256)
    refused(errno.ENAMETOOLONG, os.rename, b"...", b"a" * 256)
    refused(errno.ENAMETOOLONG, os.link, b"...", b"a" * 256)
    refused(errno.ENAMETOOLONG, os.symlink, b"...", b"a" * 256)
    refused(errno.ENAMETOOLONG, os.stat, b"a" * 256)
    # With the NUL a path has 4,096 bytes at most.
    longest = b"./" * 2046 + b"..."
    assert len(longest) == 4095 and os.stat(longest).st_size == 3
    refused(errno.ENAMETOOLONG, os.stat, b"./" + longest)
    os.makedirs("full/below")
    refused(errno.ENOTEMPTY, os.rmdir, "full")
    os.mkdir("empty")
    refused(errno.ENOTEMPTY, os.rename, "empty", "full")
    refused(errno.EINVAL, os.rename, "full", "full/below/in-itself")
    refused(errno.ENOTDIR, open, b".../file", "w")
    refused(errno.ENOTDIR, os.rename, "full", b"...")
    refused(errno.EISDIR, os.rename, b"...", "full")
    refused(errno.EPERM, os.link, "full", "hard")
    refused(errno.EXDEV, os.rename, b"...", sys.argv[1] + "-outside")
    refused(errno.EXDEV, os.link, b"...", sys.argv[1] + "-outside")
    os.symlink("loop", "loop")
    refused(errno.ELOOP, os.stat, "loop")
    refused(errno.ELOOP, os.open, "loop", os.O_RDONLY | os.O_NOFOLLOW)
    refused(errno.EEXIST, os.mkdir, b"...")
    refused(errno.ENOENT, os.unlink, "nothing")
    refused(errno.EISDIR, os.unlink, "full")
    refused(errno.EINVAL, os.truncate, b"...", -1)
    file = os.open("large", os.O_CREAT | os.O_RDWR)
    os.pwrite(file, b"last", 2 ** 63 - 1 - 4 - 4096)
    # The kernel's own answer: such a range has no end that a number could say.
    refused(errno.EINVAL, os.pwrite, file, b"beyond", 2 ** 63 - 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    refused(errno.EFBIG, os.pwrite, file, b"beyond", 5000)
    refused(errno.EFBIG, os.ftruncate, file, 2 ** 63 - 1)
    assert os.pread(file, 10, 2 ** 63 - 1 - 4 - 4096) == b"last"
    os.close(file)
for name in odd:
    assert open(name, "rb").read() == name
assert set(odd) <= set(os.listdir(b"."))
END
    python3 "$WORK/names.py" "$WORK/box" make
    reattach box
    python3 "$WORK/names.py" "$WORK/box" check
    detach box
    check_full box
    lockbox extract --passfile "$PASSFILE" "$WORK/box.lbx" ... --to "$WORK/out"
    same "$(cat "$WORK/out/...")" ...
}

# On a full host every operation either happens or leaves everything as it was, and deleting always works.
case_no_space_leaves_each_operation_undone() {
    mkdir "$WORK/host" "$WORK/point"
    mount -t tmpfs -o size=24m none "$WORK/host"
    create "$WORK/host/box.lbx"
    mount.lockbox "$WORK/host/box.lbx" "$WORK/point" -o "passfile=$PASSFILE,log=$WORK/point.log"
    python3 - "$WORK/point" "$WORK/host" <<'END'
import ctypes, errno, mmap, os, re, struct, subprocess, sys
os.chdir(sys.argv[1])
host = sys.argv[2]
def tree(what):
    listing = subprocess.check_output(["listing.py", "."])
    # The kernel sets the time of a change of content before it asks for the change, as on every file system.
    return re.sub(rb"mtime=\d+", b"", listing) if what in ("write", "copy", "fallocate") else listing
os.mkdir("keep")
for number in range(200):
    with open("keep/file%d" % number, "wb") as file:
        file.write(os.urandom(500))
        os.fsync(file.fileno())
    os.setxattr("keep/file%d" % number, "user.note", b"x" * 200)
# First the host, then what the archive holds in reserve.
with open(host + "/filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(b"\0" * 65536)
            filler.flush()
    except OSError as error:
        assert error.errno == errno.ENOSPC
full = 0
def attempt(what, call):
    """Repeats the operation until there is no space: that one changes nothing."""
    global full
    for turn in range(40_000):
        # Comparing each time would take hours; a failing one is compared with the state before it.
        try:
            call(turn)
        except OSError as error:
            assert error.errno == errno.ENOSPC, (what, error)
            before = tree(what)
            for again in range(3):
                try:
                    call(turn)
                    return  # space was freed in the background
                except OSError as error:
                    assert error.errno == errno.ENOSPC, (what, error)
                after = tree(what)
                if after != before:
                    changed = sorted(set(before.splitlines()) ^ set(after.splitlines()))[:6]
                    raise AssertionError("a refused %s changed the tree: %r" % (what, changed))
            full += 1
            return
def create(turn):
    os.close(os.open("create%d" % turn, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
def write(turn):
    file = os.open("keep/file%d" % (turn % 200), os.O_WRONLY | os.O_DIRECT)
    try:
        block = mmap.mmap(-1, 65536)
        block.write(os.urandom(65536))
        size = os.fstat(file).st_size
        os.pwrite(file, block, (size + 4095) // 4096 * 4096)
    finally:
        os.close(file)
def move(turn, flags=0):
    new = ("keep/moved%d" % turn).ljust(250, "x")
    if ctypes.CDLL(None, use_errno=True).renameat2(-100, moved[flags].encode(), -100, new.encode(), flags) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")
    moved[flags] = new
moved = {0: "keep/file199", 4: "keep/file198"}
def copy(turn):
    source, target = os.open("keep/file1", os.O_RDONLY), os.open("keep/file2", os.O_WRONLY)
    try:
        os.copy_file_range(source, target, 60000, 0, (turn + 10) << 17)
    finally:
        os.close(source)
        os.close(target)
def allocate(turn):
    file = os.open("keep/file3", os.O_WRONLY)
    try:
        os.posix_fallocate(file, 0, 1 << 30)
    finally:
        os.close(file)
def access_list(turn):
    entries = [(1, 6, -1)] + [(2, 4, turn + user) for user in range(400)] + [(4, 4, -1), (16, 4, -1), (32, 0, -1)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr("keep/file%d" % (turn % 190), "system.posix_acl_access", value)
operations = [
    ("write", write),
    ("setxattr", lambda turn: os.setxattr("keep/file%d" % (turn % 200), "user.%d" % turn, os.urandom(60000))),
    ("symlink", lambda turn: os.symlink("t" * 4000, "symlink%d" % turn)),
    ("mkdir", lambda turn: os.mkdir(("directory%d" % turn).ljust(250, "x"))),
    ("create", create),
    ("link", lambda turn: os.link("keep/file0", ("link%d" % turn).ljust(250, "x"))),
    ("mknod", lambda turn: os.mkfifo(("fifo%d" % turn).ljust(250, "x"))),
    ("rename", move),
    ("whiteout", lambda turn: move(turn + 100_000, 4)),
    ("access list", access_list),
    ("copy", copy),
    ("fallocate", allocate),
]
for name, call in operations:
    attempt(name, call)
print("note: %d operations met a full disk" % full)
assert full >= 4, full
# Deleting needs no space that is not there.
for name in sorted(os.listdir("keep")):
    os.unlink("keep/" + name)
os.fsync(os.open(".", os.O_RDONLY))
assert os.listdir("keep") == []
END
    rm "$WORK/host/filler"
    echo works >"$WORK/point/again"
    sync "$WORK/point/again"
    listing.py "$WORK/point" >"$WORK/before"
    lockbox umount "$WORK/point"
    lockbox check --full --passfile "$PASSFILE" "$WORK/host/box.lbx"
    mount.lockbox "$WORK/host/box.lbx" "$WORK/point" -o "passfile=$PASSFILE"
    listing.py "$WORK/point" >"$WORK/after"
    same_file "$WORK/before" "$WORK/after"
    lockbox umount "$WORK/point"
}
