"""Draw collectives.png, the time of an all-reduce by size, from benchmarks/results/collectives.json."""

from __future__ import annotations

import json
from pathlib import Path

from offbeat.bench import PEERS, picture

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    stored = json.loads((ROOT / "benchmarks/results/collectives.json").read_text())
    over_sizes = [result for result in stored["results"] if result["peers"] == list(PEERS)]
    picture(over_sizes, Path(__file__).with_suffix(".png"))
