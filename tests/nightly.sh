#!/usr/bin/env bash
# Runs the long form of every random, timed or sampled test and writes a table of the results to target/nightly/results.md.
#
#   tests/nightly.sh [CAMPAIGN...]     all, or the named ones
#
# Campaigns, by their names in the table below: crash models damage faults hostile fuzz kills writers moments interrupts
#   schedules portal mounts fsx pjdfstest stress openapi versitygw train azurite
#
# HOURS=N scales every campaign: 1 (the default) takes about an hour for each of the longest and some eight hours in all.
# SEED=N repeats the random ones; without it the seed is today's date, which the table shows. KEEP_RELIABILITY=1 also writes the
# figures into tests/RELIABILITY.md. Needs the packages that tests/run.sh installs, root and /dev/fuse.
# Ends with 0 only when every campaign passed. A campaign that cannot run here is a failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

target=${CARGO_TARGET_DIR:-$PWD/target}
logs=$target/nightly
hours=${HOURS:-1}
export SEED=${SEED:-$(date -u +%Y%m%d)} CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 RELEASE=1
export PROGRAMS=$logs/programs PAGE=-
[[ -z ${KEEP_RELIABILITY-} ]] || unset PAGE

# Cases of tests/mount that have a long form; those of "kills" apart.
long_cases='CASE_TIMEOUT=7200 tests/mount/run.sh killed_at_any acknowledged_survives_the_death flipped_bit permissions_change_as tree_copied tree_unpacked tree_packed add_extract
    large_file_passes many_files memory_stays large_history'
long_cases=${long_cases//$'\n'/ }

# Tests of the library with random operations: more seeds than usual, and a directory of a million entries.
models='cargo test -p lockbox --release --lib -- no_crash_raises copies_written_apart an_older_copy difference::differences
    trees_of_long_values random_operations names_that_share content_equals what_a_snapshot_shows a_crash_leaves snapshots_show_the_same
    entries_of_a_large_directory'
models=${models//$'\n'/ }

# One row each: NAME COMMAND. Sizes follow from HOURS and from the rates in tests/RELIABILITY.md and tests/SUITES.md.
campaigns=(
    "crash       STATES=$((200000 * hours)) tests/reliability.sh crash"
    "models      env -u SEED SEEDS=$((30 * hours)) ENTRIES=1000000 $models"
    "damage      FLIPS=all tests/reliability.sh damage"
    "faults      FAULTS=all tests/reliability.sh faults"
    "hostile     tests/reliability.sh hostile"
    "fuzz        FUZZ=$((120 * hours)) tests/reliability.sh fuzz"
    "kills       KILLS=$((25 * hours)) tests/reliability.sh kills"
    "writers     KILLS=$((500 * hours)) tests/reliability.sh writers"
    "moments     ROUNDS=$((100 * hours)) tests/reliability.sh moments"
    "interrupts  ROUNDS=$((10 * hours)) tests/reliability.sh interrupts"
    "schedules   SCHEDULES=$((10000 * hours)) cargo test -p lockbox-remote --release schedules"
    "portal      FAULTS=all cargo test -p lockbox-remote --release captive_portal"
    "mounts      KILLS=$((10 * hours)) FLIPS=$((200 * hours)) STEPS=$((10000 * hours)) SOURCES=5500 LARGE=1024 MANY=100000 TREE=100 COMMITS=4000 $long_cases"
    "fsx         tests/suites/fsx.sh --operations $((100000 * hours)) --seeds 3"
    "pjdfstest   ROUNDS=$((5 * hours)) tests/suites/pjdfstest.sh"
    "stress      SECONDS_EACH=30 tests/suites/stress.sh"
    "openapi     BIN=$PROGRAMS/lockbox-share tests/share.sh $((100 * hours))"
    "versitygw   ROUNDS=5 MOUNTS=1 OUTAGE=$((120 * hours)) KILLS=$((25 * hours)) TURNS=$((20 * hours)) tests/campaign/versitygw.sh"
    "train       ROUNDS=0 MOUNTS=1 PARTS='train slow' TRAIN=$hours tests/campaign/versitygw.sh"
    "azurite     ROUNDS=5 tests/campaign/azurite.sh"
)

names=()
for row in "${campaigns[@]}"; do names+=("${row%% *}"); done
for name in "$@"; do
    if [[ " ${names[*]} " != *" $name "* ]]; then
        echo "tests/nightly.sh: no campaign '$name'; the campaigns are: ${names[*]}" >&2
        exit 2
    fi
done
if [[ $EUID -ne 0 || ! -e /dev/fuse ]]; then
    echo 'tests/nightly.sh: needs root and /dev/fuse' >&2
    exit 1
fi

mkdir -p "$PROGRAMS"
echo 'building the programs'
cargo build --quiet --release --workspace --bins --tests || exit 1
install -m 755 "$target"/release/{lockbox,mount-lockbox,lockbox-share} "$PROGRAMS"

results=$logs/results.md
{
    echo "# Long tests of $(git rev-parse --short HEAD 2>/dev/null || echo 'an unknown commit'), $(date -u +%Y-%m-%d), SEED=$SEED"
    echo
    echo '| campaign | outcome | seconds | last line | command |'
    echo '|---|---|---:|---|---|'
} >"$results"
failed=0
for row in "${campaigns[@]}"; do
    read -r name command <<<"$row"
    [[ $# -eq 0 || " $* " == *" $name "* ]] || continue
    echo "=== $name: $command"
    started=$SECONDS outcome=passed
    bash -c "$command" >"$logs/$name.log" 2>&1 || outcome=FAILED
    if [[ $outcome == FAILED ]]; then
        failed=$((failed + 1))
        tail -n 40 "$logs/$name.log" | cut -c -400 | sed 's/^/        | /'
    fi
    last=$(grep -aE '[[:alnum:]]' "$logs/$name.log" | tail -n 1 | cut -c -200 | tr '|' '/')
    printf '| %s | %s | %d | %s | `%s` |\n' "$name" "$outcome" $((SECONDS - started)) "$last" "$command" | tee -a "$results"
done
echo "$failed campaigns failed; results in $results, logs beside them"
[[ $failed -eq 0 ]]
