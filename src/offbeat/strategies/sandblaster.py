"""Sandblaster: full-batch L-BFGS whose vectors stay on shards; workers compute gradients of small portions of the data.

Dean et al., "Large Scale Distributed Deep Networks" (2012), section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from offbeat.errors import StrategyError
from offbeat.protocols.sandblaster.messages import IterationEnd
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.groups.coordinated_group import CoordinatedGroup
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.sandblaster.link import ShardLink
from offbeat.runtime.sandblaster.plan import SandblasterPlan
from offbeat.runtime.servers.plan import ServerPlan
from offbeat.strategies._base import Axis, Strategy, Traits
from offbeat.strategies.worker.exchange import Exchange, Exchanging
from offbeat.task import AnyTask, IterativeTask

MOST_SHARDS = 256
MOST_HISTORY = 100
MOST_REPLICAS = 7
MOST_PORTIONS = 100_000


class LineSearch(StrEnum):
    """How far to go in a direction."""

    STRONG_WOLFE = "strong_wolfe"  # Until loss and slope have both decreased enough.


@dataclass(frozen=True)
class Sandblaster(Exchanging):
    """L-BFGS on shards: workers compute gradients of portions of all data, a coordinator commands without any vector.

    A step is an iteration on the whole training part. Idle workers take the next portion, so fast ones compute more;
    the last portions go to two workers each, and the first answer counts.
    """

    shards: int = 2
    """Processes that hold the parameters, the gradients and the history, each a part of all of them."""
    history: int = 10
    """Steps, and changes of the gradient over them, that L-BFGS remembers."""
    line_search: LineSearch = LineSearch.STRONG_WOLFE
    """How far to go in a direction: strong_wolfe, with the constants of torch.optim.LBFGS."""
    replicas: int = 0
    """Further copies of every shard and of the coordinator, each a process: a dead one's next copy takes over."""
    portions: int = 32
    """Parts of the training data that are handed out one by one; many more than there are workers."""
    tolerance: float = 1e-7
    """The run ends when no number of the gradient is larger."""

    promises = Traits(elastic=True)
    examples = ("sandblaster", "sandblaster(shards=4, history=20)", "sandblaster(replicas=1, portions=100)")
    unplanned = "how many portions each worker computes is decided during the run"
    _ranges = (
        ("shards", lambda shards: 1 <= shards <= MOST_SHARDS, f"vectors have 1 to {MOST_SHARDS} shards"),
        ("replicas", lambda count: 0 <= count <= MOST_REPLICAS, f"there are 0 to {MOST_REPLICAS} further copies"),
        ("history", lambda steps: 1 <= steps <= MOST_HISTORY, f"L-BFGS remembers 1 to {MOST_HISTORY} steps"),
        ("portions", lambda count: 1 <= count <= MOST_PORTIONS, f"there are 1 to {MOST_PORTIONS:,} portions"),
        ("tolerance", lambda size: 0 <= size < float("inf"), "the size of a gradient is finite and not negative"),
    )

    def refuses(self, other: Strategy) -> str | None:
        """Whatever else decides what is sent or when: a line search needs exact gradients at its own points."""
        if other.axis is Axis.COMPRESSION:
            return "a line search compares losses and slopes that compressed gradients would make wrong"
        if other.axis is Axis.WHEN:
            return "each evaluation is on all training data, and the line search decides how many there are"
        if other.axis is Axis.SPLIT:
            return "each worker computes with the whole model"
        return None

    def check_task(self, task: AnyTask) -> None:
        """Refuse tasks without gradients."""
        if isinstance(task, IterativeTask):
            raise StrategyError(
                f"{self} cannot be used with {type(task).__name__}: it has statistics and an update of its own instead "
                f"of a gradient to follow. Use allreduce or server."
            )

    def servers(self, workers: int) -> tuple[int, int, Rule] | None:
        """The shards and, as one server more, what commands them; and how many further copies of each there are."""
        del workers
        return self.shards + 1, self.replicas, Rule(None)

    def plan(self, servers: ServerPlan) -> SandblasterPlan:
        """These servers, as shards and coordinator."""
        return SandblasterPlan(
            servers=servers,
            portions=self.portions,
            history=self.history,
            tolerance=self.tolerance,
        )

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: its connection to the shards."""
        if not isinstance(group, CoordinatedGroup):
            raise StrategyError(
                f"{self} has shards in processes of their own, which only `offbeat run --strategy ...` starts. Start "
                f"the task that way."
            )
        return SandblasterWorker(group, stopwatch, self)


class SandblasterWorker(Exchange):
    """The connection to the shards; the loop is `offbeat.worker.sandblaster`, or `offbeat.team.closures`."""

    starts_alike = False
    calls_closures = True
    unpredicted = Sandblaster.unplanned

    def __init__(self, group: CoordinatedGroup, stopwatch: Stopwatch, strategy: Sandblaster) -> None:
        super().__init__(group, stopwatch)
        membership, self._strategy = group.membership, strategy
        self.link = ShardLink(strategy.plan(group.client.plan), group.rank, membership.check)
        self.latest: dict[str, Any] = {}
        """Figures of the latest iteration."""
        self.evaluations = 0
        """Evaluations of the run so far."""
        self._iteration = 0
        self._files: Path | None = None  # Of the checkpoint that the run is resumed from.
        group.client.tell(self.link.viewed)

    def install(self, model: nn.Module) -> None:
        """Refuse models whose loss is not a function of the parameters alone."""
        check_model(model, self._strategy)

    def start(self, row: NDArray[Any]) -> None:
        """Give the shards what they begin with: by the first worker, or the next one if it dies meanwhile."""
        membership = self.group.membership
        self.link.begin(row, self._iteration)
        leader = -1
        while leader not in membership.present:
            leader = membership.leader()
            if leader == self.group.rank and self._files is not None:
                self.link.restore(self._files)
            elif leader == self.group.rank:
                self.link.load(row)
            self.group.barrier("the sharing of the first parameters")

    def ended(self, end: IterationEnd) -> int:
        """An iteration is over; returns how many evaluations it took."""
        made, self.evaluations = end.evaluations - self.evaluations, end.evaluations
        self._iteration = end.iteration
        self.latest = {"gradient": end.gradient, "evaluations": end.evaluations}
        return made

    def state_dict(self) -> dict[str, Any]:
        """How far the run has come; registers and history are in files of their own."""
        return {"iteration": self._iteration, "evaluations": self.evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._iteration, self.evaluations = int(state["iteration"]), int(state["evaluations"])

    def write_files(self, folder: Path) -> None:
        """Write the shards' registers and memories, one register after the other."""
        self.link.write_files(folder)

    def resume_files(self, folder: Path) -> None:
        """The run is resumed from the files of this checkpoint."""
        self._files = folder

    def weigh(self, examples: int, total: int | None) -> None:
        """Portions have their weights."""

    def suspend(self, held: bool) -> None:
        """Gradients go to shards only."""

    def payload(self) -> int:
        """Bytes of gradients and parameters that this worker has sent to shards."""
        return self.link.payload

    def figures(self) -> Mapping[str, Any]:
        """The iteration, the size of the gradient and the evaluations so far."""
        return self.latest

    def close(self) -> None:
        """Close the connection."""
        super().close()
        self.link.close()


def check_model(model: nn.Module, strategy: Sandblaster) -> list[nn.Parameter]:
    """The parameters that are trained; refuses models whose loss is not a function of the parameters alone."""
    for name, module in model.named_modules():
        share_dropped = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        random = isinstance(share_dropped, float) and share_dropped > 0
        if random or isinstance(module, _NormBase):
            why = "is random" if random else "depends on which examples are in a batch together"
            raise StrategyError(
                f"{strategy} compares the loss at several points, and with {type(module).__name__} ({name!r}) the loss "
                f"{why}: the line search would follow that instead. Take the module out, or use allreduce."
            )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = {str(parameter.dtype) for parameter in parameters}
    if len(kinds) != 1 or not kinds <= {"torch.float32", "torch.float64"}:
        raise StrategyError(
            f"{strategy} keeps parameters as one vector of float32 or of float64, and this model has "
            f"{', '.join(sorted(kinds)) or 'none that require a gradient'}. Convert it, as by model.float()."
        )
    count = sum(parameter.numel() for parameter in parameters)
    if count < strategy.shards:
        raise StrategyError(
            f"{strategy}: {count} parameters cannot be spread over {strategy.shards} shards. Ask for fewer."
        )
    return parameters
