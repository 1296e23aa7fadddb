#!/usr/bin/env bash
# Builds the fuzz targets with libFuzzer and AddressSanitizer and runs each.
#
#   tests/fuzz.sh [SECONDS [TARGET...]]     replays the corpus and explores: 10 seconds for a target that takes whole archives or operations, a fifth for a decoder
#
# BUILD_ONLY=1 builds and runs nothing. JOBS=N runs N targets at a time (default 2). CORPUS=DIRECTORY keeps what was learned (default: below the target directory).
# For a long run: FULL=1 tests/fuzz.sh 3600    gives decoders the whole time as well, and builds for speed.
# For hundreds of millions: EXECUTIONS=100000000 tests/fuzz.sh 0 header slot     without libFuzzer's loop, coverage and sanitizer, some fifty times
# as fast, on inputs of the corpus changed at random (SEED=N, default 1); without named targets all that decode one thing.
# Needs no nightly toolchain: RUSTC_BOOTSTRAP lets the stable one use its sanitizer. An input may take 1 second and 256 MiB.
#
# Only the members of the workspace are instrumented; their dependencies are those that the other tests use, built once. Cargo calls this
# script in place of the compiler for the members (RUSTC_WORKSPACE_WRAPPER).
set -uo pipefail

if [[ ${1-} == *rustc ]]; then
    flags=(--cfg fuzzing --cap-lints=allow)
    # The counters and comparisons that libFuzzer reads. The dependencies have no sanitizer, which is a part of no interface here.
    [[ -n ${EXECUTIONS-} ]] || flags+=(-Zsanitizer=address -Cunsafe-allow-abi-mismatch=sanitizer -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares)
    RUSTC_BOOTSTRAP=1 exec "$@" "${flags[@]}"
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

profile=dev output=debug
if [[ -n ${EXECUTIONS-} || ${FULL:-0} == 1 ]]; then
    # In a directory of its own, as cargo does not see that the flags differ. Checks stay on in a long run as well.
    profile=release output=release target=$base/${EXECUTIONS:+plain}
    export CARGO_TARGET_DIR=$target CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true CARGO_PROFILE_RELEASE_LTO=off
fi
program=$target/$output/lockbox-fuzz
# With the whole workspace and a test, so that dependencies have the features of the other builds.
RUSTC_WORKSPACE_WRAPPER=$script cargo build --quiet --locked --profile "$profile" --workspace --bin lockbox-fuzz --test layering --features lockbox-fuzz/libfuzzer || exit 1
[[ -z ${BUILD_ONLY-} ]] || exit 0

rm -rf "$base/seeds"
SEEDS=$base/seeds "$program" >/dev/null 2>&1 || { echo 'the seeds cannot be made'; exit 1; }
mkdir -p "$base/logs" "$base/findings"

run_changed() {
    local target=$1 log=$base/logs/$1
    mkdir -p "$corpus/$target" "$base/tmp/$target"
    TARGET=$target TMPDIR=$base/tmp/$target CORPUS=$corpus/$target:$base/seeds/$target FINDINGS=$base/findings SEED=${SEED:-1} "$program" >"$log" 2>&1
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

run() {
    local target=$1 time=$seconds length=4096 log=$base/logs/$1
    if [[ ${FULL:-0} != 1 && " ${wide[*]} " != *" $target "* ]]; then time=$(((seconds + 4) / 5)); fi
    mkdir -p "$corpus/$target" "$base/tmp/$target"
    # The quarantine of freed memory would otherwise count as the input's.
    TARGET=$target TMPDIR=$base/tmp/$target ASAN_OPTIONS=quarantine_size_mb=8:detect_leaks=0 \
        "$program" -max_total_time="$time" -timeout=1 -rss_limit_mb=256 -malloc_limit_mb=256 -max_len=$length -print_final_stats=1 \
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
    "run${EXECUTIONS:+_changed}" "$target" &
    running=$((running + 1))
done
while ((running > 0)); do
    wait -n || failed=$((failed + 1))
    running=$((running - 1))
done
echo "${#targets[@]} targets, $failed with findings; inputs are in $base/findings"
[[ $failed -eq 0 ]]
