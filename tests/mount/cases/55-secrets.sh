# What a running daemon keeps of secrets, and what it could still reach.
# shellcheck shell=bash disable=SC2317,SC2164

# Counts the occurrences of each hexadecimal argument in the readable memory of a process.
search_memory() {
    python3 - "$@" <<'END'
import sys
pid, *wanted = sys.argv[1:]
wanted = [bytes.fromhex(word) for word in wanted]
found = [0] * len(wanted)
read = 0
with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
    for line in maps:
        span, rights = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if rights[0] != "r" or "[v" in line:
            continue
        tail = b""
        while start < end:
            try:
                memory.seek(start)
                piece = memory.read(min(1 << 20, end - start))
            except (OSError, OverflowError):
                break
            if not piece:
                break
            read += len(piece)
            for number, word in enumerate(wanted):
                found[number] += (tail + piece).count(word)
            tail = piece[-63:]
            start += len(piece)
assert read > 1 << 20, read
print(*found)
END
}

hex_of() {
    printf '%s' "$1" | od -An -tx1 | tr -d ' \n'
}

# The key-encryption key and the volume key, by the independent reader.
keys_of() {
    local python=${READER_PYTHON:?set by tests/run.sh: a python with the packages of format-spec/reader}
    PYTHONPATH=$(dirname "${READER:?}") "$python" - "$1" "$PASSPHRASE" <<'END'
import hashlib, hmac, struct, sys
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
with open(sys.argv[1], "rb") as file:
    header = file.read(8192)
slot = header[4096:]
memory, passes, lanes = struct.unpack("<III", slot[32:44])
kek = Argon2id(salt=slot[:32], length=32, iterations=passes, lanes=lanes, memory_cost=memory).derive(sys.argv[2].encode())
# The commitment proves that it is the right one (specification 4.2).
extracted = hmac.digest(header[48:64], kek, hashlib.sha256)
assert hmac.digest(extracted, b"lockbox/v1/slot/commit\x01", hashlib.sha256) == slot[48:80]
print(kek.hex())
END
}

case_a_daemon_keeps_neither_passphrase_nor_kek() {
    local pid kek counts control
    new_archive box
    kek=$(keys_of "$WORK/box.lbx")
    attach box
    cp -r "$(source_tree)/odd" "$WORK/box/odd"
    pid=$(daemon_of "$WORK/box.lbx")
    # The path of the archive is in its memory: so the search finds what is there.
    read -r control counts < <(search_memory "$pid" "$(hex_of "$WORK/box.lbx")" "$(hex_of "$PASSPHRASE")" "$kek")
    [[ $control -gt 0 ]] || fail 'the search finds nothing at all'
    same "$counts" '0 0'
    # Nor is it anywhere else that others may look.
    ! grep -aq "$PASSPHRASE" "/proc/$pid/cmdline" "/proc/$pid/environ" "$WORK/box.log" || fail 'the passphrase shows'
    ! grep -aqi "$kek" "/proc/$pid/cmdline" "/proc/$pid/environ" "$WORK/box.log" || fail 'the key shows'
    detach box
}

case_a_foreground_mount_forgets_the_passphrase() {
    local pid kek counts control
    new_archive box
    kek=$(keys_of "$WORK/box.lbx")
    mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "foreground,passfile=$PASSFILE,log=$WORK/box.log" &
    pid=$!
    BACKGROUND+=("$pid")
    await 30 mountpoint -q "$WORK/box"
    read -r control counts < <(search_memory "$pid" "$(hex_of "$WORK/box.lbx")" "$(hex_of "$PASSPHRASE")" "$kek")
    [[ $control -gt 0 ]] || fail 'the search finds nothing at all'
    note "foreground: passphrase and KEK found $counts times"
    same "${counts%% *}" 0
    kill "$pid"
    wait "$pid"
}

case_a_daemon_leaves_no_core_and_cannot_be_traced_by_its_user() {
    local pid
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    # Root may lock what it likes, so the keys of a mount by root never reach swap.
    [[ $(awk '$1 == "VmLck:" { print $2 }' "/proc/$pid/status") -gt 0 ]] || fail 'no memory is locked'
    same "$(awk '/^Max core file size/ { print $5, $6 }' "/proc/$pid/limits")" '0 0'
    # An undumpable process belongs to root in /proc; for a user's it is the visible half of it.
    detach box
    need_user
    mkdir "$WORK/home" "$WORK/home/point"
    cp "$PASSFILE" "$WORK/home/passphrase"
    chown -R "$TEST_USER:" "$WORK/home"
    as_user lockbox create --weak-kdf --kdf-memory 1 --passfile "$WORK/home/passphrase" "$WORK/home/box.lbx"
    as_user lockbox mount --passfile "$WORK/home/passphrase" "$WORK/home/box.lbx" "$WORK/home/point"
    pid=$(daemon_of "$WORK/home/box.lbx")
    same "$(stat -c %U "/proc/$pid/mem")" root
    expect 1 'permission denied' as_user cat "/proc/$pid/environ"
    as_user lockbox umount "$WORK/home/point"
}

case_a_daemon_holds_its_pipes_alone() {
    local pid
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    # The key came by standard input, which is gone. What is said on standard error is in the log.
    same "$(readlink "/proc/$pid/fd/0" "/proc/$pid/fd/1" | sort -u)" /dev/null
    same "$(readlink "/proc/$pid/fd/2")" "$(realpath "$WORK/box.log")"
    detach box
}

case_a_mounted_daemon_is_in_its_sandbox() {
    local pid other
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    same "$(cat /proc/"$pid"/task/*/status | awk '$1 == "NoNewPrivs:" { print $2 }' | sort -u)" 1
    # Each thread has the filter of system calls.
    same "$(cat /proc/"$pid"/task/*/status | awk '$1 == "Seccomp:" { print $2 }' | sort -u)" 2
    # Of root's capabilities each thread keeps CAP_IPC_LOCK (bit 14) in the sets that count, and none in the others.
    same "$(cat /proc/"$pid"/task/*/status | awk '/^Cap/ { print $1 $2 }' | sort -u | tr '\n' ' ')" \
        'CapAmb:0000000000000000 CapBnd:0000000000004000 CapEff:0000000000004000 CapInh:0000000000000000 CapPrm:0000000000004000 '
    # The process that unmounts is outside, and has no secret.
    other=$(pgrep -P "$pid")
    same "$(tr '\0' '\n' <"/proc/$other/cmdline" | sed -n 2p)" --unmounter
    same "$(awk '$1 == "NoNewPrivs:" { print $2 }' "/proc/$other/status")" 0
    # Without the window rsync leaves a time alone that lies in the right second.
    rsync -aXH --modify-window=-1 "$(source_tree)/odd/" "$WORK/box/odd/"
    detach box
    await 10 gone "$other"
    attach box sandbox=off
    pid=$(daemon_of "$WORK/box.lbx")
    same "$(awk '$1 == "NoNewPrivs:" { print $2 }' "/proc/$pid/status")" 0
    # Nothing is left to copy. (compare.py opens what it compares, and there is a FIFO.)
    same "$(rsync -aXHni --delete --modify-window=-1 "$(source_tree)/odd/" "$WORK/box/odd/")" ''
    detach box
}

case_a_killed_daemon_takes_the_other_process_along() {
    local pid other
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    other=$(pgrep -P "$pid")
    kill -9 "$pid"
    await 10 gone "$other"
    attach box
    detach box
}

case_a_daemon_without_its_other_process_says_so_and_loses_nothing() {
    local pid other
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    other=$(pgrep -P "$pid")
    kill -9 "$other"
    await 10 gone "$other"
    exec 7>"$WORK/box/file"
    echo written >&7
    await 30 grep -q 'process that flushes the mount does not answer' "$WORK/box.log"
    exec 7>&-
    # What an ordinary unmount does, as long as somebody else may unmount.
    umount "$WORK/box"
    await 30 gone "$pid"
    attach box
    same "$(cat "$WORK/box/file")" written
    detach box
    check_full box
}

case_an_older_copy_is_refused_by_mount() {
    new_archive box
    attach box
    echo one >"$WORK/box/file"
    detach box
    cp "$WORK/box.lbx" "$WORK/backup"
    attach box
    echo two >"$WORK/box/file"
    detach box
    cp "$WORK/backup" "$WORK/box.lbx"
    expect 16 'with -o accept-older' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE"
    ! grep -q -e --accept "$WORK/stderr" || fail "advises an option that mounting lacks: $(cat "$WORK/stderr")"
    expect 16 'accept-older' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "ro,passfile=$PASSFILE"
    ! mountpoint -q "$WORK/box" || fail 'mounted all the same'
    attach box accept-older
    same "$(cat "$WORK/box/file")" one
    detach box
    attach box
    detach box
}

case_a_daemon_holds_nothing_that_its_caller_had_open() {
    local pid
    new_archive box
    echo secret >"$WORK/open"
    exec 9<"$WORK/open"
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    ! find "/proc/$pid/fd" "/proc/$(pgrep -P "$pid")/fd" -lname "$WORK/open" | grep . || fail 'the daemon has it open'
    detach box
    in_background mount.lockbox --foreground "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE" 2>"$WORK/box.log"
    pid=$!
    await 30 mountpoint -q "$WORK/box"
    ! find "/proc/$pid/fd" -lname "$WORK/open" | grep . || fail 'in the foreground it has'
    exec 9<&-
    lockbox umount "$WORK/box"
}
