# Every source of secrets against everything that can be in its place: one sentence, the right exit code, at once, and nothing secret shown.
# shellcheck shell=bash disable=SC2317,SC2164

# refused CODE PATTERN COMMAND...: as expect, one sentence, and what was said has no secret in it. Nor did it wait for somebody who may come: the programs
# do that for a minute.
refused() {
    local began=$SECONDS
    expect "$@"
    ! grep -aq -e "$PASSPHRASE" -e hush -e GQ9778 "$WORK/stdout" "$WORK/stderr" || fail "a secret in the output of: ${*:3}"
    same "$(grep -c . "$WORK/stderr")" 1 "not one sentence: $(cat "$WORK/stderr")"
    ! grep -q '[^[:print:]]' "$WORK/stderr" || fail "not for a terminal: $(od -c "$WORK/stderr")"
    ((SECONDS - began < 60)) || fail "took $((SECONDS - began)) s: ${*:3}"
}

# Files that may stand where a secret should, each by what is wrong with it.
bad_files() {
    mkdir directory
    ln -s missing dangling
    ln -s loop loop
    printf 'hush-hush\n' >exposed
    printf 'hush-hush\n' >text
    : >empty
    printf '\n' >blank
    printf '\r\n' >crlf
    printf 'hush\0hush\n' >nul
    printf 'hush-hush\xff\xfe\x80\n' >binary
    head -c 1200000 /dev/zero | tr '\0' h >long
    python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
    mkfifo -m 644 fifo
    chmod 600 text empty blank crlf nul binary long socket
    chmod 644 exposed
}

# What every file that is read as a secret is refused for, before anything in it counts.
refused_as_a_file() {
    local what
    refused 2 'No such file' "$@"=missing
    refused 2 'No such file' "$@"=dangling
    refused 2 'symbolic links' "$@"=loop
    refused 2 'Is a directory|is a directory' "$@"=directory
    refused 2 'No such device' "$@"=socket
    refused 2 'No such file' "$@"="$(printf 'a\033[2Jb\nc')"
    for what in exposed fifo; do
        refused 2 "$what may be read by others \(mode 0644\): protect it with 'chmod 600'" "$@"=$what
    done
}

list() {
    lockbox ls box.lbx "$@"
}

attach_with() {
    mount.lockbox box.lbx box "$@"
}

case_no_file_that_is_no_passphrase_opens_or_shows() {
    local program option
    new_archive box
    cd "$WORK"
    bad_files
    for program in list attach_with; do
        for option in --passfile --recovery-code; do
            refused_as_a_file "$program" "$option"
            refused 2 'longer than 64 KiB' "$program" "$option=long"
            refused 2 'longer than 64 KiB' "$program" "$option=/dev/zero"
        done
        for option in empty blank crlf /dev/null; do
            refused 2 "$option has no passphrase: it is empty" "$program" "--passfile=$option"
        done
        # Any bytes may be a passphrase, and these are none of this archive.
        for option in text nul binary; do
            refused 10 'wrong passphrase' "$program" "--passfile=$option"
        done
        for option in empty blank crlf text nul binary /dev/null; do
            refused 2 'recovery code' "$program" "--recovery-code=$option"
        done
    done
    refused 2 'may be read by others' env LOCKBOX_PASSFILE=exposed lockbox ls box.lbx
    refused 2 'empty has no passphrase: it is empty' env LOCKBOX_PASSFILE=empty lockbox ls box.lbx
    # The same as files for new secrets.
    add() { lockbox key add --passfile "$PASSFILE" box.lbx "$@"; }
    change() { lockbox passwd --passfile "$PASSFILE" box.lbx "$@"; }
    for program in add change; do
        refused_as_a_file "$program" --new-passfile
        refused 2 'crlf has no passphrase: it is empty' "$program" --new-passfile=crlf
        refused 2 'longer than 64 KiB' "$program" --new-passfile=long
    done
    # Line ends of another system are no part of a passphrase.
    printf '%s\r\n' "$PASSPHRASE" >windows
    chmod 600 windows
    list --passfile=windows
    list --passfd=7 7<windows
    # Written by Notepad with its mark, it is another passphrase, which is said as such.
    printf '\xef\xbb\xbf%s\r\n' "$PASSPHRASE" >marked
    chmod 600 marked
    refused 10 'wrong passphrase' list --passfile=marked
    ! mountpoint -q box || fail 'mounted all the same'
}

case_no_descriptor_stream_or_program_opens_or_hangs() {
    local program name
    new_archive box
    cd "$WORK"
    bad_files
    mkdir stubs credentials
    for program in list attach_with; do
        from() { "$program" --passfd=7 7<"$1"; }
        for name in empty blank crlf; do
            refused 2 'descriptor 7 had no passphrase' from $name
        done
        for name in text exposed nul binary; do
            refused 10 'wrong passphrase' from $name
        done
        refused 2 'longer than 64 KiB' from long
        refused 2 'longer than 64 KiB' from /dev/zero
        refused 2 'Is a directory' from directory
        refused 2 'Bad file' "$program" --passfd=77
        writes() { "$program" --passfd=7 7>written; }
        refused 2 'Bad file' writes
        # Standard input, to the programs as it comes from others.
        streams() { "$program" <"$1"; }
        refused 2 'standard input had no passphrase' streams crlf
        refused 2 'longer than 64 KiB' streams long
        refused 2 'longer than 64 KiB' streams /dev/zero
        refused 2 'Is a directory' streams directory
        refused 10 'wrong passphrase' streams nul
        refused 10 'wrong passphrase' streams binary
        # Commands.
        refused 2 'exit status: 3' "$program" --passcommand='printf hush; exit 3'
        refused 2 'signal: 9' "$program" --passcommand='printf hush; kill -9 $$'
        refused 2 'exit status: 127' "$program" --passcommand='exec 2>/dev/null; no-such-program'
        refused 2 'printed no passphrase' "$program" --passcommand='printf "\r\n"'
        refused 2 'longer than 64 KiB' "$program" --passcommand='yes hush-hush'
        refused 10 'wrong passphrase' "$program" --passcommand='printf "hush\0hush"'
        # One that was started in the background and goes on with the pipe open would be waited for; its output counts when it ends.
        refused 10 'wrong passphrase' "$program" --passcommand='(until grep -q "^State:.Z" /proc/$$/status 2>/dev/null || [ ! -d /proc/$$ ]; do :; done; printf hush) & :'
    done
    # systemd's agents: cancelled, timed out, dying, silent, endless.
    # The asked-for program is the first in PATH.
    agent() {
        printf '#!/bin/sh\n%s\n' "$1" >stubs/systemd-ask-password
        chmod 755 stubs/systemd-ask-password
        PATH=$WORK/stubs:$PATH "${@:2}"
    }
    for program in list attach_with; do
        refused 2 'systemd-ask-password failed: exit status: 1' agent 'echo hush; exit 1' "$program" --ask-password
        refused 2 'systemd-ask-password failed: signal: 15' agent 'echo hush; kill $$' "$program" --ask-password
        refused 2 'nothing was typed' agent : "$program" --ask-password
        refused 2 'longer than 64 KiB' agent 'exec yes hush' "$program" --ask-password
        refused 10 'wrong passphrase' agent 'printf "hush\0\377"' "$program" --ask-password
    done
    # Credentials.
    export CREDENTIALS_DIRECTORY=$WORK/credentials
    cp text empty long nul credentials/
    mkdir credentials/directory
    for program in list attach_with; do
        refused 2 'No such file' "$program" --credential=missing
        refused 2 'Is a directory' "$program" --credential=directory
        refused 2 'the credential has no passphrase: it is empty' "$program" --credential=empty
        refused 2 'longer than 64 KiB' "$program" --credential=long
        refused 10 'wrong passphrase' "$program" --credential=text
        refused 10 'wrong passphrase' "$program" --credential=nul
        for name in '' . .. ../text /etc/passwd a/b; do
            refused 1 'without a path' "$program" "--credential=$name"
        done
        for name in relative ''; do
            CREDENTIALS_DIRECTORY=$name refused 2 'CREDENTIALS_DIRECTORY' "$program" --credential=text
        done
        CREDENTIALS_DIRECTORY=/missing refused 2 'No such file' "$program" --credential=text
    done
    ! mountpoint -q box || fail 'mounted all the same'
}

case_no_file_that_is_no_key_opens_or_shows() {
    local program name
    new_archive box
    cd "$WORK"
    bad_files
    lockbox key add --passfile "$PASSFILE" box.lbx --new-keyfile key --generate >added
    add() { lockbox key add --passfile "$PASSFILE" box.lbx "$@"; }
    for program in list attach_with; do
        refused_as_a_file "$program" --keyfile
        refused 2 'empty|too short' "$program" --keyfile=empty
        refused 2 'too short' "$program" --keyfile=crlf
        refused 2 'too short' "$program" --keyfile=text
        refused 2 'too short|empty' "$program" --keyfile=/dev/null
        refused 2 'one byte repeated|too large' "$program" --keyfile=/dev/zero
        refused 2 'too large' "$program" --keyfile=/dev/urandom
        refused 2 'one byte repeated' "$program" --keyfile=long
        refused_as_a_file "$program" --identity
        for name in empty blank crlf text nul binary /dev/null; do
            refused 2 'identity' "$program" "--identity=$name"
        done
        refused 2 'longer than' "$program" --identity=long
        refused 2 'longer than' "$program" --identity=/dev/zero
    done
    refused_as_a_file add --new-keyfile
    # All bytes of a key file count, also those at its end.
    { cat key && printf '\r\n'; } >longer
    chmod 600 longer
    refused 10 'wrong passphrase' list --keyfile=longer
    # Identities that are almost some.
    printf '# made by hand\r\nAGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33\r\n' >windows
    printf 'AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J34\n' >mistyped
    printf -- '-----BEGIN OPENSSH PRIVATE KEY-----\nGQ9778\n' >cut
    chmod 600 windows mistyped cut
    refused 10 'wrong passphrase' list --identity=windows
    refused 2 'identity' list --identity=mistyped
    refused 2 'identity|key' list --identity=cut
    ! mountpoint -q box || fail 'mounted all the same'
}

# Root may read everything, so this is seen by somebody else.
case_a_secret_that_may_not_be_read_is_named() {
    local option
    need_user
    mkdir "$WORK/users"
    cd "$WORK/users"
    printf 'hush-hush\n' >secret
    chmod 600 secret
    create box.lbx
    chmod 644 box.lbx
    mkdir box -m 777
    for option in passfile keyfile identity recovery-code; do
        refused 2 'secret: Permission denied' as_user lockbox ls "--$option=secret" box.lbx
        refused 2 'secret: Permission denied' as_user mount.lockbox -o "$option=secret" box.lbx box
    done
}

# Whoever may write to the user's keyring can put anything under the name.
case_what_others_put_into_the_keyring_opens_nothing() {
    local length
    new_archive box
    cd "$WORK"
    if ! lockbox doctor | shows 'keyring .*available'; then
        note 'no keyrings here'
        return
    fi
    local id
    id=$(lockbox info --json --passfile "$PASSFILE" box.lbx | grep -oE '"archive_id":"[0-9a-f]{32}"' | cut -d '"' -f 4)
    put() {
        python3 -c 'import ctypes, os, platform, sys
number = {"x86_64": 248, "aarch64": 217}[platform.machine()]
name, length = b"lockbox:" + sys.argv[1].encode(), int(sys.argv[2])
call = ctypes.CDLL(None, use_errno=True).syscall
assert call(number, b"user", name, os.urandom(length), ctypes.c_size_t(length), -4) > 0, os.strerror(ctypes.get_errno())' "$id" "$1"
    }
    for length in 1 47 48 49 256 257 4000; do
        put "$length"
        refused 2 'standard input had no passphrase' list
        refused 2 'standard input had no passphrase' attach_with
        list --passfile "$PASSFILE"
    done
    list --passfile "$PASSFILE" --keyring-cache 10m
    list </dev/null
    lockbox forget box.lbx | shows 'is forgotten'
}

# A login has a session keyring with a link to the user's (pam_keyinit), and what su and the like start possesses it whatever its user is.
case_a_kept_key_is_for_its_owner_alone_in_the_session_of_its_owner() {
    local name
    new_archive box
    cd "$WORK"
    need_user
    if ! lockbox doctor | shows 'keyring .*available'; then
        note 'no keyrings here'
        return
    fi
    cat >"$WORK/keys.py" <<'P'
import ctypes, os, platform, sys
JOIN_SESSION, LINK, READ = 1, 8, 11
keyctl = {"x86_64": 250, "aarch64": 219}[platform.machine()]
call = ctypes.CDLL(None, use_errno=True).syscall
if sys.argv[1] == "login":
    assert call(keyctl, JOIN_SESSION, None) > 0 and call(keyctl, LINK, ctypes.c_long(-4), ctypes.c_long(-3)) == 0
    os.execvp(sys.argv[2], sys.argv[2:])
# "read NAME ID...": the ids in hexadecimal, and the keys of that name in the list of keys. Other cases have keys of their own.
found = [line.split()[0] for line in open("/proc/keys") if f" {sys.argv[2]}" in line]
print("listed", len(found))
for number in sys.argv[3:] + found:
    length = call(keyctl, READ, ctypes.c_long(int(number, 16)), ctypes.create_string_buffer(256), ctypes.c_size_t(256))
    print("read", length)
P
    chmod 755 "$WORK" "$WORK/keys.py"
    name=lockbox:$(lockbox info --passfile "$PASSFILE" box.lbx | awk '/^Archive id/ { print $3 }')
    # shellcheck disable=SC2016
    python3 keys.py login bash -Eeuo pipefail -c '
        lockbox ls --passfile "$1" --keyring-cache 10m box.lbx
        key=$(awk -v name=" $3" "index(\$0, name) { print \$1; exit }" /proc/keys)
        [[ -n $key ]]
        echo owner; python3 keys.py read "$3" "$key"
        echo su; su -s /bin/bash "$2" -c "python3 keys.py read $3 $key"
        echo setpriv; setpriv --reuid "$2" --regid "$2" --init-groups python3 keys.py read "$3" "$key"
        lockbox ls box.lbx </dev/null
        lockbox forget box.lbx
    ' session "$PASSFILE" "$TEST_USER" "$name" >shown
    cat shown
    same "$(sed -n '/^owner$/,/^su$/p' shown | grep -c '^read 48$')" 2 'the owner reads the key'
    same "$(sed -n '/^su$/,$p' shown | grep -c '^listed 0$')" 2 'no other user sees it'
    same "$(sed -n '/^su$/,$p' shown | grep -c '^read -1$')" 2 'no other user reads it'
    shows 'is forgotten' <shown
}
