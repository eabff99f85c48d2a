"""Elastic averaging: every worker has a model of its own, tied by a spring to a centre that servers hold.

With momentum in the worker's optimizer this is EAMSGD.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD" (2015): equations 3 and 4 (synchronous),
algorithms 1 and 2 (asynchronous, and with momentum).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, cast

import torch
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf, Spring
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.updater import ADD
from offbeat.strategies._base import Traits
from offbeat.strategies.servers.driver import ServerDriver
from offbeat.strategies.servers.exchange import PushWorker, ServerExchanging, StepHere
from offbeat.strategies.servers.optimizer import Groups
from offbeat.strategies.worker.exchange import Exchange

MOVING_RATE: Final = 0.9
"""How far the centre moves to the workers' mean when all exchange, if rho is None: the paper's beta."""


@dataclass(frozen=True)
class Elastic(ServerExchanging):
    """Every worker has a model of its own, tied by a spring to a centre that servers hold.

    Workers step independently with their own optimizer. Every `period` steps a worker and the centre move towards each
    other by alpha times their distance, where alpha is the learning rate times `rho`. Evaluations use the centre, and a
    run saves the centre.
    """

    rho: float | None = None
    """Strength of the spring: alpha is the learning rate times this; if None, 0.9 over the number of workers."""
    period: int = 4
    """Steps between two exchanges with the centre."""
    shards: int = 1
    """Number of servers that the centre is divided over."""
    replicas: int = 0
    """Further copies of every shard: with one, any server may die and nothing is lost."""
    asynchronous: bool = True
    """Whether each worker exchanges at its own time, or all exchange with the same centre."""

    promises = Traits(elastic=True)
    aliases: ClassVar = {"easgd": "elastic"}
    examples = ("elastic", "elastic(rho=5.0, period=10)", "elastic(period=1, asynchronous=False)")
    _ranges = (
        ("rho", lambda rho: rho is None or rho > 0, "a spring pulls with more than 0"),
        ("period", lambda steps: steps >= 1, "exchanges are at least 1 step apart"),
    )

    @property
    def rule(self) -> Rule:
        """Whether workers wait for each other."""
        return Rule(None if self.asynchronous else 0)

    def rhythm(self) -> RhythmOf:
        """An exchange with the centre every `period` steps."""
        return lambda _: Spring(self.period, self.asynchronous)

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        return ElasticWorker(group, stopwatch, self)


class ElasticWorker(PushWorker):
    """Steps independently; every few steps it and the centre move towards each other. Servers only add."""

    replicated = False
    keeps_apart = True

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Elastic) -> None:
        self._settings, self._steps = settings, Spring(settings.period, settings.asynchronous)
        super().__init__(group, stopwatch, settings, self._steps)
        self._moving: int | None = None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Accept any optimizer, if the spring is not too strong for its learning rate."""
        if self._settings.rho is not None and not all("lr" in group for group in optimizer.param_groups):
            raise StrategyError(
                f"{self._settings} takes alpha as learning rate times rho, and {type(optimizer).__name__} has no "
                f"learning rate (no `lr` in its groups). Omit rho."
            )
        for group in optimizer.param_groups:
            self._alpha(group)

    def server_optimizer(self, optimizer: Optimizer) -> tuple[str, Groups]:
        """Servers add what is pushed to the centre."""
        del optimizer
        return ADD, ()

    def _alpha(self, group: Mapping[str, Any]) -> float:
        """The share of its distance to the centre that a worker moves in an exchange."""
        workers, asynchronous = len(self.group.membership.members), self._settings.asynchronous
        if self._settings.rho is None:
            return MOVING_RATE / workers
        alpha = float(group["lr"]) * self._settings.rho
        most = 1 if asynchronous else 1 / workers
        if alpha >= 1 or alpha > most:
            moved = "a worker" if asynchronous else f"{workers} workers at once"
            raise StrategyError(
                f"{self._settings}: with a learning rate of {float(group['lr']):g}, alpha = rate * rho is {alpha:g}, "
                f"and {moved} would move the centre beyond its target. Use a rho below {most / float(group['lr']):g}."
            )
        return alpha

    def begin(self) -> None:
        """Put the centre on the servers, and start from it everywhere."""
        super().begin()
        if self.driver is not None:
            self.driver.row.values.copy_(self.driver.landing)

    def computed(self, driver: ServerDriver) -> StepHere:
        """If due, compute the distance to the centre, and move the centre; the worker itself moves after its step.

        So the step's gradient, the worker's move and the centre's are all computed at the same point, as in equations 3
        and 4.
        """
        driver.perform(self._steps.computed(self.link.clock).actions, partial(self._distance, driver))
        return StepHere(own=bool(self.examples), afterwards=partial(self._move, driver))

    def _distance(self, driver: ServerDriver) -> int:
        """Put the share of its distance to the centre that the worker will move into a slot."""
        row, queue, optimizer = driver.row, driver.queue, cast("Optimizer", self.optimizer)
        slot = queue.free_slot()
        torch.sub(row.values, driver.landing, out=queue.slots[slot])
        # A parameter that is in no optimizer never leaves the centre.
        known = {id(p): self._alpha(group) for group in optimizer.param_groups for p in group["params"]}
        alphas = [known.get(id(p), 0.0) for p in row.parameters]
        torch._foreach_mul_(queue.views[slot], alphas)  # pyright: ignore[reportPrivateUsage]
        self._moving = slot
        return slot

    def _move(self, driver: ServerDriver) -> None:
        slot, self._moving = self._moving, None
        if slot is not None:
            driver.row.values.sub_(driver.queue.slots[slot])

    def own_state(self, driver: ServerDriver) -> dict[str, Any]:
        """The number of steps; a worker's parameters are saved with its model."""
        return {**super().own_state(driver), "steps": self._steps.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the centre; the worker has its own parameters already."""
        if self.driver is not None:
            self._steps.steps = int(state["steps"])
        super().load_state_dict(state)
