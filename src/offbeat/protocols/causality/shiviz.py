r"""Logs with vector clocks, as ShiViz and GoVector have them: written, and read from any program that has such clocks.

An event is a host, its vector clock as JSON, and a text; a regular expression says where in the log they are:

    worker-0 {"worker-0": 1}
    send gradients
    worker-1 {"worker-1": 1, "worker-0": 1}
    receive gradients

Clocks say which events happened before which, not by which message. So the edges of what is read are the events that a
clock has news of.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.causality.histories import Computation, Event, Join, Place, computation
from offbeat.protocols.machine import Name

PATTERN: Final = r"(?<host>\S*) (?<clock>{.*})\n(?<event>.*)"
"""What `write` writes, and GoVector by default."""
PATTERNS: Final = (
    PATTERN,
    r"(?<event>.*)\n(?<host>\S*) (?<clock>{.*})",
    r"^(?<host>\S+) (?<clock>{.*}) (?<event>.*)$",
    r"(?<priority>[A-Z]+) (?<host>\S*) (?<clock>{.*})\n(?<event>.*)",
    r"(?<timestamp>\d+) (?<host>\S*) (?<clock>{.*})\n(?<event>.*)",
)
"""What logs are often like; the second is what ShiViz takes if it is told nothing else."""


class Log(NamedTuple):
    """What a log says."""

    computation: Computation
    completed: tuple[int, ...]
    """Lines whose clock leaves out what follows from it: that their own host, or one that they have heard of, knew
    more. Their clocks in the computation are the completed ones."""


class _Entry(Struct, frozen=True):
    line: int
    host: Name
    clock: Mapping[Name, int]
    event: Event


def write(computation: Computation) -> str:
    """The log of a computation, causes before effects, to be read with `PATTERN`. Spaces in names become hyphens."""
    hosts = ["-".join(name.split()) for name in computation.processes]
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"processes {list(computation.processes)} have the same name once spaces are hyphens: rename.")
    return "".join(_written(computation, hosts, place) for place in computation.order)


def parse(text: str, pattern: str | None = None, execution: str | None = None) -> Log:
    """The computation that a log tells of; of several in one log, the one of this name.

    If the log begins with a line that is such an expression, that one is used, as in ShiViz; if no pattern is given,
    the one of `PATTERNS` that fits most of the log. What does not fit is refused with its line: text between the
    events, clocks that are none, a host's events that are not counted from 1 without a gap, clocks that know of events
    that are not in the log.
    """
    expression, body, line = _heading(text, pattern)
    body, line = _execution(expression, body, line, execution)
    histories = defaultdict[Name, list[_Entry]](list)
    for entry in _entries(expression, body, line):
        histories[entry.host].append(entry)
    if not histories:
        fits = "the patterns that logs often have" if pattern is None else repr(pattern)
        raise UsageError(f"no event in this log fits {fits}: give the pattern that its events have.")
    for host, entries in histories.items():
        entries.sort(key=lambda entry: entry.clock[host])
        _check_count(host, entries)
    hosts = list(histories)
    effects = defaultdict[tuple[Place, ...], list[Place]](list)
    for host in hosts:
        for causes, effect in _news(hosts, histories, host):
            effects[causes].append(effect)
    joins = [Join(causes, tuple(places)) for causes, places in effects.items()]
    run = computation({host: [entry.event for entry in entries] for host, entries in histories.items()}, joins)
    return Log(run, tuple(sorted(_completed(run, histories))))


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern in the notation of ShiViz, which is JavaScript's, as one of Python's."""
    expression = _compiled(pattern)
    missing = {"host", "clock", "event"} - expression.groupindex.keys()
    if missing:
        raise UsageError(
            f"{pattern!r} does not say where to find {', '.join(sorted(missing))}: name groups (?<host>…), (?<clock>…) "
            f"and (?<event>…)."
        )
    return expression


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(re.sub(r"\(\?<(?![=!])", "(?P<", pattern), re.MULTILINE)
    except re.error as error:
        raise UsageError(f"{pattern!r} is no regular expression: {error}.") from None


def _written(computation: Computation, hosts: Sequence[Name], place: Place) -> str:
    event = computation.event(place)
    clock = {hosts[i]: known for i, known in enumerate(computation.vector(place)) if known}
    text = " ".join(f"{event.kind} {event.what or event.call or ''}".split())
    return f"{hosts[place.process]} {json.dumps(clock)}\n{text}\n"


def _heading(text: str, pattern: str | None) -> tuple[re.Pattern[str], str, int]:
    """The expression to use, the text to use it on, and the number of its first line."""
    first, _, rest = text.partition("\n")
    if "(?<host>" in first and "(?<clock>" in first:
        return compiled(first.strip()), rest, 2
    if pattern is not None:
        return compiled(pattern), text, 1
    return max(map(compiled, PATTERNS), key=lambda one: _covered(one, text)), text, 1


def _execution(expression: re.Pattern[str], text: str, line: int, wanted: str | None) -> tuple[str, int]:
    """The part of a log that tells of one execution, and the number of its first line.

    As in ShiViz, the line below the expression may be one that fits what stands between executions; its group `trace`,
    if it has one, names the execution that follows.
    """
    delimiter, _, rest = text.partition("\n")
    if line == 1 or not delimiter.strip() or expression.match(text):
        parts = {"1": (text, line)}
    else:
        parts = dict(_parts(_compiled(delimiter.strip()), rest, line + 1))
    if wanted is None and len(parts) == 1:
        return next(iter(parts.values()))
    if wanted not in parts:
        which = "holds several executions" if wanted is None else f"has no execution {wanted!r}"
        raise UsageError(f"this log {which}: name one of {', '.join(parts)}.")
    return parts[wanted]


def _parts(delimiter: re.Pattern[str], text: str, line: int) -> Iterator[tuple[str, tuple[str, int]]]:
    """Executions by name, those without events left out; without a name, by number."""
    name, start, number = "", 0, 0
    for match in (*delimiter.finditer(text), None):
        part = text[start : len(text) if match is None else match.start()]
        if part.strip():
            number += 1
            yield name or str(number), (part, line + text.count("\n", 0, start))
        if match is not None:
            name, start = match.groupdict(default="").get("trace", "").strip(), match.end()


def _covered(expression: re.Pattern[str], text: str) -> int:
    """How much of a text an expression fits."""
    return sum(match.end() - match.start() for match in expression.finditer(text))


def _entries(expression: re.Pattern[str], text: str, line: int) -> Iterator[_Entry]:
    end = 0
    for match in expression.finditer(text):
        _check_blank(text[end : match.start()], line)
        line += text.count("\n", end, match.start())
        yield _entry(match, line)
        end = match.end()
        line += match.group().count("\n")
    _check_blank(text[end:], line)


def _check_blank(between: str, line: int) -> None:
    if between.strip():
        skipped = between[: len(between) - len(between.lstrip())].count("\n")
        raise UsageError(
            f"line {line + skipped} of the log, {between.strip().splitlines()[0][:80]!r}, is no part of an event: mend "
            f"it, or give the pattern that its events have."
        )


def _entry(match: re.Match[str], line: int) -> _Entry:
    groups = match.groupdict(default="")
    host = groups.pop("host")
    clock = _clock(groups.pop("clock"), host, line)
    return _Entry(line, host, clock, Event(what=groups.pop("event"), labels=groups))


def _clock(text: str, host: Name, line: int) -> Mapping[Name, int]:
    try:
        clock = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the clock in line {line} of the log, {text[:80]}, is no JSON: {error}.") from None
    if not isinstance(clock, dict) or not all(type(value) is int and value >= 0 for value in clock.values()):
        raise UsageError(f"the clock in line {line} of the log, {text[:80]}, must have a count for each host.")
    if not clock.get(host):
        raise UsageError(
            f"the clock in line {line} of the log has no entry for its own host {host!r}: every event counts itself."
        )
    return clock


def _check_count(host: Name, entries: Sequence[_Entry]) -> None:
    for number, entry in enumerate(entries, 1):
        if entry.clock[host] != number:
            raise UsageError(
                f"line {entry.line} of the log is event {entry.clock[host]} of {host!r}, where its event {number} "
                f"should be: each host counts its events from 1, without a gap, and none twice."
            )


def _news(
    hosts: Sequence[Name], histories: Mapping[Name, Sequence[_Entry]], host: Name
) -> Iterator[tuple[tuple[Place, ...], Place]]:
    """The latest events of others that a clock knows of, and the event that knew of them first.

    The host's own event before it is among them: so all exits from a collective have the same causes, and are a join.
    """
    known: dict[Name, int] = {}
    index = {name: i for i, name in enumerate(hosts)}
    for number, entry in enumerate(histories[host], 1):
        news = {other: count for other, count in entry.clock.items() if other != host and count > known.get(other, 0)}
        for other, count in news.items():
            if count > len(histories.get(other, ())):
                raise UsageError(
                    f"the clock in line {entry.line} of the log knows of event {count} of {other!r}, of which the log "
                    f"has {len(histories.get(other, ()))}: give the whole log."
                )
        if news:
            known |= news
            own = {host: number - 1} if number > 1 else {}
            yield tuple(sorted(Place(index[name], k) for name, k in (news | own).items())), Place(index[host], number)


def _completed(run: Computation, histories: Mapping[Name, Sequence[_Entry]]) -> Iterator[int]:
    for process, (_, entries) in enumerate(histories.items()):
        for number, entry in enumerate(entries, 1):
            if run.vector(Place(process, number)) != tuple(entry.clock.get(name, 0) for name in run.processes):
                yield entry.line
