#!/usr/bin/env bash
# Shows lockbox at work: builds it, makes an archive, uses it as a folder, and proves what it promises.
#
# For a Debian-like machine with a Rust toolchain. Everything is made in a temporary directory and taken away at the end;
# the programs stay in target/quick.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

as_root() {
    if [[ $EUID -eq 0 ]]; then "$@"; else sudo "$@"; fi
}

say() {
    printf '\n\033[1m%s\033[0m\n' "$*"
}

# Shows a command as it would be typed, then runs it.
run() {
    printf '\033[32m$\033[0m %s\n' "$1"
    eval "$1"
}

missing=()
command -v fusermount3 >/dev/null || missing+=(fuse3)
command -v cc >/dev/null || missing+=(gcc libc6-dev)
if [[ ${#missing[@]} -gt 0 ]]; then
    say "Installing ${missing[*]}"
    as_root apt-get -q update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
fi
if [[ ! -e /dev/fuse ]]; then
    as_root modprobe fuse || true
fi
if [[ ! -e /dev/fuse ]]; then
    echo 'This machine has no /dev/fuse, so nothing can be mounted here.' >&2
    exit 1
fi

say 'Building (some minutes the first time)'
# The profile "quick" leaves out what makes packages a little faster and their build much longer.
cargo build --profile quick --locked --package lockbox-cli --package lockbox-fuse --bins
programs=${CARGO_TARGET_DIR:-$PWD/target}/quick

scratch=$(mktemp -d)
finish() {
    code=$?
    cd /
    if mountpoint -q "$scratch/folder"; then
        lockbox umount "$scratch/folder" || true
    fi
    rm -rf --one-file-system "$scratch"
    [[ $code -eq 0 ]] || echo "packaging/try.sh: failed" >&2
    exit "$code"
}
trap finish EXIT
mkdir "$scratch/programs"
cp "$programs/lockbox" "$scratch/programs/lockbox"
cp "$programs/mount-lockbox" "$scratch/programs/mount.lockbox"
PATH=$scratch/programs:$PATH
cd "$scratch"

say 'An archive, opened by a passphrase in a private file'
run '(umask 077; echo "correct horse battery staple" > passphrase)'
run 'lockbox create --passfile passphrase secrets.lbx'
run 'ls -l secrets.lbx'

say 'The archive as a folder'
run 'mkdir folder'
run 'lockbox mount --passfile passphrase secrets.lbx folder'
run 'echo "meet me at the old mill" > folder/letter.txt'
run 'mkdir -p folder/accounts/2026'
run 'seq 1 200000 > folder/accounts/2026/numbers.csv'
run 'ln -s accounts/2026/numbers.csv folder/current'
run 'grep -c 7 folder/current'
run 'sed -i "s/old mill/bridge/" folder/letter.txt'
run 'cat folder/letter.txt'
run 'find folder -type f -exec sha256sum {} + > before'
run 'ls -lR folder'
run 'df -h folder'

say 'Away, and back again'
run 'lockbox umount folder'
run 'ls -A folder'
run 'lockbox check --full --passfile passphrase secrets.lbx'
run 'lockbox mount --passfile passphrase secrets.lbx folder'
run 'sha256sum --check before'
run 'lockbox umount folder'

say 'What the file shows to others'
for word in letter accounts numbers mill bridge horse; do
    if grep -aq "$word" secrets.lbx; then
        echo "the word '$word' stands in the archive" >&2
        exit 1
    fi
done
echo 'None of: letter, accounts, numbers, mill, bridge, horse.'
run 'od -An -tx1 -j 200000 -N 48 secrets.lbx'
echo 'wrong passphrase' >wrong
chmod 600 wrong
# shellcheck disable=SC2016
run 'lockbox ls --passfile wrong secrets.lbx || echo "exit code $?"'

say 'Everything worked. The programs are in:'
echo "$programs"
