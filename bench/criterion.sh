#!/usr/bin/env bash
# Keeps the figures of the criterion groups under a name, or compares the present sources with them.
#
#   bench/criterion.sh save NAME [FILTER]      measures and keeps
#   bench/criterion.sh compare NAME [FILTER]   measures and tells for each group whether it changed, and by how much
set -Eeuo pipefail

if [[ $# -lt 2 || $# -gt 3 || ! $1 =~ ^(save|compare)$ ]]; then
    echo 'usage: bench/criterion.sh save|compare NAME [FILTER]' >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
option=--save-baseline
[[ $1 == save ]] || option=--baseline
for bench in layers archive; do
    cargo bench --quiet --locked --package lockbox-bench --bench "$bench" -- "$option" "$2" ${3+"$3"}
done
