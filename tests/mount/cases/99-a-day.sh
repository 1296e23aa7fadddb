# A day of a user: work that is kept by the hour, mistakes that are undone, and a stick that is pulled out while it is written at night.
# shellcheck shell=bash disable=SC2317,SC2164

# What a program was told last; whoever reads it meanwhile finds a number.
count() {
    echo "$2" >"$WORK/$1.new"
    mv "$WORK/$1.new" "$WORK/$1"
}

# beyond NAME NUMBER
beyond() {
    (($(cat "$WORK/$1") > $2))
}

# goes_on PROGRAM NUMBER: it has done more by now. Where it stands still, that is told with what it waits for.
goes_on() {
    if ! await beyond "$1" "$2"; then
        ps -eo pid,ppid,stat,wchan:24,etimes,args >&2
        return 1
    fi
}

# Each of these works until somebody says that it is time, in $WORK/NAME.over, and counts on what its program said is done.
commits() {
    local n file files
    read -r n <"$WORK/commits"
    cd "$WORK/box/project"
    mapfile -t files < <(git ls-files src)
    while [[ ! -e $WORK/commits.over ]]; do
        n=$((n + 1))
        file=${files[n * 37 % ${#files[@]}]}
        # In place, and by a new file.
        echo "// $n" >>"$file"
        sed -i "1i // $n" "${files[n * 53 % ${#files[@]}]}"
        echo "$n" >"src/new$n"
        git add --all
        git commit --quiet --message "$n"
        count commits "$n"
    done
}

letters() {
    local n
    read -r n <"$WORK/letters"
    while [[ ! -e $WORK/letters.over ]]; do
        n=$((n + 1))
        seq "$n" "$((n + 4999))" >"$WORK/letters.source/$((n % 20))"
        # Without the window rsync takes a letter of the same size and second for the same.
        rsync -a --delete --modify-window=-1 "$WORK/letters.source/" "$WORK/box/letters/"
        count letters "$n"
    done
}

# Two books, each with a way of its own to commit: what is taken from one account is given to another in the same transaction. It ends
# as when a lid is closed, so that the log of one of them has what the book has not.
entries() {
    python3 - "$WORK/box/books" "$WORK/entries" <<'PYTHON'
import os
import sqlite3
import sys

place, count = sys.argv[1:]
books = []
for mode in ("wal", "delete"):
    book = sqlite3.connect(f"{place}/{mode}.db", isolation_level=None)
    for setting in (f"journal_mode={mode}", "synchronous=FULL", "cache_size=5"):
        book.execute("PRAGMA " + setting)
    book.execute("CREATE TABLE IF NOT EXISTS entries (number INTEGER, account TEXT, amount INTEGER)")
    books.append(book)
(number,) = books[0].execute("SELECT coalesce(max(number), 0) FROM entries").fetchone()
while not os.path.exists(count + ".over"):
    number += 1
    for book in books:
        book.execute("BEGIN IMMEDIATE")
        book.execute("INSERT INTO entries VALUES (?, 'rent', ?)", (number, -number))
        book.execute("INSERT INTO entries VALUES (?, 'landlord', ?)", (number, number))
        book.execute("COMMIT")
    with open(count + ".new", "w") as file:
        file.write(f"{number}\n")
    os.rename(count + ".new", count)
os._exit(0)
PYTHON
}

# begin PROGRAM...: starts them, and waits until each has done something.
begin() {
    local program
    local -A before=()
    for program in "$@"; do
        rm -f "$WORK/$program.over"
        before[$program]=$(cat "$WORK/$program")
        in_background "$program"
        WORKING[$program]=${BACKGROUND[-1]}
    done
    for program in "$@"; do
        goes_on "$program" "${before[$program]}"
    done
}

# over PROGRAM...: they end what they are at, without an error.
over() {
    local program
    for program in "$@"; do
        touch "$WORK/$program.over"
        wait "${WORKING[$program]}" || fail "$program met an error"
    done
}

# An archive with a project under git, letters and books, as it was yesterday.
yesterday() {
    export GIT_AUTHOR_NAME=Test GIT_AUTHOR_EMAIL=test@example.org GIT_COMMITTER_NAME=Test GIT_COMMITTER_EMAIL=test@example.org
    export GIT_CONFIG_GLOBAL=/dev/null
    declare -gA WORKING=()
    new_archive box
    attach box
    mkdir "$WORK/box/project" "$WORK/box/letters" "$WORK/box/books" "$WORK/letters.source"
    # The sources of lockbox itself are a project.
    cp -r "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../src" "$WORK/box/project/src"
    git -C "$WORK/box/project" init --quiet --initial-branch=main
    git -C "$WORK/box/project" add --all
    git -C "$WORK/box/project" commit --quiet --message 0
    count commits 0
    count letters 0
    count entries 0
    begin commits letters entries
    over commits letters entries
}

# sound_books DIR LEAST: both have whole transactions, among them all to this number.
sound_books() {
    local book
    for book in wal delete; do
        # In a copy: what was under way is undone there by whoever opens it.
        rm -rf "$WORK/opened"
        cp -a "$1" "$WORK/opened"
        same "$(sqlite3 "$WORK/opened/$book.db" 'PRAGMA integrity_check')" ok "$book.db of $1"
        sqlite3 -separator ' ' "$WORK/opened/$book.db" \
            'SELECT count(*), 2 * max(number), sum(amount), max(number) FROM entries' >"$WORK/totals"
        awk -v least="$2" '{ exit !($1 == $2 && $3 == 0 && $4 >= least) }' "$WORK/totals" ||
            fail "$book.db of $1 has (rows, rows expected, balance, last of $2): $(cat "$WORK/totals")"
    done
}

# sound_day DIR COMMITS LETTERS ENTRIES: what all three programs had there at one moment is whole, and no older than what they were told.
sound_day() {
    local letter first
    git -C "$1/project" fsck --full --strict --no-dangling
    (($(git -C "$1/project" log -1 --format=%s) >= $2)) || fail "$1 lacks commit $2"
    for letter in "$1"/letters/*; do
        first=$(head -n 1 "$letter")
        seq "$first" "$((first + 4999))" | cmp - "$letter" || fail "$letter is not whole"
        [[ ${letter##*/} != "$(($3 % 20))" ]] || ((first >= $3)) || fail "$letter is older than $3"
    done
    sound_books "$1/books" "$4"
}

has_automatic() {
    compgen -G "$WORK/box/.snapshots/auto-20*Z" >/dev/null
}

case_a_day_of_work_is_kept_by_the_hour() {
    local hour commits letters entries
    yesterday
    reattach box snapshots=hourly:24,daily:7
    begin commits letters entries
    for hour in 9 10 11; do
        # What they were told before is in it.
        read -r commits <"$WORK/commits"
        read -r letters <"$WORK/letters"
        read -r entries <"$WORK/entries"
        lockbox snapshot create "$WORK/box" "$hour o'clock" </dev/null >/dev/null
        sound_day "$WORK/box/.snapshots/$hour o'clock" "$commits" "$letters" "$entries"
        goes_on commits "$commits"
        goes_on letters "$letters"
        goes_on entries "$entries"
    done
    await has_automatic
    sound_day "$(compgen -G "$WORK/box/.snapshots/auto-20*Z" | head -n 1)" 1 1 1
    over commits letters entries
    same "$(git -C "$WORK/box/project" status --porcelain)" ''
    diff -r "$WORK/letters.source" "$WORK/box/letters"
    detach box
    check_full box
    # After the day each hour is what it was.
    attach box
    sound_day "$WORK/box/.snapshots/11 o'clock" "$commits" "$letters" "$entries"
    detach box
}

# as_at_noon: the tree that was removed, and what git says of it.
as_at_noon() {
    same_tree "$WORK/noon/project/src" "$WORK/box/project/src"
    diff -r --no-dereference "$WORK/noon/project" "$WORK/box/project"
    git -C "$WORK/box/project" fsck --full --strict
    same "$(git -C "$WORK/box/project" --no-optional-locks status --porcelain)" ' M src/env.rs' 'what is not committed yet'
}

case_a_tree_that_was_removed_by_mistake_is_brought_back() {
    local kept before
    yesterday
    begin entries
    echo '// to be continued' >>"$WORK/box/project/src/env.rs"
    mkdir "$WORK/noon"
    cp -a "$WORK/box/project" "$WORK/noon/project"
    lockbox snapshot create "$WORK/box" noon </dev/null >/dev/null
    read -r before <"$WORK/entries"
    rm -rf "$WORK/box/project/src"
    kept=$(lockbox snapshot restore "$WORK/box" noon project/src </dev/null)
    as_at_noon
    [[ ! -e $WORK/box/.snapshots/$kept/project/src && -e $WORK/box/.snapshots/$kept/project/.git ]] ||
        fail "$kept is not the moment before"
    # Again, and by the means of everybody.
    rm -rf "$WORK/box/project/src"
    cp -a "$WORK/box/.snapshots/noon/project/src" "$WORK/box/project/"
    as_at_noon
    # Work goes on in it, and nobody else had to stop.
    git -C "$WORK/box/project" commit --quiet --all --message 'continued'
    same "$(git -C "$WORK/box/project" status --porcelain)" ''
    await beyond entries "$before"
    over entries
    reattach box
    same "$(git -C "$WORK/box/project" log -1 --format=%s)" continued
    git -C "$WORK/box/project" fsck --full --strict
    sound_books "$WORK/box/books" "$(cat "$WORK/entries")"
    detach box
    check_full box
}

dump() {
    rm -rf "$WORK/opened"
    cp -a "$1" "$WORK/opened"
    sqlite3 "$WORK/opened/$2.db" .dump
}

case_a_database_is_brought_back_from_before_a_bad_migration() {
    local book entries
    yesterday
    begin entries
    over entries
    read -r entries <"$WORK/entries"
    [[ -s $WORK/box/books/wal.db-wal ]] || fail 'nothing is in the log alone'
    cp -a "$WORK/box/books" "$WORK/before"
    lockbox snapshot create "$WORK/box" 'before the migration' </dev/null >/dev/null
    for book in wal delete; do
        sqlite3 "$WORK/box/books/$book.db" 'BEGIN; ALTER TABLE entries RENAME TO old; CREATE TABLE entries AS
            SELECT number, account, abs(amount) AS amount FROM old WHERE number % 3; DROP TABLE old; COMMIT; VACUUM;'
    done
    dump "$WORK/before" wal >"$WORK/rows"
    ! dump "$WORK/box/books" wal | cmp -s - "$WORK/rows" || fail 'the migration changed nothing'
    lockbox snapshot restore "$WORK/box" 'before the migration' books </dev/null >/dev/null
    same_tree "$WORK/before" "$WORK/box/books"
    for book in wal delete; do
        dump "$WORK/before" "$book" >"$WORK/rows"
        dump "$WORK/box/books" "$book" | same_file "$WORK/rows" /dev/stdin
    done
    sound_books "$WORK/box/books" "$entries"
    # The program finds its books, and goes on behind the last entry.
    begin entries
    over entries
    beyond entries "$entries"
    sound_books "$WORK/box/books" "$(cat "$WORK/entries")"
    detach box
    check_full box
}

# put_in IMAGE: a stick with ext4, whose image lies in a file system that can be made to stand still.
put_in() {
    cp --sparse=always "$1" "$WORK/drawer/stick.image"
    # Nobody but who writes to the stick is to have it busy.
    mount -o loop,noinit_itable "$WORK/drawer/stick.image" "$WORK/stick"
}

new_stick() {
    mkdir "$WORK/drawer" "$WORK/stick"
    truncate -s 600M "$WORK/drawer.image"
    mkfs.ext4 -q -m 0 "$WORK/drawer.image"
    mount -o loop "$WORK/drawer.image" "$WORK/drawer"
    truncate -s 200M "$WORK/medium"
    mkfs.ext4 -q -m 0 "$WORK/medium"
    put_in "$WORK/medium"
    echo 'of somebody' >"$WORK/stick/else"
}

is_written() {
    awk '{ exit !($2 > 0) }' "/sys/block/$1/inflight"
}

# Without a read, which waits for what stands still.
is_out() {
    ! : <"$WORK/stick/else"
} 2>/dev/null

# Every call on the file system fails from then on, as when its device goes, and nothing that it has in memory is written:
# EXT4_IOC_SHUTDOWN with EXT4_GOING_FLAGS_NOLOGFLUSH. It returns when the device moves again.
shut_down() {
    python3 -c 'import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, b"\2\0\0\0")' "$1"
}

# The mount's programs go on, and its user, who notices nothing but that the backup is not done.
day_goes_on() {
    local entries
    read -r entries <"$WORK/entries"
    await beyond entries "$((entries + 3))" &&
        lockbox snapshot create "$WORK/box" "$1" </dev/null >/dev/null &&
        lockbox status --json "$WORK/box" | shows '"latched":null'
}

# pull_out arrived|lost NAME: backs up, and takes the stick out when the first writes are on their way to its medium; they arrive, or are lost.
# It stands still before it goes, so that they can be awaited. The medium is then $WORK/medium.
pull_out() {
    local device asked undisturbed=yes
    # So that nothing but the backup reads and writes there.
    cat "$WORK/stick/else" >/dev/null
    sync -f "$WORK/stick"
    device=$(findmnt --noheadings --output SOURCE "$WORK/stick")
    fsfreeze --freeze "$WORK/drawer"
    in_background expect 2 "^lockbox: $WORK/stick/box.lbx: .*(Input/output error|Read-only file system)$" lockbox backup "$WORK/box" "$WORK/stick/box.lbx"
    asked=${BACKGROUND[-1]}
    # Whatever fails, it is to move again.
    { await is_written "${device#/dev/}" && day_goes_on "$2"; } || undisturbed=no
    in_background shut_down "$WORK/stick"
    await is_out || undisturbed=no
    [[ $1 == arrived ]] || cp --sparse=always "$WORK/drawer/stick.image" "$WORK/medium" || undisturbed=no
    fsfreeze --unfreeze "$WORK/drawer"
    wait "$asked" || fail "the backup did not end as it should"
    same "$(wc -l <"$WORK/stderr")" 1 'lines about it'
    same "$undisturbed" yes 'while the stick stood still'
    # Nobody has anything of it open any more.
    await umount "$WORK/stick"
    [[ $1 == lost ]] || cp --sparse=always "$WORK/drawer/stick.image" "$WORK/medium"
    rm "$WORK/drawer/stick.image"
    day_goes_on "$2, after it"
}

# backup_is NAME ENTRIES: the stick's copy, mounted beside the archive, is this moment.
backup_is() {
    lockbox check --full --passfile "$PASSFILE" "$WORK/stick/box.lbx"
    mkdir -p "$WORK/copy"
    mount.lockbox "$WORK/stick/box.lbx" "$WORK/copy" -o "passfile=$PASSFILE,log=$WORK/copy.log,ro"
    # The books are written meanwhile.
    diff -r --no-dereference --exclude=books "$WORK/box/.snapshots/$1" "$WORK/copy"
    sound_books "$WORK/copy/books" "$2"
    lockbox umount "$WORK/copy"
}

case_a_stick_that_is_pulled_out_in_a_backup_has_the_last_one_whole() {
    local night round entries
    yesterday
    head -c 8000000 /dev/urandom >"$WORK/box/photo"
    begin entries
    new_stick
    # The first night: nothing was on it, and nothing has the name.
    pull_out arrived 'first night'
    put_in "$WORK/medium"
    same "$(ls "$WORK/stick")" $'else\nlost+found' 'on the stick'
    night='second night'
    for round in lost arrived; do
        lockbox snapshot create "$WORK/box" "$night" </dev/null >/dev/null
        read -r entries <"$WORK/entries"
        lockbox backup "$WORK/box" "$WORK/stick/box.lbx" </dev/null
        backup_is "$night" "$entries"
        head -c 6000000 /dev/urandom >"$WORK/box/photo.$round"
        dd if=/dev/urandom of="$WORK/box/photo" bs=100k seek=7 count=20 conv=notrunc status=none
        rm "$WORK/box/project/src/env.rs"
        git -C "$WORK/box/project" checkout --quiet src/env.rs
        pull_out "$round" "next to the $night"
        put_in "$WORK/medium"
        lockbox check --full --passfile "$PASSFILE" "$WORK/stick/box.lbx"
        backup_is "$night" "$entries"
        night="night after $round"
    done
    over entries
    lockbox snapshot create "$WORK/box" "last night" </dev/null >/dev/null
    lockbox backup --verify "$WORK/box" "$WORK/stick/box.lbx" </dev/null
    backup_is 'last night' "$(cat "$WORK/entries")"
    detach box
    same "$(cat "$WORK/box.log")" '' 'the log of the mount'
    check_full box
    umount "$WORK/stick"
    # The loop device of the stick lets its file go a moment later.
    await umount "$WORK/drawer" 2>/dev/null
}
