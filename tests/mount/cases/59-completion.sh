# What real shells complete: each line is typed into bash, zsh and fish on a terminal, with a TAB behind it.
# shellcheck shell=bash disable=SC2317,SC2164,SC2016

# in_shells LINE WANTED [LINE WANTED]...: what stands on each line after TAB, spaces at the end aside. SHELLS: those of them.
in_shells() {
    local shell lines=() wanted=() word
    while [[ $# -gt 0 ]]; do
        lines+=("$1")
        wanted+=("$2")
        shift 2
    done
    for shell in ${SHELLS-bash zsh fish}; do
        completing.py "$shell" "${lines[@]}" >"$WORK/completed" || fail "$(cat "$WORK/completed")"
        sed -i 's/ *$//' "$WORK/completed"
        printf '%s\n' "${wanted[@]}" | sed 's/ *$//' | diff "$WORK/completed" - || fail "$shell (left) completes otherwise"
    done
}

# offered WORD...: what fits for the last one.
offered() {
    lockbox complete fish -- "$@" | cut -f 1
}

# Nothing that was typed or offered may have been run.
nothing_ran() {
    same "$(find "$WORK" -name ran)" '' 'something was run'
}

case_shells_complete_commands_options_and_archives() {
    cd "$WORK"
    mkdir here there empty
    cd here
    create 'my box.lbx'
    cp 'my box.lbx' photos
    cp 'my box.lbx' a:b
    cp 'my box.lbx' übung.lbx
    touch passfile text
    mkdir 'a dir'
    mkfifo pipe pipe.lbx
    in_shells 'lockbox umou' 'lockbox umount' \
        'lockbox key rek' 'lockbox key rekey' \
        'lockbox mount --foreg' 'lockbox mount --foreground' \
        'lockbox completions z' 'lockbox completions zsh' \
        'lockbox mount ph' 'lockbox mount photos' \
        'lockbox mount te' 'lockbox mount te' \
        'lockbox mount pi' 'lockbox mount pi' \
        'lockbox mount ü' 'lockbox mount übung.lbx' \
        'lockbox mount my' 'lockbox mount my\ box.lbx' \
        'lockbox mount "my b' 'lockbox mount "my box.lbx"' \
        "lockbox mount 'my b" "lockbox mount 'my box.lbx'" \
        'lockbox mount a:' 'lockbox mount a:b' \
        'lockbox mount --passfile=pa' 'lockbox mount --passfile=passfile' \
        'lockbox mount --passfile pa' 'lockbox mount --passfile passfile' \
        'lockbox mount ../empty/' 'lockbox mount ../empty/' \
        'lockbox mount ../th' 'lockbox mount ../there/' \
        'lockbox rm ph' 'lockbox rm photos:'
    # Where nothing fits, nothing is inserted, and no dash.
    cd ../empty
    in_shells 'lockbox mount ' 'lockbox mount' 'lockbox create ' 'lockbox create' 'lockbox info ' 'lockbox info'
    # The home directory keeps its short name.
    export HOME=$WORK
    in_shells 'lockbox info ~/here/my' 'lockbox info ~/here/my\ box.lbx'
}

case_shells_complete_the_words_of_mount_options() {
    cd "$WORK"
    mkdir here
    touch here/passfile
    cd here
    in_shells 'lockbox mount -o allow_' 'lockbox mount -o allow_other' \
        'lockbox mount -o ro,sync=al' 'lockbox mount -o ro,sync=always' \
        'lockbox mount -o ro,passfile=pa' 'lockbox mount -o ro,passfile=passfile' \
        'lockbox exec -o snapshot-dir=h' 'lockbox exec -o snapshot-dir=hidden' \
        'lockbox ls --remote allow-h' 'lockbox ls --remote allow-http'
    offered mount -o '' >words
    grep -qx 'idle=' words && grep -qx noexec words || fail "$(cat words)"
    mv words "$WORK"
    # What is offered is taken: the mount program itself reads it.
    new_archive box
    cd "$WORK"
    local word value
    while read -r word; do
        [[ $word != remount ]] || continue
        if [[ $word == *= ]]; then
            while read -r value; do
                [[ $word == *file= || $word == identity= || $word == log= || $word == recovery-code= ]] ||
                    mount.lockbox -f -o "$value" box.lbx box
            done < <(offered mount -o "$word")
        else
            mount.lockbox -f -o "$word" box.lbx box
        fi
    done <words
}

case_shells_complete_mount_points_whose_daemon_is_dead_or_stopped_too() {
    new_archive live
    new_archive dead
    new_archive 'left out'
    cd "$WORK"
    attach live
    attach dead
    kill_daemon dead
    local pid began shell
    pid=$(daemon_of "$WORK/live.lbx")
    in_shells 'lockbox umount l' 'lockbox umount live' 'lockbox status d' 'lockbox status dead' \
        "lockbox umount $WORK/de" "lockbox umount $WORK/dead" 'lockbox umount left' 'lockbox umount left'
    same "$(offered umount '' | grep -vc '^/')" 2
    # What would wait for a daemon for ever ends by itself: inside of the mount, and on the way past it.
    stop_process "$pid"
    in_shells 'lockbox umount l' 'lockbox umount live' 'lockbox mount liv' 'lockbox mount live' 'lockbox mount live/' 'lockbox mount live/'
    kill -CONT "$pid"
    umount -l dead
    detach live
}

case_shells_complete_what_is_in_an_archive_while_its_key_is_kept() {
    new_archive box
    cd "$WORK"
    mkdir -p tree/docs
    touch tree/docs/'a b' tree/'$(touch ran)' tree/'`touch ran`' tree/'semi;touch ran' tree/co:lon tree/$'evil\e[31m' tree/$'evil\nline' tree/$'evil\xff'
    export LOCKBOX_PASSFILE=$PASSFILE
    # Behind `lockbox cat box.lbx` this would be an option, which runs a program.
    touch ./'--passcommand=touch ran'
    lockbox add box.lbx tree ./'--passcommand=touch ran'
    lockbox key add --new-passfile "$PASSFILE" --weak-kdf --kdf-memory 1 --label 'usb;touch ran' box.lbx
    lockbox snapshot create box.lbx monday
    printf x | lockbox env set --passfile "$PASSFILE" box.lbx TOKEN
    local before
    before=$(sha256sum box.lbx; find state -type f -exec sha256sum {} +)
    # Nothing is read without the key, whatever would give the passphrase.
    same "$(offered cat box.lbx tree/; offered rm box.lbx:; offered key rm box.lbx ''; offered snapshot rm box.lbx '')" ''
    unset LOCKBOX_PASSFILE
    if ! lockbox info --passfile "$PASSFILE" --keyring-cache 10m box.lbx >kept 2>&1; then
        grep -q keyring kept || fail "$(cat kept)"
        note 'not tested with a key: this machine keeps none'
        return 0
    fi
    in_shells 'lockbox rm box.lbx:t' 'lockbox rm box.lbx:tree/' \
        'lockbox cat box.lbx -- -' 'lockbox cat box.lbx -- --passcommand=touch\ ran' \
        'lockbox cat box.lbx:tree/se' 'lockbox cat box.lbx:tree/semi\;touch\ ran' \
        'lockbox cat box.lbx:tree/\$' 'lockbox cat box.lbx:tree/\$\(touch\ ran\)' \
        'lockbox cat box.lbx:tree/co:' 'lockbox cat box.lbx:tree/co:lon' \
        'lockbox cat box.lbx:tree/e' 'lockbox cat box.lbx:tree/e' \
        'lockbox ls box.lbx tree/d' 'lockbox ls box.lbx tree/docs/' \
        'lockbox cat "box.lbx:tree/docs/' 'lockbox cat "box.lbx:tree/docs/a b"' \
        'lockbox key rm box.lbx u' 'lockbox key rm box.lbx usb\;touch\ ran' \
        'lockbox ls box.lbx --snapshot m' 'lockbox ls box.lbx --snapshot monday' \
        'lockbox env get box.lbx T' 'lockbox env get box.lbx TOKEN'
    offered cat box.lbx '' >all
    grep -qx tree/ all || fail "$(cat all)"
    ! grep '^-' all || fail 'a name that would be an option'
    offered cat box.lbx tree/ >all
    ! grep evil all || fail 'a name that a terminal obeys'
    same "$(wc -l <all)" 5
    # To the others a quote with that is one with a command in it.
    SHELLS=bash in_shells 'lockbox cat "box.lbx:tree/`' 'lockbox cat "box.lbx:tree/\`touch ran\`"'
    nothing_ran
    same "$(sha256sum box.lbx; find state -type f -exec sha256sum {} +)" "$before" 'something was written'
    lockbox forget box.lbx
    same "$(offered cat box.lbx tree/)" ''
}

case_names_of_files_run_nothing_when_they_are_completed() {
    cd "$WORK"
    create box.lbx
    local name
    for name in '$(touch ran).lbx' '`touch ran`.lbx' 'x;touch ran;.lbx' '&touch ran&.lbx' '|touch ran.lbx' '-touch ran.lbx' '~root.lbx' '!!.lbx' "it's.lbx" 'q"q.lbx'; do
        cp box.lbx "./$name"
    done
    cp box.lbx $'new\nline.lbx'
    cp box.lbx $'\e]0;evil\a.lbx'
    in_shells 'lockbox info x' 'lockbox info x\;touch\ ran\;.lbx' \
        'lockbox info \$' 'lockbox info \$\(touch\ ran\).lbx' \
        'lockbox info ./-' 'lockbox info ./-touch\ ran.lbx' \
        'lockbox info n' 'lockbox info n'
    # All at once, in each shell's list.
    in_shells 'lockbox info ' 'lockbox info'
    nothing_ran
    # Without the directory in which the case keeps what is remembered.
    offered info '' | grep -vx 'state/' >all
    ! grep evil all || fail 'a name that a terminal obeys'
    same "$(grep -cx "it's.lbx" all) $(wc -l <all)" '1 10'
    ! grep '^-' all || fail 'a name that would be an option'
    same "$(offered info -- -)" '-touch ran.lbx'
    # Bash gets each name quoted, and reads it as one word.
    local line text words count=0
    while IFS= read -r -d '' text; do
        line="words=($text)"
        # The point of the test: what is offered is harmless as a part of a command line.
        eval "$line"
        same "${#words[@]}" 1 "$text"
        [[ -e ${words[0]} || ${words[0]} == '~root.lbx' ]] || fail "no file: $text"
        count=$((count + 1))
    done < <(lockbox complete bash -- $' \t\n"\'><=;|&(:' 'lockbox info ./')
    # And the directory in which the case keeps what is remembered.
    same "$count" 12
    nothing_ran
}

case_completing_says_nothing_when_it_fails() {
    cd "$WORK"
    local words
    for words in '' 'bash' 'bash -- x' 'zsh' 'fish -- mount missing/' 'fish -- frobnicate x' 'fish -- cat missing.lbx x' 'fish -- key rm https://host/x y' \
        'fish -- -o' 'fish -- mount -o bogus=' 'fish -- mount /proc/self/mem/'; do
        # shellcheck disable=SC2086
        lockbox complete $words >said 2>errors </dev/null || [[ -z $words ]] || fail "exit code $? of complete $words"
        [[ ! -s said ]] || fail "complete $words: $(cat said)"
        [[ -z $words ]] || [[ ! -s errors ]] || fail "complete $words: $(cat errors)"
    done
    # A closed pipe is the shell's own affair.
    lockbox complete fish -- '' | true
}
