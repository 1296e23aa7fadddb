#!/usr/bin/env bash
# Measures what looking up, creating and fsync cost on a mount that holds few files and on one that holds a million.
#
#   bench/growth.sh [ENTRIES...]     needs root; default 1000 1000000; prints a table of microseconds, medians of single calls
#
#   ROUNDS    interleaved rounds (default 3)          CALLS    calls of a kind in each round (default 1000)
#   PROGRAMS  directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        OPTIONS  mount options (default memory=2048M, enough for all nodes)
#   BEFORE    directory with older programs, measured in turn with the others as "before"
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

candidates=(lockbox ${BEFORE:+before})
mkdir "${candidates[@]/#/$scratch/}"
for name in "${candidates[@]}"; do
    for entries in "${sizes[@]}"; do
        mounted=$scratch/$name/$entries
        with_programs_of "$name" new_archive "$mounted.lbx"
        python3 "$here/many_files.py" "$entries" 0 |
            with_programs_of "$name" lockbox import-tar --passfile "$scratch/passphrase" "$mounted.lbx"
        mkdir "$mounted"
        with_programs_of "$name" mount_archive "$mounted.lbx" "$mounted" "${OPTIONS:-memory=2048M}"
    done
done

python3 - "$scratch" "${ROUNDS:-3}" "${CALLS:-1000}" "${candidates[*]}" "${sizes[@]}" <<'END'
import json, os, random, subprocess, sys, time
scratch, rounds, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
programs, sizes = sys.argv[4].split(), [int(size) for size in sys.argv[5:]]
mounts = [(name, size) for size in sizes for name in programs]
chance = random.Random(1)
names = ["lookup", "create", "write 4 KiB and fsync"]
seen = {(mount, name): [] for mount in mounts for name in names}
def timed(mount, name, call, *arguments):
    began = time.perf_counter()
    answer = call(*arguments)
    seen[mount, name].append((time.perf_counter() - began) * 1e6)
    return answer
def path(mount, number):
    return "/".join([scratch, mount[0], str(mount[1]), f"d{number // 1000}", f"f{number}"])
def forget():
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("2")
    # A call shall meet one name that the kernel does not know, not two.
    for mount in mounts:
        for directory in range(0, mount[1], 1000):
            os.lstat(os.path.dirname(path(mount, directory)))
for mount in mounts:
    # Every node that a lookup needs is in the daemon's memory afterwards.
    for number in range(mount[1]):
        os.lstat(path(mount, number))
for round in range(rounds):
    for mount in mounts[:: -1 if round % 2 else 1]:
        size = mount[1]
        forget()
        for number in chance.sample(range(size), min(calls, size)):
            timed(mount, "lookup", os.lstat, path(mount, number))
        for number in range(calls):
            name = path(mount, chance.randrange(size)) + f".{round}.{number}"
            os.close(timed(mount, "create", os.open, name, os.O_CREAT | os.O_WRONLY))
        file = os.open(path(mount, chance.randrange(size)), os.O_WRONLY)
        for number in range(calls // 4):
            os.pwrite(file, os.urandom(4096), 0)
            timed(mount, "write 4 KiB and fsync", os.fsync, file)
        os.close(file)
median = lambda values: sorted(values)[len(values) // 2]
print("| microseconds | " + " | ".join(f"{size:,} entries" for size in sizes) + " | ratio |")
print("|---|" + "---:|" * (len(sizes) + 1))
for program in programs:
    for name in names:
        times = [median(seen[(program, size), name]) for size in sizes]
        print(f"| {program}: {name} | " + " | ".join(f"{time:.0f}" for time in times) + f" | {times[-1] / times[0]:.2f} |")
for size in sizes:
    status = json.loads(subprocess.check_output(["lockbox", "status", "--json", f"{scratch}/lockbox/{size}"]))
    print(f"most memory with {size:,} entries: {status['peak_resident_bytes'] >> 20} MiB")
END
