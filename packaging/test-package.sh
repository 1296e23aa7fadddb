#!/usr/bin/env bash
# Installs packages into a clean system, uses them as a user would, removes them, and looks that nothing stays behind.
#
#   packaging/test-package.sh PACKAGE...         a .deb or a .rpm
#   BUILD_ONLY=1 packaging/test-package.sh       only makes the clean system
#
# With a .deb the story of a new user is told (tests/story). Needs root, /dev/fuse, python3, debootstrap and a Debian mirror (DEBIAN_MIRROR, default
# http://deb.debian.org/debian), and for a .rpm the program rpm. The clean system is kept in target/package/root.tar for the next time.
set -euo pipefail
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
repository=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$repository/target}
kept=$target/package/root.tar
release=${DEBIAN_RELEASE:-$(. /etc/os-release && [[ ${ID-} == debian ]] && echo "${VERSION_CODENAME-}" || echo bookworm)}

if [[ $EUID -ne 0 ]]; then
    echo 'packaging/test-package.sh: must run as root' >&2
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

# start_clean_system: in $root, with what a system that runs has.
start_clean_system() {
    mkdir "$root"
    tar --extract --numeric-owner --file "$kept" -C "$root"
    # Whatever the place for temporary files allows, fusermount3 and mount(8) begin with root's rights.
    mount --bind "$root" "$root"
    mount -o remount,bind,suid,exec "$root"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    local device
    for device in null zero urandom tty fuse; do
        touch "$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    # What udev's rule for it says.
    chmod 666 "$root/dev/fuse"
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    # systemd makes it at boot, and fusermount3 looks into it.
    ln -sfn ../proc/self/mounts "$root/etc/mtab"
}

inside() {
    chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 "$@"
}

# Every name in the clean system, without what the package database writes about any package. A .rpm owns files and links alone: directories
# that it made stay, empty.
names() {
    local which=()
    [[ ${package##*.} == deb ]] || which=('!' -type d)
    (cd "$root" && find . \( -path ./proc -o -path ./dev -o -path ./run -o -path ./tmp -o -path ./var/lib/dpkg -o -path ./var/lib/rpm \) \
        -prune -o "${which[@]}" -print | grep -vE '^\./(var/log/|var/cache/(ldconfig|debconf)|etc/ld\.so\.cache)' | LC_ALL=C sort)
}

nothing_is_left() {
    names >"$scratch/after"
    if ! diff "$scratch/before" "$scratch/after"; then
        echo 'the removed package left something behind, or took something away' >&2
        return 1
    fi
}

test_deb() {
    inside useradd --no-create-home --home-dir /srv/ann --shell /bin/bash ann
    names >"$scratch/before"
    cp "$1" "$root/lockbox.deb"
    if ! "$repository/tests/story/tell.py" --root "$root" "$repository"/tests/story/{install-deb,new-user,remove-deb}.txt >"$scratch/told" 2>&1; then
        cat "$scratch/told"
        return 1
    fi
    tail -n 1 "$scratch/told"
    # What root made is root's.
    rm -r "$root/etc/lockbox" "$root/lockbox.deb"
    nothing_is_left
}

# What both packages install lies in packaging/staged.
test_rpm() {
    local staged=$here/staged database=(--root "$root" --dbpath /var/lib/rpm) link
    # rpm(8) of a Debian system warns of its own use.
    rpm() { command rpm "$@" 2> >(grep -v -i -e alien -e 'assuming you know' >&2); }
    names >"$scratch/before"
    (cd "$staged" && find . ! -type d -printf '/%P %#m\n' | LC_ALL=C sort) >"$scratch/wanted"
    rpm --query --package --queryformat '[%{FILENAMES} %{FILEMODES:octal}\n]' "$1" | sed 's/ 1[02]0/ 0/' | LC_ALL=C sort >"$scratch/listed"
    diff "$scratch/wanted" "$scratch/listed"
    rpm --query --package --requires "$1" | grep -x fuse3
    # The names of its dependencies are those of other distributions.
    rpm "${database[@]}" --install --nodeps "$1"
    rpm "${database[@]}" --verify --nodeps lockbox
    (cd "$staged" && find . -type f -print0 | xargs -0 -I{} cmp {} "$root/{}")
    (cd "$staged" && find . -type l) | while read -r link; do
        [[ $(readlink "$root/$link") == "$(readlink "$staged/$link")" ]] || {
            echo "$link is not the link that it should be" >&2
            return 1
        }
    done
    inside bash -euc 'mkdir /tmp/place /tmp/place/folder && cd /tmp/place
        (umask 077; echo "correct horse battery staple" >passphrase)
        lockbox create --weak-kdf --kdf-memory 1 --passfile passphrase secrets.lbx
        mount -t lockbox -o passfile=/tmp/place/passphrase /tmp/place/secrets.lbx folder
        echo "meet me at the bridge" >folder/letter
        umount folder
        test "$(lockbox cat --passfile passphrase secrets.lbx letter)" = "meet me at the bridge"'
    rpm "${database[@]}" --erase lockbox
    # What root's commands remember of archives stays, as data does with this kind of package.
    rm -r "$root/var/lib/lockbox"
    nothing_is_left
}

if [[ ${1-} == --inside ]]; then
    package=$2
    scratch=$3
    root=$scratch/root
    start_clean_system
    "test_${package##*.}" "$package"
    echo "installed, used and removed: ${package##*/}"
    exit
fi
scratch=$(mktemp -d)
trap 'rm -rf --one-file-system "$scratch"' EXIT
[[ -e $kept ]] || make_clean_system "$scratch"
if [[ -n ${BUILD_ONLY-} ]]; then
    exit 0
fi
for package in "${@:?the packages}"; do
    mkdir "$scratch/${package##*.}"
    # A mount namespace of its own: whatever happens, no mount of the test stays.
    unshare --mount --propagation private "$here/test-package.sh" --inside "$(realpath "$package")" "$scratch/${package##*.}"
done
