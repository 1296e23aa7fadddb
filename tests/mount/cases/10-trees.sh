# Trees of real files, copied in by the usual programs, are the same after a remount.
# shellcheck shell=bash disable=SC2317,SC2164

# copied BY...: copies the source tree with the command (which gets source and target), and compares before and after a remount.
copied() {
    local tree
    tree=$(source_tree)
    new_archive box
    attach box
    "$@" "$tree" "$WORK/box/tree"
    same_listing "$tree" "$WORK/box/tree"
    listing.py "$WORK/box/tree" directory-links >"$WORK/before"
    reattach box
    same_tree "$tree" "$WORK/box/tree"
    listing.py "$WORK/box/tree" directory-links >"$WORK/after"
    same_file "$WORK/before" "$WORK/after"
    note "$(find "$WORK/box/tree" -type f | wc -l) files, archive of $(du -m "$WORK/box.lbx" | cut -f1) MiB for $(du -sm "$tree" | cut -f1) MiB"
    rm -r "$WORK/box/tree"
    detach box
    check_full box
}

case_tree_copied_by_cp() {
    copied cp -a
}

case_tree_unpacked_by_tar() {
    local tree
    tree=$(source_tree)
    tar --create --xattrs --acls --sparse --format=posix --file "$WORK/tree.tar" -C "$tree" .
    unpack() {
        mkdir "$2"
        # The times of the tree reach into the future.
        tar --extract --warning=no-timestamp --xattrs --xattrs-include='*' --acls --same-owner --preserve-permissions --delay-directory-restore \
            --file "$WORK/tree.tar" -C "$2"
    }
    copied unpack
}

case_tree_copied_by_rsync() {
    synchronise() {
        rsync -aHAX --sparse --super "$1/" "$2/"
        # Nothing is left to do for a second run.
        says_nothing rsync -aHAXni --super "$1/" "$2/"
    }
    copied synchronise
}

case_tree_packed_from_the_mount_by_tar() {
    new_archive box
    attach box
    cp -a "$(source_tree)" "$WORK/box/tree"
    reattach box ro
    # -S asks for holes: a file whose blocks are miscounted would come out as zeros.
    tar --create --sparse --file "$WORK/tree.tar" --exclude=fifo -C "$WORK/box/tree" .
    mkdir "$WORK/out"
    tar --extract --warning=no-timestamp --file "$WORK/tree.tar" -C "$WORK/out"
    diff -rq --no-dereference --exclude=fifo "$WORK/box/tree" "$WORK/out" >"$WORK/differences" || true
    same "$(head -n 5 "$WORK/differences")" '' 'tar -S lost content'
    detach box
}
