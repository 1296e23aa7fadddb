# Programs with high demands on a file system work on the mount.
# shellcheck shell=bash disable=SC2317,SC2164

case_git_works_and_clones() {
    local packages
    new_archive box
    attach box
    packages=$(find "$(source_tree)" -mindepth 1 -maxdepth 1 -type d ! -name odd | sort | awk 'NR <= 15')
    mkdir "$WORK/box/repository"
    cd "$WORK/box/repository"
    export GIT_AUTHOR_NAME=Test GIT_AUTHOR_EMAIL=test@example.org GIT_COMMITTER_NAME=Test GIT_COMMITTER_EMAIL=test@example.org
    export GIT_CONFIG_GLOBAL=/dev/null
    git init --quiet --initial-branch=main
    local package
    for package in $packages; do
        cp -r "$package" .
        rm -rf "./${package##*/}/.git"*
        git add --all
        git commit --quiet --message "Add ${package##*/}"
    done
    git gc --quiet --aggressive
    git fsck --full --strict
    git clone --quiet . ../clone
    cd "$WORK"
    reattach box
    git -C "$WORK/box/repository" fsck --full
    git -C "$WORK/box/clone" fsck --full
    says_nothing git -C "$WORK/box/repository" status --porcelain
    same "$(git -C "$WORK/box/repository" rev-parse HEAD)" "$(git -C "$WORK/box/clone" rev-parse HEAD)"
    git clone --quiet "$WORK/box/repository" "$WORK/outside"
    diff -r --exclude=.git "$WORK/outside" "$WORK/box/repository"
    detach box
}

# readers_beside_a_writer FILE: who reads while transactions are committed or undone sees the state before or after one.
readers_beside_a_writer() {
    cat >"$WORK/beside.py" <<'END'
import mmap, os, signal, sqlite3, struct, sys, time
READERS, TRANSACTIONS, STATES = 3, 60, 15
# How many states each reader has seen, then the last one as soon as the writer has finished.
told = mmap.mmap(-1, 4096)
def tell(place, value):
    struct.pack_into("I", told, 4 * place, value)
def states():
    return struct.unpack_from("%dI" % (READERS + 1), told)
deadline = time.monotonic() + 300
class Base(sqlite3.Connection):
    def execute(self, *statement):
        while True:
            try:
                return super().execute(*statement)
            except sqlite3.OperationalError as error:
                # SQLite's own waiting grows to 100 ms a turn, in which four programs starve each other on any file system.
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
def connect():
    base = sqlite3.connect(sys.argv[1], timeout=0.003, isolation_level=None, factory=Base)
    # Pages are read from the file each time, and large transactions go there before they are committed.
    for pragma in ("cache_size=5", "synchronous=FULL", "wal_autocheckpoint=20"):
        base.execute("PRAGMA " + pragma).fetchall()
    return base
BODY = "printf('%0*d', 500 + {0} % 7 * 900, {0})"
base = connect()
base.executescript("""CREATE TABLE first (n INTEGER); INSERT INTO first VALUES (0);
    CREATE TABLE entries (id INTEGER PRIMARY KEY, body TEXT);
    CREATE TABLE last (n INTEGER); INSERT INTO last VALUES (0);""")
base.close()
def read(who):
    base = connect()
    before = seen = 0
    while True:
        final = states()[READERS]
        base.execute("BEGIN")
        first, = base.execute("SELECT n FROM first").fetchone()
        os.sched_yield()
        right = base.execute("SELECT count(*), coalesce(max(id), 0), coalesce(sum(body = %s), 0) FROM entries" % BODY.format("id")).fetchone()
        os.sched_yield()
        last, = base.execute("SELECT n FROM last").fetchone()
        base.execute("COMMIT")
        assert (first, first, first, first) == (*right, last), (who, first, right, last)
        assert first >= before, "reader %d saw %d after %d" % (who, first, before)
        if final:
            assert first == final, (first, final)
            return
        if first > before:
            seen += 1
            tell(who, seen)
        before = first
def write():
    base = connect()
    number = 0
    while number < TRANSACTIONS or min(states()[:READERS]) < STATES:
        number += 1
        base.execute("BEGIN")
        base.execute("UPDATE first SET n = n + 1")
        base.execute("INSERT INTO entries VALUES (?1, %s)" % BODY.format("?1"), (number,))
        base.execute("UPDATE last SET n = n + 1")
        base.execute("COMMIT")
        if number % 7 == 0:
            # Larger than the cache, so that pages of it have been written when it is undone.
            base.execute("BEGIN")
            base.execute("UPDATE first SET n = n + 1000")
            base.execute("UPDATE entries SET body = 'undone' || body")
            base.execute("ROLLBACK")
        assert time.monotonic() < deadline, "states seen by the readers: %r" % (states(),)
    print("note: %d transactions, readers saw %s states of them" % (number, " ".join(map(str, states()[:READERS]))))
    tell(READERS, number)
children = []
for who in range(READERS):
    pid = os.fork()
    if pid == 0:
        # Raised further, an error would make a second writer of this child.
        try:
            read(who)
            os._exit(0)
        except BaseException as error:
            print("reader %d: %r" % (who, error), flush=True)
            os._exit(1)
    children.append(pid)
try:
    write()
except BaseException:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    raise
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * READERS
END
    python3 "$WORK/beside.py" "$1"
}

# database MODE: many small transactions, some rolled back; the content and the integrity are right after a remount.
database() {
    new_archive box
    attach box
    local mode=$1 file=$WORK/box/data.sqlite
    sqlite3 "$file" "PRAGMA journal_mode=$mode; PRAGMA synchronous=FULL;
        CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT UNIQUE, body BLOB);" >"$WORK/mode"
    same "$(head -n 1 "$WORK/mode")" "${mode,,}" 'journal mode'
    local number
    {
        for number in $(seq 300); do
            echo "BEGIN; INSERT INTO t VALUES ($number, 'name $number', randomblob(($number * 37) % 9000));"
            [[ $((number % 10)) -eq 0 ]] && echo "DELETE FROM t WHERE id % 10 = 3;"
            [[ $((number % 7)) -eq 0 ]] && echo "ROLLBACK;" || echo "COMMIT;"
        done
        echo "PRAGMA integrity_check;"
    } | sqlite3 "$file" >"$WORK/integrity"
    same "$(tail -n 1 "$WORK/integrity")" ok 'integrity_check'
    # The shared-memory file of WAL is mapped by all of them.
    readers_beside_a_writer "$file"
    sqlite3 "$file" 'SELECT id, name, hex(body) FROM t ORDER BY id;' | sha256sum >"$WORK/before"
    reattach box
    same "$(sqlite3 "$file" 'PRAGMA integrity_check;')" ok 'integrity_check after the remount'
    sqlite3 "$file" 'SELECT id, name, hex(body) FROM t ORDER BY id;' | sha256sum >"$WORK/after"
    same_file "$WORK/before" "$WORK/after"
    detach box
}

case_sqlite_with_a_rollback_journal() {
    database DELETE
}

case_sqlite_with_a_write_ahead_log() {
    database WAL
}

case_cargo_builds_a_project() {
    new_archive box
    attach box
    mkdir -p "$WORK/box/project/src"
    cat >"$WORK/box/project/Cargo.toml" <<'END'
[package]
name = "sample"
version = "0.1.0"
edition = "2021"

[profile.dev]
incremental = true
END
    cat >"$WORK/box/project/src/lib.rs" <<'END'
pub fn greet(name: &str) -> String {
    format!("hello {name}")
}

#[test]
fn greets() {
    assert_eq!(greet("box"), "hello box");
}
END
    echo 'fn main() { println!("{}", sample::greet("box")); }' >"$WORK/box/project/src/main.rs"
    cd "$WORK/box/project"
    cargo build --quiet --offline
    same "$(./target/debug/sample)" 'hello box'
    cargo test --quiet --offline
    sed -i 's/"box"/"chest"/' src/main.rs
    cargo build --quiet --offline
    same "$(./target/debug/sample)" 'hello chest'
    cd "$WORK"
    reattach box
    same "$("$WORK/box/project/target/debug/sample")" 'hello chest'
    detach box
}

# Archivers and linkers reopen, seek, append and map what they have just written.
case_objects_are_archived_and_linked() {
    new_archive box
    attach box
    cd "$WORK/box"
    local number calls='' declarations=''
    for number in $(seq 40); do
        printf 'int f%d(int x) { return x + %d; }\nstatic char room%d[%d] = {1};\nchar *p%d = room%d;\n' \
            "$number" "$number" "$number" $((number * 997)) "$number" "$number" >"f$number.c"
        cc -g -c "f$number.c"
        ar rc libf.a "f$number.o"
        declarations+="int f$number(int);"
        calls+="sum = f$number(sum);"
    done
    ranlib libf.a
    printf '#include <stdio.h>\n%s\nint main(void) { int sum = 0; %s printf("%%d\\n", sum); return 0; }\n' \
        "$declarations" "$calls" >main.c
    cc -g -o main main.c libf.a
    same "$(./main)" 820
    strip main
    same "$(./main)" 820
    same "$(ar t libf.a | wc -l)" 40
    cd "$WORK"
    reattach box
    same "$("$WORK/box/main")" 820
    detach box
}

# With the writeback cache the kernel appends by itself; no byte of either writer may be lost or overwritten.
case_two_writers_append_to_one_file() {
    new_archive box
    attach box
    append() {
        local number
        for number in $(seq 1000); do
            printf '%s %05d %s\n' "$1" "$number" "some text to fill the line" >>"$WORK/box/log"
        done
    }
    in_background append a
    local first=$!
    in_background append b
    wait "$first"
    wait "$!"
    python3 - "$WORK/box/direct" <<'END'
import os, sys
children = []
for letter in b"xy":
    pid = os.fork()
    if pid == 0:
        file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in range(1000):
            os.write(file, bytes([letter]) * 99 + b"\n")
            if number % 200 == 0:
                os.fsync(file)
        os._exit(0)
    children.append(pid)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
END
    verify() {
        local writer
        for writer in a b; do
            same "$(grep -c "^$writer [0-9]\{5\} some text to fill the line$" "$WORK/box/log")" 1000 "lines of $writer"
            same "$(grep "^$writer" "$WORK/box/log" | sort -c && echo sorted)" sorted
        done
        same "$(wc -l <"$WORK/box/log")" 2000
        same "$(grep -Ec '^(x{99}|y{99})$' "$WORK/box/direct")" 2000
        same "$(stat -c %s "$WORK/box/direct")" 200000
    }
    verify
    reattach box
    verify
    detach box
}

# A name that expires can bring a file back with a size of before the last write, which the kernel then trusts.
case_two_writers_create_one_file() {
    new_archive box
    attach box
    python3 - "$WORK/box" <<'END'
import os, sys
EACH = 4
for turn in range(400):
    path = "%s/file %d" % (sys.argv[1], turn)
    begin, go = os.pipe()
    children = []
    for letter in b"ab":
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(begin, 1)
            for number in range(EACH):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.write(file, b"%c %d\n" % (letter, number))
                os.close(file)
            os._exit(0)
        children.append(pid)
    os.close(begin)
    os.close(go)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    with open(path, "rb") as file:
        lines = file.read().splitlines()
    assert sorted(lines) == [b"%c %d" % (letter, number) for letter in b"ab" for number in range(EACH)], (turn, lines)
END
    detach box
    check_full box
}

# While the daemon stands still, only what the kernel knows can be told. (Attributes are asked for after each close.)
case_the_kernel_keeps_names_and_missing_ones() {
    local pid turn missing new
    # Prints 0 for what exists, 3 for what does not, 124 when the daemon is asked.
    exists() {
        timeout 10 python3 -c 'import os, sys; sys.exit(0 if os.access(sys.argv[1], os.F_OK) else 3)' "$1" && echo 0 || echo $?
    }
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    # Other tests may drop the kernel's caches in between.
    for turn in {1..5}; do
        : >"$WORK/box/new$turn"
        same "$(exists "$WORK/box/missing")" 3
        # Creating made the kernel ask for the directory's attributes anew.
        stat "$WORK/box"
        stop_process "$pid"
        missing=$(exists "$WORK/box/missing")
        new=$(exists "$WORK/box/new$turn")
        kill -CONT "$pid"
        [[ $missing == 124 || $new == 124 ]] || break
    done
    same "$missing $new" '3 0' 'what the kernel knows of a missing and of a new file'
    # What was missing is seen when it comes.
    echo content >"$WORK/box/missing"
    same "$(cat "$WORK/box/missing")" content
    mv "$WORK/box/missing" "$WORK/box/gone"
    expect 1 'no such file' stat "$WORK/box/missing"
    mkdir "$WORK/box/missing"
    expect 1 'no such file' stat "$WORK/box/missing/within"
    ln "$WORK/box/gone" "$WORK/box/missing/within"
    same "$(cat "$WORK/box/missing/within")" content
    detach box
}

case_shared_memory_map_is_written() {
    new_archive box
    attach box
    python3 - "$WORK/box/mapped" <<'END'
import mmap, os, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(3_000_000)
    with mmap.mmap(file.fileno(), 0) as area:
        for at in range(0, 3_000_000, 9973):
            area[at:at + 4] = b"mark"
        area.flush()
        file.seek(9973)
        assert file.read(4) == b"mark"
    # A second mapping whose pages only the unmount writes.
    area = mmap.mmap(file.fileno(), 0)
    area[5:9] = b"late"
END
    reattach box
    python3 - "$WORK/box/mapped" <<'END'
import sys
content = open(sys.argv[1], "rb").read()
assert len(content) == 3_000_000 and content[5:9] == b"late"
assert all(content[at:at + 4] == b"mark" for at in range(9973, 3_000_000 - 4, 9973))
END
    detach box
}
