"""Asynchronous gossip: a worker averages with a random neighbour when it can, and waits for nobody.

A worker that has stepped asks a neighbour, and sends its row along. The neighbour moves halfway to it and answers with
that move, and the asker makes the opposite move when the answer comes. Both moves are the same numbers, so the mean of
all models is kept whatever either did in between: the atomic pairwise averaging of Lian et al., "Asynchronous
Decentralized Parallel Stochastic Gradient Descent" (2018), algorithm 1, in two messages.

The neighbour decides a question once: granted or refused. The question is repeated until the decision is known, and the
decision is repeated with it, so that losses, delays and duplicates cost time, and no move is made twice or by one side
only. While its question is fresh a worker refuses others, so that its row stays put; when a neighbour is slow, the
worker goes on with others, and makes the move of the late answer when it comes. Only death breaks a pair: a neighbour
that dies after granting takes the other half of the move with it. A worker that was declared dead is ignored even if it
lives: the mean is that of the members. Another may take its place, or become a new neighbour (`Done(("near", name))`):
the two start from nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

from msgspec import Struct

from offbeat.protocols.colouring import Record
from offbeat.protocols.gossip.snapshots import GossipCut, PairColour, counts_of, number_of
from offbeat.protocols.machine import Done, Effect, Effects, Ended, Event, Name, Payload, Received, Timer

STEPPED: Final = "stepped"  # `Done(STEPPED)`: the worker has stepped.
PAUSE: Final = "pause"  # `Done(PAUSE)`: stop asking, and refuse all questions, so that everything comes to rest.
GO_ON: Final = "go on"  # `Done(GO_ON)`: the pause is over.


class Ask(Struct, frozen=True, tag=True):
    """A question: shall we average? With the asker's row."""

    number: int  # Counts the asker's questions; the same when it asks again.
    colour: int = 0  # The newest snapshot that its sender has been cut by.


class Grant(Struct, frozen=True, tag=True):
    """I have moved by this payload; now move back by it."""

    number: int
    colour: int = 0  # Of when the move was made.


class Refuse(Struct, frozen=True, tag=True):
    """Not now; nothing has moved."""

    number: int
    colour: int = 0


class Turn(Struct, frozen=True, tag=True):
    """A snapshot is being taken: at your next boundary record your state, and continue in this colour."""

    colour: int


Message = Ask | Grant | Refuse | Turn


class CopyRow(Struct, frozen=True):
    """Work: a copy of the row, as the payload of a question."""


class MoveHalfway(Struct, frozen=True):
    """Work: move half the way to this row; the move is the payload of the answer."""

    row: Payload


class Move(Struct, frozen=True):
    """Work: move back by this."""

    by: Payload


class Lose(Struct, frozen=True):
    """Work: close the connection to a dead neighbour, and drop what waits to be sent there."""

    name: Name


class Find(Struct, frozen=True):
    """Work: open a connection to a new neighbour."""

    name: Name


class _Question(Struct):
    number: int
    times: int = 0


class _Decision(Struct):
    number: int
    move: Payload | None  # None: refused.
    colour: int


class Gossiper:
    """One worker's side."""

    def __init__(self, name: Name, neighbours: Sequence[Name], seed: int, patience: float = 0.5) -> None:
        self.name = name
        self.met = 0  # Averagings that this worker asked for and made.
        self.granted = 0  # Averagings that others asked it for.
        self.refused = 0  # Questions that others refused.
        self.overdue = 0  # Questions not answered in time.
        self.colour = PairColour()  # Which snapshots it has been cut by.
        self._granted = dict.fromkeys(neighbours, 0)
        self._moved = dict.fromkeys(neighbours, 0)
        self._held: list[tuple[Name, Any, Payload]] = []
        self._living = list(neighbours)
        self._dead: set[Name] = set()
        self._chance = Random(seed)  # noqa: S311 - who is asked is not secret
        self._patience = patience
        self._numbers = 0
        self._fresh: Name | None = None
        self._open: dict[Name, _Question] = {}
        self._decided: dict[Name, _Decision] = {}
        self._granting: dict[Name, int] = {}
        self._paused = False
        self._moving = 0

    @property
    def at_rest(self) -> bool:
        """Whether its questions are decided and its moves made: with all workers at rest, no move is in flight."""
        return self._paused and not self._open and not self._moving

    @property
    def asked(self) -> list[Name]:
        """Neighbours that have not answered yet."""
        return sorted(self._open)

    def begin(self, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Nothing: the first step comes first."""
        return ()

    def on(self, event: Event, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Handle a step, a message, a timer or a death."""
        effects = Effects()
        match event:
            case Done(token, result):
                self._on_done(token, result, effects)
            case Received(sender, message, payload) if sender not in self._dead:
                self._on_message(sender, message, payload, effects)
            case Timer(("late", neighbour, number)):
                self._on_late(neighbour, number, effects)
            case Ended(name):
                self._forget(name, effects)
            case _:
                pass
        return effects.done

    def _on_done(self, token: Any, result: Any, effects: Effects) -> None:
        match token:
            case "stepped":
                self._ask_somebody(effects)
            case "pause":
                self._paused = True
                if self._held:
                    # All come to rest before this worker comes to a boundary: it is too late.
                    self.colour.miss()
                    self._open_held(effects)
            case ("turn", int(colour), int(clock), int(rests)):
                self._turn(max(colour, self.colour.heard), clock, rests, effects)
            case "go on":
                self._paused = False
            case "moved":
                self._moving -= 1
            case ("near", str(name)):
                self._find(name, effects)
            case ("read", neighbour, number):
                self._ask(neighbour, number, result, effects)
            case ("met", asker, number, colour) if asker not in self._dead:
                self.granted += 1
                self._granting.pop(asker, None)
                self._decided[asker] = _Decision(number, result, colour)
                effects.send(asker, Grant(number, colour), result)
            case _:
                pass

    def _ask_somebody(self, effects: Effects) -> None:
        """Ask a random neighbour, unless one was just asked; one that owes an answer is not asked again."""
        able = [name for name in self._living if name not in self._open]
        if self._paused or self._fresh is not None or not able:
            return
        self._fresh = self._chance.choice(able)
        self._numbers += 1
        self._open[self._fresh] = _Question(self._numbers)
        effects.start(CopyRow(), ("read", self._fresh, self._numbers))

    def _ask(self, neighbour: Name, number: int, row: Payload, effects: Effects) -> None:
        question = self._open.get(neighbour)
        if question is not None and question.number == number:
            question.times += 1
            effects.send(neighbour, Ask(number, self.colour.own), row)
            # A silent neighbour is asked again ever less often.
            effects.timer(self._patience * min(question.times, 10), ("late", neighbour, number))

    def _on_late(self, neighbour: Name, number: int, effects: Effects) -> None:
        question = self._open.get(neighbour)
        if question is None or question.number != number:
            return
        if self._fresh == neighbour:
            self._fresh = None
            self.overdue += 1
        effects.start(CopyRow(), ("read", neighbour, number))

    def _settle(self, neighbour: Name, number: int) -> bool:
        """The decision of a question has come; False if it was known."""
        question = self._open.get(neighbour)
        if question is None or question.number != number:
            return False
        del self._open[neighbour]
        if self._fresh == neighbour:
            self._fresh = None
        return True

    def _on_message(self, sender: Name, message: Any, payload: Payload, effects: Effects) -> None:
        if message.colour > self.colour.own:
            self.colour.heard = max(self.colour.heard, message.colour)
            if not self._paused:
                self._held.append((sender, message, payload))
                return
            self.colour.miss()
        match message:
            case Ask(number):
                self._on_ask(sender, number, payload, effects)
            case Grant(number, colour):
                if self._settle(sender, number):
                    self.met += 1
                    self._moved[sender] += 1
                    self._moving += 1
                    effects.start(Move(payload), "moved")
                    self.colour.answered(sender, number, payload, colour, effects)
            case Refuse(number, colour):
                if self._settle(sender, number):
                    self.refused += 1
                    self.colour.answered(sender, number, None, colour, effects)
            case _:
                pass

    def _on_ask(self, sender: Name, number: int, row: Payload, effects: Effects) -> None:
        decided = self._decided.get(sender)
        if self._granting.get(sender) == number or (decided is not None and number < decided.number):
            return  # It is being granted, or it is an old question that comes late.
        if decided is not None and number == decided.number:
            if decided.move is None:
                effects.send(sender, Refuse(number, decided.colour))
            else:
                effects.send(sender, Grant(number, decided.colour), decided.move)
        elif self._must_refuse(sender):
            self._decided[sender] = _Decision(number, None, self.colour.own)
            effects.send(sender, Refuse(number, self.colour.own))
        else:
            self._granting[sender] = number
            self._granted[sender] = self._granted.get(sender, 0) + 1
            effects.start(MoveHalfway(row), ("met", sender, number, self.colour.own))

    def _must_refuse(self, sender: Name) -> bool:
        """While a fresh question is open; of two that ask each other at once, one is granted."""
        if self._paused:
            return True
        return self._fresh is not None and (self._fresh != sender or self.name < sender)

    def _turn(self, colour: int, clock: int, rests: int, effects: Effects) -> None:
        """At a boundary: be cut, tell the neighbours, and handle what was held until now."""
        if colour <= self.colour.own:
            effects.start(Record(0))
            return
        questions = {name: question.number for name, question in self._open.items()}
        granted, moved = counts_of(self._granted), counts_of(self._moved)
        cut = GossipCut(worker=number_of(self.name), clock=clock, granted=granted, moved=moved, rests=rests)
        self.colour.turn(colour, cut, questions, effects)
        for name in self._living:
            effects.send(name, Turn(colour))
        self._open_held(effects)

    def _open_held(self, effects: Effects) -> None:
        held, self._held = self._held, []
        for sender, message, payload in held:
            self._on_message(sender, message, payload, effects)

    def _find(self, name: Name, effects: Effects) -> None:
        """Add a new neighbour, unless it is one already; maybe in place of a dead one."""
        if name not in self._living:
            self._dead.discard(name)
            self._living.append(name)
            self._granted.setdefault(name, 0)
            self._moved.setdefault(name, 0)
            effects.start(Find(name))

    def _forget(self, name: Name, effects: Effects) -> None:
        """A neighbour has died: forget it, and what it owes."""
        if name in self._dead:
            return
        self._dead.add(name)
        if name in self._living:
            self._living.remove(name)
        effects.start(Lose(name))
        self.colour.cut = None
        self._held = [held for held in self._held if held[0] != name]
        for known in (self._decided, self._granting, self._granted, self._moved):
            known.pop(name, None)
        question = self._open.get(name)
        if question is not None:
            self._settle(name, question.number)
