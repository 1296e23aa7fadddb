#!/usr/bin/env bash
# Runs each fuzz target on its seeds and on mutated inputs.
#
#   tests/fuzz.sh [SECONDS [TARGET...]]     10 seconds for a target that takes whole archives or operations, a fifth for a decoder
#
# JOBS=N runs N targets at a time (default 2). CORPUS=DIRECTORY keeps what was learned (default: below the target directory). SEED=N repeats a run.
# For a long run: FULL=1 tests/fuzz.sh 3600    gives decoders the whole time as well, with libFuzzer, coverage counters and AddressSanitizer.
# For hundreds of millions: EXECUTIONS=100000000 tests/fuzz.sh 0 header slot     without these, some fifty times as fast, on mutated inputs of the
# corpus that libFuzzer found; without named targets all that decode one thing. BUILD_ONLY=1 builds and runs nothing.
# Needs no nightly toolchain: RUSTC_BOOTSTRAP lets the stable one use its sanitizer. An input may take 1 second and 256 MiB.
#
# For libFuzzer only the members of the workspace are instrumented. Cargo calls this script in place of the compiler for them
# (RUSTC_WORKSPACE_WRAPPER).
set -uo pipefail

if [[ ${1-} == *rustc ]]; then
    # The counters and comparisons that libFuzzer reads. The dependencies have no sanitizer, which is a part of no interface here.
    RUSTC_BOOTSTRAP=1 exec "$@" --cap-lints=allow -Zsanitizer=address -Cunsafe-allow-abi-mismatch=sanitizer -Cpasses=sancov-module \
        -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
        -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares
fi

script=$(realpath "${BASH_SOURCE[0]}")
cd "${script%/*}/.." || exit 1
seconds=${1:-10}
shift || true
jobs=${JOBS:-2}
target=${CARGO_TARGET_DIR:-$PWD/target}
base=$target/fuzz
corpus=${CORPUS:-$base/corpus}
wide=(whole operations page segment connection)
decoders=(header framing slot identity record delta entry prologue head node directory values xattr space acl seen control options marker storelog checkpoint range capsule request)
targets=("$@")
if [[ $# -eq 0 ]]; then
    targets=("${decoders[@]}")
    [[ -n ${EXECUTIONS-} ]] || targets=("${wide[@]}" "${decoders[@]}")
fi
export SEED=${SEED:-$SRANDOM}

# With the whole workspace and a test, so that dependencies have the features of the other builds.
build=(cargo build --quiet --locked --workspace --bin lockbox-fuzz --test layering --features lockbox-fuzz/mutated)
program=$target/debug/lockbox-fuzz
run=run_mutated
if [[ -n ${EXECUTIONS-} || ${FULL:-0} == 1 ]]; then
    # Each in a directory of its own, as cargo does not see that the flags differ. Checks stay on in a long run as well.
    export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true CARGO_PROFILE_RELEASE_LTO=off
    export CARGO_TARGET_DIR=$base${EXECUTIONS:+/plain}
    program=$CARGO_TARGET_DIR/release/lockbox-fuzz
    build+=(--release)
    if [[ -z ${EXECUTIONS-} ]]; then
        export RUSTC_WORKSPACE_WRAPPER=$script
        build+=(--features lockbox-fuzz/libfuzzer)
        run=run_guided
    fi
fi
"${build[@]}" || exit 1
[[ -z ${BUILD_ONLY-} ]] || exit 0

rm -rf "$base/seeds"
SEEDS=$base/seeds "$program" >/dev/null 2>&1 || { echo 'the seeds cannot be made'; exit 1; }
mkdir -p "$base/logs" "$base/findings"

# time_of TARGET: seconds for the target.
time_of() {
    if [[ ${FULL:-0} == 1 || " ${wide[*]} " == *" $1 "* ]]; then echo "$seconds"; else echo $(((seconds + 4) / 5)); fi
}

run_mutated() {
    local target=$1 log=$base/logs/$1
    TARGET=$target DURATION=$(time_of "$target") TMPDIR=$base/tmp/$target CORPUS=$corpus/$target:$base/seeds/$target FINDINGS=$base/findings "$program" >"$log" 2>&1
    local status=$? told
    told=$(grep -o '[0-9]* executions of .*' "$log")
    if [[ $status -eq 0 && -n $told ]]; then
        printf 'ok      %-11s %12s executions in %s s (%s)\n' "$target" "${told%% *}" "$(sed 's/.* in \([0-9]*\) s$/\1/' <<<"$told")" "$(cut -d' ' -f4- <<<"${told%, in *}")"
        return
    fi
    printf 'FINDING %-11s\n' "$target"
    tail -n 15 "$log" | cut -c -300 | sed 's/^/        | /'
    return 1
}

run_guided() {
    local target=$1 time log=$base/logs/$1
    time=$(time_of "$target")
    # The quarantine of freed memory would otherwise count as the input's.
    TARGET=$target TMPDIR=$base/tmp/$target ASAN_OPTIONS=quarantine_size_mb=8:detect_leaks=0 \
        "$program" -max_total_time="$time" -timeout=1 -rss_limit_mb=256 -malloc_limit_mb=256 -max_len=4096 -print_final_stats=1 \
        -artifact_prefix="$base/findings/$target-" "$corpus/$target" "$base/seeds/$target" >"$log" 2>&1
    local status=$? executions
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    if [[ $status -eq 0 ]]; then
        printf 'ok      %-11s %12s executions in %s s\n' "$target" "${executions:-0}" "$time"
    else
        printf 'FINDING %-11s %12s executions\n' "$target" "${executions:-0}"
        grep -E -m 3 'panicked|ERROR|SUMMARY' "$log" | cut -c -300
        tail -n 15 "$log" | cut -c -300 | sed 's/^/        | /'
    fi
    return $status
}

failed=0
running=0
for target in "${targets[@]}"; do
    if ((running >= jobs)); then
        wait -n || failed=$((failed + 1))
        running=$((running - 1))
    fi
    mkdir -p "$corpus/$target" "$base/tmp/$target"
    "$run" "$target" &
    running=$((running + 1))
done
while ((running > 0)); do
    wait -n || failed=$((failed + 1))
    running=$((running - 1))
done
echo "${#targets[@]} targets, $failed with findings; inputs are in $base/findings"
[[ $failed -eq 0 ]]
