"""The worker's side of parameter servers: gradients go out when an optimizer steps, fresh values come in.

The parameters of all prepared models lie in one row of memory, cut into shards of equal length. When the optimizer is
to step, its gradients are pushed instead, and the step itself is left to the servers' copies of that optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.compression import AnyFormat
from offbeat.protocols.partition import mixed
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import PullReply, Push, PushReply, Settings
from offbeat.protocols.servers.rhythm import IN_FLIGHT, Action
from offbeat.runtime.group import Group
from offbeat.runtime.optimizers import ELEMENT_WISE, why_not
from offbeat.runtime.served import CoordinatedGroup
from offbeat.runtime.servers.client import Client
from offbeat.runtime.servers.noting import WARM_START
from offbeat.runtime.servers.numbers import Recipe, is_number, settings_of
from offbeat.runtime.shared.segment import Segment
from offbeat.runtime.snapshots import Cut
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.strategies._accounts import Account, refusals, together
from offbeat.strategies._carried import first_of, refuse_different_models, refuse_more_groups
from offbeat.strategies._letters import Letters
from offbeat.strategies._parameter_row import Row
from offbeat.strategies._worker import Exchange, averaged_buffers, closure_of

SLOTS = IN_FLIGHT
"""Memory for so many pushes: that of one that is not answered yet is not written."""


def served(group: Group, strategy: object) -> CoordinatedGroup:
    """The group of a run that has servers; refused where nobody has started any."""
    if not isinstance(group, CoordinatedGroup):
        raise StrategyError(
            f"{strategy} needs server processes beside the workers, which `offbeat run --strategy` and offbeat.fit "
            f"start. Here there are none. Name the strategy on the command line of `offbeat run`, or use allreduce."
        )
    return group


class Served(Exchange):
    """What all exchanges through servers have: a row of parameters, memory for what is pushed, and a clock."""

    replicated = True
    joins_late = True
    acts_in_steps = True
    unforeseen = "who waits for whom at servers is decided as it happens (offbeat bench server --simulate plays that)"
    cuttable: ClassVar[bool] = False
    """Whether what a worker has of the servers' values between two steps can be read anew by one who goes on."""

    def __init__(self, group: Group, stopwatch: Stopwatch, strategy: Any, rule: Rule) -> None:
        super().__init__(group, stopwatch)
        self.strategy, self.rule = strategy, rule
        self.served = served(group, strategy)
        self.client: Client = self.served.client
        self.clock = 0
        """Steps that count as finished here."""
        self.examples = 1.0
        self.held = False
        self.row: Row | None = None
        self.optimizer: Optimizer | None = None
        self._models: list[nn.Module] = []
        self._begun = False
        self._missed = 0
        self.slots: list[Tensor] = []
        self.views: list[list[Tensor]] = []
        self.absent: list[set[int]] = [set() for _ in range(SLOTS)]
        """Of each slot, which parameters of the row have no gradient there."""
        self._sent: list[int | None] = [None] * SLOTS
        self._pull: int | None = None
        self._turn = 0
        self._told: Settings = ()
        self._groups = 0
        self._letters: Letters | None = None
        self._hidden: list[list[Any]] = []
        self._handles: list[Any] = []
        self._taking: Callable[[int, NDArray[np.uint8]], None] | None = None
        self.refused: list[str] = []
        """Why pushes of this worker were refused."""
        self._sent_unasked: dict[int, tuple[int, int]] = {}
        self.written: dict[int, int] = {}
        """Version of each shard that has all this worker has pushed."""
        self.unused: set[int] = set()
        """Shards on which pushes came to nothing: they were refused, or their step was complete without them."""
        self.pushes: Counter[str] = Counter()
        """What became of this worker's pushes, on all shards."""
        self.stale: Counter[int] = Counter()
        """How many steps old what this worker read was: how often each, on all shards."""

    @property
    def lockstep(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Under `asp` nobody waits for anybody, and where the slow are given up on, they need not come."""
        return self.rule.bound is not None and not self.rule.closes

    # -- taking part -------------------------------------------------------------------------------------------------

    def adopt(self, model: nn.Module) -> None:
        """Remember the model; its parameters move when all are known."""
        if self._begun:
            raise StrategyError(
                f"{self.strategy} puts all parameters on servers when training begins: give every model to the first "
                f"prepare()."
            )
        self._models.append(model)
        for buffer in model.buffers():
            self.group.share(buffer, "the sharing of worker 0's buffers")

    def install(self, model: nn.Module) -> None:
        """Nothing is put on the model: gradients are taken when the optimizer steps."""

    def attend(self, optimizer: Optimizer) -> None:
        """Take over this optimizer's steps."""
        if self.optimizer is not None or self._begun:
            raise StrategyError(
                f"{self.strategy} can serve one optimizer, given to the first prepare(). Put all parameters into its "
                f"groups, or use allreduce."
            )
        self.check(optimizer)
        self.optimizer = optimizer
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def check(self, optimizer: Optimizer) -> None:
        """Refuse optimizers that servers cannot run on a slice."""
        if why := why_not(type(optimizer), by_rate=not self.rule.aggregated):
            raise StrategyError(
                f"servers cannot run {type(optimizer).__name__}: each has only a slice of the parameters, and {why}. "
                f"Use one that treats every number by itself ({', '.join(ELEMENT_WISE)}), or allreduce."
            )

    def begin(self) -> None:
        """Training is about to begin: put worker 0's parameters on the servers, and start from them everywhere."""
        self._begun = True
        if self.optimizer is None:
            return  # Nothing is trained by gradients.
        parameters = [p for model in self._models for p in model.parameters() if p.is_floating_point()]
        distinct = list({id(p): p for p in parameters if p.numel()}.values())
        self.open(Row(distinct, self.client.plan.shards))

    def open(self, row: Row) -> None:
        """From now on this row is what the servers hold."""
        refuse_different_models(self.group, row, self.optimizer)
        self.row, self._groups = row, len(self._settings_now())
        width = -(-row.count * row.values.element_size() // 64) * 64
        memory = Segment.create(width * SLOTS)
        self.client.lend(memory)
        self.client.expect(max(row.shard(row.values, k).nbytes for k in range(self.client.plan.shards)))
        self.slots = [memory.tensor(width * slot, row.count, row.values.dtype) for slot in range(SLOTS)]
        self.views = [row.views(slot) for slot in self.slots]
        self.client.takes = self._take
        if self.optimizer is not None and self.compressions:
            sizes = [high - low for low, high in pairwise(row.bounds)]
            self._letters = Letters(self.compressions, sizes, self.seed, self.group.rank)
        self.put(self.first_states(row))

    def first_states(self, row: Row) -> list[NDArray[np.uint8]]:
        """What each shard begins with."""
        optimizer = cast("Optimizer", self.optimizer)
        return [first_of(optimizer, self.recipe(row, shard), row, shard) for shard in range(self.client.plan.shards)]

    def recipe(self, row: Row, shard: int) -> Recipe:
        """How a shard is updated."""
        optimizer = cast("Optimizer", self.optimizer)
        name, settings = self.updater()
        return Recipe(
            optimizer=name,
            kind=row.kind,
            ranges=tuple(row.ranges(group["params"], shard) for group in optimizer.param_groups),
            pieces=tuple(row.ranges(group["params"], shard, joined=False) for group in optimizer.param_groups),
            settings=settings,
            coders=self._formats(),
            seed=mixed(self.seed, shard),
            **self.tolerance(),
        )

    def _formats(self) -> tuple[AnyFormat, ...]:
        """How pushes are compressed, as servers are told."""
        formats = tuple(compression.format() for compression in self.compressions)
        if any(form is None for form in formats):
            raise StrategyError(
                f"servers must be told how to read letters, and one of {', '.join(map(str, self.compressions))} has no "
                f"`format()`. Use allreduce, whose workers have its coder."
            )
        return cast("tuple[AnyFormat, ...]", formats)

    def updater(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """The optimizer that servers run, and what its groups are set to: by default the user's own."""
        optimizer = cast("Optimizer", self.optimizer)
        return type(optimizer).__name__, settings_of(optimizer)

    def tolerance(self) -> dict[str, Any]:
        """How servers bear delays; by default they do nothing about them."""
        return {}

    def put(self, states: Sequence[NDArray[np.uint8]], version: int = 0, clock: int = 0) -> None:
        """The one who leads puts states on the servers; then all start from them."""
        if self.group.membership.leads:
            self.client.wait(
                self.client.load(states, [version] * len(states), clock), "putting the parameters on the servers"
            )
        self.group.barrier("the parameters being on the servers")
        self.refresh()

    def refresh(self) -> None:
        """Take the newest values, whatever the clock."""
        self.client.wait(self.client.pull(self.clock, anew=True), "reading the parameters")

    def _take(self, shard: int, values: NDArray[np.uint8]) -> None:
        if self._taking is not None:
            self._taking(shard, values)
            return
        row = cast("Row", self.row)
        place = row.shard(self.landing(row), shard).numpy()
        np.copyto(place, values.view(place.dtype))

    def landing(self, row: Row) -> Tensor:
        """Where values that come from servers are put: they are the parameters."""
        return row.values

    # -- steps -------------------------------------------------------------------------------------------------------

    def weigh(self, examples: int, total: int | None) -> None:
        """The coming gradient is a mean over so many examples."""
        del total
        self.examples = float(examples)

    def suspend(self, held: bool) -> None:
        """While held, steps push nothing."""
        self.held = held

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            raise StrategyError(f"{self.strategy} cannot be used with optimizer.step(closure). Use allreduce.")
        if self.held:
            return
        with self.stopwatch.spent_on("communicate"), torch.no_grad():
            if self.exchange():
                self._hidden = [group["params"] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    group["params"] = []

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group, members in zip(optimizer.param_groups, self._hidden, strict=False):
            group["params"] = members
        self._hidden = []
        if not self.held:
            with self.stopwatch.spent_on("communicate"), torch.no_grad():
                self.stepped()

    def exchange(self) -> bool:
        """Push this step's gradient; True if the optimizer is not to step here."""
        raise NotImplementedError

    def stepped(self) -> None:
        """The optimizer has stepped, or not."""

    def perform(
        self, actions: Iterable[Action], slot: Callable[[], int | None] = lambda: None, weight: float = 1.0
    ) -> None:
        """Do what the rhythm says, in order; `slot` has what is to be pushed ready when that is due."""
        for action in actions:
            match action:
                case Action.PUSH:
                    self.push(slot(), then_pull=False, weight=weight)
                case Action.PUSH_AND_PULL:
                    self._pull = self.push(slot(), then_pull=True, weight=weight)
                case Action.PULL:
                    self._pull = self.client.pull(self.clock, anew=True)
                case Action.AWAIT:
                    self.await_values()
                case Action.SETTLE:
                    self.settle_all()
                case Action.TAKE_FRESH:
                    if not self.take_fresh():
                        self.arrive(self.client.pull(self.clock, anew=True))
                case Action.REUSE:
                    self.reuse()
                case Action.MEET:
                    self.group.barrier(WARM_START)

    def await_values(self) -> None:
        """Wait for values that were asked for, if any were."""
        token, self._pull = self._pull, None
        if token is not None:
            self.arrive(token)

    def reuse(self) -> None:
        """Say that the next step is computed from the values that are here."""

    def gradient(self) -> int:
        """Put the gradients side by side into memory that servers can read; answers which slot."""
        row = cast("Row", self.row)
        slot = self.free_slot()
        gradients = [p.grad for p in row.parameters]
        self.absent[slot] = {number for number, gradient in enumerate(gradients) if gradient is None}
        if all(g is not None and not g.is_sparse for g in gradients):
            torch._foreach_copy_(self.views[slot], cast("Any", gradients))  # pyright: ignore[reportPrivateUsage]
        else:
            for view, gradient in zip(self.views[slot], gradients, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        return slot

    def free_slot(self) -> int:
        """Memory for what is to be pushed next, once what was pushed from it before is answered."""
        self._turn = (self._turn + 1) % SLOTS
        self.settle(self._turn)
        self.absent[self._turn] = set()
        return self._turn

    def settle(self, slot: int) -> None:
        """Wait until what was pushed from this slot is answered."""
        token, self._sent[slot] = self._sent[slot], None
        if token is not None:
            self.heed(self._waited(token, "the answer to a push"))

    def settle_all(self) -> None:
        """Wait until all that was pushed is answered."""
        for slot in range(SLOTS):
            self.settle(slot)

    def push_microbatch(self, slot: int, weight: float) -> None:
        """Push what lies in a slot as a part of a step that counts by itself; the step goes on."""
        parts = self._payloads(slot, waited=False)
        self._sent[slot], _ = self.client.push(
            parts, self.clock, weight, self._settings(), False, microbatch=True, absent=self._absent_from(slot)
        )

    def push(self, slot: int | None, then_pull: bool, weight: float = 1.0) -> int:
        """Push what lies in a slot (None: nothing but a tick of the clock); answers the token of the pull."""
        nothing = [np.empty(0, np.uint8)] * self.client.plan.shards
        parts = nothing if slot is None else self._payloads(slot, waited=then_pull or self.rule.eager)
        # Where pushes are applied one by one, one without numbers is not: settings would be lost with it.
        settings = () if slot is None and not self.rule.aggregated else self._settings()
        absent = () if slot is None else self._absent_from(slot)
        token, pull = self.client.push(parts, self.clock, weight, settings, then_pull, absent=absent)
        self.clock += 1
        if slot is None:
            self.heed(self._waited(token, "the answer to a push"))
        else:
            self._sent[slot] = token
        return pull

    def push_parts(self, parts: Sequence[tuple[int, int, int, NDArray[np.uint8]]]) -> int:
        """Push numbers for ranges of shards, as parts of a step that goes on; answers the token."""
        # Each shard must hear of the settings with what it applies; where steps are summed up, with the step's end.
        return self.client.push_parts(parts, self.clock, () if self.rule.aggregated else self._settings_now())

    def _absent_from(self, slot: int) -> list[tuple[tuple[int, int], ...]]:
        """Of each shard, which ranges have no gradient in a slot; nothing if all have."""
        row = cast("Row", self.row)
        lacking = [row.parameters[number] for number in sorted(self.absent[slot])]
        return [row.ranges(lacking, shard) for shard in range(self.client.plan.shards)] if lacking else []

    def _payloads(self, slot: int, waited: bool) -> list[NDArray[np.uint8]]:
        """What each shard's server is sent of a slot: numbers, or the letter that is left of them."""
        row = cast("Row", self.row)
        values = [row.shard(self.slots[slot], k) for k in range(self.client.plan.shards)]
        if self._letters is None:
            return [part.numpy().view(np.uint8) for part in values]
        return self._letters.write(values, waited)

    def _settings(self) -> Settings:
        """What the optimizer's groups are set to; where all make a step together, only if that has changed."""
        now = self._settings_now()
        refuse_more_groups(len(now), self._groups, self.strategy)
        if now == self._told and self.rule.aggregated:  # Else what the last one to push has told would hold for all.
            return ()
        self._told = now
        return now

    def _settings_now(self) -> Settings:
        if self.optimizer is None:
            return ()
        return tuple(
            {
                name: tuple(map(float, cast("Sequence[float]", value))) if isinstance(value, list) else float(value)
                for name, value in group.items()
                if is_number(value)
            }
            for group in self.updater()[1]
        )

    def arrive(self, pull: int) -> None:
        """Wait for values that were asked for; if a shard has gone on without this worker, for its newer ones."""
        self.heed(self._waited(pull, "a pull"))
        while self.rule.closes and any(clock < self.clock for _, clock in self.client.machine.known.values()):
            self.heed(self._waited(self.client.pull(self.clock), "a pull"))

    def take_fresh(self) -> bool:
        """Take what servers have sent unasked, if it is fresh enough for the next step and has this worker's pushes."""
        shards = range(self.client.plan.shards)
        found = [self.client.newest(shard) for shard in shards]
        for shard, new in zip(shards, found, strict=True):
            if new is not None:
                self._take(shard, new[1])
                self._sent_unasked[shard] = new[0].version, new[0].clock
        needed = self.rule.needed(self.clock)
        known = [self._sent_unasked.get(shard, (-1, -1)) for shard in shards]
        if any(version < self.written.get(k, 0) or clock < needed for k, (version, clock) in enumerate(known)):
            return False
        for _, clock in known:
            self.stale[max(0, self.clock - clock)] += 1
            self.client.used_again(self.clock, max(0, self.clock - clock))
        return True

    def _waited(self, token: int, what: str) -> tuple[Any, ...]:
        with self.stopwatch.spent_on("wait"):
            return self.client.wait(token, what)

    def heed(self, replies: Sequence[Any]) -> None:
        """What servers say of a push: it may have been refused, or its step was complete without it."""
        for shard, reply in replies:
            pushed = reply.pushed if isinstance(reply, PullReply) else reply
            if isinstance(reply, PullReply):
                self.stale[max(0, self.clock - reply.clock)] += 1
            if not isinstance(pushed, PushReply):
                continue
            if pushed is reply:  # A pull's answer may say it too.
                self.pushes[pushed.status] += 1
                self.unused |= {shard} if pushed.status in ("refused", "late") else set()
                self.refused += [pushed.reason] if pushed.status == "refused" else []
            self.written[shard] = max(pushed.version, self.written.get(shard, 0))
            # A step that was closed without this worker is given up when its last microbatch is done.
            if pushed.status == "late" and pushed.clock > self.clock and not self.within_step:
                self._missed += pushed.clock - self.clock
                self.clock = pushed.clock

    def passed_over(self) -> int:
        """Steps that were made without this worker."""
        missed, self._missed = self._missed, 0
        return missed

    # -- between steps -----------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, every worker has what the servers have after all pushes."""
        if self.row is not None:
            with self.stopwatch.spent_on("communicate"):
                self.together()
        with averaged_buffers(models, self.group):
            yield

    def together(self) -> None:
        """All have pushed what they have; then all read the same."""
        self.settle_all()
        self.group.barrier("all pushes being answered")
        self.refresh()
        self.group.barrier("all having read the same")

    def payload(self) -> int:
        """What went to the servers, and came from them."""
        tried = 0 if self._letters is None else self._letters.tried_bytes
        return self.client.bytes_sent + self.client.bytes_received - tried

    def figures(self) -> dict[str, Any]:
        """Pushes of this worker by what became of them, and how stale its reads were."""
        return {"pushes": dict(self.pushes), "staleness": {str(k): self.stale[k] for k in sorted(self.stale)}}

    def accounts(self) -> dict[str, Any]:
        """Pushes and reads of all workers, and what each has waited, sent to servers and got from them."""
        self.stopwatch.total()
        mine = Account(self.group.rank, self.stopwatch.seconds["wait"], self.pushes, self.stale, self.client.links)
        return together(map(Account.of, self.group.gather(mine.row(), "a report").tolist()))

    def staleness(self, steps: int) -> dict[str, int]:
        """Reads of all workers by how many steps old they were, values that were kept and used again too."""
        del steps
        most = int(self.group.gather([float(max(self.stale, default=0))], "the end of the run").max())
        rows = self.group.gather([float(self.stale[k]) for k in range(most + 1)], "the end of the run")
        return {str(k): int(count) for k, count in enumerate(rows.sum(0).tolist()) if count}

    def notes(self) -> dict[str, Any]:
        """Why pushes of any worker were refused, if any were; what letters have cost, and what numbers would have.

        All workers call this together.
        """
        self.settle_all()
        noted: dict[str, Any] = {"refusals": told} if (told := refusals(self.group, self.refused)) else {}
        if self._letters is not None:
            row = cast("Row", self.row)
            # A slot that no letter lies in: what is sent must not change, and the last letter is sent as well.
            spare = self.slots[(self._turn + 1) % SLOTS].fill_(1.0)
            dense = [row.shard(spare, k).numpy().view(np.uint8) for k in range(self.client.plan.shards)]
            noted["compression"] = self._letters.compare(self.client, self.group, dense)
        return noted

    def state_dict(self) -> dict[str, Any]:
        """The state of all shards, kept by the one who leads; what this worker owes them is its own."""
        if self.row is None:
            return {}
        self.settle_all()
        self.group.barrier("all pushes being answered")
        states: dict[int, Tensor] = {}
        if self.group.membership.leads:

            def keep(shard: int, written: NDArray[np.uint8]) -> None:
                states[shard] = torch.from_numpy(written.copy())

            self._taking = keep
            self.client.wait(self.client.fetch(), "fetching the servers' state")
            self._taking = None
        self.group.barrier("the servers' state being fetched")
        return {**self.own_state(), "shards": [states[k] for k in sorted(states)]}

    # -- snapshots ---------------------------------------------------------------------------------------------------

    @property
    def snapshots(self) -> bool:
        """Where every push is applied as it comes: a shard then holds no half of a step."""
        return self.cuttable and not self.rule.aggregated and self.row is not None and self.optimizer is not None

    def want_snapshot(self) -> None:
        """Ask the coordinator."""
        if not self.snapshots:
            super().want_snapshot()
        self.client.want_snapshot()

    def cut(self, clock: int) -> Cut | None:
        """What this worker owes is its own; what the shards hold they record themselves."""
        del clock
        if not self.snapshots or not self.client.snapshot_due():
            return None
        colour, place = self.client.turn(self.clock, self.served.calls)
        return Cut(colour, place, self.own_state(), partial(self.client.recorded, colour, place))

    def own_state(self) -> dict[str, Any]:
        """What this worker remembers by itself."""
        return {"clock": self.clock, "letters": [] if self._letters is None else self._letters.state()}

    def _go_on(self, resumed: Mapping[str, Any]) -> None:
        """From a snapshot: the one who leads puts the shards' states back, and each sends what it had under way."""
        if self.group.membership.leads:
            states = [state.numpy() for state in resumed["states"]]
            took = [tuple((int(w), int(n), int(c)) for w, n, c in of_shard) for of_shard in resumed["took"]]
            token = self.client.load(states, resumed["versions"], 0, took)
            self.client.wait(token, "putting the parameters on the servers")
        self.group.barrier("the parameters being on the servers")
        under_way = [
            (int(shard), msgspec.convert(push, Push), None if numbers is None else numbers.numpy())
            for shard, push, numbers in resumed["under_way"]
        ]
        self.client.wait(self.client.replay(resumed["sent"], under_way), "sending again what was under way")
        self.group.barrier("all that was under way being there")
        self.refresh()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the shards' state back, and go on from that clock."""
        if self.row is None:
            return
        if self.group.membership.outside:
            self.clock = self.served.membership.clock  # Servers have newer values than the checkpoint.
            self.refresh()
            return
        self.clock = int(state["clock"])
        if self._letters is not None:
            self._letters.load(state["letters"])
        if "resumed" in state:
            self._go_on(state["resumed"])
            return
        states = [shard.numpy() for shard in state["shards"]]
        self.put(states, self.clock, self.clock)

    def close(self) -> None:
        """Take the hooks off, and give the parameters memory of their own."""
        for handle in self._handles:
            handle.remove()
