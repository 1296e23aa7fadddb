# Where the measurements take place: the programs, a scratch directory on the disk to measure, what is mounted in it. Sourced by the others.
# shellcheck shell=bash
#
#   PROGRAMS  directory with lockbox and mount-lockbox (default target/release, built)
#   DISK      directory on the disk to measure (default $TMPDIR or /tmp)

# take_place NAME [PROGRAM...]: as root, with these programs installed, makes $scratch, which goes with all that is mounted in it when the
# script ends. Sets $repository, $programs and $scratch, all absolute.
take_place() {
    local name=$1 program
    shift
    if [[ $EUID -ne 0 ]]; then
        echo "bench/$name.sh: must run as root (it mounts, and drops the kernel caches)" >&2
        exit 1
    fi
    for program in "$@"; do
        command -v "$program" >/dev/null || { echo "bench/$name.sh: $program is not installed" >&2 && exit 1; }
    done
    repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    programs=${PROGRAMS:-${CARGO_TARGET_DIR:-$repository/target}/release}
    if [[ -z ${PROGRAMS-} ]]; then
        (cd "$repository" && cargo build --quiet --release --locked --workspace --bins)
    fi
    programs=$(cd "$programs" && pwd)
    scratch=$(cd "${DISK:-${TMPDIR:-/tmp}}" && mktemp -d "$PWD/lockbox-$name.XXXXXX")
    trap leave_place EXIT
    trap 'echo "bench/'"$name"'.sh: line $LINENO failed: $BASH_COMMAND" >&2' ERR
    install -D "$programs/lockbox" "$scratch/bin/lockbox"
    install "$programs/mount-lockbox" "$scratch/bin/mount.lockbox"
    export PATH=$scratch/bin:$PATH XDG_STATE_HOME=$scratch/state
    (umask 077 && echo 'a passphrase of the measurements' >"$scratch/passphrase")
}

leave_place() {
    local code=$? kind point
    trap - EXIT ERR
    set +e
    cd /
    while read -r kind point; do
        case $kind in
            fuse.lockbox) lockbox umount "$point" ;;
            *) umount "$point" ;;
        esac
    done < <(awk -v top="$scratch/" 'index($5, top) == 1 { for (field = 6; $field != "-"; field++); print $(field + 1), $5 }' /proc/self/mountinfo | tac)
    rm -rf --one-file-system "$scratch"
    exit "$code"
}

# new_archive FILE; mount_archive FILE POINT [OPTIONS]
new_archive() {
    lockbox create --weak-kdf --kdf-memory 1 --passfile "$scratch/passphrase" "$1"
}
mount_archive() {
    mount.lockbox "$1" "$2" -o "passfile=$scratch/passphrase${3:+,$3}"
}

# new_gocryptfs STORE; mount_gocryptfs STORE POINT
new_gocryptfs() {
    gocryptfs -q -init -scryptn 10 -passfile "$scratch/passphrase" "$1"
}
mount_gocryptfs() {
    gocryptfs -q -passfile "$scratch/passphrase" "$1" "$2"
}

# Three directories to do the same in: $scratch/disk, $scratch/gocryptfs and $scratch/lockbox, the last mounted with OPTIONS.
mount_side_by_side() {
    mkdir "$scratch/disk" "$scratch/store" "$scratch/gocryptfs" "$scratch/lockbox"
    new_gocryptfs "$scratch/store"
    mount_gocryptfs "$scratch/store" "$scratch/gocryptfs"
    new_archive "$scratch/box.lbx"
    mount_archive "$scratch/box.lbx" "$scratch/lockbox" "${OPTIONS-}"
}
