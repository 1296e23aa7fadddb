# The daemon is killed at any moment under the load of real programs; what they were promised is there afterwards.
#
# KILLS rounds each (a few by default). The longer run of tests/RELIABILITY.md:
#   CASE_TIMEOUT=7200 KILLS=50 tests/mount/run.sh killed_under
# shellcheck shell=bash disable=SC2317,SC2164

# The loads run until their mount is gone. Each notes outside of it what was acknowledged, after it was.

load_sqlite() {
    local number
    RANDOM=$((SEED + $1))
    number=$(($1 * 1000000))
    while number=$((number + 1)); do
        # EXTRA also syncs the directory after the journal's deletion; with FULL, SQLite may roll the last transaction back.
        sqlite3 -cmd '.timeout 5000' "$WORK/box/db/data.sqlite" "PRAGMA synchronous=EXTRA; BEGIN;
            INSERT INTO t VALUES ($number, randomblob($((RANDOM % 9000 + 10))));
            DELETE FROM t WHERE id < $number - 400; UPDATE t SET content = randomblob(50) WHERE id % 7 = $((number % 7)); COMMIT;" \
            >/dev/null 2>&1 || return 0
        # When the directory cannot even be opened any more, SQLite calls the transaction committed without having synced it. A mount
        # that still answers answered all of its calls; this one is never answered from the kernel's cache, nor by what lies below.
        [[ $(stat --file-system --format=%T "$WORK/box" 2>/dev/null) == fuse* ]] || return 0
        echo "$number" >>"$WORK/sqlite.acknowledged"
    done
}

load_git() {
    local number=0 hash
    RANDOM=$((SEED + $1))
    cd "$WORK/box/repository" || return 0
    while number=$((number + 1)); do
        mkdir -p "d$((number % 5))" && head -c $((RANDOM % 20000 + 1)) /dev/urandom >"d$((number % 5))/f$((RANDOM % 40))" || return 0
        git add -A 2>/dev/null && git commit -qm "round $1 commit $number" 2>/dev/null || return 0
        [[ $((number % 15)) -ne 0 ]] || git gc -q 2>/dev/null || return 0
        hash=$(git rev-parse HEAD 2>/dev/null) || return 0
        # git syncs the reference's content but not its name.
        sync .git/refs/heads 2>/dev/null || return 0
        echo "$hash" >>"$WORK/git.acknowledged"
    done
}

load_fio() {
    RANDOM=$((SEED + $1))
    # From within the mount: by its path fio would make the directory anew where the mount was, and never end.
    cd "$WORK/box/fio" || return 0
    while [[ -d . ]]; do
        fio --name=load --directory=. --rw=randwrite --bsrange=1k-64k --size=24M --fsync="$((RANDOM % 30 + 2))" \
            --fallocate=none --unlink="$((RANDOM % 2))" --time_based --runtime=20 --output=/dev/null >/dev/null 2>&1 || return 0
    done
}

begin_loads() {
    attach box
    mkdir "$WORK/box/db" "$WORK/box/fio"
    sqlite3 "$WORK/box/db/data.sqlite" "PRAGMA journal_mode=$1; CREATE TABLE t (id INTEGER PRIMARY KEY, content BLOB);" >/dev/null
    git init -q "$WORK/box/repository"
    git -C "$WORK/box/repository" config user.name tests
    git -C "$WORK/box/repository" config user.email tests@localhost
    git -C "$WORK/box/repository" config core.fsync all
    git -C "$WORK/box/repository" config core.fsyncMethod fsync
    git -C "$WORK/box/repository" config gc.auto 0
    git -C "$WORK/box/repository" commit -q --allow-empty -m first
    : >"$WORK/sqlite.acknowledged"
    git -C "$WORK/box/repository" rev-parse HEAD >"$WORK/git.acknowledged"
    sync "$WORK/box/db" "$WORK/box/repository/.git/refs/heads"
    detach box
}

verify_loads() {
    local last
    same "$(sqlite3 "$WORK/box/db/data.sqlite" 'PRAGMA integrity_check;')" ok 'the database is damaged'
    last=$(tail -n 1 "$WORK/sqlite.acknowledged")
    if [[ -n $last ]]; then
        [[ $(sqlite3 "$WORK/box/db/data.sqlite" 'SELECT max(id) FROM t;') -ge $last ]] || fail "row $last was acknowledged and is missing"
        # The first transaction of a round deletes the rows of the one before, and may be committed without being acknowledged.
        same "$(sqlite3 "$WORK/box/db/data.sqlite" "SELECT count(*) FROM t WHERE id = $last OR id > $last + 400;")" 1 "row $last was acknowledged"
    fi
    # What a killed git leaves beside its repository.
    find "$WORK/box/repository/.git" \( -name '*.lock' -o -name 'tmp_*' -o -name gc.pid \) -delete
    git -C "$WORK/box/repository" fsck --full --strict >"$WORK/fsck" 2>&1 || fail "git fsck: $(cat "$WORK/fsck")"
    last=$(tail -n 1 "$WORK/git.acknowledged")
    git -C "$WORK/box/repository" merge-base --is-ancestor "$last" HEAD || fail "commit $last was acknowledged and is missing"
    # Every byte of what was never promised can be read as well.
    find "$WORK/box" -type f -exec cat {} + >"$WORK/all"
    rm "$WORK/all"
}

acknowledged() {
    cat "$WORK/sqlite.acknowledged" "$WORK/git.acknowledged" | wc -l
}

beyond() {
    (($(acknowledged) > $1))
}

# Both SQLite and git have acknowledged something after the preparation.
each_acknowledged() {
    has_lines "$WORK/sqlite.acknowledged" 1 && has_lines "$WORK/git.acknowledged" 2
}

# killed_under JOURNAL: rounds of load, death, check and comparison.
killed_under() {
    local round rounds=${KILLS:-3} pid load acknowledged
    new_archive box
    begin_loads "$1"
    for round in $(seq "$rounds"); do
        attach box
        verify_loads
        pid=$(daemon_of "$WORK/box.lbx")
        acknowledged=$(acknowledged)
        local loads=()
        for load in sqlite git fio; do
            in_background "load_$load" "$round"
            loads+=($!)
        done
        # The moment is the point: any is right.
        await beyond $((acknowledged + RANDOM % 30))
        [[ $round -lt $rounds ]] || await each_acknowledged
        for load in "${loads[@]}"; do
            ! gone "$load" || fail "a load ended before the kill of round $round"
        done
        kill -9 "$pid"
        await gone "$pid"
        umount -l "$WORK/box"
        for load in "${loads[@]}"; do
            wait "$load" || fail "a load failed by itself in round $round"
        done
        check_full box
    done
    attach box
    verify_loads
    note "$rounds kills, $(wc -l <"$WORK/sqlite.acknowledged") transactions and $(wc -l <"$WORK/git.acknowledged") commits acknowledged"
    detach box
    check_full box
}

case_killed_under_sqlite_git_and_fio() {
    killed_under delete
}

case_killed_under_sqlite_with_a_write_ahead_log() {
    killed_under wal
}
