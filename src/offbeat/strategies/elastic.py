"""Every worker has a model of its own, tied by a spring to a centre that servers hold.

Workers step by themselves. Every few steps each takes its distance to the centre: a share of it pulls the worker back,
and the same share pulls the centre along. So workers may explore, but never get lost, and the centre is their moving
average. With momentum in the worker's optimizer this is EAMSGD.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD" (2015): equations 3 and 4 (synchronous),
algorithms 1 and 2 (asynchronous, and with momentum).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf, Spring
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.updater import ADD
from offbeat.strategies._base import Traits, require, require_servers
from offbeat.strategies.servers.driver import ServerDriver
from offbeat.strategies.servers.exchange import ServedWorker, StepHere
from offbeat.strategies.servers.parameter_row import ParameterRow
from offbeat.strategies.worker.exchange import Exchange, Exchanging

MOVING_RATE: Final = 0.9
"""By how much the centre moves to the workers' mean in an exchange of all, if no rho is given: the paper's beta."""


@dataclass(frozen=True)
class Elastic(Exchanging):
    """Every worker has a model of its own, tied by a spring to a centre that servers hold.

    Workers step by themselves with their own optimizer. Every `period` steps a worker and the centre move towards each
    other by alpha times their distance, where alpha is the learning rate times `rho`. Evaluations see the centre, and
    the centre is the model that a run leaves.
    """

    rho: float | None = None
    """How strong the spring is: alpha is the learning rate times this; if None, 0.9 over the number of workers."""
    period: int = 4
    """Steps between two exchanges with the centre."""
    shards: int = 1
    """Server processes that the centre is divided over."""
    replicas: int = 0
    """Further copies of every shard: with one, any server may die and nothing is lost."""
    asynchronous: bool = True
    """Whether each worker exchanges when it comes to it, or all exchange with the same centre."""

    promises = Traits(elastic=True)
    aliases: ClassVar = {"easgd": "elastic"}
    examples = ("elastic", "elastic(rho=5.0, period=10)", "elastic(period=1, asynchronous=False)")

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        require(self.rho is None or self.rho > 0, self, "rho", self.rho, "a spring pulls with more than 0")
        require(self.period >= 1, self, "period", self.period, "exchanges are at least 1 step apart")
        require_servers(self, self.shards, self.replicas)

    def servers(self, workers: int) -> tuple[int, int, Rule]:
        """Shards, further copies of each, and whether workers wait for each other."""
        del workers
        return self.shards, self.replicas, Rule(None if self.asynchronous else 0)

    def rhythm(self) -> RhythmOf:
        """An exchange with the centre every `period` steps."""
        return lambda _: Spring(self.period, self.asynchronous)

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        return _Tied(group, stopwatch, self)


class _Pull:
    """How strongly worker and centre pull each other; servers only add what is pushed to the centre."""

    def __init__(self, group: Group, settings: Elastic) -> None:
        self._group, self._settings = group, settings

    def check(self, optimizer: Optimizer) -> None:
        """Any optimizer will do, if the spring is not too strong for its learning rate."""
        if self._settings.rho is not None and not all("lr" in group for group in optimizer.param_groups):
            raise StrategyError(
                f"{self._settings} takes alpha as learning rate times rho, and {type(optimizer).__name__} has no "
                f"learning rate (no `lr` in its groups). Leave rho out."
            )
        for group in optimizer.param_groups:
            self._alpha(group)

    def runs(self, optimizer: Optimizer) -> tuple[str, tuple[dict[str, Any], ...]]:
        """Servers add."""
        del optimizer
        return ADD, ()

    def _alpha(self, group: Mapping[str, Any]) -> float:
        """The share of its distance to the centre that a worker moves in an exchange."""
        workers, asynchronous = len(self._group.membership.members), self._settings.asynchronous
        if self._settings.rho is None:
            return MOVING_RATE / workers
        alpha = float(group["lr"]) * self._settings.rho
        most = 1 if asynchronous else 1 / workers
        if alpha >= 1 or alpha > most:
            whose = "a worker" if asynchronous else f"{workers} workers at once"
            raise StrategyError(
                f"{self._settings}: with a learning rate of {float(group['lr']):g}, alpha = rate * rho is {alpha:g}, "
                f"and {whose} would throw the centre to the other side. Take a rho below {most / float(group['lr']):g}."
            )
        return alpha

    def alphas(self, optimizer: Optimizer, row: ParameterRow) -> list[float]:
        """For every parameter; one that no optimizer has never leaves the centre."""
        known = {id(p): self._alpha(group) for group in optimizer.param_groups for p in group["params"]}
        return [known.get(id(p), 0.0) for p in row.parameters]


class _Tied(ServedWorker):
    """Steps by itself, and now and then moves towards the centre and the centre towards it."""

    replicated = False
    keeps_apart = True

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Elastic) -> None:
        self._pull, self._steps = _Pull(group, settings), Spring(settings.period, settings.asynchronous)
        rule = Rule(None if settings.asynchronous else 0)
        super().__init__(group, stopwatch, settings, rule, self._steps, self._pull)
        self._moving: int | None = None

    def begin(self) -> None:
        """Put the centre on the servers, and start from it everywhere."""
        super().begin()
        if self.driver is not None:
            self.driver.row.values.copy_(self.driver.landing)

    def computed(self, driver: ServerDriver) -> StepHere:
        """If it is time, take the distance to the centre, and pull the centre; the worker itself moves after its step.

        So the step's gradient, the worker's move and the centre's are all taken at the same point, as in equations 3
        and 4.
        """
        driver.perform(self._steps.computed(self.link.clock).actions, partial(self._distance, driver))
        return StepHere(own=bool(self.examples), afterwards=partial(self._move, driver))

    def _distance(self, driver: ServerDriver) -> int:
        """The share of its distance to the centre that the worker is about to move; answers which slot has it."""
        row, queue, optimizer = driver.row, driver.queue, cast("Optimizer", self.optimizer)
        slot = queue.free_slot()
        torch.sub(row.values, driver.landing, out=queue.slots[slot])
        torch._foreach_mul_(queue.views[slot], self._pull.alphas(optimizer, row))  # pyright: ignore[reportPrivateUsage]
        self._moving = slot
        return slot

    def _move(self, driver: ServerDriver) -> None:
        """Move towards the centre."""
        slot, self._moving = self._moving, None
        if slot is not None:
            driver.row.values.sub_(driver.queue.slots[slot])

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, every worker has the centre; afterwards its own parameters again."""
        with super().averaged(models):
            if self.driver is None:
                yield
                return
            row = self.driver.row
            own = row.values.clone()
            row.values.copy_(self.driver.landing)
            try:
                yield
            finally:
                row.values.copy_(own)

    def own_state(self, driver: ServerDriver) -> dict[str, Any]:
        """How many steps were made; a worker's parameters are kept with its model."""
        return {**super().own_state(driver), "steps": self._steps.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the centre back; the worker has its own parameters already."""
        if self.driver is not None:
            self._steps.steps = int(state["steps"])
        super().load_state_dict(state)
