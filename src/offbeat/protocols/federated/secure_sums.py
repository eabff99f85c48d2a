"""The secure sum at the end of a deployed round: those who have trained mask their updates, and only the sum is seen.

It begins when a round has the clients it needs, so a client that dies while it trains costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.federated.messages import SecureStart
from offbeat.protocols.federated.roster import Roster
from offbeat.protocols.federated.secure.messages import SecureInvite
from offbeat.protocols.federated.secure.plan import (
    FEWEST_CLIENTS,
    MOST_NEIGHBOURS,
    ROUND_BYTES,
    SecureEncoding,
    SecureRound,
    lowest_threshold,
)
from offbeat.protocols.federated.secure.records import SecureServerState
from offbeat.protocols.federated.secure.server import SecureFailure, SecureServer, SecureSum, SecureTimes
from offbeat.protocols.federated.secure.shamir import SecretBytes
from offbeat.protocols.machine import Effect, Effects, Ended, Event, Name, Send


@dataclass(frozen=True)
class SecureTerms:
    """What a server needs for secure sums."""

    encoding: Callable[[Sequence[int], Sequence[float]], SecureEncoding]
    """How the updates of these clients, with these numbers of examples, become integers."""
    random: SecretBytes
    """Draws the ids of rounds."""
    two_thirds: bool = False
    """Whether more than two thirds of the selected clients must stay, not only of those that have trained."""


class SecureProgress(Struct):
    """How far the secure sum of a round is: enough for another process to go on with it."""

    plan: SecureRound
    server: SecureServerState


class SumKeeper:
    """Runs the secure sum of one round after the other; a part of `RoundKeeper`.

    Args:
        terms: What it needs.
        roster: The clients.
        name: Of the server.
        beat: Seconds between two signs of life.

    """

    def __init__(self, terms: SecureTerms, roster: Roster, name: Name, beat: float) -> None:
        self._terms, self._roster, self._name = terms, roster, name
        wait = 2 * roster.patience
        self._times = SecureTimes(phase=wait, masks=wait, repeat=beat)
        self._server: SecureServer | None = None
        self._progress: SecureProgress | None = None
        self._number = 0

    @property
    def outcome(self) -> SecureSum | SecureFailure | None:
        """How the sum has ended; None: it has not."""
        return None if self._server is None else self._server.outcome

    def plan(self, cohort: Sequence[int], came: Sequence[int], fewest: int) -> SecureProgress | str:
        """A new sum of the updates of those who came, or why there can be none."""
        if len(came) < FEWEST_CLIENTS:
            return f"{len(came)} clients are too few for secure aggregation, which needs {FEWEST_CLIENTS}"
        signed = self._roster.signs
        if signed and len(came) > MOST_NEIGHBOURS + 1:
            return f"{len(came):,} clients are too many for a signed round, which has {MOST_NEIGHBOURS + 1} at most"
        least = lowest_threshold(len(cohort)) if self._terms.two_thirds else 0
        if len(came) < least:
            return f"{len(came)} of {len(cohort)} clients have trained, and the noise is shared by {least}"
        sizes = {member.client: float(member.examples or 0) for member in self._roster.members.values()}
        encoding = self._terms.encoding(cohort, [sizes[client] for client in cohort])
        # In signed rounds all are neighbours: what some sign would not bind others.
        degree = len(came) - 1 if signed else None
        id, fewest = self._terms.random(ROUND_BYTES), max(fewest, least)  # noqa: A001
        plan = SecureRound.of(id, encoding, len(came), degree=degree, fewest=fewest, signed=signed)
        return SecureProgress(plan, SecureServerState())

    def begin(self, effects: Effects, now: float, number: int, came: Sequence[int], progress: SecureProgress) -> None:
        """Begin a sum, or go on where another process was."""
        identities = {member.client: member.identity for member in self._roster.members.values()}
        members = {client: identities[client] for client in came}
        names = {client: self._roster.name_of(client) for client in came}
        self._number, self._progress = number, progress
        # From a copy: `progress` changes only when the server's machine has ended a phase.
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(progress.server), type=SecureServerState)
        self._server = SecureServer(progress.plan, members, self._times, state, names, self._name)
        self._add(effects, self._server.begin(now))

    def on(self, effects: Effects, now: float, event: Event) -> None:
        """Hand an event to the machine of the sum."""
        if self._server is not None and self._server.outcome is None:
            self._add(effects, self._server.on(event, now))

    def lose(self, effects: Effects, now: float, client: int) -> None:
        """A client is gone."""
        self.on(effects, now, Ended(self._roster.name_of(client)))

    def refusals(self) -> list[tuple[Name, str]]:
        """What was refused since the last call."""
        if self._server is None:
            return []
        refused = [(each.sender, each.reason) for each in self._server.refused]
        self._server.refused.clear()
        return refused

    def _add(self, effects: Effects, more: Sequence[Effect]) -> None:
        server, progress = self._server, self._progress
        if server is None or progress is None:
            return
        if server.phase != progress.server.phase:  # Within a phase, clients repeat answers that were lost.
            progress.server = server.state()
        for effect in more:
            if isinstance(effect, Send) and isinstance(effect.message, SecureInvite):
                start = SecureStart(self._number, msgspec.msgpack.encode(progress.plan))
                effects.send(effect.to, start)
            else:
                effects.done.append(effect)


def agreed(start: SecureStart) -> SecureRound:
    """The plan of a sum, as a client reads it; one that is not secure is refused."""
    try:
        return msgspec.msgpack.decode(start.plan, type=SecureRound)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"the server's plan of a secure sum cannot be read: {error}") from error
