#!/usr/bin/env python3
"""Prints the table of a run: for each measurement the best round of each candidate, and lockbox as a share of the others."""
import pathlib
import statistics
import sys


def main():
    scratch, candidates = pathlib.Path(sys.argv[1]), sys.argv[2:]
    measurements = [line.rstrip("\n") for line in sys.stdin]
    rounds = {}
    for name in candidates:
        lines = (scratch / (name + ".numbers")).read_text(encoding="ascii").splitlines()
        rounds[name] = [[float(number) for number in line.split()] for line in lines]
    others = [name for name in candidates if name != "lockbox"] if "lockbox" in candidates else []
    heads = ["measurement"] + candidates + ["lockbox / " + name for name in others] + ["spread of lockbox"] * bool(others)
    print("| " + " | ".join(heads) + " |")
    print("|---" + "|---:" * (len(heads) - 1) + "|")
    for index, measurement in enumerate(measurements):
        best = {name: max(numbers[index] for numbers in rounds[name]) for name in candidates}
        cells = [measurement] + ["%.0f" % best[name] for name in candidates]
        cells += ["%.2f" % (best["lockbox"] / best[name]) for name in others]
        if others:
            mine = [numbers[index] for numbers in rounds["lockbox"]]
            cells.append("%.0f %%" % (100 * (max(mine) - min(mine)) / statistics.mean(mine)))
        print("| " + " | ".join(cells) + " |")


main()
