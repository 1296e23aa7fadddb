# What the archive file shows to those who have it without the key, and what happens when they alter it.
# shellcheck shell=bash disable=SC2317,SC2164

case_the_archive_reveals_neither_names_nor_content() {
    local number packed size
    new_archive box
    attach box
    mkdir "$WORK/box/conspicuous-directory"
    for number in $(seq 200); do
        # shellcheck disable=SC2046
        printf 'conspicuous-content-%d\n' $(seq $((number * 40))) >"$WORK/box/conspicuous-directory/conspicuous-name-$number"
    done
    ln -s conspicuous-target "$WORK/box/conspicuous-link"
    setfattr -n user.conspicuous-attribute -v conspicuous-value "$WORK/box/conspicuous-link" 2>/dev/null ||
        setfattr -n user.conspicuous-attribute -v conspicuous-value "$WORK/box/conspicuous-directory"
    # Plain text, and much of it deleted again.
    cp -r "$(source_tree)" "$WORK/box/sources"
    rm -r "$WORK"/box/sources/a*
    look() {
        ! grep -aq conspicuous "$WORK/box.lbx" || fail "a name or content stands in the archive ($1)"
        ! grep -aq "${PASSPHRASE:2}" "$WORK/box.lbx" || fail "the passphrase stands in the archive ($1)"
        archive.py data "$WORK/box.lbx" >"$WORK/data"
        size=$(stat -c %s "$WORK/data")
        packed=$(zstd -q -6 --stdout "$WORK/data" | wc -c)
        [[ $size -gt 1000000 ]] || fail "only $size bytes of data"
        [[ $((packed * 100)) -ge $((size * 99)) ]] || fail "data ranges of $size bytes compress to $packed bytes ($1)"
        note "$1: $size bytes in data ranges, $packed after zstd"
    }
    python3 -c 'import os, sys; os.fsync(os.open(sys.argv[1], os.O_RDONLY))' "$WORK/box"
    # Otherwise background erasure changes ranges while they are read.
    stop_clock box
    look mounted
    start_clock
    detach box
    look unmounted
}

case_two_archives_of_the_same_content_share_nothing() {
    local name
    for name in one two; do
        new_archive "$name"
        attach "$name"
        cp -r "$(source_tree)/odd" "$WORK/$name/odd"
        detach "$name"
    done
    python3 - "$WORK/one.lbx" "$WORK/two.lbx" <<'END'
import sys
def blocks(name):
    data = open(name, "rb").read()
    found = {data[at:at + 4096] for at in range(0, len(data), 4096)}
    found.discard(bytes(4096))
    return found
assert not blocks(sys.argv[1]) & blocks(sys.argv[2])
END
}

# What is read after a flip is right, or an error: never wrong, never silently missing.
case_a_flipped_bit_is_an_error_or_has_no_effect() {
    local seed outcome code opened=0 refused=0 partly=0
    new_archive box
    attach box
    mkdir "$WORK/original" "$WORK/original/directory"
    python3 - "$WORK/original" <<'END'
import os, random, sys
random = random.Random(4)
os.chdir(sys.argv[1])
for number in range(60):
    with open("directory/file%d" % number, "wb") as file:
        file.write(random.randbytes(random.choice([10, 900, 5000, 200_000])) + b"text " * random.randrange(9000))
os.symlink("directory/file1", "link")
os.setxattr("directory", "user.name", b"value")
END
    # Without the window rsync leaves a time alone that lies in the right second.
    rsync -aX --modify-window=-1 "$WORK/original/" "$WORK/box/"
    reattach box ro
    same "$(compare.py "$WORK/original" "$WORK/box")" same 'before any flip'
    detach box
    mkdir "$WORK/flipped"
    for seed in $(seq "${FLIPS:-15}"); do
        cp --sparse=always "$WORK/box.lbx" "$WORK/flipped.lbx"
        archive.py flip "$WORK/flipped.lbx" "$seed"
        code=0
        mount.lockbox "$WORK/flipped.lbx" "$WORK/flipped" -o "ro,passfile=$PASSFILE,log=$WORK/flipped.log" || code=$?
        case $code in
            0)
                outcome=$(compare.py "$WORK/original" "$WORK/flipped") || fail "flip $seed: $outcome"
                if [[ $outcome == same ]]; then opened=$((opened + 1)); else
                    partly=$((partly + 1))
                    grep -q 'block=' "$WORK/flipped.log" || fail "flip $seed: the log does not name the page"
                fi
                lockbox umount "$WORK/flipped"
                ;;
            2 | 10 | 11 | 12) refused=$((refused + 1)) ;;
            *) fail "flip $seed: unexpected exit code $code" ;;
        esac
        : >"$WORK/flipped.log"
    done
    note "${FLIPS:-15} flips: $opened without effect, $partly read with EIO, $refused refused at opening"
}

case_damage_gives_eio_and_check_names_the_page() {
    local code=0
    new_archive box
    attach box
    head -c 8000000 /dev/urandom >"$WORK/box/file"
    detach box
    # In the middle of the data: most of the archive is that file.
    python3 - "$WORK/box.lbx" <<'END'
import os, sys
with open(sys.argv[1], "r+b", buffering=0) as file:
    for at in range(3_000_000, 6_000_000, 100_000):
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
END
    expect 12 'block=' lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    attach box ro
    expect 1 'Input/output error' cat "$WORK/box/file"
    grep -q 'block=' "$WORK/box.log" || fail 'the log does not name the page'
    ls -l "$WORK/box"
    detach box
    expect 12 'damaged' lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" file
}
