"""Random small computations that real processes could have had, for tests of what is concluded from them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from offbeat.protocols.causality.cuts import Cut
from offbeat.protocols.causality.histories import Call, Computation, Edge, Event, EventKind, EventPosition, computation
from offbeat.protocols.causality.shiviz import ShivizLog, parse_all

few = settings(max_examples=40)
COLLECTIVES = ("barrier", "all_reduce", "broadcast", "reduce")


def played(processes: int, tape: list[int]) -> Computation:
    """A run in which these numbers decide who does what next: work, send, receive, or meet in a collective."""
    names = [f"worker {i}" for i in range(processes)]
    histories: dict[str, list[Event]] = {name: [] for name in names}
    pending: list[tuple[int, int]] = []
    meeting: dict[int, Call] = {}
    inside: set[int] = set()
    entered: set[int] = set()
    sequence = sent = 0
    for now, number in enumerate(tape):
        who, choice = number % processes, number // processes
        history = histories[names[who]]
        if who in inside:
            if meeting[who].needs(names[who]) <= {names[i] for i in entered}:
                history.append(Event(EventKind.EXIT, time=now, call=meeting.pop(who)))
                inside.discard(who)
        elif who in meeting:
            history.append(Event(EventKind.ENTER, time=now, call=meeting[who]))
            inside.add(who)
            entered.add(who)
        elif choice % 8 == 0:
            history.append(Event(EventKind.LOCAL, f"work {now}", now))
        elif choice % 8 > 3 and (mine := [entry for entry in pending if entry[0] == who]):
            entry = mine[choice // 8 % len(mine)]
            pending.remove(entry)
            history.append(Event(EventKind.RECEIVE, time=now, message=entry[1]))
        elif choice % 8 == 1 and not meeting:
            operation = COLLECTIVES[choice // 8 % 4]
            root = names[choice // 32 % processes] if operation in ("broadcast", "reduce") else None
            call = Call("world", sequence := sequence + 1, tuple(names), operation, root=root)
            meeting, entered = dict.fromkeys(range(processes), call), set()
        elif processes > 1:
            sent += 1
            target = (who + 1 + choice // 8 % (processes - 1)) % processes
            history.append(Event(EventKind.SEND, time=now, message=sent, peer=names[target]))
            pending.append((target, sent))
    return computation(histories)


def computations(processes: int = 4, events: int = 24) -> st.SearchStrategy[Computation]:
    """Runs of two or more, up to so many processes and events."""

    def run(seed: int) -> Computation:
        random = Random(seed)
        length = random.randint(events // 2, events)
        return played(random.randint(2, processes), [random.randrange(10_000) for _ in range(length)])

    # Drawn by hypothesis number by number, most runs would have hardly an event.
    return st.integers(0, 2**32).map(run)


def places(run: Computation) -> list[EventPosition]:
    return [EventPosition(i, k) for i, length in enumerate(run.lengths) for k in range(1, length + 1)]


def all_cuts(run: Computation) -> Iterator[Cut]:
    return product(*(range(length + 1) for length in run.lengths))


def closed(run: Computation, cut: Cut) -> bool:
    """Whether a cut is consistent, by the definition."""
    return all(
        cause.number <= cut[cause.process] for cause, effect in run.edges if effect.number <= cut[effect.process]
    )


def lines(*lengths: int, edges: list[tuple[tuple[int, int], tuple[int, int]]] | None = None) -> Computation:
    """Histories of local events, with these edges between them."""
    histories = {f"worker {i}": [Event(what=f"{i}.{k + 1}") for k in range(n)] for i, n in enumerate(lengths)}
    return computation(
        histories, [Edge(EventPosition(*cause), EventPosition(*effect)) for cause, effect in edges or []]
    )


def reaches(run: Computation, one: EventPosition, other: EventPosition) -> bool:
    """Whether one event happened before the other, by the definition: a way leads from it to the other."""
    todo, seen = [other], {other}
    while todo:
        place = todo.pop()
        before = [EventPosition(place.process, place.number - 1)] if place.number > 1 else []
        for cause in (*before, *run.causes(place)):
            if cause == one:
                return True
            if cause not in seen:
                seen.add(cause)
                todo.append(cause)
    return False


def parse(text: str, pattern: str | None = None, execution: str | None = None) -> ShivizLog:
    """The only execution in a log, or the one of this name."""
    (log,) = parse_all(text, pattern, execution=execution).values()
    return log
