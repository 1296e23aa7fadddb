#!/usr/bin/env bash
# Measures fsync of a small file while another program streams into a large one, for the host's disk, gocryptfs and lockbox.
#
#   bench/fsync_latency.sh     needs root and gocryptfs; prints a table in milliseconds
#
#   STREAM    MiB written beside (default 4096)       PROGRAMS  directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure         OPTIONS   mount options for lockbox
#   ONLY      candidates, such as "disk lockbox"
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/.." && pwd)
STREAM=${STREAM:-4096}
programs=${PROGRAMS:-${CARGO_TARGET_DIR:-$repository/target}/release}
if [[ -z ${PROGRAMS-} ]]; then
    (cd "$repository" && cargo build --quiet --release --locked --workspace --bins)
fi
scratch=$(mktemp -d "${DISK:-${TMPDIR:-/tmp}}/lockbox-fsync.XXXXXX")
install -D "$programs/lockbox" "$scratch/bin/lockbox"
install "$programs/mount-lockbox" "$scratch/bin/mount.lockbox"
export PATH=$scratch/bin:$PATH XDG_STATE_HOME=$scratch/state
(umask 077 && echo 'a passphrase of the measurements' >"$scratch/passphrase")
mkdir "$scratch/disk" "$scratch/store" "$scratch/gocryptfs" "$scratch/lockbox"

finish() {
    local code=$?
    trap - EXIT
    set +e
    mountpoint -q "$scratch/lockbox" && lockbox umount "$scratch/lockbox"
    mountpoint -q "$scratch/gocryptfs" && umount "$scratch/gocryptfs"
    rm -rf --one-file-system "$scratch"
    exit "$code"
}
trap finish EXIT

gocryptfs -q -init -scryptn 10 -passfile "$scratch/passphrase" "$scratch/store"
gocryptfs -q -passfile "$scratch/passphrase" "$scratch/store" "$scratch/gocryptfs"
lockbox create --weak-kdf --kdf-memory 1 --passfile "$scratch/passphrase" "$scratch/box.lbx"
mount.lockbox "$scratch/box.lbx" "$scratch/lockbox" -o "passfile=$scratch/passphrase${OPTIONS:+,$OPTIONS}"

echo "load before: $(cut -d' ' -f1-3 /proc/loadavg); $STREAM MiB beside; $(nproc) processors"
printf '| fsync of 4 KiB, ms | alone p50 | count | p50 | p99 | max | stream MiB/s |\n|---|---:|---:|---:|---:|---:|---:|\n'
for name in ${ONLY:-disk gocryptfs lockbox}; do
    sync
    python3 - "$name" "$scratch/$name" "$STREAM" <<'END'
import os, sys, threading, time
name, root, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
def once(file, latencies):
    os.pwrite(file, os.urandom(4096), 0)
    began = time.monotonic()
    os.fsync(file)
    latencies.append((time.monotonic() - began) * 1000)
def at(latencies, share):
    return sorted(latencies)[min(len(latencies) - 1, int(len(latencies) * share))]
small = os.open(root + "/small", os.O_CREAT | os.O_RDWR, 0o600)
alone = []
for _ in range(200):
    once(small, alone)
rate = []
def stream():
    block = os.urandom(1 << 20)
    file = os.open(root + "/large", os.O_CREAT | os.O_WRONLY, 0o600)
    began = time.monotonic()
    for _ in range(mib):
        os.write(file, block)
    rate.append(mib / (time.monotonic() - began))
    os.close(file)
writer = threading.Thread(target=stream)
writer.start()
beside = []
while writer.is_alive():
    once(small, beside)
    time.sleep(0.005)
writer.join()
os.unlink(root + "/large")
print("| %s | %.2f | %d | %.2f | %.2f | %.2f | %.0f |" % (
    name, at(alone, .5), len(beside), at(beside, .5), at(beside, .99), max(beside), rate[0]))
END
done
echo "load after: $(cut -d' ' -f1-3 /proc/loadavg)"
