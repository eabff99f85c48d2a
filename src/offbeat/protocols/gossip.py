"""Gossip without a beat: a worker averages with a random neighbour when it can, and waits for nobody.

Who has stepped asks a neighbour, and sends its row along. The one asked moves half the way to it and answers with that
move, and the asker makes the opposite move when the answer comes. Both moves are the same numbers, so the mean of all
models is kept whatever either has done in between: the atomic pairwise averaging of Lian et al., "Asynchronous
Decentralized Parallel Stochastic Gradient Descent" (2018), algorithm 1, in two messages.

A question is decided once, by the one asked: granted or refused. It is repeated until the decision is known, and the
decision is repeated with it, so that losses, delays and doubles cost time, and no move is made twice or by one side
only. While its question is fresh a worker refuses others, so that it does not move on under it; when a neighbour is
slow, the worker goes on with others, and makes the move of the late answer when it comes. Only death breaks a pair: a
neighbour that dies after it has granted takes the other half of the move with it, as it does all else that it knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from msgspec import Struct

from offbeat.protocols.machine import Done, Effect, Effects, Ended, Event, Name, Payload, Received, Timer

STEPPED: Final = "stepped"
"""`Done(STEPPED)`: the worker has stepped, so there is something to tell."""
PAUSE: Final = "pause"
"""`Done(PAUSE)`: ask nobody any more, and refuse who asks, so that all comes to rest."""
GO_ON: Final = "go on"
"""`Done(GO_ON)`: the pause is over."""


class Ask(Struct, frozen=True, tag=True):
    """Shall we average? With the asker's row."""

    number: int
    """Counts the asker's questions; the same when it asks again."""


class Grant(Struct, frozen=True, tag=True):
    """I have moved by this payload; now move back by it."""

    number: int


class Refuse(Struct, frozen=True, tag=True):
    """Not now; nothing has moved."""

    number: int


Message = Ask | Grant | Refuse


class GossipCut(Struct, frozen=True, kw_only=True):
    """Where a worker was cut by a snapshot."""

    worker: int
    clock: int
    """Steps it had made."""
    granted: tuple[tuple[int, int], ...]
    """Moves that it had granted to each neighbour, and made itself."""
    moved: tuple[tuple[int, int], ...]
    """Moves that each neighbour had granted, and it had made."""
    under_way: tuple[int, ...] = ()
    """Whose grants from before their cut came after this one's."""
    rests: int = 0
    """How often all had come to rest together."""


def gossip_faults(cuts: Sequence[GossipCut]) -> list[str]:
    """Why these cuts are no state in which the run can have been; empty: they are one, and the mean is kept."""
    found: list[str] = []
    rests = {cut.rests for cut in cuts}
    if len(rests) > 1:
        found.append(f"workers have rested together different numbers of times: {sorted(rests)}")
    moved = {(cut.worker, other): count for cut in cuts for other, count in cut.moved}
    for cut in cuts:
        for asker, granted in cut.granted:
            made = moved.pop((asker, cut.worker), 0)
            late = sum(one.under_way.count(cut.worker) for one in cuts if one.worker == asker)
            if made + late != granted:
                found.append(
                    f"worker {cut.worker} had granted worker {asker} {granted} moves, of which {made} were made and "
                    f"{late} under way"
                )
    found += [f"worker {a} made {n} moves that worker {b} had not granted" for (a, b), n in moved.items() if n]
    return found


class Read(Struct, frozen=True):
    """Work: a copy of the row, as the payload of a question."""


class Meet(Struct, frozen=True):
    """Work: move half the way to this row; the move is the payload of the answer."""

    row: Payload


class Move(Struct, frozen=True):
    """Work: move back by this."""

    by: Payload


@dataclass(slots=True)
class _Question:
    """What was asked and is not decided yet, as far as this side knows."""

    number: int
    times: int = 0


@dataclass(slots=True)
class _Decision:
    """What a neighbour's latest question came to; no move if it was refused."""

    number: int
    move: Payload | None


class Gossiper:
    """One worker's side."""

    def __init__(self, name: Name, neighbours: Sequence[Name], seed: int, patience: float = 0.5) -> None:
        self.name = name
        self.met = 0
        """Averagings that this worker has asked for and made."""
        self.granted = 0
        """Averagings that others have asked it for."""
        self.refused = 0
        """Questions that others have refused."""
        self.overdue = 0
        """Questions that were not answered in time."""
        self._living = list(neighbours)
        self._chance = Random(seed)  # noqa: S311 - who is asked is no secret
        self._patience = patience
        self._numbers = 0
        self._fresh: Name | None = None
        self._open: dict[Name, _Question] = {}
        self._decided: dict[Name, _Decision] = {}
        self._paused = False

    @property
    def at_rest(self) -> bool:
        """Whether no question of this worker is open: with all paused and at rest, no move is under way."""
        return self._paused and not self._open

    def begin(self, now: float) -> Sequence[Effect]:
        """Nothing: the first step comes first."""
        del now
        return ()

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """What is to be done about this."""
        del now
        effects = Effects()
        match event:
            case Done(token, result):
                self._on_done(token, result, effects)
            case Received(sender, message, payload):
                self._on_message(sender, message, payload, effects)
            case Timer(("late", neighbour, number)):
                self._on_late(neighbour, number, effects)
            case Ended(name):
                self._forget(name)
            case _:
                pass
        return effects.done

    # -- asking ------------------------------------------------------------------------------------------------------

    def _on_done(self, token: Any, result: Any, effects: Effects) -> None:
        match token:
            case "stepped":
                self._ask_somebody(effects)
            case "pause":
                self._paused = True
            case "go on":
                self._paused = False
            case ("read", neighbour, number):
                self._ask(neighbour, number, result, effects)
            case ("met", asker, number):
                self.granted += 1
                self._decided[asker] = _Decision(number, result)
                effects.send(asker, Grant(number), result)
            case _:
                pass

    def _ask_somebody(self, effects: Effects) -> None:
        """A random neighbour, unless one was just asked; one that owes an answer is not asked for more."""
        able = [name for name in self._living if name not in self._open]
        if self._paused or self._fresh is not None or not able:
            return
        self._fresh = self._chance.choice(able)
        self._numbers += 1
        self._open[self._fresh] = _Question(self._numbers)
        effects.start(Read(), ("read", self._fresh, self._numbers))

    def _ask(self, neighbour: Name, number: int, row: Payload, effects: Effects) -> None:
        question = self._open.get(neighbour)
        if question is not None and question.number == number:
            question.times += 1
            effects.send(neighbour, Ask(number), row)
            # A neighbour that stays silent is asked again ever less often.
            effects.timer(self._patience * min(question.times, 10), ("late", neighbour, number))

    def _on_late(self, neighbour: Name, number: int, effects: Effects) -> None:
        question = self._open.get(neighbour)
        if question is None or question.number != number:
            return
        if self._fresh == neighbour:
            self._fresh = None
            self.overdue += 1
        effects.start(Read(), ("read", neighbour, number))

    def _settle(self, neighbour: Name, number: int) -> bool:
        """The decision of a question has come; False if it was known already."""
        question = self._open.get(neighbour)
        if question is None or question.number != number:
            return False
        del self._open[neighbour]
        if self._fresh == neighbour:
            self._fresh = None
        return True

    # -- being asked -------------------------------------------------------------------------------------------------

    def _on_message(self, sender: Name, message: Any, payload: Payload, effects: Effects) -> None:
        match message:
            case Ask(number):
                self._on_ask(sender, number, payload, effects)
            case Grant(number):
                if self._settle(sender, number):
                    self.met += 1
                    effects.start(Move(payload))
            case Refuse(number):
                self.refused += self._settle(sender, number)
            case _:
                pass

    def _on_ask(self, sender: Name, number: int, row: Payload, effects: Effects) -> None:
        decided = self._decided.get(sender)
        if decided is not None and number < decided.number:
            return  # An old question, long decided, that comes late.
        if decided is not None and number == decided.number:
            _repeat(decided, sender, effects)
        elif self._must_refuse(sender):
            self._decided[sender] = _Decision(number, None)
            effects.send(sender, Refuse(number))
        else:
            effects.start(Meet(row), ("met", sender, number))

    def _must_refuse(self, sender: Name) -> bool:
        """While a fresh question is open; of two that ask each other at once, one is granted."""
        if self._paused:
            return True
        return self._fresh is not None and (self._fresh != sender or self.name < sender)

    def _forget(self, name: Name) -> None:
        """A neighbour has died: it is asked no more, and what it owes is given up."""
        if name in self._living:
            self._living.remove(name)
        self._decided.pop(name, None)
        question = self._open.get(name)
        if question is not None:
            self._settle(name, question.number)


def _repeat(decided: _Decision, asker: Name, effects: Effects) -> None:
    if decided.move is None:
        effects.send(asker, Refuse(decided.number))
    else:
        effects.send(asker, Grant(decided.number), decided.move)
