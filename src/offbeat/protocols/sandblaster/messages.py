"""Everything that shards, workers and the coordinator of Sandblaster say to each other; and the commands.

Messages may be lost, late or come twice: every request has a number, is resent under it until it is answered, and is
carried out once. Vectors travel as the payload beside a message, and never to or from the coordinator.
"""

from __future__ import annotations

from msgspec import Struct

from offbeat.protocols.machine import Name

MINIMIZER: Name = "minimizer"
"""The coordinator's name; a run with shards of another kind has a `coordinator` of its own."""

POINT = "trial"
"""The register of the parameters at which workers compute gradients."""
PARAMETERS = "x"
"""The register of the parameters that the last iteration has ended with."""


def shard_name(shard: int) -> Name:
    """The name of a shard."""
    return f"shard {shard}"


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


class CommandBatch(Struct, frozen=True, tag=True):
    """To a shard: carry out these commands in order, and answer with the numbers that they give."""

    number: int
    commands: tuple[Command, ...]


class Scalars(Struct, frozen=True, tag=True):
    """From a shard: the numbers of a batch, over its part of the vectors."""

    number: int
    values: tuple[float, ...]


class LoadVector(Struct, frozen=True, tag=True):
    """To a shard: start from these parameters, which are the payload."""

    number: int
    kind: str  # Their type, and that of all registers: float32 or float64.


class Read(Struct, frozen=True, tag=True):
    """To a shard: send a register; of an evaluation, or as it is (-1)."""

    number: int
    evaluation: int = -1


class Values(Struct, frozen=True, tag=True):
    """From a shard: the register, as the payload; none if another evaluation has begun."""

    number: int
    stale: bool = False


class Gradient(Struct, frozen=True, tag=True):
    """To a shard: its part of the gradient of a portion, which is the payload."""

    number: int
    evaluation: int
    portion: int


class Accepted(Struct, frozen=True, tag=True):
    """From a shard: a gradient is in the sum, or is no longer needed; or parameters are loaded."""

    number: int


class FinishedPortion(Struct, frozen=True):
    """A portion whose gradient every shard has, with its share of the loss."""

    evaluation: int
    portion: int
    loss: float


class WorkRequest(Struct, frozen=True, tag=True):
    """From a worker: what it has finished, if anything; it is idle and wants this iteration to end."""

    number: int
    iteration: int
    finished: FinishedPortion | None = None
    dead: tuple[Name, ...] = ()  # Workers that have died, as the members of the run have agreed.


class Assigned(Struct, frozen=True, tag=True):
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
    sent: int = 0  # Bytes that the coordinator has sent and received, all messages as they are on the wire.
    received: int = 0


SandblasterMessage = (
    CommandBatch | Scalars | LoadVector | Read | Values | Gradient | Accepted | WorkRequest | Assigned | IterationEnd
)
