#!/usr/bin/env bash
# Makes packages of programs that were built before, into target/package.
#
#   packaging/build.sh DIRECTORY [deb] [rpm]     of the programs in the directory; both kinds by default
#
# Needs dpkg-dev for a .deb, and rpmbuild for a .rpm.
set -euo pipefail
programs=$(realpath "${1:?the directory of the programs}")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
kinds=("$@")
[[ $# -gt 0 ]] || kinds=(deb rpm)
version=$(sed -n '/^\[workspace.package\]/,/^\[/ s/^version = "\(.*\)"$/\1/p' Cargo.toml)
packaging/stage.sh "$programs"
staged=$(realpath packaging/staged)
mkdir -p "$target/package"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(date +%s)}

# libraries ROOT: libraries that the programs need, in the words of the distribution that builds. ROOT has the directory DEBIAN.
libraries() {
    mkdir "$scratch/debian"
    printf 'Source: lockbox\n\nPackage: lockbox\nArchitecture: any\n' >"$scratch/debian/control"
    (cd "$scratch" && dpkg-shlibdeps --warnings=0 -O "$1"/usr/bin/* "$1/usr/sbin/mount.lockbox") | sed -n 's/^shlibs:Depends=//p'
}

make_deb() {
    local root=$scratch/deb architecture
    architecture=$(dpkg --print-architecture)
    cp -a "$staged" "$root"
    install -d -m 755 "$root/DEBIAN"
    install -m 755 -t "$root/DEBIAN" packaging/debian/{postinst,prerm,postrm}
    sed "s/@version@/$version/; s/@architecture@/$architecture/; s/@libraries@/$(libraries "$root")/
        s/@size@/$(du --summarize --apparent-size --block-size=1K "$staged" | cut -f 1)/" packaging/debian/control >"$root/DEBIAN/control"
    (cd "$staged" && find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
    find "$root/DEBIAN" -exec touch --date="@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Zxz --build "$root" "$target/package/lockbox_$version-1_$architecture.deb" >/dev/null
}

make_rpm() {
    {
        echo '%defattr(-,root,root)'
        (cd "$staged" && find . ! -type d -printf '/%P\n' | LC_ALL=C sort)
    } >"$scratch/files"
    rpmbuild -bb --quiet --define "_topdir $scratch/rpm" --define "_rpmdir $target/package" \
        --define '_rpmfilename %{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm' \
        --define "release_version $version" --define "staged_tree $staged" --define "staged_list $scratch/files" packaging/rpm/lockbox.spec
}

for kind in "${kinds[@]}"; do
    case $kind in
    deb | rpm) "make_$kind" ;;
    *)
        echo "packaging/build.sh: no kind of package '$kind'" >&2
        exit 1
        ;;
    esac
done
