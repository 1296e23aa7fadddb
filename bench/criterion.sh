#!/usr/bin/env bash
# Keeps the figures of the criterion groups under a name, or compares the present sources with them.
#
#   bench/criterion.sh save NAME [FILTER]      measures and keeps
#   bench/criterion.sh compare NAME [FILTER]   measures and tells for each group whether it changed, and by how much
#   bench/criterion.sh table NAME              prints what was kept as a table
set -Eeuo pipefail

if [[ $# -lt 2 || $# -gt 3 || ! $1 =~ ^(save|compare|table)$ ]]; then
    echo 'usage: bench/criterion.sh save|compare|table NAME [FILTER]' >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $1 == table ]]; then
    exec python3 - "${CARGO_TARGET_DIR:-target}/criterion" "$2" <<'END'
import json, pathlib, sys
kept = sorted(pathlib.Path(sys.argv[1]).rglob(f"{sys.argv[2]}/estimates.json"))
if not kept:
    sys.exit(f"bench/criterion.sh: nothing was kept as {sys.argv[2]!r}")
def shown(nanoseconds):
    for unit in ["ns", "us", "ms"]:
        if nanoseconds < 1000:
            return f"{nanoseconds:.3g} {unit}"
        nanoseconds /= 1000
    return f"{nanoseconds:.3g} s"
print("| what | median | 95 % between | a second |\n|---|---:|---:|---:|")
for file in kept:
    what = json.loads((file.parent / "benchmark.json").read_text())
    median = json.loads(file.read_text())["median"]
    between = median["confidence_interval"]
    rate = ""
    for unit, amount in (what.get("throughput") or {}).items():
        each = amount / median["point_estimate"] * 1e9
        rate = f"{each / 2**20:,.0f} MiB" if unit.startswith("Bytes") else f"{each:,.0f}"
    print(f"| {what['full_id']} | {shown(median['point_estimate'])} | {shown(between['lower_bound'])}, {shown(between['upper_bound'])} | {rate} |")
END
fi
option=--save-baseline
[[ $1 == save ]] || option=--baseline
for bench in layers archive; do
    cargo bench --quiet --locked --package lockbox-bench --bench "$bench" -- "$option" "$2" ${3+"$3"}
done
