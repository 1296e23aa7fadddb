#!/usr/bin/env bash
# The programs that releases need, in pinned versions. Run, it builds those that are named; sourced, it finds them.
#
#   packaging/tools.sh cargo-cyclonedx
declare -A TOOL_VERSIONS=([cargo-cyclonedx]=0.5.9)
TOOLS=${TOOLS:-${CARGO_TARGET_DIR:-$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../target}/tools}

# tool NAME: where it is.
tool() {
    echo "$TOOLS/bin/$1"
}

# need NAME: builds it when it is not there in the right version.
need() {
    local name=$1 version=${TOOL_VERSIONS[$1]}
    if ! grep -qsF "\"$name $version " "$TOOLS/.crates.toml"; then
        echo "building $name $version, once for this target directory"
        CARGO_TARGET_DIR=$TOOLS/build CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=0 \
            cargo install --quiet --locked --force --root "$TOOLS" "$name@$version" || return 1
        rm -rf "$TOOLS/build"
    fi
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    set -euo pipefail
    for name in "$@"; do
        need "$name"
    done
fi
