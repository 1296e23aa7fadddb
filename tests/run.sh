#!/usr/bin/env bash
# Installs what the tests need on a Debian-like machine and runs all of them. Ends with 0 only when every stage passed.
#
#   tests/run.sh [STAGE...]     all stages, or those named: format lint test portable reader mount share page suites store package fuzz licences
#   tests/run.sh quick          what a change meets most often: format lint unit reader smoke
#
# Needs a Rust toolchain and root (directly or by sudo) for packages and mounts. Takes about 40 minutes on two cores.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# Tests interrupt programs, and a program ignores what it was started to ignore: shells and nohup(1) have what runs in the background ignore some signals.
[[ -n ${DEFAULT_SIGNALS-} ]] || DEFAULT_SIGNALS=1 exec env --default-signal=HUP,INT,QUIT "$BASH" tests/run.sh "$@"

PACKAGES=(acl age attr binutils btrfs-progs ca-certificates curl dbench dbus debootstrap desktop-file-utils dpkg-dev e2fsprogs fio fish fuse3 g++ gcc git iproute2 libarchive-tools libc6-dev
    libxml2-utils make mount nginx-light openssl procps python3 python3-dbus python3-gi python3-venv redis-server rpm rsync shared-mime-info sqlite3 strace stress-ng systemd tar unzip util-linux vim zip zsh zstd)
# The reader's needs; pinned so that a run next year tests the same thing.
PYTHON_PACKAGES=(cryptography==46.0.7 zstandard==0.25.0)
DENY_VERSION=0.20.2

export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 RUST_BACKTRACE=1 DEBIAN_FRONTEND=noninteractive
target=${CARGO_TARGET_DIR:-$PWD/target}
export PROGRAMS=$target/debug
exec </dev/null

as_root() {
    if [[ $EUID -eq 0 ]]; then "$@"; else sudo --preserve-env=PATH,CARGO_HOME,RUSTUP_HOME,CARGO_TARGET_DIR,READER,READER_PYTHON,PROGRAMS,BUILD_ONLY,DEBIAN_MIRROR,DEBIAN_RELEASE,KILLS,FLIPS,SCRATCH,BESIDE,JOBS,ROUNDS,SECONDS_EACH "$@"; fi
}

# As the tests build them: without what tests depend on, many dependencies have other features and are built once more.
build_programs() {
    cargo build --quiet --workspace --bins --tests
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

stage_format() {
    cargo fmt --all --check
}

stage_lint() {
    cargo clippy --quiet --workspace --all-targets -- -D warnings
}

stage_test() {
    if [[ $EUID -eq 0 ]]; then
        cargo test --quiet --workspace --no-fail-fast && stage_model
        return
    fi
    # The tests of real mounts need root.
    cargo test --quiet --workspace --no-fail-fast --exclude lockbox-fuse &&
        cargo test --quiet --no-fail-fast --package lockbox-fuse --config "target.'cfg(all())'.runner = ['sudo', '--preserve-env=PATH']" &&
        stage_model
}

# The tests of "test" that need no mount and run no program, and those that read the sources.
stage_unit() {
    cargo test --quiet --workspace --lib --bins --no-fail-fast &&
        cargo test --quiet --package lockbox --test layering --test invariants --test threats
}

# A dozen of the cases of "mount" (a name that is a part of two takes both), a few seconds each: trees, programs, durability, ends, secrecy.
stage_smoke() {
    local cases=(tree_copied_by_cp git_works_and_clones sqlite_with_a_write_ahead_log two_writers_append_to_one_file shared_memory_map_is_written
        punching_frees_and_reads_as_zeros fsynced_bytes_survive_kill_9 sigterm_saves_what_the_kernel_holds who_is_cut_off_keeps_what_was_written
        umount_of_a_busy_mount_is_refused an_unlinked_file_lives_while_it_is_open the_archive_reveals_neither_names_nor_content)
    # With a test, for the reason that build_programs gives.
    cargo build --quiet --workspace --bins --test layering || return 1
    as_root tests/mount/run.sh "${cases[@]}" | tee "$target/smoke.log" &&
        awk -v least="${#cases[@]}" '/ passed, 0 failed$/ && $1 >= least { all = 1 } END { exit !all }' "$target/smoke.log"
}

# Every interleaving of the claims on one share: the feature replaces the locks, so that nothing else runs with it.
stage_model() {
    cargo test --quiet --workspace --features lockbox-share/model --lib store::model::
}

# The program with the pure-Rust cipher reads what the other engine sealed, and works; that both engines agree on every message is
# a unit test of each build.
stage_portable() {
    cargo test --quiet --workspace --features lockbox/portable --test program -- golden import_extract
}

stage_reader() {
    local python=$target/reader/bin/python
    [[ -x $python ]] || python3 -m venv "$target/reader" || return 1
    "$python" -m pip install --quiet --disable-pip-version-check "${PYTHON_PACKAGES[@]}" || return 1
    export READER_PYTHON=$python READER=$PWD/format-spec/reader/lockbox_reader.py
    "$python" "$READER" --help >/dev/null || return 1
    # The vectors and the golden archives.
    (cd format-spec/reader && "$python" -m unittest --quiet)
}

stage_mount() {
    build_programs || return 1
    start_building
    as_root tests/mount/run.sh
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

# The page of one-time links: its parts, that dist is what the sources build, and links opened in Chromium against a real daemon.
stage_page() {
    local missing=()
    [[ -x /usr/bin/chromium ]] || missing+=(chromium)
    install_node "${missing[@]}" || return 1
    # No package needs its installation script.
    npm ci --prefix share/page --ignore-scripts --no-audit --no-fund --loglevel error || return 1
    build_programs || return 1
    node --test --test-reporter=dot share/page/test/*.test.mjs || return 1
    timeout 180 node share/page/test/browser/run.mjs "$target/debug/lockbox" "$target/debug/lockbox-share"
}

# The share daemon: its interface against its own description, and links from end to end. (Its tests are in the stage "test".)
stage_share() {
    build_programs && tests/share.sh && tests/share/links.sh "$target/debug" && as_root env CARGO_TARGET_DIR="$target" tests/share/setup.sh "$target/debug"
}

# libFuzzer with AddressSanitizer: each target for a while, two at a time.
stage_fuzz() {
    end_building
    tests/fuzz.sh
}

# Each suite says in its last line what it counted.
stage_suites() {
    end_building
    build_programs || return 1
    local suite failed=0 log=$target/suites/log before
    mkdir -p "$target/suites"
    for suite in tests/suites/*.sh; do
        [[ -x $suite ]] || continue
        before=$SECONDS
        if as_root "$suite" >"$log" 2>&1; then
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
    end_building
    build_programs || return 1
    install_node || return 1
    as_root env ROUNDS=1 tests/campaign/versitygw.sh && as_root env ROUNDS=1 tests/campaign/azurite.sh
}

# Packages of the programs that the other stages built (the development profile), installed into a clean system, used and removed again.
stage_package() {
    end_building
    build_programs || return 1
    packaging/tools.sh cargo-deb cargo-generate-rpm || return 1
    rm -f "$target"/package/*.{deb,rpm}
    packaging/build.sh "$target/debug" || return 1
    as_root packaging/test-package.sh "$target"/package/*.{deb,rpm}
}

# Licences, duplicates, sources, and advisories where there is a copy of their database: fetching it would make the test depend on the network.
stage_licences() {
    end_building
    build_deny || return 1
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

# What later stages need takes minutes to build, and mounts under test leave most of one processor idle. A stage whose tool
# could not be built here builds it itself, and tells why it cannot.
builder=
start_building() {
    [[ -z $builder ]] || return 0
    # Before root makes them: what the other stages write there is the user's.
    mkdir -p "$target/package" "$target/suites"
    {
        renice -n 19 "$BASHPID"
        build_deny
        packaging/tools.sh cargo-deb cargo-generate-rpm
        as_root env BUILD_ONLY=1 packaging/test-package.sh
        as_root env BUILD_ONLY=1 tests/suites/pjdfstest.sh
        as_root env BUILD_ONLY=1 tests/suites/fsx.sh
        BUILD_ONLY=1 tests/campaign/versitygw.sh
        BUILD_ONLY=1 tests/campaign/azurite.sh
        BUILD_ONLY=1 tests/fuzz.sh
    } >"$target/background-builds.log" 2>&1 &
    builder=$!
}

end_building() {
    [[ -z $builder ]] || wait "$builder" || true
    builder=
}

stages=(install format lint test portable reader mount share page suites store package fuzz licences)
if [[ "$*" == quick ]]; then
    stages=(install format lint unit reader smoke)
elif [[ $# -gt 0 ]]; then
    stages=(install "$@")
    # The mount stage compares with the reader as well.
    [[ " $* " != *' mount '* || " $* " == *' reader '* ]] || stages=(install reader "$@")
fi

# What each stage told, so that what failed can be told once more at the end, where it is read first.
told=$target/told
mkdir -p "$told"

started=$SECONDS
results=()
failed=()
for stage in "${stages[@]}"; do
    if ! declare -F "stage_$stage" >/dev/null; then
        echo "tests/run.sh: no stage '$stage'" >&2
        exit 1
    fi
    echo "=== $stage"
    before=$SECONDS
    # Not in a pipe: a stage may start what a later one waits for.
    if "stage_$stage" > >(tee "$told/$stage") 2>&1; then outcome=passed; else
        outcome=FAILED
        failed+=("$stage")
    fi
    line=$(printf '%-10s %-7s %5d s' "$stage" "$outcome" $((SECONDS - before)))
    results+=("$line")
    echo "=== $line"
    # Without what it needs nothing else can be trusted.
    [[ $stage != install || $outcome == passed ]] || break
done

for stage in "${failed[@]}"; do
    echo
    echo "What failed in $stage, and its last lines:"
    grep -aE '^(FAILED|not ok|error)|panicked at|^test .* FAILED' "$told/$stage" | head -n 20
    tail -n 30 "$told/$stage"
done

echo
echo "Summary after $((SECONDS - started)) s:"
printf '  %s\n' "${results[@]}"
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "${#failed[@]} of ${#results[@]} stages FAILED"
    exit 1
fi
echo "all ${#results[@]} stages passed"
