"""Everything about a federated deployment that must outlive the server's process, and what is fixed beforehand."""

from __future__ import annotations

import math
from typing import Final, Literal

from msgspec import Struct, field

from offbeat.protocols.federated.buffered_turns import BufferState
from offbeat.protocols.federated.messages import DeployedRound, Goodbye, UpdateSent
from offbeat.protocols.federated.plan import RoundPlan, round_failure
from offbeat.protocols.federated.roster import JoinedClient
from offbeat.protocols.federated.secure_sums import SecureProgress
from offbeat.protocols.machine import Name

HOPELESS: Final = 10
"""Rounds in a row without an update after which the server gives up."""
COUNTS: Final = ("updates", "late", "dropped", "refused", "failed_rounds", "duplicates", "stale", "rejected_joins")
"""What is counted over the rounds of a deployment."""


class RoundStatus(Struct):
    """Who takes part in a round, and whose update has come."""

    cohort: list[int] = []
    came: list[int] = []  # Clients whose update counts, in the order in which they came.
    late: list[int] = []  # Of an asynchronous server only: others are late when the round closes.
    dropped: list[int] = []
    refused: list[int] = []
    took: list[float] = []  # Seconds from the round's start to each update, without those of killed servers.
    scores: list[tuple[float, int]] = []  # Of the model that they got, each on so many examples.
    personal: list[tuple[float, ...]] = []  # Of the final model and of clients' own; empty: a client has none.
    secure: SecureProgress | None = None  # The secure sum of their updates, once it has begun.
    failure: str = ""  # Why there is no secure sum.

    def score(self, message: UpdateSent | Goodbye) -> None:
        """Take in a client's score."""
        if message.score is not None and math.isfinite(message.score) and message.scored > 0:
            self.scores.append((message.score, message.scored))
        own = message.personal if isinstance(message, Goodbye) else None
        if own is not None and (not own or (len(own) == 2 and all(map(math.isfinite, own)))):
            self.personal.append(own)

    @property
    def outstanding(self) -> list[int]:
        """Clients of which nothing has come."""
        over = {*self.came, *self.dropped, *self.refused}
        return [client for client in self.cohort if client not in over]


class FederationState(Struct):
    """Everything that must outlive the server's process."""

    phase: Literal["waiting", "gathering", "summing", "closing", "finishing", "finished"] = "waiting"
    number: int = 0  # The round under way, or the last one.
    version: int = 0  # Of the model.
    members: dict[Name, JoinedClient] = {}
    round: RoundStatus = field(default_factory=RoundStatus)
    accepted: dict[int, int] = {}  # The last round in which each client's update was accepted.
    finished: list[int] = []  # Clients that have the final model.
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    fruitless: int = 0  # Rounds in a row without an update.
    buffer: BufferState | None = None  # That of an asynchronous server.
    slowest: list[float] = []  # Seconds that the slowest client took, in each of the last rounds.

    @property
    def outstanding(self) -> list[int]:
        """Clients whose update is waited for."""
        if self.phase != "gathering":
            return []
        return self.round.outstanding if self.buffer is None else self.buffer.at_work

    def due(self, client: int) -> int:
        """The number of the task that a client has or had last: that of its turn, or of the round."""
        if self.buffer is None:
            return self.number
        turn = self.buffer.turns.get(client)
        return 0 if turn is None else turn.number

    def takes_part(self, client: int) -> bool:
        """Whether a client was selected for what is under way."""
        return client in self.round.cohort if self.buffer is None else client in self.buffer.turns

    def awaits_sum(self, client: int) -> bool:
        """Whether a client has an update that is to be summed securely."""
        return (
            self.phase in ("gathering", "summing")
            and client in self.round.came
            and self.accepted.get(client) != self.number
        )


class RoundTerms(Struct):
    """What is fixed about the rounds of a deployment before the first one."""

    plan: RoundPlan
    rounds: int  # After how many it ends.
    selection: int  # Seed of the selection of clients.
    update_bytes: int  # 0: a client that joins is to say it.
    first: int  # Clients that must be there before the first round.
    score_every: int | None  # Rounds between two scores by clients; None: they do not score.


def outcome_of(state: FederationState, plan: RoundPlan, started: float, ended: float) -> DeployedRound:
    """What came of a round that is over."""
    status = state.round
    failed = status.failure or round_failure(plan, len(status.cohort), len(status.came))
    return DeployedRound(
        number=state.number,
        version=state.version,
        cohort=tuple(status.cohort),
        participants=() if failed else tuple(status.came),
        late=tuple(status.outstanding),
        dropped=tuple(status.dropped),
        refused=tuple(status.refused),
        started=started,
        ended=ended,
        failed=failed,
        scores=tuple(status.scores),
    )
