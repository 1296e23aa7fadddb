#!/usr/bin/env bash
# Installs the tests' needs on a Debian-like machine and runs all of them. Ends with 0 only when every stage passed.
#
#   tests/run.sh [STAGE...]     all stages, or the named ones
#   tests/run.sh quick          the checks that a change needs most often: format lint unit reader smoke
#
# After install, what the network has to bring and what others compile is prepared at low priority while everything else runs:
#   tools
# After build the other stages run in two lanes at once. One lane waits for mounts, servers and disks:
#   mount share page suites store package
# The other lane computes, at low priority; the first one takes its last stages when it is done:
#   format test lint portable reader fuzz licences
#
# Each stage writes its output to target/tests/STAGE.log; target/tests/summary.tsv has seconds, processor seconds, cases and seed of each.
# SEED=N repeats the random tests of a run; the long forms are tests/nightly.sh. Needs a Rust toolchain and root (directly or by sudo)
# for packages and mounts. CONTRIBUTING.md says how long it takes.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# Tests interrupt programs, and a child ignores the signals that its parent ignored: shells and nohup(1) start background jobs that way.
[[ -n ${DEFAULT_SIGNALS-} ]] || DEFAULT_SIGNALS=1 exec env --default-signal=HUP,INT,QUIT "$BASH" tests/run.sh "$@"

PACKAGES=(acl age attr binutils btrfs-progs ca-certificates curl dbench dbus debootstrap desktop-file-utils dpkg-dev e2fsprogs fio fish fuse3 g++ gcc git iproute2 libarchive-tools libc6-dev
    libxml2-utils make mandoc mount nginx-light openssl procps python3 python3-dbus python3-gi python3-venv redis-server rpm rsync shared-mime-info sqlite3 strace stress-ng systemd tar unzip util-linux vim zip zsh zstd)
# Dependencies of the reader, pinned so that a run next year tests the same thing.
PYTHON_PACKAGES=(cryptography==46.0.7 zstandard==0.25.0)
DENY_VERSION=0.20.2
WAITING=(mount share page suites store package)
PREPARING=(tools)
COMPUTING=(format test lint portable reader fuzz licences)

export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 RUST_BACKTRACE=1 DEBIAN_FRONTEND=noninteractive
# Without debug information, and with a unit of code generation for each processor, members compile in three quarters of the processor time.
processors=$(nproc)
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_CODEGEN_UNITS=$((processors < 16 ? processors : 16))
target=${CARGO_TARGET_DIR:-$PWD/target}
logs=$target/tests
# Copies: a stage that builds other features replaces the programs in target/debug.
export PROGRAMS=$logs/programs
export READER_PYTHON=$target/reader/bin/python READER=$PWD/format-spec/reader/lockbox_reader.py
exec </dev/null

as_root() {
    if [[ $EUID -eq 0 ]]; then "$@"; else sudo --preserve-env=PATH,CARGO_HOME,RUSTUP_HOME,CARGO_TARGET_DIR,READER,READER_PYTHON,PROGRAMS,BUILD_ONLY,DEBIAN_MIRROR,DEBIAN_RELEASE,KILLS,FLIPS,SCRATCH,BESIDE,JOBS,MOUNT_JOBS,ROUNDS,SECONDS_EACH,SEED "$@"; fi
}

# A command in a mount namespace of its own, as root. In the common one the cases of "mount" would copy its mounts
# into theirs, and a copied mount ends only with the last copy: an unmount waits its whole stop_timeout for that.
with_own_mounts() {
    as_root unshare --mount --propagation private "$@"
}

# once NAME COMMAND...: runs the command while no other lane runs one of that name. A tool that is already built costs nothing.
once() {
    local lock=$logs/$1.lock
    shift
    (flock 9 && "$@") 9>"$lock"
}

stage_install() {
    local missing=() package
    for package in "${PACKAGES[@]}"; do
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    if [[ ${#missing[@]} -gt 0 ]]; then
        as_root apt-get -q update && as_root apt-get install -qy --no-install-recommends "${missing[@]}" || return 1
    fi
    local component
    for component in rustfmt clippy; do
        cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1 || rustup component add "$component" || return 1
    done
    # In a container the module is loaded already, or cannot be.
    [[ -e /dev/fuse ]] || as_root modprobe fuse || true
    if [[ ! -e /dev/fuse ]]; then
        echo '/dev/fuse is missing, and the tests of real mounts need it'
        return 1
    fi
}

# Builds all programs and tests in one go, so that every dependency has one set of features, and lists the tests.
stage_build() {
    cargo build --quiet --workspace --bins --tests --message-format=json-render-diagnostics >"$logs/build.json" || return 1
    # DIRECTORY EXECUTABLE, the longest first.
    python3 - "$logs/build.json" >"$logs/programs.list" <<'END' || return 1
import json, os, sys
tests = []
for line in open(sys.argv[1], encoding="utf-8"):
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
        tests.append((message["executable"], os.path.dirname(message["manifest_path"])))
for executable, directory in sorted(tests, key=lambda test: -os.path.getsize(test[0])):
    print(directory, executable)
END
    mkdir -p "$PROGRAMS"
    install -m 755 "$target"/debug/{lockbox,mount-lockbox,lockbox-share} "$PROGRAMS"
}

# The tools of other stages. A tool that cannot be built here is built again by its stage, which then reports the reason.
stage_tools() {
    local failed=0
    once node install_browser || failed=1
    once deny build_deny || failed=1
    once pjdfstest as_root env BUILD_ONLY=1 tests/suites/pjdfstest.sh || failed=1
    once fsx as_root env BUILD_ONLY=1 tests/suites/fsx.sh || failed=1
    once versitygw env BUILD_ONLY=1 tests/campaign/versitygw.sh || failed=1
    once azurite build_azurite || failed=1
    once system as_root env BUILD_ONLY=1 packaging/test-package.sh || failed=1
    return $failed
}

stage_format() {
    cargo fmt --all --check && tests/manuals.py && tests/walks.py
}

# Items of tests and fuzzers exist only with debug assertions, so the programs are compiled without them too, as in a release build.
stage_lint() {
    local released=() member
    for member in $(cargo tree --workspace --depth 0 --prefix none | cut -sd' ' -f1); do
        released+=(--config "profile.dev.package.$member.debug-assertions=false")
    done
    [[ ${#released[@]} -gt 0 ]] &&
        cargo clippy --quiet --workspace --all-targets --features lockbox-fuzz/mutated -- -D warnings &&
        cargo check --quiet --workspace --bins --test layering "${released[@]}"
}

# run_program DIRECTORY EXECUTABLE: one test program, as cargo would start it.
run_program() {
    local name=${2##*/} runner=() started=$SECONDS log
    log=$logs/unit/$name.log
    name=${1##*/}/${name%-*}
    # Tests of real mounts need root.
    [[ $1 != */fuse ]] || runner=(with_own_mounts)
    # The time limit ends a hang and measures nothing: all programs together take less (CONTRIBUTING.md).
    if (cd "$1" && "${runner[@]}" timeout --verbose --kill-after=60 1800 "$2" --quiet) >"$log" 2>&1; then
        printf 'ok      %-30s %s (%d s)\n' "$name" "$(grep -aoE '[0-9]+ passed' "$log" | tail -n 1)" $((SECONDS - started))
    else
        printf 'FAILED  %s (%d s)\n' "$name" $((SECONDS - started))
        sed 's/^/        | /' "$log"
        return 1
    fi
}

# Every test program of the workspace, two at a time.
stage_test() {
    [[ -s $logs/programs.list ]] || stage_build || return 1
    rm -rf "$logs/unit"
    mkdir -p "$logs/unit"
    export -f run_program with_own_mounts as_root
    export logs
    # shellcheck disable=SC2016
    xargs --max-procs=2 --max-lines=1 bash -c 'run_program "$1" "$2"' run_program <"$logs/programs.list"
}

# The tests of "test" that need no mount and run no program, and those that read the sources.
stage_unit() {
    cargo test --quiet --workspace --lib --bins --no-fail-fast &&
        cargo test --quiet --package lockbox --test layering --test language --test invariants --test threats
}

# A dozen cases of "mount", a few seconds each: trees, programs, durability, ends, secrecy. A name that is part of another takes both.
stage_smoke() {
    local cases=(tree_copied_by_cp git_works_and_clones sqlite_with_a_write_ahead_log two_writers_append_to_one_file shared_memory_map_is_written
        punching_frees_and_reads_as_zeros fsynced_bytes_survive_kill_9 sigterm_saves_what_the_kernel_holds who_is_cut_off_keeps_what_was_written
        umount_of_a_busy_mount_is_refused an_unlinked_file_lives_while_it_is_open the_archive_reveals_neither_names_nor_content)
    # With a test: without the dependencies of tests, shared dependencies have other features and are built again.
    cargo build --quiet --workspace --bins --test layering || return 1
    PROGRAMS=$target/debug as_root tests/mount/run.sh "${cases[@]}" | tee "$logs/smoke" &&
        awk -v least="${#cases[@]}" '/ passed, 0 failed$/ && $1 >= least { all = 1 } END { exit !all }' "$logs/smoke"
}

# The pure-Rust cipher reads archives that the other engine sealed. That both engines agree on every message is a unit test of each build.
stage_portable() {
    cargo test --quiet --workspace --test portable --features lockbox/portable
}

make_reader() {
    [[ -x $READER_PYTHON ]] || python3 -m venv "$target/reader" || return 1
    "$READER_PYTHON" -m pip install --quiet --disable-pip-version-check "${PYTHON_PACKAGES[@]}"
}

# The vectors and the golden archives.
stage_reader() {
    once reader make_reader && "$READER_PYTHON" "$READER" --help >/dev/null && (cd format-spec/reader && "$READER_PYTHON" -m unittest --quiet)
}

stage_mount() {
    once reader make_reader && as_root tests/mount/run.sh
}

# The distribution's Node.js may be too old, so one that is there is kept.
install_node() {
    local missing=("$@")
    command -v node >/dev/null || missing+=(nodejs)
    command -v npm >/dev/null || missing+=(npm)
    if [[ ${#missing[@]} -gt 0 ]]; then
        as_root apt-get -q update && as_root apt-get install -qy --no-install-recommends "${missing[@]}" || return 1
    fi
    if ! node --eval 'process.exit(Number(process.versions.node.split(".")[0]) < 20 ? 1 : 0)'; then
        echo "this needs Node.js 20 or newer, and it is $(node --version)"
        return 1
    fi
}

# Chromium, for the page of one-time links, and Node.js.
install_browser() {
    local missing=()
    [[ -x /usr/bin/chromium ]] || missing+=(chromium)
    install_node "${missing[@]}"
}

build_azurite() {
    once node install_node && BUILD_ONLY=1 tests/campaign/azurite.sh
}

# The page of one-time links: its parts, that dist is what the sources build, and links opened in Chromium against a real daemon.
stage_page() {
    once node install_browser || return 1
    # No package needs its installation script.
    npm ci --prefix share/page --ignore-scripts --no-audit --no-fund --loglevel error || return 1
    node --test --test-reporter=dot share/page/test/*.test.mjs || return 1
    timeout 180 node share/page/test/browser/run.mjs "$PROGRAMS/lockbox" "$PROGRAMS/lockbox-share"
}

# The share daemon: its interface against its own description, and links from end to end. (Its unit tests are in the stage "test".)
stage_share() {
    BIN=$PROGRAMS/lockbox-share tests/share.sh && tests/share/links.sh "$PROGRAMS" &&
        as_root env CARGO_TARGET_DIR="$target" tests/share/setup.sh "$PROGRAMS"
}

# Every fuzz target replays its seeds and takes mutated ones for some seconds, two targets at a time.
stage_fuzz() {
    tests/fuzz.sh
}

# Each suite prints its counts in its last line.
stage_suites() {
    once pjdfstest true
    once fsx true
    local suite failed=0 log before
    for suite in tests/suites/*.sh; do
        [[ -x $suite ]] || continue
        log=$logs/${suite##*/}.log
        before=$SECONDS
        if with_own_mounts "$suite" >"$log" 2>&1; then
            printf 'ok      %s (%d s)\n' "$(tail -n 1 "$log" | sed 's/^summary: //')" $((SECONDS - before))
        else
            failed=$((failed + 1))
            printf 'FAILED  %s (%d s)\n' "$suite" $((SECONDS - before))
            tail -n 40 "$log" | cut -c -400 | sed 's/^/        | /'
        fi
    done
    [[ $failed -eq 0 ]]
}

# Backups and mounts on a real server that speaks S3, of a pinned version, which the first run builds, and on Microsoft's emulator of Azure's.
stage_store() {
    once versitygw true
    once azurite build_azurite || return 1
    with_own_mounts env ROUNDS=1 tests/campaign/versitygw.sh && with_own_mounts env ROUNDS=1 tests/campaign/azurite.sh
}

# Packages of the programs that the other stages test (the development profile), installed into a clean system, used and removed again.
stage_package() {
    once system true || return 1
    mkdir -p "$target/package"
    rm -f "$target"/package/*.{deb,rpm}
    packaging/build.sh "$PROGRAMS" || return 1
    as_root packaging/test-package.sh "$target"/package/*.{deb,rpm}
}

# Licences, duplicates, sources, and advisories where there is a copy of their database: fetching it would make the test depend on the network.
stage_licences() {
    once deny build_deny || return 1
    # Crates of other platforms are in the lock file but were not needed until here.
    cargo fetch --quiet --locked || return 1
    cargo deny --offline --workspace check --hide-inclusion-graph licenses bans sources && check_advisories
}

check_advisories() {
    local copies=${CARGO_HOME:-$HOME/.cargo}/advisory-dbs
    if ! compgen -G "$copies/*/crates" >/dev/null; then
        echo "advisories: NOT CHECKED, because no copy of the database is in $copies; 'cargo deny fetch db' makes one"
        return 0
    fi
    cargo deny --offline --workspace check --disable-fetch --hide-inclusion-graph advisories
}

build_deny() {
    if ! cargo deny --version 2>/dev/null | grep -qx "cargo-deny $DENY_VERSION"; then
        echo "building cargo-deny $DENY_VERSION, once for this CARGO_HOME"
        CARGO_TARGET_DIR=$target/cargo-deny CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=0 \
            cargo install --quiet --locked --force cargo-deny@$DENY_VERSION || return 1
        rm -rf "$target/cargo-deny"
    fi
}

# run_stage STAGE: its output goes to its log, and as a whole to standard output when it ends, or at once when STREAM is set.
# Adds a line to the summary: stage, outcome, seconds, processor seconds, cases, seed.
run_stage() {
    local stage=$1 log=$logs/$1.log outcome=passed seconds user system TIMEFORMAT='%R %U %S'
    echo "=== $stage begins"
    if [[ -n ${STREAM-} ]]; then
        { time "stage_$stage" > >(tee "$log") 2>&1; } 2>"$log.time" || outcome=FAILED
    else
        { time "stage_$stage" >"$log" 2>&1; } 2>"$log.time" || outcome=FAILED
    fi
    read -r seconds user system <"$log.time"
    (
        flock 9
        printf '%s\t%s\t%.0f\t%s\t%s\t%s\n' "$stage" "$outcome" "$seconds" "$(awk -v a="$user" -v b="$system" 'BEGIN { printf "%.0f", a + b }')" \
            "$(grep -aoE '\b[0-9]+ passed' "$log" | awk '{ n += $1 } END { print n ? n : "-" }')" \
            "$(grep -aioE '\bseeds?[ =][0-9]+' "$log" | grep -oE '[0-9]+' | sort -un | paste -sd, | grep . || echo -)" >>"$logs/summary.tsv"
        [[ -n ${STREAM-} ]] || cat "$log"
        printf '=== %-10s %-7s %5.0f s\n' "$stage" "$outcome" "$seconds"
    ) 9>"$logs/print.lock"
    [[ $outcome == passed ]]
}

# run_lane STAGE...: runs those that no other lane has begun.
run_lane() {
    local stage
    for stage in "$@"; do
        ! mkdir "$logs/begun/$stage" 2>/dev/null || run_stage "$stage"
    done
}

# chosen STAGE...: the stages of the arguments that were asked for.
chosen() {
    local stage
    for stage in "$@"; do
        [[ " ${asked[*]} " != *" $stage "* ]] || echo "$stage"
    done
}

ALL=("${WAITING[@]}" "${COMPUTING[@]}" "${PREPARING[@]}")
asked=("${ALL[@]}")
before=(install build)
if [[ "$*" == quick ]]; then
    asked=()
    before=(install format lint unit reader smoke)
    STREAM=1
elif [[ $# -gt 0 ]]; then
    asked=()
    before=(install)
    for stage in "$@"; do
        if ! declare -F "stage_$stage" >/dev/null; then
            echo "tests/run.sh: no stage '$stage'; the stages are: ${ALL[*]} unit smoke" >&2
            exit 1
        fi
        if [[ " ${WAITING[*]} test " == *" $stage "* && " ${before[*]} " != *' build '* ]]; then before+=(build); fi
        if [[ " ${ALL[*]} " == *" $stage "* ]]; then asked+=("$stage"); else before+=("$stage"); fi
    done
fi
mapfile -t waiting < <(chosen "${WAITING[@]}")
mapfile -t computing < <(chosen "${COMPUTING[@]}")
mapfile -t preparing < <(chosen "${PREPARING[@]}")
[[ ${#waiting[@]} -gt 0 && ${#computing[@]} -gt 0 ]] || STREAM=1

rm -rf "$logs/begun" "$logs/programs.list"
mkdir -p "$logs/begun"
printf 'stage\toutcome\tseconds\tprocessor seconds\tcases\tseeds\n' >"$logs/summary.tsv"
started=$SECONDS
lanes=()
trap 'kill "${lanes[@]}" 2>/dev/null; exit 130' INT TERM

# start_lane PRIORITY STAGE...: runs the stages one after the other in the background.
start_lane() {
    local priority=$1
    shift
    [[ $# -gt 0 ]] || return 0
    (
        renice -n "$priority" "$BASHPID" >/dev/null
        run_lane "$@"
    ) &
    lanes+=($!)
}

for stage in "${before[@]}"; do
    # Stages that follow depend on install and build.
    if ! run_stage "$stage" && [[ $stage == install || $stage == build ]]; then
        waiting=() computing=()
        break
    fi
    [[ $stage != install ]] || start_lane 10 "${preparing[@]}"
done
start_lane 10 "${computing[@]}"
if [[ ${#waiting[@]} -gt 0 ]]; then
    # Then the last stages of the other lane.
    last=()
    for stage in "${computing[@]}"; do last=("$stage" "${last[@]}"); done
    start_lane 0 "${waiting[@]}" "${last[@]}"
fi
[[ ${#lanes[@]} -eq 0 ]] || wait "${lanes[@]}"

# A lane that was killed leaves stages without a row.
mapfile -t missing < <(comm -23 <(printf '%s\n' "${before[@]}" "${asked[@]}" | sort -u) <(cut -f 1 "$logs/summary.tsv" | sort))
mapfile -t failed < <(awk -F'\t' '$2 == "FAILED" { print $1 }' "$logs/summary.tsv")
for stage in "${failed[@]}"; do
    echo
    echo "What failed in $stage, and its last lines:"
    grep -aE '^(FAILED|not ok|error)|panicked at|^test .* FAILED' "$logs/$stage.log" | head -n 20
    tail -n 30 "$logs/$stage.log"
done

echo
echo "Summary after $((SECONDS - started)) s, also in $logs/summary.tsv:"
column -t -s $'\t' "$logs/summary.tsv" | sed 's/^/  /'
passed=$(grep -c $'\tpassed\t' "$logs/summary.tsv")
[[ ${#missing[@]} -eq 0 ]] || echo "stages without a result: ${missing[*]}"
echo "stages: $passed passed, ${#failed[@]} failed"
[[ ${#failed[@]} -eq 0 && ${#missing[@]} -eq 0 ]]
