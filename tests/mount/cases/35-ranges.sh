# Ranges of files: holes, sharing copies, seeking, and the programs that use them.
# shellcheck shell=bash disable=SC2317,SC2164

# sparse_files DIRECTORY: open and closed, inline, packed, compressed and not, staged and published.
sparse_files() {
    python3 - "$1" <<'END'
import os, random, sys
random = random.Random(7)
os.chdir(sys.argv[1])
def make(name, size, parts):
    with open(name, "wb") as file:
        for offset, data in parts:
            file.seek(offset)
            file.write(data)
        file.truncate(size)
make("empty", 0, [])
make("hole", 5 << 20, [])
make("inline", 100, [(3, b"tiny")])
make("inline-in-hole", 1 << 20, [(0, b"tiny")])
make("packed", 9000, [(0, random.randbytes(9000))])
make("packed-in-hole", 3 << 20, [(0, b"packed" * 500)])
make("text", 1 << 20, [(0, b"a line that compresses well\n" * 30000)])
make("sparse", 40 << 20, [(12345, random.randbytes(700000)), (25 << 20, b"x"), ((39 << 20) + 5, random.randbytes(4096))])
make("pieces", 24 << 20, [(n * 100_003, random.randbytes(1 + n * 25 % 5000)) for n in range(200)])
make("end", (1 << 20) + 1, [(1 << 20, b"!")])
END
}

# copied WHERE: every copy of the files by every program has every byte.
copied() {
    local from=$1 to=$2 how
    mkdir "$to"
    for how in auto always never; do
        cp -r --sparse=$how "$from" "$to/cp-$how"
        diff -r "$from" "$to/cp-$how"
    done
    cp -r --reflink=auto "$from" "$to/reflink"
    diff -r "$from" "$to/reflink"
    mkdir "$to/tar"
    tar -C "$from" -Scf - . | tar -C "$to/tar" -xf -
    diff -r "$from" "$to/tar"
    rsync -rS "$from/" "$to/rsync/"
    diff -r "$from" "$to/rsync"
    rm -r "$to"
}

case_sparse_files_are_copied_whole() {
    mkdir "$WORK/host"
    sparse_files "$WORK/host"
    new_archive box
    attach box
    mkdir "$WORK/box/files"
    sparse_files "$WORK/box/files"
    # Just closed, then durable, then read from the archive.
    copied "$WORK/box/files" "$WORK/box/copies"
    diff -r "$WORK/host" "$WORK/box/files"
    sync "$WORK/box/files"/*
    copied "$WORK/box/files" "$WORK/out"
    reattach box
    copied "$WORK/box/files" "$WORK/out"
    local name
    for name in sparse hole pieces packed-in-hole; do
        [[ $(stat -c %b "$WORK/box/files/$name") -le $(stat -c %b "$WORK/host/$name") ]] || fail "holes of $name are counted as data"
    done
    detach box
    lockbox extract --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/extracted"
    diff -r "$WORK/host" "$WORK/extracted/files"
    [[ $(stat -c %b "$WORK/extracted/files/sparse") -lt 3000 ]] || fail 'extract filled holes'
    check_full box
}

case_a_file_that_is_being_written_hides_no_data_from_seeking() {
    new_archive box
    attach box
    python3 - "$WORK/box/file" <<'END'
import mmap, os, subprocess, sys
path = sys.argv[1]
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"cached", 3 << 20)
# Nothing was written back: the kernel has these bytes alone.
assert os.lseek(fd, 0, os.SEEK_DATA) == 3 << 20
assert os.lseek(fd, 3 << 20, os.SEEK_HOLE) == (3 << 20) + 6
os.ftruncate(fd, 8 << 20)
with mmap.mmap(fd, 8 << 20) as mapped:
    mapped[7 << 20] = 1
    assert os.lseek(fd, 4 << 20, os.SEEK_DATA) == 7 << 20
    mapped[(7 << 20) + 9] = 2
    os.pwrite(fd, b"more", 5 << 20)
    copy = path + ".copy"
    for sparse in ("auto", "always"):
        subprocess.run(["cp", "--sparse=" + sparse, path, copy], check=True)
        assert open(copy, "rb").read() == os.pread(fd, 9 << 20, 0), sparse
for offset in (8 << 20, 1 << 50, -1):
    try:
        os.lseek(fd, offset, os.SEEK_DATA)
        raise SystemExit("no error at %d" % offset)
    except OSError as error:
        assert error.errno == 6, error
END
    detach box
    check_full box
}

holds_nothing() {
    [[ $(stat -c %b "$1") == 0 ]]
}

# KERNEL-7: until the kernel hands it over, nobody but it knows of this data, and backup programs ask for the count of blocks.
case_files_that_are_open_and_not_flushed_are_copied_whole() {
    new_archive box
    attach box
    cat >"$WORK/writer" <<'END'
import os, sys
held = []
for name, size in [("one", 1), ("inline", 300), ("packed", 8192), ("large", 3 << 20), ("there", 8192), ("hole", 0)]:
    file = os.open(sys.argv[1] + "/" + name, os.O_RDWR | os.O_CREAT)
    os.write(file, bytes([1 + len(name)]) * size)
    held.append(file)
os.ftruncate(file, 8 << 20)
os.pwrite(file, b"in a hole" * 1000, 3 << 20)
print("written", flush=True)
sys.stdin.read()
END
    local program counts from to answer held
    for program in tar rsync cp; do
        from=$WORK/box/$program to=$WORK/$program
        mkdir "$from" "$to"
        : >"$from/there"
        coproc WRITER { python3 "$WORK/writer" "$from"; }
        local pid=$WRITER_PID
        read -r answer <&"${WRITER[0]}"
        same "$answer" written
        counts=$(stat -c '%b %n' "$from"/*)
        ! grep '^0 ' <<<"$counts" || fail 'files with data count no blocks'
        case $program in
            tar) tar -C "$from" -Scf - . | tar -C "$to" -xf - ;;
            rsync) rsync -rS "$from/" "$to/" ;;
            cp) cp --sparse=auto "$from"/* "$to/" ;;
        esac
        diff -r "$from" "$to"
        exec {WRITER[1]}>&-
        wait "$pid"
    done
    # What holds no data says so when nobody can write it any more.
    exec {held}>"$from/empty"
    same "$(stat -c %b "$from/empty")" 1
    exec {held}>&-
    await holds_nothing "$from/empty"
    detach box
    check_full box
}

case_punching_frees_and_reads_as_zeros() {
    new_archive box
    attach box
    local file=$WORK/box/file
    head -c 32M /dev/urandom >"$file"
    sync "$file"
    cp "$file" "$WORK/plain"
    for command in "-p -o 4097 -l 20000000" "-z -o 25000000 -l 100" "-z -n -o 33000000 -l 4000000" "-z -o 33554400 -l 100000" "-n -l 1G" "-l 40M"; do
        # shellcheck disable=SC2086
        fallocate $command "$file"
        # shellcheck disable=SC2086
        fallocate $command "$WORK/plain"
        same_file "$file" "$WORK/plain"
    done
    [[ $(stat -c %b "$file") -lt 27000 ]] || fail "a punched file keeps $(stat -c %b "$file") blocks"
    reattach box
    same_file "$file" "$WORK/plain"
    expect 1 'not supported' fallocate -c -o 0 -l 4096 "$file"
    expect 1 'not supported' fallocate -i -o 0 -l 4096 "$file"
    # A promise of more than there is changes nothing.
    expect 1 'no space' fallocate -l 4E "$file"
    same "$(stat -c %s "$file")" $((40 << 20))
    fallocate -l 1M "$WORK/box/new"
    same "$(stat -c %s "$WORK/box/new")" 1048576
    await holds_nothing "$WORK/box/new"
    detach box
    check_full box
}

case_a_copy_shares_what_it_copies() {
    new_archive box
    attach box
    head -c 64M /dev/urandom >"$WORK/box/source"
    sync "$WORK/box/source"
    local sum written
    sum=$(sha256sum <"$WORK/box/source")
    written=$(awk '/^write_bytes/ { print $2 }' "/proc/$(daemon_of "$WORK/box.lbx")/io")
    local started=$EPOCHREALTIME
    cp "$WORK/box/source" "$WORK/box/copy"
    local took=$(((${EPOCHREALTIME/./} - ${started/./}) / 1000))
    sync "$WORK/box/copy"
    written=$(($(awk '/^write_bytes/ { print $2 }' "/proc/$(daemon_of "$WORK/box.lbx")/io") - written))
    note "cp of 64 MiB within the mount: $took ms, $((written / 1024)) KiB written"
    [[ $written -le 262144 ]] || fail "the copy of 64 MiB wrote $written bytes"
    same "$(stat -c %s-%b "$WORK/box/copy")" "$((1 << 26))-$((1 << 17))"
    # Neither side notices what happens to the other.
    dd if=/dev/zero of="$WORK/box/source" bs=1M seek=55 count=3 conv=notrunc status=none
    fallocate -p -o 1000000 -l 50000000 "$WORK/box/source"
    same "$(sha256sum <"$WORK/box/copy")" "$sum" 'the copy after changes of its source'
    cp "$WORK/box/copy" "$WORK/box/third"
    rm "$WORK/box/source" "$WORK/box/copy"
    reattach box
    same "$(sha256sum <"$WORK/box/third")" "$sum" 'the copy after its source was removed'
    detach box
    check_full box
}

case_copies_by_ordinary_users_clear_set_id_bits() {
    need_user
    new_archive box
    attach box allow_other
    chmod 777 "$WORK/box"
    as_user python3 - "$WORK/box" <<'END'
import os, sys
os.chdir(sys.argv[1])
with open("source", "wb") as file:
    file.write(os.urandom(500_000))
source = os.open("source", os.O_RDONLY)
for name in ("copied", "punched"):
    target = os.open(name, os.O_RDWR | os.O_CREAT, 0o755)
    os.pwrite(target, b"x" * 200_000, 0)
    os.fsync(target)
    os.chmod(name, 0o4755)
    os.utime(name, (1, 1))
    if name == "copied":
        assert os.copy_file_range(source, target, 500_000, 0, 0) == 500_000
    else:
        import ctypes
        assert ctypes.CDLL(None).fallocate(target, 3, ctypes.c_long(0), ctypes.c_long(100_000)) == 0
    after = os.stat(name)
    assert after.st_mode & 0o7777 == 0o755, oct(after.st_mode)
    assert after.st_mtime > 1, after.st_mtime
assert open("source", "rb").read() == open("copied", "rb").read()
END
    detach box
    check_full box
}
