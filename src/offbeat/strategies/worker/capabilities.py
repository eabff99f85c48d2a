"""What an exchange may be able to do beyond its core, each as a small protocol that the team asks for by type.

An exchange has a capability by having its methods: nothing is to be declared, and nothing to be left empty.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.compression import Shapes
from offbeat.protocols.exchanges import Exchanged
from offbeat.runtime.state.snapshots import SnapshotCut
from offbeat.simulate.predicted_step import Step

if TYPE_CHECKING:
    from offbeat.strategies.servers.vector import Vector


# -- while training is set up ------------------------------------------------------------------------------------------


@runtime_checkable
class Starter(Protocol):
    """Has something to do when everything is prepared."""

    def begin(self) -> None:
        """Everything in the first `prepare` is adopted, and a resumed model has its parameters: training begins."""
        ...


@runtime_checkable
class OptimizerHooks(Protocol):
    """Takes part in the steps of optimizers."""

    def attend(self, optimizer: Optimizer) -> None:
        """Take part in this optimizer's steps; called once for each."""
        ...


@runtime_checkable
class Sliced(Protocol):
    """Decides which slices of every batch a worker computes; otherwise the live workers have one each."""

    def slices(self) -> tuple[Sequence[int], int]:
        """Which slices are this worker's, of how many.

        Of several, the loop gets each as a batch of its own, and the step ends with the last.
        """
        ...


# -- in a step ---------------------------------------------------------------------------------------------------------


@runtime_checkable
class Microbatched(Protocol):
    """Can send the gradient of each of several batches of a step, rather than their sum with the last."""

    @property
    def takes_microbatches(self) -> bool:
        """Whether it does, with these settings."""
        ...

    def microbatch(self, within_step: bool) -> None:
        """The coming batch is one of several of a step, which goes on after it or ends with it."""
        ...


@runtime_checkable
class StepGuard(Protocol):
    """Refuses steps that would let workers drift apart."""

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step on its gradients: refuse if they are not what the strategy says."""
        ...


@runtime_checkable
class Overtaken(Protocol):
    """Steps may be made without this worker."""

    def passed_over(self) -> int:
        """Steps that were made without this worker since it was last asked."""
        ...


@runtime_checkable
class Ranged(Protocol):
    """Ranges of the parameters can be pushed and pulled by the loop."""

    def vector(self, counted: Callable[[], None]) -> Vector:
        """The parameters on servers; `counted` is told of each step."""
        ...


@runtime_checkable
class MeanMaker(Protocol):
    """Averages rows in a way of its own, for instance compressed."""

    def mean(self, row: Tensor, what: str, shapes: Shapes = ()) -> None:
        """Replace a row by its mean over the workers; `shapes` are those of the tensors in the row."""
        ...


@runtime_checkable
class StatisticsKeeper(Protocol):
    """Sums statistics in a way of its own, for tasks without gradients."""

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Statistics summed over the workers."""
        ...


@runtime_checkable
class PartsKeeper(Protocol):
    """Remembers which worker reports which part of the data."""

    def take_over(self) -> None:
        """Workers have died: others report their parts of the data from now on. All call this together."""
        ...


# -- while a run goes on -----------------------------------------------------------------------------------------------


@runtime_checkable
class Snapshotting(Protocol):
    """The run can be recorded while it goes on, without a meeting of the workers."""

    @property
    def snapshots(self) -> bool:
        """Whether it can, with these settings and by now."""
        ...

    @property
    def publishes(self) -> bool:
        """Whether this worker is to publish snapshots whose parts are all there; else somebody else does."""
        ...

    def want_snapshot(self) -> None:
        """Have the run recorded, as soon as everybody comes to a boundary."""
        ...

    def cut(self, clock: int) -> SnapshotCut | None:
        """At a boundary, after so many steps: be cut by a snapshot here, if one is due."""
        ...


@runtime_checkable
class Metered(Protocol):
    """Sends bytes that the group does not count."""

    def payload(self) -> int:
        """How many, so far."""
        ...


@runtime_checkable
class Observed(Protocol):
    """Has something to show while it runs."""

    def figures(self) -> dict[str, Any]:
        """What this worker has seen so far, for each line of the metrics and for the display; plain data."""
        ...


@runtime_checkable
class Accounted(Protocol):
    """Has something to show of all workers while it runs."""

    def accounts(self) -> dict[str, Any]:
        """What all workers have seen so far, for each line of the metrics; plain data. All call this together."""
        ...


# -- at the end --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Stale(Protocol):
    """Workers read old values. In lockstep they never do."""

    def staleness(self, steps: int) -> dict[str, int]:
        """How many steps old what workers read was: how often each, in `steps` steps. All call this together."""
        ...


@runtime_checkable
class HasNotes(Protocol):
    """Has entries of its own in the result."""

    def notes(self) -> dict[str, Any]:
        """More entries for the result; all workers are asked together."""
        ...


@runtime_checkable
class Costed(Protocol):
    """Knows what a step exchanges, so that its time can be predicted."""

    def foreseen(self) -> Step | str:
        """What a step exchanges; or why its time cannot be predicted."""
        ...


@runtime_checkable
class CostedMeans(Protocol):
    """Knows how long means of models take."""

    def foreseen_means(self, exchanges: Sequence[Exchanged]) -> Step | str:
        """A step in which models are averaged by these exchanges; or why its time cannot be predicted."""
        ...


@runtime_checkable
class Explaining(Protocol):
    """Has better words for errors that are of its own making."""

    def explained(self, error: BaseException | None) -> Exception | None:
        """A better error for one that came out of the loop, if it is of this exchange's making."""
        ...


# -- of a pace ---------------------------------------------------------------------------------------------------------


@runtime_checkable
class ModelHooks(Protocol):
    """A pace that takes part in backward passes."""

    def adopt(self, model: nn.Module) -> None:
        """Take part in training this model; called before the exchange adopts it."""
        ...


@runtime_checkable
class StepHooks(Protocol):
    """A pace that takes part in the steps of optimizers."""

    def watch(self, optimizer: Optimizer) -> None:
        """Take part in this optimizer's steps."""
        ...


# -- of both -----------------------------------------------------------------------------------------------------------


def refuse_halves(strategy: object, side: object) -> None:
    """Refuse a worker's side that has some methods of a capability and not the others: it would never be asked."""
    lacking = object()
    for capability in (Microbatched, Snapshotting):
        needed = [name for name in vars(capability) if not name.startswith("_")]
        missing = [name for name in needed if inspect.getattr_static(side, name, lacking) is lacking]
        if missing and len(missing) < len(needed):
            raise StrategyError(
                f"{type(side).__name__}, the worker's side of {strategy}, has "
                f"{', '.join(name for name in needed if name not in missing)} but not {', '.join(missing)}, and is "
                f"{capability.__name__} only with all of them. Add what is missing, or rename what it has."
            )
