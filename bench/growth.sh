#!/usr/bin/env bash
# Measures what looking up, creating and fsync cost on a mount that holds few files and on one that holds a million.
#
#   bench/growth.sh [ENTRIES...]     needs root; default 1000 1000000; prints a table of microseconds, medians of single calls
#
#   ROUNDS    interleaved rounds (default 3)          CALLS    calls of a kind in each round (default 1000)
#   PROGRAMS  directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        OPTIONS  mount options (default memory=2048M, enough for all nodes)
#
# A lookup is stat(2) of a name that the kernel does not know, chosen at random, in a directory that it knows.
# The archives are made by import-tar and mounted side by side, so that each round meets the same machine.
set -Eeuo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=environment.sh
source "$here/environment.sh"
take_place growth
[[ $# -gt 0 ]] || set -- 1000 1000000
sizes=("$@")

for entries in "${sizes[@]}"; do
    new_archive "$scratch/$entries.lbx"
    python3 "$here/many_files.py" "$entries" 0 | lockbox import-tar --passfile "$scratch/passphrase" "$scratch/$entries.lbx"
    mkdir "$scratch/$entries"
    mount_archive "$scratch/$entries.lbx" "$scratch/$entries" "${OPTIONS:-memory=2048M}"
done

python3 - "$scratch" "${ROUNDS:-3}" "${CALLS:-1000}" "${sizes[@]}" <<'END'
import json, os, random, subprocess, sys, time
scratch, rounds, calls, sizes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [int(size) for size in sys.argv[4:]]
chance = random.Random(1)
names = ["lookup", "create", "write 4 KiB and fsync"]
seen = {(size, name): [] for size in sizes for name in names}
def timed(size, name, call, *arguments):
    began = time.perf_counter()
    answer = call(*arguments)
    seen[size, name].append((time.perf_counter() - began) * 1e6)
    return answer
def path(size, number):
    return f"{scratch}/{size}/d{number // 1000}/f{number}"
def forget():
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("2")
    # A call shall meet one name that the kernel does not know, not two.
    for size in sizes:
        for directory in range(0, size, 1000):
            os.lstat(os.path.dirname(path(size, directory)))
for size in sizes:
    # Every node that a lookup needs is in the daemon's memory afterwards.
    for number in range(size):
        os.lstat(path(size, number))
for round in range(rounds):
    for size in sizes:
        forget()
        for number in chance.sample(range(size), min(calls, size)):
            timed(size, "lookup", os.lstat, path(size, number))
        for number in range(calls):
            name = path(size, chance.randrange(size)) + f".{round}.{number}"
            os.close(timed(size, "create", os.open, name, os.O_CREAT | os.O_WRONLY))
        file = os.open(path(size, chance.randrange(size)), os.O_WRONLY)
        for number in range(calls // 4):
            os.pwrite(file, os.urandom(4096), 0)
            timed(size, "write 4 KiB and fsync", os.fsync, file)
        os.close(file)
median = lambda values: sorted(values)[len(values) // 2]
print("| microseconds | " + " | ".join(f"{size:,} entries" for size in sizes) + " | ratio |")
print("|---|" + "---:|" * (len(sizes) + 1))
for name in names:
    times = [median(seen[size, name]) for size in sizes]
    print(f"| {name} | " + " | ".join(f"{time:.0f}" for time in times) + f" | {times[-1] / times[0]:.2f} |")
for size in sizes:
    status = json.loads(subprocess.check_output(["lockbox", "status", "--json", f"{scratch}/{size}"]))
    print(f"most memory with {size:,} entries: {status['peak_resident_bytes'] >> 20} MiB")
END
