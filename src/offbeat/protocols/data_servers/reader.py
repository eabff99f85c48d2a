"""A worker's side of data servers: orders batches ahead of need, and gets each exactly once and in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from offbeat.protocols.data_servers.messages import Busy, Order, Spoiled, Supply, Used
from offbeat.protocols.machine import Effect, Effects, Event, Name, Payload, Received, Timer

AGAIN = 0.25
"""Seconds after which an order without an answer is repeated."""
PROBES = 4
"""Repeated orders in a row that a data server may leave unanswered before others get its orders."""
EVERY = 2**62
"""A floor above every batch: nothing of the pass is needed any more."""
WINDOW = 2
"""Batches that a worker orders ahead, for each data server."""


class SpoiledBatchError(Exception):
    """A data server could not prepare a batch."""


class DeliveredBatch(Struct, frozen=True):
    """A batch that has come, and from where."""

    payload: Payload
    sender: Name


@dataclass
class Line:
    """One pass over a loader: what is ordered, what has come, and what is used."""

    turn: int
    floor: int  # The next batch to use.
    orders: dict[int, Payload] = field(default_factory=dict[int, Payload])
    """Ordered and not used, by number: the payload of the order."""
    owners: dict[int, Name] = field(default_factory=dict[int, Name])
    """Ordered and not here: which data server has the order."""
    here: dict[int, DeliveredBatch | Spoiled] = field(default_factory=dict[int, "DeliveredBatch | Spoiled"])


class BatchReader:
    """The machine of a worker that reads from data servers.

    Its loop calls `open`, `order`, `take` and `use`, which return or imply effects to be carried out; between them the
    loop may compute for as long as it likes, and nothing needs to be handled.
    """

    def __init__(self, name: Name, rank: int, servers: Sequence[Name], turns: int = 0) -> None:
        if not servers:
            raise ValueError("a reader needs at least one data server")
        self.name = name
        self.window = WINDOW * len(servers)
        self._rank, self._servers, self._turns = rank, list(servers), turns
        self._lines: dict[int, Line] = {}
        self._unanswered: dict[Name, int] = dict.fromkeys(servers, 0)
        self._ticking = False
        self.used = 0
        """Batches used, over all loaders."""
        self.moved = 0
        """Orders that were given to another data server, because theirs was silent."""

    def begin(self, now: float) -> Sequence[Effect]:
        """Nothing to do before the first order."""
        del now
        return ()

    # -- called by the loop

    def open(self, loader: int, first: int = 0) -> int:
        """Begin a pass over a loader at this batch; what was ordered in an earlier pass is forgotten."""
        self._turns += 1
        self._lines[loader] = Line(self._turns, first)
        return self._turns

    def close(self, loader: int) -> Sequence[Effect]:
        """End a pass, of which no batch is needed any more: data servers free what they have prepared of it."""
        line, effects = self._lines.pop(loader, None), Effects()
        if line is not None:
            for name in self._servers:
                effects.send(name, Used(loader, line.turn, EVERY))
        return effects.done

    def turn(self, loader: int) -> int:
        """The number of the latest pass over a loader."""
        return self._lines[loader].turn

    def order(self, loader: int, number: int, payload: Payload) -> Sequence[Effect]:
        """Order a batch."""
        line, effects = self._lines[loader], Effects()
        line.orders[number] = payload
        self._give(effects, loader, number, self._owner(number))
        self._tick(effects)
        return effects.done

    def ready(self, loader: int) -> bool:
        """Whether the next batch of the pass is here."""
        line = self._lines[loader]
        return line.floor in line.here

    def take(self, loader: int) -> Payload:
        """The next batch; its memory is the data server's until `use`. Raises if it could not be prepared."""
        line = self._lines[loader]
        batch = line.here[line.floor]
        if isinstance(batch, Spoiled):
            raise SpoiledBatchError(batch.reason)
        return batch.payload

    def use(self, loader: int) -> Sequence[Effect]:
        """The next batch is used: its data server gets the memory back."""
        line, effects = self._lines[loader], Effects()
        batch = line.here.pop(line.floor)
        del line.orders[line.floor]
        line.floor += 1
        self.used += 1
        if isinstance(batch, DeliveredBatch):
            effects.send(batch.sender, Used(loader, line.turn, line.floor))
        return effects.done

    def waits_for(self, loader: int) -> list[Name]:
        """The data servers that have the order of the next batch."""
        line = self._lines[loader]
        return [line.owners[line.floor]] if line.floor in line.owners else []

    # -- driven by messages and time

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event."""
        del now
        effects = Effects()
        if isinstance(event, Received):
            self._receive(effects, event)
        elif isinstance(event, Timer):
            self._ticking = False
            self._repeat(effects)
            self._tick(effects)
        return effects.done

    def _receive(self, effects: Effects, event: Received) -> None:
        message, sender = event.message, event.sender
        if sender not in self._unanswered:
            return
        self._unanswered[sender] = 0
        if isinstance(message, Busy):
            return
        if not isinstance(message, Supply | Spoiled):
            return
        line = self._lines.get(message.loader)
        number = message.number
        if line is None or line.turn != message.turn or number in line.here or number not in line.orders:
            # Of an earlier pass, or prepared by two data servers: nobody will use it.
            self._decline(effects, sender, message)
            return
        line.owners.pop(number, None)
        line.here[number] = message if isinstance(message, Spoiled) else DeliveredBatch(event.payload, sender)

    def _decline(self, effects: Effects, sender: Name, message: Supply | Spoiled) -> None:
        line = self._lines.get(message.loader)
        if line is None:
            effects.send(sender, Used(message.loader, message.turn, EVERY))  # The pass is closed.
            return
        if line.turn < message.turn:
            return  # Of a former process of this name, which had more passes; a new order ends them.
        # A batch that came twice is kept by its second server until all up to it are used.
        current = line.turn == message.turn
        effects.send(sender, Used(message.loader, line.turn, line.floor if current else 0))

    def _owner(self, number: int) -> Name:
        """Whose turn it is: one after the other, so that each gets as many; silent ones are left out."""
        speaking = [name for name in self._servers if self._unanswered[name] < PROBES] or self._servers
        return speaking[(number + self._rank) % len(speaking)]

    def _give(self, effects: Effects, loader: int, number: int, owner: Name) -> None:
        line = self._lines[loader]
        line.owners[number] = owner
        effects.send(owner, Order(loader, line.turn, number, line.floor, self.used), line.orders[number])

    def _repeat(self, effects: Effects) -> None:
        """Repeat orders without an answer; those of a silent data server go to others as well."""
        asked: set[Name] = set()
        for loader, line in self._lines.items():
            for number, owner in sorted(line.owners.items()):
                asked.add(owner)
                if self._unanswered[owner] >= PROBES and (other := self._owner(number)) != owner:
                    self.moved += 1
                    # The silent one is told too: if it has come back, it answers, and gets orders again.
                    effects.send(owner, Order(loader, line.turn, number, line.floor, self.used), line.orders[number])
                    self._give(effects, loader, number, other)
                else:
                    self._give(effects, loader, number, owner)
        # A silent data server that has no orders is asked for a batch that another one has: it may be back.
        for name in self._servers:
            if self._unanswered[name] >= PROBES and name not in asked:
                self._ask(effects, name)
        for name in asked:
            self._unanswered[name] += 1

    def _ask(self, effects: Effects, name: Name) -> None:
        for loader, line in self._lines.items():
            for number in sorted(line.owners)[-1:]:
                order = Order(loader, line.turn, number, line.floor, self.used)
                effects.send(name, order, line.orders[number])
                return

    def _tick(self, effects: Effects) -> None:
        if not self._ticking and any(line.owners for line in self._lines.values()):
            self._ticking = True
            effects.timer(AGAIN, "again")
