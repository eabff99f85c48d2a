"""Whether noise told from workers' gradients is the noise of single examples.

Claim: the noise scale measured during a run from the gradients of 2 workers, by squared norms at two sizes of batch, is
within 15 % of the one by its definition, from the gradients of all single training examples (torch.func), on digits and
on logistic regression.

Each run is cut into stages. A stage's noise scale by workers uses every step of it; by examples, the mean over passes
between its steps: all of them on digits, where noise changes many times over from one step to the next, a tenth of them
on logistic regression, where it changes slowly. Both are ratios of means. A bar is the geometric mean, over seeds, of
the ratio of the two, with a 95 % bootstrap interval over seeds. Batches are 8 times the task's own: noise that is much
larger than the batch takes many more steps to tell. How often the 90 % intervals of single runs hold the figure by
examples is in the results, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from offbeat.run.drive import WARM, drive
from offbeat.run.job import Job, target_of
from offbeat.runtime.gradients.noise import read_gradients
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal
from offbeat.scaling._batch_size import Noise, by_samples, noise_of

RESULTS = Path(__file__).parent / "results"
WITHIN = 0.15
TIMES = 8
LENGTHS = {"logistic": (240, 24, 3), "digits": (60, 60, 2)}
"""Steps, passes over single examples, and stages."""


def measured(task: str, steps: int, passes: int, stages: int, seed: int, launcher: Launcher) -> list[dict[str, float]]:
    """Noise by workers and by examples, stage by stage, of one run."""
    goal = Goal(strategy="allreduce", steps=steps, seed=seed, target="score=1e300", merge=TIMES, gauge=passes)
    with TemporaryDirectory() as folder:
        result = drive(Job(target_of(f"offbeat.tasks.{task}", ()), goal, 2, 1, Path(folder)), launcher=launcher)
        found = read_gradients(result.run)
    assert found["trouble"] is None
    assert len(found["batch"]) == steps
    told: list[dict[str, float]] = []
    noise = noise_of(found)
    first = 2  # No pass has seen the model before its first step, where gradients are at their largest.
    for part in Noise(noise.spread[1:], noise.square[1:]).stages(stages):
        # After a step: what the next one meets.
        inside = [one for one in found["checks"] if first <= one["step"] + 1 < first + len(part)]
        spread, square = by_samples(inside)
        scale = part.scale()
        high = min(scale.high, 1e9)
        told.append({"workers": scale.value, "low": scale.low, "high": high, "examples": spread / square})
        first += len(part)
    return told


def summary(runs: list[list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Over seeds, each stage: the ratio of the two figures with its interval, and how often intervals held."""
    random = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for stage in zip(*runs, strict=True):
        logs = np.log([one["workers"] / one["examples"] for one in stage])
        drawn = np.exp(logs[random.integers(0, len(logs), (4000, len(logs)))].mean(axis=1))
        low, high = np.percentile(drawn, [2.5, 97.5])
        held = [one["low"] <= one["examples"] <= one["high"] for one in stage]
        found.append(
            {
                "noise scale by examples, median": float(np.median([one["examples"] for one in stage])),
                "ratio": {"median": float(np.exp(logs.mean())), "low": float(low), "high": float(high)},
                "ratios": np.exp(logs).tolist(),
                "intervals that held": float(np.mean(held)),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    bars: list[dict[str, Any]] = []
    with Launcher(WARM) as launcher:
        for task, (steps, passes, stages) in LENGTHS.items():
            runs = [measured(task, steps, passes, stages, seed, launcher) for seed in range(asked.seeds)]
            found = summary(runs)
            results[task] = {"steps": steps, "passes": passes, "times": TIMES, "runs": runs, "stages": found}
            for number, one in enumerate(found, 1):
                ratio = one["ratio"]
                print(task, number, ratio, one["intervals that held"])
                holds = abs(ratio["median"] - 1) <= WITHIN
                bar = f"{task}, stage {number} of {stages}: noise scale by workers / by single examples"
                wanted = {"at least": 1 - WITHIN, "at most": 1 + WITHIN}
                bars.append({"bar": bar, **wanted, "found": ratio, "holds": holds})
    stored = {
        "benchmark": "noise_scale",
        "holds": all(bar["holds"] for bar in bars),
        "bars": bars,
        "seeds": asked.seeds,
        "results": results,
    }
    (RESULTS / "noise_scale.json").write_text(json.dumps(stored, indent=1) + "\n")
    sys.exit(not stored["holds"])


if __name__ == "__main__":
    main()
