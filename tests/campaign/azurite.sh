#!/usr/bin/env bash
# Backups and mounts on Azurite, Microsoft's emulator of Azure's blob storage, of a pinned version, on the loopback address. Needs the programs in $PROGRAMS, Node.js 20 or newer and
# python3, and the server: what an earlier run brought below $KEPT (default: the target directory), or npm, which then brings it from its registry without running any of its scripts.
# Variables as of versitygw.sh (ROUNDS, MOUNTS, BUILD_ONLY) and of versitygw-mounts.sh. All else that it makes is in a directory of its own that it removes.
# shellcheck disable=SC2034
set -euo pipefail
VERSION=3.35.0
# What it depends on is what there was then.
BEFORE=2026-11-01
ROUNDS=${ROUNDS:-5}
MOUNTS=${MOUNTS:-$ROUNDS}
PARTS=${PARTS:-programs kills}
KEPT=${KEPT:-${CARGO_TARGET_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/target}/azurite-$VERSION}

build() {
    rm -rf "$KEPT.new"
    mkdir -p "$KEPT.new"
    # Whole or not there.
    npm install --prefix "$KEPT.new" --before "$BEFORE" --ignore-scripts --no-audit --no-fund --loglevel error "azurite@$VERSION"
    rm -rf "$KEPT"
    mv "$KEPT.new" "$KEPT"
}

[[ -e $KEPT/node_modules/azurite/dist/src/blob/main.js ]] || build
[[ -z ${BUILD_ONLY:-} ]] || exit 0
PATH=${PROGRAMS:?where the programs are}:$PATH
WORK=$(mktemp -d "${TMPDIR:-/tmp}/lockbox-azurite.XXXXXX")
export LOCKBOX_PASSFILE=$WORK/pass XDG_CACHE_HOME=$WORK/cache XDG_STATE_HOME=$WORK/state HOME=$WORK
# The account of the emulators, which Microsoft publishes.
export AZURE_STORAGE_ACCOUNT=devstoreaccount1
export AZURE_STORAGE_KEY=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==
REMOTE=(--remote allow-http,allow-private)
NAME="Azurite $VERSION" PLACE=az://box
SERVER=
TESTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/campaign/versitygw-mounts.sh
source "$TESTS/versitygw-mounts.sh"
# shellcheck source=tests/campaign/stores.sh
source "$TESTS/stores.sh"
echo "seed $SEED"

# Never killed: what it knows it writes down every few seconds, and when it ends.
stop() {
    [[ -z ${CUTTING_PID:-} ]] || kill "$CUTTING_PID" 2>/dev/null || true
    [[ -z $SERVER ]] || { kill "$SERVER" 2>/dev/null; wait "$SERVER" 2>/dev/null; } || true
    SERVER=
}
trap 'unmount_all; stop; rm -rf --one-file-system "$WORK"' EXIT

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# Machines of their own, as "turns" makes them, come from other addresses than the loopback one.
start() {
    local host=127.0.0.1
    ((${#ADDRESSES[@]} == 1)) || host=0.0.0.0
    node "$KEPT/node_modules/azurite/dist/src/blob/main.js" --silent --disableTelemetry --disableProductStyleUrl --location "$WORK/store" --blobHost "$host" --blobPort "$PORT" >"$WORK/server.log" 2>&1 &
    SERVER=$!
    until (: >"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; do
        kill -0 "$SERVER" 2>/dev/null || fail "the server ended: $(cat "$WORK/server.log")"
        sleep 0.05
    done
}

asks() {
    echo "AZURE_STORAGE_SERVICE_ENDPOINT=$1/devstoreaccount1"
}

# Below the ports that the kernel gives to clients: one of those could take it while no server listens.
while PORT=$((10000 + SRANDOM % 20000)) && (: >"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; do :; done
export "$(asks "http://127.0.0.1:$PORT")"
ADDRESSES=("127.0.0.1:$PORT")
AZURE=("$TESTS/azure.py" "$AZURE_STORAGE_SERVICE_ENDPOINT")
mkdir -p "$WORK/store" "$WORK/src"
echo passphrase >"$LOCKBOX_PASSFILE"
chmod 600 "$LOCKBOX_PASSFILE"
start
"${AZURE[@]}" make box
BOX=$WORK/a.lbx
lockbox create --weak-kdf --kdf-memory 1 "$BOX"

# with_token RIGHTS SECONDS COMMAND...: with a SAS token for the container in place of the key, of which nothing is to be told. What is told is in $WORK/said.
with_token() {
    local token signature code=0
    token=$("${AZURE[@]}" token box "$1" "$2")
    signature=${token##*sig=}
    (unset AZURE_STORAGE_KEY && AZURE_STORAGE_SAS_TOKEN=$token LOCKBOX_LOG=trace "${@:3}") >"$WORK/said" 2>&1 || code=$?
    ! grep -qF -e "$signature" -e 'sig=' "$WORK/said" || fail "a token was shown: $(cat "$WORK/said")"
    return "$code"
}

raced=0 cut=0
for ((round = 1; round <= ROUNDS; round++)); do
    url=$PLACE/round$round
    head -c 20000000 /dev/urandom >"$WORK/src/large$round"
    lockbox add "$BOX" "$WORK/src/large$round"
    lockbox backup "${REMOTE[@]}" --verify "$BOX" "$url"
    equal "$url"
    echo "$round" >"$WORK/src/small$round"
    lockbox add "$BOX" "$WORK/src/small$round"
    race
    # An upload that is cut is not taken for a whole object.
    head -c 3000000 /dev/urandom >"$WORK/src/more$round"
    lockbox add "$BOX" "$WORK/src/more$round"
    coproc CUTTING { exec "$TESTS/cutting.py" "$PORT" 1000000; }
    read -r port <&"${CUTTING[0]}"
    env "$(asks "http://127.0.0.1:$port")" lockbox backup "${REMOTE[@]}" "$BOX" "$url"
    read -r -t 10 _ <&"${CUTTING[0]}" || fail "no upload was cut"
    kill "$CUTTING_PID"
    wait "$CUTTING_PID" || true
    cut=$((cut + 1))
    equal "$url"
    # What a look at the server leaves there: nothing.
    found=$("${AZURE[@]}" names box)
    lockbox doctor "${REMOTE[@]}" "$url" >"$WORK/said" || fail "$(cat "$WORK/said")"
    [[ $(awk '$1 == "ok"' "$WORK/said" | wc -l) == 10 && $(wc -l <"$WORK/said") == 10 ]] || fail "$(cat "$WORK/said")"
    diff <(echo "$found") <("${AZURE[@]}" names box) || fail "a look left something"
    lockbox remote ls "${REMOTE[@]}" "$PLACE" >"$WORK/said"
    grep -qF "  $url  (record " "$WORK/said" && (($(wc -l <"$WORK/said") == round)) || fail "$(cat "$WORK/said")"
    lockbox remote check --full "${REMOTE[@]}" "$url" >/dev/null
    lockbox remote collect "${REMOTE[@]}" "$url" >/dev/null
    lockbox remote check --full "${REMOTE[@]}" "$url" >"$WORK/said"
    grep -q ' 0 objects .* unreferenced' "$WORK/said" || fail "$(cat "$WORK/said")"
    lockbox backup "${REMOTE[@]}" "$url" "$WORK/back$round.lbx" 2>/dev/null
    lockbox check --full "$WORK/back$round.lbx" 2>/dev/null
done
# One blob that is the file of an archive.
"${AZURE[@]}" put box one.lbx "$BOX"
lockbox ls "${REMOTE[@]}" "$PLACE/one.lbx" >"$WORK/listed"
diff <(lockbox ls "$BOX") "$WORK/listed" || fail "the archive of one blob has something else"
# With tokens: one that may all, one that may read, one that expired.
url=$PLACE/tokens
with_token rwdl 600 lockbox create "${REMOTE[@]}" --weak-kdf --kdf-memory 1 "$url" || fail "$(cat "$WORK/said")"
with_token rwdl 600 lockbox add "${REMOTE[@]}" "$url" "$BOX" || fail "$(cat "$WORK/said")"
with_token rwdl 600 lockbox doctor "${REMOTE[@]}" "$url" || fail "$(cat "$WORK/said")"
with_token rl 600 lockbox ls "${REMOTE[@]}" "$url" || fail "$(cat "$WORK/said")"
with_token rl 600 lockbox ls "${REMOTE[@]}" "$PLACE/one.lbx" || fail "$(cat "$WORK/said")"
with_token rl 600 lockbox doctor "${REMOTE[@]}" "$url" || fail "$(cat "$WORK/said")"
grep -q '^advice  writes  *it refuses the request (status 403 ' "$WORK/said" || fail "$(cat "$WORK/said")"
! with_token rl 600 lockbox mkdir "${REMOTE[@]}" "$url:/new" || fail "who may only read made something"
grep -q '403' "$WORK/said" || fail "$(cat "$WORK/said")"
! with_token rwdl -600 lockbox ls "${REMOTE[@]}" "$url" || fail "a token that expired was good"
grep -q '403' "$WORK/said" || fail "$(cat "$WORK/said")"
((ROUNDS == 0)) || echo "$NAME: $ROUNDS rounds, $raced writers at once, $cut uploads cut, tokens that may all, read, and nothing: nothing lost, nothing mixed, nothing told"
mount_all
