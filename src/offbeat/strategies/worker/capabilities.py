"""Optional capabilities of an exchange or a pace, each a small protocol that the team checks for by type.

An exchange has a capability by having its methods: there is nothing to declare, and no method to leave empty.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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
    """Has work to do when everything is prepared."""

    def begin(self) -> None:
        """Training begins: the first `prepare` is done, and a resumed model has its parameters."""


@runtime_checkable
class OptimizerHooks(Protocol):
    """Takes part in optimizer steps."""

    def attend(self, optimizer: Optimizer) -> None:
        """Take part in this optimizer's steps; called once for each optimizer."""


@runtime_checkable
class Sliced(Protocol):
    """Decides which slices of a batch a worker computes; by default the live workers have one each."""

    def slices(self) -> tuple[Sequence[int], int]:
        """The slices of this worker, and their total number.

        If it has several, the loop gets each as a batch, and the step ends with the last.
        """
        ...


@runtime_checkable
class Divided(Protocol):
    """Its workers may hold parts of the parameters only."""

    def whole(self) -> AbstractContextManager[None]:
        """Inside, every worker has all parameters, which it may change. Collective."""
        ...


# -- in a step ---------------------------------------------------------------------------------------------------------


@runtime_checkable
class Microbatched(Protocol):
    """Can send the gradient of each microbatch, rather than their sum at the end of the step."""

    @property
    def takes_microbatches(self) -> bool:
        """Whether it does, with these settings."""
        ...

    def microbatch(self, within_step: bool) -> None:
        """The coming batch is a microbatch; whether the step goes on after it."""


@runtime_checkable
class StepGuard(Protocol):
    """Refuses steps that would let workers drift apart."""

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: refuse if its gradients are not what the strategy promises."""


@runtime_checkable
class Overtaken(Protocol):
    """Steps may complete without this worker."""

    def passed_over(self) -> int:
        """Steps that completed without this worker since the last call."""
        ...


@runtime_checkable
class Ranged(Protocol):
    """The loop can push and pull ranges of the parameters."""

    def vector(self, counted: Callable[[], None]) -> Vector:
        """The parameters on servers; `counted` is called after each step."""
        ...


@runtime_checkable
class MeanMaker(Protocol):
    """Averages rows in its own way, for instance compressed."""

    def mean(self, row: Tensor, what: str, shapes: Shapes = ()) -> None:
        """Replace a row by its mean over the workers; `shapes` are those of the tensors in the row."""


@runtime_checkable
class StatisticsKeeper(Protocol):
    """Sums statistics in its own way, for tasks without gradients."""

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Statistics summed over the workers."""
        ...


@runtime_checkable
class PartsKeeper(Protocol):
    """Remembers which worker reports which part of the data."""

    def take_over(self) -> None:
        """Workers have died: others report their parts from now on. Collective."""


# -- during a run ------------------------------------------------------------------------------------------------------


@runtime_checkable
class Snapshotting(Protocol):
    """Can be recorded during a run, without a meeting of the workers."""

    @property
    def snapshots(self) -> bool:
        """Whether it can, with these settings and at this point."""
        ...

    @property
    def publishes(self) -> bool:
        """Whether this worker publishes complete snapshots; otherwise another process does."""
        ...

    def want_snapshot(self) -> None:
        """Request a snapshot, taken as each worker reaches a boundary."""

    def cut(self, clock: int) -> SnapshotCut | None:
        """The part of this worker in a snapshot at a boundary after `clock` steps, if one is due."""
        ...


@runtime_checkable
class Metered(Protocol):
    """Sends bytes that the group does not count."""

    def payload(self) -> int:
        """How many, so far."""
        ...


@runtime_checkable
class Observed(Protocol):
    """Has figures to show during a run."""

    def figures(self) -> dict[str, Any]:
        """The figures of this worker so far, for each line of the metrics and for the display; plain data."""
        ...


@runtime_checkable
class Accounted(Protocol):
    """Has figures of all workers to show during a run."""

    def accounts(self) -> dict[str, Any]:
        """Figures of all workers so far, for each line of the metrics; plain data. Collective."""
        ...


# -- at the end --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Stale(Protocol):
    """Its workers may read old values. In lockstep they never do."""

    def staleness(self, steps: int) -> dict[str, int]:
        """Number of reads by their staleness, in `steps` steps of all workers. Collective."""
        ...


@runtime_checkable
class HasNotes(Protocol):
    """Adds entries to the result."""

    def notes(self) -> dict[str, Any]:
        """The entries. Collective."""
        ...


@runtime_checkable
class Costed(Protocol):
    """Knows what a step exchanges, so that its time can be predicted."""

    def predicted(self) -> Step | str:
        """What a step exchanges; or why its time cannot be predicted."""
        ...


@runtime_checkable
class CostedMeans(Protocol):
    """Knows how long means of models take."""

    def predicted_means(self, exchanges: Sequence[Exchanged]) -> Step | str:
        """A step in which models are averaged by these exchanges; or why its time cannot be predicted."""
        ...


@runtime_checkable
class Explaining(Protocol):
    """Explains errors that its exchanges cause."""

    def explained(self, error: BaseException | None) -> Exception | None:
        """A better error for one that the loop raised, if this exchange caused it."""
        ...


# -- of a pace ---------------------------------------------------------------------------------------------------------


@runtime_checkable
class ModelHooks(Protocol):
    """A pace that takes part in backward passes."""

    def adopt(self, model: nn.Module) -> None:
        """Take part in training this model; called before the exchange adopts it."""


@runtime_checkable
class StepHooks(Protocol):
    """A pace that takes part in optimizer steps."""

    def watch(self, optimizer: Optimizer) -> None:
        """Take part in this optimizer's steps."""


def refuse_halves(strategy: object, side: object) -> None:
    """Refuse a worker's side that has only some methods of a capability: it would never be used."""
    absent = object()
    for capability in (Microbatched, Snapshotting):
        names = [name for name in vars(capability) if not name.startswith("_")]
        missing = [name for name in names if inspect.getattr_static(side, name, absent) is absent]
        if missing and len(missing) < len(names):
            raise StrategyError(
                f"{type(side).__name__}, the worker's side of {strategy}, has "
                f"{', '.join(name for name in names if name not in missing)} but not {', '.join(missing)}, and is "
                f"{capability.__name__} only with all of them. Add what is missing, or rename what it has."
            )
