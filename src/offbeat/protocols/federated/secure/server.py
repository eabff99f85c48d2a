"""The server of a secure aggregation: it relays keys and shares, sums masked updates, and takes the masks off the sum.

It asks in phases. A phase ends when all have answered who have not died, or at its deadline, and the next one goes on
with those who have answered. When too few are left to recover every secret that the sum needs, the round ends without
a sum, and before any share is released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.limits import seconds
from offbeat.protocols.federated.secure.answers import fault
from offbeat.protocols.federated.secure.integers import Row
from offbeat.protocols.federated.secure.messages import (
    MOST_TEXT,
    SERVER,
    SecureEnd,
    SecureLeave,
    SecureRefusal,
    SecureWait,
    client_name,
)
from offbeat.protocols.federated.secure.plan import SecureEncoding, SecureRound
from offbeat.protocols.federated.secure.primitives import require_cryptography
from offbeat.protocols.federated.secure.records import SecureRecords, SecureServerState
from offbeat.protocols.federated.secure.recovery import UnmaskedSum
from offbeat.protocols.machine import Done, Effect, Effects, Ended, Event, Name, Payload, Received, Timer

MOST_REFUSALS: Final = 1000
"""Refusals that are remembered."""


class SecureTimes(Struct, frozen=True):
    """How long the server waits, in seconds."""

    phase: float = 30.0  # For answers that take no training.
    masks: float = 600.0  # For masked updates, which come when clients have trained.
    repeat: float = 5.0  # Between two questions to a client that has not answered, and two signs of life to others.

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        for name in ("phase", "masks", "repeat"):
            seconds(name, getattr(self, name))


class SecureSum(Struct, frozen=True):
    """A round that ended well."""

    total: Row  # The sum of encoded updates, modulo the power of two of their encoding.
    clients: tuple[int, ...]  # Whose updates are in it.
    liars: tuple[int, ...] = ()  # Clients that released wrong shares, which were not used.


class SecureFailure(Struct, frozen=True):
    """A round that ended without a sum."""

    reason: str
    culprits: tuple[int, ...] = ()  # Clients that it would be wise not to invite again, if they are known.


class RefusedAnswer(Struct, frozen=True):
    """Something that a sender should not have sent."""

    sender: Name
    reason: str


class SecureServer:
    """The server in one round.

    Args:
        plan: What was agreed.
        members: The invited clients, with their long-term Ed25519 public keys.
        times: How long it waits.
        state: The `state()` of a server to go on for.
        names: The names of the clients' machines; by default from their numbers.
        name: The name of this machine.

    """

    def __init__(
        self,
        plan: SecureRound,
        members: Mapping[int, bytes],
        times: SecureTimes | None = None,
        state: SecureServerState | None = None,
        names: Mapping[int, Name] | None = None,
        name: Name = SERVER,
    ) -> None:
        require_cryptography()
        if len(members) != plan.clients:
            raise UsageError(f"{len(members)} clients cannot be invited to a round that was agreed for {plan.clients}.")
        self.name = name
        self.outcome: SecureSum | SecureFailure | None = None
        """How the round has ended; None: it has not."""
        self.unmasked: SecureSum | None = None
        """The sum without its masks, also one that is refused; None: it has none."""
        self.refused: list[RefusedAnswer] = []
        """What was refused, and of whom."""
        self._records = SecureRecords(plan, dict(members), state or SecureServerState())
        self._digest = self._records.digest
        self._names = {client: client_name(client) for client in members} if names is None else dict(names)
        self._numbers = {name: client for client, name in self._names.items()}
        self._times = times or SecureTimes()
        self._waiting: set[int] = set()
        self._gone: set[int] = set()

    @property
    def encoding(self) -> SecureEncoding:
        """How updates become integers."""
        return self._records.plan.encoding

    @property
    def phase(self) -> str:
        """The phase that it is in, one of `records.PHASES`."""
        return self._records.state.phase

    @property
    def waits_for(self) -> list[int]:
        """Clients whose answer this phase waits for."""
        return sorted(self._waiting)

    def state(self) -> SecureServerState:
        """Everything from which another process can go on; to be saved before a new phase's effects are carried out."""
        return self._records.snapshot()

    def begin(self, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Invite the clients, or go on where another process has stopped."""
        effects = Effects()
        if self.phase == "over":
            self._end(effects)
        else:
            self._ask(effects)
        return effects.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Handle an answer, a deadline, a death, or the end of the unmasking."""
        effects = Effects()
        match event:
            case Received(sender, message, payload):
                self._on_message(sender, message, payload, effects)
            case Ended(name) if name in self._numbers:
                self._lose(self._numbers[name], effects)
            case Timer(("secure deadline", digest, phase)) if (digest, phase) == (self._digest, self.phase):
                self._close(effects)
            case Timer(("secure repeat", digest, phase)) if (digest, phase) == (self._digest, self.phase):
                self._ask_again(effects)
            case Done(("secure unmasked", digest), result) if (digest, self.phase) == (self._digest, "unmask"):
                self._finish(result, effects)
            case _:
                pass
        return effects.done

    def _ask(self, effects: Effects) -> None:
        """Begin a phase."""
        records = self._records
        if self.phase == "unmask":
            effects.start(records.unmasking(), ("secure unmasked", self._digest))
            return
        missing = [client for client in records.asked() if client not in records.answers()]
        for client in missing:
            effects.send(self._names[client], records.question(client))
        # Those who are gone are asked as well, for they may be back, but not waited for.
        self._waiting = set(missing) - self._gone
        limit = self._times.masks if self.phase == "masks" else self._times.phase
        effects.timer(limit, ("secure deadline", self._digest, self.phase))
        effects.timer(self._times.repeat, ("secure repeat", self._digest, self.phase))
        if not self._waiting:
            self._close(effects)

    def _ask_again(self, effects: Effects) -> None:
        for client in self.waits_for:
            effects.send(self._names[client], self._records.question(client))
        for client in self._records.answers():
            effects.send(self._names[client], SecureWait(self._digest))
        effects.timer(self._times.repeat, ("secure repeat", self._digest, self.phase))

    def _on_message(self, sender: Name, message: Any, payload: Payload, effects: Effects) -> None:
        client = self._numbers.get(sender)
        if client is None:
            self._refuse(sender, "it was not invited to this round", effects)
        elif getattr(message, "round", None) != self._digest:
            self._refuse(sender, f"{type(message).__name__} is for another round", effects)
        elif isinstance(message, SecureLeave):
            self._remember(sender, f"it has left: {message.reason}")
            self._lose(client, effects)
        else:
            wrong = fault(self._records, client, message, payload)
            if wrong is None:
                self._gone.discard(client)
                self._records.accept(client, message, payload)
                self._done_with(client, effects)
            elif wrong:
                self._refuse(sender, wrong, effects)

    def _lose(self, client: int, effects: Effects) -> None:
        """A client will not answer any more."""
        self._gone.add(client)
        self._done_with(client, effects)

    def _done_with(self, client: int, effects: Effects) -> None:
        """Stop waiting for a client; the last one ends the phase."""
        if client in self._waiting:
            self._waiting.discard(client)
            if not self._waiting:
                self._close(effects)

    def _close(self, effects: Effects) -> None:
        """Go on with those who have answered, or end the round."""
        short = self._records.close()
        if short:
            self._records.state.failure = short
            self._end(effects)
        else:
            self._ask(effects)

    def _finish(self, result: UnmaskedSum, effects: Effects) -> None:
        """The sum is known, or a secret is not."""
        records = self._records
        records.state.liars, records.state.unrecovered = list(result.liars), list(result.unrecovered)
        for liar in result.liars:
            self._remember(self._names[liar], "it released wrong shares, which were not used")
        if result.total is None:
            records.state.failure = (
                f"the secrets of clients {records.state.unrecovered} could not be recovered: shares of them are wrong"
            )
        else:
            records.total = self.encoding.reduced(result.total)
            self.unmasked = self._sum()
            records.state.failure = self._implausible(records.total)
        self._end(effects)

    def _sum(self) -> SecureSum:
        known = self._records.state
        return SecureSum(np.asarray(self._records.total), tuple(known.masked), tuple(known.liars))

    def _implausible(self, total: Row) -> str:
        """Why a sum cannot be that of honest clients; a mean by a wrong weight could be of any size."""
        weight, clients = self.encoding.weight(total), len(self._records.state.masked)
        most = clients * self.encoding.examples
        if clients <= weight <= most:
            return ""
        return f"{clients:,} clients weigh {weight:,} together, and honest ones {clients:,} to {most:,}: one has lied"

    def _end(self, effects: Effects) -> None:
        """Set the outcome, and tell the clients."""
        records, known = self._records, self._records.state
        known.phase = "over"
        self._waiting.clear()
        if known.failure:
            culprits = tuple(sorted({*known.unrecovered, *known.liars}))
            self.outcome = SecureFailure(known.failure, culprits)
        else:
            self.outcome = self.unmasked = self._sum()
        for client in records.members:
            missed = "" if client in records.alive else "the round ended before this client's update came"
            effects.send(self._names[client], SecureEnd(self._digest, (known.failure or missed)[:MOST_TEXT]))

    def _refuse(self, sender: Name, reason: str, effects: Effects) -> None:
        self._remember(sender, reason)
        effects.send(sender, SecureRefusal(self._digest, reason[:MOST_TEXT]))

    def _remember(self, sender: Name, reason: str) -> None:
        if len(self.refused) < MOST_REFUSALS:
            self.refused.append(RefusedAnswer(sender, reason))
