# What a person sees on a terminal: questions, answers that do not show, mistakes, bars that go away, and nothing of that for programs.
# shellcheck shell=bash disable=SC2317,SC2164

# seen CODE PATTERN [QUESTION ANSWER]... -- COMMAND...: as the terminal shows it, in $WORK/screen. No secret stands there.
seen() {
    local code=$1 pattern=$2 got=0
    shift 2
    terminal.py "$@" >"$WORK/screen" || got=$?
    [[ $got -eq $code ]] || fail "exit code $got instead of $code: $(cat "$WORK/screen")"
    grep -Eq -- "$pattern" "$WORK/screen" || fail "nothing like '$pattern' in: $(cat "$WORK/screen")"
    ! grep -Eq 'hush|panicked' "$WORK/screen" || fail "a secret or a panic on the terminal: $(cat "$WORK/screen")"
}

case_passphrases_are_asked_for_and_never_shown() {
    cd "$WORK"
    local ask='Passphrase of box.lbx: ' new='New passphrase of box.lbx: ' again='The same again: '
    local create=(lockbox create --weak-kdf --kdf-memory 1 box.lbx)
    seen 2 '^lockbox: the two passphrases differ; nothing was changed$' "$new" hush "$again" hush-hush -- "${create[@]}"
    seen 2 '^lockbox: the passphrase is empty' "$new" '' "$again" '' -- "${create[@]}"
    seen 130 "^$new" "$new" ^C -- "${create[@]}"
    [[ ! -e box.lbx ]] || fail 'something was made'
    seen 0 "^$new\$" "$new" hush "$again" hush -- "${create[@]}"
    same "$(cat screen)" "$new
$again"
    seen 10 '^lockbox: box.lbx: wrong passphrase or key$' "$ask" hush-hush -- lockbox ls box.lbx
    seen 2 '^lockbox: nothing was typed$' "$ask" ^D -- lockbox ls box.lbx
    seen 0 "^$ask\$" "$ask" hush -- lockbox ls box.lbx
    mkdir box
    seen 10 '^mount.lockbox: .*wrong passphrase' "$ask" hush-hush -- mount.lockbox -o "log=$WORK/box.log" box.lbx box
    seen 0 "^$ask\$" "$ask" hush -- lockbox mount -o "log=$WORK/box.log" box.lbx box
    # What is asked for nothing is not asked for.
    seen 13 'already mounted at' -- lockbox mount box.lbx box
    seen 13 'is in use: process' -- lockbox passwd box.lbx
    seen 0 '^Mount point  *.*/box$' -- lockbox status box
    detach box
    seen 0 'The passphrase is changed' "$ask" hush "$new" hushed "$again" hushed -- lockbox passwd --weak-kdf --kdf-memory 1 box.lbx
    seen 0 'Key slot 1 opens' "$ask" hushed "$new" hush "$again" hush -- lockbox key add --weak-kdf --kdf-memory 1 --label 'a label' box.lbx
    seen 0 '^ 1  passphrase  .* UTC  a label$' "$ask" hush -- lockbox key ls box.lbx
    # Standard input is something else, so the terminal itself is asked.
    seen 0 "^$ask\$" "$ask" hush -- sh -c 'echo value | lockbox env set box.lbx NAME'
    seen 0 '^value$' "$ask" hush -- lockbox env get box.lbx NAME
}

case_a_recovery_asks_whose_passphrase_is_replaced() {
    new_archive box
    cd "$WORK"
    local code='Recovery code of box.lbx: ' new='New passphrase of box.lbx: ' again='The same again: '
    local recover=(lockbox recovery --weak-kdf --kdf-memory 1 box.lbx) digits wrong
    digits=$(lockbox key recovery --passfile "$PASSFILE" box.lbx | grep -oE '[0-9]{6}(-[0-9]{6}){8}')
    wrong=$(((${digits:2:1} + 1) % 10))
    cp box.lbx before.lbx
    # A code with a mistake is told before anything else is asked.
    seen 2 'group 1 of the recovery code has a typing error' "$code" "${digits:0:2}$wrong${digits:3}" -- "${recover[@]}"
    seen 2 'nothing was changed' "$code" "$digits" 'Replace the passphrase of key slot 0 passphrase\? \[y, n\] ' n -- "${recover[@]}"
    seen 130 'Replace' "$code" "$digits" 'Replace' ^C -- "${recover[@]}"
    same_file box.lbx before.lbx
    lockbox key add --passfile "$PASSFILE" --new-passfile "$PASSFILE" --weak-kdf --kdf-memory 1 --label partner box.lbx >added
    seen 2 'none of them; nothing was changed' "$code" "$digits" 'Number or label.*: ' 1 -- "${recover[@]}"
    seen 0 '^Key slot 2 passphrase "partner" has the new' "$code" "$digits" 'UTC  partner\r\nNumber or label.*: ' partner \
        "$new" hush "$again" hush -- "${recover[@]}"
    ! grep -q "$digits" screen || fail 'the code shows'
    printf 'hush\n' >hush
    chmod 600 hush
    same "$(lockbox key test --json --passfile hush box.lbx | grep -o '"slot":[0-9]*')" '"slot":2'
    lockbox ls --passfile "$PASSFILE" box.lbx
    # One is taken after a yes.
    seen 0 '^Key slot 0 passphrase has the new' "$code" "$digits" 'Number or label.*: ' 0 "$new" hush "$again" hush -- "${recover[@]}"
}

# What is left of a screen on which a bar was drawn: after its last wiping there is text alone.
left_of_screen() {
    python3 -c 'import re, sys
left = re.split(r"\x1b\[[0-9;?]*[A-Za-z]|\r", open("screen", errors="replace").read())[-1]
assert "\x1b" not in left and "%" not in left, left
print(left.strip())'
}

case_bars_go_away_and_programs_get_neither_bars_nor_colours() {
    new_archive box
    cd "$WORK"
    head -c 30000000 /dev/urandom >large
    local command
    for command in 'add box.lbx large' 'check --full box.lbx' 'extract box.lbx --to out' 'compact box.lbx' 'key rekey box.lbx'; do
        # shellcheck disable=SC2086
        seen 0 '' -- env "LOCKBOX_PASSFILE=$PASSFILE" lockbox $command
        left_of_screen >left
        [[ $command != check* ]] || grep -q 'sound' left
    done
    export LOCKBOX_PASSFILE=$PASSFILE
    for command in 'ls -lR box.lbx' 'check --full box.lbx' 'info box.lbx' 'key ls box.lbx' 'extract box.lbx --to again' 'compact box.lbx' \
        'ls missing.lbx' --help 'key --help' 'frobnicate' doctor status; do
        # shellcheck disable=SC2086
        lockbox $command >plain 2>&1 || true
        ! grep -q $'[\x1b\r]' plain || fail "control characters for a program: $command"
        [[ ! -s plain || $(tail -c 1 plain | od -An -tx1) == ' 0a' ]] || fail "no line end: $command"
    done
}

case_a_prompt_that_is_left_by_a_signal_restores_the_echo() {
    new_archive box
    python3 - "$WORK/box.lbx" "$(cat "$PASSFILE")" <<'PYTHON'
import fcntl, os, signal, subprocess, sys, termios, time

archive, passphrase = sys.argv[1:]
environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKBOX_")}


def echo():
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)


def await_so(what, so):
    for _ in range(1000):
        if so():
            return
        time.sleep(0.01)
    sys.exit(f"{what}: never so")


def asked():
    global kept, terminal
    kept, terminal = os.openpty()

    def own_session():
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    child = subprocess.Popen(
        ["lockbox", "info", archive], env=environment, stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=own_session
    )
    await_so("no echo", lambda: not echo())
    return child


def state(child):
    with open(f"/proc/{child.pid}/stat", encoding="ascii") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "ctrl-c"):
    child = asked()
    if name == "ctrl-c":
        os.write(kept, b"half\x03")
    else:
        child.send_signal(getattr(signal, name))
    ended = child.wait(20)
    assert ended == -getattr(signal, name, signal.SIGINT), (name, ended)
    assert echo(), f"{name}: the echo stays off"

child = asked()
child.send_signal(signal.SIGTSTP)
# Nobody stops a session without a shell that would go on; the process stops, or the signal does nothing.
await_so("asked again", lambda: state(child) == "T" or not echo())
child.send_signal(signal.SIGCONT)
await_so("no echo again", lambda: not echo())
os.write(kept, passphrase.encode() + b"\n")
assert child.wait(60) == 0
assert echo(), "the echo stays off after an answer"

child = asked()
os.write(kept, b"x" * 4090 + b"yyyyyyyyyyyyyyyy\n")
assert child.wait(60) not in (0, 10), "a line that the terminal cut was taken for a passphrase"
PYTHON
}
