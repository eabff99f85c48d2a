"""Bubbles of pipelines on real processes: how much of the time stages idle, against the formulas.

Claims, for 4 stages paced to 20 ms per microbatch (forward 1 part, backward 2) and 8 microbatches: the measured share of
idle time is within 3 points of the formula for naive, gpipe, one_f_one_b and interleaved with 2 chunks, and zero_bubble
idles less than one_f_one_b.

Stages sleep, so that 4 of them fit on 2 cores. A step takes as long as its slowest worker's; idle is what a stage did
not sleep of it, messages, autograd and the schedule's own cost included. Every schedule must have the same losses. The
schedules take turns in blocks of some steps, of which the first, in which the model is cut, is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.bench import environment, holds, ratio
from offbeat.protocols.pipelines.formulas import bubble_share
from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.run.drive import WARM, drive
from offbeat.run.job import Job, Script
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal
from offbeat.statistics import spread

RESULTS = Path(__file__).parent / "results"
LOOP = Path(__file__).parent / "_paced_stages.py"
STAGES, MICROBATCHES, PACE, POINTS = 4, 8, 0.02, 0.03
CHUNKS = {kind: 2 if kind is PipelineKind.INTERLEAVED else 1 for kind in PipelineKind}


class Bench:
    """Runs of the paced loop."""

    def __init__(self, launcher: Launcher, folder: Path, steps: int) -> None:
        self._launcher, self._folder, self._steps = launcher, folder, steps
        self._losses: list[float] = []

    def idle(self, kind: PipelineKind) -> list[float]:
        """Share of idle time in each step but the first."""
        chunks, out = CHUNKS[kind], self._folder / "steps"
        words = (str(out), "--parts", str(STAGES * chunks), "--seconds", str(PACE / chunks))
        loop = Script(str(LOOP), (*words, "--steps", str(self._steps + 1), "--examples", str(MICROBATCHES)))
        goal = Goal(strategy=f"pipeline({STAGES}, {kind.value}, microbatches={MICROBATCHES}, chunks={chunks})", seed=1)
        drive(Job(loop, goal, STAGES, threads=1, out=self._folder), launcher=self._launcher)
        workers = [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(STAGES)]
        for each in workers:
            self._verify(kind, each["losses"])
        seconds = np.array([each["seconds"] for each in workers]).max(axis=0)
        slept = np.array([each["slept"] for each in workers]).mean(axis=0)
        return (1 - slept / seconds)[1:].tolist()

    def _verify(self, kind: PipelineKind, losses: list[float]) -> None:
        """All schedules compute the same; with two chunks, the model has more layers."""
        if CHUNKS[kind] == 1:
            self._losses = self._losses or losses
            assert np.allclose(losses, self._losses, atol=1e-6), f"{kind.value} has other losses: {losses}"
        assert losses[-1] < losses[0], f"{kind.value} does not learn: {losses}"


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "pipelines.json")
    options = parser.parse_args()
    shares: dict[PipelineKind, list[float]] = {kind: [] for kind in PipelineKind}
    with tempfile.TemporaryDirectory() as folder, Launcher(WARM) as launcher:
        bench = Bench(launcher, Path(folder), options.steps)
        for block in range(options.blocks):
            for kind in list(PipelineKind)[:: 1 if block % 2 else -1]:
                shares[kind].append(float(np.median(bench.idle(kind))))
    bars: list[dict[str, Any]] = []
    formulas = {kind: bubble_share(kind, STAGES, MICROBATCHES, CHUNKS[kind]) for kind in PipelineKind}
    for kind, measured in shares.items():
        print(f"{kind.value}: idle {spread(measured)}, formula {formulas[kind]:.3f}")
        if kind is not PipelineKind.ZERO_BUBBLE:
            apart = spread([abs(share - formulas[kind]) for share in measured])
            name = f"idle share, measured and formula apart, {kind.value}"
            bars.append({"bar": name, "at most": POINTS, "found": apart.plain(), "holds": holds(apart, at_most=POINTS)})
    less = ratio(shares[PipelineKind.ZERO_BUBBLE], shares[PipelineKind.ONE_F_ONE_B])
    name = "idle share, zero_bubble / one_f_one_b"
    bars.append({"bar": name, "at most": 1.0, "found": less.plain(), "holds": holds(less, at_most=1.0)})
    stored = {
        "benchmark": "pipelines",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "bars": bars,
        "idle": {kind.value: measured for kind, measured in shares.items()},
        "formulas": {kind.value: formula for kind, formula in formulas.items()},
    }
    for bar in bars:
        print(f"{'holds ' if bar['holds'] else 'MISSED'}  {bar['bar']}: {bar['found']}, at most {bar['at most']}")
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if stored["holds"] else 1)


if __name__ == "__main__":
    main()
