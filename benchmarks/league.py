"""Whether a league can be believed: leagues of digits on two workers, again and again, each with seeds of its own.

Claims: two leagues with different seeds name the same winner or a tie; in 9 of 10 leagues stock DDP and its copy differ
by less than the spread that is printed for them, and that spread is at most 20 % of the median; a league takes less
than a minute.

Before anything is believed, each league is verified: the strategies that are exact have learned the same from the same
first batch. The A/A pair is in every league.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import offbeat
from offbeat.bench import environment
from offbeat.league import League, LeagueRow
from offbeat.run.drive import WARM
from offbeat.runtime.launch import Launcher

RESULTS = Path(__file__).parent / "results"
STRATEGIES = ("allreduce", "local(4)")
EXACT = ("ddp", "ddp, again", "allreduce")
APART = 100
"""Between the first seeds of two leagues."""


def verify(league: League) -> None:
    """Exact strategies have seen the same data and, as long as rates are the same, have learned the same."""
    factors = {row.name: row.factor for row in league.rows}
    for seed in league.seeds:
        runs = [e for e in league.entries if not e.tuning and e.seed == seed and e.name in EXACT]
        assert len({run.first_batch for run in runs}) == 1, "the strategies had different data"
        same = [run for run in runs if factors[run.name] == factors["ddp"]]
        scores = [run.curve[0].score for run in same]
        assert max(scores) - min(scores) < 0.02, f"exact strategies have learned differently: {scores}"


def told(league: League, seconds: float) -> dict[str, Any]:
    """What is kept of a league."""
    again = _row(league, "ddp, again")
    assert again.relative is not None, "ddp always missed the target"
    return {
        "seconds": seconds,
        "winner": league.winner,
        "ties": list(league.ties),
        "again / ddp": again.relative.plain(),
        "spread": again.relative.width,
        "differ by less": abs(again.relative.median - 1) < again.relative.width,
        "times": {row.name: row.time.plain() for row in league.rows},
        "relative": {row.name: None if row.relative is None else row.relative.plain() for row in league.rows},
        "reached": {row.name: [row.reached, row.runs] for row in league.rows},
        "factors": {row.name: row.factor for row in league.rows},
    }


def _row(league: League, name: str) -> LeagueRow:
    return next(row for row in league.rows if row.name == name)


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """The same winner, or one of them says that both may be first."""
    return one["winner"] in (other["winner"], *other["ties"]) or other["winner"] in one["ties"]


def bars_of(leagues: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = list(itertools.combinations(leagues, 2))
    same = sum(agree(one, other) for one, other in pairs)
    alike = sum(league["differ by less"] for league in leagues)
    spread = float(np.median([league["spread"] for league in leagues]))
    longest = max(league["seconds"] for league in leagues)
    needed = 0.9 * len(leagues)
    return [
        _bar(f"pairs of leagues that name the same winner or a tie, of {len(pairs)}", same, at_least=len(pairs)),
        _bar(f"leagues in which ddp differs from itself by less than the spread, of {len(leagues)}", alike, needed),
        _bar("spread of ddp against itself, as a share of the median, middle league", spread, at_most=0.2),
        _bar("seconds of the longest league", longest, at_most=60.0),
    ]


def _bar(name: str, found: float, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    wanted = {"at least": at_least} if at_least is not None else {"at most": at_most}
    holds = (at_least is None or found >= at_least) and (at_most is None or found <= at_most)
    return {"bar": name, **wanted, "found": round(found, 3), "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leagues", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=RESULTS / "league.json")
    options = parser.parse_args()
    leagues: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, Launcher(WARM) as launcher:
        offbeat.fit("offbeat.tasks.digits", "ddp", workers=2, steps=5, out=folder, launcher=launcher)
        for number in range(options.leagues):
            start = time.monotonic()
            league = offbeat.compare(
                "offbeat.tasks.digits",
                STRATEGIES,
                workers=2,
                seeds=options.seeds,
                seed=APART * number,
                single=False,
                out=folder,
                launcher=launcher,
            )
            verify(league)
            leagues.append(told(league, time.monotonic() - start))
            print(json.dumps(leagues[-1]), flush=True)
    bars = bars_of(leagues)
    stored = {
        "benchmark": "league",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "bars": bars,
        "results": {"strategies": STRATEGIES, "seeds": options.seeds, "leagues": leagues},
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    print(json.dumps(bars, indent=1))
    if not stored["holds"]:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()
