"""Which process waits for which, and for ever: the wait-for graph with waits for k of n.

A wait needs k of a set of processes to do something: in a collective all members that have not arrived, in a receipt
the one sender, from any source one of n, under bounded staleness all workers below the bound, with backup workers k of
n. A process that waits in several ways at once needs all of them.

**The release fixpoint.** A running process may release those that wait for it, which then run. What is left when none
can be released any more is deadlocked: for ever, whatever the others do. A process that has ended releases nobody. The
graph must be that of a consistent cut, and a wait that a message in flight will end does not count: otherwise deadlocks
are found that never were. `waits` takes both into account.

**The explanation** is a minimal set of processes that hold each other up: a cycle, or an orphan, which waits for a
process that has ended. It is the smallest where every wait is for all of its processes. For others, such as any-source
waits, finding the smallest is as hard as set cover; then it is one that cannot be made smaller.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.causality.cuts import Cut, violation
from offbeat.protocols.causality.histories import Computation, Event, EventKind
from offbeat.protocols.machine import Name


class Wait(Struct, frozen=True):
    """A process that continues once `needs` of some others have done something."""

    process: Name
    needs: int
    of: frozenset[Name]
    what: str
    """What it waits in, in words: `all_reduce #57 of group world, called at train.py:88`."""

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

    @classmethod
    def on_any(cls, process: Name, of: Iterable[Name], what: str) -> Wait:
        """Wait for a message from any of these."""
        return cls(process, 1, frozenset(of), what)


class Knot(Struct, frozen=True):
    """A minimal set of processes that hold each other up, even if all others ran."""

    waits: tuple[Wait, ...]
    """In a readable order: each waits for the next."""
    ended: frozenset[Name]
    """Awaited processes that have ended; empty for a cycle."""

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
        """The same, without details."""
        return self.told({})


class Deadlock(Struct, frozen=True):
    """Processes that will never continue, and why."""

    stuck: frozenset[Name]
    knots: tuple[Knot, ...]
    """The reasons: each would be a deadlock without the others."""

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
        """The same, without details."""
        return self.told({})


def deadlock(waits: Iterable[Wait], ended: Collection[Name] = ()) -> Deadlock | None:
    """The deadlock, given all waits and ended processes; all others count as running. None: there is no deadlock."""
    graph = _Graph(waits, frozenset(ended))
    stuck = graph.stuck(frozenset())
    if not stuck:
        return None
    knots: list[Knot] = []
    repaired = frozenset[Name]()
    while left := graph.stuck(repaired):
        knots.append(graph.knot(left))
        repaired |= knots[-1].processes
    return Deadlock(stuck, tuple(knots))


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
            open_waits.append(Wait.on_any(name, last.sources, last.what or "a receipt"))
    return open_waits


def natural(names: Iterable[Name]) -> list[Name]:
    """Names in natural order: worker 2 before worker 10."""
    return sorted(names, key=lambda name: [(len(part), part) if part.isdigit() else (0, part) for part in name.split()])


class _Graph:
    def __init__(self, waits: Iterable[Wait], ended: frozenset[Name]) -> None:
        self.waits = defaultdict[Name, list[Wait]](list)
        self.waiting_for = defaultdict[Name, list[Wait]](list)
        self.ended = ended
        for wait in dict.fromkeys(waits):
            if wait.process not in ended:
                self.waits[wait.process].append(wait)
                for other in wait.of:
                    self.waiting_for[other].append(wait)

    def stuck(self, repaired: Collection[Name]) -> frozenset[Name]:
        """The processes that can never be released, even if these were."""
        names = self.waits.keys() | self.waiting_for.keys()
        free = {name for name in names if name in repaired or (name not in self.waits and name not in self.ended)}
        met = Counter[Wait]()
        open_waits = {name: len(waits) for name, waits in self.waits.items()}
        todo = list(free)
        while todo:
            for wait in self.waiting_for.get(todo.pop(), ()):
                met[wait] += 1
                if met[wait] == wait.needs:
                    open_waits[wait.process] -= 1
                    if not open_waits[wait.process] and wait.process not in free:
                        free.add(wait.process)
                        todo.append(wait.process)
        return frozenset(self.waits.keys() - free)

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
            came_from: dict[Name, Name | None] = {start: None}
            todo = deque([start])
            while todo:
                name = todo.popleft()
                others = frozenset[Name]().union(*(wait.of for wait in blocked[name]))
                if start in others or others & self.ended:
                    way = _way(came_from, name)
                    best = way if not best or len(way) < len(best) else best
                    break
                for other in natural(others & blocked.keys() - came_from.keys()):
                    came_from[other] = name
                    todo.append(other)
        return best

    def _shrunk(self, stuck: frozenset[Name], kept: Name) -> Sequence[Name]:
        """A minimal stuck set, around one process if possible."""
        held = stuck
        for name in (*natural(stuck - {kept}), kept):
            if name in held and (rest := self._still_stuck(held - {name})):
                held = rest
        return natural(held)

    def _still_stuck(self, names: frozenset[Name]) -> frozenset[Name]:
        """Those of these that would be stuck if all others ran."""
        while free := {name for name in names if not self._unmet(name, names | self.ended)}:
            names -= free
        return names

    def _closed(self, names: Sequence[Name], blocked: Mapping[Name, list[Wait]]) -> Knot:
        """One wait of each that the named suffice to keep open, and the ended ones among them."""
        stuck = frozenset(names) | self.ended
        chosen = [next(wait for wait in blocked[name] if len(wait.of - stuck) < wait.needs) for name in names]
        ended = frozenset[Name]().union(*(self._dead_reasons(wait, names) for wait in chosen))
        return Knot(tuple(chosen), ended)

    def _dead_reasons(self, wait: Wait, names: Sequence[Name]) -> frozenset[Name]:
        """The ended processes that a wait is for, if the names alone would not keep it open."""
        return wait.of & self.ended if len(wait.of & frozenset(names)) <= wait.spare else frozenset()


def _way(came_from: Mapping[Name, Name | None], name: Name) -> list[Name]:
    way = [name]
    while (before := came_from[way[-1]]) is not None:
        way.append(before)
    return way[::-1]


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
