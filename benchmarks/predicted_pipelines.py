"""Predicted steps of pipelines against measured ones, on four models, in every schedule that is asked for.

Claim: for an MLP, a CNN with skip connections, a text transformer with tied embedding, and GPT-2 of transformers with
random weights, under `pipeline(2)` on 2 processes with 1 thread each, the predicted time of a step is within 8 % of the
measured one. The prediction is made of what was measured before the first step: seconds of each part, on both
processes at once, and of messages; and of what a stage does besides, such as its optimizer.

Losses are compared with those of one process before anything is timed. Models take turns, in blocks of one run each.
Beside it stands what the prediction would be with the seconds that the parts took in the steps of the run: the rest of
the difference is the machine's, whose speed changes from second to second.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from offbeat.bench import environment, holds
from offbeat.run.drive import WARM, drive
from offbeat.run.job import Job, Script
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal
from offbeat.statistics import spread

RESULTS = Path(__file__).parent / "results"
LOOP = Path(__file__).parent / "_four_models.py"
MODELS = ("mlp", "cnn", "text", "gpt2")
WITHIN = 0.08


class Bench:
    """Runs of the loop."""

    def __init__(self, launcher: Launcher, folder: Path, steps: int) -> None:
        self._launcher, self._folder, self._steps = launcher, folder, steps

    def losses(self, model: str, strategy: str, workers: int) -> list[float]:
        """The losses of a short run."""
        self._run(model, strategy, workers, 4)
        return json.loads((self._folder / "losses").read_text())

    def verify(self, model: str, strategy: str) -> float:
        """Largest difference of the losses in stages and in one process."""
        alone, split = self.losses(model, "single", 1), self.losses(model, strategy, 2)
        apart = max(abs(one - other) for one, other in zip(alone, split, strict=True))
        assert apart < 1e-3, f"{model} has other losses under {strategy} than in one process: {split}, not {alone}"
        assert alone[-1] != alone[0], f"{model} does not learn: {alone}"
        return apart

    def measured(self, model: str, strategy: str) -> dict[str, float]:
        """Seconds of a step as measured, as predicted, and by the parts' seconds in the run."""
        self._run(model, strategy, 2, self._steps)
        result = json.loads((self._folder / "latest" / "run.json").read_text())["result"]
        predicted = result["predicted"]
        return {
            "measured": predicted["step_seconds"],
            "predicted": predicted["predicted_seconds"],
            "by parts in the run": predicted["by_run_seconds"],
        }

    def _run(self, model: str, strategy: str, workers: int, steps: int) -> None:
        loop = Script(str(LOOP), (str(self._folder / "losses"), "--model", model, "--steps", str(steps)))
        job = Job(loop, Goal(strategy=strategy, seed=1), workers, threads=1, out=self._folder)
        drive(job, launcher=self._launcher)


def judged(model: str, blocks: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The bar of a model."""
    apart = spread([abs(block["predicted"] / block["measured"] - 1) for block in blocks])
    return {
        "bar": f"predicted step of pipeline(2), apart from the measured one, {model}",
        "at most": WITHIN,
        "found": apart.plain(),
        "holds": holds(apart, at_most=WITHIN),
    }


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--strategy", default="pipeline(2)")
    parser.add_argument("--only", default="", help="run models that have this in their name")
    parser.add_argument("--out", type=Path, default=RESULTS / "predicted_pipelines.json")
    options = parser.parse_args()
    models = [model for model in MODELS if options.only in model]
    results: dict[str, list[dict[str, float]]] = {model: [] for model in models}
    with tempfile.TemporaryDirectory() as folder, Launcher(WARM) as launcher:
        bench = Bench(launcher, Path(folder), options.steps)
        apart = {model: bench.verify(model, options.strategy) for model in models}
        for block in range(options.blocks):
            for model in models[:: 1 if block % 2 else -1]:
                results[model].append(bench.measured(model, options.strategy))
    bars = [judged(model, blocks) for model, blocks in results.items()]
    for model, blocks in results.items():
        print(f"{model}: {in_words(blocks)}")
    for bar in bars:
        print(f"{'holds ' if bar['holds'] else 'MISSED'}  {bar['bar']}: {bar['found']}, at most {bar['at most']}")
    stored = {
        "benchmark": "predicted_pipelines",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "strategy": options.strategy,
        "bars": bars,
        "results": msgspec.to_builtins(results),
        "losses apart": apart,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if stored["holds"] else 1)


def in_words(blocks: Sequence[Mapping[str, float]]) -> str:
    """Medians in milliseconds, and ratios to what was measured."""
    medians = {name: float(np.median([block[name] for block in blocks])) for name in blocks[0]}
    shown = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in medians.items())
    ratios = spread([block["predicted"] / block["measured"] for block in blocks])
    return f"{shown}; predicted / measured {ratios}"


if __name__ == "__main__":
    main()
