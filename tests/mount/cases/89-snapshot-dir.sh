# Snapshots in DIR/.snapshots of a living mount: what they show, what is refused there, numbers, and the option.
# shellcheck shell=bash disable=SC2317,SC2164

keep() {
    detach box
    lockbox snapshot create --passfile "$PASSFILE" "$WORK/box.lbx" "$1"
    attach box "${2-}"
}

# Overwrites, cuts, punches, clones, removes, renames and adds; $1 is a number.
churn() {
    local top=$WORK/box/tree
    python3 - "$top/some" "$1" <<'PYTHON'
import os
import sys

top, turn = sys.argv[1:]
files = sorted(os.path.join(place, name) for place, _, names in os.walk(top) for name in names)
for number, file in enumerate(files):
    if os.path.islink(file):
        continue
    if number % 4 == 0:
        os.unlink(file)
    elif number % 4 == 1:
        with open(file, "r+b") as opened:
            opened.seek(1000)
            opened.write(os.urandom(70000))
    elif number % 4 == 2:
        os.truncate(file, 100)
    else:
        os.setxattr(file, "user.turn", turn.encode())
        os.chmod(file, 0o600)
        os.rename(file, file + "." + turn)
PYTHON
    fallocate --punch-hole --offset 10000 --length 500000 "$top/large"
    cp --reflink=auto "$top/large" "$top/copy$1"
    head -c 300000 /dev/urandom | dd of="$top/large" bs=4096 seek=$((50 * $1)) conv=notrunc status=none
    rm -rf "$top/odd"/*"$1"*
    mkdir "$top/new$1"
    echo "$1" >"$top/new$1/file"
}

# Two moments in the archive `box`, copies of them beside it, and a living tree that is another one.
two_moments() {
    local tree
    tree=$(source_tree)
    new_archive box
    attach box
    mkdir "$WORK/box/tree" "$WORK/box/tree/some"
    cp -a "$tree/odd" "$WORK/box/tree/"
    find "$tree" -mindepth 1 -maxdepth 1 -type d ! -name odd | LC_ALL=C sort | awk 'NR <= 6' | xargs -I{} cp -a {} "$WORK/box/tree/some/"
    head -c 3000000 /dev/urandom >"$WORK/box/tree/large"
    cp -a "$WORK/box" "$WORK/first"
    keep first
    churn 1
    cp -a "$WORK/box" "$WORK/second"
    keep 'the second, later'
    churn 2
}

case_snapshots_are_found_in_a_directory_of_the_mount_where_nothing_can_be_changed() {
    local round
    two_moments
    same "$(ls -A "$WORK/box")" tree
    same "$(find "$WORK/box" -xdev -name .snapshots)" ''
    same "$(ls -A "$WORK/box/.snapshots")" $'first\nthe second, later'
    # What is written and not yet in the archive's trees, what is, and what is erased.
    for round in staged durable purged; do
        same_tree "$WORK/first" "$WORK/box/.snapshots/first"
        same_tree "$WORK/second" "$WORK/box/.snapshots/the second, later"
        case $round in
        staged) sync -f "$WORK/box" ;;
        durable)
            churn 3
            rm -rf "$WORK/box/tree/odd"
            lockbox purge "$WORK/box"
            echo 3 >/proc/sys/vm/drop_caches
            ;;
        esac
    done
    # From one to another, and back into the tree.
    ! diff -rq --no-dereference "$WORK/box/.snapshots/first" "$WORK/box/.snapshots/the second, later" >"$WORK/differences" || fail "no difference between two moments"
    grep -q large "$WORK/differences"
    cp -a "$WORK/box/.snapshots/first/tree/odd" "$WORK/box/tree/odd"
    same_tree "$WORK/first/tree/odd" "$WORK/box/tree/odd"
    cp --reflink=auto --sparse=always "$WORK/box/.snapshots/first/tree/large" "$WORK/box/tree/large"
    same_file "$WORK/first/tree/large" "$WORK/box/tree/large"
    ! tar -C "$WORK/box" -c . | tar -t | shows '\.snapshots' || fail "a copy of the mount found the directory"
    check_listed
    nothing_there_can_be_changed
    detach box
    check_full box
}

# A place in `.snapshots` is a working directory and a source of programs as any other.
check_listed() {
    (
        cd "$WORK/box/.snapshots/first/tree"
        same "$(pwd -P)" "$WORK/box/.snapshots/first/tree"
        cd ..
        [[ -e ../first/tree/large && -e ../../tree ]] || fail "there is no way up"
    )
    same "$(stat -c %d "$WORK/box/.snapshots/first/tree/large")" "$(stat -c %d "$WORK/box")" 'devices'
    # Not the blocks: they follow the space of the host, which others use meanwhile.
    same "$(stat -f -c '%i %S %l' "$WORK/box/.snapshots/first")" "$(stat -f -c '%i %S %l' "$WORK/box")" 'what statfs says'
    same "$(stat -c '%A %u' "$WORK/box/.snapshots")" "dr-xr-xr-x $(stat -c %u "$WORK/box")"
}

nothing_there_can_be_changed() {
    PYTHONPATH=$SCRATCH_DIR/bin python3 - "$WORK/box" <<'PYTHON'
import errno
import fcntl
import os
import sys
from calls import code

live = sys.argv[1] + "/tree"
view = sys.argv[1] + "/.snapshots/first/tree"
kept = sys.argv[1] + "/.snapshots"
file = view + "/large"


def opened(flags, path=file):
    os.close(os.open(path, flags, 0o600))


for what, error, call, arguments in [
    ("open for writing", errno.EROFS, opened, (os.O_WRONLY,)),
    ("open for both", errno.EROFS, opened, (os.O_RDWR,)),
    ("open to cut", errno.EROFS, opened, (os.O_WRONLY | os.O_TRUNC,)),
    ("open to append", errno.EROFS, opened, (os.O_WRONLY | os.O_APPEND,)),
    ("create", errno.EROFS, opened, (os.O_CREAT | os.O_WRONLY, view + "/new")),
    ("create a snapshot", errno.EROFS, opened, (os.O_CREAT | os.O_WRONLY, kept + "/new")),
    ("truncate", errno.EROFS, os.truncate, (file, 5)),
    ("mkdir", errno.EROFS, os.mkdir, (view + "/new",)),
    ("mkdir of a snapshot", errno.EROFS, os.mkdir, (kept + "/new",)),
    ("mkdir over one", errno.EEXIST, os.mkdir, (kept + "/first",)),
    ("mknod", errno.EROFS, os.mkfifo, (view + "/new",)),
    ("symlink", errno.EROFS, os.symlink, ("x", view + "/new")),
    ("unlink", errno.EROFS, os.unlink, (file,)),
    ("rmdir", errno.EROFS, os.rmdir, (view + "/some",)),
    ("rmdir of a snapshot", errno.EROFS, os.rmdir, (kept + "/first",)),
    ("rmdir of the directory", errno.EROFS, os.rmdir, (kept,)),
    ("rename within", errno.EROFS, os.rename, (file, view + "/new")),
    ("rename out", errno.EROFS, os.rename, (file, live + "/new")),
    ("rename into", errno.EROFS, os.rename, (live + "/large", view + "/new")),
    ("rename of a snapshot", errno.EROFS, os.rename, (kept + "/first", kept + "/new")),
    ("rename of the directory", errno.EROFS, os.rename, (kept, live + "/new")),
    ("rename over the directory", errno.EROFS, os.rename, (live + "/new1", kept)),
    ("link out", errno.EXDEV, os.link, (file, live + "/new")),
    ("link within", errno.EROFS, os.link, (file, view + "/new")),
    ("link into", errno.EROFS, os.link, (live + "/large", view + "/new")),
    ("chmod", errno.EROFS, os.chmod, (file, 0o600)),
    ("chmod of the directory", errno.EROFS, os.chmod, (kept, 0o700)),
    ("chown", errno.EROFS, os.chown, (file, 1, 1)),
    ("utime", errno.EROFS, os.utime, (file, (1, 1))),
    ("setxattr", errno.EROFS, os.setxattr, (file, "user.a", b"b")),
    ("removexattr", errno.EROFS, os.removexattr, (file, "user.a")),
    ("setxattr of the directory", errno.EROFS, os.setxattr, (kept, "user.a", b"b")),
    ("make the directory", errno.EEXIST, os.mkdir, (kept,)),
    ("what is not there", errno.ENOENT, os.stat, (kept + "/none",)),
    ("what is not there below", errno.ENOENT, os.stat, (view + "/none",)),
]:
    got = code(call, *arguments)
    if got != error:
        sys.exit("%s: %s in place of %s" % (what, errno.errorcode.get(got, got), errno.errorcode[error]))

assert not os.path.lexists(live + "/new") and os.path.isdir(live + "/new1")
with open(file, "rb") as first, open(file, "rb") as second:
    fcntl.flock(first, fcntl.LOCK_EX)
    assert code(fcntl.flock, second, fcntl.LOCK_EX | fcntl.LOCK_NB) == errno.EWOULDBLOCK
    fcntl.lockf(second, fcntl.LOCK_SH)
    os.fsync(first.fileno())

# Numbers: each its own, and the same again.
numbers = {}
for top in (live, view, kept + "/the second, later/tree"):
    for directory, _, names in os.walk(top):
        for name in names:
            status = os.lstat(os.path.join(directory, name))
            numbers.setdefault(status.st_ino, set()).add(top)
            assert status.st_dev == os.stat(sys.argv[1]).st_dev
shared = [number for number, tops in numbers.items() if len(tops) > 1]
assert not shared, "one number in two trees: %r" % shared
assert len(numbers) > 300, len(numbers)
listed = {entry.name: entry.inode() for entry in os.scandir(kept)}
assert listed == {name: os.stat(os.path.join(kept, name)).st_ino for name in listed} and len(listed) == 2
odd = os.stat(kept).st_ino
assert odd not in numbers and odd not in listed.values()
PYTHON
    # A program runs from there, by the kernel's pages.
    detach box
    attach box exec
    cp /bin/true "$WORK/box/program"
    keep runs exec
    rm "$WORK/box/program"
    "$WORK/box/.snapshots/runs/program" || fail "a program of a snapshot does not run"
}

case_the_directory_of_snapshots_is_shown_hidden_or_off() {
    local name long
    new_archive box
    attach box
    echo one >"$WORK/box/file"
    same "$(ls -A "$WORK/box/.snapshots")" ''
    keep 'a b' snapshot-dir=shown
    echo two >"$WORK/box/file"
    same "$(ls -A "$WORK/box")" $'.snapshots\nfile'
    same "$(find "$WORK/box" -name file | LC_ALL=C sort)" "$WORK/box/.snapshots/a b/file"$'\n'"$WORK/box/file"
    lockbox status --json "$WORK/box" | shows snapshot-dir=shown
    # Names that no line can hold.
    long=$(printf 'x%.0s' {1..255})
    for name in $'with\nnewline' $'\xff\xfe' "$long" ...; do
        keep "$name" snapshot-dir=shown
        same "$(cat "$WORK/box/.snapshots/$name/file")" two
    done
    same "$(find "$WORK/box/.snapshots" -mindepth 1 -maxdepth 1 -printf x)" xxxxx
    detach box
    attach box snapshot-dir=off
    [[ ! -e $WORK/box/.snapshots ]] || fail "snapshot-dir=off has a directory"
    mkdir "$WORK/box/.snapshots"
    echo mine >"$WORK/box/.snapshots/file"
    detach box
    # Whoever has an entry of that name finds it.
    attach box snapshot-dir=shown
    same "$(ls -A "$WORK/box/.snapshots")" file
    same "$(ls -A "$WORK/box")" $'.snapshots\nfile'
    grep -q 'has an entry .snapshots of its own' "$WORK/box.log" || fail "nothing in the log"
    rm -r "$WORK/box/.snapshots"
    detach box
    # Read-only mounts have it too, of all moments, also where the mount shows one of them.
    attach box ro
    same "$(cat "$WORK/box/.snapshots/a b/file" "$WORK/box/file")" $'one\ntwo'
    detach box
    attach box 'snapshot=a b'
    same "$(cat "$WORK/box/.snapshots/.../file" "$WORK/box/file")" $'two\none'
    detach box
    expect 1 'snapshot-dir= takes shown, hidden or off' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE,snapshot-dir=on"
    check_full box
}
