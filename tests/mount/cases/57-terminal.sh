# What a person sees on a terminal: questions, answers that do not show, mistakes, bars that go away, and nothing of that for programs.
# shellcheck shell=bash disable=SC2317,SC2164

# What is said for as long as a key is derived, which depends on the machine.
SIGN=$'Deriving the key...\r\e[K'

# Secrets begin with a word that no generated passphrase contains.
# seen CODE PATTERN [QUESTION ANSWER]... -- COMMAND...: as the terminal shows it, in $WORK/screen, without the sign that a key is derived. No secret
# stands there.
seen() {
    local code=$1 pattern=$2 got=0 screen
    shift 2
    terminal.py "$@" >"$WORK/all" || got=$?
    screen=$(<"$WORK/all")
    printf '%s\n' "${screen//"$SIGN"/}" >"$WORK/screen"
    [[ $got -eq $code ]] || fail "exit code $got instead of $code: $(cat "$WORK/screen")"
    grep -Eq -- "$pattern" "$WORK/screen" || fail "nothing like '$pattern' in: $(cat "$WORK/screen")"
    ! grep -Eq 'xyzzy|panicked' "$WORK/screen" || fail "a secret or a panic on the terminal: $(cat "$WORK/screen")"
}

case_passphrases_are_asked_for_and_never_shown() {
    cd "$WORK"
    local ask='Passphrase of box.lbx: ' plain='New passphrase of box.lbx: ' again='Repeat it: '
    local new='New passphrase of box.lbx \(Enter for a generated one\): '
    # Good enough that nobody is asked whether it is wanted.
    local good='xyzzy mural stardust pluck'
    local create=(lockbox create --weak-kdf --kdf-memory 1 box.lbx)
    seen 2 '^lockbox: the two passphrases differ; nothing was changed$' "$new" "$good" "$again" xyzzy-xyzzy -- "${create[@]}"
    seen 2 '^lockbox: nothing was typed' "$plain" '' "$again" '' -- "${create[@]}" --quiet
    seen 130 '^New' "$new" ^C -- "${create[@]}"
    [[ ! -e box.lbx ]] || fail 'something was made'
    seen 0 '^New' "$new" "$good" "$again" "$good" -- "${create[@]}"
    same "$(cat screen)" "${new//\\/}
$again
If you lose the passphrase, the files are lost.
For a second way in, print a recovery code: lockbox key recovery box.lbx
Use it as a folder: lockbox mount box.lbx
Deleted files are erased; -o snapshots=hourly:24,daily:7 keeps versions."
    rm box.lbx
    seen 0 "^$plain\$" "$plain" xyzzy "$again" xyzzy -- "${create[@]}" --quiet
    same "$(cat screen)" "$plain
$again"
    # Three tries, each said to be wrong where it is asked; who types nothing gives up.
    local wrong="Wrong passphrase. $ask"
    seen 10 '^lockbox: box.lbx: wrong passphrase or key$' "$ask" xyzzy-xyzzy "$wrong" xyzzyes "$wrong" xyzzyed -- lockbox ls box.lbx
    same "$(grep -c "$ask" screen)" 3
    seen 10 '^lockbox: box.lbx: wrong passphrase or key$' "$ask" xyzzy-xyzzy "$wrong" ^D -- lockbox ls box.lbx
    seen 130 "^$wrong" "$ask" xyzzy-xyzzy "$wrong" ^C -- lockbox ls box.lbx
    seen 0 "^$wrong\$" "$ask" xyzzy-xyzzy "$wrong" xyzzyes "$wrong" xyzzy -- lockbox ls box.lbx
    seen 2 '^lockbox: nothing was typed$' "$ask" ^D -- lockbox ls box.lbx
    seen 0 "^$ask\$" "$ask" xyzzy -- lockbox ls box.lbx
    mkdir box
    seen 10 '^mount.lockbox: .*wrong passphrase' "$ask" xyzzy-xyzzy "$wrong" xyzzyes "$wrong" xyzzyed -- mount.lockbox -o "log=$WORK/box.log" box.lbx box
    seen 0 "^$ask\$" "$ask" xyzzy -- lockbox mount -o "log=$WORK/box.log" box.lbx box
    # What is asked for nothing is not asked for.
    seen 13 'already mounted at' -- lockbox mount box.lbx box
    seen 13 'is in use: process' -- lockbox passwd box.lbx
    seen 0 '^[^ ]*/box  [^ ]*/box.lbx  mounted$' -- lockbox status box
    detach box
    seen 0 'The passphrase is changed' "$ask" xyzzy "$plain" xyzzyed "$again" xyzzyed -- lockbox passwd --quiet --weak-kdf --kdf-memory 1 box.lbx
    seen 0 'Key slot 1 opens' "$ask" xyzzyed "$plain" xyzzy "$again" xyzzy -- lockbox key add --quiet --weak-kdf --kdf-memory 1 --label 'a label' box.lbx
    seen 0 '^ 1  passphrase  .* \+00:00  a label$' "$ask" xyzzy -- lockbox key ls box.lbx
    # What else opens it: kinds, and no labels. A program is told the same as ever, at once.
    printf 'xyzzy\n' >xyzzy
    chmod 600 xyzzy
    lockbox key recovery --passfile xyzzy --label 'in the drawer' box.lbx >/dev/null
    lockbox key add --passfile xyzzy --new-keyfile stick --generate --label 'the stick' box.lbx >/dev/null
    seen 10 '^  typed in place of the passphrase, or a key file \(--keyfile\)$' \
        "$ask" xyzzyes "$wrong" xyzzyes "$wrong" xyzzyes -- lockbox ls box.lbx
    ! grep -q 'drawer\|the stick' screen || fail 'a label shows'
    expect 10 'box.lbx: wrong passphrase or key$' sh -c 'echo xyzzyes | lockbox ls box.lbx'
    # Standard input is something else, so the terminal itself is asked.
    seen 0 "^$ask\$" "$ask" xyzzy -- sh -c 'echo value | lockbox env set box.lbx NAME'
    seen 0 '^value$' "$ask" xyzzy -- lockbox env get box.lbx NAME
}

case_a_weak_passphrase_is_told_and_taken_when_it_is_wanted() {
    cd "$WORK"
    local new='New passphrase of box.lbx.*: ' again='Repeat it: ' good='xyzzy mural stardust pluck'
    local weak='This passphrase is weak: [a-z ]+ guesses find it\. Use it anyway\? \[y/N\] '
    local create=(lockbox create --weak-kdf --kdf-memory 1 box.lbx)
    # Who does not want it is asked for another, as often as needed.
    seen 0 "^$again\$" "$new" xyzzy "$weak" '' "$new" xyzzy "$weak" n "$new" "$good" "$again" "$good" -- "${create[@]}"
    rm box.lbx
    seen 2 'nothing was typed' "$new" xyzzy "$weak" ^D "$new" ^D -- "${create[@]}"
    seen 130 'is weak' "$new" xyzzy "$weak" ^C -- "${create[@]}"
    [[ ! -e box.lbx ]] || fail 'something was made'
    seen 0 "^$again\$" "$new" xyzzy "$weak" y "$again" xyzzy -- "${create[@]}"
    seen 0 'Key slot 1 opens' 'Passphrase of' xyzzy "$new" xyzzyed "$weak" y "$again" xyzzyed -- lockbox key add --weak-kdf --kdf-memory 1 box.lbx
    seen 0 'is changed' 'Passphrase of' xyzzy "$new" xyzzyes 'is weak' y "$again" xyzzyes -- lockbox passwd --weak-kdf --kdf-memory 1 box.lbx
    # The name of the archive is guessed first.
    rm box.lbx
    seen 130 'a few guesses find it' "$new" box "$weak" ^C -- "${create[@]}"
    # Nobody who is no person on a terminal is asked.
    # shellcheck disable=SC2016
    seen 0 "^$again\$" "$new" xyzzy "$again" xyzzy -- sh -c '"$@" 2>said' - "${create[@]}"
    same "$(cat said)" ''
    same "$(printf 'xyzzy\nxyzzy\n' | lockbox passwd --weak-kdf --kdf-memory 1 box.lbx 2>&1 >said)" ''
}

case_a_derivation_that_takes_long_is_told_and_programs_see_nothing() {
    cd "$WORK"
    local good='xyzzy mural stardust pluck' new='New passphrase of box.lbx.*: ' again='Repeat it: ' ask='Passphrase of box.lbx: '
    # 3 GiB go through memory: more than a second, after which the sign comes.
    seen 0 'Use it as a folder' "$new" "$good" "$again" "$good" -- lockbox create --kdf-memory 128 --kdf-passes 24 box.lbx
    grep -qF "$SIGN" all || fail "no sign of work: $(cat all)"
    ! grep -q 'Deriving' screen || fail 'it stays'
    seen 0 "^$ask\$" "$ask" "$good" -- lockbox ls box.lbx
    grep -qF "$SIGN" all || fail "no sign of work: $(cat all)"
    seen 0 "^$ask\$" "$ask" "$good" -- lockbox ls --quiet box.lbx
    ! grep -q 'Deriving' all || fail 'not quiet'
    printf '%s\n' "$good" >xyzzy
    chmod 600 xyzzy
    same "$(lockbox ls --passfile xyzzy box.lbx 2>&1)" ''
    mkdir box
    seen 0 "^$ask\$" "$ask" "$good" -- lockbox mount -o "log=$WORK/box.log" box.lbx box
    grep -qF "$SIGN" all || fail "no sign of work: $(cat all)"
    detach box
}

case_who_types_nothing_gets_words_to_write_down() {
    cd "$WORK"
    local new='New passphrase of box.lbx \(Enter for a generated one\): ' words='\r\n    ([a-z-]+( [a-z-]+){5})\r\n\r\nType it: ' printed
    local options=(--weak-kdf --kdf-memory 1)
    # Who cannot type it has not written it down.
    local not='It does not match. Type it exactly as shown: '
    seen 2 'not the generated one; nothing was changed' "$new" '' "$words" 'xyzzy \1' "$not" '' "$not" xyzzy -- lockbox create "${options[@]}" box.lbx
    seen 2 'nothing was typed' "$new" '' "$words" ^D -- lockbox create "${options[@]}" box.lbx
    [[ ! -e box.lbx ]] || fail 'something was made'
    seen 0 'Write this passphrase down' "$new" '' "$words" xyzzy "$not" '\1' -- lockbox create "${options[@]}" box.lbx
    printed=$(grep -E '^    ' screen)
    same "$(grep -c "${printed:4}" screen)" 1 'it is shown once'
    lockbox ls box.lbx <<<"${printed:4}"
    seen 0 'is changed' 'Passphrase of' "${printed:4}" "$new" '' "$words" '\1' -- lockbox passwd "${options[@]}" box.lbx
    expect 10 'wrong passphrase' sh -c 'echo "$1" | lockbox ls box.lbx' - "${printed:4}"
    lockbox ls box.lbx <<<"$(grep -E '^    ' screen | cut -c 5-)"
    # For a script, which has nothing typed.
    lockbox create "${options[@]}" --generate-passphrase made.lbx >words 2>errors
    same "$(wc -l <words) $(wc -w <words) $(cat errors)" '1 6 '
    lockbox ls made.lbx <words
    chmod 600 words
    # A recovery code with it, which opens the archive.
    lockbox create "${options[@]}" --passfile words --generate-recovery-code coded.lbx >coded 2>errors
    [[ ! -s errors ]] || fail "beside the code: $(cat errors)"
    grep -oE '[0-9]{6}(-[0-9]{6}){8}' coded >code
    chmod 600 code
    lockbox ls --recovery-code code coded.lbx
    same "$(lockbox key ls --passfile words coded.lbx | wc -l)" 2
    expect 1 'generate-passphrase' lockbox create --generate-passphrase --passfile words other.lbx
    expect 14 'No space left' sh -c 'lockbox create --generate-passphrase other.lbx >/dev/full'
    [[ ! -e other.lbx ]] || fail 'an archive that nobody can open'
}

case_changes_of_keys_have_three_tries_too() {
    new_archive box
    cd "$WORK"
    local ask='Passphrase of box.lbx: ' new='New passphrase of box.lbx.*: ' again='Repeat it: ' good='xyzzy mural stardust pluck'
    local wrong="Wrong passphrase. $ask" right secret command
    right=$(cat "$PASSFILE")
    secret=(--weak-kdf --kdf-memory 1)
    cp box.lbx before.lbx
    lockbox header backup box.lbx header
    # Nothing more is asked, and nothing is changed, before the one that opens it is there.
    for command in passwd 'key add' 'key ls' 'key test' 'key recovery' 'key rekey' 'header restore'; do
        local rest=()
        [[ $command != 'header restore' ]] || rest=(header)
        # shellcheck disable=SC2086
        seen 10 'box.lbx: wrong passphrase or key \(it opens with: passphrase\)$' \
            "$ask" xyzzy "$wrong" xyzzyes "$wrong" xyzzyed -- lockbox $command box.lbx "${rest[@]}"
        ! grep -q "$new" screen || fail "asked for a new one: $command"
    done
    seen 10 'wrong passphrase' "$ask" xyzzy "$wrong" xyzzyes "$wrong" ^D -- lockbox key rm box.lbx 0
    same_file box.lbx before.lbx
    # A mistyped recovery code is told as what it is.
    seen 10 'group 1 of the recovery code has a typing error. Passphrase of' \
        "$ask" 123456-123456-123456-123456-123456-123456-123456-123456-123456 'typing error. Passphrase of box.lbx: ' ^D -- lockbox key ls box.lbx
    seen 0 'is changed' "$ask" xyzzy "$wrong" "$right" "$new" "$good" "$again" "$good" -- lockbox passwd "${secret[@]}" box.lbx
    seen 0 'slot 1 opens' "$ask" xyzzyed "$wrong" xyzzy "$wrong" "$good" "$new" "$good" "$again" "$good" -- lockbox key add "${secret[@]}" box.lbx
    seen 0 '^opens key slot 1 ' "$ask" xyzzy "$wrong" "$good" -- lockbox key test box.lbx
    seen 0 'slot 1 passphrase is removed' "$ask" xyzzy "$wrong" "$good" -- lockbox key rm box.lbx 1
    seen 0 'new volume key' "$ask" xyzzy "$wrong" "$good" -- lockbox key rekey box.lbx
    # The new one may come from a file, and a program has one try.
    seen 0 'is changed' "$ask" xyzzy "$wrong" "$good" -- lockbox passwd "${secret[@]}" --new-passfile "$PASSFILE" box.lbx
    expect 10 'wrong passphrase' sh -c 'printf "xyzzy\nxyzzy\n" | lockbox passwd box.lbx'
    lockbox ls --passfile "$PASSFILE" box.lbx
}

case_a_recovery_asks_whose_passphrase_is_replaced() {
    new_archive box
    cd "$WORK"
    local code='Recovery code of box.lbx: ' new='New passphrase of box.lbx.*: ' again='Repeat it: '
    local recover=(lockbox recovery --weak-kdf --kdf-memory 1 box.lbx) good='xyzzy mural stardust pluck' digits wrong
    digits=$(lockbox key recovery --passfile "$PASSFILE" box.lbx | grep -oE '[0-9]{6}(-[0-9]{6}){8}')
    wrong=$(((${digits:2:1} + 1) % 10))
    cp box.lbx before.lbx
    # A code with a mistake is told before anything else is asked.
    seen 2 'group 1 of the recovery code has a typing error' "$code" "${digits:0:2}$wrong${digits:3}" -- "${recover[@]}"
    # The only one is taken without a word, but for one that somebody gave a name.
    mkdir lone named
    cp box.lbx lone
    (cd lone && export XDG_STATE_HOME=$PWD && seen 0 '^Key slot 0 passphrase has the new' "$code" "$digits" "$new" "$good" "$again" "$good" -- "${recover[@]}")
    lockbox key add --passfile "$PASSFILE" --new-passfile "$PASSFILE" --weak-kdf --kdf-memory 1 --label partner box.lbx >added
    cp box.lbx named
    (
        cd named
        export XDG_STATE_HOME=$PWD
        lockbox key rm --passfile "$PASSFILE" box.lbx 0
        cp box.lbx before.lbx
        seen 2 'nothing was changed' "$code" "$digits" 'Replace the passphrase of key slot 2 passphrase "partner"\? \[y, n\] ' n -- "${recover[@]}"
        seen 130 'Replace' "$code" "$digits" 'Replace' ^C -- "${recover[@]}"
        same_file box.lbx before.lbx
    )
    seen 2 'none of these key slots; nothing was changed' "$code" "$digits" 'Number or label.*: ' 1 -- "${recover[@]}"
    seen 0 '^Key slot 2 passphrase "partner" has the new' "$code" "$digits" '\+00:00  partner\r\nNumber or label.*: ' partner \
        "$new" "$good" "$again" "$good" -- "${recover[@]}"
    ! grep -q "$digits" screen || fail 'the code shows'
    printf '%s\n' "$good" >xyzzy
    chmod 600 xyzzy
    same "$(lockbox key test --json --passfile xyzzy box.lbx | grep -o '"slot":[0-9]*')" '"slot":2'
    lockbox ls --passfile "$PASSFILE" box.lbx
    # One is taken after a yes.
    seen 0 '^Key slot 0 passphrase has the new' "$code" "$digits" 'Number or label.*: ' 0 "$new" xyzzy 'is weak' y "$again" xyzzy -- "${recover[@]}"
}

# What is left of a screen on which a bar was drawn: after its last wiping there is text alone.
left_of_screen() {
    python3 -c 'import re, sys
left = re.split(r"\x1b\[[0-9;?]*[A-Za-z]|\r", open("screen", errors="replace").read())[-1]
assert "\x1b" not in left and "%" not in left, left
print(left.strip())'
}

case_bars_go_away_with_a_word_and_programs_get_neither_bars_nor_colours() {
    new_archive box
    cd "$WORK"
    head -c 30000000 /dev/urandom >large
    local command
    for command in 'add box.lbx large' 'check --full box.lbx' 'extract box.lbx --to out' 'compact box.lbx' 'key rekey box.lbx'; do
        # shellcheck disable=SC2086
        seen 0 '' -- env "LOCKBOX_PASSFILE=$PASSFILE" lockbox $command
        left_of_screen >left
        case $command in
            add*) grep -q '^added 1 file, 28 MiB' left ;;
            check*) grep -q 'sound' left ;;
            extract*) grep -q '^extracted 1 file, 28 MiB' left ;;
        esac
    done
    export LOCKBOX_PASSFILE=$PASSFILE
    for command in 'ls -lR box.lbx' 'check --full box.lbx' 'info box.lbx' 'key ls box.lbx' 'extract box.lbx --to again' 'compact box.lbx' \
        'ls missing.lbx' --help 'key --help' 'frobnicate' doctor status 'status --all'; do
        # shellcheck disable=SC2086
        lockbox $command >plain 2>&1 || true
        ! grep -q $'[\x1b\r]' plain || fail "control characters for a program: $command"
        [[ ! -s plain || $(tail -c 1 plain | od -An -tx1) == ' 0a' ]] || fail "no line end: $command"
    done
}

case_times_and_sizes_are_readable_on_a_terminal_and_exact_elsewhere() {
    new_archive box
    cd "$WORK"
    head -c 30000000 /dev/urandom >large
    export LOCKBOX_PASSFILE=$PASSFILE TZ=IST-5:30
    local moment='20..-..-.. ..:..:..'
    lockbox add box.lbx large
    seen 0 "^Last commit  *$moment \\+05:30\$" -- lockbox info box.lbx
    seen 0 '^In use  *2[89] MiB$' -- lockbox info box.lbx
    lockbox info box.lbx >plain
    grep -q "^Last commit  *$moment UTC\$" plain
    grep -Eq '^In use +[0-9]{8} bytes$' plain
    lockbox snapshot create box.lbx first >/dev/null
    seen 0 "^$moment \\+05:30 .*  0 bytes held  first\$" -- lockbox snapshot ls box.lbx
    lockbox snapshot ls box.lbx | shows "^$moment UTC .*  0 bytes held  first\$"
    attach box memory=64M
    seen 0 "^Mounted since  *$moment \\+05:30\$" -- lockbox status --all box
    seen 0 '^Memory .* of 64 MiB; ' -- lockbox status --all box
    lockbox status --all box >plain
    grep -q "^Mounted since  *$moment UTC\$" plain
    grep -q '^Memory .* of 67108864 bytes; ' plain
    detach box
}

case_a_prompt_that_is_left_by_a_signal_restores_the_echo() {
    new_archive box
    python3 - "$WORK/box.lbx" "$(cat "$PASSFILE")" <<'PYTHON'
import fcntl, os, select, signal, subprocess, sys, termios, time

archive, passphrase = sys.argv[1:]
environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKBOX_")}


def echo():
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)


def await_so(what, so):
    for _ in range(12_000):
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
# Nobody stops a session without a shell that would go on; the process stops, or asks again.
text = b""


def asks_again():
    global text
    while select.select([kept], [], [], 0)[0]:
        text += os.read(kept, 4096)
    return text.count(b"Passphrase of") >= 2


await_so("asked again", lambda: state(child) == "T" or asks_again())
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

# A host that stands still: what waits for it says so, and goes on with it.
case_what_takes_long_is_said_and_wiped() {
    mkdir "$WORK/host" "$WORK/box"
    truncate -s 100M "$WORK/host.image"
    mkfs.ext4 -q -m 0 "$WORK/host.image"
    mount -o loop "$WORK/host.image" "$WORK/host"
    create "$WORK/host/box.lbx"
    mount.lockbox "$WORK/host/box.lbx" "$WORK/box" -o "passfile=$PASSFILE,log=$WORK/box.log"
    echo first >"$WORK/box/file"
    # goes_on SENTENCE COMMAND: Enter ends the standstill, and so does the end of the terminal: what is frozen would outlive everything.
    goes_on() {
        # shellcheck disable=SC2016
        seen 0 "$1" "$1" '' -- sh -c 'trap "fsfreeze --unfreeze \"$1\"" HUP; fsfreeze --freeze "$1"; sh -c "$2" & read -r _; fsfreeze --unfreeze "$1"; wait $!' sh "$WORK/host" "$2"
        grep -qF $'\r\e[K' "$WORK/screen" || fail 'the sentence stays'
    }
    goes_on 'Waiting for the daemon\.\.\.' "lockbox snapshot create '$WORK/box' one"
    echo second >"$WORK/box/file"
    goes_on 'Restoring\.\.\.' "lockbox snapshot restore '$WORK/box' one file"
    same "$(cat "$WORK/box/file")" first
    lockbox umount "$WORK/box"
    goes_on 'Removing\.\.\.' "lockbox snapshot rm --passfile '$PASSFILE' '$WORK/host/box.lbx' one"
    same "$(lockbox snapshot ls --passfile "$PASSFILE" "$WORK/host/box.lbx" | wc -l)" 1
    umount "$WORK/host"
}
