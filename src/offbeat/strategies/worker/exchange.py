"""The worker's side of strategies: what happens inside a loop that somebody else has written.

An `Exchange` sees that after `backward()` the gradients are what the strategy says. A `Pace` decides, batch by batch,
whether they are exchanged now. Both work through hooks, so the model and the optimizer stay the user's own objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError
from offbeat.protocols.compression import RowFormat
from offbeat.protocols.schedule import View
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.simulate.predicted_step import Step
from offbeat.strategies._base import Axis, Strategy
from offbeat.strategies.worker.capabilities import Costed, Microbatched, Sliced
from offbeat.strategies.worker.compression import Compressing
from offbeat.strategies.worker.flat_rows import Rows


class Exchange(ABC):
    """One worker's side of a way to exchange: the core that every one has.

    What only some can do is in `strategies.worker.capabilities`; an exchange has such a capability by having its
    methods.
    """

    replicated: bool = True
    """Whether parameters and optimizer state are equal on all workers, so that a checkpoint needs them once."""
    starts_alike: bool = True
    """Whether a model starts from worker 0's state; else `install` sees to how it starts, also with one worker."""
    joins_late: bool = True
    """Whether a gradient that backward itself did not reach is exchanged too, if it is there when backward ends."""
    mixes: bool = False
    """Whether it mixes models after a step, instead of exchanging gradients before it."""
    acts_in_steps: bool = False
    """Whether it exchanges when a prepared optimizer steps: without one, nothing would be exchanged."""
    unforeseen: str = "its exchanges are not known as schedules beforehand"
    """Why nobody can predict what a step takes, unless it is `Costed`."""

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        self.group = group
        self.stopwatch = stopwatch
        self.handles: list[RemovableHandle] = []
        """Hooks that were put on models and optimizers; `close` takes them off."""
        self.weight_in_backward = 1.0
        """The factor that a gradient has already been given when backward finishes it."""
        self.compressions: Sequence[Compressing] = ()
        """What is done to what is sent, in this order; set before anything is adopted."""
        self.seed = 0
        """What its chance comes from, the same on all workers; set before anything is adopted."""

    @property
    def lockstep(self) -> bool:
        """Whether workers meet in every step, so that one whose data has ended must keep the others company."""
        return True

    @property
    def aligned(self) -> bool:
        """Whether all workers can meet when an epoch begins, to agree on the order of its data."""
        return self.lockstep

    @abstractmethod
    def install(self, model: nn.Module) -> None:
        """Put hooks on the model, so that backward ends with the strategy's gradients; not called when alone."""

    @abstractmethod
    def weigh(self, examples: int, total: int | None) -> None:
        """The coming backward passes stand for `examples` examples here, `total` over all workers (None: not known)."""

    @abstractmethod
    def suspend(self, held: bool) -> None:
        """While held, backward leaves gradients local."""

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, all workers hold the same model: what differs between replicas is averaged; afterwards it is back."""
        with averaged_buffers(models, self.group):
            yield

    def state_dict(self) -> dict[str, Any]:
        """What the strategy must remember to go on to the same bits after a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; called after the models were adopted."""
        del state

    def close(self) -> None:
        """Take off what was put on."""
        for handle in self.handles:
            handle.remove()


class Pace(ABC):
    """One worker's side of a `when`: decides for each batch whether its gradients are exchanged and applied now.

    It may take part in backward passes (`ModelHooks`) and in optimizers' steps (`StepHooks`), too.
    """

    replicated: bool = True
    """Whether replicas stay equal where the exchange keeps them so."""
    acts_in_steps: bool = False
    """Whether it acts when a prepared optimizer steps: without one, workers would part ways."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.handles: list[RemovableHandle] = []
        """Hooks that were put on models and optimizers; `close` takes them off."""

    @property
    def meeting(self) -> bool:
        """Whether workers meet in the coming batch; in others, nobody asks whether the rest still has data."""
        return True

    @property
    def updating(self) -> bool:
        """Whether optimizer steps in this batch are real updates."""
        return True

    @abstractmethod
    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """A new batch begins; `last` if it is known to be the last of its epoch."""

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Around an evaluation: inside, all workers hold the same models, as the exchange makes them."""
        with self.exchange.averaged(models):
            yield

    def foreseen(self) -> Step | str:
        """What a step exchanges, or a period of them; or why nobody can predict it."""
        return foreseen_by(self.exchange)

    def state_dict(self) -> dict[str, Any]:
        """What must be remembered to go on to the same bits after a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        del state

    def close(self) -> None:
        """Take off what was put on."""
        for handle in self.handles:
            handle.remove()


class Microbatches(Pace):
    """Batches of a step whose gradients are not summed here: the exchange sees each of them, and ends the step."""

    def __init__(self, exchange: Exchange, microbatched: Microbatched, steps: int) -> None:
        super().__init__(exchange)
        self._microbatched, self._steps = microbatched, steps
        self._batches = 0
        self._within = False

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Count the batch, and tell the exchange what it weighs and whether the step ends with it."""
        self._batches = 1 if self.updating else self._batches + 1
        self._within = not last and self._batches < self._steps
        self._microbatched.microbatch(self._within)
        self.exchange.weigh(examples, total)

    @property
    def updating(self) -> bool:
        """Whether this batch completes the step."""
        return not self._within

    def state_dict(self) -> dict[str, Any]:
        """A step may be half done at a checkpoint."""
        return {"batches": self._batches, "within": self._within}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        self._batches, self._within = state["batches"], state["within"]
        self._microbatched.microbatch(self._within)


class EveryBatch(Pace):
    """Gradients of every batch are exchanged and applied at once: what happens where no `when` is named."""

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Tell the exchange what the batch weighs."""
        del last
        self.exchange.weigh(examples, total)


@dataclass(frozen=True)
class Exchanging(Strategy):
    """A strategy on the exchange axis."""

    axis: ClassVar[Axis] = Axis.EXCHANGE
    carries: ClassVar[bool] = False
    """Whether what it sends can be compressed: its exchange heeds `compressions`."""
    mixes: ClassVar[bool] = False
    """Whether it mixes models after a step, instead of exchanging gradients before it."""
    sends_letters: ClassVar[bool] = False
    """Whether each letter goes to one receiver, where nothing can be summed on the way."""
    unplanned: ClassVar[str] = "it does not say beforehand what a step exchanges (give it `planned` or `rhythm`)"
    """Why `planned` has no answer."""

    @property
    def parting(self) -> bool:
        """Whether its workers may step by themselves for a while, as `local` lets them."""
        return False

    def servers(self, workers: int) -> tuple[int, int, Rule] | None:
        """How many servers it needs beside the workers, how many further copies of each, and by which rule; or None.

        With 0 servers there is still a coordinator, through which the live workers agree when others have died.
        """
        del workers
        return None

    def rhythm(self) -> RhythmOf | None:
        """When each worker pushes to servers and pulls from them; None where it has none to push to."""
        return None

    def planned(self, view: View, nbytes: int, forms: Sequence[RowFormat] = (), models: bool = False) -> Step | str:
        """What a step exchanges of a model of so many bytes, before any process has started; or why nobody knows.

        Args:
            view: Who takes part, and on which hosts.
            nbytes: Bytes of the model, as one tensor.
            forms: What compressors leave of it, in their order.
            models: Whether models are averaged, rather than gradients summed.

        """
        del view, nbytes, forms, models
        return self.unplanned

    @property
    def work(self) -> int:
        """How many times a worker computes its share of a batch: more than once where others compute it too."""
        return 1

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side of this strategy."""
        del group, stopwatch
        raise StrategyError(f"{type(self).__name__} has no worker's side. Give it `connect(self, group, stopwatch)`.")


@dataclass(frozen=True)
class Timing(Strategy):
    """A strategy on the `when` axis."""

    axis: ClassVar[Axis] = Axis.WHEN

    def pace(self, exchange: Exchange) -> Pace:
        """The worker's side of this strategy, on top of an exchange."""
        del exchange
        raise StrategyError(f"{type(self).__name__} has no worker's side. Give it `pace(self, exchange)`.")

    def batches_per_update(self) -> int:
        """How many global batches make one update."""
        return 1

    def planned(self, exchange: Exchanging, view: View, nbytes: int, forms: Sequence[RowFormat] = ()) -> Step | str:
        """What `exchange` exchanges under it, and in which steps; see `Exchanging.planned`."""
        del exchange, view, nbytes, forms
        return f"{self.name} does not say beforehand in which steps it exchanges (give it `planned`)"


def adopt(exchange: Exchange, model: nn.Module) -> None:
    """Let an exchange take part in training this model: start from worker 0's state, then install what it needs."""
    if exchange.starts_alike:
        share_state(model, exchange.group)
    if exchange.group.size > 1 or not exchange.starts_alike:
        exchange.install(model)


def pace_of(when: Timing | None, exchange: Exchange) -> tuple[Pace, int]:
    """The pace of an exchange, and how many batches make one step."""
    if when is not None:
        return when.pace(exchange), when.batches_per_update()
    several = len(exchange.slices()[0]) if isinstance(exchange, Sliced) else 1
    if several > 1 and isinstance(exchange, Microbatched):
        return Microbatches(exchange, exchange, several), several
    return EveryBatch(exchange), 1


def foreseen_by(exchange: Exchange) -> Step | str:
    """What a step of this exchange sends; or why its time cannot be predicted."""
    return exchange.foreseen() if isinstance(exchange, Costed) else exchange.unforeseen


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The closure that an optimizer's step was given, as its hooks see the call (the optimizer itself comes first)."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def share_state(model: nn.Module, group: Group) -> None:
    """Give every worker worker 0's parameters and buffers: one broadcast for each kind of number."""
    if group.size > 1:
        flat = Rows([*model.parameters(), *model.buffers()], every_kind=True)
        flat.write([group.share(row, "the sharing of worker 0's model") for row in flat.read()])


@contextmanager
def averaged_buffers(models: Sequence[nn.Module], group: Group) -> Generator[None]:
    """Inside, floating-point buffers (running statistics) are the workers' mean; afterwards each has its own again."""
    flat = Rows(b for model in models for b in model.buffers() if b.is_floating_point())
    if group.size == 1 or not flat.tensors:
        yield
        return
    own = flat.read()
    flat.write([group.mean(row.clone(), "the mean of buffers") for row in own])
    try:
        yield
    finally:
        flat.write(own)
