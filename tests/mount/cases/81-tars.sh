# Tars out of an archive and into it, beside GNU tar and bsdtar working on the mount.
# shellcheck shell=bash disable=SC2317,SC2164

# A part of the tree of real sources, with everything that metadata can be.
small_tree() {
    local tree
    tree=$(source_tree)
    mkdir "$WORK/tree"
    cp -a "$tree/odd" "$WORK/tree/odd"
    find "$tree" -mindepth 1 -maxdepth 1 -type d ! -name odd | LC_ALL=C sort | sed -n 1,4p | xargs -I{} cp -a {} "$WORK/tree/"
    truncate -s 5000000 "$WORK/tree/ends in a hole"
    printf data | dd of="$WORK/tree/ends in a hole" bs=1 seek=1000000 conv=notrunc status=none
}

names_in() {
    tar --list --verbose --numeric-owner --full-time --quoting-style=escape --file "$1" | grep -v 'link to' | LC_ALL=C sort
}

case_tars_of_an_archive_are_those_of_its_mount() {
    small_tree
    new_archive box
    lockbox add --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/tree"
    lockbox export-tar --passfile "$PASSFILE" "$WORK/box.lbx" tree >"$WORK/ours.tar"
    attach box ro
    tar --create --format=posix --sparse --xattrs --xattrs-include='*' --acls --numeric-owner --file "$WORK/theirs.tar" -C "$WORK/box" tree
    names_in "$WORK/ours.tar" >"$WORK/ours.list"
    names_in "$WORK/theirs.tar" >"$WORK/theirs.list"
    diff "$WORK/ours.list" "$WORK/theirs.list" | head -n 10
    same_file "$WORK/ours.list" "$WORK/theirs.list"
    # What other programs unpack of ours is what the mount shows.
    mkdir "$WORK/gnu" "$WORK/bsd"
    tar --extract --warning=no-timestamp --xattrs --xattrs-include='*' --acls --same-owner --same-permissions \
        --delay-directory-restore --file "$WORK/ours.tar" -C "$WORK/gnu"
    same_tree "$WORK/box/tree" "$WORK/gnu/tree"
    bsdtar --extract --preserve-permissions --same-owner --acls --xattrs --file "$WORK/ours.tar" -C "$WORK/bsd"
    diff -r --no-dereference --exclude=fifo "$WORK/box/tree" "$WORK/bsd/tree"
    detach box
    # And theirs comes back: what was written of the mount, by both.
    bsdtar --create --format=pax --acls --xattrs --file "$WORK/bsd.tar" -C "$WORK" tree
    lockbox import-tar --passfile "$PASSFILE" --to gnu "$WORK/box.lbx" <"$WORK/theirs.tar"
    lockbox import-tar --passfile "$PASSFILE" --to bsd "$WORK/box.lbx" <"$WORK/bsd.tar"
    lockbox import-tar --passfile "$PASSFILE" --to ours "$WORK/box.lbx" <"$WORK/ours.tar"
    lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
    attach box ro
    same_tree "$WORK/tree" "$WORK/box/gnu/tree"
    same_tree "$WORK/tree" "$WORK/box/ours/tree"
    same_tree "$WORK/tree" "$WORK/box/bsd/tree"
    detach box
    note "a tar of $(($(stat -c %s "$WORK/ours.tar") >> 20)) MiB for $(du -sm --apparent-size "$WORK/tree" | cut -f1) MiB, GNU tar's $(($(stat -c %s "$WORK/theirs.tar") >> 20))"
}

# Killed at any moment of a mirror, what the source has is in the archive, as it was or as it is.
case_a_killed_mirror_loses_nothing_that_is_in_the_source() {
    local round most
    mkdir -p "$WORK/tree/dir"
    head -c 8000000 /dev/urandom >"$WORK/noise"
    new_archive box
    for ((round = 0; round < 6; round++)); do
        rm -rf "$WORK/tree"
        mkdir -p "$WORK/tree/dir$((round % 2))"
        split -b 40000 -a 3 -d "$WORK/noise" "$WORK/tree/dir$((round % 2))/f"
        if ((round % 2)); then mkdir "$WORK/tree/turns"; else echo "$round" >"$WORK/tree/turns"; fi
        echo "round $round" >"$WORK/tree/changes"
        if ((round > 0)); then
            # strace(1) counts the calls of each thread, and up to 8 threads share some 200 pages: one of them surely writes 15.
            most=$((round == 1 ? 15 : 60))
            killed_at pwrite64 $((RANDOM % most + 1)) lockbox add --mirror --delete-most --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/tree"
            lockbox check --full --passfile "$PASSFILE" "$WORK/box.lbx"
            lockbox cat --passfile "$PASSFILE" "$WORK/box.lbx" tree/changes | shows -Ex "round ($round|$((round - 1)))"
        fi
        lockbox add --mirror --delete-most --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/tree"
        lockbox extract --passfile "$PASSFILE" "$WORK/box.lbx" --to "$WORK/out$round"
        same_tree "$WORK/tree" "$WORK/out$round/tree"
    done
    note "$KILLED of 5 mirrors were killed"
    ((KILLED > 0)) || fail 'no mirror was killed'
}
