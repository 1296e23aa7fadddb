# Mounts of archives that live on the server and are written to: sourced by versitygw.sh and azurite.sh, whose server ($NAME, addresses below $PLACE; asks ENDPOINT prints what of the environment leads there), place and functions it uses.
#   OUTAGE   seconds that the server is away under a writer (5)
#   KILLS    how often the daemon is killed under one (3)
#   EACH     steps that are acknowledged before a kill, at most (20)
#   TURNS    how often the archive changes hands between two machines, which a third one watches (4)
#   SEED     what is done at random
#   PARTS    what of it ("programs outage kills turns"); "train" and "slow" only if they are named
#   TRAIN    scale of the times of "train", whose cuts take 10 s, 60 s and 5 min with 1, and of its hour of sleep (1)
# shellcheck shell=bash disable=SC2153,SC2154
OUTAGE=${OUTAGE:-5} KILLS=${KILLS:-3} EACH=${EACH:-20} TURNS=${TURNS:-4} SEED=${SEED:-$RANDOM} PARTS=${PARTS:-programs outage kills turns} TRAIN=${TRAIN:-1}
RANDOM=$SEED
# With any other timeout programs are told of what cannot be read while the server is away, or slow.
OPTIONS=passfile=$WORK/pass,allow-http,allow-private,timeout=hard
HOLDERS=() WRITER=
acknowledged=0 outages=0 deaths=0 turns=0 watched=0

# Root, and what mounts and machines are made of.
can_mount() {
    mkdir "$WORK/bin"
    ln -s "$(realpath "$(command -v mount-lockbox)")" "$WORK/bin/mount.lockbox"
    PATH=$WORK/bin:$PATH
    [[ $EUID -eq 0 && -c /dev/fuse ]] && type -P mount.lockbox unshare nsenter ip git sqlite3 rsync >/dev/null
}

# Waits until the command succeeds.
await() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < deadline)) || fail "it did not come: $*"
        sleep 0.05
    done
}

gone() {
    [[ ! -d /proc/$1 ]] || [[ $(awk '$1 == "State:" { print $2 }' "/proc/$1/status" 2>/dev/null) =~ ^[ZX]?$ ]]
}

# daemons [DIRECTORY]: those of mounts below it, or $WORK, whoever's namespace they are in: mount.lockbox --daemon ARCHIVE POINT.
daemons() {
    local file
    for file in /proc/[0-9]*/cmdline; do
        if tr '\0' '\n' 2>/dev/null <"$file" | awk -v top="${1:-$WORK}/" 'NR == 2 && $0 != "--daemon" { exit 1 } NR == 4 { found = index($0, top) == 1 } END { exit !found }'; then
            file=${file#/proc/}
            echo "${file%/cmdline}"
        fi
    done
}

# Whatever a failure left.
unmount_all() {
    local pid
    [[ -z $WRITER ]] || kill -9 "$WRITER" 2>/dev/null || true
    for pid in $(daemons); do
        # What it started to reach the network ends with it.
        kill -9 "$pid" 2>/dev/null || true
        (await 10 gone "$pid") || true
    done
    for pid in "${HOLDERS[@]}"; do
        kill "$pid" 2>/dev/null || true
    done
    awk -v top="$WORK/" 'index($5, top) == 1 { print $5 }' /proc/self/mountinfo | tac | while read -r point; do
        umount -l "$point"
    done
}

# attach URL [OPTIONS]
attach() {
    timeout 120 mount.lockbox "$1" "$WORK/dir" -o "$OPTIONS,log=$WORK/daemon.log${2:+,$2}" || fail "$1 was not mounted"
}

detach() {
    timeout 120 lockbox umount "$WORK/dir" >"$WORK/said" 2>&1 || fail "the unmount failed: $(cat "$WORK/said" "$WORK/daemon.log")"
}

# fresh URL: what is found by who has nothing but the store, in $WORK/found.
fresh() {
    rm -rf "$WORK/found" "$WORK/fresh"
    mkdir "$WORK/found"
    XDG_CACHE_HOME=$WORK/fresh/cache XDG_STATE_HOME=$WORK/fresh/state timeout 300 lockbox extract "${REMOTE[@]}" "$1" --to "$WORK/found" >"$WORK/said" 2>&1 || fail "$1 was not read: $(cat "$WORK/said")"
}

# all_there DIRECTORY NOTES: all that was acknowledged.
all_there() {
    "${ON[@]}" timeout 120 "$TESTS/acknowledged.py" read "$1" "$2" >"$WORK/said" || fail "in $1: $(cat "$WORK/said")"
}

# write_to DIRECTORY NOTES [COUNT]: a writer in $WRITER, whose words come in descriptor 7. ON[] is what runs it elsewhere.
write_to() {
    exec 7< <(exec "${ON[@]}" "$TESTS/acknowledged.py" write "$1" "$2" "$SEED" "${@:3}" 2>&1)
    WRITER=$!
}
ON=()

# next_step [COUNT]: waits until so many more steps were acknowledged.
next_step() {
    local i said
    for ((i = 0; i < ${1:-1}; i++)); do
        read -r -t 120 said <&7 || fail "the writer said nothing for two minutes"
        [[ $said =~ ^[0-9]+$ ]] || fail "the writer fell: $said"
    done
}

# fallen: waits for the end of a writer that something stops, and prints its last words: a call and an error.
fallen() {
    local said last=
    while read -r -t 120 said <&7; do
        last=$said
    done
    await 10 gone "$WRITER"
    wait "$WRITER" && fail "the writer ended well"
    WRITER=
    exec 7<&-
    echo "$last" >"$WORK/fell"
}

says_that_the_server_is_away() {
    "${ON[@]}" lockbox status "$1" 2>/dev/null | grep -q 'does not answer since'
}

check_full() {
    timeout 300 lockbox check --full "${REMOTE[@]}" "$1" >"$WORK/said" 2>&1 || fail "$(cat "$WORK/said")"
}

create_at() {
    lockbox create "${REMOTE[@]}" --weak-kdf --kdf-memory 1 "$1"
}

# What programs do in DIRECTORY, once more each time: git_in, sqlite_in, rsync_in, fio_in DIRECTORY NUMBER.
git_in() {
    local git=(git -C "$1/git" -c user.name=a -c user.email=a@example.org -c core.fsync=all -c core.fsyncMethod=fsync -c gc.autoDetach=false)
    if [[ ! -d $1/git ]]; then
        git -c init.defaultBranch=main init --quiet "$1/git"
        cp -r "$TESTS" "$1/git/campaign"
    fi
    echo "$2" >>"$1/git/campaign/number"
    "${git[@]}" add --all && "${git[@]}" commit --quiet --message="$2" && "${git[@]}" clone --quiet --no-hardlinks . "$1/clone$2" && "${git[@]}" gc --quiet
}

# In each journal mode some transactions, and then some that are one.
sqlite_in() {
    local mode i
    for mode in DELETE WAL; do
        {
            echo "PRAGMA journal_mode=$mode; PRAGMA synchronous=FULL; CREATE TABLE IF NOT EXISTS t(number INTEGER, bytes BLOB);"
            for i in {1..30}; do
                echo "INSERT INTO t VALUES($2, randomblob($((RANDOM % 9000))));"
            done
            echo "BEGIN; DELETE FROM t WHERE rowid % 3 = 0; UPDATE t SET number = -number; UPDATE t SET number = -number; COMMIT; PRAGMA integrity_check;"
        } | sqlite3 -bail "$1/$mode.db" >"$WORK/sqlite.said" 2>&1 && [[ $(tail -n 1 "$WORK/sqlite.said") == ok ]] || return 1
    done
}

rsync_in() {
    rsync -a --fsync "$TESTS/../../docs" "$TESTS/../../remote" "$1/tree$2/"
}

fio_in() {
    mkdir "$1/fio$2" && "${FIO[@]}" --directory="$1/fio$2" --randseed="$SEED$2" >"$WORK/fio.said" 2>&1
}
FIO=(fio --name=checked --aux-path="$WORK" --rw=randwrite --bsrange=1k-64k --size=4M --fsync=32 --verify=crc32c --verify_fatal=1)

programs_here() {
    echo git sqlite rsync
    if command -v fio >/dev/null; then
        echo fio
    else
        echo "fio is not installed: it was not tried" >&2
    fi
}

# What they left in DIRECTORY after so many times, by their own means: whole(DIRECTORY).
whole() {
    local at number mode rows
    for at in "$1/git" "$1"/clone*; do
        git -C "$at" fsck --full --strict >"$WORK/said" 2>&1 || fail "git fsck: $(cat "$WORK/said")"
        [[ -z $(git -C "$at" status --porcelain) && $(tail -n 1 "$at/campaign/number") == $(git -C "$at" rev-list --count HEAD) ]] || fail "$at has something else"
    done
    for mode in DELETE WAL; do
        sqlite3 "$1/$mode.db" 'PRAGMA integrity_check;' >"$WORK/said" 2>&1 && [[ $(cat "$WORK/said") == ok ]] || fail "SQLite with $mode: $(cat "$WORK/said")"
    done
    for at in "$1"/tree*; do
        same_trees "$TESTS/../../docs" "$at/docs"
        same_trees "$TESTS/../../remote" "$at/remote"
    done
    for at in "$1"/fio*; do
        [[ -d $at ]] || continue
        number=${at##*/fio}
        (cd "$WORK" && "${FIO[@]}" --directory="$at" --randseed="$SEED$number" --verify_only >"$WORK/said" 2>&1) || fail "fio: $(cat "$WORK/said")"
    done
}

# kept_is_found URL: what is on the mount is what is found, when it has gone, by who has nothing but the store.
kept_is_found() {
    rm -rf "$WORK/kept"
    timeout 300 rsync -aH "$WORK/dir/" "$WORK/kept/"
    detach
    fresh "$1"
    same_trees "$WORK/kept" "$WORK/found"
    whole "$WORK/found"
    check_full "$1"
}

# programs URL: git, SQLite, rsync and fio on one mount, and all of it read by who has nothing but the store.
programs() {
    local program number here
    here=$(programs_here)
    create_at "$1"
    attach "$1"
    for number in 1 2; do
        for program in $here; do
            "${program}_in" "$WORK/dir" "$number" &
            await 300 gone $!
            wait $! || fail "$program: $(cat "$WORK/$program.said" 2>/dev/null)"
        done
    done
    kept_is_found "$1"
    # And by a mount that knows nothing, which asks for each page.
    rm -rf "$XDG_CACHE_HOME"
    attach "$1" ro
    same_trees "$WORK/kept" "$WORK/dir"
    detach
}

same_trees() {
    # The directory that was there before what it has was put there is another one.
    timeout 300 rsync -aHc --delete --dry-run --itemize-changes "$1/" "$2/" | { grep -vxF '.d..t...... ./' || true; } >"$WORK/said"
    [[ ! -s $WORK/said ]] || fail "$1 and $2: $(head -n 20 "$WORK/said")"
}

# again PROGRAM: until there is $WORK/enough; after each time a line in $WORK/PROGRAM.times.
again() {
    local number
    for ((number = 1; ; number++)); do
        "${1}_in" "$WORK/dir" "$number" 2>"$WORK/$1.errors" || return 1
        echo "$number" >>"$WORK/$1.times"
        [[ ! -e $WORK/enough ]] || return 0
    done
}

# outage URL: the server goes under programs and a writer, and comes back.
outage() {
    local said here program pid pids=() notes=$WORK/outage.notes
    here=$(programs_here)
    rm -f "$notes" "$WORK/enough" "$WORK"/*.times
    create_at "$1"
    attach "$1"
    for program in $here; do
        again "$program" &
        pids+=($!)
    done
    mkdir "$WORK/dir/steps"
    write_to "$WORK/dir/steps" "$notes"
    next_step 10
    stop "$([[ $((RANDOM % 2)) == 0 ]] && echo KILL || echo TERM)"
    await 60 says_that_the_server_is_away "$WORK/dir"
    # Said before, and read now.
    while read -r -t 0.1 said <&7; do
        [[ $said =~ ^[0-9]+$ ]] || fail "without a server the writer fell: $said"
    done
    if read -r -t "$OUTAGE" said <&7; then
        fail "without a server: $said"
    fi
    for pid in "${pids[@]}"; do
        ! gone "$pid" || fail "without a server a program ended: $(tail "$WORK"/*.errors "$WORK"/*.said)"
    done
    start
    next_step 10
    kill "$WRITER"
    await 120 gone "$WRITER"
    wait "$WRITER" || fail "the writer did not end well"
    WRITER=
    exec 7<&-
    fresh "$1"
    all_there "$WORK/found/steps" "$notes"
    : >"$WORK/enough"
    for pid in "${pids[@]}"; do
        await 300 gone "$pid"
        wait "$pid" || fail "a program ended: $(tail "$WORK"/*.errors "$WORK"/*.said)"
    done
    kept_is_found "$1"
    all_there "$WORK/found/steps" "$notes"
    acknowledged=$((acknowledged + $(tail -n 1 "$WORK/said")))
    outages=$((outages + 1))
}

# kills URL: the daemon is killed anywhere in the work of a writer, with what reaches the network for it or without.
kills() {
    local i pid notes=$WORK/kills.notes others
    rm -f "$notes"
    create_at "$1"
    for ((i = 1; i <= KILLS; i++)); do
        attach "$1"
        pid=$(daemons)
        mapfile -t others < <(pgrep --parent "$pid")
        write_to "$WORK/dir" "$notes"
        next_step $((RANDOM % EACH + 1))
        # Anywhere in the next steps.
        sleep "0.0$((RANDOM % 10))"
        if ((RANDOM % 2)); then
            kill -9 "$pid" "${others[@]}" 2>/dev/null
        else
            kill -9 "$pid"
        fi
        await 30 gone "$pid"
        fallen
        grep -qE ' (ENOTCONN|ECONNABORTED|EIO)$' "$WORK/fell" || fail "the writer fell: $(cat "$WORK/fell")"
        umount -l "$WORK/dir" 2>/dev/null || true
        fresh "$1"
        all_there "$WORK/found" "$notes"
        deaths=$((deaths + 1))
    done
    [[ $KILLS == 0 ]] || acknowledged=$((acknowledged + $(tail -n 1 "$WORK/said")))
    check_full "$1"
}

# machine NAME NUMBER [train]: one with a name, a number, a network and mounts of its own. Its processes are those of this one, which shows nobody's death: it has another number. With "train", train.py carries its packets, by what is written to descriptor 8.
machine() {
    # Of the networks for measurements, three for each port: several may run at once.
    local name=$1 home=$WORK/$1 link=lb$2-$$ at=$(((3 * PORT + $2) % 32768))
    local net=198.$((18 + at / 16384)).$((at / 64 % 256)) last=$((at % 64 * 4))
    local here=$net.$((last + 1)) there=$net.$((last + 2))
    mkdir -p "$home/dir" "$home/state" "$home/cache"
    printf '%08x%08x%08x%08x\n' "$RANDOM" "$RANDOM" "$RANDOM" "$2" >"$home/number"
    # shellcheck disable=SC2016
    unshare --mount --net --uts bash -c '
        echo "$2" >/proc/sys/kernel/hostname && mount -t tmpfs tmpfs /run && ip link set lo up && { [[ ! -e /etc/machine-id ]] || mount --bind "$1/number" /etc/machine-id; } && : >"$1/up" && exec sleep infinity
    ' - "$home" "$name" &
    HOLDERS+=($!)
    await 10 test -e "$home/up"
    local holder=$!
    if [[ ${3-} == train ]]; then
        coproc TRAIN_LINK { exec "$TESTS/train.py" link "$link" "p$link" "$SEED"; }
        read -r -t 10 _ <&"${TRAIN_LINK[0]}" || fail "no link"
        exec 8>&"${TRAIN_LINK[1]}" 9<&"${TRAIN_LINK[0]}"
        ip link set "p$link" netns "$holder" name eth0
    else
        ip link add "$link" type veth peer name eth0 netns "$holder"
    fi
    ip address add "$here/30" dev "$link"
    ip link set "$link" up
    nsenter --net --target $holder ip address add "$there/30" dev eth0
    nsenter --net --target $holder ip link set eth0 up
    ADDRESSES+=("$here:$PORT")
    declare -g "ON_$name=nsenter --mount --net --uts --target $holder env XDG_STATE_HOME=$home/state XDG_CACHE_HOME=$home/cache $(asks "http://$here:$PORT")"
}

# end_machines: with their links.
end_machines() {
    kill "${HOLDERS[@]}"
    wait "${HOLDERS[@]}" || true
    HOLDERS=() ADDRESSES=("127.0.0.1:$PORT")
    stop
    start
}

# on NAME: what follows is run there, by "${ON[@]}".
on() {
    local how=ON_$1
    read -r -a ON <<<"${!how}"
}

# refused HERE THERE URL: who comes here is told that somebody there has it open.
refused() {
    local code=0
    on "$1"
    timeout 120 "${ON[@]}" mount.lockbox "$3" "$WORK/$1/dir" -o "$OPTIONS" >"$WORK/said" 2>&1 || code=$?
    [[ $code == 13 ]] && grep -q "a writer on $2 has it open.*take-over goes on in its place" "$WORK/said" || fail "$1 came with $code: $(cat "$WORK/said")"
}

# sees DIRECTORY NOTES: whether all that was acknowledged is there.
sees() {
    "${ON[@]}" timeout 120 "$TESTS/acknowledged.py" read "$1" "$2" >"$WORK/said" 2>&1
}

# turns URL: two machines that take over from each other: from one that sleeps, one that is busy, one that is cut off from the network, and one that died.
# A third one follows all of them.
turns() {
    local i code a=left b=right swap how hows=(dead asleep busy cut) notes=$WORK/turns.notes cut=$WORK/cut.notes link pid others
    machine left 1
    machine right 2
    machine watcher 3
    stop
    start
    rm -f "$notes"
    create_at "$1"
    on left
    timeout 120 "${ON[@]}" mount.lockbox "$1" "$WORK/left/dir" -o "$OPTIONS"
    on watcher
    timeout 120 "${ON[@]}" mount.lockbox "$1" "$WORK/watcher/dir" -o "$OPTIONS,ro,log=$WORK/watcher/log"
    for ((i = 1; i <= TURNS; i++)); do
        how=${hows[i % 4]}
        [[ $a == left ]] && link=lb1-$$ || link=lb2-$$
        pid=$(daemons "$WORK/$a")
        mapfile -t others < <(pgrep --parent "$pid")
        on $a
        write_to "$WORK/$a/dir" "$notes"
        next_step $((RANDOM % EACH + 1))
        case $how in
        asleep)
            kill -STOP "$WRITER" "$pid" "${others[@]}" 2>/dev/null
            ;;
        cut)
            ip link set "$link" down
            await 120 says_that_the_server_is_away "$WORK/$a/dir"
            ;;
        dead)
            kill -9 "$pid" "${others[@]}" 2>/dev/null
            fallen
            grep -qE ' (ENOTCONN|ECONNABORTED|EIO)$' "$WORK/fell" || fail "the writer fell: $(cat "$WORK/fell")"
            "${ON[@]}" umount -l "$WORK/$a/dir"
            ;;
        esac
        refused $b $a "$1"
        timeout 120 "${ON[@]}" mount.lockbox "$1" "$WORK/$b/dir" -o "$OPTIONS,take-over" >"$WORK/said" 2>&1 || fail "$b did not take over: $(cat "$WORK/said")"
        case $how in
        asleep)
            kill -CONT "${others[@]}" "$pid" "$WRITER" 2>/dev/null
            ;;
        cut)
            # It waits, and what it was told is noted. The other one works meanwhile.
            cp "$notes" "$cut"
            all_there "$WORK/$b/dir" "$cut"
            "${ON[@]}" timeout 120 "$TESTS/acknowledged.py" write "$WORK/$b/dir" "$cut" "$SEED" 5 >"$WORK/said" || fail "$b did not write: $(cat "$WORK/said")"
            ip link set "$link" up
            ;;
        esac
        if [[ $how != dead ]]; then
            fallen
            grep -qE 'EROFS$' "$WORK/fell" || fail "who was taken over from was told: $(cat "$WORK/fell")"
            on $a
            code=0
            "${ON[@]}" lockbox status "$WORK/$a/dir" >"$WORK/said" || code=$?
            [[ $code == 2 ]] || fail "the status of a mount that became read-only ended with $code: $(cat "$WORK/said")"
            grep -q 'read-only because .*another writer took over' "$WORK/said" || fail "$(cat "$WORK/said")"
            # It reads on what it was told, as the other one does.
            all_there "$WORK/$a/dir" "$notes"
            timeout 120 "${ON[@]}" lockbox umount "$WORK/$a/dir" >"$WORK/said" 2>&1 && fail "an unmount said nothing of what was lost"
            grep -q 'another writer took over' "$WORK/said" || fail "$(cat "$WORK/said")"
        fi
        [[ $how != cut ]] || mv "$cut" "$notes"
        refused $a $b "$1"
        on $b
        all_there "$WORK/$b/dir" "$notes"
        fresh "$1"
        all_there "$WORK/found" "$notes"
        on watcher
        await 60 sees "$WORK/watcher/dir" "$notes"
        watched=$((watched + 1))
        swap=$a a=$b b=$swap
        turns=$((turns + 1))
    done
    on $a
    timeout 120 "${ON[@]}" lockbox umount "$WORK/$a/dir" || fail "the last unmount"
    on watcher
    timeout 120 "${ON[@]}" lockbox umount "$WORK/watcher/dir" || fail "the unmount of who watches"
    [[ ! -s $WORK/watcher/log ]] || fail "who watches was told: $(cat "$WORK/watcher/log")"
    ON=()
    fresh "$1"
    all_there "$WORK/found" "$notes"
    acknowledged=$((acknowledged + $(tail -n 1 "$WORK/said")))
    check_full "$1"
    end_machines
}

# lasts SECONDS: so long, by the scale.
lasts() {
    sleep "$(awk -v seconds="$1" -v scale="$TRAIN" 'BEGIN { print seconds * scale }')"
}

# phase NAME: what the programs note from now on.
phase() {
    echo "$1" >"$WORK/phase.new"
    mv "$WORK/phase.new" "$WORK/phase"
}

# works NAME: a phase that lasts until each program has done a step in it without an error.
works() {
    phase "$1"
    await 900 "$TESTS/train.py" worked "$WORK/train.notes" "$1"
}

# train URL: git, SQLite, an editor and a shell on a mount behind a bad link. What was acknowledged is found by who has nothing but the store, and the table says what each program saw.
train() {
    local pid others code seconds notes=$WORK/train.notes later=$WORK/later.notes
    rm -f "$notes" "$later"
    machine laptop 1 train
    machine desk 2
    stop
    start
    create_at "$1"
    on laptop
    timeout 120 "${ON[@]}" mount.lockbox "$1" "$WORK/laptop/dir" -o "passfile=$WORK/pass,allow-http,allow-private,log=$WORK/laptop/log"
    phase start
    "${ON[@]}" "$TESTS/train.py" work "$WORK/laptop/dir" "$notes" "$WORK/phase" 8>&- 9<&- &
    WRITER=$!
    await 60 test -e "$notes"
    works "a good link"
    for seconds in 10 60 300; do
        phase "cut for $seconds s"
        echo cut >&8
        lasts "$seconds"
        echo mend >&8
        works "after $seconds s"
    done
    phase "1 Mbit/s"
    echo rate 125000 >&8
    lasts 180
    works "1 Mbit/s, later"
    echo rate 12500000 >&8
    phase "30 % loss"
    echo loss 30 >&8
    lasts 180
    works "30 % loss, later"
    echo loss 0 >&8
    works "a good link again"
    # It sleeps for an hour, and another machine takes over.
    pid=$(daemons "$WORK/laptop")
    mapfile -t others < <(pgrep --parent "$pid")
    kill -STOP "$WRITER" "$pid" "${others[@]}"
    phase "asleep"
    on desk
    timeout 120 "${ON[@]}" mount.lockbox "$1" "$WORK/desk/dir" -o "passfile=$WORK/pass,allow-http,allow-private,take-over"
    all_kept "$WORK/desk/dir" "$notes"
    # Of programs in the midst of their work on the laptop.
    "${ON[@]}" rm -f "$WORK/desk/dir/git/.git/index.lock" "$WORK/desk/dir/.letter.swp"
    "${ON[@]}" "$TESTS/train.py" work "$WORK/desk/dir" "$later" "$WORK/phase" 5 100000 8>&- 9<&-
    lasts 3600
    phase "awake, overtaken"
    on laptop
    kill -CONT "${others[@]}" "$pid" "$WRITER"
    await 300 is_read_only "$WORK/laptop/dir"
    lasts 20
    kill "$WRITER"
    await 300 gone "$WRITER"
    wait "$WRITER" || fail "the programs ended badly"
    WRITER=
    code=0
    timeout 120 "${ON[@]}" lockbox umount "$WORK/laptop/dir" >"$WORK/said" 2>&1 || code=$?
    echo "lockbox umount on the laptop ended with $code: $(cat "$WORK/said")"
    on desk
    timeout 120 "${ON[@]}" lockbox umount "$WORK/desk/dir" || fail "the unmount on the desk"
    ON=()
    fresh "$1"
    all_kept "$WORK/found" "$notes"
    all_kept "$WORK/found" "$later"
    check_full "$1"
    "$TESTS/train.py" report "$notes"
    "$TESTS/train.py" report "$later"
    echo "log of the laptop's daemon:"
    cat "$WORK/laptop/log"
    exec 8>&- 9<&-
    end_machines
}

# slow URL: large files through a link of 1 Mbit/s and of 128 kbit/s. What is printed: seconds and bytes beside those of the link alone.
slow() {
    local began counted
    machine laptop 1 train
    stop
    start
    create_at "$1"
    on laptop
    timeout 120 "${ON[@]}" mount.lockbox "$1" "$WORK/laptop/dir" -o "passfile=$WORK/pass,allow-http,allow-private,log=$WORK/laptop/log"
    stored 60000000 125000
    stored 4194304 16000
    stored 20000000 12500000
    echo rate 125000 >&8
    "${ON[@]}" lockbox umount "$WORK/laptop/dir"
    rm -rf "$WORK/laptop/cache"
    timeout 120 "${ON[@]}" mount.lockbox "$1" "$WORK/laptop/dir" -o "passfile=$WORK/pass,allow-http,allow-private,ro,log=$WORK/laptop/log"
    count_bytes >/dev/null
    began=$EPOCHREALTIME
    "${ON[@]}" cmp "$WORK/20000000" "$WORK/laptop/dir/20000000" || fail "another content"
    counted=$(count_bytes)
    compare "read 20000000 bytes at 125000 a second" 20000000 125000 "$began" "${counted% *}"
    timeout 300 "${ON[@]}" lockbox umount "$WORK/laptop/dir"
    ON=()
    fresh "$1"
    cmp "$WORK/60000000" "$WORK/found/60000000" && cmp "$WORK/4194304" "$WORK/found/4194304" || fail "another content"
    exec 8>&- 9<&-
    end_machines
}

# stored BYTES RATE: a file of so many bytes is written and synced at this rate.
stored() {
    local began counted
    head -c "$1" /dev/urandom >"$WORK/$1"
    echo "rate $2" >&8
    count_bytes >/dev/null
    began=$EPOCHREALTIME
    "${ON[@]}" timeout 3600 dd if="$WORK/$1" of="$WORK/laptop/dir/$1" bs=1M conv=fsync status=none || fail "$1 bytes at $2 a second"
    counted=$(count_bytes)
    compare "wrote $1 bytes at $2 a second" "$1" "$2" "$began" "${counted#* }"
}

# count_bytes: prints the bytes to the laptop and from it since the last time.
count_bytes() {
    local counted
    echo count >&8
    read -r -t 10 counted <&9
    echo "$counted"
}

# compare WHAT BYTES RATE BEGAN CARRIED
compare() {
    awk -v what="$1" -v bytes="$2" -v rate="$3" -v began="$4" -v now="$EPOCHREALTIME" -v carried="$5" \
        'BEGIN { printf "%s: %.1f s, %.2f of the least; %d bytes carried, %.2f\n", what, now - began, (now - began) * rate / bytes, carried, carried / bytes }'
}

is_read_only() {
    [[ $("${ON[@]}" lockbox status "$1" 2>/dev/null) == *'read-only because'* ]]
}

# all_kept DIRECTORY NOTES: each step of train.py that was acknowledged. What is checked is a copy, which git and SQLite may write to.
all_kept() {
    rm -rf "$WORK/copy"
    "${ON[@]}" timeout 300 rsync -aH "$1/" "$WORK/copy/"
    "$TESTS/train.py" check "$WORK/copy" "$2" || fail "in $1"
}

# mounts ROUND
mounts() {
    local part
    mkdir -p "$WORK/dir"
    for part in $PARTS; do
        # Of this run alone: a daemon of the machine is found by it.
        "$part" "$PLACE/$part$1-$PORT"
    done
}

told_of_mounts() {
    echo "mounts on $NAME: $MOUNTS rounds of $PARTS; $outages times without a server for $OUTAGE s, $deaths daemons killed, $turns times taken over, which $watched times a third machine saw; $acknowledged steps were acknowledged, and all of them read by processes that had nothing but the store"
}
