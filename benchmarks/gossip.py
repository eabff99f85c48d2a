"""Synchronous ring gossip on 4 workers of one host, its models mixed in shared memory, against messages over Gloo.

Claim: a step with the ten-million-parameter MLP takes at most 0.6 of its time over Gloo's messages. Both train in the
same processes, in turn within a block, each worker on its own data, and have the same models before anything is timed.
Our own steps are timed twice in a block, which shows the noise. A block's time is the slowest worker's; one thread per
worker.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from collectives import RESULTS, Bar
from offbeat.bench import environment, ratio
from offbeat.runtime.backend._point_to_point import GlooMessages
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies import Exchanging, parse
from offbeat.strategies.worker.capabilities import OptimizerHooks
from offbeat.strategies.worker.exchange import adopt
from training import TIMEOUT, mlp


def gossip_step(over_gloo: bool) -> tuple[nn.Module, Callable[[], None]]:
    """A model and its training step with ring gossip, which mixes in shared memory or by messages over Gloo."""
    group = DirectGroup(where(), TIMEOUT, torch.device("cpu"))
    backend: Any = group.process_group
    if over_gloo:
        backend._messages = GlooMessages(backend._gloo, backend._stock, group.rank, range(group.size), None)
        backend.local = None  # So models are sent to the neighbours.
    torch.manual_seed(0)
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-3)
    exchange = cast("Exchanging", parse("gossip(ring)")).connect(group, Stopwatch())
    adopt(exchange, model)
    assert isinstance(exchange, OptimizerHooks)
    exchange.attend(optimizer)
    exchange.weigh(16, 16 * group.size)
    torch.manual_seed(1 + group.rank)  # Each worker has its own data, so that mixing changes something.
    inputs, target = torch.randn(16, 784), torch.randint(0, 10, (16,))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()

    return model, step


def gossiping(config: Mapping[str, Any], control: Control) -> None:
    """One worker: blocks of steps of both kinds, and of the first kind again, in turn."""
    kinds = [gossip_step(over_gloo) for over_gloo in (False, True, False)]
    for block in range(-2, config["blocks"]):
        if block == 0:
            ours, gloo, _ = (parameters_to_vector(model.parameters()) for model, _ in kinds)
            torch.testing.assert_close(ours, gloo, rtol=1e-4, atol=1e-5)
        for kind, (_, step) in enumerate(kinds):
            start = time.perf_counter()
            for _ in range(2):
                step()
            if block >= 0:
                control.send({"kind": kind, "block": block, "seconds": (time.perf_counter() - start) / 2})


def gossip_bar(blocks: int) -> tuple[dict[str, Any], Bar]:
    """Steps of 4 workers that mix with their neighbours, against the same over Gloo's messages."""
    times: dict[tuple[int, int], float] = {}

    def heard(_: Role, message: Mapping[str, Any]) -> None:
        place = message["kind"], message["block"]
        times[place] = max(times.get(place, 0.0), message["seconds"])

    with Launcher() as launcher, tempfile.TemporaryDirectory() as folder:
        store = serve_store()
        roles = [
            Role(
                *("worker", rank, f"{Path(__file__).stem}:gossiping", {"blocks": blocks}),
                *(worker_environment(rank, 4, store.port), Path(folder) / f"{rank}.log"),
                threads=1,
            )
            for rank in range(4)
        ]
        launcher.run(roles, on_message=heard)
    ours, gloo, again = ([times[kind, block] for block in range(blocks)] for kind in range(3))
    found = {
        "milliseconds, ours and over gloo": [1e3 * float(np.median(each)) for each in (ours, gloo)],
        "ours again / ours (noise)": ratio(again, ours).plain(),
    }
    return found, Bar("4 workers, gossip(ring), mlp: step / over gloo's messages", ratio(ours, gloo), at_most=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS / "gossip.json")
    options = parser.parse_args()
    found, bar = gossip_bar(options.blocks)
    print(bar)
    stored = {"benchmark": "gossip", "holds": bar.holds, "environment": environment(), "bars": [bar.plain()]}
    options.out.write_text(json.dumps(stored | {"results": found}, indent=2) + "\n")
    if not bar.holds:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()
