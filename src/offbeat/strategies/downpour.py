"""Workers push summed gradients to servers that run Adagrad, fetch parameters now and then, and wait for nobody.

Between two fetches a worker goes on by itself: it steps with its own optimizer on its own copy of the parameters, and
what it has pushed meanwhile it will see, along with what others have pushed, when it fetches.

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
from offbeat.strategies._base import Traits, require, require_servers
from offbeat.strategies.servers.driver import ServerDriver
from offbeat.strategies.servers.exchange import RecordedWorker, StepHere
from offbeat.strategies.servers.link import served
from offbeat.strategies.servers.push_queue import PushQueue
from offbeat.strategies.worker.exchange import Exchange, Exchanging

ADAGRAD: Final = optim.Adagrad.__name__
"""What servers run, whatever the worker's own optimizer is."""
_COMMON: Final = ("lr", "weight_decay", "maximize")
"""What Adagrad takes over from an optimizer of another kind."""


@dataclass(frozen=True)
class Downpour(Exchanging):
    """Workers push summed gradients to servers that run Adagrad, fetch now and then, and wait for nobody.

    Each worker steps on its own copy of the parameters with its own optimizer. Every `push` steps it sends the sum of
    its gradients since, every `fetch` steps it takes the servers' values in place of its own. Servers take the learning
    rate from the worker's optimizer, over the number of workers.
    """

    push: int = 1
    """Steps whose gradients are summed before they are pushed."""
    fetch: int = 1
    """Steps after which the servers' parameters are fetched."""
    shards: int = 1
    """Server processes that the parameters are divided over."""
    replicas: int = 0
    """Further copies of every shard: with one, any server may die and nothing is lost."""
    warm: int = 0
    """Steps in which only one worker trains, before the others join in with what it has learned."""

    promises = Traits(elastic=True)
    examples = ("downpour", "downpour(push=4, fetch=4)", "downpour(shards=2, replicas=1, warm=50)")

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        require(self.push >= 1, self, "push", self.push, "gradients are pushed every step or every few")
        require(self.fetch >= 1, self, "fetch", self.fetch, "parameters are fetched every step or every few")
        require_servers(self, self.shards, self.replicas)
        require(self.warm >= 0, self, "warm", self.warm, "a warm start takes 0 or more steps")

    def servers(self, workers: int) -> tuple[int, int, Rule]:
        """Shards, further copies of each, and no bound on how far workers may be apart."""
        del workers
        return self.shards, self.replicas, Rule(None)

    def rhythm(self) -> RhythmOf:
        """Pushing and fetching every so many steps, after a warm start of worker 0 alone."""
        return lambda worker: PushAndFetch(self.push, self.fetch, self.warm, leads=worker == 0)

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        return _Raining(group, stopwatch, self)


class _Adagrad:
    """Servers run Adagrad with the worker's learning rate."""

    def check(self, optimizer: Optimizer) -> None:
        """Any optimizer will do here, if it has a learning rate for the servers."""
        if not all("lr" in group for group in optimizer.param_groups):
            raise StrategyError(
                f"downpour runs Adagrad on its servers with the learning rate of your optimizer, and "
                f"{type(optimizer).__name__} has none (no `lr` in its groups). Use another, or allreduce."
            )

    def runs(self, optimizer: Optimizer) -> tuple[str, tuple[dict[str, Any], ...]]:
        """Adagrad: with all settings of the worker's own, if that is one; else with its rate and weight decay."""
        settings = settings_of(optimizer)
        if type(optimizer) is optim.Adagrad:
            return ADAGRAD, settings
        return ADAGRAD, tuple({name: group[name] for name in _COMMON if name in group} for group in settings)


class _Raining(RecordedWorker):
    """Sums gradients, pushes the sum when it is due, and fetches when that is due."""

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Downpour) -> None:
        leads = served(group, settings).membership.leads
        rhythm = PushAndFetch(settings.push, settings.fetch, settings.warm, leads=leads)
        super().__init__(group, stopwatch, settings, Rule(None), rhythm, _Adagrad())
        self.replicated = settings.fetch == 1  # Between fetches every worker has parameters and a state of its own.
        self._steps = rhythm
        self._filling: int | None = None

    @property
    def lockstep(self) -> bool:
        """Only during the warm start: one worker trains, and the others keep step with it."""
        return self._steps.warming

    @property
    def aligned(self) -> bool:
        """After the warm start nobody waits for anybody."""
        return False

    def computed(self, driver: ServerDriver) -> StepHere:
        """Add up the gradient; no step is made here if its outcome would be replaced at once, or is not to be."""
        trains = bool(self.examples) and self._steps.trains()
        due, steps_here = self._steps.computed(self.link.clock)
        # What servers will refuse is not a step here either: NaN would stay in the optimizer's state for ever.
        own = trains and finite(self._accrue(driver.queue)) and steps_here
        return StepHere(own, partial(driver.perform, due, self._accrued))

    def _accrue(self, queue: PushQueue) -> Tensor:
        """Answers the sum of all that is to be pushed next."""
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
        """Inside, every worker has what the servers have; afterwards, its own steps since the last fetch again."""
        own = self._own_parameters()
        with super().averaged(models):
            try:
                yield
            finally:
                self._put_back(own)

    def _own_parameters(self) -> Tensor | None:
        """A copy of the parameters, if they are not the servers'."""
        return None if self.driver is None or self._steps.fetched else self.driver.row.values.clone()

    def _put_back(self, own: Tensor | None) -> None:
        if own is not None and self.driver is not None:
            self.driver.row.values.copy_(own)

    def own_state(self, driver: ServerDriver) -> dict[str, Any]:
        """The sum that is not pushed yet, too."""
        accrued = None if self._filling is None else driver.queue.slots[self._filling].clone()
        absent = [] if self._filling is None else sorted(driver.queue.absent[self._filling])
        return {**super().own_state(driver), "steps": self._steps.steps, "accrued": accrued, "absent": absent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the shards' state back; between fetches the parameters are this worker's own, which it has already."""
        if self.driver is None:
            return
        self._steps.steps = int(state["steps"])
        own = self._own_parameters()
        super().load_state_dict(state)
        self._put_back(own)
        # What another has not pushed yet it pushes itself.
        accrued: Tensor | None = None if self.group.membership.outside else state["accrued"]
        self._filling = None
        if accrued is not None:
            queue = self.driver.queue
            self._filling = queue.free_slot()
            queue.slots[self._filling].copy_(accrued)
            queue.absent[self._filling] = set(state.get("absent", ()))
