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
# shellcheck source=environment.sh
source "$here/environment.sh"
take_place fsync_latency gocryptfs
mount_side_by_side
STREAM=${STREAM:-4096}

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
