#!/usr/bin/env bash
# One-time links from end to end: `lockbox` against a real daemon.
#
#   tests/share/links.sh [DIRECTORY WITH THE PROGRAMS]     the default is target/debug
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
programs=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/debug}") || exit 1
lockbox=$programs/lockbox
place=$(mktemp -d "${TMPDIR:-/tmp}/lockbox-links.XXXXXX") || exit 1
cd "$place" || exit 1
export XDG_STATE_HOME=$place/state XDG_RUNTIME_DIR=$place LOCKBOX_PASSFILE=$place/pass
unset LOCKBOX_PASSCOMMAND LOCKBOX_LOG http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy
daemon=
failed=0
cases=0

finish() {
    [[ -z $daemon ]] || { kill "$daemon" && wait "$daemon"; } 2>/dev/null
    rm -rf "$place"
}
trap finish EXIT

start_daemon() {
    "$programs/lockbox-share" serve --state-dir "$place/store" --unix-socket "$place/lockbox-share.sock" --listen 127.0.0.1:0 \
        --metrics-listen none --requests-per-minute 0 --misses-per-minute 100000 >"$place/daemon.log" 2>&1 &
    daemon=$!
    for _ in {1..6000}; do
        [[ -S $place/lockbox-share.sock ]] && return 0
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.05
    done
    cat "$place/daemon.log"
    exit 1
}

# shows [OPTION] PATTERN: whether a line of standard input has it. It reads to the end: what writes to `grep -q` is killed by its first
# match or not, as it comes, and a pipe with a killed program has failed.
shows() {
    local told
    told=$(cat)
    grep -q "$@" <<<"$told"
}

case_() {
    local name=$1 ended
    shift
    cases=$((cases + 1))
    mkdir "$place/case"
    # A case ends at its first failing command.
    (cd "$place/case" && set -eE && trap 'echo "line $LINENO: $BASH_COMMAND"' ERR && "$@") >"$place/case.log" 2>&1
    ended=$?
    if [[ $ended -eq 0 ]]; then
        echo "ok      $name"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        sed 's/^/        | /' "$place/case.log"
    fi
    rm -rf "$place/case"
}

# The command must end with this code.
ends() {
    local wanted=$1 code=0
    shift
    "$@" || code=$?
    [[ $code -eq $wanted ]] || { echo "'$*' ended with $code and not with $wanted"; return 1; }
}

# await PID COMMAND...: waits until the command succeeds; fails when the process ended without that, or after five minutes.
await() {
    local pid=$1 ended deadline=$((SECONDS + 300))
    shift
    while :; do
        ended=0
        kill -0 "$pid" 2>/dev/null || ended=1
        "$@" && return 0
        if ((ended || SECONDS >= deadline)); then
            echo "not reached by process $pid: $*"
            return 1
        fi
    done
}

# has_begun NAME: it was received, or more than a megabyte of it.
has_begun() {
    [[ -e in/$1 || $(stat --format %s in/.lockbox-*.part) -gt 1000000 ]]
}

has_part() {
    compgen -G 'in/.lockbox-*.part' >/dev/null
}

# has_upload BYTES: returns whether the daemon has an unfinished upload of more than BYTES.
has_upload() {
    [[ $(stat --format %s "$place"/store/spool/*.part 2>/dev/null) -gt $1 ]]
}

has_no_upload() {
    ! compgen -G "$place/store/spool/*.part" >/dev/null
}

share() { "$lockbox" share "$@" 2>>"$place/said"; }
receive() { "$lockbox" receive --socket "$place/lockbox-share.sock" "$@" 2>>"$place/said"; }
id_of() {
    local url=${1%%#*}
    echo "${url##*/}"
}
state_of() { "$lockbox" share info "$1" --json | sed 's/.*"state":"\([a-z]*\)".*/\1/'; }

files_of_all_sizes() {
    local size link
    for size in 0 1 4096 7000 65536 5000000; do
        head -c "$size" /dev/urandom >"file $size"
        link=$(share "file $size")
        mkdir in
        receive -o in <<<"$link"
        cmp "file $size" "in/file $size"
        ends 20 receive -o in <<<"$link"
        [[ $(ls -A in) == "file $size" ]]
        rm -r in
    done
}

from_an_archive() {
    local link
    echo "correct horse" >"$LOCKBOX_PASSFILE"
    chmod 600 "$LOCKBOX_PASSFILE"
    mkdir folder
    head -c 300000 /dev/urandom >folder/plan.pdf
    "$lockbox" create a.lbx --kdf-memory 1 --kdf-passes 1 --weak-kdf
    "$lockbox" add a.lbx folder
    link=$(share --archive a.lbx folder/plan.pdf)
    receive <<<"$link"
    cmp folder/plan.pdf plan.pdf
    "$lockbox" snapshot create a.lbx before
    echo "another plan" >folder/plan.pdf
    "$lockbox" add --force a.lbx folder
    link=$(share --archive a.lbx --snapshot before folder/plan.pdf)
    receive -o of_before <<<"$link"
    cmp plan.pdf of_before
    ends 1 share --snapshot before folder/plan.pdf
}

as_often_as_allowed() {
    local link
    echo text >note.txt
    link=$(share note.txt --max-downloads 3)
    for _ in 1 2 3; do receive -o - <<<"$link" | cmp - note.txt; done
    ends 20 receive -o - <<<"$link"
}

one_winner_of_many() {
    local link i winners=0 pids=()
    head -c 200000 /dev/urandom >prize
    link=$(share prize)
    for i in {1..12}; do
        (XDG_STATE_HOME=$place/case/state$i receive -o "won$i" <<<"$link") &
        pids+=($!)
    done
    for i in "${pids[@]}"; do wait "$i" || true; done
    for i in won*; do [[ ! -e $i ]] || { cmp "$i" prize && winners=$((winners + 1)); }; done
    [[ $winners -eq 1 ]]
}

taken_back() {
    local link id
    echo text >note.txt
    link=$(share note.txt --label "my note")
    id=$(id_of "$link")
    [[ $(state_of "$id") == armed ]]
    [[ $("$lockbox" share ls --label "my note") == "$id  waiting "* ]]
    "$lockbox" share revoke "my note" | shows '^state  *revoked$'
    ends 20 receive -o - <<<"$link"
    [[ $(state_of "my note") == revoked ]]
    grep -q 'this link was revoked by its owner at 20' "$place/said"
}

looking_uses_nothing_up() {
    local link url method look
    head -c 100000 /dev/urandom >big
    link=$(share big)
    # The port was chosen by the system.
    url=http://$(sed -n 's/^http=//p' "$place/daemon.log")/s/$(id_of "$link")
    for method in GET HEAD OPTIONS; do
        for _ in {1..20}; do
            look=(--request "$method")
            [[ $method != HEAD ]] || look=(--head)
            curl --silent --noproxy '*' --output page "${look[@]}" --user-agent "Slackbot-LinkExpanding 1.0" "$url"
        done
    done
    [[ $(state_of "$(id_of "$link")") == armed ]]
    receive <<<"$link" -o out
    cmp big out
}

killed_and_gone_on_with() {
    local link pid code=0
    head -c 64000000 /dev/urandom >big
    link=$(share big)
    mkdir in
    # No space for the file: told before anything is downloaded, and nothing is used up.
    (ulimit -f 20000; ends 14 receive -o in <<<"$link")
    [[ -z $(ls in) ]]
    "$lockbox" receive --socket "$place/lockbox-share.sock" -o in --resume <<<"$link" &
    pid=$!
    await "$pid" has_begun big
    kill -9 "$pid" || true
    wait "$pid" || code=$?
    if [[ ! -e in/big ]]; then
        receive -o in --resume <<<"$link"
        code=0
    fi
    cmp big in/big
    [[ $(ls -A in) == big ]]
    # Killed after the file got its name, it may not have reported that to the daemon.
    [[ $code != 0 || $(state_of "$(id_of "$link")") == consumed ]]
}

interrupted_and_told() {
    local link other pid code
    head -c 64000000 /dev/urandom >big
    echo small >small
    mkdir in
    for _ in {1..20}; do
        rm -f in/big
        link=$(share big)
        code=0
        "$lockbox" receive --socket "$place/lockbox-share.sock" -o in <<<"$link" >/dev/null 2>said &
        pid=$!
        await "$pid" has_begun big
        kill -TERM "$pid" || true
        wait "$pid" || code=$?
        [[ -e in/big ]] || break
    done 2>/dev/null
    [[ $code == 143 ]]
    grep -Eqx 'lockbox: interrupted; the received part \([0-9]+ bytes\) is kept in in/\.lockbox-[0-9a-f]+\.part: continue with --resume .*, or remove it' said
    # Who receives something else there is told, and what nothing can be added to goes.
    : >in/.lockbox-00000000000000000000000000000000.part
    other=$(share small)
    "$lockbox" receive --socket "$place/lockbox-share.sock" -o in <<<"$other" 2>said
    grep -Eqx 'lockbox: in/\.lockbox-[0-9a-f]+\.part is an unfinished download: .*' said
    receive -o in --resume <<<"$link"
    cmp big in/big
    [[ $(echo $(ls -A in)) == 'big small' ]]
}

# Waits until a command that watches for signals waits for the daemon, or for who reads what it writes.
until_it_waits() {
    await "$1" waits "$1"
}

waits() {
    grep -qsx signals "/proc/$1"/task/*/comm && [[ $(sed 's/.*) //' "/proc/$1/stat") == S* ]]
}

# Interrupts a command, which says this. A shell has background commands ignore SIGINT.
interrupted() {
    local code=0
    kill -TERM "$1"
    wait "$1" || code=$?
    kill -CONT "$daemon"
    [[ $code == 143 && $(cat said) == "lockbox: interrupted; $2"* ]] || { echo "$code: $(cat said)"; return 1; }
}

# interrupted_sharing FILE WORDS: interrupts a sender of FILE when the daemon has a part of it, and
# expects WORDS. A sender that has sent too much by then ends by itself, and another one is started.
interrupted_sharing() {
    local pid
    for _ in {1..20}; do
        # Else the upload of an earlier sender could count, until the daemon removes it.
        await "$daemon" has_no_upload
        "$lockbox" share "$1" >link 2>said &
        pid=$!
        if await "$pid" has_upload 10000000; then
            kill -STOP "$daemon"
            # The rest is more than sockets and the daemon hold.
            if has_upload 10000000 && ! has_upload 50000000; then
                interrupted "$pid" "$2"
                [[ ! -s link ]]
                return
            fi
            kill -CONT "$daemon"
        fi
        wait "$pid" || { cat said; return 1; }
    done
    echo 'each sender ended before it could be interrupted'
    return 1
}

interrupted_in_each_direction() {
    local link
    trap 'kill -CONT "$daemon"' EXIT
    head -c 64000000 /dev/urandom >big
    echo small >small
    mkdir in
    mkfifo out
    interrupted_sharing big 'nothing was shared; the same command starts over'
    # Nor does the thread that packs a directory take the signal. How much of it there is, is not known before its end.
    mkdir tree
    cp big tree
    interrupted_sharing tree 'the server may have made a link that was not returned; it expires by itself, and the same command makes another'
    # Nobody knows whether the daemon has it.
    kill -STOP "$daemon"
    "$lockbox" share small >link 2>said &
    until_it_waits $!
    interrupted $! 'the server may have made a link that was not returned; it expires by itself, and the same command makes another'
    [[ ! -s link ]]
    link=$(share big)
    # The daemon answers nothing, so nothing can have arrived.
    kill -STOP "$daemon"
    "$lockbox" receive --socket "$place/lockbox-share.sock" -o in <<<"$link" 2>said &
    await $! has_part
    until_it_waits $!
    interrupted $! 'nothing was received yet; continue with the same link within a minute'
    [[ -z $(ls -A in) ]]
    # Nobody reads on.
    "$lockbox" receive --socket "$place/lockbox-share.sock" -o - <<<"$link" >out 2>said &
    {
        head -c 1000000 >part
        interrupted $! 'the output is not the whole file; the same link starts over as long as the server keeps the file for it'
    } <out
    receive -o - <<<"$link" | cmp - big
}

watched() {
    local link
    head -c 100000 /dev/urandom >big
    link=$(share big --label watched)
    "$lockbox" share watch watched >events &
    local pid=$!
    receive -o out <<<"$link"
    wait "$pid"
    grep -q 'UTC  made$' events && grep -q 'UTC  claimed$' events && grep -q 'UTC  received in full$' events
}

a_changed_file_is_not_shared() {
    local writer code=0
    head -c 50000000 /dev/zero >growing
    (while :; do echo x >>growing; done) &
    writer=$!
    share growing >shared.txt || code=$?
    kill "$writer"
    wait "$writer" || true
    [[ $code -eq 2 && ! -s shared.txt ]]
    grep -q 'growing changed while it was read; nothing was shared' "$place/said"
}

opened_by_age_alone() {
    local link
    head -c 300000 /dev/urandom >big
    link=$(share big)
    receive --ciphertext --identity key.txt <<<"$link"
    age -d -i key.txt big.age | cmp - big
    echo "a small secret" >small
    link=$(share small)
    receive --ciphertext --identity key2.txt <<<"$link"
    age -d -i key2.txt small.age | tail -n +2 | cmp - small
    age -d -i key2.txt small.age | head -n 1 | shows '^{"name":"small","size":15,"sha256":"[^"]*"} *$'
}

nothing_is_replaced() {
    local link
    echo new >note.txt
    link=$(share note.txt)
    mkdir in
    echo old >in/note.txt
    ends 2 receive -o in/note.txt <<<"$link"
    receive -o in <<<"$link"
    [[ $(cat in/note.txt) == old && $(cat "in/note (2).txt") == new ]]
    link=$(share note.txt)
    receive -o in/note.txt --force <<<"$link"
    [[ $(cat in/note.txt) == new ]]
}

no_secret_is_left_behind() {
    local link fragment
    head -c 100000 /dev/urandom >"secret name.txt"
    link=$(share "secret name.txt")
    fragment=${link##*#}
    LOCKBOX_LOG=trace receive -o out <<<"$link"
    [[ -d $place/store && -d $place/state && -f $place/daemon.log && -f $place/said ]]
    # The daemon may remove a file meanwhile, which is an error of grep(1).
    ! grep -rqis -e "$fragment" -e 'secret name' "$place/store" "$place/state" "$place/daemon.log" "$place/said" ||
        { echo 'a secret was left behind'; return 1; }
}

over_tls() {
    local pid port link silent connections=()
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost \
        -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE
    "$programs/lockbox-share" serve --state-dir store --unix-socket none --listen none --tls-listen 127.0.0.1:0 --tls-cert cert.pem \
        --tls-key key.pem --public-url https://share.example.org --creators local --metrics-listen none --max-connections 16 >daemon.log &
    pid=$!
    # shellcheck disable=SC2064 # the process of this case
    trap "kill $pid; wait $pid" EXIT
    await "$pid" grep -q '^ready=1' daemon.log
    port=$(sed -n 's/^https=.*://p' daemon.log)
    # More handshakes that never begin than there are places make room for those that do.
    for _ in {1..24}; do
        exec {silent}<>"/dev/tcp/127.0.0.1/$port"
        connections+=("$silent")
    done
    head -c 3000000 /dev/urandom >big
    ends 21 share big --server "https://localhost:$port"
    tail -n 1 "$place/said" | shows 'its certificate is not trusted'
    export SSL_CERT_FILE=$PWD/cert.pem
    link=$(share big --server "https://localhost:$port")
    [[ $link == https://share.example.org/s/*#* ]]
    "$lockbox" receive --server "https://localhost:$port" -o out <<<"$link"
    cmp big out
    # With all places taken a client has a second for its request, and curl makes no second one.
    for silent in "${connections[@]}"; do exec {silent}>&-; done
    curl --silent --show-error --head --cacert cert.pem "https://localhost:$port/v1/limits" | shows -i '^strict-transport-security: max-age=31536000'
}

what_comes_on_standard_input() {
    local link size
    for size in 0 10 5000000; do
        head -c "$size" /dev/urandom >sent
        link=$(share - --name "from a pipe" <sent)
        receive <<<"$link"
        cmp sent "from a pipe"
        rm "from a pipe"
        # As the program before it in a pipe writes: in parts.
        link=$( (head -c 9 sent; sleep 0.1; tail -c +10 sent) | share -)
        receive -o - <<<"$link" | cmp - sent
    done
}

a_text() {
    local link
    link=$(printf 'meet me\nat the bridge' | share --text)
    ends 0 receive --check <<<"$link" | shows '^the link is valid until 20.* UTC$'
    [[ $(receive <<<"$link") == $'meet me\nat the bridge' && -z $(ls) ]]
    ends 20 receive --check <<<"$link"
    grep -q 'this link was used at 20' "$place/said"
    link=$(share --text <<<"for a file")
    receive --json <<<"$link" | shows '"kind":"text"'
    [[ $(cat text.txt) == "for a file" ]]
}

a_directory() {
    local link
    mkdir -p "tree/deep/er" tree/empty
    head -c 300000 /dev/urandom >tree/deep/er/file
    ln tree/deep/er/file tree/hard
    ln -s deep/er/file tree/soft
    ln -s /etc/passwd tree/stray
    mkfifo tree/pipe
    printf '#!/bin/sh\n' >tree/run
    chmod 777 tree/run
    find tree -exec touch -hd '2020-02-02 02:02:02.123456789' {} +
    link=$(share tree)
    grep -q '1 special file was left out' "$place/said"
    mkdir in
    receive -o in <<<"$link" | shows '^in/tree/: '
    grep -q '1 symbolic link was left out that leads out' "$place/said"
    rm tree/stray tree/pipe
    diff -r tree in/tree
    [[ $(stat -c %a in/tree in/tree/run in/tree/deep/er/file in/tree/hard | xargs) == '700 700 600 600' ]]
    [[ $(stat -c %i in/tree/hard) == $(stat -c %i in/tree/deep/er/file) ]]
    [[ $(stat -c %y in/tree/deep in/tree/hard | sort -u) == '2020-02-02 02:02:02.123456789 '* ]]
    # A second one beside it, one under another name, and the tar as it came.
    share tree | (cd in && receive)
    share tree | receive -o in/other
    share tree | receive --no-unpack -o in
    diff -r tree "in/tree (2)"
    diff -r tree in/other
    tar -xf in/tree.tar --one-top-level=in/untarred
    diff -r tree in/untarred/tree
    [[ $(ls -A in | wc -l) == 5 ]]
    # Elsewhere it is one age file of a tar, with the key of the link.
    link=$(share tree)
    receive --ciphertext --identity key.txt <<<"$link"
    age -d -i key.txt tree.tar.age | tar -tf - >listing
    grep -qx tree/deep/er/file listing
}

a_directory_of_an_archive() {
    local link
    echo "correct horse" >"$LOCKBOX_PASSFILE"
    chmod 600 "$LOCKBOX_PASSFILE"
    mkdir -p secret/album/spring
    head -c 100000 /dev/urandom >secret/album/spring/one.jpg
    "$lockbox" create a.lbx --kdf-memory 1 --kdf-passes 1 --weak-kdf
    "$lockbox" add a.lbx secret
    link=$(share --archive a.lbx secret/album)
    receive --no-unpack <<<"$link"
    # Nothing of the path above it, nor of who owned it.
    ends 1 grep -q 'secret' album.tar
    tar --numeric-owner -tvf album.tar | shows '^drwx.* 0/0 .* album/$'
    link=$(share --archive a.lbx secret/album --name pictures)
    receive <<<"$link"
    diff -r secret/album pictures
}

a_directory_that_changes_is_not_shared() {
    local writer code=0
    mkdir tree
    head -c 80000000 /dev/zero >tree/big
    (while :; do echo x >>tree/big; done) &
    writer=$!
    share tree >shared.txt || code=$?
    kill "$writer"
    wait "$writer" || true
    [[ $code -eq 2 && ! -s shared.txt ]]
    tail -n 1 "$place/said" | shows 'tree/big changed while it was read'
}

a_receiver_of_a_directory_that_was_killed_goes_on() {
    local link pid
    mkdir tree
    head -c 64000000 /dev/urandom >tree/big
    link=$(share tree)
    mkdir in
    "$lockbox" receive --socket "$place/lockbox-share.sock" -o in <<<"$link" &
    pid=$!
    await "$pid" has_begun tree
    kill -9 "$pid" || true
    wait "$pid" || true
    if [[ ! -e in/tree ]]; then receive -o in --resume <<<"$link"; fi
    diff -r tree in/tree
    [[ $(ls -A in) == tree ]]
}

who_can_open_it_is_told() {
    echo text >note.txt
    "$lockbox" share note.txt 2>told >link
    grep -q 'only programs on the machine of the share daemon can open links of http://127.0.0.1:' told
    grep -q "lockbox-share setup" told
    grep -q 'WARN.*only programs on the machine of the share daemon' "$place/daemon.log"
}

times_are_told_as_they_were_typed() {
    local link id
    echo text >note.txt
    link=$("$lockbox" share note.txt --expires 48h 2>told)
    id=$(id_of "$link")
    grep -q 'works once, for 48 hours, until 20' told
    "$lockbox" share ls | shows "^$id .* UTC   48h  -$"
    "$lockbox" share info "$id" | shows '^expires .*, 48 hours after it was made$'
    "$lockbox" share info "$id" --json | shows '"lifetime":"48h"'
    "$lockbox" share note.txt 2>told >link
    grep -q 'works once, for 15 minutes, until 20' told
    ends 2 "$lockbox" share note.txt --expires 30d 2>told
    grep -q 'for at most 7 days, and 30 days were requested' told
}

start_daemon
case_ "files of all sizes arrive once" files_of_all_sizes
case_ "a file of an archive is shared without a mount" from_an_archive
case_ "a share can be received as often as it allows" as_often_as_allowed
case_ "of twelve receivers at once one gets the file" one_winner_of_many
case_ "a share can be taken back" taken_back
case_ "looking at a link uses nothing up" looking_uses_nothing_up
case_ "a receiver that ran out of room or was killed goes on" killed_and_gone_on_with
case_ "a receiver that was stopped says what it keeps, and the next one tells of it" interrupted_and_told
case_ "who interrupts a sender or a receiver is told what there is and how to go on" interrupted_in_each_direction
case_ "what comes on standard input arrives" what_comes_on_standard_input
case_ "a text is printed, and its link can be looked at" a_text
case_ "a directory arrives as one" a_directory
case_ "a directory of an archive is shared without what is above it" a_directory_of_an_archive
case_ "a directory that changes is not shared" a_directory_that_changes_is_not_shared
case_ "a receiver of a directory that was killed goes on" a_receiver_of_a_directory_that_was_killed_goes_on
case_ "who can open a link is told when it is made" who_can_open_it_is_told
case_ "times are told as they were typed" times_are_told_as_they_were_typed
case_ "watching tells what happens" watched
case_ "a file that changes is not shared" a_changed_file_is_not_shared
case_ "age alone opens what was received" opened_by_age_alone
case_ "nothing is replaced unless told" nothing_is_replaced
case_ "no log and no state has a secret" no_secret_is_left_behind
case_ "the same goes over TLS, with a certificate that is trusted" over_tls
echo "$cases cases, $failed failed"
[[ $failed -eq 0 ]]
