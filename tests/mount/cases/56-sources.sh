# Every source of secrets: the right one opens, wrong and hostile ones give one sentence, and nothing secret shows anywhere.
# shellcheck shell=bash disable=SC2317,SC2164

# refused CODE PATTERN COMMAND...: as expect, and what was said has no secret in it.
refused() {
    expect "$@"
    ! grep -aq -e "$PASSPHRASE" -e hush-hush "$WORK/stdout" "$WORK/stderr" || fail "a secret in the output of: ${*:3}"
    same "$(grep -c . "$WORK/stderr")" 1 "not one sentence: $(cat "$WORK/stderr")"
}

# shows_nothing PID: neither the passphrase nor its file stand where others may look.
shows_nothing() {
    local file
    for file in "/proc/$1/cmdline" "/proc/$1/environ" "$WORK/box.log"; do
        [[ -e $file ]] || continue
        ! grep -aq -e "$PASSPHRASE" "$file" || fail "the passphrase shows in $file"
    done
}

case_every_source_opens_a_mount() {
    local pid pipe open
    new_archive box
    mkdir "$WORK/credentials"
    install -m 400 "$PASSFILE" "$WORK/credentials/box"
    mounted() {
        mountpoint -q "$WORK/box" || fail "not mounted with: $*"
        pid=$(daemon_of "$WORK/box.lbx")
        shows_nothing "$pid"
        # What the mounting command read the secret from is not open in the daemon.
        open=$(readlink "/proc/$pid"/fd/* || true)
        ! shows -xF "$PASSFILE" <<<"$open" || fail 'the daemon holds the passfile open'
        pipe=$(readlink /proc/self/fd/9 || true)
        [[ $pipe != pipe:* ]] || ! shows -xF "$pipe" <<<"$open" || fail 'the daemon holds the pipe open'
        detach box
    }
    with() {
        mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "log=$WORK/box.log" "$@"
        mounted "$@"
    }
    with -o "passfile=$PASSFILE" </dev/null
    with -o passfd=9 9<"$PASSFILE" </dev/null
    with --passfd 9 9< <(cat "$PASSFILE") </dev/null
    with --passfd=0 <"$PASSFILE"
    with -o "passcommand=cat $PASSFILE" </dev/null
    # A comma would end a mount option.
    with --passcommand "true a, b; cat $PASSFILE" </dev/null
    with <"$PASSFILE"
    CREDENTIALS_DIRECTORY=$WORK/credentials with -o credential=box </dev/null
    LOCKBOX_PASSFILE=$PASSFILE with </dev/null
    LOCKBOX_PASSCOMMAND="echo '$PASSPHRASE'" with </dev/null
    # An option comes before the environment.
    LOCKBOX_PASSFILE=/missing with -o "passfile=$PASSFILE" </dev/null
    # The same through the other program, with a name that has a comma.
    cp -p "$PASSFILE" "$WORK/a, b"
    lockbox mount -o "log=$WORK/box.log" --passfile "$WORK/a, b" "$WORK/box.lbx" "$WORK/box"
    mounted lockbox
    through() {
        lockbox mount -o "log=$WORK/box.log" --passfd 9 "$WORK/box.lbx" "$WORK/box"
        mounted lockbox
    }
    through 9< <(cat "$PASSFILE")
}

case_wrong_and_hostile_sources_are_one_sentence() {
    new_archive box
    cd "$WORK"
    printf 'hush-hush\n' >wrong
    chmod 600 wrong
    cp "$PASSFILE" open
    chmod 644 open
    mkdir credentials
    # Each program, each command: the same answer. What may lie in the place of a secret is in 58-hostile-secrets.sh.
    local program
    list() { lockbox ls "$@" box.lbx; }
    attach_with() { mount.lockbox "$@" box.lbx box; }
    for program in list attach_with; do
        refused 1 'passfd' "$program" --passfd 1
        refused 2 'printed no passphrase' "$program" --passcommand true
        refused 2 'CREDENTIALS_DIRECTORY' "$program" --credential box
        refused 1 'are both sources of the passphrase' "$program" --passfile wrong --passcommand 'echo hush-hush'
        # Nothing on standard input, and none at all.
        refused 2 'standard input had no passphrase' "$program"
        refused 2 ': command not found' env PATH="$WORK/credentials" "$(type -P lockbox)" ls --ask-password box.lbx
    done
    refused 1 'without a path' mount.lockbox -o credential=/etc/passwd box.lbx box
    refused 1 'passfd' mount.lockbox -o passfd=hush box.lbx box
    refused 1 'are both sources of the passphrase' mount.lockbox -o passfile=wrong --passfd 0 box.lbx box
    list --passfile open --passfile-any >/dev/null
    expect 1 'usage|unexpected' list --password "$PASSPHRASE"
    lockbox ls box.lbx <&- 2>stderr && fail 'a closed standard input opened the archive'
    grep -q 'standard input had no passphrase' stderr
    ! mountpoint -q box || fail 'mounted all the same'
}

# An agent as desktops and boot screens have one: it finds the question as a file, and answers through a socket.
case_systemd_ask_password_is_asked() {
    local pid
    new_archive box
    if ! type -P systemd-ask-password >/dev/null; then
        note 'systemd-ask-password is not installed: a program with its name stands in'
        printf '#!/bin/sh\nexec cat "%s"\n' "$PASSFILE" >"$SCRATCH_DIR/bin/systemd-ask-password"
        chmod 755 "$SCRATCH_DIR/bin/systemd-ask-password"
    else
        python3 - "$PASSPHRASE" >"$WORK/asked" <<'END' &
import glob, socket, sys, time
deadline = time.time() + 120
while time.time() < deadline:
    for name in glob.glob("/run/systemd/ask-password/ask.*"):
        fields = dict(line.split("=", 1) for line in open(name).read().splitlines() if "=" in line)
        if fields.get("Id") == "lockbox":
            print(fields["Message"], flush=True)
            answer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            answer.sendto(b"+" + sys.argv[1].encode(), fields["Socket"])
            sys.exit()
    time.sleep(0.02)
sys.exit("nobody asked")
END
    fi
    mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "ask-password,log=$WORK/box.log" </dev/null
    pid=$(daemon_of "$WORK/box.lbx")
    shows_nothing "$pid"
    detach box
    [[ ! -e $WORK/asked ]] || shows -F "Passphrase of $WORK/box.lbx" "$WORK/asked" || fail "asked: $(cat "$WORK/asked")"
}

# While the passphrase is being worked on, for as long as that takes.
case_no_process_shows_a_secret_while_it_unlocks() {
    local pid
    lockbox create --weak-kdf --kdf-memory 512 --kdf-passes 3 --passfile "$PASSFILE" "$WORK/box.lbx"
    mkfifo "$WORK/fifo"
    lockbox ls --passfd 9 "$WORK/box.lbx" 9<"$WORK/fifo" &
    pid=$!
    exec 8>"$WORK/fifo"
    await grep -qa -- --passfd "/proc/$pid/cmdline"
    shows_nothing "$pid"
    cat "$PASSFILE" >&8
    exec 8>&-
    # Root may lock what it likes: neither the passphrase nor what is derived from it reaches swap. The process is stopped as soon as that is seen.
    locked() { [[ $(awk '$1 == "VmLck:" { print $2 }' "/proc/$pid/status") -gt 524288 ]] && kill -STOP "$pid"; }
    locked_or_over() { locked || gone "$pid"; }
    if [[ $(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo) -gt 1835008 ]]; then
        await locked_or_over
        ! gone "$pid" || fail 'it ended before its memory was seen locked'
        shows_nothing "$pid"
        kill -CONT "$pid"
    else
        note 'too little memory to see that it is locked'
    fi
    # Nor may its user look into it: the files of an undumpable process belong to root.
    wait "$pid"
}

# What else opens an archive, and what is no such thing, in both programs.
case_key_files_identities_and_codes_open_a_mount_or_say_why_not() {
    local code
    new_archive box
    cd "$WORK"
    add() { lockbox key add --passfile "$PASSFILE" box.lbx "$@" >added; }
    add --new-keyfile key --generate
    ssh-keygen -q -t ed25519 -N '' -f identity
    add --recipient-file identity.pub 2>note
    lockbox key recovery --json --passfile "$PASSFILE" box.lbx >code.json
    code=$(python3 -c 'import json; print(json.load(open("code.json"))["recovery_code"])')
    printf '%s\n' "$code" >code
    # One digit of the last group but one is another.
    python3 -c 'import sys; c = list(sys.argv[1]); c[50] = str((int(c[50]) + 1) % 10); print("".join(c))' "$code" >mistyped
    head -c 100 /dev/urandom >other
    cp key exposed
    chmod 600 code mistyped other
    chmod 644 exposed
    list() { lockbox ls "$@" box.lbx; }
    attach_with() { mount.lockbox "$@" box.lbx box; }
    local source program
    for source in keyfile=key identity=identity passfile=code; do
        lockbox ls "--$source" box.lbx
        mount.lockbox box.lbx box -o "$source,log=$WORK/box.log" </dev/null
        ! grep -aq "$code" "/proc/$(daemon_of "$WORK/box.lbx")/environ" box.log || fail 'the code shows'
        detach box
    done
    for program in list attach_with; do
        refused 10 'wrong passphrase' "$program" --keyfile other
        refused 10 'group' "$program" --passfile mistyped
    done
    list --keyfile exposed --passfile-any
    ! mountpoint -q box || fail 'mounted all the same'
}

case_a_key_in_the_keyring_is_used_before_asking_until_it_is_forgotten() {
    new_archive box
    cd "$WORK"
    if ! lockbox doctor | shows 'keyring .*available'; then
        refused 2 'keeps no keys' lockbox ls --keyring-cache 10m box.lbx
        note 'no keyrings here: the option is refused'
        return
    fi
    refused 2 'standard input had no passphrase' lockbox ls box.lbx
    refused 1 'takes a time' mount.lockbox -o keyring-cache=never box.lbx box
    mount.lockbox -o "keyring-cache=10m,passfile=$PASSFILE,log=$WORK/box.log" box.lbx box
    echo content >box/file
    detach box
    # Nothing is asked: standard input is empty.
    lockbox ls box.lbx </dev/null | shows -x file
    mount.lockbox -o "log=$WORK/box.log" box.lbx box </dev/null
    detach box
    # What is named counts.
    printf 'hush-hush\n' >wrong
    chmod 600 wrong
    refused 10 'wrong passphrase' lockbox ls --passfile wrong box.lbx
    # The kernel shows it to its owner alone, and it has an end.
    need_user
    local key
    key=lockbox:$(lockbox info box.lbx </dev/null | awk '/^Archive id/ { print $3 }')
    shows "$key" </proc/keys
    ! as_user grep -q "$key" /proc/keys || fail 'another user sees the key'
    ! grep "$key" /proc/keys | awk '$4 == "perm" || $5 != "003f0000"' | grep . || fail 'a key without an end, or for others'
    lockbox forget box.lbx | shows 'is forgotten'
    lockbox forget box.lbx | shows 'was not kept'
    refused 2 'standard input had no passphrase' lockbox ls box.lbx
    # Whoever changed the keys is asked for them again, and who only looked at what would change is not.
    local change
    lockbox key add --passfile "$PASSFILE" --new-keyfile key --generate box.lbx >added
    lockbox key recovery --passfile "$PASSFILE" box.lbx | grep -oE '[0-9]{6}(-[0-9]{6}){8}' >code
    chmod 600 code
    for change in 'key rm box.lbx 1' 'key rekey box.lbx' "passwd --weak-kdf --kdf-memory 1 --new-passfile $PASSFILE box.lbx" \
        "recovery --weak-kdf --kdf-memory 1 --recovery-code code --new-passfile $PASSFILE box.lbx" 'header restore --accept-older box.lbx newer'; do
        lockbox ls --keyring-cache 10m --passfile "$PASSFILE" box.lbx >/dev/null
        lockbox key rekey --dry-run --passfile "$PASSFILE" box.lbx >told
        lockbox ls box.lbx </dev/null >/dev/null
        [[ $change == recovery* ]] || change+=" --passfile $PASSFILE"
        [[ $change != header* ]] || lockbox header backup box.lbx newer
        # shellcheck disable=SC2086
        lockbox $change >changed
        lockbox forget box.lbx | shows 'was not kept' || fail "still kept after: $change"
        refused 2 'standard input had no passphrase' lockbox ls box.lbx
    done
    lockbox ls --keyring-cache 2 --passfile "$PASSFILE" box.lbx >/dev/null
    await empty_again
    ! lockbox forget 2>/dev/null || fail 'forget needs to be told what'
}

empty_again() {
    ! lockbox ls "$WORK/box.lbx" </dev/null >/dev/null 2>&1
}

case_doctor_gives_advice_and_its_exit_code_is_stable() {
    lockbox doctor >"$WORK/words"
    grep -q '^ok .*fuse device' "$WORK/words"
    lockbox doctor --json >"$WORK/json"
    python3 - "$WORK/json" <<'END'
import json, sys
told = json.load(open(sys.argv[1]))
assert told["ok"] is True, told
names = [check["name"] for check in told["checks"]]
for name in ["kernel", "fuse device", "fusermount3", "user_allow_other", "mount program", "memory lock", "clock", "swap",
             "state directory", "runtime directory", "keyring", "sandbox"]:
    assert name in names, name
for check in told["checks"]:
    assert check["state"] in ("ok", "advice", "bad") and check["found"], check
    assert (check["advice"] is None) == (check["state"] == "ok"), check
END
    # Without a device, in a mount namespace of its own.
    expect 2 'keeps lockbox from working' unshare --mount sh -c "mount --bind '$WORK/words' /dev/fuse && exec lockbox doctor"
}
