"""Downpour SGD: workers push summed gradients to servers that run Adagrad, and fetch parameters without waiting.

Dean et al., "Large Scale Distributed Deep Networks" (2012), section 4.1 and the algorithm of its appendix.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import PushAndFetch, RhythmOf
from offbeat.runtime.compression.coder import finite
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.updater import settings_of
from offbeat.strategies._base import Traits
from offbeat.strategies.servers.driver import PushQueue, ServerDriver
from offbeat.strategies.servers.exchange import ServerExchanging, SnapshotPushWorker, StepHere, own_kept
from offbeat.strategies.servers.link import served
from offbeat.strategies.servers.optimizer import Groups
from offbeat.strategies.worker.exchange import Exchange

ADAGRAD: Final = optim.Adagrad.__name__
"""What servers run, whatever the worker's optimizer is."""
_COMMON: Final = ("lr", "weight_decay", "maximize")
"""Settings that Adagrad takes over from another optimizer."""


@dataclass(frozen=True)
class Downpour(ServerExchanging):
    """Workers push summed gradients to servers that run Adagrad, and fetch parameters without waiting for others.

    Each worker steps on its own copy of the parameters with its own optimizer. Every `push` steps it pushes the sum of
    its gradients, every `fetch` steps it replaces its parameters by the servers'. Servers use the learning rate of the
    worker's optimizer, divided by the number of workers.
    """

    push: int = 1
    """Steps whose gradients are summed before they are pushed."""
    fetch: int = 1
    """Steps after which the servers' parameters are fetched."""
    shards: int = 1
    """Number of servers that the parameters are divided over."""
    replicas: int = 0
    """Further copies of every shard: with one, any server may die and nothing is lost."""
    warm: int = 0
    """Steps in which only one worker trains, before the others start from its parameters."""

    promises = Traits(elastic=True)
    examples = ("downpour", "downpour(push=4, fetch=4)", "downpour(shards=2, replicas=1, warm=50)")
    _ranges = (
        ("push", lambda steps: steps >= 1, "gradients are pushed every step or every few"),
        ("fetch", lambda steps: steps >= 1, "parameters are fetched every step or every few"),
        ("warm", lambda steps: steps >= 0, "a warm start takes 0 or more steps"),
    )

    @property
    def rule(self) -> Rule:
        """No bound on how far workers may be apart."""
        return Rule(None)

    def rhythm(self) -> RhythmOf:
        """Pushes and fetches at their periods, after a warm start of worker 0 alone."""
        return lambda worker: PushAndFetch(self.push, self.fetch, self.warm, leads=worker == 0)

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        return DownpourWorker(group, stopwatch, self)


class DownpourWorker(SnapshotPushWorker):
    """Sums gradients, and pushes and fetches when that is due. Servers run Adagrad with the worker's learning rate."""

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Downpour) -> None:
        leads = served(group, settings).membership.leads
        rhythm = PushAndFetch(settings.push, settings.fetch, settings.warm, leads=leads)
        super().__init__(group, stopwatch, settings, rhythm)
        self.replicated = settings.fetch == 1  # Between fetches every worker has its own parameters and state.
        self._steps = rhythm
        self._filling: int | None = None

    @property
    def lockstep(self) -> bool:
        """Only during the warm start: one worker trains, and the others wait in every step."""
        return self._steps.warming

    @property
    def aligned(self) -> bool:
        """Workers do not meet after the warm start."""
        return False

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Accept any optimizer that has a learning rate for the servers."""
        if not all("lr" in group for group in optimizer.param_groups):
            raise StrategyError(
                f"downpour runs Adagrad on its servers with the learning rate of your optimizer, and "
                f"{type(optimizer).__name__} has none (no `lr` in its groups). Use another, or allreduce."
            )

    def server_optimizer(self, optimizer: Optimizer) -> tuple[str, Groups]:
        """Adagrad, with all settings of the worker's own Adagrad, or with another's learning rate and weight decay."""
        settings = settings_of(optimizer)
        if type(optimizer) is optim.Adagrad:
            return ADAGRAD, settings
        return ADAGRAD, tuple({name: group[name] for name in _COMMON if name in group} for group in settings)

    def computed(self, driver: ServerDriver) -> StepHere:
        """Add the gradient to the sum; step here unless a fetch would replace the result at once."""
        trains = bool(self.examples) and self._steps.trains()
        due, steps_here = self._steps.computed(self.link.clock)
        # What servers will refuse is not a step here either: NaN would stay in the optimizer's state.
        own = trains and finite(self._accrue(driver.queue)) and steps_here
        return StepHere(own, partial(driver.perform, due, self._accrued))

    def _accrue(self, queue: PushQueue) -> Tensor:
        """The sum of gradients that is to be pushed next."""
        if self._filling is None:
            self._filling = queue.gradient()
        else:
            queue.add_gradient(self._filling)
        return queue.slots[self._filling]

    def _accrued(self) -> int | None:
        slot, self._filling = self._filling, None
        return slot

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, every worker has the servers' values; afterwards its own steps since the last fetch are restored."""
        with own_kept(None if self._steps.fetched else self.driver), super().averaged(models):
            yield

    def own_state(self, driver: ServerDriver) -> dict[str, Any]:
        """Also the sum that is not pushed yet."""
        accrued = None if self._filling is None else driver.queue.slots[self._filling].clone()
        absent = [] if self._filling is None else sorted(driver.queue.absent[self._filling])
        return {**super().own_state(driver), "steps": self._steps.steps, "accrued": accrued, "absent": absent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shards' state; between fetches the worker keeps its own parameters, which it has already."""
        if self.driver is None:
            return
        self._steps.steps = int(state["steps"])
        with own_kept(None if self._steps.fetched else self.driver):
            super().load_state_dict(state)
        # A replacement does not push what the worker that it replaces had accrued.
        accrued: Tensor | None = None if self.group.membership.outside else state["accrued"]
        self._filling = None
        if accrued is not None:
            queue = self.driver.queue
            self._filling = queue.free_slot()
            queue.slots[self._filling].copy_(accrued)
            queue.absent[self._filling] = set(state.get("absent", ()))
