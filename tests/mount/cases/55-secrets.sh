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
    await mountpoint -q "$WORK/box"
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

refers() {
    [[ $(readlink "$1") == "$2" ]]
}

case_a_daemon_holds_its_pipes_alone() {
    local pid
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    # The key came by standard input, which is gone. The daemon lets go of the other two once it has reported to the command that it
    # is mounted. What is said on standard error is in the log.
    same "$(readlink "/proc/$pid/fd/0")" /dev/null
    await refers "/proc/$pid/fd/1" /dev/null
    await refers "/proc/$pid/fd/2" "$(realpath "$WORK/box.log")"
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
    await gone "$other"
    attach box sandbox=off
    pid=$(daemon_of "$WORK/box.lbx")
    same "$(awk '$1 == "NoNewPrivs:" { print $2 }' "/proc/$pid/status")" 0
    # Nothing is left to copy. (compare.py opens what it compares, and there is a FIFO.)
    says_nothing rsync -aXHni --delete --modify-window=-1 "$(source_tree)/odd/" "$WORK/box/odd/"
    detach box
}

case_a_killed_daemon_takes_the_other_process_along() {
    local pid other
    new_archive box
    attach box
    pid=$(daemon_of "$WORK/box.lbx")
    other=$(pgrep -P "$pid")
    kill -9 "$pid"
    await gone "$other"
    attach box
    detach box
}

case_a_daemon_without_its_other_process_says_so_and_loses_nothing() {
    local pid other
    new_archive box
    LOCKBOX_TEST_CLOCK=10 attach box
    pid=$(daemon_of "$WORK/box.lbx")
    other=$(pgrep -P "$pid")
    kill -9 "$other"
    await gone "$other"
    exec 7>"$WORK/box/file"
    echo written >&7
    await grep -q "background work failed: the daemon's process that unmounts is gone" "$WORK/box.log"
    exec 7>&-
    # What an ordinary unmount does, as long as somebody else may unmount.
    umount "$WORK/box"
    await gone "$pid"
    attach box
    same "$(cat "$WORK/box/file")" written
    detach box
    check_full box
}

case_another_archive_in_its_place_is_refused_by_mount() {
    new_archive box
    new_archive other
    attach other
    detach other
    attach box
    echo mine >"$WORK/box/file"
    detach box
    mv "$WORK/box.lbx" "$WORK/kept"
    cp "$WORK/other.lbx" "$WORK/box.lbx"
    for options in "passfile=$PASSFILE" "ro,passfile=$PASSFILE" "accept-older,accept-fork,passfile=$PASSFILE"; do
        expect 16 'opened it before.*with -o accept-other' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "$options"
    done
    ! grep -q -e --accept "$WORK/stderr" || fail "advises an option that mounting lacks: $(cat "$WORK/stderr")"
    ! mountpoint -q "$WORK/box" || fail 'mounted all the same'
    # A link leads no further than to the name that is known.
    rm "$WORK/box.lbx"
    ln -s other.lbx "$WORK/box.lbx"
    expect 16 'accept-other' mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE"
    rm "$WORK/box.lbx"
    mv "$WORK/kept" "$WORK/box.lbx"
    attach box
    same "$(cat "$WORK/box/file")" mine
    detach box
    cp "$WORK/other.lbx" "$WORK/box.lbx"
    attach box accept-other
    detach box
    attach box
    detach box
}

# A recipient's first use is told by the mounting command, once.
case_a_mount_tells_the_first_use_by_an_identity_once() {
    new_archive box
    ssh-keygen -q -t ed25519 -N '' -f "$WORK/id"
    lockbox key add --passfile "$PASSFILE" --recipient-file "$WORK/id.pub" "$WORK/box.lbx" >/dev/null
    print=$(lockbox info --json --passfile "$PASSFILE" "$WORK/box.lbx" | grep -oE '"fingerprint": *"[0-9a-f]{32}"' | cut -d '"' -f 4)
    for expected in 1 0; do
        XDG_STATE_HOME="$WORK/another" lockbox mount "$WORK/box.lbx" "$WORK/box" --identity "$WORK/id" 2>"$WORK/told"
        same "$(grep -c "first use.*$print" "$WORK/told" || true)" "$expected"
        XDG_STATE_HOME="$WORK/another" lockbox umount "$WORK/box"
    done
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
    same "$(find "/proc/$pid/fd" "/proc/$(pgrep -P "$pid")/fd" -lname "$WORK/open" 2>/dev/null)" '' 'what the daemon has open'
    detach box
    in_background mount.lockbox --foreground "$WORK/box.lbx" "$WORK/box" -o "passfile=$PASSFILE" 2>"$WORK/box.log"
    pid=$!
    await mountpoint -q "$WORK/box"
    same "$(find "/proc/$pid/fd" -lname "$WORK/open" 2>/dev/null)" '' 'what it has open in the foreground'
    exec 9<&-
    lockbox umount "$WORK/box"
}

# What a program tries that was led astray in such a process of root. Arguments are such that nothing is harmed where a call is not refused: there
# is no such path, flag or thing to undo.
tried_calls() {
    cat <<END
open_shadow 257 -100 s:/etc/shadow 0 0
open_memory_of_1 257 -100 s:/proc/1/mem 0 0
open_memory_of_other 257 -100 s:/proc/$1/mem 0 0
list_root 257 -100 s:/root 0x10000 0
access 269 -100 s:/etc/shadow 4 0
chdir 80 s:/root
truncate 76 s:$2 0
unlink 87 s:$2
rename 82 s:$2 s:$2.moved
symlink 88 s:/etc/passwd s:$2.link
mknod_fifo 133 s:$2.fifo 0x1180 0
chmod 90 s:$2 0x1ff
fchmodat2 452 -100 s:$2 0x1ff 0
chown 260 -100 s:$2 1 1 0
setxattr 188 s:$2 s:user.x s:1 1 0
setxattrat 463 -100 s:$2 0 s:user.x s:x 24
times_by_path 280 -100 s:$2 0 0
file_getattr 468 -100 s:$2 s:xxxxxxxxxxxxxxxxxxxxxxxxxx 24 0
file_setattr_immutable 469 -100 s:$2 s:xxxxxxxxxxxxxxxxxxxxxxxxxx 24 0
socket_unix 41 1 1 0
socket_netlink 41 16 3 0
socket_udp 41 2 2 0
socket_mptcp 41 2 1 262
pair_of_datagrams 53 1 2 0 s:xxxxxxxx
io_uring_setup 425 8 s:xxxxxxxxxxxxxxxxxxxxxxxxxxxx
ptrace 101 0x4200 $1 0 0
process_vm_readv 310 $1 s:x 1 s:x 1 0
process_vm_writev 311 $1 s:x 1 s:x 1 0
pidfd_open 434 $1 0
kill_1 62 1 0
kill_all 62 -1 0
kill_other 62 $1 0
tgkill_1 234 1 1 0
mount 165 s:none s:/nonexistent s:tmpfs 0 0
umount2 166 s:/nonexistent 2
fsopen 430 s:tmpfs 0
fspick 433 -100 s:/tmp 0
open_tree 428 -100 s:/etc 1
mount_setattr 442 -100 s:$3 0 s:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx 32
open_tree_attr 467 -100 s:$3 0 s:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx 32
listmount 458 s:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx s:x 16 0
fanotify_notices 300 0 0
fanotify_names 300 0xe00 0
fanotify_permission 300 4 0
inotify 294 0
quotactl_fd 443 3 0x800700 0 s:x
setpriority_1 141 0 1 0
ioprio_set_1 251 1 1 0
prlimit_1 302 1 7 0 s:xxxxxxxxxxxxxxxxx
memfd 319 s:x 0
execve 59 s:/nonexistent 0 0
new_process 56 0x10011 0 0 0 0
new_user_namespace 56 0x10010011 0 0 0 0
kexec_file_load 320 -1 -1 0 0 0
iopl 172 3
ioperm 173 0x80 1 1
sethostname 170 s:x -1
keyctl 250 0 -3 0
bpf 321 0 s:x 64
perf_event_open 298 s:x 0 -1 -1 0
userfaultfd 323 0
syslog 103 10 0 0
name_to_handle_at 303 -100 s:/etc/shadow s:xxxxxxxxxxx s:x 0
open_by_handle_at 304 -100 s:xxxxxxxxx 0
x32_getpid 0x40000027
x32_socket 0x40000029 1 1 0
mq_open 240 s:/x 66 0 0
shmget 29 1 4096 934
move_pages_1 279 1 0 0 0 0 0
chroot 161 s:/tmp
setns 308 0 0
unshare 272 0x20000
pivot_root 155 s:/ s:/tmp
acct 163 s:/nonexistent
reboot_with_wrong_words 169 0 0 0 0
settimeofday 164 0 0
setresuid 117 -1 -1 -1
capget 125 s:xxxxxxxxxxxxxxxxx s:xxxxxxxxxxxxxxxxxxxxxxxxxxxxx
executable_memory 9 0 4096 5 0x22 -1 0
become_dumpable 157 4 1 0 0 0
allow_tracer 157 0x59616d61 $1 0 0 0
filter_anew 317 1 8 s:xxxxxxxxxxxxxxxxx
shutdown_of_the_host 16 $4 0x8004587d s:xxxx
thaw_of_the_host 16 $4 0xc0045878 0
immutable_by_ioctl 16 $4 0x40086602 s:xxxxxxxx
END
}

# The number of a descriptor of that process which is a file below that path.
descriptor_below() {
    local link
    for link in /proc/"$1"/fd/*; do
        case $(readlink "$link") in "$2"*) basename "$link"; return ;; esac
    done
    fail "process $1 has nothing open below $2"
}

all_refused() {
    local pid=$1 other=$2 file=$3 point=$4 below=$5
    tried_calls "$other" "$file" "$point" "$(descriptor_below "$pid" "$below")" >"$WORK/tried"
    python3 "$SCRATCH_DIR/bin/inject.py" "$pid" <"$WORK/tried" >"$WORK/answers"
    same "$(wc -l <"$WORK/answers")" "$(wc -l <"$WORK/tried")"
    ! grep ' ok$' "$WORK/answers" || fail "process $pid may do that"
    # Nothing but the filter and Landlock said no.
    same "$(awk '$2 != "ENOSYS" && $2 != "EACCES" && $2 != "EPERM"' "$WORK/answers")" ''
    same "$(cat "$file")" untouched
}

case_a_led_astray_daemon_and_fetcher_are_refused_what_acts_on_the_machine() {
    local daemon fetcher
    if [[ $(uname -m) != x86_64 ]]; then
        note 'the calls are those of x86-64; the lists of other machines have a unit test'
        return
    fi
    echo untouched >"$WORK/victim"
    new_archive box
    attach box
    daemon=$(daemon_of "$WORK/box.lbx")
    echo before >"$WORK/box/file"
    all_refused "$daemon" $$ "$WORK/victim" "$WORK/box" "$WORK/box.lbx"
    for call in mount open_tree_attr file_setattr fanotify_init pidfd_open 'ioctl 0x8004587d' 'prctl 0x4'; do
        same "$(grep -c "the daemon was refused the system call $call, " "$WORK/box.log")" 1
    done
    # It goes on, and nothing was harmed.
    echo after >"$WORK/box/other"
    same "$(cat "$WORK/box/file" "$WORK/box/other")" $'before\nafter'
    lockbox backup "$WORK/box.lbx" "file://$WORK/objects" --passfile "$PASSFILE"
    detach box
    check_full box
    mkdir "$WORK/elsewhere"
    mount.lockbox -o "ro,passfile=$PASSFILE,log=$WORK/elsewhere.log" "file://$WORK/objects" "$WORK/elsewhere"
    fetcher=$(pgrep -f -- "--fetcher confined $WORK/elsewhere.log")
    daemon=$(awk '$1 == "PPid:" { print $2 }' "/proc/$fetcher/status")
    same "$(cat /proc/"$fetcher"/task/*/status | awk '/^(Cap|NoNewPrivs|Seccomp:)/ { print $1 $2 }' | sort -u | tr '\n' ' ')" \
        'CapAmb:0000000000000000 CapBnd:0000000000000000 CapEff:0000000000000000 CapInh:0000000000000000 CapPrm:0000000000000000 NoNewPrivs:1 Seccomp:2 '
    all_refused "$fetcher" "$daemon" "$WORK/victim" "$WORK/elsewhere" "$WORK/objects"
    same "$(grep -c 'the fetcher was refused the system call open_tree_attr, ' "$WORK/elsewhere.log")" 1
    same "$(cat "$WORK/elsewhere/file" "$WORK/elsewhere/other")" $'before\nafter'
    lockbox doctor --json >"$WORK/doctor"
    python3 - "$WORK/doctor" "$daemon" "$fetcher" <<'END'
import json, sys
processes = {one["pid"]: one for one in json.load(open(sys.argv[1]))["sandbox"]["processes"]}
for pid, process, capabilities in [(sys.argv[2], "daemon", "0000000000004000"), (sys.argv[3], "fetcher", "0" * 16)]:
    one = processes[int(pid)]
    assert (one["process"], one["no_new_privs"], one["seccomp"], one["capabilities"]) == (process, True, True, capabilities), one
END
    lockbox umount "$WORK/elsewhere"
}
