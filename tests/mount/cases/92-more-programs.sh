# More programs as people use them; what 10 and 20 have already is not repeated.
# shellcheck shell=bash disable=SC2317,SC2164

# A tree with what archivers must keep: holes, hard links, attributes, access lists, odd names.
small_tree() {
    mkdir -p "$1/directory/below" "$1/$(printf 'new\nline')"
    head -c 300000 /dev/urandom >"$1/directory/random"
    ln "$1/directory/random" "$1/directory/below/hard"
    ln -s ../random "$1/directory/below/soft"
    setfattr -n user.note -v 'kept' "$1/directory/random"
    setfattr -n user.note -v 'kept too' "$1/directory"
    setfattr -n trusted.note -v 'of root' "$1/directory/below"
    setfacl -m u:12345:rw,g:23456:r,m::rwx "$1/directory/random"
    setfacl -m u:12345:rx -d -m u:12345:rwx,g:23456:r "$1/directory"
    truncate -s 5M "$1/sparse"
    printf data | dd of="$1/sparse" bs=1 seek=3000000 conv=notrunc status=none
    # Not this second's: rsync takes times within the same second for equal.
    find "$1" -exec touch --no-dereference -d '2020-01-02 03:04:05.678901234' {} +
    touch -d '1990-01-02 03:04:05.678901234' "$1/directory/below"
}

# facts_in_a_zip DIRECTORY: type, mode, size, link target and time of everything below it.
facts_in_a_zip() {
    (cd "$1" && find . -type l -printf '%P %y %l\n' -o -type d -printf '%P %y %m %Ts\n' -o -printf '%P %y %m %Ts %s\n' | sort)
}

# newer_than MARK DIRECTORY: types and names of what is below it, a line each.
newer_than() {
    (cd "$2" && find . -newer "$1" -printf '%y %P\0' | sort -z | tr '\n\0' '?\n')
}

case_archivers_keep_holes_links_and_attributes() {
    new_archive box
    attach box
    small_tree "$WORK/tree"
    rsync -aHAXS "$WORK/tree/" "$WORK/box/rsync/"
    same_tree "$WORK/tree" "$WORK/box/rsync"
    # The listing shows access lists as the attributes that they are.
    same "$(grep -Eo ' (system.posix_acl_(access|default)|trusted.note|user.note)=' "$WORK/listing.b" | sort | uniq -c | tr -s ' \n' ' ')" \
        ' 3 system.posix_acl_access= 1 system.posix_acl_default= 1 trusted.note= 3 user.note= ' 'lists and attributes on the mount'
    says_nothing rsync -aHAXSin --checksum --delete "$WORK/tree/" "$WORK/box/rsync/"
    tar -C "$WORK" --xattrs --xattrs-include='*' --acls --sparse --format=posix -cf "$WORK/box/tree.tar" tree
    tar -C "$WORK/box" --xattrs --xattrs-include='*' --acls --sparse -xf "$WORK/box/tree.tar"
    same_tree "$WORK/tree" "$WORK/box/tree"
    cp -a --reflink=auto --sparse=always "$WORK/box/tree" "$WORK/box/copy"
    same_tree "$WORK/box/tree" "$WORK/box/copy"
    [[ $(stat -c %b "$WORK/box/copy/sparse") -lt 2048 ]] || fail 'the copy has no holes'
    (cd "$WORK/box" && zip -qry archive.zip copy/directory && mkdir unzipped && unzip -q archive.zip -d unzipped)
    # A zip keeps neither hard links nor lists; what it keeps, links and times to the second among it, is all there.
    diff -r --no-dereference "$WORK/box/unzipped/copy/directory" "$WORK/tree/directory" || fail 'unzipped files differ'
    same "$(facts_in_a_zip "$WORK/box/unzipped/copy/directory")" "$(facts_in_a_zip "$WORK/tree/directory")" 'unzipped'
    touch -d '2001-01-01' "$WORK/mark"
    same "$(newer_than "$WORK/mark" "$WORK/box/tree")" "$(newer_than "$WORK/mark" "$WORK/tree")" 'find -newer'
    same "$(newer_than "$WORK/mark" "$WORK/box/tree" | wc -l)" 7 'found by find -newer'
    same "$(du -s --apparent-size --block-size=1 "$WORK/box/tree/sparse" | cut -f1)" 5242880
    # The page that the kernel wrote, of which the file has four bytes.
    same "$(du -s --block-size=1 "$WORK/box/tree/sparse" | cut -f1)" 4096 'du of a sparse file'
    reattach box
    same_tree "$WORK/tree" "$WORK/box/rsync"
    detach box
    check_full box
}

case_git_rewrites_history_and_uses_worktrees() {
    local number
    new_archive box
    attach box
    export GIT_AUTHOR_NAME=Test GIT_AUTHOR_EMAIL=test@example.org GIT_COMMITTER_NAME=Test GIT_COMMITTER_EMAIL=test@example.org
    export GIT_CONFIG_GLOBAL=/dev/null
    git init --quiet --initial-branch=main "$WORK/box/repository"
    cd "$WORK/box/repository"
    # 400 commits at once, as an import makes them.
    for number in $(seq 400); do
        printf 'commit refs/heads/main\ncommitter Test <test@example.org> %d +0000\ndata 5\nwork\n' $((1700000000 + number))
        printf 'M 100644 inline file%d\ndata 9\ntext %04d\n\n' $((number % 20)) "$number"
    done | git fast-import --quiet
    git reset --quiet --hard main
    same "$(git rev-list --count main)" 400
    git worktree add --quiet -b side ../side main~20
    (cd ../side && for number in 1 2 3 4 5; do echo "$number" >>aside && git add aside && git commit --quiet -m "aside $number"; done)
    git -C ../side rebase --quiet main
    same "$(git rev-list --count side)" 405
    git worktree remove ../side
    git gc --quiet --prune=now
    git fsck --full --strict
    cd "$WORK"
    reattach box
    git -C "$WORK/box/repository" fsck --full --strict
    same "$(git -C "$WORK/box/repository" show side:aside | wc -l)" 5
    detach box
}

# Imported beside the mount as well: the same names of commits are the same content. COMMITS=4000 is the long form.
case_git_keeps_a_large_history() {
    local commits=${COMMITS:-1000} repository path=directory3/file7 bare=(outside.git box/imported.git)
    new_archive box
    attach box
    export GIT_CONFIG_GLOBAL=/dev/null
    cat >"$WORK/history.py" <<'END'
import random, sys
COMMITS = int(sys.argv[1])
chance = random.Random(4000)
out = sys.stdout.buffer
def block(text):
    out.write(b"data %d\n%s\n" % (len(text), text))
lines = {}
for number in range(1, COMMITS + 1):
    out.write(b"commit refs/heads/main\nmark :%d\ncommitter Test <test@example.org> %d +0000\n" % (number, 1_700_000_000 + 60 * number))
    block(b"commit %d\n" % number)
    if number % 50 == 0:
        out.write(b"merge :%d\n" % (number - 20))
    for _ in range(chance.randint(1, 3)):
        path = b"directory%d/file%d" % (chance.randrange(12), chance.randrange(15))
        content = lines.setdefault(path, [])
        content.insert(chance.randint(0, len(content)), b"%d %x\n" % (number, chance.getrandbits(200)))
        del content[40:]
        out.write(b"M 100644 inline %s\n" % path)
        block(b"".join(content))
out.write(b"done\n")
END
    python3 "$WORK/history.py" "$commits" >"$WORK/stream"
    for repository in "${bare[@]}"; do
        git init --quiet --bare --initial-branch=main "$repository"
        git -C "$repository" fast-import --quiet --done <"$WORK/stream"
    done
    same "$(git -C outside.git rev-list --count main)" "$commits"
    git -C box/imported.git repack -adq
    git -C box/imported.git fsck --full --strict
    git clone --quiet --no-local box/imported.git box/clone
    git -C outside.git log -p main -- "$path" >"$WORK/log"
    [[ $(grep -c '^commit ' "$WORK/log") -gt 10 ]] || fail "too few commits change $path"
    verify() {
        for repository in box/imported.git box/clone; do
            same "$(git -C "$repository" rev-parse main 'main^{tree}' "main~$((commits / 2))")" \
                "$(git -C outside.git rev-parse main 'main^{tree}' "main~$((commits / 2))")"
            git -C "$repository" log -p main -- "$path" | cmp - "$WORK/log"
        done
    }
    verify
    reattach box
    verify
    git -C box/clone fsck --full --strict
    same "$(git -C box/clone status --porcelain)" '' 'git status after the remount'
    git clone --quiet outside.git checkout
    diff -r --exclude=.git checkout box/clone
    detach box
}

# Output that several compilers and loggers append to while make runs two at a time.
case_make_builds_in_parallel_and_appends_its_log() {
    local number
    new_archive box
    attach box
    cd "$WORK/box"
    for number in $(seq 30); do
        printf 'int f%d(void) { return %d; }\n' "$number" "$number" >"f$number.c"
    done
    {
        echo '#include <stdio.h>'
        for number in $(seq 30); do echo "int f$number(void);"; done
        echo 'int main(void) { int sum = 0;'
        for number in $(seq 30); do echo "sum += f$number();"; done
        echo 'printf("%d\n", sum); return 0; }'
    } >main.c
    printf 'OBJECTS = $(patsubst %%.c,%%.o,$(wildcard *.c))\nprogram: $(OBJECTS)\n\tcc -o $@ $^ >>log 2>&1 && echo linked >>log\n' >Makefile
    printf '%%.o: %%.c\n\tcc -O1 -c -o $@ $< >>log 2>&1 && echo "compiled $<" >>log\n' >>Makefile
    make -j2 >/dev/null
    same "$(./program)" 465
    same "$(grep -c '^compiled ' log)" 31
    same "$(make -q && echo done)" done 'make would build again'
    touch f7.c
    make -j2 >/dev/null
    same "$(grep -c '^compiled ' log)" 32
    cd "$WORK"
    reattach box
    same "$("$WORK/box/program")" 465
    same "$(make -q -C "$WORK/box" && echo done)" done 'make would build again after the remount'
    detach box
}

case_editors_save_by_rename_and_keep_backups() {
    new_archive box
    attach box
    echo first >"$WORK/box/text"
    chmod 640 "$WORK/box/text"
    vim -Nu NONE -es -c 'set backup backupcopy=no backupdir=. backupskip=' -c '%s/first/second/' -c 'wq' "$WORK/box/text" || true
    same "$(cat "$WORK/box/text")" second
    same "$(cat "$WORK/box/text~")" first
    vim -Nu NONE -es -c 'set backup backupcopy=yes backupdir=. backupskip=' -c '%s/second/third/' -c 'wq' "$WORK/box/text" || true
    same "$(cat "$WORK/box/text")" third
    same "$(stat -c %a "$WORK/box/text")" 640
    same "$(ls -A "$WORK/box" | tr '\n' ' ')" 'text text~ '
    detach box
}

# Mail programs take a dotlock, a lock of fcntl, or one of flock: each by itself must keep four deliverers apart.
case_each_lock_keeps_a_mailbox_whole() {
    local kind
    new_archive box
    attach box
    cat >"$WORK/deliver.py" <<'END'
import fcntl, os, sys, time
DELIVERERS, EACH = 4, 30
os.chdir(sys.argv[1])
kind = sys.argv[2]
name = "mbox." + kind
def dotlock(own):
    os.close(os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.link(own, name + ".lock")
        return True
    except FileExistsError:
        return False
    finally:
        os.unlink(own)
def lock(box, own):
    """Tells whether somebody else had the lock."""
    if kind == "dotlock":
        if dotlock(own):
            return False
        while not dotlock(own):
            time.sleep(0.0005)
        return True
    take = {"fcntl": fcntl.lockf, "flock": fcntl.flock}[kind]
    try:
        take(box, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        take(box, fcntl.LOCK_EX)
        return True
def deliver(who, number):
    with open(name, "r+b", buffering=0) as box:
        waited = lock(box, "%s.%d" % (name, who))
        # Neither by appending nor at once: without a lock messages are lost and mixed.
        box.seek(0, os.SEEK_END)
        os.sched_yield()
        box.write(b"From %d %04d\n" % (who, number))
        os.sched_yield()
        box.write(b"\ntext %d %04d\n" % (who, number))
        if kind == "dotlock":
            os.unlink(name + ".lock")
    return waited
open(name, "w").close()
begin, go = os.pipe()
told, tell = os.pipe()
children = []
for who in range(DELIVERERS):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(begin, 1)
        waits = sum(deliver(who, number) for number in range(EACH))
        os.write(tell, bytes([waits]))
        os._exit(0)
    children.append(pid)
os.close(go)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
waits = sum(os.read(told, DELIVERERS))
print("note: %s: %d of %d deliveries had to wait" % (kind, waits, DELIVERERS * EACH))
assert waits > 0, "nobody ever wanted a lock that somebody had"
END
    cat >"$WORK/verify.py" <<'END'
import re, sys
content = open(sys.argv[1], "rb").read()
messages = re.findall(rb"From (\d) (\d{4})\n\ntext \1 \2\n", content)
assert len(messages) * 25 == len(content), "%d messages in %d bytes" % (len(messages), len(content))
assert sorted(messages) == [(b"%d" % who, b"%04d" % number) for who in range(4) for number in range(30)], messages
END
    for kind in dotlock fcntl flock; do
        python3 "$WORK/deliver.py" "$WORK/box" "$kind"
        python3 "$WORK/verify.py" "$WORK/box/mbox.$kind"
    done
    reattach box
    for kind in dotlock fcntl flock; do
        python3 "$WORK/verify.py" "$WORK/box/mbox.$kind"
    done
    detach box
}

case_several_programs_write_one_database() {
    local writers=() writer
    new_archive box
    attach box
    sqlite3 "$WORK/box/data" 'PRAGMA journal_mode=WAL; CREATE TABLE t (who INTEGER, number INTEGER, UNIQUE (who, number));' >/dev/null
    write() {
        local number
        for number in $(seq 40); do echo "INSERT INTO t VALUES ($1, $number);"; done |
            sqlite3 -cmd '.timeout 60000' "$WORK/box/data"
    }
    for writer in 1 2 3; do
        in_background write "$writer"
        writers+=($!)
    done
    for writer in "${writers[@]}"; do
        sqlite3 -cmd '.timeout 60000' "$WORK/box/data" 'PRAGMA integrity_check;' | shows -x ok
        wait "$writer"
    done
    same "$(sqlite3 "$WORK/box/data" 'SELECT count(*) FROM t;')" 120
    reattach box
    same "$(sqlite3 "$WORK/box/data" 'PRAGMA integrity_check; SELECT count(*) FROM t;' | tr '\n' ' ')" 'ok 120 '
    detach box
}
