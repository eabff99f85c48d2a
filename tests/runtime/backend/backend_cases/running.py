"""One team of processes that runs many cases: each rank's verdict on each case reaches the test.

Ranks agree on verdicts through the launcher's store, not through the backend that is tried. After a case that failed
anywhere the team starts again with a new world, so that one failure does not drag the cases after it along.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import json
import os
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.runtime.backend import _host_discovery
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment

BACKEND = os.environ.get("OFFBEAT_TESTED_BACKEND", "offbeat")
"""Set to gloo to see that the cases ask no more than what Gloo does."""
PATIENCE = timedelta(seconds=20)
LONGEST = 30.0
"""Seconds that a case may take before its process ends itself, with every thread's stack in its log."""
ENTRY = "backend_cases.running:run"
PREFIX = "case_"
BEYOND = "case_beyond_gloo_"
"""Cases that Gloo refuses or gets wrong."""

Case = Callable[["World"], None]


class World:
    """What a case has: its rank, a seedable source of everybody's tensors, and a digest that all ranks must share."""

    def __init__(self, backend: str, timeout: timedelta = PATIENCE) -> None:
        self.backend = backend
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.timeout = timeout
        self.store, *_ = next(iter(dist.rendezvous("env://")))
        self.store.set_timeout(timedelta(seconds=60))
        self.digest = hashlib.sha256()
        self._worlds = 0
        self._meetings = 0

    @property
    def ranks(self) -> range:
        """All ranks of the world."""
        return range(self.size)

    def open(self, timeout: timedelta | None = None) -> None:
        """Start the default group anew, under a name of its own in the store."""
        self._worlds += 1
        store = dist.PrefixStore(f"world-{self._worlds}", self.store)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout or self.timeout
        )

    def close(self) -> None:
        """End every group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def meet(self, word: str = "") -> list[str]:
        """What every rank says, told through the store: a barrier that the backend under test has no part in."""
        self._meetings += 1
        self.store.set(f"meeting-{self._meetings}-{self.rank}", json.dumps(word))
        return [json.loads(self.store.get(f"meeting-{self._meetings}-{rank}")) for rank in self.ranks]

    def shared(self, *tensors: Tensor) -> None:
        """Add results that must have the same bits on every rank."""
        for tensor in tensors:
            self.digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What a rank brings: random, and known to every rank without asking."""
    random = torch.Generator().manual_seed(seed * 1009 + rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=random) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=random, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)
    return torch.randint(1, 6, shape, generator=random).to(dtype)


def reduced(operation: dist.ReduceOp.RedOpType, parts: list[Tensor]) -> Tensor:
    """The reduction computed here, in the order of the ranks."""
    steps: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.AVG: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    total = parts[0].clone()
    for part in parts[1:]:
        total = steps[operation](total, part)
    return total / len(parts) if operation == dist.ReduceOp.AVG else total


def same(found: Tensor, expected: Tensor, what: object = "") -> None:
    """Equal up to the rounding that an order of summation may cost."""
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, not {expected.dtype}"
    loose = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.complex64: 1e-5}
    tolerance = loose.get(found.dtype, 1e-12 if found.dtype.is_floating_point or found.dtype.is_complex else 0)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def run(config: Mapping[str, Any], control: Control) -> None:
    """One rank: all cases of a module, each with its verdict."""
    module = importlib.import_module(f"backend_cases.{config['module']}")
    world = World(config["backend"])
    if hosts := config["hosts"]:
        _host_discovery.host_identity = lambda: (
            f"host {hosts[world.rank]}"
        )  # Its own copy: the process ends with the test.
    world.open()
    for name in config["only"] or cases_of(config["module"]):
        error, digest = attempt(world, getattr(module, PREFIX + name))
        control.send({"case": name, "rank": world.rank, "error": error, "digest": digest})
    world.close()


def attempt(world: World, case: Case) -> tuple[str, str]:
    """A case's verdict here (empty if it went well), and the digest of what all ranks must share."""
    world.digest = hashlib.sha256()
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    try:
        case(world)
        error = ""
    except Exception:
        error = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    digest = world.digest.hexdigest()
    verdicts = [word.split("|", 1) for word in world.meet(f"{digest}|{error}")]
    if any(said for _, said in verdicts):
        world.close()
        world.open()
    elif len({theirs for theirs, _ in verdicts}) > 1:
        error = f"the ranks' results differ in their bits: {[theirs[:8] for theirs, _ in verdicts]}"
    return error, digest


def cases_of(module: str) -> list[str]:
    """The names of a module's cases, in the order they are written."""
    names = [name for name in vars(importlib.import_module(f"backend_cases.{module}")) if name.startswith(PREFIX)]
    return [name.removeprefix(PREFIX) for name in names if BACKEND != "gloo" or not name.startswith(BEYOND)]


def roles_for(
    folder: Path, port: int, size: int, entry: str, config: Mapping[str, Any], native: bool = True
) -> list[Role]:
    """A team of ranks that all run one entry; without `native`, collectives are interpreted."""
    return [
        Role(
            kind="worker",
            rank=rank,
            entry=entry,
            config={"backend": BACKEND, **config},
            environment={**worker_environment(rank, size, port), "OFFBEAT_NATIVE": "1" if native else "0"},
            log=folder / f"{rank}.log",
            threads=1,
        )
        for rank in range(size)
    ]


def digests_of(
    launcher: Launcher, folder: Path, module: str, size: int, *only: str, hosts: str = "", native: bool = True
) -> dict[str, str]:
    """Run a module's cases on a team; fails with every rank's traceback of every case that did not go well.

    `hosts` has a letter for each rank: ranks with different ones take each other for being on different hosts.
    """
    store = serve_store()
    verdicts: dict[str, dict[int, str]] = {}
    digests: dict[str, str] = {}

    def note(_: Role, message: Mapping[str, Any]) -> None:
        verdicts.setdefault(message["case"], {})[message["rank"]] = message["error"]
        digests[message["case"]] = message["digest"]

    config = {"module": module, "only": only, "hosts": hosts}
    launcher.run(roles_for(folder, store.port, size, ENTRY, config, native), on_message=note)
    assert verdicts, "no case was run"
    bad = [
        f"== {name}, rank {rank} of {size}\n{verdicts[name].get(rank, 'never told')}"
        for name in verdicts
        for rank in range(size)
        if verdicts[name].get(rank, "never told")
    ]
    assert not bad, "\n".join(bad)
    return digests
