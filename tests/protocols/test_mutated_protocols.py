"""One wrong line in what servers and workers decide by, and both the simulator and a real run show it.

The line is changed in the class that the simulator and the run share. The run is one of real sockets, clocks and
tensors: a coordinator, a server and two workers, each in a thread of its own, so that the change reaches all of them.
Worker 1 takes longer over each step than worker 0, so that who waits for whom can be told from the result.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.pacing import Pacing
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.worker.rhythm import Eagerly, Lazily, PushAndFetch
from offbeat.runtime.groups.coordinated_group import CoordinatedGroup
from offbeat.runtime.run.rank_environment import Place
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.coordination import Coordination
from offbeat.runtime.servers.plan import ServerPlan
from offbeat.runtime.servers.process import serve
from offbeat.simulate.servers.training import drive
from offbeat.strategies import parse

STEPS = 20
SECONDS = (0.01, 0.06)
"""That a step of each worker takes."""
RATE = 0.01


@dataclass(frozen=True)
class Figures:
    """What a run, real or simulated, says of who waited and of what was exchanged."""

    stalest: int
    """Steps: the oldest values that any step was computed from."""
    applied: int
    """Pushes that were used."""
    late: int
    bias: float = 0.0


@dataclass(frozen=True)
class Broken:
    """A wrong line of a method, the strategy that goes by it, and what holds of every run unless it is wrong."""

    owner: type
    method: str
    right: str
    wrong: str
    strategy: str
    holds: Callable[[Figures], bool]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Make the line wrong."""
        text = textwrap.dedent(inspect.getsource(getattr(self.owner, self.method)))
        assert text.count(self.right) == 1, f"{self.right!r} is not one line of {self.owner.__name__}.{self.method}"
        known = dict(vars(sys.modules[self.owner.__module__]))
        exec(text.replace(self.right, self.wrong), known)  # noqa: S102
        patch.setattr(self.owner, self.method, known[self.method])


def simulated(strategy: str, _: Path) -> Figures:
    """In virtual time."""
    exchange: Any = parse(strategy)
    paced = drive(exchange.servers(2)[2], np.tile(SECONDS, (STEPS, 1)), None, exchange.rhythm())
    return Figures(len(paced.staleness) - 1, paced.pushes - paced.late, paced.late)


class Nobody:
    """A launcher that is told nothing."""

    def send(self, _: Any) -> None: ...


def work(strategy: str, plan: ServerPlan, rank: int) -> tuple[dict[str, Any], float]:
    """One worker, from its first step to its last: its figures, and what it has learned."""
    group = CoordinatedGroup(Place(rank=rank), timedelta(seconds=60), plan)
    exchange: Any = parse(strategy)
    worker = exchange.connect(group, Stopwatch())
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    worker.install(model)
    worker.attend(optimizer)
    worker.begin()
    done = 0
    while done < STEPS:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        time.sleep(SECONDS[rank])
        optimizer.step()
        done += 1 + worker.passed_over()
    with worker.averaged([model]):
        bias = float(model.bias.detach())
    figures = worker.figures()
    worker.close()
    group.close()
    return figures, bias


def run(strategy: str, folder: Path) -> Figures:
    """On sockets and a real clock."""
    exchange: Any = parse(strategy)
    folder.mkdir(mode=0o700)
    plan = ServerPlan(workers=2, shards=1, replicas=0, rule=exchange.servers(2)[2], folder=str(folder))
    config = {"plan": plan.plain(), "shard": 0, "replica": 0, "disturb": [], "seed": 0}
    with Coordination(plan) as coordination:
        server = threading.Thread(target=serve, args=(config, Nobody()), daemon=True)
        server.start()
        try:
            with ThreadPoolExecutor(2) as workers:
                told = list(workers.map(partial(work, strategy, plan), range(2)))
        finally:
            coordination.ended("server 0.0")  # It is told that it is out at its next sign of life.
            server.join(timeout=30)
    pushes = sum((Counter(figures["pushes"]) for figures, _ in told), Counter[str]())
    stalest = max(int(age) for figures, _ in told for age in figures["staleness"])
    return Figures(stalest, pushes["applied"], pushes["late"], told[0][1])


BSP = Broken(
    Pacing,
    "is_complete",
    right="if self.clocks.minimum > self.completed:",
    wrong="if self.clocks.count(self.completed) < len(self.clocks):",
    strategy="server(consistency=bsp)",
    holds=lambda seen: seen.late == 0,
)
SSP = Broken(
    Rule,
    "needed",
    right="max(0, clock - self.bound)",
    wrong="max(0, clock - self.bound - 3)",
    strategy="server(consistency=ssp(2))",
    holds=lambda seen: seen.stalest <= 2,
)
DEADLINE = Broken(
    Pacing,
    "expire",
    right="self.overdue = step == self.completed",
    wrong="self.overdue = step < self.completed",
    strategy="server(consistency=deadline(0.03))",
    holds=lambda seen: seen.late > 0,
)
DROP_SLOWEST = Broken(
    Rule,
    "enough",
    right="workers - self.drop - self.coded",
    wrong="workers - self.coded",
    strategy="server(consistency=drop_slowest(1))",
    holds=lambda seen: seen.late > 0,
)
DOWNPOUR = Broken(
    PushAndFetch,
    "computed",
    right="self.steps % self._push == 0",
    wrong="self.steps % (self._push - 1) == 0",
    strategy="downpour(push=5, fetch=5)",
    holds=lambda seen: seen.applied == 2 * STEPS // 5,
)
LAZY = Broken(
    Lazily,
    "read",
    right="self._complete = complete",
    wrong="self._complete = complete + 3",
    strategy="server(consistency=ssp(2))",
    holds=lambda seen: seen.stalest <= 2,
)
EAGER = Broken(
    Eagerly,
    "computed",
    right="return _PUSH_AND_TAKE",
    wrong="return _PUSH_AND_REUSE",
    strategy="server(consistency=ssp(2, eager))",
    holds=lambda seen: seen.stalest <= 2,
)
NAMES = ["bsp", "ssp", "deadline", "drop_slowest", "downpour", "lazy reads", "eager reads"]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [BSP, SSP, DEADLINE, DROP_SLOWEST, DOWNPOUR, LAZY, EAGER], ids=NAMES)
def test_a_wrong_line_shows_in_the_simulator_and_in_a_real_run(
    broken: Broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_it_is = [play(broken.strategy, tmp_path / "right") for play in (simulated, run)]
    assert all(map(broken.holds, as_it_is)), as_it_is
    broken.install(monkeypatch)
    changed = [play(broken.strategy, tmp_path / "wrong") for play in (simulated, run)]
    assert not any(map(broken.holds, changed)), changed


SHARD = Broken(
    Shard,
    "apply",
    right="Update(self.version, 1 / weight, self._sum.settings, workers=workers)",
    wrong="Update(self.version, 2 / weight, self._sum.settings, workers=workers)",
    strategy="server(consistency=bsp)",
    holds=lambda seen: seen.bias == pytest.approx(-STEPS * RATE),
)


@pytest.mark.slow
def test_a_wrong_line_of_the_shard_shows_in_the_numbers_of_a_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator has no numbers; worlds of machines have (`test_server_machines`). Every step's gradient is 1."""
    assert SHARD.holds(run(SHARD.strategy, tmp_path / "right"))
    SHARD.install(monkeypatch)
    assert not SHARD.holds(run(SHARD.strategy, tmp_path / "wrong"))
