#!/usr/bin/env bash
# Puts what a package installs into packaging/staged, as it will lie below /: programs, manual pages, completions, units, examples.
#
#   packaging/stage.sh DIRECTORY     takes the programs lockbox, mount-lockbox and (if it was built) lockbox-share from there
#
# Times are those of SOURCE_DATE_EPOCH when it is set, so that packages of the same programs are the same.
set -euo pipefail
programs=$(realpath "${1:?the directory of the programs}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
staged=packaging/staged

rm -rf "$staged"
install -d "$staged/usr/bin" "$staged/usr/sbin"
# Symbols would be most of the package.
install -m 755 --strip "$programs/lockbox" "$staged/usr/bin/lockbox"
install -m 755 --strip "$programs/mount-lockbox" "$staged/usr/sbin/mount.lockbox"
if [[ -e $programs/lockbox-share ]]; then
    install -m 755 --strip "$programs/lockbox-share" "$staged/usr/bin/lockbox-share"
fi
# umount(8) looks for the first, mount -o remount for the second.
ln -s ../bin/lockbox "$staged/usr/sbin/umount.lockbox"
ln -s mount.lockbox "$staged/usr/sbin/mount.fuse.lockbox"

for page in man/*.[1-8]; do
    section=${page##*.}
    install -d "$staged/usr/share/man/man$section"
    gzip -9n <"$page" >"$staged/usr/share/man/man$section/${page##*/}.gz"
done

# Older states of the source have no such command.
if "$programs/lockbox" completions --help >/dev/null 2>&1; then
    for shell in bash-completion/completions/lockbox:bash zsh/site-functions/_lockbox:zsh fish/vendor_completions.d/lockbox.fish:fish; do
        file=$staged/usr/share/${shell%:*}
        install -d "${file%/*}"
        "$programs/lockbox" completions "${shell##*:}" >"$file"
    done
fi

while read -r unit; do
    install -D -m 644 "$unit" "$staged/usr/lib/systemd/system/${unit##*/}"
done < <(find packaging -path "$staged" -prune -o \( -name '*.service' -o -name '*.socket' -o -name '*.mount' -o -name '*.automount' \) \
    ! -path '*/examples/*' -type f -print)
if [[ -d packaging/examples ]]; then
    install -d "$staged/usr/share/doc/lockbox"
    cp -r packaging/examples "$staged/usr/share/doc/lockbox/examples"
fi
install -D -m 644 README.md "$staged/usr/share/doc/lockbox/README.md"
install -D -m 644 CHANGELOG.md "$staged/usr/share/doc/lockbox/CHANGELOG.md"

find "$staged" -type f ! -perm -100 -exec chmod 644 {} +
if [[ -n ${SOURCE_DATE_EPOCH-} ]]; then
    find "$staged" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
fi
