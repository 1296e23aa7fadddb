"""Has the kernel drop what it caches of a file, at random times until it is killed or its parent is gone, so that who reads meanwhile reads
what was stored.

evict.py --seed N FILE

Dirty pages are written and dropped the next time; pages that are mapped stay.
"""
import argparse
import os
import random
import time

LONGEST = 0.2

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("file")
options = parser.parse_args()
chance = random.Random(options.seed)
parent = os.getppid()
# Kept open, since each close would have everything written.
file = os.open(options.file, os.O_RDONLY | os.O_CREAT, 0o644)
while os.getppid() == parent:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(chance.uniform(0, LONGEST))
