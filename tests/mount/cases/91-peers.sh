# What other encrypted file systems get wrong, and what a hostile user of the mount may try.
# shellcheck shell=bash disable=SC2317,SC2164

case_an_unlinked_open_file_can_be_synced_in_every_way() {
    new_archive box
    attach box
    python3 - "$WORK/box" <<'END'
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.chdir(sys.argv[1])
for flags in (os.O_RDWR, os.O_RDWR | os.O_DIRECT):
    file = os.open("file", flags | os.O_CREAT, 0o600)
    os.write(file, mmap.mmap(-1, 8192))
    os.unlink("file")
    os.fsync(file)
    os.fdatasync(file)
    os.ftruncate(file, 20000)
    os.fsync(file)
    assert libc.sync_file_range(file, ctypes.c_long(0), ctypes.c_long(0), 7) == 0, ctypes.get_errno()
    with mmap.mmap(file, 20000) as area:
        area[19000:19004] = b"late"
        area.flush()
    os.fsync(file)
    assert os.fstat(file).st_nlink == 0 and os.fstat(file).st_size == 20000
    assert libc.syncfs(file) == 0, ctypes.get_errno()
    os.close(file)
# An error of writing back, kept by the kernel, would come out here.
top = os.open(".", os.O_RDONLY)
for _ in range(50):
    open("short", "w").write("text")
    os.unlink("short")
    assert libc.syncfs(top) == 0, ctypes.get_errno()
END
    sync --file-system "$WORK/box"
    detach box
    check_full box
}

case_thousands_of_open_unlinked_files_live_until_closed() {
    new_archive box
    attach box
    # The limit of the caller, not of the mount.
    ulimit -n 4000
    python3 - "$WORK/box" <<'END'
import os, sys
os.chdir(sys.argv[1])
files = []
for number in range(3_000):
    file = os.open("%d" % number, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(file, b"content of %d" % number)
    os.unlink("%d" % number)
    files.append(file)
for file in files[::100]:
    os.fsync(file)
for number, file in enumerate(files):
    expected = b"content of %d" % number
    status = os.fstat(file)
    assert status.st_nlink == 0 and status.st_size == len(expected)
    assert os.pread(file, 100, 0) == expected
assert os.listdir(".") == []
END
    reattach box
    same "$(ls -A "$WORK/box")" ''
    detach box
    check_full box
}

# is_all_hole FILE SIZE: who closed it last may not be gone yet.
is_all_hole() {
    [[ $(stat -c '%s %b' "$1") == "$2 0" ]]
}

# stored NAME: how many bytes of the archive, which is not mounted, are in use.
stored() {
    lockbox info --passfile "$PASSFILE" "$WORK/$1.lbx" | sed -n 's/^In use *\([0-9]*\) bytes$/\1/p'
}

case_anybody_may_truncate_to_astronomic_sizes() {
    local before after commits
    need_user
    new_archive box
    before=$(stored box)
    attach box allow_other
    chmod 1777 "$WORK/box"
    local size
    for size in 1000000000000000 9223372036854775807; do
        as_user truncate -s "$size" "$WORK/box/one$size" &
        local first=$!
        as_user truncate -s "$size" "$WORK/box/two$size"
        wait "$first"
        await is_all_hole "$WORK/box/one$size" "$size"
        await is_all_hole "$WORK/box/two$size" "$size"
        same "$(tail -c 3 "$WORK/box/one$size" | od -An -tx1)" ' 00 00 00'
        as_user truncate -s 0 "$WORK/box/two$size"
    done
    # Work for what lies between the sizes would have no end: 2^63 bytes are 7 * 10^13 frames. Nor does a truncation wait for a commit, which there
    # is none of while the clock stands still.
    as_user touch "$WORK/box/turns"
    stop_clock box
    commits=$(lockbox status --json "$WORK/box" | python3 -c 'import json, sys; print(json.load(sys.stdin)["commits"])')
    as_user python3 - "$WORK/box/turns" <<'END'
import os, sys
file = os.open(sys.argv[1], os.O_RDWR)
for size in (10 ** 15, 2 ** 63 - 1):
    for _ in range(101):
        os.ftruncate(file, 0)
        os.ftruncate(file, size)
END
    same "$(lockbox status --json "$WORK/box" | python3 -c 'import json, sys; print(json.load(sys.stdin)["commits"])')" "$commits" commits
    start_clock
    expect 1 'file too large|invalid argument' as_user sh -c "exec 3<>'$WORK/box/more'; \
        dd if=/dev/zero bs=10 count=1 seek=9223372036854775805 oflag=seek_bytes conv=notrunc status=none of='$WORK/box/more'"
    detach box
    # Five names and inodes, in a node or two that take some blocks of 4 KiB; not a block of what is in the files.
    after=$(stored box)
    note "the holes took $((after - before)) bytes"
    ((after > before && after - before <= 4 * 4096)) || fail "$before bytes were in use, and $after with the holes"
    check_full box
}

case_links_times_and_modes_are_kept_as_asked() {
    new_archive box
    attach box
    python3 - "$WORK/box" <<'END'
import errno, os, stat, sys
os.chdir(sys.argv[1])
os.umask(0)
for length in (1, 255, 1000, 4000, 4094, 4095):
    target = "t" * length
    os.symlink(target, "link%d" % length)
    assert os.readlink("link%d" % length) == target
    assert os.lstat("link%d" % length).st_size == length
try:
    os.symlink("t" * 4096, "too-long")
    raise AssertionError("a target of 4096 bytes was accepted")
except OSError as error:
    assert error.errno == errno.ENAMETOOLONG, error
times = (1_000_000_001_000_000_002, 2_000_000_003_000_000_004)
os.utime("link255", ns=times, follow_symlinks=False)
assert os.lstat("link255").st_mtime_ns == times[1]
for mode in (0o151, 0o0, 0o1777, 0o2755, 0o4711, 0o7777, 0o640):
    os.mkdir("directory%o" % mode, mode)
    asked = mode & 0o1777  # mkdir(2) takes no set-id bits.
    assert stat.S_IMODE(os.stat("directory%o" % mode).st_mode) == asked, oct(mode)
    os.close(os.open("file%o" % mode, os.O_CREAT | os.O_RDWR, mode))
    assert stat.S_IMODE(os.stat("file%o" % mode).st_mode) == mode, oct(mode)
END
    reattach box
    same "$(readlink "$WORK/box/link4095" | tr -d '\n' | wc -c)" 4095
    same "$(stat -c %Y "$WORK/box/link255")" 2000000003
    same "$(stat -c %a "$WORK/box/directory151")" 151
    same "$(stat -c %a "$WORK/box/file7777")" 7777
    detach box
}

case_sizes_are_exact_at_every_boundary() {
    new_archive box
    attach box
    python3 - "$WORK/box" write <<'END'
import os, sys
os.chdir(sys.argv[1])
for power in (9, 12, 15, 17):
    for size in range(2 ** power - 2, 2 ** power + 3):
        with open("%d" % size, "wb") as file:
            file.write(b"x" * size)
            file.flush()
            assert os.fstat(file.fileno()).st_size == size
        assert os.stat("%d" % size).st_size == size
END
    reattach box
    same "$(stat -c '%n %s' "$WORK"/box/* | awk '{ n = $1; sub(".*/", "", n); if (n != $2) print }')" ''
    detach box
}

# Who holds a handle asks for `..` without any name: the answers must be the ancestors of today, not of when it was taken.
case_the_parents_of_a_handle_follow_its_ancestors() {
    new_archive box
    attach box
    mkdir -p "$WORK/box/old/parent/moved/c/d" "$WORK/box/new/other"
    cat >"$WORK/parents.py" <<'END'
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("opaque", ctypes.c_ubyte * 128)]
top, action, store = sys.argv[1:4]
root = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
PLACES = {"old": "old/parent", "new": "new/other", "top": "."}
def climb(file):
    """The numbers of the inodes from a directory up to the top."""
    numbers = [os.fstat(file).st_ino]
    file = os.dup(file)
    while numbers[-1] != os.fstat(root).st_ino:
        assert len(numbers) < 10, numbers
        above = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=file)
        os.close(file)
        file = above
        numbers.append(os.fstat(file).st_ino)
    os.close(file)
    return numbers
def opened():
    handle = Handle.from_buffer_copy(open(store, "rb").read())
    file = libc.open_by_handle_at(root, ctypes.byref(handle), os.O_RDONLY | os.O_DIRECTORY)
    assert file >= 0, os.strerror(ctypes.get_errno())
    return file
def by_names(place):
    """The same by names, so asked for only after the handle was."""
    path = os.path.normpath(PLACES[place] + "/moved/c/d")
    numbers = []
    while path:
        numbers.append(os.stat(path, dir_fd=root).st_ino)
        path = os.path.dirname(path)
    return numbers + [os.fstat(root).st_ino]
if action == "take":
    handle, number = Handle(128), ctypes.c_int()
    assert libc.name_to_handle_at(root, b"old/parent/moved/c/d", ctypes.byref(handle), ctypes.byref(number), 0) == 0
    open(store, "wb").write(bytes(handle))
    assert climb(opened()) == by_names("old")
elif action == "climb":
    got = climb(opened())
    assert got == by_names(sys.argv[4]), (got, by_names(sys.argv[4]))
else:
    # Moved while a descriptor is open that was reached without a name.
    source, target = sys.argv[4:]
    file = opened()
    os.rename(PLACES[source] + "/moved", PLACES[target] + "/moved", src_dir_fd=root, dst_dir_fd=root)
    got = climb(file)
    assert got == by_names(target), (got, by_names(target))
END
    parents() {
        python3 "$WORK/parents.py" "$WORK/box" "$1" "$WORK/kept" "${@:2}"
    }
    parents take
    mv "$WORK/box/old/parent/moved" "$WORK/box/new/other/moved"
    parents climb new
    echo 2 >/proc/sys/vm/drop_caches
    parents climb new
    reattach box
    parents climb new
    echo 2 >/proc/sys/vm/drop_caches
    parents move new top
    # The parent that it once had is gone altogether.
    rm -r "$WORK/box/old" "$WORK/box/new"
    echo 2 >/proc/sys/vm/drop_caches
    parents climb top
    reattach box
    parents climb top
    detach box
    check_full box
}

case_many_users_create_at_once_and_own_what_they_made() {
    new_archive box
    attach box allow_other,suid,dev
    chmod 1777 "$WORK/box"
    python3 - "$WORK/box" <<'END'
import os, stat, sys
os.chdir(sys.argv[1])
os.umask(0)
children = []
for user in range(3000, 3024):
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(user + 500, user + 500, user + 500)
        os.setresuid(user, user, user)
        for turn in range(60):
            name = "%d.%d" % (user, turn)
            kind = turn % 5
            if kind == 0:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            elif kind == 1:
                os.mkdir(name, 0o700)
            elif kind == 2:
                os.symlink("target", name)
            elif kind == 3:
                os.mkfifo(name, 0o600)
            else:
                os.mknod(name, stat.S_IFSOCK | 0o600)
            status = os.lstat(name)
            if (status.st_uid, status.st_gid) != (user, user + 500):
                os._exit(1)
        os._exit(0)
    children.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
END
    reattach box allow_other
    same "$(find "$WORK/box" -mindepth 1 -printf '%f %U %G\n' | awk '{ split($1, n, "."); if (n[1] != $2 || n[1] + 500 != $3) print }')" ''
    same "$(find "$WORK/box" -mindepth 1 | wc -l)" 1440
    detach box
}

case_a_flood_of_attributes_is_bounded_and_can_be_removed() {
    new_archive box
    attach box
    python3 - "$WORK/box/file" <<'END'
import errno, os, sys
path = sys.argv[1]
open(path, "w").close()
names = []
while True:
    name = "user.%060d" % len(names)
    try:
        os.setxattr(path, name, b"value of " + name.encode())
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        break
    names.append(name)
# The names may be as long together as listxattr(2) can tell, so none is ever hidden; one more would not fit.
assert 65536 - len(name) - 1 < sum(len(name) + 1 for name in names) <= 65536, len(names)
assert sorted(os.listxattr(path)) == sorted(names)
for name in names[::7]:
    assert os.getxattr(path, name) == b"value of " + name.encode()
for name in names[:10]:
    os.removexattr(path, name)
os.setxattr(path, "user.large", b"x" * 65536)
assert len(os.getxattr(path, "user.large")) == 65536
try:
    os.setxattr(path, "user.larger", b"x" * 65537)
    raise AssertionError("65,537 bytes were accepted")
except OSError as error:
    assert error.errno in (errno.E2BIG, errno.ENOSPC), error
for name in names[10:]:
    os.removexattr(path, name)
assert os.listxattr(path) == ["user.large"]
END
    rm "$WORK/box/file"
    detach box
    check_full box
}

case_few_descriptors_are_enough_for_daemon_and_caller() {
    local pid
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    # All that it has open stays open; not one more can be opened.
    prlimit --pid "$pid" --nofile=1:
    mkdir "$WORK/box/directory"
    python3 - "$WORK/box" <<'END'
import errno, os, resource, sys
os.chdir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
files = []
try:
    while True:
        files.append(os.open("file%d" % len(files), os.O_CREAT | os.O_RDWR, 0o600))
except OSError as error:
    assert error.errno == errno.EMFILE, error
# What could not be opened was not created either.
assert not os.path.lexists("file%d" % len(files))
for file in files:
    os.write(file, b"content")
    os.fsync(file)
END
    df "$WORK/box" >/dev/null
    prlimit --pid "$pid" --nofile=1000:
    reattach box
    same "$(cat "$WORK/box/file0")" content
    detach box
    check_full box
}

# A daemon that does not run cannot be waited for, so there is a way without it.
# In a namespace of its own: every command that looks for mounts waits some seconds for the answer of one that is stopped, also those of other cases.
case_the_mount_of_a_stopped_daemon_can_be_taken_away() {
    alone a_stopped_daemon
}

# end_with_case PID: also when the case fails; the path of the daemon is that of the namespace, so the runner does not find it.
end_with_case() {
    # shellcheck disable=SC2064
    trap "kill -KILL $1 2>/dev/null || true" EXIT
}

a_stopped_daemon() {
    local pid
    new_archive stopped
    attach stopped
    echo content >"$WORK/stopped/file"
    sync "$WORK/stopped/file"
    pid=$(daemon_of "$WORK/stopped.lbx")
    stop_process "$pid"
    end_with_case "$pid"
    expect 2 'does not answer' timeout 60 lockbox umount "$WORK/stopped"
    mountpoint -q "$WORK/stopped" || fail 'unmounted although that was refused'
    timeout 60 lockbox umount --lazy "$WORK/stopped"
    ! mountpoint -q "$WORK/stopped" || fail 'still mounted'
    # It was detached, not killed: continued, it ends as after every unmount.
    kill -CONT "$pid"
    await gone "$pid"
    attach stopped
    same "$(cat "$WORK/stopped/file")" content
    pid=$(daemon_of "$WORK/stopped.lbx")
    stop_process "$pid"
    end_with_case "$pid"
    timeout 60 fusermount3 -uz "$WORK/stopped"
    ! mountpoint -q "$WORK/stopped" || fail 'still mounted after fusermount3 -uz'
    kill -KILL "$pid"
    await gone "$pid"
    attach stopped
    same "$(cat "$WORK/stopped/file")" content
    detach stopped
    trap - EXIT
}

# The kernel asks the daemon for the attributes of a root that was changed: what looks at the path of such a mount waits for ever. The limits only end a wait.
case_a_stopped_daemon_stops_no_command_that_names_its_mount() {
    alone commands_beside_a_stopped_daemon
}

commands_beside_a_stopped_daemon() {
    local pid name code
    new_archive halted
    new_archive other
    new_archive inner
    attach halted
    ln -s halted "$WORK/link"
    mkdir "$WORK/halted/directory"
    cp "$WORK/inner.lbx" "$WORK/halted/inner.lbx"
    sync "$WORK/halted/inner.lbx"
    pid=$(daemon_of "$WORK/halted.lbx")
    end_with_case "$pid"
    cd "$WORK"
    for _ in {1..20}; do
        echo content >halted/new
        mv halted/new halted/file
        stop_process "$pid"
        code=0
        timeout 2 stat halted >stdout 2>&1 || code=$?
        [[ $code -ne 124 ]] || break
        # Else the daemon flushed in between, which asks for the attributes of the root.
        kill -CONT "$pid"
    done
    same "$code" 124 'the kernel knows the attributes of the root'
    # Each waits some seconds for an answer, so they wait together.
    told_of() {
        local WORK=$WORK/told.$1
        mkdir "$WORK"
        expect "${@:2}"
    }
    local number=0 told=()
    begin() {
        in_background told_of $((++number)) "$@"
        told+=($!)
    }
    for name in halted halted/ halted/. halted/../halted link "$WORK/halted" ./link/; do
        begin 2 'no daemon answers for .*/halted:' timeout --kill-after=5 60 lockbox status "$name"
        begin 2 'no daemon answers for .*/halted:' timeout --kill-after=5 60 lockbox snapshot ls --passfile "$PASSFILE" "$name"
        begin 11 'is where .*/halted.lbx is mounted: name the archive' timeout --kill-after=5 60 lockbox ls --passfile "$PASSFILE" "$name"
    done
    begin 2 'halted does not answer' timeout --kill-after=5 60 lockbox umount halted
    begin 2 'no daemon answers for .*/halted:' timeout --kill-after=5 60 lockbox status
    begin 2 'no daemon answers for .*/halted:' timeout --kill-after=5 60 lockbox status halted/directory
    begin 2 'no daemon answers for .*/halted:' timeout --kill-after=5 60 lockbox umount halted/inner.lbx
    begin 15 'does not answer' timeout --kill-after=5 60 mount.lockbox other.lbx halted -o "passfile=$PASSFILE"
    begin 15 'does not answer' timeout --kill-after=5 60 lockbox mount other.lbx link -o "passfile=$PASSFILE"
    for number in "${told[@]}"; do wait "$number"; done
    timeout --kill-after=5 60 lockbox umount --lazy link
    [[ -z $(mounts_below "$WORK" | grep -vx "$WORK" || true) ]] || fail "still mounted"
    kill -CONT "$pid"
    await 30 gone "$pid"
    attach halted
    same "$(cat halted/file)" content
    detach halted
    trap - EXIT
}

# Runs alone: it puts a link into /sbin.
case_a_living_mount_becomes_read_only_and_writable_again() {
    local link=/sbin/mount.fuse.lockbox before made=
    new_archive box
    attach box
    echo before >"$WORK/box/file"
    if [[ ! -e $link ]]; then
        ln -s "$SCRATCH_DIR/bin/mount.lockbox" "$link"
        made=$link
    fi
    mount -o remount,ro "$WORK/box" || fail 'remount,ro'
    expect 1 'read-only file system' touch "$WORK/box/other"
    kill_daemon box
    attach box
    same "$(cat "$WORK/box/file")" before 'what was written before remount,ro is not durable'
    mount -o remount,ro "$WORK/box"
    mount -o remount,rw "$WORK/box"
    echo after >"$WORK/box/file"
    # A file that is open for writing keeps the mount writable.
    exec 5>>"$WORK/box/file"
    expect 15 'busy' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o remount,ro
    exec 5>&-
    detach box
    attach box ro
    expect 15 'was mounted read-only' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o remount,rw
    same "$(cat "$WORK/box/file")" after
    detach box
    expect 15 'no archive is mounted' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o remount,ro
    [[ -z $made ]] || rm -f "$made"
}
