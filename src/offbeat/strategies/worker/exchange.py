"""The worker's side of strategies: what happens inside the user's own training loop.

An `Exchange` makes sure that after `backward()` the gradients are what the strategy promises. A `Pace` decides for each
batch whether they are exchanged now. Both work through hooks, so the model and the optimizer stay the user's objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
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
from offbeat.strategies.compressors import Compressing
from offbeat.strategies.worker.capabilities import Costed, Divided, Microbatched, Sliced
from offbeat.strategies.worker.flat_rows import Rows


class WorkerSide:
    """One worker's side of a strategy: hooks that come off at the end, and a state for checkpoints."""

    replicated: bool = True
    """Whether parameters and optimizer state stay equal on all workers, so that a checkpoint stores them once."""
    acts_in_steps: bool = False
    """Whether it acts when a prepared optimizer steps: without one, workers would drift apart."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        """Hooks on models and optimizers; `close` removes them."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to continue to the same bits after a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state; called after the models were adopted."""
        del state

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def _hook_steps(self, optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self.handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


class Exchange(WorkerSide, ABC):
    """One worker's side of an exchange: the core that all of them have.

    What only some can do is in `strategies.worker.capabilities`; an exchange has a capability by having its methods.
    """

    starts_alike: bool = True
    """Whether a model starts from worker 0's state; otherwise `install` decides how it starts, also with one worker."""
    joins_late: bool = True
    """Whether a gradient that backward did not reach is exchanged too, if it is there when backward ends."""
    mixes: bool = False
    """Whether it mixes models after a step, instead of exchanging gradients before it."""
    updates_elsewhere: bool = False
    """Whether other processes update parameters, in their own time: two copies of one would then drift apart."""
    calls_closures: bool = False
    """Whether the closures of steps are called in its own way, so that their losses are not to be averaged."""
    unpredicted: str = "its exchanges are not known as schedules beforehand"
    """Why the time of a step cannot be predicted, unless it is `Costed`."""

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        super().__init__()
        self.group = group
        self.team: Group = group
        """All workers of the run, whose figures are in the result: the same, unless replicas are split."""
        self.stopwatch = stopwatch
        self.weight_in_backward = 1.0
        """The factor already applied to a gradient when backward finishes it."""
        self.compressions: Sequence[Compressing] = ()
        """Compressors, in the order in which they are applied; set before anything is adopted."""
        self.seed = 0
        """Seed of its randomness, the same on all workers; set before anything is adopted."""

    @property
    def lockstep(self) -> bool:
        """Whether workers meet in every step, so that one whose data has ended must keep taking part."""
        return True

    @property
    def aligned(self) -> bool:
        """Whether all workers can meet when an epoch begins, to agree on the order of its data."""
        return self.lockstep

    @abstractmethod
    def install(self, model: nn.Module) -> None:
        """Hook the model, so that backward ends with the strategy's gradients; not called with one worker."""

    @abstractmethod
    def weigh(self, examples: int, total: int | None) -> None:
        """The coming backward passes have `examples` examples here, `total` over all workers (None: unknown)."""

    @abstractmethod
    def suspend(self, held: bool) -> None:
        """While held, backward leaves gradients local."""

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, what differs between replicas is averaged, so that all workers hold the same model."""
        with averaged_buffers(models, self.group):
            yield


class Pace(WorkerSide, ABC):
    """One worker's side of a `when`: decides for each batch whether its gradients are exchanged and applied now.

    It may take part in backward passes (`ModelHooks`) and in optimizer steps (`StepHooks`), too.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    @property
    def meeting(self) -> bool:
        """Whether workers meet in the coming batch; otherwise no worker asks whether the others still have data."""
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
        """Around an evaluation: inside, all workers hold the same models."""
        with self.exchange.averaged(models):
            yield

    def predicted(self) -> Step | str:
        """What a step, or a period of them, exchanges; or why its time cannot be predicted."""
        return predicted_by(self.exchange)


class Microbatches(Pace):
    """Microbatches whose gradients are not summed here: the exchange sees each of them, and ends the step."""

    def __init__(self, exchange: Exchange, microbatched: Microbatched, steps: int) -> None:
        super().__init__(exchange)
        self._microbatched, self._steps = microbatched, steps
        self._batches = 0
        self._within = False

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Count the batch, and tell the exchange its weight and whether the step ends with it."""
        self._batches = 1 if self.updating else self._batches + 1
        self._within = not last and self._batches < self._steps
        self._microbatched.microbatch(self._within)
        self.exchange.weigh(examples, total)

    @property
    def updating(self) -> bool:
        """Whether this batch completes the step."""
        return not self._within

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint may fall within a step."""
        return {"batches": self._batches, "within": self._within}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue within the step."""
        self._batches, self._within = state["batches"], state["within"]
        self._microbatched.microbatch(self._within)


class EveryBatch(Pace):
    """Gradients of every batch are exchanged and applied at once: the default."""

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Tell the exchange the batch's weight."""
        del last
        self.exchange.weigh(examples, total)


@dataclass(frozen=True)
class Exchanging(Strategy):
    """A strategy on the exchange axis."""

    axis: ClassVar[Axis] = Axis.EXCHANGE
    carries: ClassVar[bool] = False
    """Whether what it sends can be compressed: its exchange uses `compressions`."""
    mixes: ClassVar[bool] = False
    """Whether it mixes models after a step, instead of exchanging gradients before it."""
    point_to_point: ClassVar[bool] = False
    """Whether each message has one receiver, so that nothing can be summed in transit."""
    unplanned: ClassVar[str] = "it does not say beforehand what a step exchanges (give it `planned` or `rhythm`)"
    """Why `planned` has no answer."""

    @property
    def parting(self) -> bool:
        """Whether its workers may step independently for a while, as under `local`."""
        return False

    def servers(self, workers: int) -> tuple[int, int, Rule] | None:
        """Number of shards, further copies of each, and the consistency rule; None if it needs no servers.

        With 0 shards there is still a coordinator, through which the live workers agree when others have died.
        """
        del workers
        return None

    def rhythm(self) -> RhythmOf | None:
        """When each worker pushes to servers and pulls from them; None without servers."""
        return None

    def planned(self, view: View, nbytes: int, forms: Sequence[RowFormat] = (), models: bool = False) -> Step | str:
        """What a step exchanges, before any process has started; or why it is not known.

        `nbytes` are those of the model, as one tensor; `models` if models are averaged, rather than gradients summed.
        """
        del view, nbytes, forms, models
        return self.unplanned

    @property
    def work(self) -> int:
        """How often each example is computed: more than once where several workers compute the same slice."""
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
    """Let an exchange take part in training this model: start from worker 0's state, then install its hooks."""
    if exchange.starts_alike and exchange.group.size > 1:
        # Every worker gets worker 0's parameters and buffers, with one broadcast for each dtype.
        # Some of its parameters may be another model's, too.
        with exchange.whole() if isinstance(exchange, Divided) else nullcontext():
            flat = Rows([*model.parameters(), *model.buffers()], every_kind=True)
            flat.write([exchange.group.share(row, "the sharing of worker 0's model") for row in flat.read()])
    if exchange.group.size > 1 or not exchange.starts_alike:
        exchange.install(model)


def pace_of(when: Timing | None, exchange: Exchange) -> tuple[Pace, int]:
    """The pace of an exchange, and how many batches make one step."""
    if when is not None:
        return when.pace(exchange), when.batches_per_update()
    slices = len(exchange.slices()[0]) if isinstance(exchange, Sliced) else 1
    if slices > 1 and isinstance(exchange, Microbatched):
        return Microbatches(exchange, exchange, slices), slices
    return EveryBatch(exchange), 1


def predicted_by(exchange: Exchange) -> Step | str:
    """What a step of this exchange sends; or why its time cannot be predicted."""
    return exchange.predicted() if isinstance(exchange, Costed) else exchange.unpredicted


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The closure passed to an optimizer's step, as its hooks see the call (the optimizer itself comes first)."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def refuse_closure(strategy: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], instead: str = "") -> None:
    """Refuse `optimizer.step(closure)`."""
    if closure_of(args, kwargs) is not None:
        raise StrategyError(f"{strategy} cannot be used with optimizer.step(closure). Use {instead or 'allreduce'}.")


@contextmanager
def averaged_buffers(models: Sequence[nn.Module], group: Group) -> Generator[None]:
    """Inside, floating-point buffers (running statistics) are the workers' mean; afterwards they are restored."""
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
