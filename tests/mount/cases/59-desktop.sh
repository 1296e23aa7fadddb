# Mounting for who sits at a desktop: the file manager, windows that ask and tell, and what desktops know of archives.
# shellcheck shell=bash disable=SC2317,SC2164,SC2016

# stand_in NAME: a program of a desktop with this name, alone in a directory that becomes PATH. It notes what it is told in $WORK/told and answers
# with the lines of $WORK/answers in turn; "cancel" closes the window, and "broken" is a pinentry that cannot open one.
stand_in() {
    rm -rf desk
    mkdir desk
    : >told
    case $1 in
    pinentry)
        cat >desk/pinentry <<'END'
#!/bin/sh
PATH=/usr/bin:/bin
cd "$DESK" || exit
tr '\0' '\n' </proc/$PPID/environ >>seen
tr '\0' '\n' </proc/$PPID/cmdline >>seen
echo 'OK Pleased to meet you'
while read -r line; do
    printf '%s\n' "$line" >>told
    case $line in
    GETPIN)
        answer=$(sed -n 1p answers)
        sed -i 1d answers
        case $answer in
        cancel) echo 'ERR 83886179 Operation cancelled <Pinentry>' ;;
        broken) echo 'ERR 83918950 Inappropriate ioctl for device <Pinentry>' ;;
        *) printf 'D %s\nOK\n' "$answer" ;;
        esac
        ;;
    SETTITLE*) echo 'ERR 536871187 Unknown IPC command <User defined source 1>' ;;
    *) echo OK ;;
    esac
done
END
        ;;
    *)
        cat >"desk/$1" <<'END'
#!/bin/sh
PATH=/usr/bin:/bin
cd "$DESK" || exit
tr '\0' '\n' </proc/$PPID/environ >>seen
tr '\0' '\n' </proc/$PPID/cmdline >>seen
printf '%s\n' "$@" >>told
case "$*" in *--error*) exit 0 ;; esac
answer=$(sed -n 1p answers)
sed -i 1d answers
[ "$answer" != cancel ] || exit 1
printf '%s\n' "$answer"
END
        ;;
    esac
    chmod 755 "desk/$1"
}

# at_desk COMMAND...: with no other programs than those of the desktop.
at_desk() {
    env DISPLAY=:77 DESK="$WORK" PATH="$WORK/desk" "$@"
}

case_windows_ask_three_times_and_tell_what_fails() {
    cd "$WORK"
    local name='a<b>&_%0A\n.lbx' program lockbox windows right code
    lockbox=$(type -P lockbox)
    right=$PASSPHRASE
    create "$name"
    mkdir box
    for program in zenity kdialog pinentry; do
        stand_in "$program"
        printf '%s\n' wrong 'wrong too' "$right" >answers
        at_desk "$lockbox" mount --desktop -o "log=$WORK/box.log" "$name" box </dev/null
        mountpoint -q box
        "$lockbox" umount box
        case $program in
        zenity) windows=('--text=Passphrase of a<b>&__%0A\\n.lbx' '--text=Wrong passphrase. Passphrase of a<b>&__%0A\\n.lbx' --hide-text) ;;
        kdialog) windows=('<qt>Passphrase of a&lt;b&gt;&amp;_%0A\\n.lbx</qt>' '<qt>Wrong passphrase. Passphrase of a&lt;b&gt;&amp;_%0A\\n.lbx</qt>' --password) ;;
        pinentry) windows=('SETDESC Passphrase of a<b>&_%250A\n.lbx' 'SETDESC Wrong passphrase. Passphrase of a<b>&_%250A\n.lbx' GETPIN) ;;
        esac
        same "$(grep -cxF -e "${windows[0]}" told) $(grep -cxF -e "${windows[1]}" told) $(grep -cxF -e "${windows[2]}" told)" '1 2 3' "$program: $(cat told)"
        # Who gives up is told nothing.
        : >told
        echo cancel >answers
        code=0
        at_desk "$lockbox" mount --desktop -o "log=$WORK/box.log" "$name" box </dev/null >out 2>&1 || code=$?
        same "$code $(cat out; grep -cF -e --error -e MESSAGE told || true)" '130 0' "$program"
        # Three are enough.
        printf '%s\n' 1 2 3 4 >answers
        expect 10 'wrong passphrase' at_desk "$lockbox" mount --desktop -o "log=$WORK/box.log" "$name" box
        same "$(cat answers)" 4
        grep -Fxq -e --error -e MESSAGE told || fail "$program: $(cat told)"
        ! mountpoint -q box || fail 'mounted'
        # What fails before anybody is asked, in either program, is told too.
        : >told
        echo text >text
        expect 11 'not a lockbox archive' at_desk "$lockbox" mount --desktop text box
        grep -Fxq -e --error -e MESSAGE told || fail "$program: $(cat told)"
        # Of which archive that is true: there is no command line above a window.
        tr -d '\n' <told | grep -q 'text: .*not a lockbox archive' || fail "$program: $(cat told)"
        : >told
        expect 1 'no suffix' at_desk "$lockbox" mount --desktop text
        same "$(grep -Fxc -e --error -e MESSAGE told)" 1 "$program"
    done
    # An option that names a passphrase goes before.
    : >told
    at_desk "$lockbox" mount --desktop --passfile "$PASSFILE" -o "log=$WORK/box.log" "$name" box
    same "$(cat told)" ''
    "$lockbox" umount box
    # The pinentry that has no window is no user who gives up.
    echo broken >answers
    expect 2 'pinentry failed: Inappropriate ioctl for device <Pinentry>' at_desk "$lockbox" mount --desktop -o "log=$WORK/box.log" "$name" box
    "$lockbox" mount --passfile "$PASSFILE" -o "log=$WORK/box.log" "$name" box
    # What is busy is told, and stays.
    : >told
    exec 7<box
    sleep 600 <&7 7<&- &
    BACKGROUND+=($!)
    exec 7<&-
    expect 13 'busy' at_desk "$lockbox" umount --desktop box
    grep -Fxq MESSAGE told || fail "$(cat told)"
    kill "${BACKGROUND[0]}"
    wait "${BACKGROUND[0]}" || true
    at_desk "$lockbox" umount --desktop box
    ! grep -qF "$right" seen told || fail 'the passphrase is in an argument or a variable'
    rm desk/*
    expect 2 'install zenity, kdialog or pinentry' at_desk "$lockbox" mount --desktop "$name" box
    expect 2 'no desktop' env -u DISPLAY -u WAYLAND_DISPLAY "$lockbox" mount --desktop "$name" box
}

# windows PATTERN: how many windows have shown it; programs break their lines.
windows() {
    { tr -d '\n' <told | grep -oF -- "$1" || true; } | wc -l
}

case_a_new_archive_is_made_in_windows() {
    local name='a<b>&_%0A\n' program lockbox place=$WORK/new strong='mural stardust acid pluck' answers code
    lockbox=$(type -P lockbox)
    cd "$WORK"
    printf '%s\n' "$strong" >"$PASSFILE"
    made() {
        at_desk HOME=/home/-a "$lockbox" create --desktop --weak-kdf --kdf-memory 1 "$@" </dev/null
    }
    for program in zenity kdialog; do
        stand_in "$program"
        mkdir "$place"
        # The second time the passphrases agree; root has no file manager.
        printf '%s\n' "$place/$name" "$strong" other "$strong" "$strong" >answers
        expect 0 'is mounted, but cannot be shown: root has no file manager' made --open
        same "$(ls "$place")" "$name"$'\n'"$name.lbx"
        mountpoint -q "$place/$name"
        case $program in
        zenity)
            same "$(head -n 5 told)" $'--file-selection\n--save\n--confirm-overwrite\n--title=lockbox: new encrypted archive\n--filename=/home/-a/Archive.lbx'
            same "$(windows "--text=If you lose the passphrase, the files are lost. New passphrase of ${place//_/__}/a<b>&__%0A\\\\n.lbx")" 1 "$(cat told)"
            ;;
        kdialog)
            same "$(head -n 3 told)" $'--title=lockbox: new encrypted archive\n--getsavefilename\n/home/-a/Archive.lbx'
            same "$(windows "<qt>If you lose the passphrase, the files are lost. New passphrase of $place/a&lt;b&gt;&amp;_%0A\\\\n.lbx</qt>")" 1 "$(cat told)"
            ;;
        esac
        same "$(windows 'The two passphrases differ. If you lose the passphrase, the files are lost. ') $(windows 'Repeat the new passphrase') $(windows weak)" '1 2 0'
        "$lockbox" umount "$place/$name.lbx"
        "$lockbox" ls --passfile "$PASSFILE" "$place/$name.lbx"
        # A window that is closed leaves nothing, and nothing is told.
        for answers in cancel "$place/b"$'\n'cancel "$place/b"$'\n'"$strong"$'\n'cancel "$place/b"$'\nhunter2\ncancel'; do
            : >told
            printf '%s\n' "$answers" >answers
            code=0
            made --open >out 2>&1 || code=$?
            same "$code $(cat out) $(ls "$place")" "130  $name.lbx"
        done
        # The last one was about a weak passphrase, which is taken when it is repeated.
        same "$(windows 'This passphrase is weak: some thousand guesses find it. Repeat it to use it anyway')" 1 "$(cat told)"
        same "$(windows --error)" 0
        # A file that exists stays, with the suffix that was not typed too, and no passphrase is asked for.
        cp "$place/$name.lbx" before
        for answers in "$place/$name" "$place/$name.lbx"; do
            : >told
            printf '%s\n' "$answers" "$strong" "$strong" >answers
            expect 2 'already exists and was not changed' made --open
            same "$(windows --error) $(wc -l <answers)" '1 2' "$(cat told)"
        done
        same_file before "$place/$name.lbx"
        # Nor is an archive made that could not be shown, or that is not on this machine.
        mkdir "$place/c"
        touch "$place/c/file" "$place/d"
        for answers in 15:choose.another.name:"$place/c" 15:choose.another.name:"$place/d.lbx" 2:not.a.path.on.this.machine:file:///c; do
            : >told
            echo "${answers#*:*:}" >answers
            answers=${answers%":${answers#*:*:}"}
            expect "${answers%%:*}" "${answers#*:}" made --open
            same "$(windows --error)" 1 "$(cat told)"
        done
        same "$(ls "$place")" "$name.lbx"$'\nc\nd'
        rm -r "$place"
    done
    stand_in pinentry
    expect 2 'install zenity or kdialog' made --open
    same "$(grep -cFx MESSAGE told) $(grep -cFx GETPIN told || true)" '1 0'
    printf '%s\n' hunter2 hunter2 >answers
    made d.lbx
    echo hunter2 | "$lockbox" ls d.lbx
    same "$(grep -cFx GETPIN told)" 2
    ! grep -qF -e "$strong" -e hunter2 seen told || fail 'a passphrase is in an argument or a variable'
    expect 1 'ARCHIVE' "$lockbox" create --weak-kdf --kdf-memory 1
    expect 1 'desktop' "$lockbox" create --open e.lbx
    expect 1 'cannot be used with' "$lockbox" create --desktop --generate-passphrase e.lbx
}

case_an_archive_is_closed_by_its_file() {
    local lockbox
    lockbox=$(type -P lockbox)
    new_archive box
    cd "$WORK"
    stand_in zenity
    expect 2 'box.lbx is not mounted' at_desk "$lockbox" umount --desktop -- "$WORK/box.lbx"
    same "$(windows "$WORK/box.lbx is not mounted") $(windows --error)" '1 1' "$(cat told)"
    : >told
    attach box
    exec 7<box
    expect 13 'is busy' at_desk "$lockbox" umount --desktop -- "$WORK/box.lbx"
    same "$(windows "$WORK/box is busy: ") $(windows --error)" '1 1' "$(cat told)"
    exec 7<&-
    : >told
    at_desk "$lockbox" umount --desktop -- "$WORK/box.lbx"
    ! mountpoint -q box || fail 'still mounted'
    same "$(cat told)" ''
}

case_mount_open_shows_the_directory_in_the_file_manager() {
    need_user
    mkdir "$WORK/user" "$WORK/desk"
    chown "$TEST_USER:" "$WORK/user"
    cp "$PASSFILE" "$WORK/user/pass"
    chown "$TEST_USER:" "$WORK/user/pass"
    cd "$WORK/user"
    cat >"$WORK/desk/xdg-open" <<'END'
#!/bin/sh
{
    printf '%s\n' "$@"
    # Its own process group, and nothing of ours to read.
    [ "$(ps -o pgid= -p $$ | tr -d ' ')" = $$ ] && echo alone
    readlink /proc/$$/fd/0
    # The limits of who opens it, too.
    awk '/^Max core file size/ { print $5 }' /proc/$$/limits
} >shown.new 2>&1
mv shown.new shown
exit "${OPENS-0}"
END
    chmod 755 "$WORK/desk/xdg-open"
    at_desktop() {
        as_user env -u LOCKBOX_PASSFILE DISPLAY=:77 PATH="$WORK/desk:$PATH" "$@"
    }
    # What was shown, once it was.
    shown() {
        await test -e shown
        cat shown
        rm shown
    }
    local wanted=$WORK/user/box$'\n'alone$'\n'/dev/null$'\n'12288 bare
    ulimit -c 12
    at_desktop lockbox create --weak-kdf --kdf-memory 1 --passfile pass box.lbx
    expect 10 'wrong passphrase' at_desktop sh -c 'echo hush | lockbox mount --open box.lbx'
    [[ ! -e shown ]] || fail 'nothing is there to be shown'
    at_desktop lockbox mount --open --passfile pass -o "log=$WORK/user/log" box.lbx >out 2>&1
    same "$(cat out)" ''
    same "$(shown)" "$wanted"
    # The second click asks for nothing.
    at_desktop lockbox mount --open box.lbx </dev/null
    same "$(shown)" "$wanted"
    as_user lockbox umount box
    # The mount stands, whatever becomes of the window.
    at_desktop env OPENS=4 lockbox mount --open --passfile pass -o "log=$WORK/user/log" box.lbx
    same "$(shown)" "$wanted"
    as_user mountpoint -q box
    rm "$WORK/desk/xdg-open"
    # A PATH with fusermount3, and without the real one of this machine.
    bare=$WORK/desk
    ln -s "$(type -P fusermount3)" "$(type -P mount)" "$(type -P umount)" "$bare/"
    expect 0 'box is mounted, but cannot be shown: xdg-open not found' \
        as_user env DISPLAY=:77 PATH="$bare" "$(type -P lockbox)" mount --open box.lbx
    expect 0 'no desktop' as_user env -u DISPLAY -u WAYLAND_DISPLAY "$(type -P lockbox)" mount --open box.lbx
    as_user mountpoint -q box
    as_user lockbox umount box
    expect 1 'cannot be used with' at_desktop lockbox mount --open --foreground box.lbx
    expect 1 'nofail cannot be used with --open' at_desktop lockbox mount --open -o ro,nofail missing.lbx
    expect 1 'foreground cannot be used with --open' at_desktop lockbox mount --open -o foreground --passfile pass box.lbx
    # The display may be another user's.
    cd "$WORK"
    new_archive roots
    expect 0 'root has no file manager' env DISPLAY=:77 lockbox mount --open --passfile "$PASSFILE" -o "log=$WORK/roots.log" roots.lbx
    mountpoint -q roots
    detach roots
}

case_a_window_names_each_mount_that_is_busy() {
    alone two_are_busy
}

two_are_busy() {
    local lockbox
    lockbox=$(type -P lockbox)
    new_archive one
    new_archive two
    cd "$WORK"
    attach one
    attach two
    stand_in zenity
    exec 7<one 8<two
    expect 13 '2 archives are still mounted' at_desk "$lockbox" umount --all --desktop
    same "$(wc -l <stderr)" 1
    same "$(grep -c -- '--text=2 archives are still mounted: ' told)" 1 "$(cat told)"
    # Broken into lines, and without the words for a terminal.
    tr -d '\n' <told >all
    mv all told
    grep -q "$WORK/one is busy: .*process $$ " told && grep -q "$WORK/two is busy: .*process $$ " told || fail "$(cat told)"
    grep -q 'end that use, and unmount it again; ' told && grep -q -e '--wait, --lazy or --force' stderr || fail "$(cat told stderr)"
    ! grep -q -e --lazy told || fail "$(cat told)"
    exec 7<&- 8<&-
    at_desk "$lockbox" umount --all --desktop
    same "$(mounts_below "$WORK" | grep -vx "$WORK" || true)" ''
}

# Whatever is saved in a directory that only looks like the archive lies there unencrypted.
case_mount_open_shows_no_directory_that_is_not_the_archive() {
    local pid
    need_user
    mkdir "$WORK/user" "$WORK/desk"
    cp "$PASSFILE" "$WORK/user/pass"
    printf '#!/bin/sh\nprintf "%%s\\n" "$@" >>shown\n' >"$WORK/desk/xdg-open"
    chmod 755 "$WORK/desk/xdg-open"
    cd "$WORK/user"
    mkfifo go
    chown -R "$TEST_USER:" .
    at_desktop() {
        as_user env -u LOCKBOX_PASSFILE DISPLAY=:77 PATH="$WORK/desk:$PATH" "$@"
    }
    at_desktop lockbox create --weak-kdf --kdf-memory 1 --passfile pass box.lbx
    # A program has it for itself, in an empty directory.
    in_background as_user lockbox exec --passfile "$PWD/pass" box.lbx -- sh -c 'touch "$0/ready"; read -r _ <"$0/go"' "$PWD"
    await test -e ready
    expect 13 'box.lbx is mounted in another namespace' at_desktop lockbox mount --open --passfile pass box.lbx
    expect 13 'already mounted in another namespace' at_desktop lockbox mount --open --passfile pass box.lbx box
    echo >go
    wait "${BACKGROUND[0]}"
    [[ ! -e shown ]] || fail "shown: $(cat shown)"
    # Its mount was taken out of the tree, and its daemon still serves who has a file open.
    as_user lockbox mount --passfile pass -o "log=$WORK/user/log" box.lbx
    in_background as_user sh -c 'exec 3<box; touch using; read -r _ <go'
    await test -e using
    as_user lockbox umount --lazy box 2>/dev/null
    ! mountpoint -q box || fail 'not detached'
    # Nor is another archive that is mounted there since.
    at_desktop lockbox create --weak-kdf --kdf-memory 1 --passfile pass other.lbx
    as_user lockbox mount --passfile pass -o "log=$WORK/user/log" other.lbx box
    expect 13 'in use|already mounted' at_desktop lockbox mount --open --passfile pass box.lbx
    as_user lockbox umount box
    [[ ! -e shown ]] || fail "shown: $(cat shown)"
    echo >go
    wait "${BACKGROUND[1]}"
}

case_a_double_click_shows_what_can_only_be_read() {
    local place point
    need_user
    cd "$WORK"
    stand_in zenity
    printf '#!/bin/sh\nprintf "%%s\\n" "$@" >"$DESK/shown.new" && mv "$DESK/shown.new" "$DESK/shown"\n' >desk/xdg-open
    chmod 755 desk/xdg-open
    create box.lbx
    mkdir medium shut user
    mkdir user/empty
    cp "$PASSFILE" user/pass
    chown -R "$TEST_USER:" user
    cp box.lbx medium/
    cp box.lbx shut/
    chown "$TEST_USER:" medium medium/box.lbx
    chmod 644 */box.lbx
    mount --bind medium medium
    mount -o remount,bind,ro medium
    at_desktop() {
        as_user env -u LOCKBOX_PASSFILE DISPLAY=:77 DESK="$WORK/user" PATH="$WORK/desk:$PATH" "$@"
    }
    for place in 'medium:as its medium is' 'shut:as this user may not write to it'; do
        printf '%s\n' wrong "$PASSPHRASE" >user/answers
        chown "$TEST_USER:" user/answers
        at_desktop lockbox mount --desktop --open -o "log=$WORK/user/log" "${place%%:*}/box.lbx" </dev/null
        # Beside it there is no place for a directory.
        await test -e user/shown
        point=$(cat user/shown)
        [[ $point == */box && $point != "$WORK"/* ]] || fail "$point"
        # It is said where it is asked, and once.
        same "$(tr -d '\n' <user/told | grep -o -e '--text=[^.]*\. Passphrase of [a-z/.]*')" \
            "--text=Read-only, ${place#*:}. Passphrase of ${place%%:*}/box.lbx"$'\n'"--text=Wrong passphrase. Passphrase of ${place%%:*}/box.lbx"
        expect 1 'read-only file system' as_user touch "$point/file"
        at_desktop lockbox umount "$point"
        [[ ! -e $point ]] || fail 'its directory is left'
        rm user/shown user/told
    done
    # At a terminal an option says so, and it is said that one is missing.
    expect 2 'for writing: Permission denied' as_user lockbox mount --passfile user/pass shut/box.lbx user/empty
    umount medium
    # A new one is shown like one that was there.
    printf '%s\n' "$WORK/user/new" "$PASSPHRASE" "$PASSPHRASE" >user/answers
    at_desktop lockbox create --desktop --open --weak-kdf --kdf-memory 1 </dev/null
    await test -e user/shown
    same "$(cat user/shown)" "$WORK/user/new"
    as_user touch user/new/file
    at_desktop lockbox umount --desktop -- "$WORK/user/new.lbx"
    same "$(as_user lockbox ls --passfile user/pass user/new.lbx)" file
}

case_a_desktop_knows_archives_and_what_opens_them() {
    local repository entry line
    repository=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../../..")
    cd "$repository/packaging/desktop"
    desktop-file-validate ./*.desktop
    xmllint --noout ./*.xml ./*.svg
    mkdir -p "$WORK/data/mime/packages" "$WORK/data/applications"
    cp ./*.xml "$WORK/data/mime/packages"
    cp ./*.desktop "$WORK/data/applications"
    export XDG_DATA_HOME=$WORK/data XDG_DATA_DIRS=$WORK/data
    update-mime-database "$WORK/data/mime"
    update-desktop-database "$WORK/data/applications"
    cd "$WORK"
    create real
    # Not one of a user's own, which lacks the module.
    /usr/bin/python3 - <<'END'
from gi.repository import Gio

with open("real", "rb") as file:
    begin = file.read(4096)
for name, data in ((None, begin), ("copy.txt.lbx", b"")):
    kind, _ = Gio.content_type_guess(name, data)
    assert kind == "application/x-lockbox", (name, kind)
kind, _ = Gio.content_type_guess(None, b"\x89PNG" + begin[4:])
assert kind != "application/x-lockbox", kind
# A theme has an icon for any file, and its own come before the one that lies where all themes look.
names = Gio.content_type_get_icon("application/x-lockbox").get_names()
assert all(name.startswith("application-x-lockbox") for name in names), names
opener = Gio.AppInfo.get_default_for_type("application/x-lockbox", False)
assert opener.get_id() == "lockbox.desktop", opener.get_id()
assert opener.list_actions() == ["unmount-all"]
# The program that closes it is offered, and never run by a double click.
offered = [program.get_id() for program in Gio.AppInfo.get_all_for_type("application/x-lockbox")]
assert offered == ["lockbox.desktop", "lockbox_close.desktop"], offered
END
    # What the entries run is understood; help has it end there.
    for entry in "$repository"/packaging/desktop/*.desktop; do
        while read -r line; do
            line=${line#Exec=}
            # shellcheck disable=SC2086
            ${line%% -- *} --help >help
            grep -q -- --desktop help || fail "$entry: $line"
        done < <(grep ^Exec= "$entry")
    done
}
