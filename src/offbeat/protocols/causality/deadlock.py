"""Which process waits for which, and for ever: the wait-for graph with waits for k of n.

A wait needs k of a set of processes to do something; a process that waits in several ways at once needs all of them.
A running process may release those that wait for it, which then run. What is left when none can be released any more is
deadlocked: for ever, whatever the others do. The graph must be that of a consistent cut, and a wait that a message in
flight will end does not count: otherwise deadlocks are found that never were. `waits` takes both into account.

The explanation is a minimal set of processes that hold each other up: a cycle, or an orphan, which waits for a process
that has ended. It is the smallest where every wait is for all of its processes. For others, such as any-source waits,
finding the smallest is as hard as set cover; then it is one that cannot be made smaller.

`Matching` compares at entry, before any wait, what the members of a group call: each counts its calls on the group, and
entries with the same number belong together. No extra messages are needed: the call is in the entry event.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.causality.cuts import Cut, violation
from offbeat.protocols.causality.histories import Call, Computation, Event, EventKind
from offbeat.protocols.machine import Name

COMPARED: Final = ("operation", "members", "shape", "dtype", "reduce", "root")


class Wait(Struct, frozen=True):
    """A process that continues once `needs` of some others have done something."""

    process: Name
    needs: int
    of: frozenset[Name]
    what: str  # What it waits in, in words: `all_reduce #57 of group world, called at train.py:88`.

    def __post_init__(self) -> None:
        """Refuse waits that can never end, and waits for nothing."""
        if not 0 < self.needs <= len(self.of):
            raise UsageError(
                f"{self.process} cannot wait for {self.needs} of {len(self.of)} processes in {self.what}: give from 1 "
                f"up to as many as there are, and no wait where none is needed."
            )

    @property
    def spare(self) -> int:
        """How many of the awaited processes it can do without."""
        return len(self.of) - self.needs

    @classmethod
    def on_all(cls, process: Name, of: Iterable[Name], what: str) -> Wait:
        """In a collective: wait for all members that have not arrived. In a receipt: for the one sender."""
        others = frozenset(of)
        return cls(process, len(others), others, what)


class Knot(Struct, frozen=True):
    """A minimal set of processes that hold each other up, even if all others ran."""

    waits: tuple[Wait, ...]  # In a readable order: each waits for the next.
    ended: frozenset[Name]  # Awaited processes that have ended; empty for a cycle.

    @property
    def processes(self) -> frozenset[Name]:
        """The waiting processes."""
        return frozenset(wait.process for wait in self.waits)

    def told(self, how: Mapping[Name, str]) -> str:
        """In words: `worker 2 waits for worker 0 in X; worker 0 waits for worker 2 in Y`; `how` says how some ended."""
        stuck = self.processes | self.ended
        words = [_tell(wait, stuck) for wait in self.waits]
        return "; ".join([*words, *(f"{name} {how.get(name, 'has ended')}" for name in natural(self.ended))])

    def __str__(self) -> str:
        return self.told({})


class Deadlock(Struct, frozen=True):
    """Processes that will never continue, and why."""

    stuck: frozenset[Name]
    knots: tuple[Knot, ...]  # The reasons: each would be a deadlock without the others.

    @property
    def held_up(self) -> frozenset[Name]:
        """Processes that are stuck only because those in the knots are."""
        return self.stuck.difference(*(knot.processes for knot in self.knots))

    def told(self, how: Mapping[Name, str]) -> str:
        """The knots in words, then the processes held up by them; `how` says how some have ended."""
        behind = natural(self.held_up)
        held = f"Held up by this: {', '.join(behind)}." if behind else ""
        return " ".join([*(f"{knot.told(how)}." for knot in self.knots), *filter(None, [held])])

    def __str__(self) -> str:
        return self.told({})


def deadlock(waits: Iterable[Wait], ended: Collection[Name] = ()) -> Deadlock | None:
    """The deadlock, given all waits and ended processes; all others count as running. None: there is no deadlock."""
    graph = _Graph(waits, frozenset(ended))
    stuck = left = graph.stuck(frozenset(graph.waits))
    knots: list[Knot] = []
    while left:
        knots.append(graph.knot(left))
        left = graph.stuck(left - knots[-1].processes)
    return Deadlock(stuck, tuple(knots)) if stuck else None


def waits(computation: Computation, cut: Cut) -> list[Wait]:
    """The waits at this point of a run: the last event of a process is an entry, or the start of a wait.

    A wait for a message in flight is about to end, and omitted.
    """
    wrong = violation(computation, cut)
    if wrong is not None:
        raise UsageError(f"waits are judged on a consistent cut only, or deadlocks are found that never were: {wrong}")
    entered = _entered(computation, cut)
    open_waits: list[Wait] = []
    for process, number in enumerate(cut):
        name = computation.processes[process]
        last = computation.histories[process][number - 1] if number else Event()
        if last.kind is EventKind.ENTER and last.call is not None:
            missing = last.call.needs(name) - entered[last.call.group, last.call.sequence]
            open_waits += [Wait.on_all(name, missing, str(last.call))] if missing else []
        elif last.kind is EventKind.AWAIT and last.sources and not _in_flight(computation, cut, process, last):
            open_waits.append(Wait(name, 1, last.sources, last.what or "a receipt"))
    return open_waits


def natural(names: Iterable[Name]) -> list[Name]:
    """Names in natural order: worker 2 before worker 10."""
    return sorted(names, key=lambda name: [(len(part), part) if part.isdigit() else (0, part) for part in name.split()])


class _Graph:
    def __init__(self, waits: Iterable[Wait], ended: frozenset[Name]) -> None:
        self.waits = defaultdict[Name, list[Wait]](list)
        self.ended = ended
        for wait in dict.fromkeys(waits):
            if wait.process not in ended:
                self.waits[wait.process].append(wait)

    def stuck(self, names: frozenset[Name]) -> frozenset[Name]:
        """Those of these that can never be released, even if all others ran."""
        while True:
            others = names | self.ended
            free = {name for name in names if not self._unmet(name, others)}
            if not free:
                return names
            names -= free

    def knot(self, stuck: frozenset[Name]) -> Knot:
        """A smallest reason why some of these are stuck."""
        blocked = {name: self._unmet(name, stuck | self.ended) for name in stuck}
        if all(wait.spare == 0 for waits in blocked.values() for wait in waits):
            return self._closed(self._shortest(blocked), blocked)
        tried = [self._shrunk(stuck, start) for start in natural(stuck)]
        least = min(tried, key=len)
        return self._closed(least, {name: self._unmet(name, frozenset(least) | self.ended) for name in least})

    def _unmet(self, name: Name, stuck: Collection[Name]) -> list[Wait]:
        """Its waits that only these could end."""
        return [wait for wait in self.waits[name] if len(wait.of.difference(stuck)) < wait.needs]

    def _shortest(self, blocked: Mapping[Name, list[Wait]]) -> Sequence[Name]:
        """The shortest chain in which each waits for the next, and the last for the first or an ended one."""
        best: Sequence[Name] = ()
        for start in natural(blocked):
            chains = {start: [start]}
            todo = deque([start])
            while todo:
                name = todo.popleft()
                others = frozenset[Name]().union(*(wait.of for wait in blocked[name]))
                if start in others or others & self.ended:
                    best = min(filter(None, (best, chains[name])), key=len)
                    break
                for other in natural(others & blocked.keys() - chains.keys()):
                    chains[other] = [*chains[name], other]
                    todo.append(other)
        return best

    def _shrunk(self, stuck: frozenset[Name], kept: Name) -> Sequence[Name]:
        """A minimal stuck set, around one process if possible."""
        held = stuck
        for name in (*natural(stuck - {kept}), kept):
            if name in held and (rest := self.stuck(held - {name})):
                held = rest
        return natural(held)

    def _closed(self, names: Sequence[Name], blocked: Mapping[Name, list[Wait]]) -> Knot:
        """One wait of each that the named suffice to keep open, and the ended ones among them."""
        stuck = frozenset(names) | self.ended
        chosen = [next(wait for wait in blocked[name] if len(wait.of - stuck) < wait.needs) for name in names]
        # An ended process is a reason where the names alone would not keep the wait open.
        orphans = [wait for wait in chosen if len(wait.of & frozenset(names)) <= wait.spare]
        return Knot(tuple(chosen), self.ended.intersection(frozenset[Name]().union(*(wait.of for wait in orphans))))


def _tell(wait: Wait, stuck: frozenset[Name]) -> str:
    if wait.spare == 0:
        whom = " and ".join(natural(wait.of & stuck))
    else:
        count = "any" if wait.needs == 1 else f"{wait.needs}"
        whom = f"{count} of {', '.join(natural(wait.of))}"
    return f"{wait.process} waits for {whom} in {wait.what}"


def _entered(computation: Computation, cut: Cut) -> Mapping[tuple[str, int], set[Name]]:
    """The members that have entered each collective, inside the cut."""
    entered = defaultdict[tuple[str, int], set[Name]](set)
    for process, number in enumerate(cut):
        for event in computation.histories[process][:number]:
            if event.kind is EventKind.ENTER and event.call is not None:
                entered[event.call.group, event.call.sequence].add(computation.processes[process])
    return entered


def _in_flight(computation: Computation, cut: Cut, process: int, wait: Event) -> bool:
    """Whether a message that ends this wait is in flight at the cut."""
    received = {
        event.message for event in computation.histories[process][: cut[process]] if event.kind is EventKind.RECEIVE
    }
    return any(
        event.kind is EventKind.SEND
        and event.peer == computation.processes[process]
        and event.message not in received
        and wait.tag in (None, event.tag)
        for source in wait.sources & frozenset(computation.processes)
        for event in computation.histories[computation.index(source)][: cut[computation.index(source)]]
    )


# -- calls that do not match: a wait that will never end, known before it begins ---------------------------------------


class Mismatch(Struct, frozen=True):
    """Two members of a group whose calls should match, but differ."""

    one: Name
    call: Call
    other: Name
    other_call: Call
    differs: tuple[str, ...]  # The fields that differ: some of `COMPARED`.
    order: bool  # The same calls were made in a different order, as far as is known yet.

    def __str__(self) -> str:
        """In words: both calls, and how they differ."""
        why = "the same calls in a different order" if self.order else f"different {', '.join(self.differs)}"
        return f"{self.one} is in {self.call}, but {self.other} in {self.other_call}: {why}."


class Matching:
    """The collectives entered so far, by group and number."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], dict[Name, Call]] = {}

    def enter(self, process: Name, call: Call) -> Mismatch | None:
        """A process enters a collective. Returns its mismatch with the first member there, if any."""
        entered = self._calls.setdefault((call.group, call.sequence), {})
        entered[process] = call
        other = next(iter(entered))
        differs = differences(call, entered[other])
        if not differs:
            return None
        swapped = self._made_elsewhere(other, call) or self._made_elsewhere(process, entered[other])
        return Mismatch(process, call, other, entered[other], differs, swapped)

    def forget(self, group: str, before: int) -> None:
        """Drop calls on a group before this number: all members have left them."""
        for key in [key for key in self._calls if key[0] == group and key[1] < before]:
            del self._calls[key]

    def _made_elsewhere(self, process: Name, call: Call) -> bool:
        """Whether a process made this very call under another number, where no other member made it too."""
        return any(
            group == call.group
            and number != call.sequence
            and process in calls
            and not differences(calls[process], call)
            and not _agree(calls.values())
            for (group, number), calls in self._calls.items()
        )


def _agree(calls: Collection[Call]) -> bool:
    first, *others = calls
    return bool(others) and not any(differences(first, other) for other in others)


def differences(one: Call, other: Call) -> tuple[str, ...]:
    """The fields in which two calls differ; fields that either leaves open are not compared."""
    pairs = {field: (getattr(one, field), getattr(other, field)) for field in COMPARED}
    return tuple(field for field, (a, b) in pairs.items() if a != b and (field == "root" or None not in (a, b)))
