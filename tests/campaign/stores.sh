# What versitygw.sh and azurite.sh do alike with a backup at $url: sourced by both, whose variables and functions it uses.
# shellcheck shell=bash disable=SC2153,SC2154

# equal URL: what is there is what went in.
equal() {
    rm -rf "$WORK/out"
    mkdir "$WORK/out"
    lockbox extract "${REMOTE[@]}" "$1" --to "$WORK/out" 2>/dev/null
    diff -r "$WORK/src" "$WORK/out" || fail "$1 differs"
}

# Eight at once: those that succeed say the truth, the others name who is there, and the objects belong together.
race() {
    local pids pid won
    pids=()
    for _ in 1 2 3 4 5 6 7 8; do
        lockbox backup "${REMOTE[@]}" --take-over "$BOX" "$url" >"$WORK/said" 2>&1 &
        pids+=($!)
    done
    won=0
    for pid in "${pids[@]}"; do
        wait "$pid" && won=$((won + 1))
    done
    ((won > 0)) || fail "nobody won: $(cat "$WORK/said")"
    raced=$((raced + 8))
    equal "$url"
    lockbox check --full "${REMOTE[@]}" "$url" 2>/dev/null
}

# Mounts, where they can be tried.
mount_all() {
    local round
    if ((MOUNTS == 0)); then
        :
    elif can_mount; then
        for ((round = 1; round <= MOUNTS; round++)); do
            mounts "$round"
        done
        told_of_mounts
    else
        echo "mounts on $NAME: NOT TRIED, for that needs root, /dev/fuse, git, sqlite3, rsync and ip"
    fi
}
