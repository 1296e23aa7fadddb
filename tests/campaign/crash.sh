#!/usr/bin/env bash
# The crash campaign: judges STATES states (default 1,000,000) that crashes leave, from the first seed SEED (default 1000) on.
#
#   STATES=1000000 SEED=1000 tests/campaign/crash.sh
#
# A violation names its seed, position and kind; `SEED=n cargo test --workspace --lib fs::tests::crash` tries every state of a seed again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# The development profile, whose assertions judge too; its dependencies are built for speed.
exec cargo test --workspace --lib crash_campaign -- --ignored --nocapture
