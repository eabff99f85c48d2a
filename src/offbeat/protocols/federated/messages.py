"""What clients and the server of a federated deployment say to each other; models and updates travel as payloads.

Any message may be lost, late or duplicated, and either process may be restarted. So everything a client sends is about
a numbered round, the server answers repeats as it answered first, and clients give signs of life that say what they
are doing, from which the server sees what got lost.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from offbeat.limits import EXAMPLES
from offbeat.protocols.federated.buffered_turns import ClientTurn
from offbeat.protocols.federated.secure.messages import SecureAnswer, SecureRequest
from offbeat.protocols.federated.secure.plan import SecureEncoding
from offbeat.protocols.machine import Name, Payload

SERVER: Name = "federation"
"""The server's name."""
LIGHT = 1024**2  # Payloads up to this many bytes take no time worth mentioning.
SLOWEST = 1e6  # Bytes per second of the slowest link that is waited for.

Activity = Literal["preparing", "idle", "working", "sent", "stopping"]
"""`stopping`: it was told that its update is not wanted any more, and its training has not ended yet."""
Fate = Literal["accepted", "late", "refused", "failed"]
"""What became of a client's turn: its update counts, came too late, cannot be used, or the client reported an error."""


class MembershipRequest(Struct, frozen=True, tag=True):
    """A client asks to take part; its payload describes its model and task."""

    label: Annotated[str, Meta(max_length=1024)]  # What people call it.
    client: int | None = None  # The number that it wants; None: any.
    identity: Annotated[bytes, Meta(max_length=32)] = b""  # Its long-term Ed25519 public key, for secure sums.
    peers: Annotated[bytes, Meta(max_length=32)] = b""  # The digest of its list of all clients' keys, if it has one.


class Beat(Struct, frozen=True, tag=True):
    """A sign of life."""

    number: int  # The round that the client is or was working on last; 0: none.
    activity: Activity
    examples: Annotated[int, Meta(ge=0, le=EXAMPLES)]  # How many it has.


class UpdateSent(Struct, frozen=True, tag=True):
    """A client's update of the model, as the payload; where updates are summed securely, that it has one."""

    number: int  # Of the round.
    loss: float
    examples: Annotated[int, Meta(ge=0, le=EXAMPLES)]  # How many it went through, each epoch counted.
    score: float | None = None  # Of the model that it got, on its own data.
    scored: Annotated[int, Meta(ge=0, le=EXAMPLES)] = 0  # Examples of that score.
    version: int = 0  # Of the model that it started from.


class ClientFailure(Struct, frozen=True, tag=True):
    """A client could not train, and ends."""

    number: int  # Of the round; 0: before any.
    error: str
    traceback: str


class ClientLeave(Struct, frozen=True, tag=True):
    """A client ends before the last round."""


class Goodbye(Struct, frozen=True, tag=True):
    """A client has the final model, and ends."""

    score: float | None = None
    scored: Annotated[int, Meta(ge=0, le=EXAMPLES)] = 0
    personal: tuple[float, ...] | None = None  # Scores of this model and of the client's own; empty: it has none.


class Welcome(Struct, frozen=True, tag=True):
    """A client takes part."""

    client: int  # Its number.
    beat: float  # Seconds between its signs of life.
    seed: int
    strategy: str
    federation: str  # Names this federation among all that the client takes part in.


class Refused(Struct, frozen=True, tag=True):
    """A client cannot take part."""

    why: str


class UnknownClient(Struct, frozen=True, tag=True):
    """The server does not know the client: it should join again."""


class Noted(Struct, frozen=True, tag=True):
    """A sign of life has come."""


class RoundTask(Struct, frozen=True, tag=True):
    """Train from the model in the payload."""

    number: int  # Of the round, from 1.
    version: int  # Of the model.
    score: bool  # Whether the model is to be scored first.
    accepted: int = 0  # The last round in which the client's update was accepted, in case it was not told.


class Again(Struct, frozen=True, tag=True):
    """The update of this round has not come: send it again."""

    number: int


class Settled(Struct, frozen=True, tag=True):
    """A client's turn in a round is over."""

    number: int
    fate: Fate
    why: str = ""


class SecureStart(Struct, frozen=True, tag=True):
    """The secure sum of a round begins: send your keys."""

    number: int  # Of the round.
    plan: Annotated[bytes, Meta(max_length=1000)]  # A `SecureRound`.


class Finish(Struct, frozen=True, tag=True):
    """The last round is over; the final model is the payload."""

    version: int
    score: bool
    number: int = 0  # Rounds that are over.


class Farewell(Struct, frozen=True, tag=True):
    """The server expects nothing more of the client."""


FromClient = MembershipRequest | Beat | UpdateSent | ClientFailure | ClientLeave | Goodbye | SecureAnswer
FromServer = (
    Welcome
    | Refused
    | UnknownClient
    | Noted
    | RoundTask
    | Again
    | Settled
    | SecureStart
    | Finish
    | Farewell
    | SecureRequest
)


class Examine(Struct, frozen=True):
    """Work of the server: compare a client's model and task with its own. Result: `Examined`."""

    name: Name
    join: MembershipRequest
    description: Payload


class Examined(Struct, frozen=True):
    """What came of comparing a client's model and task with the server's."""

    why: str = ""  # What differs; empty if nothing.
    update_bytes: int = 0  # Size of an update, as the server knows it now; 0: it does not yet.


class AddUpdate(Struct, frozen=True):
    """Work of the server: keep an update and add it to the round's. Result: why it cannot be used; empty if it can."""

    client: int
    update: UpdateSent
    payload: Payload


class CloseRound(Struct, frozen=True):
    """Work of the server: move the model by the round's updates, and record the round. Result: `RoundClosed`."""

    outcome: DeployedRound
    total: bytes = b""  # The sum of encoded updates, where they are summed securely.


class RoundClosed(Struct, frozen=True):
    """What came of closing a round."""

    moved: bool  # Whether there is a new version of the model.
    model: Payload  # What clients get from now on.
    last: bool  # Whether no other round is needed: the target is reached.


class Prepare(Struct, frozen=True):
    """Work of a client, in the background: get its data ready. Result: how many examples it has, or `ClientFailure`."""

    welcome: Welcome


class Train(Struct, frozen=True):
    """Work of a client, in the background: score if asked for, and train. Result: `Trained` or `ClientFailure`."""

    task: RoundTask
    model: Payload


class Trained(Struct, frozen=True):
    """What came of a client's training."""

    update: UpdateSent
    payload: Payload


class EncodeUpdate(Struct, frozen=True):
    """Work of a client, in the background: its update as integers. Result: these, or why it has none."""

    number: int
    encoding: SecureEncoding
    fewest: int  # Clients without whose updates the sum is not revealed.


class Abandon(Struct, frozen=True):
    """Work of a client: stop training for this round, whose update nobody wants any more. `Done` when it has."""

    number: int


class Conclude(Struct, frozen=True):
    """Work of a client: its turn is over; keep what it remembers of this round if its update counts."""

    settled: Settled


class KeepFinal(Struct, frozen=True):
    """Work of a client, in the background: keep the final model, and score it if asked for. Result: a `Goodbye`."""

    finish: Finish
    model: Payload


class DeployedRound(Struct, frozen=True):
    """One round of real clients, from their selection to the update of the model; as `RoundOutcome` in simulation."""

    number: int
    version: int  # Of the model that they got.
    cohort: tuple[int, ...]
    participants: tuple[int, ...]  # In the order in which their updates came.
    late: tuple[int, ...]  # Still at work when the round closed.
    dropped: tuple[int, ...]  # Silent for too long, failed or gone.
    refused: tuple[int, ...]  # Sent what cannot be used.
    started: float
    ended: float
    failed: str = ""  # Why there is no update; empty if there is one.
    scores: tuple[tuple[float, int], ...] = ()  # Of the model that they got, and on how many examples.
    arrived: tuple[tuple[int, float], ...] = ()  # Clients and when their updates came, as far as this process saw.
    lost: tuple[tuple[int, float], ...] = ()  # Clients and when they were given up.
    turns: tuple[ClientTurn, ...] = ()  # Of an asynchronous server: those of the participants.
    asked: tuple[tuple[int, float], ...] = ()  # Of an asynchronous server: clients and when they were asked.


def patience_for(silence: float, nbytes: int) -> float:
    """Seconds without a sign of life after which a client is given up, if so many bytes may be on their way."""
    return silence + max(0, nbytes - LIGHT) / SLOWEST
