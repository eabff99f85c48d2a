#!/usr/bin/env bash
# What `make demo` shows, in three parts; every line that starts with $ can be typed by hand.
set -uo pipefail
cd "$(dirname "$0")/.."
offbeat="${1:-offbeat}"
runs="$(mktemp -d)"
trap 'rm -rf "$runs"' EXIT

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { printf '$ offbeat %s\n\n' "$*"; "$offbeat" "$@"; }

say "1. One worker is slow: who is to blame, and what does it cost?"
run run offbeat.tasks.digits --workers 2 --monitor --disturb "worker 1: pace 15ms" --out "$runs" || exit 1
run explain "$runs/latest" || exit 1

say "2. A stock DistributedDataParallel script hangs. Instead of a timeout after 30 minutes:"
run run examples/hanging_ddp.py --workers 2 --monitor --out "$runs"
[ $? -eq 10 ] || { echo "the deadlock was not named"; exit 1; }

say "3. A small transformer learns to predict Python source. Which strategy is first on 2 workers, and does distributing pay?"
run compare offbeat.tasks.text --workers 2 --target -2.7 --strategy allreduce --strategy "local(8)" --seeds 1 --tune none --out "$runs" || exit 1

say "Your own script is next: docs/tutorial.md takes ten minutes."
