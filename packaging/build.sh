#!/usr/bin/env bash
# Makes packages of programs that were built before, into target/package.
#
#   packaging/build.sh DIRECTORY [deb] [rpm]     of the programs in the directory; both kinds by default
#
# Needs cargo-deb (and dpkg-shlibdeps) and cargo-generate-rpm; packaging/tools.sh builds them.
set -euo pipefail
programs=$(realpath "${1:?the directory of the programs}")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=packaging/tools.sh
source packaging/tools.sh
target=${CARGO_TARGET_DIR:-$PWD/target}
kinds=("$@")
[[ $# -gt 0 ]] || kinds=(deb rpm)
packaging/stage.sh "$programs"
mkdir -p "$target/package"

for kind in "${kinds[@]}"; do
    case $kind in
    deb)
        need cargo-deb
        "$(tool cargo-deb)" deb --quiet --no-build --no-strip --package lockbox --output "$target/package/"
        ;;
    rpm)
        need cargo-generate-rpm
        # It knows no directory trees, so the list of files is made of what is there.
        {
            echo 'assets = ['
            (cd packaging/staged && find . -type f -printf '%P %m\n' | LC_ALL=C sort) | while read -r file mode; do
                printf '  { source = "packaging/staged/%s", dest = "/%s", mode = "%s" },\n' "$file" "$file" "$mode"
            done
            echo ']'
        } >"$target/package/assets.toml"
        "$(tool cargo-generate-rpm)" generate-rpm --metadata-overwrite "$target/package/assets.toml" \
            --output "$target/package/"
        rm "$target/package/assets.toml"
        ;;
    *)
        echo "packaging/build.sh: no kind of package '$kind'" >&2
        exit 1
        ;;
    esac
done
