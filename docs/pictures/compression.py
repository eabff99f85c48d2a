"""Measure every compressor on one task over slow links, and plot accuracy against bytes and time.

python docs/pictures/compression.py            # measure (three minutes, as root), write compression.json, plot
python docs/pictures/compression.py --again    # plot from compression.json, and update the page's table
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import offbeat
from offbeat.run.drive import WARM
from offbeat.runtime.launch import Launcher
from offbeat.tasks.digits import Digits

HERE = Path(__file__).parent
PAGE = HERE.parent / "compression.md"
WORKERS, RATE, EPOCHS, SEED = 4, "20Mbit", 10, 3
STRATEGIES = (
    *("allreduce", "half", "bfloat", "quantize(8)", "quantize(4)", "quantize(2)", "quantize(4, stochastic=True)"),
    *("sign", "topk(0.01)", "topk(0.05) + quantize(8)", "threshold(0.001)", "randomk(0.25)", "lowrank(4)"),
    *("local(8)", "local(8) + quantize(4)", "gossip", "gossip + quantize(4)"),
)
Run = dict[str, Any]


def measured(launcher: Launcher, strategy: str) -> Run:
    """Run once, and return validation accuracy, time and bytes of all workers at each evaluation."""
    hosts = offbeat.Hosts.alike(WORKERS, RATE)
    with tempfile.TemporaryDirectory() as folder:
        result = offbeat.fit(
            Digits(), strategy, hosts=hosts, target=2.0, epochs=EPOCHS, seed=SEED, out=folder, launcher=launcher
        )
        lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    per_step = result.bytes_sent / result.steps
    curve = [(round(one["seconds"], 3), round(one["step"] * per_step), one["score"]) for one in lines if "score" in one]
    return {"strategy": strategy, "curve": curve, "steps": result.steps}


def drawn(runs: list[Run]) -> None:
    """Plot accuracy against bytes and against time, side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    colors = plt.get_cmap("tab20")
    for number, run in enumerate(runs):
        seconds, sent, scores = zip(*run["curve"], strict=True)
        style = {"color": colors(number % 20), "linestyle": "--" if number >= 13 else "-"}
        width = 2.6 if run["strategy"] == "allreduce" else 1.4
        axes[0].plot([count / 1e6 for count in sent], scores, label=run["strategy"], linewidth=width, **style)
        axes[1].plot(seconds, scores, linewidth=width, **style)
    axes[0].set(xscale="log", xlabel="MB sent by all workers", ylabel="accuracy on validation data", ylim=(0.3, 1.0))
    axes[1].set(xscale="log", xlabel=f"seconds, {WORKERS} hosts at {RATE}/s")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.axhline(0.97, color="black", linewidth=0.8, linestyle=":")
    axes[0].legend(fontsize=7, loc="lower right")
    figure.suptitle(f"digits, {WORKERS} workers, {EPOCHS} epochs: the same seed, one run each")
    figure.tight_layout()
    figure.savefig(HERE / "compression.png", dpi=110)


def table(runs: list[Run]) -> str:
    """Return a row per strategy: when it reached 0.97, if it did, and the bytes sent by then."""
    rows = ["| | first evaluation at 0.97 | seconds | MB sent by then | best |", "|---|---|---|---|---|"]
    for run in runs:
        there = next((i for i, (_, _, score) in enumerate(run["curve"]) if score >= 0.97), None)
        best = max(score for _, _, score in run["curve"])
        if there is None:
            rows.append(f"| `{run['strategy']}` | not in {EPOCHS} epochs | | | {best:.3f} |")
        else:
            seconds, sent, _ = run["curve"][there]
            rows.append(f"| `{run['strategy']}` | epoch {there + 1} | {seconds:.1f} | {sent / 1e6:.1f} | {best:.3f} |")
    return "\n".join(rows)


def main() -> None:
    """Measure unless `--again` is given; plot; update the page."""
    stored = HERE / "compression.json"
    if "--again" not in sys.argv:
        with Launcher(WARM) as launcher:
            runs = [measured(launcher, strategy) for strategy in STRATEGIES]
        stored.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
    runs = json.loads(stored.read_text())
    drawn(runs)
    section = f"<!-- measured -->\n{table(runs)}\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- measured -->.*?<!-- end -->", section, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
