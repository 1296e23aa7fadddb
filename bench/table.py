#!/usr/bin/env python3
"""Prints the table of a run (medians of the rounds, lockbox as a share of the others, what is asked of it) and writes the same as JSON.

Arguments: directory with NAME.numbers, the JSON file, the candidates. Standard input: a line for each measurement,
"name|goal against the ceiling|against gocryptfs|against the disk"; a goal may be empty.
"""
import json
import pathlib
import statistics
import sys

GOALS = ("ceiling", "gocryptfs", "disk")


def main():
    scratch, result, candidates = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    measurements = [line.rstrip("\n").split("|") for line in sys.stdin]
    rounds = {}
    for name in candidates:
        lines = (scratch / (name + ".numbers")).read_text(encoding="ascii").splitlines()
        rounds[name] = [[float(number) for number in line.split()] for line in lines]
    others = [name for name in candidates if name != "lockbox"] if "lockbox" in candidates else []
    heads = ["measurement"] + candidates + ["lockbox / " + name for name in others] + ["spread of lockbox"] * bool(others)
    print("| " + " | ".join(heads) + " |")
    print("|---" + "|---:" * (len(heads) - 1) + "|")
    rows = []
    for index, (measurement, *asked) in enumerate(measurements):
        median = {name: statistics.median(numbers[index] for numbers in rounds[name]) for name in candidates}
        goals = {name: float(goal) for name, goal in zip(GOALS, asked) if goal}
        ratios = {name: median["lockbox"] / median[name] for name in others}
        cells = [measurement] + ["%.0f" % median[name] for name in candidates]
        for name in others:
            cell = "%.2f" % ratios[name]
            if name in goals:
                cell += (" >= %g" if ratios[name] >= goals[name] else " **< %g**") % goals[name]
            cells.append(cell)
        row = {"measurement": measurement, "median": median, "goals": goals, "ratios": ratios}
        if others:
            mine = [numbers[index] for numbers in rounds["lockbox"]]
            row["spread"] = (max(mine) - min(mine)) / statistics.mean(mine)
            cells.append("%.0f %%" % (100 * row["spread"]))
        print("| " + " | ".join(cells) + " |")
        rows.append(row)
    result.write_text(json.dumps({"candidates": candidates, "rows": rows}, indent=1) + "\n", encoding="ascii")


main()
