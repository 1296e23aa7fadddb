# A new user's way, told with the programs that were just built. packaging/test-package.sh tells the same story with an installed package.
# shellcheck shell=bash disable=SC2317,SC2164

case_a_new_user_finds_the_way() {
    local name
    need_user
    cp -r "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../story" "$WORK/story"
    mkdir "$WORK/srv" "$WORK/over"
    mount -t tmpfs none "$WORK/over"
    mkdir "$WORK"/over/{sbin,sbin.work,etc,etc.work}
    # The names that a package installs, since mount(8) looks nowhere else.
    for name in mount.lockbox mount.fuse.lockbox; do
        ln -s "$(command -v mount.lockbox)" "$WORK/over/sbin/$name"
    done
    for name in umount.lockbox umount.fuse.lockbox; do
        ln -s "$(command -v lockbox)" "$WORK/over/sbin/$name"
    done
    : >"$WORK/over/etc/fstab"
    unshare --mount --propagation private bash -Eeuo pipefail -c '
        trap "echo \"line \$LINENO: \\\"\$BASH_COMMAND\\\" failed\"" ERR
        # Other archives of this machine have no part in the story.
        awk "/ - fuse\.lockbox / { print \$5 }" /proc/self/mountinfo | while read -r point; do umount -i -l "$point"; done
        for place in sbin etc; do
            target=$(realpath "/$place")
            mount -t overlay -o "lowerdir=$target,upperdir=$1/over/$place,workdir=$1/over/$place.work" none "$target"
        done
        mount --bind "$1/srv" /srv
        mount -t tmpfs -o mode=755 none /run
        STORY_USER=$2 "$1/story/tell.sh" "$1/story/new-user.txt"
    ' - "$WORK" "$TEST_USER"
    umount "$WORK/over"
}
