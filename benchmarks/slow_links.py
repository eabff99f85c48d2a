"""Training over slow links: four hosts at 100 Mbit/s each, and what compression, local steps and the dense ring take.

Claims, for the 10-million-parameter MLP on 4 workers in 4 network namespaces at 100 Mbit/s: a dense step takes at most
1.15 of computing plus bytes over the rate; every compressed step at most 1.2 of computing plus compressing plus its
bytes over the rate; and a period of `local(16)` likewise. Bytes are the payload through a worker's port, by the
formulas of the ring and of gathering; headers of packets, about 4 %, are not counted.

Every block makes a step of each variant, in an order that rotates; a block's time is the slowest worker's. Computing is
what a step without any exchange takes in the same block, on the same cores. `topk(0.01)` is there twice: the second
copy shows the noise. The simulator's time, from the same bytes, stands beside the measured one.

Then, without limits, how many steps each takes to a target on MNIST with the same seeds (`--data`, a folder with its
files); and one whole run of `topk(0.01)` to the target over the slow links. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import offbeat
from offbeat.bench import environment, holds, ratio
from offbeat.protocols.compression import Shapes, SumMethod
from offbeat.protocols.exchanges import sent_by
from offbeat.protocols.schedule import View
from offbeat.run.drive import WARM
from offbeat.runtime.compression.sums import CompressedSums
from offbeat.runtime.groups.group import DirectGroup, Group
from offbeat.runtime.hosts import Hosts, placed
from offbeat.runtime.launch import EVERYWHERE, Control, Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.simulate import Network, compressed_sum_time
from offbeat.simulate.predicted_step import exchange_of
from offbeat.strategies import Exchanging, Timing, combined, parse
from offbeat.strategies.compressors import Compressing
from offbeat.strategies.worker.capabilities import OptimizerHooks, StepHooks
from offbeat.strategies.worker.exchange import EveryBatch, Exchange, Pace, adopt
from offbeat.tasks.mnist import Mnist

RESULTS = Path(__file__).parent / "results"
WORKERS, RATE_TEXT, RATE = 4, "100Mbit", 100e6 / 8
BATCH, PERIOD, WARM_UP = 16, 16, 2
TIMEOUT = timedelta(seconds=300)
ALONE, DENSE, AGAIN, LOCAL = "computing", "allreduce", "allreduce + topk(0.01) again", f"allreduce + local({PERIOD})"
COMPRESSORS = (
    *("half", "bfloat", "quantize(8)", "quantize(4)", "quantize(2)", "sign", "topk(0.01)", "threshold(0.001)"),
    *("randomk(0.01)", "lowrank(4)"),
)
TARGET_VARIANTS = (
    DENSE,
    *(f"allreduce + {name}" for name in ("quantize(8)", "sign", "topk(0.01)", "lowrank(4)")),
    LOCAL,
)
THROTTLED = "allreduce + topk(0.01)"


def variants(compressors: Sequence[str]) -> tuple[str, ...]:
    """What is measured: always the dense step and the one that is there twice; the period of local steps with all."""
    asked = [f"allreduce + {name}" for name in compressors]
    more = [] if THROTTLED in asked else [THROTTLED]
    return (ALONE, DENSE, *asked, *more, AGAIN, *([LOCAL] if len(asked) == len(COMPRESSORS) else []))


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in ((784, 2048), (2048, 2048), (2048, 2048)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


class Wide(Mnist):
    """MNIST by the same MLP: what is learned to count steps to a target."""

    target = 0.88
    global_batch = 128
    epochs = 2
    evaluate_every = 20
    evaluate_batch = 500

    def model(self) -> nn.Module:
        """Grey levels between 0 and 1, then the MLP."""
        return nn.Sequential(_Grey(), mlp())

    def optimizer(self, params: Any) -> Optimizer:
        """Plain SGD: momentum multiplies what error feedback adds up."""
        return SGD(params, lr=self.rate)


class _Grey(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() / 255


class Variant:
    """A model of its own, trained in one way."""

    def __init__(self, text: str, group: Group) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = SGD(self.model.parameters(), lr=1e-3)
        random = torch.Generator().manual_seed(group.rank)
        self._inputs = torch.randn(BATCH, 784, generator=random)
        self._target = torch.randint(0, 10, (BATCH,), generator=random)
        strategy = combined(parse(DENSE if text == ALONE else text.removesuffix(" again")))
        self.exchange: Exchange = cast("Exchanging", strategy.exchange).connect(group, Stopwatch())
        self.exchange.compressions = cast("tuple[Compressing, ...]", strategy.compressions)
        when = cast("Timing | None", strategy.when)
        self._pace: Pace = when.pace(self.exchange) if when else EveryBatch(self.exchange)
        self._alone = text == ALONE
        self.steps = PERIOD if when else 1
        adopt(self.exchange, self.model)
        if isinstance(self._pace, StepHooks):
            self._pace.watch(self.optimizer)
        if isinstance(self.exchange, OptimizerHooks):
            self.exchange.attend(self.optimizer)

    def run(self) -> None:
        """A step, or a period of them."""
        for _ in range(self.steps):
            self._pace.begin(BATCH, BATCH * WORKERS, False)
            self.exchange.suspend(self._alone) if self._alone else None
            self.optimizer.zero_grad()
            cross_entropy(self.model(self._inputs), self._target).backward()
            self.optimizer.step()

    def account(self) -> dict[str, float]:
        """What compression has cost so far."""
        sums = [sums for sums in getattr(self.exchange, "_sums", ()) if isinstance(sums, CompressedSums)]
        figures = [account.figures for one in sums for account in one.accounts]
        return {name: sum(one[name] for one in figures) for name in ("letter_bytes", "coding_seconds")}


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One of the four: makes a step of each variant when it is its turn."""
    group = DirectGroup(where(), TIMEOUT, torch.device("cpu"))
    variants = {text: Variant(text, group) for text in config["variants"]}
    for variant in variants.values():
        variant.run()
    for block in range(-WARM_UP, config["blocks"]):
        order = np.roll(list(variants), -(block + WARM_UP))
        for text in order.tolist():
            variant = variants[text]
            before = variant.account()
            group.barrier("the next variant")
            start = time.perf_counter()
            variant.run()
            seconds = time.perf_counter() - start
            after = variant.account()
            if block >= 0:
                spent = {name: after[name] - before[name] for name in after}
                control.send({"variant": text, "block": block, "seconds": seconds, **spent})
    compared = [p.detach() for p in variants[DENSE].model.parameters()]
    apart = max(float((p - group.share(p.clone(), "comparing")).abs().max()) for p in compared)
    assert apart == 0.0, f"worker {group.rank} has other parameters than worker 0, by {apart}"
    for variant in variants.values():
        variant.exchange.close()
    group.close()


def measured(launcher: Launcher, variants: Sequence[str], blocks: int) -> dict[str, dict[int, dict[str, float]]]:
    """For every variant and block: the slowest worker's seconds, the most bytes, the longest compressing."""
    heard: dict[str, dict[int, dict[str, float]]] = {text: {} for text in variants}

    def hear(_: Role, message: Mapping[str, Any]) -> None:
        known = heard[message["variant"]].setdefault(message["block"], {})
        for name in ("seconds", "letter_bytes", "coding_seconds"):
            known[name] = max(known.get(name, 0.0), float(message[name]))

    with placed(Hosts.alike(WORKERS, RATE_TEXT)) as hosts, tempfile.TemporaryDirectory() as folder:
        with hosts.inside():
            store = serve_store(host=EVERYWHERE)
        config = {"variants": list(variants), "blocks": blocks}
        roles = [
            Role(
                "worker", rank, f"{Path(__file__).stem}:worker", config,
                worker_environment(rank, WORKERS, store.port, hosts.address, hosts.seat(rank)),
                Path(folder) / f"{rank}.log", threads=1, network=hosts.seat(rank).host.network,
            )
            for rank in range(WORKERS)
        ]  # fmt: skip
        launcher.run(roles, on_message=hear)
    return heard


def port_bytes(text: str, found: Mapping[str, float], shapes: Shapes) -> float:
    """Payload bytes through a worker's port in one exchange."""
    dense = sum(4 * int(np.prod(shape)) for shape in shapes)
    compressions = combined(parse(text.removesuffix(" again"))).compressions
    if not compressions:
        return _port_bytes(dense, SumMethod.REDUCE)
    form = cast("Any", compressions[0]).format()
    return _port_bytes(int(found["letter_bytes"]), form.way())


def _port_bytes(nbytes: int, way: SumMethod) -> int:
    view = View.of(WORKERS, range(WORKERS))
    return sent_by(*exchange_of(nbytes, way).part(WORKERS), view, rank=0)


def simulated(text: str, found: Mapping[str, float], shapes: Shapes) -> float:
    """What the simulator says of one exchange of these bytes on such links, in seconds."""
    dense = sum(4 * int(np.prod(shape)) for shape in shapes)
    compressions = combined(parse(text.removesuffix(" again"))).compressions
    way = cast("Any", compressions[0]).format().way() if compressions else SumMethod.REDUCE
    nbytes = int(found["letter_bytes"]) if compressions else dense
    return compressed_sum_time(nbytes, way, WORKERS, Network.parse(f"{RATE_TEXT},50us"))


def judged(heard: Mapping[str, Mapping[int, Mapping[str, float]]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Bars, and what was measured of each variant."""
    shapes = [tuple(p.shape) for p in mlp().parameters()]
    bars: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    computing = [one["seconds"] for _, one in sorted(heard[ALONE].items())]
    for text, blocks in heard.items():
        own = [one for _, one in sorted(blocks.items())]
        seconds = [one["seconds"] for one in own]
        figures[text] = {"seconds": float(np.median(seconds))}
        if text == ALONE:
            continue
        steps = PERIOD if text == LOCAL else 1
        wire = [port_bytes(text, one, shapes) / RATE for one in own]
        wanted = [steps * c + one["coding_seconds"] + w for c, one, w in zip(computing, own, wire, strict=True)]
        predicted = [
            steps * c + one["coding_seconds"] + simulated(text, one, shapes)
            for c, one in zip(computing, own, strict=True)
        ]
        found = ratio(seconds, wanted)
        figures[text] |= {
            "computing": steps * float(np.median(computing)),
            "compressing": float(np.median([one["coding_seconds"] for one in own])),
            "bytes over the rate": float(np.median(wire)),
            "predicted": float(np.median(predicted)),
            "measured / wanted": found.plain(),
        }
        if text != AGAIN:
            most = 1.15 if text == DENSE else 1.2
            what = "period" if text == LOCAL else "step"
            bars.append(
                {
                    "bar": f"{text}: {what} / (computing + compressing + bytes over the rate)",
                    "at most": most,
                    "found": found.plain(),
                    "holds": holds(found, at_most=most),
                }
            )
    again = [one["seconds"] for _, one in sorted(heard[AGAIN].items())]
    once = [one["seconds"] for _, one in sorted(heard[THROTTLED].items())]
    figures["noise: a second copy of topk(0.01)"] = ratio(again, once).plain()
    return bars, figures


def to_the_target(launcher: Launcher, data: Path, runs: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Steps to the target without limits, and one run over the slow links."""
    task = Wide(str(data), rate=0.2)
    steps: dict[str, list[int | None]] = {}
    fit: Callable[..., offbeat.Result] = offbeat.fit
    for text in TARGET_VARIANTS:
        for seed in seeds:
            result = fit(task, text, workers=WORKERS, seed=seed, out=runs / "free", launcher=launcher)
            steps.setdefault(text, []).append(result.steps if result.reached_target else None)
        print(f"{text:32} steps to {task.target}: {steps[text]}", flush=True)
    hosts = Hosts.alike(WORKERS, RATE_TEXT)
    slow = fit(task, THROTTLED, hosts=hosts, seed=seeds[0], out=runs / "slow", launcher=launcher)
    print(f"{THROTTLED} over {RATE_TEXT}: {slow.steps} steps, {slow.seconds:.1f} s, reached {slow.reached_target}")
    return {
        "target": task.target,
        "steps": steps,
        "throttled": {
            "strategy": THROTTLED,
            "steps": slow.steps,
            "seconds": slow.seconds_to_target,
            "reached": slow.reached_target,
            "verdict": slow.pays.get("words"),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15, help="0: leave the steps' times as they were, learn only")
    parser.add_argument("--data", type=Path, default=None, help="a folder with MNIST's files; without it no target")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--only", nargs="*", default=COMPRESSORS, help="compressors to measure; others stay as they were"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "slow_links.json")
    options = parser.parse_args()
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    results: dict[str, Any] = before.get("results", {})
    bars: list[dict[str, Any]] = before.get("bars", [])
    with Launcher((*WARM, "offbeat.tasks.mnist")) as launcher:
        if options.blocks:
            found, figures = judged(measured(launcher, variants(options.only), options.blocks))
            new = {bar["bar"] for bar in found}
            bars = [*(bar for bar in bars if bar["bar"] not in new), *found]
            results["slow links"] = {**results.get("slow links", {}), **figures}
            for text, found in results["slow links"].items():
                print(text, {k: v if isinstance(v, dict) else round(v, 3) for k, v in found.items()}, flush=True)
            store(options.out, bars, results)
        if options.data is not None:
            with tempfile.TemporaryDirectory() as runs:
                found = to_the_target(launcher, options.data, Path(runs), range(options.seeds))
            results["to the target"] = found
            reached = bool(found["throttled"]["reached"])
            bar = f"{THROTTLED} over slow links, to the target"
            bars = [one for one in bars if one["bar"] != bar]
            bars.append({"bar": bar, "at least": 1, "found": int(reached), "holds": reached})
            store(options.out, bars, results)
    if not all(bar["holds"] for bar in bars):
        sys.exit("a bar was missed")


def store(out: Path, bars: list[dict[str, Any]], results: dict[str, Any]) -> None:
    """Write what is known so far."""
    everything = all(bar["holds"] for bar in bars)
    known = {"environment": environment(), "bars": bars, "results": results}
    out.write_text(json.dumps({"benchmark": "slow_links", "holds": everything, **known}, indent=2) + "\n")


if __name__ == "__main__":
    main()
