"""Measure every consistency under the same faults, on real processes; draw the steps and fill in the tables.

python docs/pictures/consistency.py            # measure (four minutes), write consistency.json, draw
python docs/pictures/consistency.py --again    # draw from consistency.json, and update the page's tables
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from offbeat.protocols.disturbances import FaultPlan, parse
from offbeat.run.drive import WARM, Job, drive
from offbeat.run.job import Script
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal

HERE = Path(__file__).parent
PAGE = HERE.parent / "consistency.md"
WORKERS, STEPS, SEED, WINDOW = 4, 150, 4, 3.6
RULES = ("bsp", "ssp(3)", "ssp(3, eager)", "asp", "drop_slowest(1)", "deadline(0.1)")
DISTURBANCES = {
    "pauses": ("worker *: pace 40ms", "any worker: pause 200ms with probability 0.15"),
    "slow": ("worker *: pace 40ms", "worker 0: pace 120ms"),
}
DRAWN = {"pauses": ("bsp", "ssp(3)", "asp"), "slow": ("bsp", "ssp(3)", "asp", "drop_slowest(1)")}
COLORS = {"computing": "#22c55e", "paused": "#64748b", "push, pull and wait": "#ef4444"}
Run = dict[str, Any]


def measured(launcher: Launcher, disturbance: str, rule: str) -> Run:
    """Run once, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        goal = Goal(strategy=f"server(consistency={rule})", seed=SEED, disturb=DISTURBANCES[disturbance])
        script = Script(str(HERE / "consistency_loop.py"), (str(STEPS), folder))
        result = drive(Job(script, goal, WORKERS, threads=1, out=Path(folder)), launcher=launcher)
        lanes = [json.loads((Path(folder) / f"worker-{rank}.json").read_text()) for rank in range(WORKERS)]
    start = min(lane[0][1] for lane in lanes)
    ends = [lane[-1][3] - start for lane in lanes]
    waited = sum(done - ready for lane in lanes for _, _, ready, done in lane)
    shown = [[[step, *(round(t - start, 4) for t in times)] for step, *times in lane] for lane in lanes]
    pushes = result.servers[0]["pushes"]
    return {
        "disturbance": disturbance,
        "rule": rule,
        "seconds per step": WORKERS / sum(STEPS / end for end in ends),
        "waiting": waited / sum(ends),
        "staleness": result.staleness,
        "late": pushes.get("late", 0),
        "used": pushes["applied"],
        "accuracy": result.score,
        "disturbances": result.disturbances,
        "lanes": [[row for row in lane if row[1] < WINDOW] for lane in shown],
    }


def paused(run: Run, rank: int, step: int) -> float:
    """Return how long the worker was paused in a step, which follows from the seed."""
    asked = [parse(sentence) for sentence in DISTURBANCES[run["disturbance"]]]
    return sum(action.seconds for _, action in FaultPlan(asked, "worker", rank, SEED).at(step))


def draw(runs: list[Run], path: Path) -> None:
    """Draw a row of lanes for each consistency: what every worker did when."""
    figure, rows = plt.subplots(len(runs), figsize=(10, 1.75 * len(runs) + 0.6), sharex=True)
    for axes, run in zip(rows, runs, strict=True):
        for rank, lane in enumerate(run["lanes"]):
            for step, began, ready, done in lane:
                stop = paused(run, rank, step)
                axes.broken_barh([(began, ready - began)], (rank - 0.4, 0.8), color=COLORS["computing"])
                axes.broken_barh([(began, stop)], (rank - 0.4, 0.8), color=COLORS["paused"])
                axes.broken_barh([(ready, done - ready)], (rank - 0.4, 0.8), color=COLORS["push, pull and wait"])
                axes.plot([done, done], [rank - 0.4, rank + 0.4], color="white", lw=1)
        axes.set_title(run["rule"], loc="left", fontsize=11, weight="bold")
        axes.set_yticks(range(WORKERS), [f"worker {rank}" for rank in range(WORKERS)], fontsize=8)
        axes.set_ylim(WORKERS - 0.5, -0.5)
        axes.set_xlim(0, WINDOW)
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    rows[-1].set_xlabel("seconds; a white line ends a step")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    handles = handles if runs[0]["disturbance"] == "pauses" else [handles[0], handles[2]]
    rows[0].legend(handles=handles, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(runs: list[Run]) -> str:
    """Return the page's table for the runs under one fault."""
    head = "| consistency | time per step | over bsp | waiting | staleness, mean and most | used | accuracy |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    base = runs[0]["seconds per step"]
    for run in runs:
        steps = {int(age): count for age, count in run["staleness"].items()}
        mean = sum(age * count for age, count in steps.items()) / sum(steps.values())
        used = run["used"] / (WORKERS * STEPS)
        took = run["seconds per step"]
        rows.append(
            f"| `{run['rule']}` | {1e3 * took:.0f} ms | {took / base:.2f} | {100 * run['waiting']:.0f} % | {mean:.1f}, "
            f"{max(steps)} | {100 * used:.0f} % | {run['accuracy']:.3f} |"
        )
    return "\n".join(rows)


def filled(page: str, runs: list[Run]) -> str:
    """Return the page with the tables of these runs."""
    for name in DISTURBANCES:
        mark = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        made = table([run for run in runs if run["disturbance"] == name])
        page = mark.sub(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", page)
    return page


def main(again: bool) -> None:
    """Measure unless `--again` is given, draw, and update the page."""
    kept = HERE / "consistency.json"
    if not again:
        with Launcher(WARM) as launcher:
            runs = [measured(launcher, name, rule) for name in DISTURBANCES for rule in RULES]
        kept.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
    runs: list[Run] = json.loads(kept.read_text())
    for name, rules in DRAWN.items():
        draw(
            [run for run in runs if run["disturbance"] == name and run["rule"] in rules],
            HERE / f"consistency-{name}.png",
        )
    PAGE.write_text(filled(PAGE.read_text(), runs))


if __name__ == "__main__":
    main(sys.argv[1:] == ["--again"])
