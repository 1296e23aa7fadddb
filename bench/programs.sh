#!/usr/bin/env bash
# Measures programs on the host's disk, gocryptfs and lockbox: unpacking sources, git, SQLite, a build.
#
#   bench/programs.sh     needs root, gocryptfs, git, sqlite3 and cargo; prints a table of seconds, medians
#
#   ROUNDS    interleaved rounds (default 3)          PROGRAMS  directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        OPTIONS   mount options for lockbox
#   BEFORE    directory with older programs, measured in turn with the others as "before"
#   CRATES    how many of cargo's cached crates are unpacked (default 60)
#
# Sources: crates that cargo has downloaded, each unpacked by tar. git: init, add, commit and gc of what was unpacked. SQLite: 200 transactions of
# ten rows with synchronous=FULL. Build: `cargo build --offline` of the crate lockbox-share-protocol with what it needs, sources and target inside.
# The times count what the programs wait for; what stays in caches of the kernel counts for nobody. A program that fails is said to have failed.
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
take_place programs gocryptfs git sqlite3 cargo
unset CARGO_TARGET_DIR
mount_side_by_side

mapfile -t crates < <(find "${CARGO_HOME:-$HOME/.cargo}/registry/cache" -name '*.crate' | sort | head -n "${CRATES:-60}")
[[ ${#crates[@]} -gt 0 ]] || { echo 'bench/programs.sh: cargo has no crates in its cache' >&2 && exit 1; }

unpack() {
    mkdir sources
    local crate
    for crate in "${crates[@]}"; do tar -xzf "$crate" -C sources; done
}
commit() {
    git -C sources init --quiet
    git -C sources add .
    git -C sources -c user.name=a -c user.email=a@example.org commit --quiet --message=all
    git -C sources gc --quiet
}
transactions() {
    local number
    {
        echo 'pragma synchronous=full; create table t (a integer primary key, b text);'
        for ((number = 0; number < 200; number++)); do
            echo 'begin;'
            for _ in 1 2 3 4 5 6 7 8 9 10; do echo "insert into t (b) values ('$number some text of a row');"; done
            echo 'commit;'
        done
    } | sqlite3 database
}
build() {
    mkdir project
    git -C "$repository" archive HEAD | tar -x -C project
    (cd project && cargo build --quiet --offline --package lockbox-share-protocol)
}

echo "$(nproc) processors; load before $(cut -d' ' -f1-3 /proc/loadavg); ${#crates[@]} crates" >&2
for ((round = 1; round <= ${ROUNDS:-3}; round++)); do
    for name in $(in_turn "$round" "${candidates[@]}"); do
        work=$scratch/$name/work
        mkdir "$work"
        for what in unpack commit transactions build; do
            began=$EPOCHREALTIME
            # As a job and not in a condition, which would switch set -e off within.
            (cd "$work" && "$what") &
            if wait $!; then
                echo "$what $name $began $EPOCHREALTIME"
            else
                echo "$what $name failed failed"
            fi
        done
        rm -rf --one-file-system "$work"
        sync
    done
done | python3 -c '
import collections, sys
seen = collections.defaultdict(list)
for line in sys.stdin:
    what, name, began, ended = line.split()
    seen[what, name].append(float("nan") if ended == "failed" else float(ended) - float(began))
def median(values):
    return float("nan") if any(value != value for value in values) else sorted(values)[len(values) // 2]
names = sys.argv[1:]
others = [name for name in names if name in ("gocryptfs", "before")]
print("| seconds | " + " | ".join(names + [f"{other} / lockbox" for other in others]) + " |\n|---" + "|---:" * len(names + others) + "|")
for what in dict.fromkeys(what for what, _ in seen):
    took = {name: median(seen[what, name]) for name in names}
    cells = [took[name] for name in names] + [took[other] / took["lockbox"] for other in others]
    print(f"| {what} | " + " | ".join(f"{cell:.2f}" for cell in cells).replace("nan", "failed") + " |")
' "${candidates[@]}"
