"""The worker's side of strategies: what happens inside a loop that somebody else has written.

An `Exchange` sees that after `backward()` the gradients are what the strategy says. A `Pace` decides, batch by batch,
whether they are exchanged now. Both work through hooks, so the model and the optimizer stay the user's own objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.compression import Shapes
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.rhythm import RhythmOf
from offbeat.runtime.group import Group
from offbeat.runtime.snapshots import Cut
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.simulate.foretelling import Step
from offbeat.strategies._base import Axis, Strategy
from offbeat.strategies._compressing import Compressing

if TYPE_CHECKING:
    from offbeat.strategies._vector import Vector


class Exchange(ABC):
    """One worker's side of a way to exchange. Alone (`single`) it does nothing."""

    replicated: ClassVar[bool] = True
    """Whether parameters and optimizer state are equal on all workers, so that a checkpoint needs them once."""
    joins_late: ClassVar[bool] = True
    """Whether a gradient that backward itself did not reach is exchanged too, if it is there when backward ends."""
    lockstep: ClassVar[bool] = True
    """Whether workers meet in every step, so that one whose data has ended must keep the others company."""
    mixes: ClassVar[bool] = False
    """Whether it mixes models after a step, instead of exchanging gradients before it."""
    acts_in_steps: ClassVar[bool] = False
    """Whether it exchanges when a prepared optimizer steps: without one, nothing would be exchanged."""
    unforeseen: ClassVar[str] = "its exchanges are not known as schedules beforehand"
    """Why nobody can foretell what a step takes, unless `foreseen` says what it exchanges."""

    @property
    def aligned(self) -> bool:
        """Whether all workers can meet when an epoch begins, to agree on the order of its data."""
        return self.lockstep

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        self.group = group
        self.stopwatch = stopwatch
        self.weight_in_backward = 1.0
        """The factor that a gradient has already been given when backward finishes it."""
        self.within_step = False
        """Whether the coming batch is a microbatch of a step that goes on after it; set where `takes_microbatches`."""
        self.compressions: Sequence[Compressing] = ()
        """What is done to what is sent, in this order; set before anything is adopted."""
        self.seed = 0
        """What its chance comes from, the same on all workers; set before anything is adopted."""

    @property
    def takes_microbatches(self) -> bool:
        """Whether it sends the gradient of each of several batches at once, rather than their sum with the last."""
        return False

    def adopt(self, model: nn.Module) -> None:
        """Take part in training this model: start from worker 0's state, then install what the strategy needs."""
        share_state(model, self.group)
        if self.group.size > 1:
            self.install(model)

    def begin(self) -> None:  # noqa: B027 - most strategies are ready when they have adopted a model
        """Everything in the first `prepare` is adopted, and a resumed model has its parameters: training begins."""

    @property
    def snapshots(self) -> bool:
        """Whether the run can be recorded while it goes on: workers then do not meet for a checkpoint in between."""
        return False

    @property
    def publishes(self) -> bool:
        """Whether this worker is to publish snapshots whose parts are all there; else somebody else does."""
        return False

    def want_snapshot(self) -> None:
        """Have the run recorded, as soon as everybody comes to a boundary."""
        raise UsageError(
            "a run of this strategy cannot be recorded while it goes on: its workers exchange in step, or keep what a "
            "snapshot does not cover (elastic, coded, hogwild). Use team.checkpoint(), for which all workers meet. "
            "Snapshots are for server(consistency=ssp(s) or asp), downpour and gossip(asynchronous=True)."
        )

    def vector(self, counted: Callable[[], None]) -> Vector:
        """The parameters on servers, of which ranges can be pushed and pulled; `counted` is told of each step."""
        del counted
        raise StrategyError(
            "this run's parameters are on no servers, so no range of them can be pushed or pulled there. Name the "
            "strategy server, such as --strategy 'server(shards=2)'."
        )

    def cut(self, clock: int) -> Cut | None:
        """At a boundary, after so many steps: be cut by a snapshot here, if one is due."""
        del clock
        return None

    def passed_over(self) -> int:
        """Steps that were made without this worker since it was last asked."""
        return 0

    def slices(self) -> tuple[Sequence[int], int] | None:
        """Which slices of every batch are this worker's, of how many; None: the live workers have one each.

        Of several, the loop gets each as a batch of its own, and the step ends with the last.
        """
        return None

    @abstractmethod
    def install(self, model: nn.Module) -> None:
        """Put hooks on the model, so that backward ends with the strategy's gradients; not called when alone."""

    @abstractmethod
    def weigh(self, examples: int, total: int | None) -> None:
        """The coming backward passes stand for `examples` examples here, `total` over all workers (None: not known)."""

    @abstractmethod
    def suspend(self, held: bool) -> None:
        """While held, backward leaves gradients local."""

    def attend(self, optimizer: Optimizer) -> None:  # noqa: B027 - most strategies leave optimizers alone
        """Take part in this optimizer's steps; called once for each."""

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step on its gradients: refuse if they are not what the strategy says."""
        del optimizer

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, all workers hold the same model: what differs between replicas is averaged; afterwards it is back."""
        with averaged_buffers(models, self.group):
            yield

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Statistics summed over the workers, for tasks that are no gradient descent."""
        return self.group.sums(statistics, "the sum of statistics")

    def take_over(self) -> None:  # noqa: B027 - most strategies remember nothing of parts
        """Workers have died: others tell of their parts of the data from now on. All call this together."""

    def mean(self, row: Tensor, what: str, shapes: Shapes = ()) -> None:
        """Replace a row by its mean over the workers: how parameters, or how they have changed, are averaged.

        Compressed as the strategy says; `shapes` are those of the tensors in the row, for compressors that need them.
        """
        del shapes
        self.group.mean(row, what)

    def payload(self) -> int:
        """Bytes this worker has sent outside of `group`, which counts its own."""
        return 0

    def explained(self, error: BaseException | None) -> Exception | None:
        """A better error for one that came out of the loop, if it is of this exchange's making."""
        del error
        return None

    def notes(self) -> dict[str, Any]:
        """More entries for the result; all workers are asked together."""
        return {}

    def foreseen(self) -> Step | str:
        """What a step exchanges, from which its time can be foretold; or why it cannot."""
        return self.unforeseen

    def foreseen_means(self, exchanges: Sequence[Exchanged]) -> Step | str:
        """The same, of means of models that were made by these exchanges."""
        del exchanges
        return self.unforeseen

    def figures(self) -> dict[str, Any]:
        """What this worker has seen so far, for each line of the metrics and for the display; plain data."""
        return {}

    def accounts(self) -> dict[str, Any]:
        """What all workers have seen so far, for each line of the metrics; plain data. All call this together."""
        return {}

    def staleness(self, steps: int) -> dict[str, int]:
        """How many steps old what this worker read was: how often each, in `steps` steps. In lockstep it never is."""
        return {"0": steps}

    def state_dict(self) -> dict[str, Any]:
        """What the strategy must remember to go on to the same bits after a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; called after the models were adopted."""
        del state

    def close(self) -> None:  # noqa: B027 - most strategies have nothing to do here
        """Take off what `install` has put on."""


class Pace(ABC):
    """One worker's side of a `when`: decides for each batch whether its gradients are exchanged and applied now."""

    replicated: ClassVar[bool] = True
    """Whether replicas stay equal where the exchange keeps them so."""
    acts_in_steps: ClassVar[bool] = False
    """Whether it acts when a prepared optimizer steps: without one, workers would part ways."""

    @property
    def meeting(self) -> bool:
        """Whether workers meet in the coming batch; in others, nobody asks whether the rest still has data."""
        return True

    @contextmanager
    def averaged(self, models: Sequence[nn.Module], exchange: Exchange) -> Generator[None]:
        """Around an evaluation: inside, all workers hold the same models, as the exchange makes them."""
        with exchange.averaged(models):
            yield

    @abstractmethod
    def adopt(self, model: nn.Module) -> None:
        """Take part in training this model; called before the exchange adopts it."""

    @abstractmethod
    def watch(self, optimizer: Optimizer) -> None:
        """Take part in this optimizer's steps."""

    @abstractmethod
    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """A new batch begins; `last` if it is known to be the last of its epoch."""

    @property
    @abstractmethod
    def updating(self) -> bool:
        """Whether optimizer steps in this batch are real updates."""

    def foreseen(self, exchange: Exchange) -> Step | str:
        """What a step exchanges, or a period of them; or why nobody can foretell it."""
        return exchange.foreseen()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What must be remembered to go on to the same bits after a resume."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""

    def close(self) -> None:  # noqa: B027 - most have put nothing on
        """Take off what `adopt` and `watch` have put on."""


class Microbatches(Pace):
    """Batches of a step whose gradients are not summed here: the exchange sees each of them, and ends the step."""

    def __init__(self, exchange: Exchange, steps: int) -> None:
        self._exchange, self._steps = exchange, steps
        self._batches = 0

    def adopt(self, model: nn.Module) -> None:
        """Nothing to do."""

    def watch(self, optimizer: Optimizer) -> None:
        """Nothing to do: where gradients are sent, optimizers do not step here."""

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Count the batch, and tell the exchange what it weighs and whether the step ends with it."""
        self._batches = 1 if self.updating else self._batches + 1
        self._exchange.within_step = not last and self._batches < self._steps
        self._exchange.weigh(examples, total)

    @property
    def updating(self) -> bool:
        """Whether this batch completes the step."""
        return not self._exchange.within_step

    def state_dict(self) -> dict[str, Any]:
        """A step may be half done at a checkpoint."""
        return {"batches": self._batches, "within": self._exchange.within_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        self._batches, self._exchange.within_step = state["batches"], state["within"]


class EveryBatch(Pace):
    """Gradients of every batch are exchanged and applied at once: what happens where no `when` is named."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def adopt(self, model: nn.Module) -> None:
        """Nothing to do."""

    def watch(self, optimizer: Optimizer) -> None:
        """Nothing to do."""

    def begin(self, examples: int, total: int | None, last: bool) -> None:
        """Tell the exchange what the batch weighs."""
        del last
        self._exchange.weigh(examples, total)

    @property
    def updating(self) -> bool:
        """Always."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""


@dataclass(frozen=True)
class Exchanging(Strategy):
    """A strategy on the exchange axis."""

    axis: ClassVar[Axis] = Axis.EXCHANGE
    carries: ClassVar[bool] = False
    """Whether what it sends can be compressed: its exchange heeds `compressions`."""
    parting: ClassVar[bool] = False
    """Whether its workers may step by themselves for a while, as `local` lets them."""
    mixes: ClassVar[bool] = False
    """Whether it mixes models after a step, instead of exchanging gradients before it."""
    sends_letters: ClassVar[bool] = False
    """Whether each letter goes to one receiver, where nothing can be summed on the way."""

    def servers(self, workers: int) -> tuple[int, int, Rule] | None:
        """How many servers it needs beside the workers, how many further copies of each, and by which rule; or None.

        With 0 servers there is still a coordinator, through which the live workers agree when others have died.
        """
        del workers
        return None

    def rhythm(self) -> RhythmOf | None:
        """When each worker pushes to servers and pulls from them; None where it has none to push to."""
        return None

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


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The closure that an optimizer's step was given, as its hooks see the call (the optimizer itself comes first)."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def share_state(model: nn.Module, group: Group) -> None:
    """Give every worker worker 0's parameters and buffers: one broadcast for each kind of number."""
    if group.size == 1:
        return
    tensors = _distinct([*model.parameters(), *model.buffers()])
    for dtype, device in sorted({(t.dtype, t.device) for t in tensors}, key=str):
        alike = [t for t in tensors if t.dtype == dtype and t.device == device]
        flat = torch.cat([t.detach().reshape(-1) for t in alike])
        group.share(flat, "the sharing of worker 0's model")
        with torch.no_grad():
            for tensor, piece in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


@contextmanager
def averaged_buffers(models: Sequence[nn.Module], group: Group) -> Generator[None]:
    """Inside, floating-point buffers (running statistics) are the workers' mean; afterwards each has its own again."""
    buffers = _distinct([b for model in models for b in model.buffers() if b.is_floating_point()])
    if group.size == 1 or not buffers:
        yield
        return
    own = [buffer.clone() for buffer in buffers]
    for kind in sorted({buffer.dtype for buffer in buffers}, key=str):
        _average([buffer for buffer in buffers if buffer.dtype == kind], group)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in zip(buffers, own, strict=True):
                buffer.copy_(kept)


def _average(buffers: Sequence[Tensor], group: Group) -> None:
    """Replace buffers of one kind by their mean over the workers."""
    mean = group.mean(torch.cat([buffer.reshape(-1) for buffer in buffers]), "the mean of buffers")
    with torch.no_grad():
        for buffer, piece in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(piece.view(buffer.shape))


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor once, however many names it has (tied weights)."""
    return list({id(tensor): tensor for tensor in tensors if tensor.numel()}.values())
