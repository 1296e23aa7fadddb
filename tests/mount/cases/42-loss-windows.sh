# The table "Durability after a crash" of mount.lockbox(8): each row under each profile, with the daemon killed at once or after the window.
# The loss of power is the same rows on a storage that forgets what no barrier covered: src/fs/tests/dirty.rs, src/fs/tests/crash and
# src/txn/tests/crash.rs.
# shellcheck shell=bash disable=SC2317,SC2164

# Rows of the table; "do" acts, "see" prints old, new or the name of something that must never be.
write_rows() {
    cat >"$WORK/rows.py" <<'END'
import ctypes, mmap, os, sys, time
OLD, NEW = b"old " * 20_000, b"new " * 20_000
def write(name, data, flags=0):
    file = os.open(name, os.O_RDWR | os.O_CREAT | flags, 0o600)
    os.write(file, data)
    return file
def closed():
    os.close(write("file", NEW))
def opened():
    write("file", NEW)
def created():
    os.close(os.open("new", os.O_CREAT | os.O_WRONLY))
def linked():
    os.link("file", "new")
def renamed():
    os.rename("file", "new")
def unlinked():
    os.unlink("file")
def attributes():
    os.chmod("file", 0o640)
    os.setxattr("file", "user.new", b"value")
def fsynced():
    os.fsync(write("file", NEW))
def fsynced_directory():
    os.mkdir("new")
    os.fsync(os.open(".", os.O_RDONLY))
def synchronous():
    write("file", NEW, os.O_SYNC)
def mapped():
    file = os.open("file", os.O_RDWR)
    area = mmap.mmap(file, len(NEW))
    area[:] = NEW
    area.flush()
def replaced():
    os.close(write("file.new", NEW))
    os.rename("file.new", "file")
def content():
    found = open("file", "rb").read()
    return "old" if found == OLD else "new" if found == NEW else "mixed"
def name():
    return "new" if os.path.exists("new") else "old"
rows = {
    "opened": (opened, content), "closed": (closed, content), "created": (created, name),
    "linked": (linked, name),
    "renamed": (renamed, lambda: ("both" if os.path.exists("file") else "new") if os.path.exists("new") else content()),
    "unlinked": (unlinked, lambda: "old" if os.path.exists("file") else "new"),
    "attributes": (attributes, lambda: "new" if os.stat("file").st_mode & 0o777 == 0o640 and os.listxattr("file") == ["user.new"]
                   else "old"),
    "fsynced": (fsynced, content), "fsynced_directory": (fsynced_directory, name), "synchronous": (synchronous, content),
    "mapped": (mapped, content), "replaced": (replaced, content),
}
if __name__ == "__main__":
    what, root, chosen = sys.argv[1], sys.argv[2], sys.argv[3:] or rows
    for row in chosen:
        os.makedirs(root + "/" + row, exist_ok=True)
        os.chdir(root + "/" + row)
        if what == "prepare":
            os.close(write("file", OLD))
        elif what == "do":
            rows[row][0]()
        else:
            print(row, rows[row][1]())
    if what == "do":
        # Files stay open until this process is killed.
        open(os.environ["DONE"], "w").close()
        time.sleep(3600)
END
}

# crash_after nothing|collection|looks ROWS...: does the rows, kills the daemon at once, when its clock has collected and committed them, or when the
# clock has had time for that; prints what is there.
crash_after() {
    local when=$1 worker
    shift
    rm -f "$WORK/done"
    DONE=$WORK/done in_background python3 "$WORK/rows.py" "do" "$WORK/box" "$@"
    worker=$!
    await test -e "$WORK/done"
    case $when in
        collection) await_collected box ;;
        looks) await_looks "$(daemon_of "$WORK/box.lbx")" ;;
    esac
    kill_daemon box
    kill -9 "$worker"
    wait "$worker" 2>/dev/null || true
    umount -l "$WORK/box"
    attach box "sync=$PROFILE"
    python3 "$WORK/rows.py" see "$WORK/box" "$@" >"$WORK/seen"
}

# fresh_box PROFILE: an archive with the old state of all rows, durable.
fresh_box() {
    PROFILE=$1
    VERBOSE=1
    umount -l "$WORK/box" 2>/dev/null || true
    rm -f "$WORK/box.lbx"
    new_archive box
    attach box
    python3 "$WORK/rows.py" prepare "$WORK/box"
    reattach box "sync=$PROFILE"
}

# all_are WORDS [IN-PLACE]: every row that was seen shows one of them; those that overwrite a file may show IN-PLACE, too.
all_are() {
    ! grep -Ev " ($1)$|^(opened|closed) ${2:-$1}$" "$WORK/seen" || fail "with sync=$PROFILE these are not $1"
}

SYNCED=(fsynced fsynced_directory synchronous mapped)
CHANGED=(closed created linked renamed unlinked attributes replaced)

# In real time: the clock of the other cases runs faster where they wait for it.
case_loss_windows_of_sync_periodic() {
    write_rows
    fresh_box periodic
    crash_after nothing "${SYNCED[@]}"
    all_are new
    detach box
    check_full box
    # Without fsync either state; a commit may come between the requests of one write.
    fresh_box periodic
    crash_after nothing opened "${CHANGED[@]}"
    all_are 'old|new' mixed
    detach box
    check_full box
    # After the window all is there.
    fresh_box periodic
    crash_after collection opened "${CHANGED[@]}"
    all_are new
    detach box
    check_full box
}

case_loss_windows_of_sync_always() {
    write_rows
    fresh_box always
    # Alone first, so that no later commit covers the earlier row.
    local row
    for row in "${CHANGED[@]}" "${SYNCED[@]}"; do
        crash_after nothing "$row"
        all_are new
    done
    detach box
    check_full box
    LOCKBOX_TEST_CLOCK=10 fresh_box always
    crash_after collection opened
    all_are new
    detach box
    check_full box
}

case_loss_windows_of_sync_never() {
    write_rows
    LOCKBOX_TEST_CLOCK=10 fresh_box never
    # The first change opens the session with a commit, which the clock may confirm by another one, of what was changed meanwhile.
    touch "$WORK/box/first"
    await_looks "$(daemon_of "$WORK/box.lbx")"
    # Otherwise its clock looks and commits nothing.
    crash_after looks opened "${CHANGED[@]}" "${SYNCED[@]}"
    all_are old
    detach box
    check_full box
}

case_orderly_ends_lose_nothing_in_any_profile() {
    local profile way pid worker
    write_rows
    for profile in never periodic always; do
        for way in umount term; do
            fresh_box "$profile"
            rm -f "$WORK/done"
            DONE=$WORK/done in_background python3 "$WORK/rows.py" "do" "$WORK/box" opened "${CHANGED[@]}" "${SYNCED[@]}"
            worker=$!
            await test -e "$WORK/done"
            pid=$(daemon_of "$WORK/box.lbx")
            # With SIGTERM the files are still open, so that only the end of the program lets the daemon finish.
            [[ $way == umount ]] || kill -TERM "$pid"
            kill -9 "$worker"
            wait "$worker" 2>/dev/null || true
            if [[ $way == umount ]]; then detach box; else await gone "$pid"; fi
            attach box
            python3 "$WORK/rows.py" see "$WORK/box" opened "${CHANGED[@]}" "${SYNCED[@]}" >"$WORK/seen"
            all_are new
            detach box
        done
    done
}
