#!/usr/bin/env bash
# Asks a real share daemon everything that share/openapi.json allows and forbids, and compares the answers with it.
#
#   tests/share.sh [EXAMPLES]      generated cases for each operation and phase (default 10); takes about half a minute
#
# Needs python3-venv; schemathesis is installed into the target directory. BIN=FILE names another lockbox-share.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

examples=${1:-10}
# Pinned so that a run next year tests the same thing.
SCHEMATHESIS=4.32.5
target=${CARGO_TARGET_DIR:-$PWD/target}
venv=$target/schemathesis
bin=${BIN:-$target/debug/lockbox-share}
[[ -x $bin ]] || cargo build --quiet --workspace --bins --tests || exit 1
if ! "$venv/bin/schemathesis" --version 2>/dev/null | grep -q "$SCHEMATHESIS"; then
    python3 -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "schemathesis==$SCHEMATHESIS" || exit 1
fi

work=$(mktemp -d)
daemon=
end() {
    [[ -z $daemon ]] || kill "$daemon" 2>/dev/null
    [[ -z $daemon ]] || wait "$daemon" 2>/dev/null
    rm -rf "$work"
}
trap end EXIT
"$bin" serve --state-dir "$work/state" --unix-socket none --metrics-listen none --listen 127.0.0.1:0 \
    --requests-per-minute 0 --durability none >"$work/out" 2>"$work/log" &
daemon=$!
for _ in $(seq 6000); do
    grep -q '^ready=1' "$work/out" && break
    kill -0 "$daemon" 2>/dev/null || break
    sleep 0.05
done
grep -q '^ready=1' "$work/out" || { cat "$work/log"; exit 1; }
address=$(sed -n 's/^http=//p' "$work/out")

# Not checked: that every message which the schema allows is accepted. No schema can say what makes a capsule well formed, nor that an
# upload must exist; share/server/tests/http does. A watch waits up to a minute for each case and has tests of its own.
cd "$work" || exit 1
"$venv/bin/schemathesis" run "$OLDPWD/share/openapi.json" --url "http://$address" --seed 7 --max-examples "$examples" \
    --header 'Authorization: Bearer AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA' \
    --phases examples,coverage,fuzzing --exclude-checks positive_data_acceptance --exclude-path-regex '/watch$' \
    --suppress-health-check all --continue-on-failure --no-color >"$work/report" 2>&1
status=$?
if [[ $status -ne 0 ]] || ! kill -0 "$daemon" 2>/dev/null; then
    cat "$work/report" "$work/log"
    exit 1
fi
echo "share: $(sed -n 's/^ *\([0-9]* generated\).*/\1/p' "$work/report") cases, all answered as share/openapi.json says"
