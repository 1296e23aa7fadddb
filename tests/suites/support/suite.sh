# What the suites share: programs under test, tools of pinned versions, a scratch directory, the summary. Sourced by each suite.
# shellcheck shell=bash
#
#   PROGRAMS    directory with lockbox and mount-lockbox (default: target/debug, built when missing)
#   TOOLS       where tools are installed and kept between runs (default: target/suites)
#   SCRATCH     where archives and trees lie (default $TMPDIR or /tmp)
#   KEEP        when set, the scratch directory and the logs stay

SUITES=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
REPOSITORY=$(cd "$SUITES/../.." && pwd)
# shellcheck source=tests/mount/support.sh
source "$REPOSITORY/tests/mount/support.sh"

# begin_suite NAME: a working directory in $WORK, the programs first in PATH, everything taken away at the end.
begin_suite() {
    set -Eeuo pipefail
    if [[ $EUID -ne 0 ]]; then
        echo "$0: must run as root (it mounts, and makes users)" >&2
        exit 1
    fi
    local target=${CARGO_TARGET_DIR:-$REPOSITORY/target}
    TOOLS=${TOOLS:-$target/suites}
    [[ -n ${PROGRAMS-} || -n ${BUILD_ONLY-} ]] || (cd "$REPOSITORY" && cargo build --quiet --workspace --bins --tests)
    SCRATCH_DIR=$(mktemp -d "${SCRATCH:-${TMPDIR:-/tmp}}/lbx.XXXX")
    chmod 755 "$SCRATCH_DIR"
    mkdir "$SCRATCH_DIR/bin" "$SCRATCH_DIR/shared"
    if [[ -z ${BUILD_ONLY-} ]]; then
        install -m 755 "${PROGRAMS:-$target/debug}/lockbox" "$SCRATCH_DIR/bin/lockbox"
        install -m 755 "${PROGRAMS:-$target/debug}/mount-lockbox" "$SCRATCH_DIR/bin/mount.lockbox"
    fi
    install -m 755 "$REPOSITORY"/tests/mount/*.py "$SCRATCH_DIR/bin/"
    export SCRATCH_DIR PATH="$SCRATCH_DIR/bin:$PATH:/usr/sbin:/sbin" LC_ALL=C.UTF-8 TZ=UTC
    unset XDG_RUNTIME_DIR LOCKBOX_PASSFILE LOCKBOX_PASSCOMMAND
    SUITE_ENDS=()
    begin_case "$1"
    trap end_suite EXIT
    trap 'exit 130' INT TERM
}

# at_end COMMAND: run when the suite ends, whatever the outcome.
at_end() {
    SUITE_ENDS+=("$1")
}

end_suite() {
    local code=$? command point
    trap - ERR EXIT
    set +e
    cd /
    # Children of this shell only: the id of one that was waited for may be another process's by now.
    # shellcheck disable=SC2046
    kill -9 $(jobs -p) 2>/dev/null
    [[ $code -eq 0 ]] || show_logs
    while read -r point; do
        umount -l "$point"
    done < <(mounts_below "$WORK" | tac)
    # shellcheck disable=SC2046
    kill -9 $(daemons_below "$WORK") 2>/dev/null
    for command in "${SUITE_ENDS[@]}"; do
        eval "$command"
    done
    [[ -n ${KEEP-} ]] || rm -rf --one-file-system "$SCRATCH_DIR"
    exit "$code"
}

# installed_crate NAME VERSION: builds it once; its programs are then in $TOOLS/bin.
installed_crate() {
    if ! grep -qs "^\"$1 $2 " "$TOOLS/.crates.toml"; then
        CARGO_TARGET_DIR=$TOOLS/build CARGO_PROFILE_RELEASE_LTO=off \
            cargo install --quiet --locked --force --root "$TOOLS" "$1@$2"
        rm -rf "$TOOLS/build"
    fi
}

# The last line of a suite: what tests/run.sh shows.
summary() {
    echo "summary: $*"
}
