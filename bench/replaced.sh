#!/usr/bin/env bash
# Measures how far an archive grows while its files are overwritten and replaced by rename, as fast as one program can.
#
#   bench/replaced.sh             needs root; prints the live data, the most that the archive took, and the ratio (goal: 1.3)
#
#   LIVE_MIB  live data (default 794)                 CALLS    files written again (default 100000)
#   PROGRAMS  directory with the programs (default target/release, built)
#   DISK      directory on the disk to measure        OPTIONS  mount options
set -Eeuo pipefail
export LC_ALL=C

# shellcheck source=environment.sh
source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/environment.sh"
take_place replaced
new_archive "$scratch/box.lbx"
mkdir "$scratch/box"
mount_archive "$scratch/box.lbx" "$scratch/box" "${OPTIONS-}"
python3 - "$scratch/box" "$scratch/box.lbx" "${LIVE_MIB:-794}" "${CALLS:-100000}" <<'END'
import os, random, sys
box, archive, live, calls = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 20, int(sys.argv[4])
chance, noise = random.Random(1), os.urandom(4 << 20)
def write(name, size, mode):
    at = chance.randrange(len(noise) - size)
    with open(f"{box}/{name}", mode) as file:
        file.write(noise[at:at + size])
def taken():
    return os.stat(archive).st_blocks * 512
sizes, wanted, live = [], live, 0
while live < wanted:
    sizes.append(chance.choice((4_000, 12_000, 40_000, 120_000)))
    write(f"f{len(sizes) - 1}", sizes[-1], "wb")
    live += sizes[-1]
os.sync()
most = taken()
for call in range(calls):
    which = chance.randrange(len(sizes))
    if call % 2:
        write(f"f{which}", sizes[which], "r+b")
    else:
        write("new", sizes[which], "wb")
        os.rename(f"{box}/new", f"{box}/f{which}")
    if call % 100 == 0:
        most = max(most, taken())
print(f"| live {live >> 20} MiB | most {max(most, taken()) >> 20} MiB | {max(most, taken()) / live:.2f} |")
END
