"""Draw time.png from real runs of digits: where the time of a step goes, for each strategy."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from offbeat import Result, fit
from offbeat.run.drive import WARM
from offbeat.runtime.launch import Launcher

KINDS = {"input": "#06b6d4", "compute": "#22c55e", "communicate": "#f59e0b", "wait": "#ef4444"}
RUNS = [("single", 1), ("ddp", 2), ("allreduce", 2), ("ddp + accumulate(4)", 2), ("allreduce + accumulate(4)", 2)]


def measured() -> list[Result]:
    """Run ten epochs of each strategy, after a warm-up run."""
    with tempfile.TemporaryDirectory() as folder, Launcher(WARM) as launcher:
        options = {"epochs": 10, "target": 2.0, "threads": 1, "out": folder, "launcher": launcher}
        fit("offbeat.tasks.digits", "ddp", workers=2, **options)  # pyright: ignore[reportArgumentType]
        return [fit("offbeat.tasks.digits", s, workers=w, **options) for s, w in RUNS]  # pyright: ignore[reportArgumentType]


def draw(results: list[Result], path: Path) -> None:
    """Plot milliseconds per global batch as bars."""
    figure, axes = plt.subplots(figsize=(9, 3.2))
    for row, result in enumerate(results):
        batches = result.samples / 63  # 1,197 examples in 19 batches
        left = 0.0
        for kind, color in KINDS.items():
            width = 1e3 * result.seconds_by_kind[kind] / batches
            axes.barh(row, width, left=left, color=color, label=kind if row == 0 else None)
            left += width
    axes.set_yticks(
        range(len(results)), [f"{r.strategy}, {r.workers} worker{'s' if r.workers > 1 else ''}" for r in results]
    )
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per global batch of 64 (digits, 1 thread per worker, mean over workers)")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    runs = measured()
    Path(__file__).with_suffix(".json").write_text(json.dumps([r.plain() | {"run": ""} for r in runs], indent=1) + "\n")
    draw(runs, Path(__file__).with_suffix(".png"))
