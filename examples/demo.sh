#!/usr/bin/env bash
# What `make demo` tells, in three parts; every line that starts with $ can be typed by hand.
set -uo pipefail
cd "$(dirname "$0")/.."
offbeat="${1:-offbeat}"
runs="$(mktemp -d)"
trap 'rm -rf "$runs"' EXIT

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { printf '$ offbeat %s\n\n' "$*"; "$offbeat" "$@"; }

say "1. Which way of distributing handwritten digits over 2 workers gets to 97 % first, here?"
run compare offbeat.tasks.digits --workers 2 --strategy allreduce --strategy "local(8)" --seeds 3 --tune none --out "$runs" || exit 1

say "2. The same with a slow second worker: who wins now, and who is to blame?"
run compare offbeat.tasks.digits --workers 2 --strategy allreduce --strategy "local(8)" --seeds 3 --tune none --no-single \
    --disturb "worker 1: pace 15ms" --out "$runs" || exit 1
run run offbeat.tasks.digits --workers 2 --watch --disturb "worker 1: pace 15ms" --out "$runs" || exit 1
run explain "$runs/latest" || exit 1

say "3. A stock DistributedDataParallel script that hangs. Nobody has to wait for the timeout of 30 minutes:"
run run examples/hanging_ddp.py --workers 2 --watch --out "$runs"
[ $? -eq 10 ] || { echo "the deadlock was not named"; exit 1; }

say "Your own script is next: docs/tutorial.md takes ten minutes."
