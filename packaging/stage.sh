#!/usr/bin/env bash
# Puts what a package installs into packaging/staged, as it will lie below /: programs, manual pages, completions, what desktops know, units, examples.
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
# umount(8) looks for the first, mount -o remount for the second, and both for the last two with the type as the kernel shows it.
ln -s ../bin/lockbox "$staged/usr/sbin/umount.lockbox"
ln -s mount.lockbox "$staged/usr/sbin/mount.fuse.lockbox"
ln -s umount.lockbox "$staged/usr/sbin/umount.fuse.lockbox"

for page in man/*.[1-8]; do
    section=${page##*.}
    install -d "$staged/usr/share/man/man$section"
    gzip -9n <"$page" >"$staged/usr/share/man/man$section/${page##*/}.gz"
done
# The page of a command is also found by the name of the command, as lockbox-umount(1) is, unless a page of any section has that name.
for page in man/lockbox-*.1; do
    awk '/^\.Nm lockbox$/ { named = NR } $1 == ".Cm" && NR == named + 1 { print $2 }' "$page" | sort -u | while read -r command; do
        if ! compgen -G "man/lockbox-$command.[1-8]" >/dev/null; then
            printf '.so man1/%s\n' "${page##*/}" | gzip -9n >"$staged/usr/share/man/man1/lockbox-$command.1.gz"
        fi
    done
done

# Fedora's zsh looks in the first of its two places, Debian's in the second.
for shell in bash-completion/completions/lockbox:bash \
    zsh/site-functions/_lockbox:zsh zsh/vendor-completions/_lockbox:zsh fish/vendor_completions.d/lockbox.fish:fish; do
    file=$staged/usr/share/${shell%:*}
    install -d "${file%/*}"
    "$programs/lockbox" completions "${shell##*:}" >"$file"
done

# Caches of these are brought up to date by triggers of the packages that own the caches, on Debian as on Fedora.
install -D -m 644 packaging/desktop/lockbox.xml "$staged/usr/share/mime/packages/lockbox.xml"
for entry in packaging/desktop/*.desktop; do
    install -D -m 644 "$entry" "$staged/usr/share/applications/${entry##*/}"
done
for icon in apps/lockbox mimetypes/application-x-lockbox; do
    install -D -m 644 packaging/desktop/lockbox.svg "$staged/usr/share/icons/hicolor/scalable/$icon.svg"
done

# Units for any archive; those of certain directories are examples.
shopt -s nullglob
for unit in packaging/systemd/*.service packaging/systemd/*.timer packaging/systemd/*.socket; do
    install -D -m 644 "$unit" "$staged/usr/lib/systemd/system/${unit##*/}"
done
if [[ -e $staged/usr/bin/lockbox-share ]]; then
    install -D -m 644 packaging/lockbox-share.service "$staged/usr/lib/systemd/system/lockbox-share.service"
    for example in packaging/lockbox-share/*; do
        install -D -m 644 "$example" "$staged/usr/share/doc/lockbox/examples/lockbox-share/${example##*/}"
    done
fi
for example in packaging/examples/* packaging/systemd/*.mount packaging/systemd/*.automount; do
    install -D -m 644 "$example" "$staged/usr/share/doc/lockbox/examples/${example##*/}"
done
documents=$staged/usr/share/doc/lockbox
install -D -m 644 -t "$documents" CHANGELOG.md format-spec/THREATS.md
install -m 644 LICENSE-MIT "$documents/copyright"
# Without pictures and the sections about the sources, which a package lacks.
awk '/^## / { skip = $0 ~ /^## (Try it|Install|For engineers)$/ } !skip && !/^!\[/' README.md |
    sed 's|`format-spec/|`|g' | cat -s >"$documents/README.md"
for file in $(grep -oE '`[A-Za-z/.-]+\.md`' "$documents/README.md" | tr -d '`'); do
    [[ -e $documents/$file ]] || { echo "packaging/stage.sh: README.md names $file, which the package lacks" >&2; exit 1; }
done

find "$staged" -type f ! -perm -100 -exec chmod 644 {} +
if [[ -n ${SOURCE_DATE_EPOCH-} ]]; then
    find "$staged" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
fi
