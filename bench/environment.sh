# Where the measurements take place: the programs, a scratch directory on the disk to measure, what is mounted in it. Sourced by the others.
# shellcheck shell=bash
#
#   PROGRAMS  directory with lockbox and mount-lockbox (default target/release, built)
#   DISK      directory on the disk to measure (default $TMPDIR or /tmp)
#   BEFORE    directory with older programs, measured in turn with the others as "before"

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
    if [[ -n ${BEFORE-} ]]; then
        install -D "$BEFORE/lockbox" "$scratch/bin.before/lockbox"
        install "$BEFORE/mount-lockbox" "$scratch/bin.before/mount.lockbox"
    fi
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

# with_programs_of CANDIDATE COMMAND...: as a process of its own, with the older programs for "before".
with_programs_of() (
    [[ $1 != before ]] || PATH=$scratch/bin.before:$PATH
    "${@:2}"
)

# new_gocryptfs STORE; mount_gocryptfs STORE POINT
new_gocryptfs() {
    gocryptfs -q -init -scryptn 10 -passfile "$scratch/passphrase" "$1"
}
mount_gocryptfs() {
    gocryptfs -q -passfile "$scratch/passphrase" "$1" "$2"
}

# Directories to do the same in: $scratch/NAME for each of $candidates: disk, gocryptfs, lockbox and, with BEFORE, before. OPTIONS are those of lockbox.
mount_side_by_side() {
    candidates=(disk gocryptfs lockbox ${BEFORE:+before})
    mkdir "$scratch/store" "${candidates[@]/#/$scratch/}"
    new_gocryptfs "$scratch/store"
    mount_gocryptfs "$scratch/store" "$scratch/gocryptfs"
    local name
    for name in lockbox ${BEFORE:+before}; do
        with_programs_of "$name" new_archive "$scratch/$name.lbx"
        with_programs_of "$name" mount_archive "$scratch/$name.lbx" "$scratch/$name" "${OPTIONS-}"
    done
}

# in_turn ROUND NAME...: the names, in the opposite order in each second round, so that each is measured after each other one.
in_turn() {
    local round=$1
    shift
    if ((round % 2)); then printf '%s\n' "$@"; else printf '%s\n' "$@" | tac; fi
}
