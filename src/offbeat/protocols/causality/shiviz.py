r"""Logs with vector clocks, as in ShiViz and GoVector: written, and read from any program with such clocks.

An event is a host, its vector clock as JSON, and a text; a regular expression says where in the log they are:

    worker-0 {"worker-0": 1}
    send gradients
    worker-1 {"worker-1": 1, "worker-0": 1}
    receive gradients

Clocks say which events happened before which, not by which message. So the edges are from the events that a clock has
news of.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.causality.histories import Computation, Event, EventPosition, Join, computation
from offbeat.protocols.machine import Name

PATTERN: Final = r"(?<host>\S*) (?<clock>{.*})\n(?<event>.*)"  # Written by `write`, and by GoVector by default.
DELIMITER: Final = r"^=== (?<trace>.*) ===$"  # Separates executions in ShiViz's own logs.
SEARCHED: Final = 1000  # Longest line in which an event may begin anywhere: searching longer ones takes too long.
MOST: Final = 1 << 25  # Most entries in the clocks of all events together: a quarter of a gigabyte.
_CLOCK: Final = r'(?P<clock>\{(?:[^{}"\n]++|"(?:[^"\\\n]++|\\.)*+")*+\})'
"""Counts for hosts, without backtracking, so that matching takes linear time."""
PATTERNS: Final = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rf"^(?P<host>\S*+) {_CLOCK}[^\S\n]*+\n(?P<event>.*)",
        rf"^(?P<event>.*+)\n(?P<host>\S*+) {_CLOCK}[^\S\n]*+",
        rf"^(?P<host>\S++) {_CLOCK} (?P<event>.*)$",
        rf"^(?P<priority>[A-Z]++) (?P<host>\S*+) {_CLOCK}[^\S\n]*+\n(?P<event>.*)",
        rf"^(?P<timestamp>\d++) (?P<host>\S*+) {_CLOCK}[^\S\n]*+\n(?P<event>.*)",
        r"^\[(?P<priority>\w++)\] \[(?P<date>[^\]\n]++)\] \[(?P<thread>[^\]\n]++)\] "
        rf"\[(?:[^\]\s/]*+/)++(?P<host>[^\]\s/]++)\] {_CLOCK} (?P<event>.*)",
        r'^State \d++: <(?P<event>\w++)[^\n]*+\n/\\ Host = (?P<host>[^\s"]++)\n'
        r'/\\ Clock = "(?P<clock>\{[^{}\n]*+\})"(?P<variables>(?:\n/\\ [^\n]*+)*+)',
    )
)
"""Common log formats: the second is ShiViz's default, the last two are Akka's and TLA+'s. Each is tried at the start of
a line only, and reads each character once."""


class ShivizLog(NamedTuple):
    """A parsed log."""

    computation: Computation
    completed: tuple[int, ...]
    """Lines whose clock omits events that their own host, or one it has heard of, knew. Their clocks in the
    computation are the completed ones."""
    skipped: tuple[int, ...] = ()  # Lines that belong to no event.


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
    lines: list[str] = []
    for place in computation.order:
        event = computation.event(place)
        clock = {hosts[i]: known for i, known in enumerate(computation.vector(place)) if known}
        text = " ".join(f"{event.kind} {event.what or event.call or ''}".split())
        lines.append(f"{hosts[place.process]} {json.dumps(clock)}\n{text}\n")
    return "".join(lines)


def parse_all(
    text: str, pattern: str | None = None, delimiter: str | None = None, execution: str | None = None
) -> dict[str, ShivizLog]:
    """The computations in a log, by name; only `execution`, if given.

    A first line that is a pattern is used, as in ShiViz; without a pattern, the one of `PATTERNS` that fits most of the
    log. `delimiter` matches what separates executions; its group `trace`, if any, names the execution that follows.
    Without one, a log that is not one execution is split as ShiViz's own logs are. Lines that fit no event are skipped
    and reported. Refused, with the line, are invalid clocks, a host's events that are not counted from 1 without a gap,
    and a clock that knows of events that are not in the log.
    """
    expression, between, body, line = _heading(text.replace("\r\n", "\n"), pattern, delimiter)
    if between is None:
        try:
            whole = {"1": _log(expression, body, line)}
        except UsageError:
            between = _compiled(DELIMITER)
            if between.search(body) is None:
                raise
        else:
            return _wanted(whole, execution)
    parts = _wanted(_parts(between, body, line), execution)
    return {name: _log(expression, part, first) for name, (part, first) in parts.items()}


def _log(expression: re.Pattern[str], text: str, line: int) -> ShivizLog:
    """One execution, given its text and the number of its first line."""
    histories = defaultdict[Name, list[_Entry]](list)
    found, skipped = _entries(expression, text, line)
    for entry in found:
        histories[entry.host].append(entry)
    if not histories:
        raise UsageError(
            f"no event in this log, from line {line} on, fits its pattern: give the one that its events have with "
            f"--pattern, e.g. --pattern '{PATTERN}'."
        )
    if (len(found) + len(histories)) * len(histories) > MOST:
        raise UsageError(f"{len(found):,} events of {len(histories):,} processes have too many clocks to be compared.")
    for host, entries in histories.items():
        entries.sort(key=lambda entry: entry.clock[host])
        _check_count(host, entries, skipped)
    hosts = list(histories)
    effects = defaultdict[tuple[EventPosition, ...], list[EventPosition]](list)
    for host in hosts:
        for causes, effect in _news(hosts, histories, host):
            effects[causes].append(effect)
    joins = [Join(causes, tuple(places)) for causes, places in effects.items()]
    run = computation({host: [entry.event for entry in entries] for host, entries in histories.items()}, joins)
    return ShivizLog(run, tuple(sorted(_completed(run, histories))), tuple(skipped))


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern in ShiViz's (JavaScript's) notation, compiled for Python."""
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
        named = re.sub(r"\(\?<(?![=!])", "(?P<", pattern)
        return re.compile(re.sub(r"\\k<(\w+)>", r"(?P=\1)", named), re.MULTILINE)
    except (re.error, RecursionError, OverflowError) as error:  # The last two: too deep, and too many times.
        shown = pattern if len(pattern) <= 500 else f"{pattern[:500]}…"
        raise UsageError(f"{shown!r} is not a regular expression: {error}.") from None


def _heading(
    text: str, pattern: str | None, delimiter: str | None
) -> tuple[re.Pattern[str], re.Pattern[str] | None, str, int]:
    """The expression, the separator of executions, the text to use them on, and the number of its first line.

    A ShiViz file has the first in line 1, and the second, or nothing, in line 2.
    """
    between = None if delimiter is None else _compiled(delimiter)
    first, _, rest = text.partition("\n")
    if "(?<host>" in first and "(?<clock>" in first:
        expression = compiled(first.strip())
        second, _, body = rest.partition("\n")
        event = expression.match(rest)  # Then the second line is not a separator.
        if not second.strip() or (event is not None and "{" in event["clock"]):
            return expression, between, rest, 2
        return expression, between or _compiled(second.strip()), body, 3
    if pattern is not None:
        return compiled(pattern), between, text, 1
    # Separators would pass for the text of an event.
    events = (between or _compiled(DELIMITER)).sub("", text)
    return max(PATTERNS, key=lambda one: sum(len(match[0]) for match in _matches(one, events))), between, text, 1


_Part = TypeVar("_Part")


def _wanted(parts: dict[str, _Part], execution: str | None) -> dict[str, _Part]:
    if execution is None:
        return parts
    if execution not in parts:
        raise UsageError(f"this log has no execution {execution!r}: name one of {', '.join(parts)}.")
    return {execution: parts[execution]}


def _parts(delimiter: re.Pattern[str], text: str, line: int) -> dict[str, tuple[str, int]]:
    """Executions by name, or by number if they have none; empty ones are omitted."""
    name, start, counted = "", 0, 0
    parts: dict[str, tuple[str, int]] = {}
    for match in (*delimiter.finditer(text), None):
        part = text[start : len(text) if match is None else match.start()]
        line += text.count("\n", counted, start)
        counted = start
        if part.strip():
            name = name or str(len(parts) + 1)
            if name in parts:
                raise UsageError(f"line {line} of the log begins a second execution called {name!r}: rename one.")
            parts[name] = (part, line)
        if match is not None:
            name, start = match.groupdict(default="").get("trace", "").strip(), match.end()
    if not parts:
        raise UsageError("no event is in this log: there is nothing between the delimiters.")
    return parts


def _matches(expression: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """All matches of an expression in a text, as by `finditer`; in long lines, only at their start.

    `finditer` tries every character of a line that does not match, and from each may rescan the whole line.
    """
    anchored = expression.pattern.startswith("^")
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        tried = range(at, end + 1 if end - at <= SEARCHED and not anchored else at + 1)
        match = next((found for start in tried if (found := expression.match(text, start)) and found[0]), None)
        if match is not None:
            yield match
        at = end + 1 if match is None else match.end()
        # The rest of a line after an event is searched again, unless it is empty.
        at += match is not None and text.startswith("\n", at)


def _entries(expression: re.Pattern[str], text: str, line: int) -> tuple[list[_Entry], list[int]]:
    """The events, and the numbers of lines that belong to none."""
    end = 0
    found: list[_Entry] = []
    skipped: list[int] = []

    def skip(between: str) -> None:
        skipped.extend(line + number for number, words in enumerate(between.split("\n")) if words.strip())

    for match in _matches(expression, text):
        between = text[end : match.start()]
        skip(between)
        line += between.count("\n")
        found.append(_entry(match, line))
        end = match.end()
        line += match[0].count("\n")
    skip(text[end:])
    return found, skipped


def _entry(match: re.Match[str], line: int) -> _Entry:
    groups = match.groupdict(default="")
    host = groups.pop("host").strip()
    clock = _clock(groups.pop("clock"), host, line)
    return _Entry(line, host, clock, Event(what=groups.pop("event").strip(), labels=groups))


def _clock(text: str, host: Name, line: int) -> Mapping[Name, int]:
    try:
        # TLA+ writes it as a string, with escaped quotes.
        clock = json.loads(text.replace('\\"', '"') if '\\"' in text else text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the clock in line {line} of the log, {text[:80]}, is not JSON: {error}.") from None
    if not isinstance(clock, dict) or not all(type(value) is int and value >= 0 for value in clock.values()):
        raise UsageError(f"the clock in line {line} of the log, {text[:80]}, must have a count for each host.")
    if not clock.get(host):
        raise UsageError(
            f"the clock in line {line} of the log has no entry for its own host {host!r}: every event counts itself."
        )
    return clock


def _check_count(host: Name, entries: Sequence[_Entry], skipped: Sequence[int]) -> None:
    for number, entry in enumerate(entries, 1):
        if entry.clock[host] != number:
            lost = f" Line {skipped[0]} fits no event: is the pattern right?" if skipped else ""
            raise UsageError(
                f"line {entry.line} of the log is event {entry.clock[host]} of {host!r}, where its event {number} "
                f"should be: each host counts its events from 1, without a gap, and none twice.{lost}"
            )


def _news(
    hosts: Sequence[Name], histories: Mapping[Name, Sequence[_Entry]], host: Name
) -> Iterator[tuple[tuple[EventPosition, ...], EventPosition]]:
    """The latest events of other hosts that a clock knows, and the event that knew of them first.

    The host's own previous event is among them: so all exits from a collective have the same causes, and are a join.
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
            yield (
                tuple(sorted(EventPosition(index[name], k) for name, k in (news | own).items())),
                EventPosition(index[host], number),
            )


def _completed(run: Computation, histories: Mapping[Name, Sequence[_Entry]]) -> Iterator[int]:
    for process, (_, entries) in enumerate(histories.items()):
        for number, entry in enumerate(entries, 1):
            if run.vector(EventPosition(process, number)) != tuple(entry.clock.get(name, 0) for name in run.processes):
                yield entry.line
