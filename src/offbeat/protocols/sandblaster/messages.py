"""Everything that shards, workers and the coordinator of Sandblaster say to each other; and the commands.

Messages may be lost, late or come twice: every request has a number, is resent under it until it is answered, and is
carried out once. Vectors travel as the payload beside a message, and never to or from the coordinator.

Shards and coordinator are servers of the run: number `k` holds the k-th part of the vectors, the last one commands.
Which process that is, of several copies, is in the run's view, as for servers of any kind.
"""

from __future__ import annotations

import math

from msgspec import Struct

from offbeat.protocols.machine import Name
from offbeat.protocols.servers.messages import ClusterView, Fenced, Gone, Heartbeat, Replicated, Viewed, Volunteer

POINT = "trial"
"""The register of the parameters at which workers compute gradients."""
PARAMETERS = "x"
"""The register of the parameters that the last iteration has ended with."""


def first_view(workers: int, shards: int, replicas: int = 0) -> ClusterView:
    """The first view of a run: its workers, its shards and, as the last server, the coordinator; copies of each."""
    return ClusterView.of(workers, shards + 1, replicas)


class DefineProgram(Struct, frozen=True, tag="define", array_like=True):
    """A program over registers, which later commands name by its hash."""

    vectors: int  # How many of its arguments, from the first, are registers; the others are scalars.
    text: str


class RunProgram(Struct, frozen=True, tag="run", array_like=True):
    """Run a program: its results that are vectors go into registers, and those that are scalars are the answer."""

    program: str
    registers: tuple[str, ...]
    scalars: tuple[float, ...]
    into: tuple[str, ...]


class Gather(Struct, frozen=True, tag="gather", array_like=True):
    """An evaluation begins: from now on add the gradients of its portions as workers send them."""

    evaluation: int
    portions: int


class Gathered(Struct, frozen=True, tag="gathered", array_like=True):
    """The evaluation is over: its sum goes into a register."""

    into: str


Command = DefineProgram | RunProgram | Gather | Gathered


class Iteration(Struct, frozen=True, array_like=True):
    """The end of an iteration."""

    number: int
    loss: float
    gradient: float
    """The largest absolute value of the gradient."""
    step: float
    evaluations: int
    """Evaluations of the whole run."""
    stopped: str = ""
    """Why no further iteration would help; empty: one may."""


class OptimizerState(Struct, frozen=True, array_like=True):
    """All that L-BFGS remembers from one iteration to the next, beside the registers."""

    pairs: tuple[tuple[int, float], ...] = ()  # The slot of each, and 1 / (s·y); the oldest first.
    diagonal: float = 1.0
    gradient: str = ""  # The register of the gradient at the parameters; empty before it is known.
    loss: float = math.nan
    steepest: float = math.nan
    iterations: int = 0
    evaluations: int = 0


class MinimizerState(Struct, frozen=True, array_like=True):
    """The coordinator between two iterations."""

    optimizer: OptimizerState = OptimizerState()
    iteration: int = 0  # Iterations over.
    evaluation: int = 0
    last: Iteration | None = None
    handed_out: dict[str, int] = {}
    duplicated: dict[str, int] = {}
    reissued: int = 0
    traffic: tuple[int, int] = (0, 0)  # Bytes that it has sent and received.


class ShardMemory(Struct, frozen=True, array_like=True):
    """What a shard knows beside its registers. From those of all shards a new coordinator goes on where one has died.

    The coordinator's state at the start of an iteration, and the numbers it was told since, determine what it does
    next: so they are all that it leaves with the shards.
    """

    term: int = 0  # Of the newest coordinator; earlier ones command nothing any more.
    batch: int = 0  # The last batch that was carried out.
    values: tuple[float, ...] = ()  # The numbers that it gave.
    evaluation: int = 0  # The last evaluation that has begun.
    gathering: bool = False  # Whether its gradients are still being added.
    portions: dict[int, float] = {}  # Those that were added, with their shares of the loss.
    saved: MinimizerState | None = None  # The coordinator when its iteration began.
    answers: tuple[tuple[float, ...], ...] = ()  # What the optimizer was told since.


_SHORT = {
    "number": "n",
    "commands": "c",
    "term": "t",
    "answer": "a",
    "saved": "s",
    "values": "v",
    "iteration": "i",
    "finished": "f",
    "evaluation": "e",
    "portion": "p",
}
"""Fields of what an iteration sends most of, on the wire: their names would be half of it."""


class CommandBatch(Struct, frozen=True, tag="commands", omit_defaults=True, rename=_SHORT.get):
    """To a shard: carry out these commands in order, and answer with the numbers that they give."""

    number: int
    commands: tuple[Command, ...]
    term: int = 0  # The epoch since which the sender is the coordinator.
    answer: tuple[float, ...] | None = None  # What the optimizer was told before, if it is not in the batch before.
    saved: MinimizerState | None = None  # With the first batch of an iteration.


class Scalars(Struct, frozen=True, tag="scalars", rename=_SHORT.get):
    """From a shard: the numbers of a batch, over its part of the vectors."""

    number: int
    values: tuple[float, ...]


class Recover(Struct, frozen=True, tag=True):
    """To a shard: send your memory. From a new coordinator: since this term, earlier ones are refused."""

    number: int
    term: int = -1  # None of a worker, which only reads.


class Recovered(Struct, frozen=True, tag=True):
    """From a shard: its memory, as the payload."""

    number: int
    registers: tuple[str, ...] = ()


class LoadVector(Struct, frozen=True, tag=True):
    """To a shard: a register is the payload; with that of the parameters everything begins anew."""

    number: int
    kind: str  # Their type, and that of all registers: float32 or float64.
    register: str = PARAMETERS
    epoch: int = 0  # The newest that its sender knows: one that was declared dead meanwhile loads nothing any more.


class LoadMemory(Struct, frozen=True, tag=True):
    """To a shard: go on from this memory, which is the payload; the last of what is loaded."""

    number: int
    epoch: int = 0


class Read(Struct, frozen=True, tag=True):
    """To a shard: send a register: that of an evaluation's point, or one as it is after a batch."""

    number: int
    evaluation: int = -1
    register: str = PARAMETERS
    after: int = 0  # A batch that must have been carried out: a shard that was cut off may lag behind.


class Values(Struct, frozen=True, tag=True):
    """From a shard: the register, as the payload; none if another evaluation has begun."""

    number: int
    stale: bool = False


class Gradient(Struct, frozen=True, tag=True):
    """To a shard: its part of the gradient of a portion, which is the payload."""

    number: int
    evaluation: int
    portion: int
    loss: float = 0.0  # The portion's share of it, in case the coordinator dies.


class Accepted(Struct, frozen=True, tag=True):
    """From a shard: a gradient is in the sum, or is no longer needed; or parameters are loaded."""

    number: int


class FinishedPortion(Struct, frozen=True, array_like=True):
    """A portion whose gradient every shard has, with its share of the loss."""

    evaluation: int
    portion: int
    loss: float


class WorkRequest(Struct, frozen=True, tag="idle", omit_defaults=True, rename=_SHORT.get):
    """From a worker: what it has finished, if anything; it is idle and wants this iteration to end."""

    number: int
    iteration: int
    finished: FinishedPortion | None = None


class Assigned(Struct, frozen=True, tag="compute", rename=_SHORT.get):
    """To a worker: compute the loss and the gradient of a portion."""

    number: int
    evaluation: int
    portion: int


class IterationEnd(Struct, frozen=True, tag=True):
    """To a worker: an iteration is over. Counts are of the whole run."""

    number: int
    iteration: int
    loss: float
    gradient: float  # The largest absolute value of the gradient.
    step: float
    evaluations: int
    stopped: str  # Why no further iteration would help; empty: one may.
    handed_out: dict[str, int]  # Portions, by worker.
    duplicated: dict[str, int]  # Those of them that another worker had, too.
    reissued: int  # Portions of dead workers that were handed out again.
    batch: int = 0  # The last one: parameters must be read after it.
    sent: int = 0  # Bytes that the coordinator has sent and received, all messages as they are on the wire.
    received: int = 0


class LogEntry(Struct, frozen=True, array_like=True):
    """What changes a shard, in the order in which its primary took it. Copies that have the same entries are equal."""

    sender: Name
    request: CommandBatch | Recover | LoadVector | LoadMemory | Gradient


class Forward(Struct, frozen=True, tag=True, kw_only=True):
    """To a copy of a shard: the next entry of the log, with its payload."""

    epoch: int
    index: int
    committed: int  # All copies hold the entries up to this one.
    entry: LogEntry


SandblasterMessage = (
    CommandBatch
    | Scalars
    | Recover
    | Recovered
    | LoadVector
    | LoadMemory
    | Read
    | Values
    | Gradient
    | Accepted
    | WorkRequest
    | Assigned
    | IterationEnd
    | Forward
    | Replicated
    | Fenced
    | Gone
    | Heartbeat
    | Viewed
    | Volunteer
)
