# What new users do, told with the programs that were just built (STORIES: by these names alone). packaging/test-package.sh tells the first
# of them, new-user.txt, with an installed package.
# shellcheck shell=bash disable=SC2317,SC2164

# told ARGUMENT...: by tell.py, in $WORK/story, on a machine without other archives, with the names that a package installs.
told() {
    local name code=0
    mkdir "$WORK/srv" "$WORK/over"
    mount -t tmpfs none "$WORK/over"
    mkdir "$WORK"/over/{sbin,sbin.work,etc,etc.work}
    # mount(8) looks nowhere else.
    for name in mount.lockbox mount.fuse.lockbox; do
        ln -s "$(command -v mount.lockbox)" "$WORK/over/sbin/$name"
    done
    for name in umount.lockbox umount.fuse.lockbox; do
        ln -s "$(command -v lockbox)" "$WORK/over/sbin/$name"
    done
    : >"$WORK/over/etc/fstab"
    unshare --mount --propagation private bash -Eeuo pipefail -c '
        trap "echo \"line \$LINENO: \\\"\$BASH_COMMAND\\\" failed\"" ERR
        awk "/ - fuse\.lockbox / { print \$5 }" /proc/self/mountinfo | while read -r point; do umount -i -l "$point"; done
        for place in sbin etc; do
            target=$(realpath "/$place")
            mount -t overlay -o "lowerdir=$target,upperdir=$1/over/$place,workdir=$1/over/$place.work" none "$target"
        done
        mount --bind "$1/srv" /srv
        mount -t tmpfs -o mode=755 none /run
        cd "$1/story"
        ./tell.py --user "$2" "${@:3}"
    ' - "$WORK" "$TEST_USER" "$@" || code=$?
    umount "$WORK/over"
    return "$code"
}

case_new_users_find_their_way() {
    local cases stories command row
    need_user
    cases=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
    cp -r "$cases/../../story" "$WORK/story"
    cp "$cases/../../../docs/tasks.md" "$WORK/tasks.md"
    # Those of the package itself are told with it.
    rm "$WORK"/story/{install,remove}-deb.txt
    for command in $(lockbox --help | sed -En 's/^  ([a-z-]+) .*/\1/p'); do
        grep -qE "^(ann\\$|root#) .*lockbox $command( |\$)" "$WORK"/story/*.txt || fail "no story has lockbox $command"
    done
    grep -q '^Task: ' "$WORK"/story/*.txt || fail 'no story has the tasks'
    # It is told with an installed package.
    [[ " ${STORIES-} " == *' new-user.txt '* ]] || rm "$WORK/story/new-user.txt"
    # The rows that are no commands name their cases.
    for row in $(grep -oE '`([a-z]+_)+[a-z]+`' "$WORK/tasks.md" | tr -d '`'); do
        grep -qxF "case_$row() {" "$cases"/*.sh || fail "no case is $row"
    done
    # shellcheck disable=SC2086 # words
    mapfile -t stories < <(cd "$WORK/story" && printf '%s\n' ${STORIES:-*.txt})
    told --tasks "$WORK/tasks.md" "${stories[@]}"
}

# story NAME REASON LINE...: which the teller has to say of it, the first of several lines.
story() {
    printf '%s\n' "${@:3}" >"$WORK/story/$1"
    reasons+=("$1: $2")
}

case_a_story_that_is_not_so_is_noticed() {
    local reasons=() reason
    need_user
    cp -r "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../story" "$WORK/story"
    rm "$WORK"/story/*.txt
    story other '--- the story' 'ann$ echo one' two
    story more '--- the story' "ann$ printf 'one\ntwo\n'" one
    story fewer '--- the story' 'ann$ true' one
    story letter '--- the story' 'ann$ echo 2026' '???'
    story words '--- the story' 'ann$ echo the old mill' 'the <words>' 'ann$ echo the new mill' 'the <words>'
    story gap '--- the story' "ann$ printf 'one\ntwo\n'" one ... three
    story success 'exit code 0, and the story has 1' 'ann$ true' '[1]'
    story failure 'exit code 1, and the story has 0' 'ann$ false'
    story unasked '--- the story' 'ann$ echo one' one 'Secret: {{mill}}'
    story unanswered 'nothing more came' 'ann$ read -s -p "Secret: " secret' 'Secret:'
    story plain 'a secret would be seen here' 'ann$ read -p "Secret: " secret' 'Secret: {{mill}}'
    story printed '--- the story' 'ann$ read -s -p "Secret: " secret; echo; echo "it is $secret"' 'Secret: {{mill}}' 'it is'
    story stranger 'nobody types this: bob$ true' 'bob$ true'
    story silence 'nothing was typed' 'Ann does nothing.'
    story left 'mounted still: /srv/ann/box' 'ann$ (umask 077; echo mill >key) && lockbox create --quiet --weak-kdf --kdf-memory 1 --passfile key box.lbx' \
        'ann$ lockbox mount --quiet --passfile key box.lbx'
    echo '| walk | 2, 1 | 9, 9 |' >"$WORK/table"
    story asked 'task walk: (commands, questions) are (2, 0), and the table has (2, 1)' 'Task: walk' '' 'ann$ true' 'ann$ true'
    story typed 'task walk: (commands, questions) are (1, 0), and the table has (2, 1)' 'Task: walk' '' 'ann$ true' '' 'She rests.' '' 'ann$ true'
    story unknown 'task run: (commands, questions) are (1, 0), and the table has None' 'Task: run' '' 'ann$ true'
    cat >"$WORK/story/true" <<'STORY'
Ann asks and answers, and what she reads is so.

ann$ read -s -p "Secret: " secret; echo; echo "it has ${#secret} letters"
Secret: {{mill}}
it has ? letters
ann$ read -p "Name: " name; printf "%s\n" one two "$name"; false
Name: {=Ann=}
one
...
<name>
[1]
ann$ echo <name>
Ann

Task: walk

ann$ read -p "Where: " where
Where: {=there=}
ann$ true
STORY
    local code=0
    told --patience 10 --tasks "$WORK/table" "${reasons[@]%%:*}" true >"$WORK/log" 2>&1 || code=$?
    for reason in "${reasons[@]}"; do
        grep -qxF -- "$reason" "$WORK/log" || { cat "$WORK/log"; fail "not seen: $reason"; }
    done
    grep -qx "told $((${#reasons[@]} + 1)) stories with [0-9]* commands, and ${#reasons[@]} are not so" "$WORK/log" || fail "$(cat "$WORK/log")"
    same "$code" 1
    # What is counted is so, and no claim.
    echo '| walk | 2, 1 | cannot | 2, 0, as root |' >"$WORK/table"
    ! told --patience 10 --tasks "$WORK/table" true >"$WORK/log" 2>&1 || fail "$(cat "$WORK/log")"
    grep -qxF 'true: task walk: another program needs less' "$WORK/log" || fail "$(cat "$WORK/log")"
}
