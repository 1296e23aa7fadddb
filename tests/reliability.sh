#!/usr/bin/env bash
# Runs the campaigns of tests/RELIABILITY.md and writes their figures into its table, each row with date, commit and machine.
#
#   tests/reliability.sh [CAMPAIGN...]     all of them, or those named: crash faults damage hostile fuzz kills writers moments interrupts
#
# About a quarter of an hour on two cores. Longer, each as far as its variable says; such a run has a row of its own:
#   STATES=1000000   crash states (default 10000)        SEED=1000   the first seed of that campaign
#   FLIPS=all        every byte of the small archives, with and without snapshots, and of a full log
#   FAULTS=all       every operation under snapshots, restores and backups, in the place of every third or so
#   KILLS=50         kills of the daemon under each load (default 4), and of synced writers (default 40)
#   EXECUTIONS=100000000  of each decoder, on changed inputs of the corpus, in the place of fuzzing with coverage
#   FUZZ=3600        seconds for each fuzz target (default 5)
#   ROUNDS=30        of snapshots compared with copies (default 10), and of interrupted commands (default 1)
# RELEASE=1 builds the campaigns optimised, for the long ones. PAGE=FILE writes there instead; PAGE=- only prints.
# What kills and mounts needs root. A campaign that cannot run is said to be, and leaves its row as it was; one that fails has its log named, and the exit code is 1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
page=${PAGE:-tests/RELIABILITY.md}
logs=${CARGO_TARGET_DIR:-$PWD/target}/reliability
mkdir -p "$logs"
machine="$(nproc) processors, $(uname -s) $(uname -r | cut -d- -f1)"
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
# The page itself changes with every row.
[[ -z $(git status --porcelain --untracked-files=no -- . ":!tests/RELIABILITY.md" 2>/dev/null) ]] || commit+=' and changes'
failed=0

# library FILTER...: the tests of the library that the filters name.
library() {
    cargo test --quiet ${RELEASE:+--release} --workspace --lib -- --nocapture "$@"
}

# The rest of each summary line, whatever the runner put before it.
summaries() {
    sed -n 's/^.*summary: //p' "$1"
}

# Adds up lines "N WORD: what".
added() {
    awk -v word="$1" '{ total += $1; n = $1; sub(/^[0-9]+ [a-z]+: /, ""); parts = parts (parts ? ", " : "") n " " $0 }
        END { if (total) printf "%d %s: %s\n", total, word, parts }'
}

# record ROW COMMAND TRIED SECONDS: puts the row in the place of the one of that name.
record() {
    printf '%s: %s (%d s)\n' "$1" "$3" "$4"
    [[ $page != - ]] || return 0
    ROW=$1 COMMAND=$2 TRIED=$3 TOOK=$4 COMMIT=$commit MACHINE=$machine python3 - "$page" <<'END'
import datetime, os, sys
begin, end = "<!-- figures of tests/reliability.sh -->", "<!-- end of the figures -->"
page = open(sys.argv[1], encoding="utf-8").read()
before, found, rest = page.partition(begin)
table, closed, after = rest.partition(end)
if not found or not closed:
    sys.exit("the page has no place for the figures")
head = ["| campaign | tried, without a violation | when | commit | machine | command |", "|---|---|---|---|---|---|"]
rows = [line for line in table.splitlines() if line.startswith("| ") and line not in head]
value = os.environ
when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d") + f", {value['TOOK']} s"
cells = [value["ROW"], value["TRIED"], when, value["COMMIT"], value["MACHINE"], f"`{value['COMMAND']}`"]
row = "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
name = "| " + value["ROW"]
names = [line.split(" | ")[0] for line in rows]
if name in names:
    rows[names.index(name)] = row
else:
    rows.append(row)
open(sys.argv[1], "w", encoding="utf-8").write(before + begin + "\n" + "\n".join(head + rows) + "\n" + end + after)
END
}

# campaign NAME ROW COMMAND RUNNER COUNTER: COUNTER makes the figures of what RUNNER told.
campaign() {
    local name=$1 row=$2 command=$3 runner=$4 counter=$5 log=$logs/$1.log started=$SECONDS tried
    if ! "$runner" >"$log" 2>&1; then
        failed=$((failed + 1))
        echo "FAILED: $name; see $log"
        tail -n 20 "$log" | cut -c -300 | sed 's/^/    | /'
        return
    fi
    tried=$("$counter" "$log")
    if [[ -z $tried ]]; then
        failed=$((failed + 1))
        echo "FAILED: $name told no figures; see $log"
        return
    fi
    record "$row" "$command" "$tried" $((SECONDS - started)) || failed=$((failed + 1))
}

last_summary() { summaries "$1" | tail -n 1; }
count_faults() { summaries "$1" | added faults; }
count_trials() { summaries "$1" | added trials; }

# Lines "ok TARGET N executions in S s".
count_executions() {
    awk '/^ok .* executions in / { total += $3; parts = parts (parts ? ", " : "") $2 " " $3 }
        END { if (total) printf "%d executions: %s\n", total, parts }' "$1"
}

count_kills() { grep -oE '[0-9]+ kills, .*' "$1" | paste -sd ';' | sed 's/;/; /g'; }

last_kills() { grep -oE '^[0-9]+ kills, .*' "$1"; }
last_moments() { grep -E '^seed [0-9]+: [0-9]+ rounds, ' "$1"; }
last_interrupts() { grep -oE '^[0-9]+ interruptions .*' "$1"; }

run_crash() { STATES=${STATES:-10000} library fs::tests::crash::every; }
run_crash_long() { STATES=$STATES SEED=${SEED:-1000} library --ignored fs::tests::crash::crash_campaign; }
run_faults() {
    library fs::tests::faults tests::snapshot_faults tests::backup_faults restoring::after_each_fault \
        damage::an_older_leaf hostile::logs::a_damaged_page
}
run_damage() { library archive::tests::damage archive::tests::flipped_snapshots; }
run_flips() { library --ignored every_flipped_byte; }
run_hostile() { library archive::tests::hostile; }
run_fuzz() { FULL=1 tests/fuzz.sh "${FUZZ:-5}"; }
run_kills() { KILLS=${KILLS:-4} CASE_TIMEOUT=${CASE_TIMEOUT:-7200} tests/mount/run.sh killed_under; }

# script NAME ARGUMENT...: a script of tests/campaign, with the programs as they are now, in a namespace of its own.
script() {
    cargo build --quiet ${RELEASE:+--release} --workspace --bins &&
        unshare --mount --pid --fork --mount-proc --propagation private \
            "tests/campaign/$1" "${CARGO_TARGET_DIR:-$PWD/target}/$([[ -n ${RELEASE-} ]] && echo release || echo debug)/lockbox" "${@:2}"
}

run_writers() { script kills.py "${KILLS:-40}" "${SEED:-1}"; }
run_moments() { script moments.py "${ROUNDS:-10}" "${SEED:-1}"; }
run_interrupts() { script interrupts.py "${ROUNDS:-1}" "${SEED:-1}"; }

self=tests/reliability.sh
optimised=${RELEASE:+RELEASE=1 }
wanted=("$@")
[[ $# -gt 0 ]] || wanted=(crash faults damage hostile fuzz kills writers moments interrupts)
for name in "${wanted[@]}"; do
    case $name in
    crash)
        if [[ ${STATES:-10000} -gt 10000 ]]; then
            campaign crash 'crash states, long' "STATES=$STATES SEED=${SEED:-1000} ${optimised}$self crash" run_crash_long last_summary
        else
            campaign crash 'crash states' "$self crash" run_crash last_summary
        fi
        ;;
    faults) campaign faults 'failing host, each operation in its turn' "$self faults" run_faults count_faults ;;
    damage)
        if [[ ${FLIPS-} == all ]]; then
            campaign flips 'damage, every byte' "FLIPS=all ${optimised}$self damage" run_flips count_trials
        else
            campaign damage 'damage' "$self damage" run_damage count_trials
        fi
        ;;
    hostile) campaign hostile 'hostile archives, authentic and wrong' "$self hostile" run_hostile last_summary ;;
    fuzz)
        if [[ -n ${EXECUTIONS-} ]]; then
            campaign fuzz 'decoders on changed inputs' "EXECUTIONS=$EXECUTIONS $self fuzz" run_fuzz count_executions
        elif [[ ${FUZZ:-5} -gt 5 ]]; then
            campaign fuzz 'fuzzing with AddressSanitizer, long' "FUZZ=$FUZZ $self fuzz" run_fuzz count_executions
        else
            campaign fuzz 'fuzzing with AddressSanitizer' "$self fuzz" run_fuzz count_executions
        fi
        ;;
    kills)
        if [[ $EUID -ne 0 ]]; then
            echo 'not run: the kills need root'
        elif [[ ${KILLS:-4} -gt 4 ]]; then
            campaign kills 'daemon killed under SQLite, git and fio, long' "KILLS=$KILLS $self kills" run_kills count_kills
        else
            campaign kills 'daemon killed under SQLite, git and fio' "$self kills" run_kills count_kills
        fi
        ;;
    writers)
        if [[ $EUID -ne 0 ]]; then
            echo 'not run: the kills need root'
        elif [[ ${KILLS:-40} -gt 40 ]]; then
            campaign writers 'daemon killed under synced writers, long' "KILLS=$KILLS SEED=${SEED:-1} ${optimised}$self writers" run_writers last_kills
        else
            campaign writers 'daemon killed under synced writers' "$self writers" run_writers last_kills
        fi
        ;;
    moments | interrupts)
        row='snapshots under churn, compaction, new keys, backups and kills' rounds=10
        [[ $name == moments ]] || row='commands interrupted, killed and on full disks' rounds=1
        if [[ $EUID -ne 0 ]]; then
            echo "not run: $name needs root"
        elif [[ ${ROUNDS:-$rounds} -gt $rounds ]]; then
            campaign "$name" "$row, long" "ROUNDS=$ROUNDS SEED=${SEED:-1} ${optimised}$self $name" "run_$name" "last_$name"
        else
            campaign "$name" "$row" "$self $name" "run_$name" "last_$name"
        fi
        ;;
    *)
        echo "no such campaign: $name"
        exit 2
        ;;
    esac
done
[[ $failed -eq 0 ]]
