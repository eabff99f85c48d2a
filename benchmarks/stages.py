"""Steps of pipeline(2) against its bound and against torch's pipelining on Gloo, interleaved in one run.

Claims, with 2 processes of 1 thread each, one forward and one backward in turn (1F1B), 8 microbatches, on transformers
of width 64, 128 and 256 that are cut in half: a step takes at most 1.05 of its bound at width 256 and 1.15 at 64, and
as a geometric mean over the widths at most 0.9 of the time of `torch.distributed.pipelining` (`Schedule1F1B`) on Gloo.

The bound is what computing takes, times (m + p - 1) / m for m microbatches and p stages: both processes run forward and
backward of their own half for all microbatches at the same time, without a message. Freed memory is kept there, as our
backend does. A step is forward and backward of a batch, without the optimizer. There are two copies of torch's variant:
against each other they show the noise floor, and their mean is what we are compared with. Losses and gradients are
compared with those of one process before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

import offbeat
from _blocks import Block
from _turns import Blocks, measured, slowest, take_turns
from offbeat.bench import environment, geometric_mean, holds, ratio
from offbeat.runtime.launch import Control, Launcher
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.system.malloc import keep_freed_memory

RESULTS = Path(__file__).parent / "results"
TIMEOUT = timedelta(seconds=120)
OURS, THEIRS, AGAIN, COMPUTING = "pipeline(2)", "torch", "torch again", "computing"
STAGES, MICROBATCHES, LAYERS = 2, 8, 8
SHAPE = 16, 64
"""Examples in a batch, and places in each."""
STEPS = {64: 8, 128: 3, 256: 1}
"""Steps in a block of a variant, by width."""
BOUNDS = {64: 1.15, 256: 1.05}
AGAINST_TORCH = 0.9
OVER = (MICROBATCHES + STAGES - 1) / MICROBATCHES
Step = Callable[[], float | None]


def halves(width: int) -> nn.Sequential:
    """The model: its first and its second half."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(*(Block(width, 8) for _ in range(LAYERS // STAGES))) for _ in range(STAGES)))


def batch(width: int) -> tuple[Tensor, Tensor]:
    """Inputs and target."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(*SHAPE, width, generator=random), torch.randn(*SHAPE, width, generator=random)


@contextmanager
def joined(name: str, width: int, model: nn.Sequential) -> Generator[tuple[Callable[[], object], Step]]:
    """Join the other process of a variant: a barrier, and a step that returns the loss where it is known."""
    inputs, target = batch(width)
    rank = where().rank
    if name == OURS:
        with offbeat.init(f"pipeline({STAGES}, microbatches={MICROBATCHES})") as team:
            # The optimizer never steps.
            team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            train = team.pipeline(model, mse_loss, list(model))
            yield team.group.direct.barrier, lambda: float(train(inputs, target))
        return
    dist.init_process_group("gloo", timeout=TIMEOUT)
    if name == COMPUTING:
        keep_freed_memory()
        yield dist.barrier, lambda: computing(model[rank], inputs, target, last=rank == STAGES - 1)
    else:
        stage = PipelineStage(model[rank], rank, STAGES, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)

        def scheduled() -> float | None:
            if rank == 0:
                schedule.step(inputs, return_outputs=False)
                return None
            losses: list[Tensor] = []
            schedule.step(target=target, losses=losses, return_outputs=False)
            return float(torch.stack(losses).mean())

        yield dist.barrier, scheduled
    dist.destroy_process_group()


def computing(half: nn.Module, inputs: Tensor, target: Tensor, *, last: bool) -> None:
    """Forward and backward of a half for each microbatch, with values of its own in place of those that would come."""
    for given, wanted in zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        output = half(given.detach().requires_grad_(last))
        if last:
            (mse_loss(output, wanted) / MICROBATCHES).backward()
        else:
            output.backward(wanted)


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One process of a variant; of the first step it leaves the loss and the gradients of its half."""
    name, width = config["variant"], config["width"]
    model = halves(width)
    with joined(name, width, model) as (meet, step):
        loss = step()
        half = f"{where().rank}."
        left = {
            key: p.grad.clone() for key, p in model.named_parameters() if key.startswith(half) and p.grad is not None
        }
        if loss is not None:
            left["loss"] = torch.tensor(loss)
        save_file(left, Path(config["folder"]) / f"{config['number']}-{where().rank}.safetensors")

        def timed() -> None:
            model.zero_grad()
            step()

        take_turns(config, control, meet, timed)


def compared(folder: Path, width: int, variants: Sequence[str]) -> float:
    """All variants have the loss and the gradients of one process; returns how far apart they are, of the largest."""
    model, (inputs, target) = halves(width), batch(width)
    loss = mse_loss(model(inputs), target)
    loss.backward()
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}
    largest, apart = max(float(p.abs().max()) for key, p in expected.items() if key != "loss"), 0.0
    for number, name in enumerate(variants):
        if name != COMPUTING:
            left = [load_file(folder / f"{number}-{rank}.safetensors") for rank in range(STAGES)]
            both = left[0] | left[1]
            assert both.keys() == expected.keys(), f"{name} lacks {expected.keys() ^ both.keys()}"
            apart = max(apart, *(float((both[key] - value).abs().max()) / largest for key, value in expected.items()))
    assert apart < 1e-4, f"gradients differ by {apart} of the largest"
    return apart


def judged(blocks: Mapping[int, Mapping[str, Blocks]]) -> list[dict[str, Any]]:
    """All bars."""
    bars: list[dict[str, Any]] = []
    for width in sorted(BOUNDS.keys() & blocks.keys()):
        most = BOUNDS[width]
        bound = [OVER * seconds for seconds in slowest(blocks[width][COMPUTING])]
        over = ratio(slowest(blocks[width][OURS]), bound)
        name = f"1F1B, width {width}, {OURS} / bound"
        bars.append({"bar": name, "at most": most, "found": over.plain(), "holds": holds(over, at_most=most)})
    pairs = [(slowest(each[OURS]), torchs(each)) for each in blocks.values()]
    mean = geometric_mean(pairs)
    name = f"1F1B, {OURS} / torch.distributed.pipelining on Gloo, mean over widths"
    verdict = holds(mean, at_most=AGAINST_TORCH)
    return [*bars, {"bar": name, "at most": AGAINST_TORCH, "found": mean.plain(), "holds": verdict}]


def torchs(blocks: Mapping[str, Blocks]) -> list[float]:
    """The mean of both copies of torch's variant."""
    return [(a + b) / 2 for a, b in zip(slowest(blocks[THEIRS]), slowest(blocks[AGAIN]), strict=True)]


def summary(blocks: Mapping[str, Blocks]) -> dict[str, Any]:
    """Medians and ratios at one width."""
    return {
        "milliseconds": {name: 1e3 * float(np.median(slowest(own))) for name, own in blocks.items()},
        "bound": 1e3 * OVER * float(np.median(slowest(blocks[COMPUTING]))),
        f"{OURS} / torch": ratio(slowest(blocks[OURS]), torchs(blocks)).plain(),
        "noise": ratio(slowest(blocks[AGAIN]), slowest(blocks[THEIRS])).plain(),
        "blocks": len(blocks[OURS]),
    }


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--widths", type=int, nargs="*", default=list(STEPS), help="all, for the bars")
    parser.add_argument("--out", type=Path, default=RESULTS / "stages.json")
    options = parser.parse_args()
    blocks: dict[int, dict[str, Blocks]] = {}
    apart: dict[int, float] = {}
    variants = {OURS: STAGES, THEIRS: STAGES, COMPUTING: STAGES, AGAIN: STAGES}
    with Launcher() as launcher:
        for width in options.widths:

            def verify(folder: Path, width: int = width) -> None:
                apart[width] = compared(folder, width, list(variants))

            entry, config = f"{Path(__file__).stem}:worker", {"width": width, "steps": STEPS[width]}
            blocks[width] = measured(launcher, entry, variants, config, options.blocks, verify)
            print(f"width {width}: {summary(blocks[width])}", flush=True)
    bars = judged(blocks)
    for bar in bars:
        print(f"{'holds ' if bar['holds'] else 'MISSED'}  {bar['bar']}: {bar['found']}, at most {bar['at most']}")
    stored = {
        "benchmark": "stages",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "bars": bars,
        "results": {f"width {width}": summary(each) for width, each in blocks.items()},
        "largest difference of gradients, of the largest": max(apart.values()),
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if stored["holds"] else 1)


if __name__ == "__main__":
    main()
