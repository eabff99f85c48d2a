"""Variants of a step that take turns: each has its own processes, which sleep while it is not their turn.

A block times every variant for some steps, in an order that rotates from block to block; the first blocks do not count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment

WARM_UP = 2
"""Blocks that do not count."""
PATIENCE = timedelta(seconds=900)

Figures = Mapping[str, float]
Blocks = list[list[Figures]]
"""For each block, the figures of each process of a variant."""


def take_turns(
    config: Mapping[str, Any], control: Control, meet: Callable[[], object], step: Callable[[], Any]
) -> None:
    """In a worker: time blocks of steps when it is the variant's turn. What `step` returns is added to the figures."""
    turns = dist.TCPStore("127.0.0.1", config["turns"], is_master=False, timeout=PATIENCE)
    control.send({"ready": config["variant"]})
    for block, turn in enumerate(config["own turns"], -WARM_UP):
        turns.wait([f"turn {turn}"])
        meet()
        figures: list[Figures] = []
        start = time.perf_counter()
        for _ in range(config["steps"]):
            began = time.perf_counter()
            further: Figures = step() or {}
            figures.append({"step": time.perf_counter() - began, **further})
        seconds = (time.perf_counter() - start) / config["steps"]
        meet()
        medians = {name: float(np.median([each[name] for each in figures])) for name in figures[0]}
        if block >= 0:
            control.send({"variant": config["variant"], "block": block, "figures": {**medians, "seconds": seconds}})
        if turns.add(f"done {turn}", 1) == config["size"]:
            turns.set(f"turn {turn + 1}", "")


def measured(
    launcher: Launcher,
    entry: str,
    variants: Mapping[str, int],
    config: Mapping[str, Any],
    blocks: int,
    verify: Callable[[Path], object],
) -> dict[str, Blocks]:
    """The figures of all variants, given with their numbers of processes, once `verify` has seen what they left.

    A worker finds in its configuration a `folder` to leave it in, its `variant` and the variant's `number` and `size`.
    """
    heard: dict[str, list[list[Figures]]] = {name: [[] for _ in range(blocks)] for name in variants}
    ready: list[str] = []
    turns, count = serve_store(), len(variants)
    with tempfile.TemporaryDirectory() as folder:

        def hear(_: Role, message: Mapping[str, Any]) -> None:
            if "figures" in message:
                heard[message["variant"]][message["block"]].append(message["figures"])
                return
            ready.append(message["ready"])
            if len(ready) == sum(variants.values()):
                verify(Path(folder))
                turns.set("turn 0", "")

        roles: list[Role] = []
        stores = [serve_store() for _ in variants]
        for number, (name, size) in enumerate(variants.items()):
            # In round r, the variant that comes at place k is number (r + k) of all, so that the order rotates.
            own = [r * count + (number - r) % count for r in range(blocks + WARM_UP)]
            settings = {"variant": name, "number": number, "size": size, "folder": folder, "turns": turns.port}
            roles += [
                Role(
                    "worker",
                    len(roles) + rank,
                    entry,
                    {**config, **settings, "own turns": own},
                    worker_environment(rank, size, stores[number].port),
                    Path(folder) / f"{number}-{rank}.log",
                    threads=1,
                )
                for rank in range(size)
            ]
        launcher.run(roles, on_message=hear)
    return heard


def slowest(blocks: Iterable[Sequence[Figures]], name: str = "seconds") -> list[float]:
    """Of each block, the figure of the slowest process."""
    return [max(each[name] for each in block) for block in blocks]
