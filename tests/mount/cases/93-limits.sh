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
    cat >"$WORK/full.py" <<'END'
import ctypes, errno, hashlib, mmap, os, re, struct, subprocess, sys
point, host, passfile = sys.argv[1:]
os.chdir(point)
def content(path):
    """What the file has beside zeros, and where; from the archive, not from the kernel's cache."""
    digest = hashlib.sha256()
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        end = 0
        while True:
            try:
                start = os.lseek(file, end, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO, error
                return digest.hexdigest()
            end = os.lseek(file, start, os.SEEK_HOLE)
            for at in range(start // 4096 * 4096, end, 4096):
                block = os.pread(file, 4096, at)
                if block.strip(b"\0"):
                    digest.update(b"%d %d:" % (at, len(block)) + block)
    finally:
        os.close(file)
def tree(what):
    listing = subprocess.check_output(["listing.py", "."])
    # The kernel sets the time of a change of content before it asks for the change, as on every file system.
    if what in ("write", "copy", "fallocate"):
        listing = re.sub(rb"mtime=\d+", b"", listing)
    for directory, _, names in os.walk("."):
        for name in sorted(names):
            path = os.path.join(directory, name)
            if os.path.isfile(path) and not os.path.islink(path):
                listing += b"%s holds %s\n" % (os.fsencode(path), content(path).encode())
    return listing
os.mkdir("keep")
for number in range(200):
    with open("keep/file%d" % number, "wb") as file:
        file.write(os.urandom(500))
        os.fsync(file.fileno())
    os.setxattr("keep/file%d" % number, "user.note", b"x" * 200)
filler = open(host + "/filler", "wb", buffering=0)
def fill():
    """What the host has left, to the last page. What the archive holds in reserve is for the operations."""
    for size in (65536, 4096):
        try:
            while True:
                filler.write(b"\0" * size)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
def refused(what, call, turn):
    try:
        call(turn)
        return False
    except OSError as error:
        assert error.errno == errno.ENOSPC, (what, error)
        return True
def attempt(what, call):
    """Repeats the operation until there is no space for it, which changes nothing, and tells how often there was."""
    for turn in range(40_000):
        fill()
        # Comparing each time would take hours; those that fail are compared with the state after the first that did.
        if not refused(what, call, turn):
            continue
        before = tree(what)
        if not all(refused(what, call, turn) for _ in range(3)):
            # Space was freed in the background.
            continue
        after = tree(what)
        if after != before:
            changed = sorted(set(before.splitlines()) ^ set(after.splitlines()))[:6]
            raise AssertionError("a refused %s changed the tree: %r" % (what, changed))
        return turn
    raise AssertionError("%s never met a full disk" % what)
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
        os.posix_fallocate(file, 0, 1 << 20)
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
turns = [(name, attempt(name, call)) for name, call in operations]
print("note: done before the disk was full: %s" % ", ".join("%s %d" % turn for turn in turns))
# Unmounting works on a full disk, and what was refused is not in the archive either.
before = tree("write")
os.chdir("/")
subprocess.check_call(["lockbox", "umount", point])
subprocess.check_call(["mount.lockbox", host + "/box.lbx", point, "-o", "passfile=" + passfile])
os.chdir(point)
fill()
assert tree("write") == before
# Deleting needs no space that is not there.
for name in sorted(os.listdir("keep")):
    os.unlink("keep/" + name)
os.fsync(os.open(".", os.O_RDONLY))
assert os.listdir("keep") == []
END
    python3 "$WORK/full.py" "$WORK/point" "$WORK/host" "$PASSFILE"
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

# What a full archive has no space for fits as soon as something was deleted: the next write and its fsync wait for the space that is on its way.
case_an_emptied_archive_takes_data_at_once() {
    new_archive box
    attach box size-limit=10M
    python3 - "$WORK/box" <<'END'
import errno, os, sys
os.chdir(sys.argv[1])
piece = os.urandom(1 << 20)
for number in range(8):
    # One large file, or one in so many pieces that it is freed in several steps.
    size, stride = (1 << 20, 1 << 20) if number % 2 else (4096, 1 << 17)
    file = os.open("filler", os.O_CREAT | os.O_WRONLY)
    written = 0
    try:
        for offset in range(0, 1 << 32, stride):
            written += os.pwrite(file, piece[:size], offset)
            if written % (1 << 20) == 0:
                os.fsync(file)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    # Unlinked while it is open, so it goes with the last descriptor.
    os.unlink("filler")
    try:
        os.close(file)
    except OSError as error:
        # Of data in the kernel that found no space.
        assert error.errno == errno.ENOSPC, error
    os.sync()
    file = os.open("new", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for _ in range(4):
        os.write(file, piece)
    os.fsync(file)
    os.close(file)
    assert os.stat("new").st_size == 4 << 20
    os.unlink("new")
END
    detach box
    check_full box
}
