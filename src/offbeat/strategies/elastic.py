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
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.rhythm import RhythmOf, Spring
from offbeat.runtime.group import Group
from offbeat.runtime.servers.numbers import ADD
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.strategies._base import Traits, require, require_servers
from offbeat.strategies._parameter_row import Row
from offbeat.strategies._serving import Served
from offbeat.strategies._worker import Exchange, Exchanging

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

    traits = Traits(elastic=True)
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


class _Tied(Served):
    """Steps by itself, and now and then moves towards the centre and the centre towards it."""

    replicated = False

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Elastic) -> None:
        super().__init__(group, stopwatch, settings, Rule(None if settings.asynchronous else 0))
        self._rho, self._asynchronous = settings.rho, settings.asynchronous
        self._rhythm = Spring(settings.period, settings.asynchronous)
        self._centre = torch.empty(0)
        self._moving: int | None = None

    # -- taking part -------------------------------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> None:
        """Any optimizer will do, if the spring is not too strong for its learning rate."""
        if self._rho is not None and not all("lr" in group for group in optimizer.param_groups):
            raise StrategyError(
                f"{self.strategy} takes alpha as learning rate times rho, and {type(optimizer).__name__} has no "
                f"learning rate (no `lr` in its groups). Leave rho out."
            )
        for group in optimizer.param_groups:
            self._alpha(group)

    def _alpha(self, group: Mapping[str, Any]) -> float:
        """The share of its distance to the centre that a worker moves in an exchange."""
        workers = len(self.group.membership.members)
        if self._rho is None:
            return MOVING_RATE / workers
        alpha = float(group["lr"]) * self._rho
        most = 1 if self._asynchronous else 1 / workers
        if alpha >= 1 or alpha > most:
            whose = "a worker" if self._asynchronous else f"{workers} workers at once"
            raise StrategyError(
                f"{self.strategy}: with a learning rate of {float(group['lr']):g}, alpha = rate * rho is {alpha:g}, "
                f"and {whose} would throw the centre to the other side. Take a rho below {most / float(group['lr']):g}."
            )
        return alpha

    def updater(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """Servers add what is pushed to the centre."""
        return ADD, ()

    def open(self, row: Row) -> None:
        """Put the centre on the servers, and start from it everywhere."""
        self._centre = torch.empty_like(row.values)
        super().open(row)
        row.values.copy_(self._centre)

    def landing(self, row: Row) -> Tensor:
        """What servers hold is the centre; the parameters are the worker's own."""
        del row
        return self._centre

    # -- steps -------------------------------------------------------------------------------------------------------

    def exchange(self) -> bool:
        """If it is time, take the distance to the centre, and pull the centre; the worker itself moves after its step.

        So the step's gradient, the worker's move and the centre's are all taken at the same point, as in equations 3
        and 4.
        """
        self.perform(self._rhythm.computed(self.clock).actions, self._distance)
        return not self.examples

    def _distance(self) -> int:
        """The share of its distance to the centre that the worker is about to move; answers which slot has it."""
        row, slot = cast("Row", self.row), self.free_slot()
        torch.sub(row.values, self._centre, out=self.slots[slot])
        torch._foreach_mul_(self.views[slot], self._alphas(row))  # pyright: ignore[reportPrivateUsage]
        self._moving = slot
        return slot

    def _alphas(self, row: Row) -> list[float]:
        """For every parameter; one that no optimizer has never leaves the centre."""
        groups = cast("Optimizer", self.optimizer).param_groups
        known = {id(p): self._alpha(group) for group in groups for p in group["params"]}
        return [known.get(id(p), 0.0) for p in row.parameters]

    def stepped(self) -> None:
        """Move towards the centre."""
        slot, self._moving = self._moving, None
        if slot is not None:
            cast("Row", self.row).values.sub_(self.slots[slot])

    # -- between steps -----------------------------------------------------------------------------------------------

    def together(self) -> None:
        """All have pulled the centre; then all read the same."""
        self.await_values()
        super().together()

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, every worker has the centre; afterwards its own parameters again."""
        with super().averaged(models):
            if self.row is None:
                yield
                return
            own = self.row.values.clone()
            self.row.values.copy_(self._centre)
            try:
                yield
            finally:
                self.row.values.copy_(own)

    def state_dict(self) -> dict[str, Any]:
        """The centre; a worker's parameters are kept with its model."""
        self.await_values()
        state = super().state_dict()
        return state and {**state, "steps": self._rhythm.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the centre back; the worker has its own parameters already."""
        if self.row is None:
            return
        self._rhythm.steps = int(state["steps"])
        super().load_state_dict(state)
