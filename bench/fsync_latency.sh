#!/usr/bin/env bash
# Measures fsync of small files by one and by four writers, alone and while another program streams into a large file, for
# the host's disk, gocryptfs and lockbox.
#
#   bench/fsync_latency.sh     needs root and gocryptfs; prints a table in milliseconds
#
#   STREAM    MiB of the stream (default 4096)         PROGRAMS  directory with the programs (default target/release, built)
#   ALONE     seconds without a stream (default 5)     DISK      directory on the disk to measure
#   ONLY      candidates, such as "disk lockbox"       OPTIONS   mount options for lockbox
#   BEFORE    directory with older programs, measured after the others as "before"
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
take_place fsync_latency gocryptfs
mount_side_by_side
STREAM=${STREAM:-4096}
ALONE=${ALONE:-5}

echo "load before: $(cut -d' ' -f1-3 /proc/loadavg); $STREAM MiB streamed; $(nproc) processors"
printf '| fsync of 4 KiB, ms | writers | stream MiB/s | count | p50 | p90 | p99 | p99.9 | max |\n'
printf '|---|---:|---:|---:|---:|---:|---:|---:|---:|\n'
for name in ${ONLY:-${candidates[@]}}; do
    sync
    python3 - "$name" "$scratch/$name" "$ALONE" "$STREAM" <<'END'
import multiprocessing, os, sys, time
name, root, alone, mib = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
# The children inherit this script, which has no file.
processes = multiprocessing.get_context("fork")

def stream(ended, rate):
    block = os.urandom(1 << 20)
    file = os.open(root + "/large", os.O_CREAT | os.O_WRONLY, 0o600)
    began = time.monotonic()
    try:
        for _ in range(mib):
            os.write(file, block)
        rate.value = mib / (time.monotonic() - began)
    finally:
        ended.set()
    os.close(file)

def write(number, ended, latencies):
    mine = []
    try:
        file = os.open(f"{root}/small{number}", os.O_CREAT | os.O_RDWR, 0o600)
        while not ended.is_set():
            os.pwrite(file, os.urandom(4096), 0)
            began = time.monotonic()
            os.fsync(file)
            mine.append((time.monotonic() - began) * 1000)
    finally:
        latencies.put(mine)

def measure(writers, streamed):
    os.sync()
    ended, latencies, rate = processes.Event(), processes.Queue(), processes.Value("d")
    started = [processes.Process(target=write, args=(number, ended, latencies)) for number in range(writers)]
    started += [processes.Process(target=stream, args=(ended, rate))] if streamed else []
    for process in started:
        process.start()
    if not streamed:
        time.sleep(alone)
        ended.set()
    merged = sorted(sum((latencies.get() for _ in range(writers)), []))
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        sys.exit(f"{name}: a writer failed")
    at = [merged[min(len(merged) - 1, int(len(merged) * share))] for share in (.5, .9, .99, .999, 1)]
    print(f"| {name} | {writers} | {f'{rate.value:.0f}' if streamed else '-'} | {len(merged)} | "
          + " | ".join(f"{value:.2f}" for value in at) + " |", flush=True)

for streamed in False, True:
    for writers in 1, 4:
        measure(writers, streamed)
        if streamed:
            os.unlink(root + "/large")
END
done
echo "load after: $(cut -d' ' -f1-3 /proc/loadavg)"
