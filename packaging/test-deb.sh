#!/usr/bin/env bash
# Installs a .deb into a clean system, uses it as a user would, removes it, and looks that nothing stays behind.
#
#   packaging/test-deb.sh PACKAGE.deb
#   BUILD_ONLY=1 packaging/test-deb.sh      only makes the clean system
#
# Needs root, /dev/fuse, debootstrap and a Debian mirror (DEBIAN_MIRROR, default http://deb.debian.org/debian). The clean system is kept in
# target/package/root.tar for the next time.
set -euo pipefail
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
target=${CARGO_TARGET_DIR:-$(dirname "$here")/target}
kept=$target/package/root.tar
release=${DEBIAN_RELEASE:-$(. /etc/os-release && [[ ${ID-} == debian ]] && echo "${VERSION_CODENAME-}" || echo bookworm)}

if [[ $EUID -ne 0 ]]; then
    echo 'packaging/test-deb.sh: must run as root' >&2
    exit 1
fi

# fuse3 is all that the package depends on beside the C library.
make_clean_system() {
    local root=$1/clean
    mkdir -p "$target/package"
    if ! debootstrap --variant=minbase --include=fuse3 "$release" "$root" \
        "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$1/debootstrap.log" 2>&1; then
        tail -n 20 "$1/debootstrap.log" >&2
        echo 'the clean system could not be made: debootstrap and a Debian mirror are needed (DEBIAN_MIRROR)' >&2
        return 1
    fi
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    # Devices would need more rights than a container has.
    tar --create --numeric-owner --exclude='./dev/*' --file "$kept.new" -C "$root" .
    mv "$kept.new" "$kept"
    rm -rf --one-file-system "$root"
}

if [[ ${2-} != --inside ]]; then
    scratch=$(mktemp -d)
    trap 'rm -rf --one-file-system "$scratch"' EXIT
    [[ -e $kept ]] || make_clean_system "$scratch"
    if [[ -n ${BUILD_ONLY-} ]]; then
        exit 0
    fi
    package=$(realpath "${1:?the package}")
    # A mount namespace of its own: whatever happens, no mount of the test stays.
    unshare --mount --propagation private "$here/test-deb.sh" "$package" --inside "$scratch"
    exit
fi

package=$1
root=$3/root
mkdir "$root"
tar --extract --numeric-owner --file "$kept" -C "$root"
cp "$package" "$root/lockbox.deb"
mount -t tmpfs tmpfs "$root/dev"
mknod -m 666 "$root/dev/null" c 1 3 2>/dev/null || { touch "$root/dev/null" && mount --bind /dev/null "$root/dev/null"; }
touch "$root/dev/fuse" "$root/dev/urandom"
mount --bind /dev/fuse "$root/dev/fuse"
mount --bind /dev/urandom "$root/dev/urandom"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"

# Every name in the clean system, without what the package database writes about any package.
names() {
    (cd "$root" && find . \( -path ./proc -o -path ./dev -o -path ./run -o -path ./tmp -o -path ./var/lib/dpkg \) -prune -o -print |
        grep -vE '^\./(var/log/|var/cache/(ldconfig|debconf)|etc/ld\.so\.cache)' | LC_ALL=C sort)
}

names >"$3/before"
chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    /bin/sh -eux <<'INSIDE'
dpkg --install /lockbox.deb
lockbox --version
test -s /usr/share/man/man1/lockbox.1.gz
test "$(readlink -f /usr/sbin/umount.lockbox)" = /usr/bin/lockbox
mkdir /tmp/place /tmp/place/folder
cd /tmp/place
(umask 077; echo 'correct horse battery staple' >passphrase)
lockbox create --weak-kdf --kdf-memory 1 --passfile passphrase secrets.lbx
mount -t lockbox -o passfile=/tmp/place/passphrase /tmp/place/secrets.lbx /tmp/place/folder
echo 'meet me at the bridge' >folder/letter
umount folder
test -z "$(ls -A folder)"
# As a line of fstab.
echo '/tmp/place/secrets.lbx /tmp/place/folder lockbox noauto,passfile=/tmp/place/passphrase 0 0' >/tmp/place/fstab
mount --fstab /tmp/place/fstab /tmp/place/folder
test "$(cat folder/letter)" = 'meet me at the bridge'
umount folder
lockbox check --full --passfile passphrase secrets.lbx
cd /
rm -r /tmp/place
dpkg --purge lockbox
INSIDE
names >"$3/after"
if ! diff "$3/before" "$3/after"; then
    echo 'the removed package left something behind, or took something away' >&2
    exit 1
fi
echo "installed, mounted, remounted and removed: ${package##*/}"
