#!/usr/bin/env bash
# Builds a release of the commit that is checked out, so that everybody who builds it gets the same bytes: programs, packages, the list of what
# is in them (CycloneDX) and checksums, in target/dist.
#
#   packaging/release.sh             builds
#   packaging/release.sh --twice     builds again in another directory and compares
#
# The same bytes need the same compiler (rust-toolchain and C), which is named in target/dist/BUILD. Needs what packaging/build.sh needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
# shellcheck source=packaging/tools.sh
source packaging/tools.sh
target=${CARGO_TARGET_DIR:-$repository/target}
dist=$target/dist
commit=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct "$commit")
export SOURCE_DATE_EPOCH CARGO_INCREMENTAL=0 CARGO_TERM_COLOR=never LC_ALL=C TZ=UTC
umask 022
[[ -z ${1-} || $1 == --twice ]] || {
    echo "packaging/release.sh: no option '$1'" >&2
    exit 1
}
if ! git diff --quiet HEAD; then
    echo 'packaging/release.sh: note: changes that are not committed are not in the release' >&2
fi
need cargo-cyclonedx

# build DIRECTORY: the sources of the commit and what comes of them.
build() {
    local place=$1 cargo_home sysroot
    mkdir -p "$place/source"
    git archive "$commit" | tar --extract -C "$place/source"
    cargo_home=$(realpath "${CARGO_HOME:-$HOME/.cargo}")
    sysroot=$(rustc --print sysroot)
    (
        cd "$place/source"
        # Neither where it was built nor by whom shows in the programs. The standard library's own paths are mapped by its makers.
        local map=("$place/source=/lockbox" "$place/target=/target" "$cargo_home=/cargo" "$sysroot=/rust")
        local rust='' c='' pair
        for pair in "${map[@]}"; do
            rust+="${rust:+$'\x1f'}--remap-path-prefix=$pair"
            c+=" -ffile-prefix-map=$pair"
        done
        export CARGO_TARGET_DIR=$place/target CARGO_ENCODED_RUSTFLAGS=$rust CFLAGS="${CFLAGS-}$c" CXXFLAGS="${CXXFLAGS-}$c"
        export CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_DEBUG=none
        cargo build --quiet --release --locked --bins --package lockbox-cli --package lockbox-fuse --package lockbox-share
    )
}

# collect DIRECTORY: packages, list and checksums of a build.
collect() {
    local place=$1 file
    rm -rf "$dist"
    mkdir -p "$dist"
    (
        cd "$place/source"
        # The tools are those of this checkout, the packages those of the build.
        CARGO_TARGET_DIR=$place/target TOOLS=$TOOLS packaging/build.sh "$place/target/release"
        mv "$place"/target/package/*.{deb,rpm} "$dist/"
        tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C packaging/staged . |
            gzip -9n >"$dist/lockbox-linux-$(uname -m).tar.gz"
        CARGO_TARGET_DIR=$place/target "$TOOLS/bin/cargo-cyclonedx" cyclonedx --quiet --format json
        for file in cli/*.cdx.json fuse/*.cdx.json share/server/*.cdx.json; do
            # Where it was built is nothing to anybody, and would make two builds differ.
            sed "s|path+file://$place/source|path+file:///lockbox|g" "$file" >"$dist/${file##*/}"
        done
    )
    {
        echo "commit $commit"
        echo "time $(date --utc --date="@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)"
        rustc --version
        cc --version | head -n 1
    } >"$dist/BUILD"
    (cd "$dist" && sha256sum -- * >SHA256SUMS)
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
build "$scratch/one"
collect "$scratch/one"
if [[ ${1-} == --twice ]]; then
    mv "$dist" "$scratch/first"
    # Another path of another length: one that shows would change the programs.
    build "$scratch/another-place"
    collect "$scratch/another-place"
    if ! diff "$scratch/first/SHA256SUMS" "$dist/SHA256SUMS"; then
        mv "$scratch/first" "$dist.first"
        echo "packaging/release.sh: two builds of one commit differ: $dist.first and $dist" >&2
        exit 1
    fi
    echo 'two builds of one commit are the same:'
fi
cat "$dist/SHA256SUMS"
