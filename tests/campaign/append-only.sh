#!/usr/bin/env bash
# Backups with a key that may add objects and not delete them, as lockbox-recipes(7) sets it up, on versitygw with a bucket policy and versions of objects; then what a thief of
# that key does, without and with the passphrase, and how the owner undoes it. Needs the programs in $PROGRAMS, the server in $VERSITYGW, curl and python3; versitygw.sh runs it. All that it makes is in a directory of its own that it removes.
set -euo pipefail
: "${VERSITYGW:?where the server is}"
PATH=${PROGRAMS:?where the programs are}:$PATH
WORK=$(mktemp -d "${TMPDIR:-/tmp}/lockbox-append.XXXXXX")
export LOCKBOX_PASSFILE=$WORK/pass XDG_CACHE_HOME=$WORK/cache XDG_STATE_HOME=$WORK/state LOCKBOX_REMOTE=allow-http,allow-private
export AWS_ACCESS_KEY_ID=adder AWS_SECRET_ACCESS_KEY=addersecret AWS_REGION=us-east-1
export ROOT_ACCESS_KEY=owner ROOT_SECRET_KEY=ownersecret
BOX=s3://bucket/documents
SERVER=
trap '[[ -z $SERVER ]] || kill "$SERVER"; rm -rf --one-file-system "$WORK"' EXIT

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# request STATUS USER METHOD PATH [CURL-OPTION...]: the body goes to $WORK/body.
request() {
    local status
    status=$(curl --silent --show-error --aws-sigv4 aws:amz:us-east-1:s3 --user "$2:${2}secret" --header 'x-amz-content-sha256: UNSIGNED-PAYLOAD' \
        --request "$3" "${@:5}" --output "$WORK/body" --write-out '%{http_code}' "$AWS_ENDPOINT_URL$4")
    [[ $status == "$1" ]] || fail "$*: status $status: $(cat "$WORK/body")"
}

# current SINCE: key and version of each object whose current version was written since then. (This server dates earlier versions anew when another one takes their place.)
current() {
    request 200 owner GET '/bucket?prefix=documents%2F&versions='
    python3 - "$1" "$WORK/body" <<'PYTHON'
import sys
from xml.etree import ElementTree
space = "{http://s3.amazonaws.com/doc/2006-03-01/}"
for version in ElementTree.parse(sys.argv[2]).getroot().iter(space + "Version"):
    if version.findtext(space + "IsLatest") == "true" and version.findtext(space + "LastModified") >= sys.argv[1]:
        print(version.findtext(space + "Key"), version.findtext(space + "VersionId"))
PYTHON
}

# roll_back SINCE: deletes these versions, as the owner; says how many.
roll_back() {
    local key version count=0
    while read -r key version; do
        request 204 owner DELETE "/bucket/$key?versionId=$version"
        count=$((count + 1))
    done < <(current "$1")
    echo "$count"
}

# The store dates objects in whole seconds.
next_second() {
    local now
    now=$(date -u +%s)
    until (($(date -u +%s) > now)); do sleep 0.02; done
    date -u +%Y-%m-%dT%H:%M:%SZ
}

# snapshot_names [OPTION...]: in a line.
snapshot_names() {
    lockbox snapshot ls --json "$@" "$BOX" | python3 -c 'import json, sys; print(*(json.loads(line)["name"] for line in sys.stdin))'
}

restored() {
    rm -rf "$WORK/out"
    lockbox extract "$@" --to "$WORK/out" "$BOX"
    diff -r "$WORK/src" "$WORK/out/src" || fail 'other content'
}

mkdir -p "$WORK"/{store/bucket,iam,versions,src}
echo passphrase >"$LOCKBOX_PASSFILE"
chmod 600 "$LOCKBOX_PASSFILE"
# Below the ports that the kernel gives to clients: one of those could take it while no server listens.
while PORT=$((10000 + SRANDOM % 20000)) && (: >"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; do :; done
export AWS_ENDPOINT_URL=http://127.0.0.1:$PORT
"$VERSITYGW" --quiet --port "127.0.0.1:$PORT" --iam-dir "$WORK/iam" posix --versioning-dir "$WORK/versions" "$WORK/store" >"$WORK/server.log" 2>&1 &
SERVER=$!
until (: >"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; do
    kill -0 "$SERVER" 2>/dev/null || fail "the server ended: $(cat "$WORK/server.log")"
    sleep 0.05
done
"$VERSITYGW" admin --access owner --secret ownersecret --endpoint-url "$AWS_ENDPOINT_URL" create-user --access adder --secret addersecret --role user
cat >"$WORK/versioning" <<'XML'
<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>Enabled</Status></VersioningConfiguration>
XML
cat >"$WORK/policy" <<'JSON'
{"Version": "2012-10-17", "Statement": [
  {"Effect": "Allow", "Principal": {"AWS": ["adder"]}, "Action": ["s3:ListBucket"], "Resource": "arn:aws:s3:::bucket"},
  {"Effect": "Allow", "Principal": {"AWS": ["adder"]}, "Action": ["s3:GetObject", "s3:PutObject"],
   "Resource": ["arn:aws:s3:::bucket/documents", "arn:aws:s3:::bucket/documents/*"]}]}
JSON
request 200 owner PUT '/bucket?versioning=' --data-binary "@$WORK/versioning"
request 204 owner PUT '/bucket?policy=' --data-binary "@$WORK/policy"

# Backups and their pruning need no right to delete, and doctor says what lacks.
lockbox doctor "$BOX" >"$WORK/said" || fail "$(cat "$WORK/said")"
[[ $(awk '$1 == "advice" { print $2 }' "$WORK/said") == removal ]] || fail "$(cat "$WORK/said")"
for night in 1 2 3; do
    head -c 3000000 /dev/urandom >"$WORK/src/large"
    echo "$night" >"$WORK/src/small"
    lockbox backup --keep-last 2 "$WORK/src" "$BOX" >/dev/null
done
[[ $(lockbox snapshot ls --json "$BOX" | wc -l) == 2 ]] || fail 'not pruned'
restored
lockbox remote collect "$BOX" >"$WORK/said"
grep -q '^0 objects removed, ' "$WORK/said" || fail "$(cat "$WORK/said")"

# The thief has the key: nothing can be deleted, and what is overwritten has its earlier version.
moment=$(next_second)
echo junk >"$WORK/junk"
(cd "$WORK/store/bucket" && find documents -type f) >"$WORK/objects"
while read -r key; do
    request 403 adder DELETE "/bucket/$key"
    request 200 adder PUT "/bucket/$key" --upload-file "$WORK/junk"
done <"$WORK/objects"
if lockbox check --full "$BOX" >/dev/null 2>&1; then fail 'objects of the thief are taken for the archive'; fi
[[ $(roll_back "$moment") == "$(wc -l <"$WORK/objects")" ]] || fail 'not all were brought back'
lockbox check --full "$BOX" >/dev/null
restored

# The thief has the passphrase, too, and deletes everything in the archive: its objects stay.
names=$(snapshot_names)
moment=$(next_second)
# shellcheck disable=SC2086
lockbox snapshot rm "$BOX" $names
lockbox rm -r "$BOX:/src"
lockbox remote collect --remote grace=1h "$BOX" >/dev/null
[[ -z $(lockbox ls "$BOX") && -z $(lockbox snapshot ls --json "$BOX") ]] || fail 'the thief left something'
(($(roll_back "$moment") > 0)) || fail 'nothing to roll back'
# Who saw the newer one is told.
code=0
lockbox ls "$BOX" >/dev/null 2>"$WORK/said" || code=$?
[[ $code == 16 ]] || fail "an older archive ended with $code: $(cat "$WORK/said")"
found=$(snapshot_names --accept-older)
[[ $found == "$names" ]] || fail "$found"
restored
restored --snapshot "${names##* }"
lockbox check --full "$BOX" >/dev/null
echo "append-only: 3 backups, $(wc -l <"$WORK/objects") objects overwritten and brought back, an emptied archive rolled back"
