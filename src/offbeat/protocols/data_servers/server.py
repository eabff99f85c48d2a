"""A data server: prepares the batches that workers order, most urgent first, and keeps each until it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from offbeat.protocols.data_servers.messages import Busy, Order, Spoiled, Supply, Used
from offbeat.protocols.machine import Done, Effect, Effects, Event, Name, Payload, Received

Place = tuple[Name, int]  # A worker and its loader.


class PrepareBatch(Struct, frozen=True):
    """Work: prepare this batch. The result is its payload, or the reason why it could not be prepared."""

    worker: Name
    order: Order
    payload: Payload


class ReleaseBatch(Struct, frozen=True):
    """Work: the memory of this batch is free."""

    payload: Payload


@dataclass
class OrderBook:
    """What one worker has ordered in its latest pass over a loader."""

    turn: int
    floor: int
    waiting: dict[int, PrepareBatch] = field(default_factory=dict[int, PrepareBatch])
    made: dict[int, Payload | str] = field(default_factory=dict[int, "Payload | str"])


class DataServer:
    """The machine of a data server; it prepares one batch at a time."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self._books: dict[Place, OrderBook] = {}
        self._current: PrepareBatch | None = None
        self.step = 0
        """Batches used by the worker that has used the most."""
        self.made = 0
        """Batches prepared."""

    def begin(self, now: float) -> Sequence[Effect]:
        """Nothing to do before the first order."""
        del now
        return ()

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event."""
        del now
        effects = Effects()
        if isinstance(event, Received):
            if isinstance(event.message, Order):
                self._order(effects, event.sender, event.message, event.payload)
            elif isinstance(event.message, Used):
                self._free(effects, (event.sender, event.message.loader), event.message.turn, event.message.floor)
        elif isinstance(event, Done):
            self._prepared(effects, event.result)
        self._next(effects)
        return effects.done

    def _order(self, effects: Effects, worker: Name, order: Order, payload: Payload) -> None:
        self.step = max(self.step, order.step)
        place = (worker, order.loader)
        self._free(effects, place, order.turn, order.floor)
        book = self._books[place]
        if order.turn != book.turn or order.number < book.floor:
            return  # Late: a newer pass has begun, or it is used already.
        if order.number in book.made:
            self._hand_out(effects, worker, order, book.made[order.number])
        elif order.number in book.waiting or self._is_current(worker, order):
            effects.send(worker, Busy(order.loader))
        else:
            book.waiting[order.number] = PrepareBatch(worker, order, payload)

    def _free(self, effects: Effects, place: Place, turn: int, floor: int) -> None:
        """A worker needs nothing any more of earlier passes, and nothing below `floor` of this one."""
        book = self._books.get(place)
        if book is None or book.turn < turn:
            if book is not None:
                self._release(effects, book, list(book.made))
            book = self._books[place] = OrderBook(turn, floor)
        if book.turn == turn and floor >= book.floor:
            book.floor = floor
            self._release(effects, book, [number for number in book.made if number < floor])
            book.waiting = {number: order for number, order in book.waiting.items() if number >= floor}

    def _release(self, effects: Effects, book: OrderBook, numbers: Sequence[int]) -> None:
        for number in numbers:
            made = book.made.pop(number)
            if isinstance(made, Payload):
                effects.start(ReleaseBatch(made))

    def _is_current(self, worker: Name, order: Order) -> bool:
        current = self._current
        if current is None or current.worker != worker:
            return False
        mine = current.order
        return (mine.loader, mine.turn, mine.number) == (order.loader, order.turn, order.number)

    def _next(self, effects: Effects) -> None:
        """Begin with the order that is needed first: the fewest batches ahead of what its worker has used."""
        if self._current is not None:
            return
        waiting = [(number - book.floor, book, number) for book in self._books.values() for number in book.waiting]
        if not waiting:
            return
        _, book, number = min(waiting, key=lambda entry: entry[0])
        self._current = book.waiting.pop(number)
        effects.start(self._current, "prepared")

    def _prepared(self, effects: Effects, result: Any) -> None:
        current, self._current = self._current, None
        if current is None:
            return
        self.made += 1
        order, book = current.order, self._books[current.worker, current.order.loader]
        if book.turn != order.turn or order.number < book.floor:
            if isinstance(result, Payload):
                effects.start(ReleaseBatch(result))
            return
        book.made[order.number] = result
        self._hand_out(effects, current.worker, order, result)

    def _hand_out(self, effects: Effects, worker: Name, order: Order, made: Payload | str) -> None:
        if isinstance(made, Payload):
            effects.send(worker, Supply(order.loader, order.turn, order.number), made)
        else:
            effects.send(worker, Spoiled(order.loader, order.turn, order.number, made))
