"""Two-sided schedules on real processes, over point-to-point messages of any torch process group.

A schedule is compiled once per rank into a program: a list of steps on the tensor and on a scratch buffer.

- All ranks take rounds in the same order, so that messages between two ranks match by order alone. Sends go as early
  as their `after` allows, so that independent rounds overlap.
- A copy is received straight into its place if nothing else touches that place until then. A reduction is received
  into scratch whole and combined from there: cutting it into segments was no faster.
- A step waits only for transfers that touch the same elements; the checker proves that this is enough.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import UsageError
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, View
from offbeat.runtime.collectives.one_sided.kernels import torch_function


class SendRange(NamedTuple):
    """Start sending a range of the buffer."""

    peer: int
    start: int
    stop: int


class Receive(NamedTuple):
    """Start receiving into a range of the buffer or of the scratch."""

    peer: int
    start: int
    stop: int
    scratch: bool


class WaitFor(NamedTuple):
    """Wait for a transfer, by its number: sends and receives are counted from 0."""

    number: int


class SetAside(NamedTuple):
    """Copy a range of the buffer into the scratch."""

    start: int
    stop: int
    at: int


class Put(NamedTuple):
    """Copy from the scratch into a range of the buffer."""

    start: int
    stop: int
    at: int


class Combine(NamedTuple):
    """Reduce from the scratch into a range of the buffer."""

    start: int
    stop: int
    at: int
    received_first: bool
    """Whether the received operand stands on the left."""
    weight: float | None = None
    """Factor of the received operand before it is added; None: combine by the operation of the call."""


class ScaleRange(NamedTuple):
    """Multiply a range of the buffer."""

    start: int
    stop: int
    weight: float


Step: TypeAlias = SendRange | Receive | WaitFor | SetAside | Put | Combine | ScaleRange


@dataclass(frozen=True)
class CompiledSchedule:
    """One rank's steps of a schedule."""

    rank: int
    size: int
    count: int
    """Elements of the buffer."""
    scratch: int
    """Elements of the scratch."""
    steps: tuple[Step, ...]

    @cached_property
    def sent(self) -> int:
        """Elements that this rank sends to others."""
        return sum(step.stop - step.start for step in self.steps if isinstance(step, SendRange))


def programs() -> Callable[[Schedule, View, Layout, int], CompiledSchedule]:
    """A `compile_schedule` that caches its last 256 programs; whoever runs schedules owns one."""
    return lru_cache(maxsize=256)(compile_schedule)


def compile_schedule(schedule: Schedule, view: View, layout: Layout, rank: int) -> CompiledSchedule:
    """Compile a two-sided schedule for one rank."""
    ordered = _ordered(list(schedule(view, layout)))
    parts = [part for position, entry in enumerate(ordered) for part in _parts(entry, position, rank)]
    _match(parts)
    writer = _Writer()
    for part in parts:
        writer.write(part)
    steps = (*writer.steps, *(WaitFor(flight.number) for flight in writer.flights))
    return CompiledSchedule(rank, view.size, layout.count, writer.scratch, steps)


# -- which parts a rank has, in which order ---------------------------------------------------------------------------


@dataclass(eq=False)
class _Part:
    """One entry of a round, as its source or its target sees it."""

    kind: str  # send, receive, aside (to itself), copy, reduce, scale
    peer: int
    start: int
    stop: int
    key: tuple[int, ...]
    position: int
    received_first: bool = False
    weight: float | None = None
    direct: bool = False
    at: int = -1
    """Where in the scratch it begins."""
    source: _Part | None = None
    """For a copy or reduce: the part that brings its operand."""
    flight: _Flight | None = None
    """For a receive into the scratch: its transfer."""


def _parts(entry: Round, position: int, rank: int) -> Iterable[_Part]:
    """The rank's entries of a round, sends before receives."""
    if entry.op is Op.FETCH or (entry.op is Op.COPY and bool((entry.source == entry.target).any())):
        raise UsageError(
            "this schedule reads other ranks' memory (FETCH, or a COPY to itself), which messages cannot do: use a "
            "two-sided algorithm, or run it over shared memory"
        )
    if entry.op is Op.COMPUTE:
        return
    mine = np.flatnonzero((entry.source == rank) | (entry.target == rank))
    columns = (entry.source, entry.target, entry.start, entry.stop, entry.place)
    keys = list(zip(*(column[mine].tolist() for column in columns), strict=True))
    weights = [None] * len(keys) if entry.weight is None else entry.weight[mine].tolist()
    if entry.op is Op.SEND:
        for key in keys:
            source, target, start, stop, _ = key
            if source == target:
                yield _Part("aside", source, start, stop, key, position)
            elif source == rank:
                yield _Part("send", target, start, stop, key, position)
    mirrored = {(target, source, *rest) for source, target, *rest in keys} if entry.op is Op.REDUCE else set()
    for key, weight in zip(keys, weights, strict=True):
        source, target, start, stop, place = key
        if entry.op is Op.SCALE:
            yield _Part("scale", source, start, stop, key, position, weight=weight)
        elif target == rank and entry.op is not Op.SEND:
            first = source < target and key in mirrored and weight is None
            yield _Part(entry.op.value, source, place, place + stop - start, key, position, first, weight)
        elif target == rank != source:
            yield _Part("receive", source, place, place + stop - start, key, position)


def _ordered(rounds: Sequence[Round]) -> Iterable[Round]:
    """Rounds in an order that keeps `after`, sends as early as possible; the same on all ranks."""
    waiting = [len(set(entry.after)) for entry in rounds]
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for number, entry in enumerate(rounds):
        for earlier in set(entry.after):
            followers[earlier].append(number)
    ready = [(entry.op is not Op.SEND, number) for number, entry in enumerate(rounds) if not entry.after]
    heapq.heapify(ready)
    while ready:
        _, number = heapq.heappop(ready)
        yield rounds[number]
        for later in followers[number]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, (rounds[later].op is not Op.SEND, later))


def _match(parts: list[_Part]) -> None:
    """Match each copy and reduce with its operand, and find what can be received straight into its place."""
    inbox: defaultdict[tuple[int, ...], deque[_Part]] = defaultdict(deque)
    touched = [part for part in parts if part.kind != "receive"]
    position, start, stop = (
        np.array([getattr(part, name) for part in touched], dtype=np.int64) for name in ("position", "start", "stop")
    )
    for part in parts:
        if part.kind in ("receive", "aside"):
            inbox[part.key].append(part)
        elif part.kind not in ("send", "scale"):
            if not inbox[part.key]:
                raise UsageError(
                    f"the schedule uses [{part.start}, {part.stop}) from rank {part.peer} before it was sent"
                )
            part.source = inbox[part.key].popleft()
            between = (position >= part.source.position) & (position < part.position)
            conflicts = between & (start < part.stop) & (stop > part.start)
            part.source.direct = part.kind == "copy" and part.source.kind == "receive" and not conflicts.any()


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Flight:
    """A transfer in flight that touches a range of the buffer (an empty range if it goes into scratch)."""

    number: int
    start: int
    stop: int
    writes: bool


class _Writer:
    """Turns parts into steps, and waits where a step touches a range that is in flight."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.flights: list[_Flight] = []
        self.scratch = 0
        """The most elements of scratch that were in use."""
        self._taken: list[tuple[int, int]] = []
        self._started = 0

    def write(self, part: _Part) -> None:
        start, stop, length = part.start, part.stop, part.stop - part.start
        if part.kind in ("send", "aside"):
            self._settle(start, stop, writes=False)
        elif part.direct or part.kind == "scale":
            self._settle(start, stop, writes=True)
        if part.kind == "send":
            self._start(SendRange(part.peer, start, stop), start, stop, writes=False)
        elif part.kind == "aside":
            part.at = self._take(length)
            self.steps.append(SetAside(start, stop, part.at))
        elif part.kind == "scale":
            self.steps.append(ScaleRange(start, stop, 1.0 if part.weight is None else part.weight))
        elif part.direct:
            self._start(Receive(part.peer, start, stop, False), start, stop, writes=True)
        elif part.kind == "receive":
            part.at = self._take(length)
            part.flight = self._start(Receive(part.peer, part.at, part.at + length, True), 0, 0, writes=True)
        elif part.source is not None and not part.source.direct:
            self._use(part, part.source)

    def _use(self, part: _Part, source: _Part) -> None:
        self._settle(part.start, part.stop, writes=True)
        if source.flight is not None:
            self._wait(source.flight)
        if part.kind == "reduce":
            self.steps.append(Combine(part.start, part.stop, source.at, part.received_first, part.weight))
        else:
            self.steps.append(Put(part.start, part.stop, source.at))
        self._taken.remove((source.at, source.at + part.stop - part.start))

    def _take(self, length: int) -> int:
        """The lowest place in the scratch that is free."""
        at = 0
        for start, stop in self._taken:
            if start - at >= length:
                break
            at = stop
        self._taken = sorted([*self._taken, (at, at + length)])
        self.scratch = max(self.scratch, at + length)
        return at

    def _start(self, step: Step, start: int, stop: int, writes: bool) -> _Flight:
        flight = _Flight(self._started, start, stop, writes)
        self._started += 1
        self.steps.append(step)
        self.flights.append(flight)
        return flight

    def _settle(self, start: int, stop: int, writes: bool) -> None:
        for flight in [flight for flight in self.flights if flight.start < stop and flight.stop > start]:
            if writes or flight.writes:
                self._wait(flight)

    def _wait(self, flight: _Flight) -> None:
        self.flights.remove(flight)
        self.steps.append(WaitFor(flight.number))


# -- running ----------------------------------------------------------------------------------------------------------


def run(
    program: CompiledSchedule,
    tensor: Tensor,
    process_group: Any,
    op: Any = dist.ReduceOp.SUM,
    tag: int = 0,
    scratch: Tensor | None = None,
) -> Tensor:
    """Run one rank's program with `tensor` as its buffer, in place; every rank of the group calls this with its own.

    AVG divides the whole buffer by the number of ranks at the end. `scratch`, of the same dtype, saves allocating
    `program.scratch` elements.
    """
    if tensor.numel() != program.count:
        raise UsageError(f"the program is for {program.count} elements, and this tensor has {tensor.numel()}")
    combine = torch_function(op)
    if combine is None:
        raise UsageError(f"{op} cannot be run over messages: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")
    buffer = tensor.detach().contiguous().view(-1)
    if scratch is None or scratch.numel() < program.scratch:
        scratch = torch.empty(program.scratch, dtype=tensor.dtype, device=tensor.device)
    _run_steps(program.steps, buffer, scratch, process_group, combine, tag)
    if op == dist.ReduceOp.AVG:
        buffer.div_(program.size)
    if not tensor.is_contiguous():
        tensor.detach().copy_(buffer.view(tensor.shape))
    return tensor


def _run_steps(
    steps: Iterable[Step], buffer: Tensor, scratch: Tensor, group: Any, combine: Callable[..., Tensor], tag: int
) -> None:
    works: list[Any] = []
    for step in steps:
        match step:
            case WaitFor(number):
                works[number].wait()
                works[number] = None
            case SendRange(peer, start, stop):
                works.append(group.send([buffer[start:stop]], peer, tag))
            case Receive(peer, start, stop, in_scratch):
                works.append(group.recv([(scratch if in_scratch else buffer)[start:stop]], peer, tag))
            case Combine(start, stop, at, received_first, weight):
                mine, received = buffer[start:stop], scratch[at : at + stop - start]
                if weight is not None:
                    mine.add_(received, alpha=weight)
                    continue
                combine(*((received, mine) if received_first else (mine, received)), out=mine)
            case ScaleRange(start, stop, weight):
                buffer[start:stop].mul_(weight)
            case SetAside(start, stop, at):
                scratch[at : at + stop - start].copy_(buffer[start:stop])
            case Put(start, stop, at):
                buffer[start:stop].copy_(scratch[at : at + stop - start])
