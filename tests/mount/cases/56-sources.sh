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
    local pid
    new_archive box
    mkdir "$WORK/credentials"
    install -m 400 "$PASSFILE" "$WORK/credentials/box"
    mounted() {
        mountpoint -q "$WORK/box" || fail "not mounted with: $*"
        pid=$(daemon_of "$WORK/box.lbx")
        shows_nothing "$pid"
        # What the mounting command read the secret from is not open in the daemon.
        ! readlink "/proc/$pid"/fd/* | grep -qxF "$PASSFILE" || fail 'the daemon holds the passfile open'
        [[ ! -e /proc/$pid/fd/9 ]] || [[ $(readlink "/proc/$pid/fd/9") != pipe:* ]] || fail 'the daemon holds the pipe open'
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
    with --passcommand "printf '%s,' '' | cut -d, -f2; cat $PASSFILE | tr -d ,"  </dev/null
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
    lockbox mount -o "log=$WORK/box.log" --passfd 9 "$WORK/box.lbx" "$WORK/box" 9< <(cat "$PASSFILE")
    mounted lockbox
}

case_wrong_and_hostile_sources_are_one_sentence() {
    new_archive box
    cd "$WORK"
    printf 'hush-hush\n' >wrong
    printf '\n' >empty
    chmod 600 wrong empty
    cp "$PASSFILE" open
    chmod 644 open
    mkdir credentials
    mkfifo -m 600 fifo
    # Each program, each command: the same answer.
    local program
    list() { lockbox ls "$@" box.lbx; }
    attach_with() { mount.lockbox "$@" box.lbx box; }
    for program in list attach_with; do
        refused 10 'wrong password' "$program" --passfile wrong
        refused 2 'the passphrase is empty' "$program" --passfile empty
        refused 2 'the passphrase is empty' "$program" --passfile /dev/null
        refused 2 'No such file' "$program" --passfile missing
        refused 2 'Is a directory' "$program" --passfile credentials
        refused 2 'longer than 64 KiB' "$program" --passfile /dev/zero
        refused 2 'may be read by others' "$program" --passfile open
        refused 2 'Bad file' "$program" --passfd 77
        refused 1 'passfd' "$program" --passfd 1
        refused 2 'longer than 64 KiB' "$program" --passcommand 'yes hush-hush'
        refused 2 'exit status: 3' "$program" --passcommand 'echo hush-hush; exit 3'
        refused 2 'the passphrase is empty' "$program" --passcommand true
        refused 10 'wrong password' "$program" --passcommand 'echo hush-hush'
        refused 2 'CREDENTIALS_DIRECTORY' "$program" --credential box
        refused 1 'without a path' "$program" --credential ../wrong
        refused 1 'both give the passphrase' "$program" --passfile wrong --passcommand 'echo hush-hush'
        # Nothing on standard input, and none at all.
        refused 2 'the passphrase is empty' "$program"
        refused 2 'is not there to be run' env PATH="$WORK/credentials" "$(type -P lockbox)" ls --ask-password box.lbx
    done
    export CREDENTIALS_DIRECTORY=$WORK/credentials
    refused 2 'No such file' list --credential missing
    unset CREDENTIALS_DIRECTORY
    refused 1 'without a path' mount.lockbox -o credential=/etc/passwd box.lbx box
    refused 1 'passfd' mount.lockbox -o passfd=hush box.lbx box
    refused 1 'both give the passphrase' mount.lockbox -o passfile=wrong --passfd 0 box.lbx box
    list --passfile open --passfile-any >/dev/null
    # A directory as a descriptor, a closed one, an endless one.
    exec 8<credentials 7</dev/zero
    refused 2 'Is a directory' list --passfd 8
    refused 2 'longer than 64 KiB' list --passfd 7
    exec 8<&- 7<&-
    lockbox ls box.lbx <&- 2>stderr && fail 'a closed standard input opened the archive'
    grep -q 'the passphrase is empty' stderr
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
deadline = time.time() + 30
while time.time() < deadline:
    for name in glob.glob("/run/systemd/ask-password/ask.*"):
        fields = dict(line.split("=", 1) for line in open(name).read().splitlines() if "=" in line)
        if fields.get("Id") == "lockbox":
            print(fields["Message"])
            answer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            answer.sendto(b"+" + sys.argv[1].encode(), fields["Socket"])
            sys.exit()
    time.sleep(0.02)
sys.exit("nobody asked")
END
        BACKGROUND+=($!)
    fi
    mount.lockbox "$WORK/box.lbx" "$WORK/box" -o "ask-password,log=$WORK/box.log" </dev/null
    pid=$(daemon_of "$WORK/box.lbx")
    shows_nothing "$pid"
    detach box
    [[ ! -e $WORK/asked ]] || grep -qF "Passphrase of $WORK/box.lbx" "$WORK/asked" || fail "asked: $(cat "$WORK/asked")"
}

# While the passphrase is being worked on, for as long as that takes.
case_no_process_shows_a_secret_while_it_unlocks() {
    local pid
    lockbox create --weak-kdf --kdf-memory 512 --kdf-passes 3 --passfile "$PASSFILE" "$WORK/box.lbx"
    lockbox ls --passfile "$PASSFILE" "$WORK/box.lbx" &
    pid=$!
    BACKGROUND+=("$pid")
    await 10 grep -qa -- --passfile "/proc/$pid/cmdline"
    shows_nothing "$pid"
    # Nor may its user look into it: the files of an undumpable process belong to root.
    wait "$pid"
}
