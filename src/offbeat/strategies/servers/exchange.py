"""The worker's side of parameter servers: gradients go out when an optimizer steps, fresh values come in.

The parameters of all prepared models lie in one row of memory, cut into shards of equal length. When the optimizer is
to step, its gradients are pushed instead, and the step itself is left to the servers' copies of that optimizer.

A strategy is one small class that says what is done when a step is computed. The rest are parts: `ServerLink` (clock
and answers), `PushQueue` (memory for pushes), `ServerDriver` (does what the rhythm says), `ServerOptimizer` (what
servers run), `PushRecord` (metrics).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.machine import NOTHING, Payload
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import Push
from offbeat.protocols.servers.worker.notices import LoadRequest, ReplayRequest, whole_shards
from offbeat.protocols.servers.worker.rhythm import Rhythm
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.state.snapshots import SnapshotCut
from offbeat.strategies.servers.compressed_push import Letters
from offbeat.strategies.servers.driver import ServerDriver
from offbeat.strategies.servers.link import ServerLink, served
from offbeat.strategies.servers.optimizer import ServerOptimizer, ServerUpdate, UsersOptimizer
from offbeat.strategies.servers.optimizer_handoff import refuse_different_models
from offbeat.strategies.servers.parameter_row import ParameterRow
from offbeat.strategies.worker.exchange import Exchange, averaged_buffers, closure_of


class StepHere(NamedTuple):
    """What is left to a worker when its gradient is dealt with."""

    own: bool = False
    """Whether its optimizer steps on its own copy of the parameters."""
    afterwards: Callable[[], None] | None = None
    """To be done when the optimizer has stepped, or not."""


class ServedWorker(Exchange):
    """One worker of a strategy on servers; what it does in a step is `computed`."""

    starts_alike = False
    acts_in_steps = True
    keeps_apart: bool = False
    """Whether what servers hold is kept beside the worker's own parameters, rather than in their place."""
    unforeseen = "who waits for whom at servers is decided as it happens (offbeat bench server --simulate plays that)"

    def __init__(
        self,
        group: Group,
        stopwatch: Stopwatch,
        strategy: object,
        rule: Rule,
        rhythm: Rhythm,
        update: ServerUpdate | None = None,
        tolerance: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Join the servers.

        Args:
            group: The workers, with servers beside them.
            stopwatch: What the time is spent on.
            strategy: For messages.
            rule: How servers let workers go on.
            rhythm: When this worker pushes and pulls.
            update: What servers do with what is pushed; by default they run the user's own optimizer.
            tolerance: How servers bear delays, as their recipe says it; by default they do nothing about them.

        """
        super().__init__(group, stopwatch)
        self.strategy, self._rhythm, self._tolerance = strategy, rhythm, tolerance
        self.link = ServerLink(served(group, strategy), stopwatch, rule)
        self._update: ServerUpdate = update or UsersOptimizer(rule)
        self.optimizer: Optimizer | None = None
        self.driver: ServerDriver | None = None
        """The parameters on the servers; None until training begins, or if nothing is trained by gradients."""
        self.examples = 1.0
        """Behind the coming gradient, here."""
        self.total_examples: int | None = None
        """The same over all workers, if it is known."""
        self.held = False
        self._models: list[nn.Module] = []
        self._begun = False
        self._hidden: list[list[Any]] = []
        self._afterwards: Callable[[], None] | None = None

    @property
    def lockstep(self) -> bool:
        """Under `asp` nobody waits for anybody, and where the slow are given up on, they need not come."""
        return self.link.rule.bound is not None and not self.link.rule.closes

    # -- taking part -------------------------------------------------------------------------------------------------

    def install(self, model: nn.Module) -> None:
        """Remember the model; its parameters move when all are known."""
        if self._begun:
            raise StrategyError(
                f"{self.strategy} puts all parameters on servers when training begins: give every model to the first "
                f"prepare()."
            )
        self._models.append(model)
        for buffer in model.buffers():
            self.group.share(buffer, "the sharing of worker 0's buffers")

    def attend(self, optimizer: Optimizer) -> None:
        """Take over this optimizer's steps."""
        if self.optimizer is not None or self._begun:
            raise StrategyError(
                f"{self.strategy} can serve one optimizer, given to the first prepare(). Put all parameters into its "
                f"groups, or use allreduce."
            )
        self._update.check(optimizer)
        self.optimizer = optimizer
        self.handles.append(optimizer.register_step_pre_hook(self._before_step))
        self.handles.append(optimizer.register_step_post_hook(self._after_step))

    def begin(self) -> None:
        """Training is about to begin: put worker 0's parameters on the servers, and start from them everywhere."""
        self._begun = True
        if self.optimizer is None:
            return  # Nothing is trained by gradients.
        parameters = [p for model in self._models for p in model.parameters() if p.is_floating_point()]
        row = ParameterRow(list({id(p): p for p in parameters if p.numel()}.values()), self.link.shards)
        refuse_different_models(self.group, row, self.optimizer)
        aggregated = self.link.rule.aggregated
        told = ServerOptimizer(self.optimizer, self._update, self.strategy, aggregated, self._tolerance)
        sizes = [high - low for low, high in pairwise(row.bounds)]
        letters = Letters(self.compressions, sizes, self.seed, self.group.rank) if self.compressions else None
        landing = torch.empty_like(row.values) if self.keeps_apart else row.values
        self.driver = ServerDriver(self.link, row, self._rhythm, told, letters, landing)
        self.driver.put(told.first_states(row, self.link.shards, self.compressions, self.seed))

    # -- steps -------------------------------------------------------------------------------------------------------

    def weigh(self, examples: int, total: int | None) -> None:
        """The coming gradient is a mean over so many examples."""
        self.examples, self.total_examples = float(examples), total

    def suspend(self, held: bool) -> None:
        """While held, steps push nothing."""
        self.held = held

    @abstractmethod
    def computed(self, driver: ServerDriver) -> StepHere:
        """A gradient is computed: push it, and read, as the strategy says."""

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            raise StrategyError(f"{self.strategy} cannot be used with optimizer.step(closure). Use allreduce.")
        if self.held or self.driver is None:
            return
        with self.stopwatch.spent_on("communicate"), torch.no_grad():
            own, self._afterwards = self.computed(self.driver)
        if not own:
            self._hidden = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = []

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group, members in zip(optimizer.param_groups, self._hidden, strict=False):
            group["params"] = members
        self._hidden = []
        afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            with self.stopwatch.spent_on("communicate"), torch.no_grad():
                afterwards()

    def passed_over(self) -> int:
        """Steps that were made without this worker since it was last asked."""
        return self.link.passed_over()

    # -- between steps -----------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, every worker has what the servers have after all pushes."""
        if self.driver is not None:
            with self.stopwatch.spent_on("communicate"):
                self.driver.together()
        with averaged_buffers(models, self.group):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state of all shards, kept by the one who leads; what this worker owes them is its own."""
        if self.driver is None:
            return {}
        states = self.driver.states()
        return {**self.own_state(self.driver), "shards": states}

    def own_state(self, driver: ServerDriver) -> dict[str, Any]:
        """What this worker remembers by itself."""
        return {"clock": self.link.clock, "letters": driver.queue.owed()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the shards' state back, and go on from that clock."""
        if self.driver is None:
            return
        if self.group.membership.outside:
            self.link.clock = self.link.group.membership.clock  # Servers have newer values than the checkpoint.
            self.driver.refresh()
            return
        self.link.clock = int(state["clock"])
        self.driver.queue.owe(state["letters"])
        if "resumed" in state:
            _go_on(self.driver, state["resumed"])
        else:
            self.driver.put([shard.numpy() for shard in state["shards"]], self.link.clock, self.link.clock)

    # -- what is told of it ------------------------------------------------------------------------------------------

    def payload(self) -> int:
        """What went to the servers, and came from them."""
        tried = 0 if self.driver is None else self.driver.queue.tried_bytes
        return self.link.client.connection.bytes_sent + self.link.client.bytes_received - tried

    def figures(self) -> dict[str, Any]:
        """Pushes of this worker by what became of them, and how stale its reads were."""
        return self.link.record.figures()

    def accounts(self) -> dict[str, Any]:
        """Pushes and reads of all workers, and what each has waited, sent to servers and got from them."""
        self.stopwatch.total()
        return self.link.record.accounts(
            self.group, self.stopwatch.seconds["wait"], self.link.client.connection.links()
        )

    def staleness(self, steps: int) -> dict[str, int]:
        """Reads of all workers by how many steps old they were, values that were kept and used again too."""
        del steps
        return self.link.record.staleness(self.group)

    def notes(self) -> dict[str, Any]:
        """Why pushes were refused, if any were; what compression has cost, and what dense pushes would have."""
        if self.driver is not None:
            self.driver.queue.settle_all()
        refused = self.link.record.notes(self.group)
        return refused if self.driver is None else {**refused, **self.driver.queue.compared()}


class RecordedWorker(ServedWorker):
    """One whose run can be recorded while it goes on: what it has of the servers' values can be read anew."""

    @property
    def snapshots(self) -> bool:
        """Where every push is applied as it comes: a shard then holds no half of a step."""
        return not self.link.rule.aggregated and self.driver is not None and self.optimizer is not None

    @property
    def publishes(self) -> bool:
        """The coordinator does."""
        return False

    def want_snapshot(self) -> None:
        """Ask the coordinator."""
        self.link.client.snapshots.want()

    def cut(self, clock: int) -> SnapshotCut | None:
        """What this worker owes is its own; what the shards hold they record themselves."""
        del clock
        snapshots, driver = self.link.client.snapshots, self.driver
        if driver is None or not self.snapshots or not snapshots.due():
            return None
        colour, place = snapshots.turn(self.link.clock, self.link.group.calls)
        return SnapshotCut(colour, place, self.own_state(driver), partial(snapshots.recorded, colour, place))


def _go_on(driver: ServerDriver, resumed: Mapping[str, Any]) -> None:
    """From a snapshot: the one who leads puts the shards' states back, and each sends what it had under way."""
    link = driver.link
    if link.group.membership.leads:
        states = [state.numpy() for state in resumed["states"]]
        took = [tuple((int(w), int(n), int(c)) for w, n, c in of_shard) for of_shard in resumed["took"]]
        link.load(LoadRequest(whole_shards(states), resumed["versions"], 0, took))
    link.group.barrier("the parameters being on the servers")
    under_way = [
        (int(shard), msgspec.convert(push, Push), NOTHING if part is None else Payload(part.nbytes, part.numpy()))
        for shard, push, part in resumed["under_way"]
    ]
    link.client.answer(ReplayRequest(resumed["sent"], under_way), "sending again what was under way")
    link.group.barrier("all that was under way being there")
    driver.refresh()
