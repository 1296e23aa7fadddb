# Large files and large directories, within the memory that was granted.
# shellcheck shell=bash disable=SC2317,SC2164

# Random parts, text and holes, from a fixed seed. LARGE: MiB, a multiple of 128; 1024 is the long form.
LARGE=${LARGE:-256}

make_large() {
    python3 - "$1" "$LARGE" <<'END'
import random, sys
random = random.Random(2)
parts = int(sys.argv[2]) // 32
MIB = 1 << 20
text = b"".join(b"line %d of a text that compresses well\n" % n for n in range(30_000))[:MIB]
with open(sys.argv[1], "wb") as file:
    for part in range(parts):
        if part % 4 == 3:
            file.seek(32 * MIB, 1)
        elif part % 4 == 2:
            for _ in range(32):
                file.write(text)
        else:
            for _ in range(32):
                file.write(random.randbytes(MIB))
    file.truncate(parts * 32 * MIB)
END
}

# What memory= bounds beside other loads is in 63-memory.sh.
case_a_large_file_passes_in_bounded_memory() {
    local memory=64 sum started written
    make_large "$WORK/large"
    sum=$(sha256sum <"$WORK/large")
    new_archive box
    attach box "memory=${memory}M,threads=2"
    started=$SECONDS
    dd if="$WORK/large" of="$WORK/box/dense" bs=1M conv=fsync status=none
    written=$((SECONDS - started))
    # Behind 2^31.
    printf end | dd of="$WORK/box/dense" bs=1 seek=$(((1 << 31) + 5)) conv=notrunc status=none
    bounded "$memory" "written with fsync in $written s"
    reattach box "memory=${memory}M,threads=2"
    same "$(head -c "${LARGE}M" "$WORK/box/dense" | sha256sum)" "$sum" 'checksum after the remount'
    same "$(stat -c %s "$WORK/box/dense")-$(tail -c 3 "$WORK/box/dense")" "$(((1 << 31) + 8))-end"
    cp --sparse=always "$WORK/large" "$WORK/box/sparse"
    bounded "$memory" 'read, and copied with holes'
    reattach box
    same "$(sha256sum <"$WORK/box/sparse")" "$sum" 'checksum of the sparse copy'
    # Three quarters are data.
    [[ $(stat -c %b "$WORK/box/sparse") -lt $((LARGE * 83 / 100 * 2048)) ]] || fail 'holes of the sparse copy are counted as data'
    rm "$WORK/box/dense"
    detach box
}

# bounded MEMORY NOTE: the daemon of the box has not grown with the file, which is larger than the bound. Two event loops and the program's own pages
# take 24 to 33 MiB beside what was granted (63-memory.sh).
bounded() {
    local peak
    peak=$(peak_memory "$(daemon_of "$WORK/box.lbx")")
    note "peak memory of the daemon $peak MiB with memory=$1M; $2"
    [[ $peak -le $(($1 + 64)) ]] || fail "the daemon used $peak MiB with memory=$1M"
}

# MANY=100000 is the long form; lockbox-semantics(7)'s test of listings has a hundred thousand names in every run.
case_many_files_in_one_directory() {
    local many=${MANY:-5000}
    new_archive few
    attach few
    for number in $(seq 10); do head -c 1024 /dev/urandom >"$WORK/few/file$number"; done
    detach few
    new_archive many
    attach many
    python3 - "$WORK/many" "$many" <<'END'
import os, random, sys
random = random.Random(3)
os.mkdir(sys.argv[1] + "/all")
os.chdir(sys.argv[1] + "/all")
for number in range(int(sys.argv[2])):
    with open("file %06d" % number, "wb", buffering=0) as file:
        file.write(random.randbytes(1024))
directory = os.open(".", os.O_RDONLY)
os.fsync(directory)
END
    seq -f 'file %06.0f' 0 $((many - 1)) >"$WORK/expected"
    # shellcheck disable=SC2012
    ls "$WORK/many/all" | diff - "$WORK/expected"
    detach many
    local name before after
    for name in few many few many; do
        before=$(date +%s%N)
        attach "$name"
        after=$(date +%s%N)
        note "mounting the archive with $name files took $(((after - before) / 1000000)) ms"
        detach "$name"
    done
    attach many
    # shellcheck disable=SC2012
    ls -U "$WORK/many/all" | sort | diff - "$WORK/expected"
    python3 - "$WORK/many/all" "$many" <<'END'
import os, random, sys
random = random.Random(3)
os.chdir(sys.argv[1])
many = int(sys.argv[2])
for number in range(many):
    with open("file %06d" % number, "rb", buffering=0) as file:
        assert file.read() == random.randbytes(1024), number
names = [entry.name for entry in os.scandir(".")]
assert len(names) == len(set(names)) == many
# Names that vanish while a listing is under way must not hide others.
listing = os.scandir(".")
seen = {next(listing).name for _ in range(500)}
for number in range(0, many, 2):
    os.unlink("file %06d" % number)
seen.update(entry.name for entry in listing)
assert all("file %06d" % number in seen for number in range(1, many, 2))
END
    same "$(find "$WORK/many/all" -type f | wc -l)" $((many / 2))
    detach many
    check_full many
}
