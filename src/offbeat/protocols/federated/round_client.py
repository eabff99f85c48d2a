"""A client of a federated deployment as a machine: it joins, trains when it is asked to, and sends its update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.federated.messages import (
    SERVER,
    Abandon,
    Activity,
    Again,
    Beat,
    ClientFailure,
    ClientLeave,
    Conclude,
    EncodeUpdate,
    Farewell,
    Finish,
    Goodbye,
    KeepFinal,
    MembershipRequest,
    Noted,
    Prepare,
    Refused,
    RoundTask,
    SecureStart,
    Settled,
    Train,
    Trained,
    UnknownClient,
    Welcome,
)
from offbeat.protocols.federated.secure.client import GIVE_UP, UPDATE, SecureClient
from offbeat.protocols.federated.secure.messages import SecureInvite, SecureLeave, SecureRequest
from offbeat.protocols.federated.secure.primitives import identity_public
from offbeat.protocols.federated.secure.shamir import SecretBytes
from offbeat.protocols.federated.secure_sums import agreed
from offbeat.protocols.machine import Done, Effect, Effects, Event, Name, Payload, Received, Timer

FIRST_BEAT: Final = 0.5
"""Seconds between attempts to join, and between farewells."""
FAREWELLS: Final = 10
"""How often a client says that it ends, if no answer comes."""


class SecureIdentity(NamedTuple):
    """What a client needs for secure sums."""

    private: bytes
    """Its long-term Ed25519 key."""
    random: SecretBytes
    known: Mapping[int, bytes] | None = None
    """The long-term public keys of all clients, from a source that the server cannot change, for rounds that must be
    signed then; None: keys are taken from the server."""


class RoundClient:
    """Takes part in the rounds of a server.

    Args:
        name: Of this participant.
        join: What it says to join.
        description: What its model and task are, for the server to compare.
        patience: Seconds without a word from the server after which it gives up.
        secure: What it needs for secure sums; None: it leaves those that a server begins.

    """

    def __init__(
        self,
        name: Name,
        join: MembershipRequest,
        description: Payload,
        patience: float,
        secure: SecureIdentity | None = None,
    ) -> None:
        self.name = name
        self.phase: Literal["joining", "here", "leaving", "ended"] = "joining"
        self.failure = ""
        """Why it ended early; empty if it did not."""
        self.welcome: Welcome | None = None
        """What the server said when it joined."""
        self.number = 0
        """The round that it is working on, or worked on last."""
        self.activity: Activity = "preparing"
        self.examples = 0
        self._join, self._description, self._patience = join, description, patience
        self._beat = FIRST_BEAT
        self._heard = 0.0
        self._held: Trained | None = None  # Sent and not settled.
        self._stopping: set[int] = set()  # Rounds for which it was told to stop, and has not.
        self._last_words: ClientFailure | Goodbye | ClientLeave | None = None
        self._farewells = 0
        self._identity = secure
        self._sum: SecureClient | None = None
        self._agreed: tuple[int, bytes] = (0, b"")  # The last secure sum that it took part in: its round and plan.

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do."""
        return self.phase == "ended"

    def begin(self, now: float) -> Sequence[Effect]:
        """Ask to join."""
        effects = Effects()
        self._heard = now
        effects.send(SERVER, self._join, self._description)
        effects.timer(self._beat, "beat")
        return effects.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event."""
        effects = Effects()
        match event:
            case Received(sender, message, payload) if sender == SERVER:
                self._heard = now
                if isinstance(message, SecureStart):
                    self._begin_sum(effects, message, now)
                elif isinstance(message, SecureRequest):
                    self._on_sum(effects, event, now)
                else:
                    self._received(effects, message, payload)
            case Timer("beat"):
                self._tick(effects, now)
            case Done(("encode", number), result) if number == self.number:
                if isinstance(result, ClientFailure):
                    self._end(effects, result)
                else:
                    self._on_sum(effects, Done(GIVE_UP if isinstance(result, str) else UPDATE, result), now)
            case Done(("secure masked", *_), _) | Timer(("secure silence", *_)):
                self._on_sum(effects, event, now)
            case Done(("train", number), _) if number in self._stopping:
                self._stopping.discard(number)
                self._show(effects)
            case Done(("train", number), result) if number == self.number and self.activity == "working":
                self._trained(effects, result)
            case Done("final", Goodbye() as goodbye) if self.phase == "here":
                self._end(effects, goodbye)
            case Done("ready", int() as examples) if self.activity == "preparing":
                self.activity, self.examples = "idle", examples
                self._show(effects)
            case Done("ready" | "final", ClientFailure() as failed):
                self._end(effects, failed)
            case _:
                pass
        return effects.done

    def leave(self) -> Sequence[Effect]:
        """End before the last round."""
        effects = Effects()
        self._end(effects, ClientLeave())
        return effects.done

    def _tick(self, effects: Effects, now: float) -> None:
        """Give a sign of life, or give up."""
        if now - self._heard > self._patience:
            self.failure = f"there was no word from the server for {now - self._heard:.0f} s"
            self.phase = "ended"
        elif self.phase == "leaving":
            self._farewells += 1
            if self._farewells >= FAREWELLS or self._last_words is None:
                self.phase = "ended"
            else:
                effects.send(SERVER, self._last_words)
        elif self.phase == "joining":
            effects.send(SERVER, self._join, self._description)
        elif self.phase == "here":
            self._beats(effects)
        effects.timer(self._beat, "beat")

    def _beats(self, effects: Effects) -> None:
        activity = "stopping" if self._stopping else self.activity
        effects.send(SERVER, Beat(self.number, activity, self.examples))

    def _show(self, effects: Effects) -> None:
        """Give a sign of life now."""
        self._beats(effects)
        effects.timer(self._beat, "beat")

    def _abandon(self, effects: Effects) -> None:
        """Stop training: nobody wants the update."""
        self._stopping.add(self.number)
        effects.start(Abandon(self.number))

    def _received(self, effects: Effects, message: Struct, payload: Payload) -> None:
        match message:
            case Welcome() if self.phase == "joining":
                self.phase, self._beat = "here", message.beat
                if self.welcome is None:
                    effects.start(Prepare(message))
                elif message != self.welcome:
                    words = f"the server is another one now: {message.strategy}, as client {message.client}"
                    self._end(effects, ClientFailure(0, words, ""))
                    return
                self.welcome = message
                self._show(effects)
                self._check_number(effects, message.client)
            case Refused(why) if self.phase == "joining":
                self.failure, self.phase = why, "ended"
            case UnknownClient() if self.phase == "here":
                self.phase, self._beat = "joining", FIRST_BEAT
                effects.send(SERVER, self._join, self._description)
                effects.timer(self._beat, "beat")
            case RoundTask() if self.phase == "here":
                self._begin_round(effects, message, payload)
            case Again(number) if number == self.number and self._held is not None:
                effects.send(SERVER, self._held.update, self._held.payload)
            case Settled(_, "failed") | Farewell() if self.phase == "leaving":
                self.phase = "ended"
            case Settled(number) if number == self.number and self.activity in ("working", "sent"):
                self._settled(effects, message)
            case Finish() if self.phase == "here" and self.activity != "working":
                effects.start(KeepFinal(message, payload))
            case Noted() | _:
                pass

    def _begin_sum(self, effects: Effects, start: SecureStart, now: float) -> None:
        """Take part in the secure sum of the round that it has an update for: in one only, whatever the server says."""
        try:
            plan = agreed(start)
        except UsageError:
            return
        known = (start.number, start.plan)
        able = self.activity == "sent" and self._agreed[0] < start.number == self.number
        if able and self.welcome is not None and self._identity is not None:
            (private, random, peers), client = self._identity, self.welcome.client
            if peers is not None and not plan.signed:
                self._accuse(effects, "it is not signed, and this client has a list of peers to check signatures by")
                return
            self._agreed = known
            self._sum = SecureClient(plan, client, private, peers, random, self._patience, self.name, SERVER)
            effects.done += self._sum.begin(now)
            effects.start(EncodeUpdate(start.number, plan.encoding, plan.fewest))
        if self._agreed == known and self._sum is not None:
            self._on_sum(effects, Received(SERVER, SecureInvite(plan.digest), Payload(0)), now)
        else:
            effects.send(SERVER, SecureLeave(plan.digest, f"it has no update for a secure sum of round {start.number}"))

    def _on_sum(self, effects: Effects, event: Event, now: float) -> None:
        """An event of the secure sum."""
        if self._sum is not None:
            effects.done += self._sum.on(event, now)
            if self._sum.accusation and self._identity is not None and self._identity.known is not None:
                self._accuse(effects, self._sum.accusation)

    def _check_number(self, effects: Effects, client: int) -> None:
        """Refuse a number that is another client's."""
        identity = self._identity
        if identity is None or identity.known is None:
            return
        if identity.known.get(client) != identity_public(identity.private):
            words = f"the server calls this client number {client}, whose key in the list of peers is not this client's"
            self._end(effects, ClientFailure(0, words, ""))

    def _accuse(self, effects: Effects, what: str) -> None:
        """Take no part in a secure sum, nor in any later one, by a server that does not follow the protocol."""
        if self.phase == "here":
            words = f"this client releases nothing in the secure sum of round {self.number}: {what}"
            self._sum = None
            self._end(effects, ClientFailure(self.number, words, ""))

    def _begin_round(self, effects: Effects, task: RoundTask, model: Payload) -> None:
        if task.number < self.number or (task.number == self.number and self.activity == "working"):
            return
        if task.number == self.number and self._held is not None:
            effects.send(SERVER, self._held.update, self._held.payload)
            return
        if self.activity == "working":
            self._abandon(effects)
        elif self.activity == "sent":
            effects.start(Conclude(Settled(self.number, "accepted" if task.accepted == self.number else "late")))
        self.number, self.activity, self._held, self._sum = task.number, "working", None, None
        self._show(effects)
        effects.start(Train(task, model))

    def _trained(self, effects: Effects, result: object) -> None:
        if isinstance(result, Trained):
            self.activity, self._held = "sent", result
            effects.send(SERVER, result.update, result.payload)
        elif isinstance(result, ClientFailure):
            self._end(effects, result)

    def _settled(self, effects: Effects, settled: Settled) -> None:
        if self.activity == "working":
            self._abandon(effects)
        effects.start(Conclude(settled))
        self.activity, self._held, self._sum = "idle", None, None

    def _end(self, effects: Effects, words: ClientFailure | Goodbye | ClientLeave) -> None:
        """Say so until it is answered."""
        if isinstance(words, ClientFailure):
            self.failure = words.error
        self.phase, self._last_words, self._beat = "leaving", words, FIRST_BEAT
        effects.send(SERVER, words)
        effects.timer(self._beat, "beat")
