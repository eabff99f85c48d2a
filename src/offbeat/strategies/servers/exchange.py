"""The worker's side of parameter servers: gradients are pushed when an optimizer steps, fresh values are pulled.

The parameters of all prepared models are in one row of memory, cut into shards of equal length. When the optimizer is
to step, its gradients are pushed instead, and the servers' copies of that optimizer make the step.

A strategy is one small class that says what is done when a step is computed, in `computed`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.limits import SERVERS
from offbeat.protocols.machine import NOTHING, Payload
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import Push
from offbeat.protocols.servers.worker.notices import LoadRequest, ReplayRequest, whole_shards
from offbeat.protocols.servers.worker.rhythm import Rhythm
from offbeat.runtime.gradients.optimizers import ELEMENT_WISE, why_not
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.updater import Recipe, settings_of
from offbeat.runtime.state.snapshots import SnapshotCut
from offbeat.strategies._base import Axis, Strategy, require
from offbeat.strategies.servers.driver import CompressedPushes, PushQueue, ServerDriver
from offbeat.strategies.servers.link import ServerLink, served
from offbeat.strategies.servers.optimizer import Groups, ServerOptimizer
from offbeat.strategies.servers.parameter_row import ParameterRow, refuse_different_models
from offbeat.strategies.servers.shard_sums import sum_over_shards
from offbeat.strategies.servers.update import ServerUpdate
from offbeat.strategies.worker.exchange import Exchange, Exchanging, averaged_buffers, refuse_closure


class ServerExchanging(Exchanging):
    """A strategy with parameter servers: it has the fields `shards` and `replicas`, and a consistency rule."""

    if TYPE_CHECKING:  # An annotation at run time would keep subclasses from having such fields.
        shards: int
        replicas: int

    def __post_init__(self) -> None:
        """Refuse numbers of servers that make no sense, or that would take a machine down."""
        super().__post_init__()
        shards, replicas = self.shards, self.replicas
        require(shards >= 1, self, "shards", shards, "there is at least one server")
        require(replicas >= 0, self, "replicas", replicas, "a shard has 0 or more further copies")
        name, value = ("shards", shards) if shards > replicas else ("replicas", replicas)
        count = shards * (1 + replicas)
        why = f"each of {count:,} servers would be a process of its own: at most {SERVERS} are started"
        require(count <= SERVERS, self, name, value, why)
        why = "" if self.program is None else self.program.why_not_in_shards(self.rule)
        require(shards == 1 or not why, self, "shards", shards, why)

    @property
    def program(self) -> ServerUpdate | None:
        """What servers do with a push; None: as the optimizer does."""
        return None

    @property
    @abstractmethod
    def rule(self) -> Rule:
        """How far workers may be apart, and how servers combine their pushes."""

    def refuses(self, other: Strategy) -> str | None:
        """Refuse what keeps an update with sums over the whole vector from having them."""
        if self.program is not None and self.program.whole:
            if other.axis is Axis.SPLIT:
                return (
                    "the update looks at the whole vector (norm, sum, …), and each worker has a part of the model only"
                )
            if other.axis is Axis.COMPRESSION and self.shards > 1 and not self.rule.aggregated:
                return (
                    f"the update looks at the whole gradient (norm, sum, …), which workers sum up for the shards under "
                    f"{self.rule}, and of a compressed one shards get other numbers: use shards=1 or bsp"
                )
        return super().refuses(other)

    def servers(self, workers: int) -> tuple[int, int, Rule]:
        """Shards, further copies of each, and the rule."""
        del workers
        return self.shards, self.replicas, self.rule


class StepHere(NamedTuple):
    """What remains to be done on a worker after its gradient is handled."""

    own: bool = False
    """Whether its optimizer steps on its own copy of the parameters."""
    afterwards: Callable[[], None] | None = None
    """Called after the optimizer has stepped, or not."""


class PushWorker(Exchange):
    """One worker of a strategy on servers; `computed` is what it does in a step."""

    starts_alike = False
    acts_in_steps = True
    updates_elsewhere = True
    keeps_apart: bool = False
    """Whether pulled values are kept beside the worker's own parameters, rather than in their place."""
    unpredicted = "waits at servers are decided during the run (offbeat bench server --simulate plays them)"

    def __init__(self, group: Group, stopwatch: Stopwatch, strategy: ServerExchanging, rhythm: Rhythm) -> None:
        coordinated = served(group, strategy)
        super().__init__(coordinated.peers, stopwatch)
        self.strategy, self._rhythm = strategy, rhythm
        self.update = strategy.program
        self.tolerance: dict[str, Any] = {} if self.update is None else self.update.announced
        """What servers do besides running an optimizer, as fields of their recipe; by default nothing."""
        self.recipes: list[Recipe] = []
        """How each shard is updated, once training has begun."""
        self.link = ServerLink(coordinated, stopwatch, strategy.rule)
        self.passed_over, self.figures = self.link.passed_over, self.link.record.figures
        self.optimizer: Optimizer | None = None
        self.driver: ServerDriver | None = None
        """The parameters on the servers; None until training begins, or if nothing is trained by gradients."""
        self.examples = 1.0
        """Examples of the coming gradient on this worker."""
        self.total_examples: int | None = None
        """The same over all workers, if known."""
        self.held = False
        self._models: list[nn.Module] = []
        self._begun = False
        self._hidden: list[list[Any]] = []
        self._afterwards: Callable[[], None] | None = None

    @property
    def lockstep(self) -> bool:
        """Not under `asp`, nor where steps close without slow workers."""
        return self.link.rule.bound is not None and not self.link.rule.closes

    # -- taking part -------------------------------------------------------------------------------------------------

    def install(self, model: nn.Module) -> None:
        """Remember the model; its parameters move when training begins."""
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
        self.check_optimizer(optimizer)
        self.optimizer = optimizer
        self._hook_steps(optimizer, self._before_step, self._after_step)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse optimizers that servers cannot run on a slice of the parameters, or that an update would replace."""
        if self.update is not None:
            if reason := self.update.refuses_optimizer(optimizer):
                raise StrategyError(
                    f"{self.strategy} says what a push does to the parameters, so your optimizer takes no steps, and "
                    f"would not do what it says: {reason}. Give torch.optim.SGD(parameters, lr=…) with nothing but a "
                    f"learning rate, which reaches the update as `lr`; put the rest into the update."
                )
        elif why := why_not(type(optimizer), by_rate=not self.link.rule.aggregated):
            raise StrategyError(
                f"servers cannot run {type(optimizer).__name__}: each has only a slice of the parameters, and {why}. "
                f"Use one that treats every number by itself ({', '.join(ELEMENT_WISE)}), or allreduce."
            )

    def server_optimizer(self, optimizer: Optimizer) -> tuple[str, Groups]:
        """The name of what servers run, and the settings of its groups: by default the user's own optimizer."""
        if self.update is not None:
            return self.update.groups(optimizer)
        return type(optimizer).__name__, settings_of(optimizer)

    def begin(self) -> None:
        """Put worker 0's parameters on the servers, and start from them everywhere."""
        self._begun = True
        if self.optimizer is None:
            return  # Nothing is trained by gradients.
        parameters = [p for model in self._models for p in model.parameters() if p.is_floating_point()]
        link = self.link
        row = ParameterRow(list({id(p): p for p in parameters if p.numel()}.values()), link.shards)
        refuse_different_models(self.group, row, self.optimizer)
        optimizer = ServerOptimizer(self.optimizer, self.server_optimizer, self.strategy, self.tolerance)
        sizes = [shard.numel() for shard in row.shards(row.values)]
        pushes = CompressedPushes(self.compressions, sizes, self.seed, self.group.rank) if self.compressions else None
        landing = torch.empty_like(row.values) if self.keeps_apart else row.values
        self.driver = ServerDriver(link, row, self._rhythm, PushQueue(link, row, optimizer, pushes), landing)
        self.recipes = optimizer.recipes(row, link.shards, self.compressions, self.seed)
        if self.update is not None and self.update.whole and link.shards > 1:
            self.recipes = sum_over_shards(self.update, self.recipes, row, link.rule, self.driver.queue)
        self.driver.put(optimizer.first_states(row, self.recipes))

    # -- steps -------------------------------------------------------------------------------------------------------

    def weigh(self, examples: int, total: int | None) -> None:
        """The coming gradient is a mean over `examples` examples."""
        self.examples, self.total_examples = float(examples), total

    def suspend(self, held: bool) -> None:
        """While held, steps push nothing."""
        self.held = held

    @abstractmethod
    def computed(self, driver: ServerDriver) -> StepHere:
        """A gradient is computed: push and pull, as the strategy says."""

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_closure(self.strategy, args, kwargs)
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

    # -- between steps -----------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, every worker has the servers' values after all pushes."""
        with own_kept(self.driver if self.keeps_apart else None):
            if self.driver is not None:
                with self.stopwatch.spent_on("communicate"):
                    self.driver.together()
                if self.keeps_apart:
                    self.driver.row.values.copy_(self.driver.landing)
            with averaged_buffers(models, self.group):
                yield

    def state_dict(self) -> dict[str, Any]:
        """The state of all shards, on the leader; and this worker's own."""
        if self.driver is None:
            return {}
        states = self.driver.states()
        return {**self.own_state(self.driver), "shards": states}

    def own_state(self, driver: ServerDriver) -> dict[str, Any]:
        """The state of this worker alone: its clock and error feedback."""
        compressed = driver.queue.compressed
        return {"clock": self.link.clock, "compressed": [] if compressed is None else compressed.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shards' state, and continue from that clock."""
        if self.driver is None:
            return
        if self.link.group.membership.outside:
            self.link.clock = self.link.group.membership.clock  # Servers have newer values than the checkpoint.
            self.driver.refresh()
            return
        self.link.clock = int(state["clock"])
        if self.driver.queue.compressed is not None:
            self.driver.queue.compressed.load(state["compressed"])
        if "resumed" in state:
            _resume(self.driver, state["resumed"])
        else:
            self.driver.put([shard.numpy() for shard in state["shards"]], self.link.clock, self.link.clock)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def payload(self) -> int:
        """Bytes sent to the servers and received from them."""
        compressed = None if self.driver is None else self.driver.queue.compressed
        trials = 0 if compressed is None else compressed.trial_bytes
        return self.link.client.connection.bytes_sent + self.link.client.bytes_received - trials

    def accounts(self) -> dict[str, Any]:
        """Pushes and reads of all workers, and each one's waits and traffic with servers. Collective."""
        self.stopwatch.total()
        links = self.link.client.connection.links()
        return self.link.record.accounts(self.link.group, self.stopwatch.seconds["wait"], links)

    def staleness(self, steps: int) -> dict[str, int]:
        """Reads of all workers by staleness, including values that were used again."""
        del steps
        return self.link.record.staleness(self.link.group)

    def notes(self) -> dict[str, Any]:
        """Why pushes were refused, if any were; costs of compression, compared with dense pushes. Collective."""
        if self.driver is not None:
            self.driver.queue.settle_all()
        update = {} if self.update is None else {"update": self.update.account}
        notes = {**update, **self.link.record.notes(self.link.group)}
        return notes if self.driver is None else {**notes, **self.driver.queue.compared()}


class SnapshotPushWorker(PushWorker):
    """One whose run can be snapshotted: what it holds of the servers' values can be pulled again."""

    publishes = False
    """The coordinator publishes complete snapshots."""

    @property
    def snapshots(self) -> bool:
        """Where every push is applied on its own: a shard then never holds half a step; not of parts of a model."""
        whole = not self.link.client.plan.parts
        return whole and not self.link.rule.aggregated and self.driver is not None and self.optimizer is not None

    def want_snapshot(self) -> None:
        """Ask the coordinator."""
        self.link.client.snapshots.want()

    def cut(self, clock: int) -> SnapshotCut | None:
        """The state of this worker; the shards record theirs."""
        del clock
        snapshots, driver = self.link.client.snapshots, self.driver
        if driver is None or not self.snapshots or not snapshots.due():
            return None
        colour, place = snapshots.turn(self.link.clock, self.link.group.calls)
        return SnapshotCut(colour, place, self.own_state(driver), partial(snapshots.recorded, colour, place))


@contextmanager
def own_kept(driver: ServerDriver | None) -> Generator[None]:
    """Around what puts the servers' values into a worker's parameters: afterwards its own are back. None keeps none."""
    own = None if driver is None else driver.row.values.clone()
    try:
        yield
    finally:
        if driver is not None and own is not None:
            driver.row.values.copy_(own)


def _resume(driver: ServerDriver, snapshot: Mapping[str, Any]) -> None:
    """Resume from a snapshot: the leader restores the shards' states, and each worker sends what it had in flight."""
    link = driver.link
    states = [state.numpy() for state in snapshot["states"]]
    took = [tuple((int(w), int(n), int(c)) for w, n, c in of_shard) for of_shard in snapshot["took"]]
    driver.load(LoadRequest(whole_shards(states), snapshot["versions"], 0, took))
    in_flight = [
        (int(shard), msgspec.convert(push, Push), NOTHING if part is None else Payload(part.nbytes, part.numpy()))
        for shard, push, part in snapshot["under_way"]
    ]
    link.client.answer(ReplayRequest(snapshot["sent"], in_flight), "sending again what was in flight")
    link.group.barrier("all that was in flight being there")
    driver.refresh()
