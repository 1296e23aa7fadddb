#!/usr/bin/env bash
# What somebody sees who opens an archive by a double click: a real file manager and real windows on a display that nobody looks at. That the
# steps come is told here; a picture of each is for people to judge.
#
#   packaging/try-desktop.sh PICTURES [HOME]     as an ordinary user of a machine with the package; PICTURES is a directory, and HOME an empty one
#                                                that stays, where the files on the pictures lie
#
# docs/screens/desktop.png is the file manager of its picture "passphrase".
# Beside it, by Debian's names: adwaita-icon-theme dbus fonts-dejavu-core imagemagick libgtk-3-bin librsvg2-common mousepad openbox pcmanfm xdg-utils
# xdotool xvfb zenity.
set -euo pipefail
pictures=$(realpath "${1:?the directory of the pictures}")
[[ $(id -u) != 0 ]] || { echo 'root has no file manager: this is for an ordinary user' >&2; exit 1; }
if [[ -z ${TRIED_ALONE-} ]]; then
    place=$(mktemp -d "${TMPDIR:-/tmp}/lockbox-desktop.XXXXXX")
    trap 'rm -rf "$place"' EXIT
    mkdir -m 700 "$place/run"
    home=${2:-$place/ann}
    mkdir -p "$home"
    [[ ! $(ls -A "$home") ]] || { echo "$home is not empty" >&2; exit 1; }
    # Nothing of the desktop and the settings of whoever runs this.
    env --ignore-environment TRIED_ALONE=1 PATH="$PATH" LANG=C.UTF-8 HOME="$home" XDG_RUNTIME_DIR="$place/run" NO_AT_BRIDGE=1 \
        dbus-run-session -- "$0" "$pictures"
    exit
fi
cd "$HOME"
passphrase='the mill at the old bridge, 1874'
started=()

finish() {
    local code=$?
    trap - EXIT
    set +e
    [[ $code == 0 ]] || { picture failed; tail "$HOME/log"; } >&2
    kill "${started[@]:1}" 2>/dev/null
    lockbox umount --all
    # The display is the first, and takes what is on it along.
    kill "${started[0]}"
    wait
    chmod -R u+w "$HOME"
    exit "$code"
}
trap finish EXIT

# in_background COMMAND...: until the script ends.
in_background() {
    "$@" >>"$HOME/log" 2>&1 &
    started+=($!)
}

# await COMMAND...: until it is so.
await() {
    local end=$((SECONDS + 60))
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || { echo "FAILED  it never came to this: $*" >&2; exit 1; }
        sleep 0.1
    done
}

# in_front TITLE: what is typed goes to a window with this title, without anybody's clicking it first.
in_front() {
    [[ $(xdotool getactivewindow getwindowname) == "$1" ]]
}

# asked_anew: a window of lockbox is in front, and not the program of before, whose number of a window is used again.
asked_anew() {
    in_front lockbox && [[ $(xdotool getactivewindow getwindowpid) != "$asked" ]]
}

asked=
# window PICTURE: waits for the next window of lockbox.
window() {
    await asked_anew
    asked=$(xdotool getactivewindow getwindowpid)
    picture "$1"
}

# picture NAME: what is on the display, once it stands still.
picture() {
    local before='' now=
    until now=$(import -window root rgb:- | sha256sum) && [[ $now == "$before" ]]; do
        before=$now
        sleep 0.5
    done
    import -window root -strip +dither -colors 128 "$pictures/$1.png"
    echo "ok      $1"
}

# show DIRECTORY: in the file manager.
show() {
    in_background pcmanfm --no-desktop "$HOME/$1"
    await in_front "${1##*/}"
    picture "folder-${1##*/}"
}

# double_click COLUMN: the file that is shown there, from 0.
double_click() {
    xdotool mousemove --window "$(xdotool getactivewindow)" $((206 + 94 * $1)) 128 click --repeat 2 --delay 40 1
}

answer() {
    xdotool type "$1"
    xdotool key Return
}

# step PICTURE TEXT: what a window of lockbox is told, and a picture of it before.
step() {
    window "$1"
    answer "$2"
}

unmount_by_the_menu() {
    in_background gtk-launch lockbox-unmount
}

mkfifo number
in_background Xvfb -displayfd 3 -screen 0 900x600x24 -nolisten tcp 3<>number
read -r number <number
export DISPLAY=:$number
mkdir -p .config/gtk-3.0 .config/pcmanfm/default Documents Templates
printf 'gtk-icon-theme-name="Adwaita"\ngtk-font-name="DejaVu Sans 10"\n' >.gtkrc-2.0
printf '[Settings]\ngtk-icon-theme-name=Adwaita\ngtk-font-name=DejaVu Sans 10\n' >.config/gtk-3.0/settings.ini
printf '[ui]\nalways_show_tabs=1\nwin_width=640\nwin_height=480\n' >.config/pcmanfm/default/pcmanfm.conf
in_background openbox
await xdotool get_desktop

printf '%s\n' "$passphrase" >pass
chmod 600 pass
lockbox create --quiet --weak-kdf --kdf-memory 64 --passfile pass Documents/secrets.lbx
lockbox mount --quiet --passfile pass Documents/secrets.lbx
echo 'meet me at the bridge' >Documents/secrets/letter.txt
convert -size 640x400 gradient:skyblue-darkgreen Documents/secrets/hill.png
lockbox umount Documents/secrets
mkdir shut 'Accounts of the years 2019 to 2026, and what belongs to them' others
cp Documents/secrets.lbx shut/museum.lbx
cp Documents/secrets.lbx "$(echo Accounts*)/All letters to the tax office that we wrote since we bought the house, with what came back.lbx"
chmod 444 shut/museum.lbx
chmod 555 shut
echo text >others/text.lbx
head -c 100000 Documents/secrets.lbx >others/cut.lbx

show Documents
double_click 0
window passphrase
answer wrong
window wrong-passphrase
answer "$passphrase"
await in_front secrets
picture opened
double_click 1
await xdotool search --onlyvisible --name letter.txt
picture letter
xdotool key alt+F4
await in_front secrets
# The second double click asks for nothing.
show Documents
double_click 1
await in_front secrets
picture opened-again
# A program that uses it.
(cd Documents/secrets && exec sleep 600) &
user=$!
started+=("$user")
unmount_by_the_menu
window busy
xdotool key Escape
kill "$user"
wait "$user" || true
unmount_by_the_menu
await test ! -e Documents/secrets
show Documents
# Two lines of a window, and no place beside the archive.
show "$(echo Accounts*)"
double_click 0
window long-name
xdotool key Escape
show shut
double_click 0
window read-only
answer "$passphrase"
await in_front museum
picture opened-read-only
unmount_by_the_menu
await test ! -e "$XDG_RUNTIME_DIR/museum"
show others
double_click 0
window cut
xdotool key Escape
await in_front others
double_click 1
window text
xdotool key Escape
await in_front others
# By the menu: a place, and the passphrase twice. The first window is the desktop's own, with another title.
in_background gtk-launch lockbox-new
await in_front 'lockbox: new encrypted archive'
picture new-archive-name
xdotool key ctrl+a
answer "$HOME/Documents/diary"
step new-archive hunter2
step new-archive-weak ''
step new-archive-again "$passphrase"
step new-archive-repeat "$passphrase"
await in_front diary
picture new-archive-opened
in_background gtk-launch lockbox_close "$HOME/Documents/diary.lbx"
await test ! -e Documents/diary
