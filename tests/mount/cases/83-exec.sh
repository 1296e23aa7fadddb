# Programs that run in an archive which is mounted for them alone.
# shellcheck shell=bash disable=SC2016,SC2317,SC2164

# Without a passphrase on standard input, which is the program's.
run_in() {
    lockbox exec --passfile "$PASSFILE" "$WORK/$1.lbx" -- "${@:2}"
}

# The same in the background, so that its process id is the command's.
start_in() {
    in_background exec lockbox exec --passfile "$PASSFILE" "$WORK/$1.lbx" -- "${@:2}"
}

has_no_directory() {
    [[ -z $(find /run -name 'lockbox-exec.*') ]]
}

# Says where it is, and waits to be told to go on.
WAITING='pwd >"$0/ready.new"; mv "$0/ready.new" "$0/ready"; until [ -e "$0/go" ]; do sleep 0.02; done'

show() {
    lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" "$1"
}

case_a_program_runs_in_an_archive_that_nobody_else_sees() {
    local point
    new_archive box
    start_in box sh -c "echo content >file; mkdir below; $WAITING" "$WORK"
    await test -e "$WORK/ready"
    point=$(cat "$WORK/ready")
    # To everybody else it is an empty directory, and none of their mounts.
    same "$(ls -A "$point")" ''
    ! grep -qF "$point" /proc/self/mountinfo || fail 'the mount is seen outside'
    expect 13 'in use' lockbox ls --passfile "$PASSFILE" "$WORK/box.lbx"
    expect 13 "already mounted in another namespace, as by 'lockbox exec', by process" run_in box true
    expect 13 "has it mounted in another namespace, as for 'lockbox exec'" lockbox ls --passfile "$PASSFILE" "$WORK/box.lbx"
    grep -q "/box.lbx  mounted in another namespace, as by 'lockbox exec'" <<<"$(lockbox status "$WORK/box.lbx")" || fail 'status does not say so'
    grep -q '"state":"elsewhere"' <<<"$(lockbox status --json "$WORK/box.lbx")" || fail 'JSON calls it something else'
    touch "$WORK/go"
    wait "${BACKGROUND[0]}"
    [[ ! -e $point ]] || fail 'the directory stayed'
    same "$(show file)" content
    # Nothing that it inherits tells where a passphrase is.
    LOCKBOX_PASSFILE=$PASSFILE LOCKBOX_PASSCOMMAND=false run_in box env >"$WORK/environment"
    grep -q ^PATH= "$WORK/environment"
    ! grep LOCKBOX_PASS "$WORK/environment" || fail 'the program inherits the way to the passphrase'
    # What is piped in and out is the program's.
    same "$(echo piped | run_in box tee below/told)" piped
    same "$(show below/told)" piped
    terminal.py 'Passphrase of .*: ' "$PASSPHRASE" -- \
        sh -c 'echo "into a pipe" | lockbox exec "$0" -- tee below/piped | cat' "$WORK/box.lbx" >"$WORK/screen" || fail "$(cat "$WORK/screen")"
    same "$(show below/piped)" 'into a pipe'
    # But the passphrase is not.
    lockbox exec --passfd 7 "$WORK/box.lbx" -- sh -c 'ls /proc/self/fd; ls -l /proc/$$/fd' 7<"$PASSFILE" >"$WORK/descriptors"
    ! grep -E '^7$|passphrase' "$WORK/descriptors" || fail 'the program has the passphrase'
    # A program of the archive itself, by its path there; mount options.
    run_in box sh -c 'printf "#!/bin/sh\necho itself\n" >tool; chmod 755 tool'
    same "$(run_in box ./tool)" itself
    expect 2 'Read-only file system' lockbox exec -o ro --passfile "$PASSFILE" "$WORK/box.lbx" -- sh -c 'echo >file'
    check_full box
}

case_a_program_in_an_archive_ends_with_its_own_code() {
    local status=0
    new_archive box
    run_in box sh -c 'exit 7' || status=$?
    same "$status" 7
    status=0
    run_in box sh -c 'kill -9 $$' || status=$?
    same "$status" 137
    expect 127 'cannot run no-such-program: No such file' run_in box no-such-program
    expect 126 'cannot run /etc/passwd: Permission denied' run_in box /etc/passwd
    expect 10 'wrong passphrase' lockbox exec --passcommand 'echo wrong' "$WORK/box.lbx" -- true
    expect 19 'No such file' lockbox exec --passfile "$PASSFILE" "$WORK/none.lbx" -- true
    # Without a terminal nobody is asked, and standard input is the program's.
    expect 1 'standard input is not for the passphrase' setsid --wait lockbox exec "$WORK/box.lbx" -- true
    expect 1 'standard input is not for the passphrase' lockbox exec --passfd 0 "$WORK/box.lbx" -- true
    expect 1 'required|Usage' lockbox exec --passfile "$PASSFILE" "$WORK/box.lbx"
    same "$(find /run -name 'lockbox-exec.*')" '' 'a directory stayed'
    lockbox check --passfile "$PASSFILE" "$WORK/box.lbx"
}

case_a_program_never_runs_without_its_archive() {
    local option
    new_archive box
    for option in nofail foreground remount,ro passfd=7; do
        expect 1 'is not for .lockbox exec.' lockbox exec -o "rw,$option" --passfile "$PASSFILE" "$WORK/none.lbx" -- touch "$WORK/ran"
    done
    # Whatever the mount program says.
    mkdir "$WORK/bin"
    cp "$(command -v lockbox)" "$WORK/bin"
    printf '#!/bin/sh\nexit 0\n' >"$WORK/bin/mount.lockbox"
    chmod 755 "$WORK/bin/mount.lockbox"
    expect 15 'mount failed; program not started' "$WORK/bin/lockbox" exec "$WORK/box.lbx" -- touch "$WORK/ran"
    [[ ! -e $WORK/ran ]] || fail 'the program ran'
}

case_an_archive_is_mounted_until_the_last_of_its_programs_ends() {
    local status=0 pid
    new_archive box
    # The one that was started ends, what it started does not.
    start_in box sh -c "($WAITING; echo late >late) & exit 3" "$WORK"
    await test -e "$WORK/ready"
    expect 13 'in use' lockbox ls --passfile "$PASSFILE" "$WORK/box.lbx"
    touch "$WORK/go"
    wait "${BACKGROUND[0]}" || status=$?
    same "$status" 3
    same "$(show late)" late
    # Whoever does not want to wait for it gets the terminal back; what is written is kept.
    rm "$WORK/go" "$WORK/ready"
    start_in box sh -c "($WAITING; echo later >later; sync -f .) & echo started >started" "$WORK" 2>"$WORK/said"
    await test -e "$WORK/ready"
    pid=$(daemon_of "$WORK/box.lbx")
    # The signal is for the waiting alone: until it does so, it is noted for the program.
    until_left() { kill -INT "${BACKGROUND[1]}" 2>/dev/null || true; ! kill -0 "${BACKGROUND[1]}" 2>/dev/null; }
    await until_left
    status=0
    wait "${BACKGROUND[1]}" || status=$?
    same "$status" 130
    touch "$WORK/go"
    await gone "$pid"
    same "$(show started) $(show later)" 'started later'
    check_full box
}

case_a_program_in_an_archive_gets_the_signals_that_are_sent() {
    local status=0 pid
    new_archive box
    start_in box sh -c 'trap "echo told >told; exit 9" TERM; '"$WAITING" "$WORK"
    await test -e "$WORK/ready"
    # The keyboard's signal goes to all that run in its foreground, so the program has it already.
    kill -INT "${BACKGROUND[0]}"
    kill -TERM "${BACKGROUND[0]}"
    wait "${BACKGROUND[0]}" || status=$?
    same "$status" 9
    same "$(show told)" told
    # Killed, it leaves a mount that only its programs see, and that ends with them.
    rm "$WORK/ready"
    in_background exec lockbox exec -o log="$WORK/log" --passfile "$PASSFILE" "$WORK/box.lbx" -- \
        sh -c "$WAITING; echo kept >kept" "$WORK"
    await test -e "$WORK/ready"
    pid=$(daemon_of "$WORK/box.lbx")
    kill -9 "${BACKGROUND[1]}"
    wait "${BACKGROUND[1]}" || true
    await grep -q 'cannot unmount the unused archive: something below it is open' "$WORK/log"
    touch "$WORK/go"
    await gone "$pid"
    await has_no_directory
    same "$(show kept)" kept
    check_full box
}

case_a_command_killed_before_its_mount_leaves_none() {
    new_archive box
    in_background exec lockbox exec -o log="$WORK/log" \
        --passcommand ": >'$WORK/asked'; until [ -e '$WORK/go' ]; do sleep 0.02; done; cat '$PASSFILE'" "$WORK/box.lbx" -- true
    await test -e "$WORK/asked"
    kill -9 "${BACKGROUND[0]}"
    touch "$WORK/go"
    await grep -qs 'unmounted: the command that mounted it was killed' "$WORK/log"
    await has_no_directory
    check_full box
}

# trace PROCESS [INSIDE]: looks into it as the same user, from outside of the namespaces of INSIDE or with all rights in them.
trace() {
    as_user python3 -c '
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
process, *inside = sys.argv[1:]
for name in ("user", "mnt") if inside else ():
    if libc.setns(os.open(f"/proc/{inside[0]}/ns/{name}", os.O_RDONLY), 0) != 0:
        sys.exit("no way in")
with open(f"/proc/{process}/maps") as maps:
    print(maps.read())
if libc.ptrace(0x4206, int(process), None, None) != 0:
    raise PermissionError
' "$@"
}

case_who_asks_for_the_passphrase_of_a_program_cannot_be_traced_by_its_user() {
    need_user
    mkdir "$WORK/users"
    chmod 777 "$WORK/users"
    install -m 600 -o "$TEST_USER" "$PASSFILE" "$WORK/users/pass"
    as_user lockbox create --weak-kdf --kdf-memory 1 --passfile "$WORK/users/pass" "$WORK/users/traced.lbx"
    cd "$WORK/users"
    in_background as_user lockbox exec --passcommand ': >asked; until [ -e go ]; do sleep 0.02; done; cat pass' traced.lbx -- true
    await test -e asked
    expect 1 'PermissionError' trace "$(pgrep -u "$TEST_USER" -f "^[^ ]*mount.lockbox .* traced.lbx ")"
    touch go
    wait "${BACKGROUND[0]}"
}

case_a_program_of_a_user_runs_with_a_key_of_the_keyring() {
    need_user
    if ! lockbox doctor | shows 'keyring .*available'; then
        note 'no keyrings here'
        return
    fi
    mkdir "$WORK/users"
    chmod 777 "$WORK/users"
    install -m 600 -o "$TEST_USER" "$PASSFILE" "$WORK/users/pass"
    as_user lockbox create --weak-kdf --kdf-memory 1 --passfile "$WORK/users/pass" "$WORK/users/box.lbx"
    as_user lockbox exec --keyring-cache 10m --passfile "$WORK/users/pass" "$WORK/users/box.lbx" -- true
    # What a program in the namespace keeps is there for those outside.
    as_user lockbox ls "$WORK/users/box.lbx" </dev/null
    as_user lockbox exec "$WORK/users/box.lbx" -- touch made </dev/null
    same "$(as_user lockbox ls "$WORK/users/box.lbx" </dev/null)" made
    as_user lockbox forget "$WORK/users/box.lbx"
}

case_a_user_needs_no_root_to_run_a_program_in_an_archive() {
    local point daemon program status=0
    need_user
    mkdir "$WORK/users"
    chmod 777 "$WORK/users"
    install -m 600 -o "$TEST_USER" "$PASSFILE" "$WORK/users/pass"
    as_user lockbox create --weak-kdf --kdf-memory 1 --passfile "$WORK/users/pass" "$WORK/users/box.lbx"
    as() { as_user lockbox exec --passfile "$WORK/users/pass" "$WORK/users/box.lbx" -- "$@"; }
    in_background as sh -c "id -u >id; grep CapEff /proc/self/status >capabilities; $WAITING" "$WORK/users"
    await test -e "$WORK/users/ready"
    point=$(cat "$WORK/users/ready")
    same "$(ls -A "$point")" ''
    # The daemon has the key, which is for none of the user's programs, inside or outside.
    daemon=$(daemon_of "$WORK/users/box.lbx")
    # It starts others, which are copies of it for a moment.
    program=$(pgrep --oldest -u "$TEST_USER" -f "^sh -c id -u >id.*$WORK/users")
    trace "$program" >"$WORK/maps"
    expect 1 'PermissionError' trace "$daemon"
    expect 1 'PermissionError' trace "$daemon" "$program"
    touch "$WORK/users/go"
    wait "${BACKGROUND[0]}"
    same "$(as cat id)" "$(id -u "$TEST_USER")"
    # It is the user it was, with no right that it had not.
    same "$(as cut -f 2 capabilities)" 0000000000000000
    same "$(as stat -c %U id)" "$TEST_USER"
    [[ ! -e $point ]] || fail 'the directory stayed'
    # Where namespaces are forbidden, that is said. By root of one that may make no other.
    expect 15 'users cannot make namespaces on this machine \(No space left on device\): run this as root' \
        unshare --user --map-root-user sh -c 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -sys_admin "$@"' sh \
        lockbox exec --passfile "$PASSFILE" "$WORK/users/box.lbx" -- true
    lockbox check --full --passfile "$PASSFILE" "$WORK/users/box.lbx" || status=$?
    same "$status" 0
}
