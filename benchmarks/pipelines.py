"""Bubbles of pipelines on real processes: how much of the time stages idle, against the formulas.

Claims, for 4 stages paced to 20 ms per microbatch (forward 1 part, backward 2) and 8 microbatches: the measured share
of idle time is within 3 points of the formula for naive, gpipe, one_f_one_b and interleaved with 2 chunks, and
zero_bubble idles less than one_f_one_b.

Stages sleep, so that 4 of them fit on 2 cores. A step takes as long as its slowest worker's. Idle is what a stage does
not compute of it, by the run's own account; beside it stands what it did not sleep of it, which counts the work of
autograd as idle. Every schedule must have the same losses and gradients. Each schedule has its own 4 processes; they
take turns, in blocks of some steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from _paced_stages import Pace, PacedLayer
from _turns import Blocks, measured, slowest, take_turns
from offbeat.bench import environment, holds, ratio
from offbeat.protocols.pipelines.formulas import bubble_share
from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control, Launcher
from offbeat.runtime.pipeline.executor import PipelineShape, StageExecutor
from offbeat.runtime.pipeline.messages import Bundles
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.split.stages import split_model
from offbeat.statistics import spread

RESULTS = Path(__file__).parent / "results"
STAGES, MICROBATCHES, PACE, POINTS, PARTS = 4, 8, 0.02, 0.03, 8
CHUNKS = {kind: 2 if kind is PipelineKind.INTERLEAVED else 1 for kind in PipelineKind}
TIMEOUT = timedelta(seconds=60)


def model_and_batch(pace: Pace) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Eight layers, of which each stage has two, and a batch of one example for each microbatch."""
    torch.manual_seed(1)
    model = nn.Sequential(*(PacedLayer(PACE * STAGES / PARTS, pace) for _ in range(PARTS)))
    return model, torch.randn(MICROBATCHES, 8), torch.randn(MICROBATCHES, 8)


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One stage of a schedule."""
    kind, pace = PipelineKind(config["variant"]), Pace()
    model, inputs, target = model_and_batch(pace)
    chunks = CHUNKS[kind]
    bounds = list(range(0, PARTS + 1, PARTS // (STAGES * chunks)))
    split = split_model(model, (inputs[:1],), STAGES * chunks, bounds=bounds, layers=list(model))
    group = DirectGroup(where(), TIMEOUT, torch.device("cpu"))
    bundles = Bundles(group, Stopwatch(bubbles=True), "stage {}".format)
    executor = StageExecutor(split, PipelineShape(kind, STAGES, chunks), group.rank, bundles)

    def step() -> dict[str, float]:
        model.zero_grad()
        before = sum(executor.seconds.values())
        pace.turn()
        executor.step((inputs, target), mse_loss, MICROBATCHES)
        return {"computing": sum(executor.seconds.values()) - before, "slept": pace.turn()}

    loss = executor.step((inputs, target), mse_loss, MICROBATCHES)
    left = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    save_file({**left, "loss": loss}, Path(config["folder"]) / f"{config['number']}-{group.rank}.safetensors")
    take_turns(config, control, group.barrier, step)
    group.close()


def verify(folder: Path) -> None:
    """All schedules have the loss and the gradients of one process."""
    model, inputs, target = model_and_batch(Pace())
    loss = mse_loss(model(inputs), target)
    loss.backward()
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    for number, kind in enumerate(PipelineKind):
        gradients: dict[str, Tensor] = {}
        for rank in range(STAGES):
            left = load_file(folder / f"{number}-{rank}.safetensors")
            assert abs(float(left.pop("loss")) - float(loss.detach())) < 1e-6, f"{kind.value} has another loss"
            gradients |= left
        assert gradients.keys() == expected.keys(), f"{kind.value} lacks {expected.keys() ^ gradients.keys()}"
        for key, gradient in gradients.items():
            assert torch.allclose(gradient, expected[key], atol=1e-6), f"{kind.value} has another gradient of {key}"


def idle(blocks: Blocks, name: str) -> list[float]:
    """Of each block, the share of a step in which a stage does not do what `name` counts."""
    busy = [float(np.mean([each[name] for each in block])) for block in blocks]
    return [1 - mean / seconds for mean, seconds in zip(busy, slowest(blocks, "step"), strict=True)]


def judged(shares: Mapping[PipelineKind, Sequence[float]]) -> list[dict[str, Any]]:
    """All bars."""
    bars: list[dict[str, Any]] = []
    for kind, found in shares.items():
        if kind is not PipelineKind.ZERO_BUBBLE:
            formula = bubble_share(kind, STAGES, MICROBATCHES, CHUNKS[kind])
            apart = spread([abs(share - formula) for share in found])
            name = f"idle share, measured and formula apart, {kind.value}"
            bars.append({"bar": name, "at most": POINTS, "found": apart.plain(), "holds": holds(apart, at_most=POINTS)})
    less = ratio(shares[PipelineKind.ZERO_BUBBLE], shares[PipelineKind.ONE_F_ONE_B])
    name = "idle share, zero_bubble / one_f_one_b"
    return [*bars, {"bar": name, "at most": 1.0, "found": less.plain(), "holds": holds(less, at_most=1.0)}]


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "pipelines.json")
    options = parser.parse_args()
    variants = {kind.value: STAGES for kind in PipelineKind}
    with Launcher() as launcher:
        entry, config = f"{Path(__file__).stem}:worker", {"steps": options.steps}
        blocks = measured(launcher, entry, variants, config, options.blocks, verify)
    shares = {kind: idle(blocks[kind.value], "computing") for kind in PipelineKind}
    awake = {kind: idle(blocks[kind.value], "slept") for kind in PipelineKind}
    formulas = {kind: bubble_share(kind, STAGES, MICROBATCHES, CHUNKS[kind]) for kind in PipelineKind}
    for kind, found in shares.items():
        milliseconds = 1e3 * float(np.median(slowest(blocks[kind.value], "step")))
        print(
            f"{kind.value}: step {milliseconds:.1f} ms, idle {spread(found)}, not asleep {spread(awake[kind])}, "
            f"formula {formulas[kind]:.3f}"
        )
    bars = judged(shares)
    for bar in bars:
        print(f"{'holds ' if bar['holds'] else 'MISSED'}  {bar['bar']}: {bar['found']}, at most {bar['at most']}")
    stored = {
        "benchmark": "pipelines",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "bars": bars,
        "idle": {kind.value: found for kind, found in shares.items()},
        "not asleep": {kind.value: found for kind, found in awake.items()},
        "formulas": {kind.value: formula for kind, formula in formulas.items()},
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if stored["holds"] else 1)


if __name__ == "__main__":
    main()
