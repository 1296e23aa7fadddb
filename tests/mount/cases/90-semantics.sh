# What programs may rely on beyond single operations.
# shellcheck shell=bash disable=SC2317,SC2164

# acl FILE: its access and default lists in one line, numeric, without comments.
acl() {
    getfacl --omit-header --numeric --absolute-names --no-effective "$1" | grep . | tr '\n' ' ' | sed 's/ $//'
}

case_access_control_lists_are_kept_and_tied_to_the_mode() {
    need_user
    new_archive box
    attach box allow_other,default_permissions
    chmod 755 "$WORK/box"
    local file=$WORK/box/file user
    user=$(id -u "$TEST_USER")
    echo secret >"$file"
    chmod 600 "$file"
    expect 1 'permission denied' as_user cat "$file"
    setfacl -m "u:$TEST_USER:rw" "$file"
    same "$(acl "$file")" "user::rw- user:$user:rw- group::--- mask::rw- other::---"
    same "$(stat -c %a "$file")" 660
    same "$(as_user cat "$file")" secret
    as_user sh -c "echo changed >'$file'"
    chmod g-w "$file"
    same "$(getfacl -cnp "$file" | sed -n 's/^mask:://p')" r--
    expect 2 'permission denied' as_user sh -c "echo x >'$file'"
    same "$(as_user cat "$file")" changed
    # Only the owner sets lists.
    expect 1 'not permitted' as_user setfacl -m o::rwx "$file"
    reattach box allow_other
    same "$(as_user cat "$file")" changed
    same "$(acl "$file")" "user::rw- user:$user:rw- group::--- mask::r-- other::---"
    setfacl -b "$file"
    same "$(stat -c %a "$file")" 600
    same "$(getfattr -m - "$file")" ''
    expect 1 'permission denied' as_user cat "$file"
    # A list through which a user is kept out of what everybody else may read.
    chmod 644 "$file"
    setfacl -m "u:$TEST_USER:---" "$file"
    expect 1 'permission denied' as_user cat "$file"
    # What ext4 refuses.
    expect 1 'only directories can have default' setfacl -d -m u:1:r "$file"
    ln -s file "$WORK/box/link"
    expect 1 'invalid argument' setfattr -n system.posix_acl_access -v 0x02000000010006 "$file"
    expect 1 'invalid argument' setfattr -n system.posix_acl_access -v 0x0200000001000600ffffffff "$file"
    expect 1 'not supported' setfattr -n system.nfs4_acl -v x "$file"
    detach box
    check_full box
}

case_default_lists_are_inherited_and_replace_the_umask() {
    need_user
    new_archive box
    attach box allow_other,default_permissions
    local top=$WORK/box/top user
    user=$(id -u "$TEST_USER")
    mkdir -m 777 "$top" "$WORK/box/plain"
    setfacl -d -m "u:$TEST_USER:rwx,g::rx,o::-" "$top"
    (umask 077 && echo x >"$top/file" && mkdir "$top/below" && mkfifo "$top/fifo" && mknod "$top/null" c 1 3 && ln -s file "$top/link")
    same "$(stat -c %a "$top/file" "$top/below" "$top/fifo" "$top/null" "$top/link" | tr '\n' ' ')" '660 770 660 660 777 '
    same "$(getfacl -cnpd "$top/below" | grep . | tr '\n' ' ')" "user::rwx user:$user:rwx group::r-x mask::rwx other::--- "
    same "$(getfacl -cnp "$top/file" | sed -n 's/^mask:://p')" rw-
    # Two levels deeper, and made by somebody else.
    as_user sh -c "umask 0; mkdir '$top/below/deep'; echo theirs >'$top/below/deep/file'"
    same "$(stat -c '%U %a' "$top/below/deep/file")" "$TEST_USER 660"
    as_user sh -c "echo more >>'$top/file'"
    # Without a default list the umask holds.
    as_user sh -c "umask 027; mkdir '$WORK/box/plain/below'; echo x >'$WORK/box/plain/file'; mkfifo '$WORK/box/plain/fifo'"
    same "$(stat -c %a "$WORK/box/plain/below" "$WORK/box/plain/file" "$WORK/box/plain/fifo" | tr '\n' ' ')" '750 640 640 '
    setfacl -k "$top"
    (umask 077 && echo x >"$top/later")
    same "$(stat -c %a "$top/later")" 600
    detach box
    check_full box
}

case_set_id_bits_go_as_on_other_file_systems() {
    need_user
    new_archive box
    attach box allow_other,suid
    chmod 755 "$WORK/box"
    local file=$WORK/box/file group
    group=$(id -g "$TEST_USER")
    set_id() {
        chown "$TEST_USER:$1" "$file"
        chmod 6755 "$file"
    }
    echo x >"$file"
    # Who is not in the group of a file loses its set-gid bit by setting a list, as by chmod(2).
    set_id 4242
    as_user setfacl -m u:1:rx "$file"
    same "$(stat -c %a "$file")" 4755
    set_id "$group"
    as_user setfacl -m u:1:rx "$file"
    same "$(stat -c %a "$file")" 6755
    # A supplementary group counts, and so does root.
    set_id 4242
    setpriv --reuid "$TEST_USER" --regid "$group" --groups 17,4242 --inh-caps=-all setfacl -m u:2:rx "$file"
    same "$(stat -c %a "$file")" 6755
    setfacl -m u:3:rx "$file"
    same "$(stat -c %a "$file")" 6755
    setpriv --bounding-set -fsetid --inh-caps -fsetid setfacl -m u:4:rx "$file"
    same "$(stat -c %a "$file")" 4755
    # chown(2), even one that names nobody, and writing.
    set_id 4242
    chown 1:1 "$file"
    same "$(stat -c %a "$file")" 755
    # Which everybody may send for a file that loses nothing by it; else it is a change of the mode, and the owner's to make.
    local nobody='import os, sys; os.chown(sys.argv[1], -1, -1)' bits name
    mkfifo "$WORK/box/fifo"
    for name in file fifo; do
        for bits in 4644:644 2755:755 6755:755 2644:644; do
            chown 1:1 "$WORK/box/$name"
            chmod "${bits%:*}" "$WORK/box/$name"
            expect 1 'not permitted' as_user python3 -c "$nobody" "$WORK/box/$name"
            same "$(stat -c %a "$WORK/box/$name")" "${bits%:*}"
            chown "$TEST_USER:1" "$WORK/box/$name"
            chmod "${bits%:*}" "$WORK/box/$name"
            as_user python3 -c "$nobody" "$WORK/box/$name"
            same "$(stat -c %a "$WORK/box/$name")" "${bits#*:}" "$name, $bits, by its owner"
        done
        chown 1:1 "$WORK/box/$name"
        chmod 4755 "$WORK/box/$name"
        python3 -c "$nobody" "$WORK/box/$name"
        same "$(stat -c %a "$WORK/box/$name")" 755
        as_user python3 -c "$nobody" "$WORK/box/$name"
        # A member of the group, who loses nothing by it.
        chown "1:$group" "$WORK/box/$name"
        chmod 2644 "$WORK/box/$name"
        as_user python3 -c "$nobody" "$WORK/box/$name"
        same "$(stat -c %a "$WORK/box/$name")" 2644
    done
    # Who may write need not own: the bits go all the same, also the one that only the group could have set.
    for bits in 6757:757 2646:646; do
        chown 1:4242 "$file"
        chmod "${bits%:*}" "$file"
        as_user sh -c "echo more >>'$file'"
        same "$(stat -c %a "$file")" "${bits#*:}" 'written to'
        chmod "${bits%:*}" "$file"
        as_user truncate -s 1 "$file"
        same "$(stat -c %a "$file")" "${bits#*:}" 'cut'
    done
    echo x >"$file"
    set_id 4242
    as_user sh -c "echo more >>'$file'"
    same "$(stat -c %a "$file")" 755
    same "$(cat "$file")" $'x\nmore'
    detach box
}

# lists DIRECTORY: those of everything below it, in the order of names.
lists() {
    (cd "$1" && find . ! -type l -print0 | sort -z | xargs -0 getfacl -n)
}

case_copying_programs_keep_lists_and_attributes() {
    new_archive box
    attach box
    mkdir -p "$WORK/from/directory/below"
    echo one >"$WORK/from/directory/file"
    echo two >"$WORK/from/directory/below/file"
    mkfifo "$WORK/from/directory/fifo"
    setfacl -m u:1234:rwx,g:4321:r "$WORK/from/directory/file" "$WORK/from/directory/fifo"
    setfacl -d -m u:1234:rwx,m::rx "$WORK/from/directory"
    setfacl -m u:77:x,m::x "$WORK/from/directory/below"
    setfattr -n user.comment -v words "$WORK/from/directory/file"
    setfattr -n trusted.mark -v words "$WORK/from/directory/below"
    ln -s file "$WORK/from/directory/link"
    setfattr -h -n trusted.mark -v words "$WORK/from/directory/link"
    lists "$WORK/from/directory" >"$WORK/wanted.acl"
    grep -q '^default:user:1234:rwx' "$WORK/wanted.acl"
    local to
    mkdir "$WORK/box/cp" "$WORK/box/rsync" "$WORK/box/tar"
    # A copy brings its own permissions, whatever the directory hands down.
    setfacl -d -m u:9:rwx "$WORK/box/cp" "$WORK/box/rsync" "$WORK/box/tar"
    cp -a "$WORK/from/directory" "$WORK/box/cp/"
    rsync -aAX --modify-window=-1 "$WORK/from/directory" "$WORK/box/rsync/"
    tar -C "$WORK/from" --acls --xattrs --xattrs-include='*' -cf "$WORK/tree.tar" directory
    tar -C "$WORK/box/tar" --acls --xattrs --xattrs-include='*' -xpf "$WORK/tree.tar"
    for to in cp rsync tar; do
        lists "$WORK/box/$to/directory" >"$WORK/$to.acl"
        diff "$WORK/wanted.acl" "$WORK/$to.acl" || fail "$to lost lists"
        same_tree "$WORK/from/directory" "$WORK/box/$to/directory"
    done
    mkdir "$WORK/back"
    cp -a "$WORK/box/cp/directory" "$WORK/back/"
    lists "$WORK/back/directory" | diff "$WORK/wanted.acl" - || fail 'lists were lost on the way back'
    detach box
    check_full box
}

case_extended_attributes_behave_as_on_ext4() {
    need_user
    new_archive box
    attach box allow_other
    chmod 777 "$WORK/box"
    as_user xattrs.py user "$WORK/box"
    xattrs.py root "$WORK/box"
    # Names of trusted attributes are root's.
    touch "$WORK/box/marked"
    setfattr -n trusted.mark -v x "$WORK/box/marked"
    setfattr -n user.mark -v x "$WORK/box/marked"
    same "$(getfattr -m - --absolute-names "$WORK/box/marked" | grep -v '^#' | grep . | tr '\n' ' ')" 'trusted.mark user.mark '
    same "$(as_user getfattr -m - --absolute-names "$WORK/box/marked" | grep -v '^#' | grep . | tr '\n' ' ')" 'user.mark '
    detach box
    check_full box
}

case_add_and_extract_carry_lists_and_attributes() {
    need_user
    mkdir -p "$WORK/from/directory/closed" "$WORK/to"
    local file=$WORK/from/directory/file
    echo one >"$file"
    mkfifo "$WORK/from/directory/fifo"
    ln -s file "$WORK/from/directory/link"
    setfacl -m u:1234:rwx "$file" "$WORK/from/directory/fifo"
    setfacl -d -m u:1234:rwx "$WORK/from/directory"
    chmod 500 "$WORK/from/directory/closed"
    setfacl -m u:1234:rx "$WORK/from/directory/closed"
    setfattr -n user.comment -v words "$file"
    setfattr -n trusted.mark -v words "$file"
    setfattr -h -n trusted.mark -v words "$WORK/from/directory/link"
    # An empty capability set: what the attribute would be after setcap(8), which is not installed everywhere.
    setfattr -n security.capability -v 0x0000000200040000000000000000000000000000 "$file"
    new_archive box
    lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/from/directory"
    lockbox extract --privileges --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/to"
    same_tree "$WORK/from/directory" "$WORK/to/directory"
    lists "$WORK/from/directory" >"$WORK/wanted.acl"
    lists "$WORK/to/directory" | diff "$WORK/wanted.acl" - || fail 'lists were lost'
    attach box
    lists "$WORK/box/directory" | diff "$WORK/wanted.acl" - || fail 'lists were lost in the archive'
    # Added over a directory whose lists are others: those of the source stay.
    setfacl -m u:5:rwx -d -m u:5:rwx "$WORK/box/directory"
    detach box
    setfacl -bk "$WORK/from/directory"
    chmod 755 "$WORK/from/directory"
    lockbox add --force --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/from/directory"
    attach box
    same "$(acl "$WORK/box/directory")" 'user::rwx group::r-x other::r-x'
    detach box
    check_full box
    # Privileges are withheld from an ordinary user too, which is reported once, and the rest is there.
    mkdir -m 777 "$WORK/theirs"
    cp "$PASSFILE" "$WORK/theirs/passphrase"
    cp "$WORK/box.lbx" "$WORK/theirs/"
    chown -R "$TEST_USER:" "$WORK/theirs"
    as_user lockbox extract --passfile "$WORK/theirs/passphrase" "$WORK/theirs/box.lbx" --to "$WORK/theirs/out" 2>"$WORK/said"
    same "$(grep -c . "$WORK/said")" 1
    grep -q '^lockbox: 3 privileges were left out (the first: ' "$WORK/said" || fail "said: $(cat "$WORK/said")"
    same "$(getfacl -cnp "$WORK/theirs/out/directory/file" | sed -n 2p)" 'user:1234:rwx'
    same "$(getfattr --only-values -n user.comment --absolute-names "$WORK/theirs/out/directory/file")" words
}

case_access_times_are_noted_when_asked_for() {
    new_archive box
    attach box
    local top=$WORK/box/directory sum
    mkdir "$top"
    echo x >"$top/file"
    ln -s file "$top/link"
    accessed() { stat -c %X "$1"; }
    # age NAME...: last accessed in 1970.
    age() { touch -h -a -d @1000 "$@"; }
    read_all() {
        cat "$top/file" >"$WORK/stdout"
        ls "$top" >"$WORK/stdout"
        readlink "$top/link" >"$WORK/stdout"
    }
    # By default only what is set.
    grep " $WORK/box " /proc/self/mountinfo | shows noatime
    age "$top/file" "$top" "$top/link"
    read_all
    same "$(accessed "$top/file") $(accessed "$top") $(accessed "$top/link")" '1000 1000 1000'
    reattach box ro,atime=open
    detach box
    sum=$(sha256sum <"$WORK/box.lbx")
    attach box ro,atime=open
    read_all
    same "$(accessed "$top/file") $(accessed "$top") $(accessed "$top/link")" '1000 1000 1000'
    detach box
    same "$(sha256sum <"$WORK/box.lbx")" "$sum" 'a read-only mount wrote'
    attach box atime=open
    ! grep " $WORK/box " /proc/self/mountinfo | shows noatime || fail 'the kernel was told noatime'
    read_all
    for name in "$top/file" "$top" "$top/link"; do
        (($(accessed "$name") > 1000)) || fail "not noted: $name"
    done
    # The rule of relatime: not again until something changes.
    age "$top/file"
    # What is read in the tick of the clock in which it was changed is noted once more.
    has_passed() { touch "$WORK/box/now" && [[ $(stat -c %.9Y "$WORK/box/now") > $1 ]]; }
    await has_passed "$(stat -c %.9Z "$top/file")"
    cat "$top/file" >"$WORK/stdout"
    sum=$(stat -c %x "$top/file")
    cat "$top/file" >"$WORK/stdout"
    same "$(stat -c %x "$top/file")" "$sum" 'noted although nothing had changed'
    # Two reads in one tick of the clock have the same time.
    await has_passed "$(stat -c %.9X "$top/file")"
    echo more >>"$top/file"
    same "$(stat -c %x "$top/file")" "$sum" 'writing is no reading'
    cat "$top/file" >"$WORK/stdout"
    [[ $(stat -c %x "$top/file") != "$sum" ]] || fail 'new content was read and nothing noted'
    # O_NOATIME, and times that are set.
    age "$top/file"
    python3 -c 'import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_NOATIME)' "$top/file"
    same "$(accessed "$top/file")" 1000
    reattach box atime=open
    same "$(accessed "$top/file")" 1000
    detach box
    check_full box
}

case_times_at_the_ends_of_what_can_be_said_do_no_harm() {
    new_archive box
    attach box
    local second
    touch "$WORK/box/file"
    for second in -9223372036854775808 -9223372036854775807 -1 0 9223372036854775807; do
        python3 -c 'import os, sys; os.utime(sys.argv[1], ns=(int(sys.argv[2]) * 10**9,) * 2)' "$WORK/box/file" "$second"
        same "$(stat -c '%X %Y' "$WORK/box/file")" "$second $second"
    done
    python3 -c 'import os, sys; os.utime(sys.argv[1], ns=(-9223372036854775807 * 10**9 + 999999999,) * 2)' "$WORK/box/file"
    python3 -c 'import os, sys; os.utime(sys.argv[1], ns=(-9223372036854775808 * 10**9,) * 2)' "$WORK/box/file"
    reattach box
    same "$(stat -c '%X %Y' "$WORK/box/file")" '-9223372036854775808 -9223372036854775808'
    detach box
    check_full box
}

case_permissions_change_as_on_a_file_system_of_the_kernel() {
    local seed
    new_archive box
    attach box allow_other,suid,dev
    # STEPS=2000 and more is the long form.
    for seed in 1 "$SEED"; do
        mkdir -m 777 "$WORK/box/$seed" "$WORK/reference.$seed"
        twins.py "$WORK/box/$seed" "$WORK/reference.$seed" "$seed" "${STEPS:-1000}"
    done
    detach box
    check_full box
}
