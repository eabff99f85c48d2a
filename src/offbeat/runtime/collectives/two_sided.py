"""Two-sided schedules on real processes, over point-to-point messages of any torch process group.

A schedule is compiled once, for one rank, into a program: a list of steps on the tensor and on a scratch buffer.

- Rounds are taken in one order by all ranks, so that messages between two of them match by order alone: what brings
  something goes as early as its `after` allows, so that independent rounds are under way together.
- What is to be copied is received straight into its place, if nothing else touches that place until then. What is to
  be reduced is received into scratch and combined from there, whole: cutting it into segments measured no faster.
- Nothing is waited for before a step touches the same elements; the checker's proof says that this is enough.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import UsageError
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, View
from offbeat.runtime.collectives.one_sided.kernels import torch_function


@dataclass(frozen=True, slots=True)
class SendRange:
    """Start to send a range of the buffer."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Start to receive a range, of the buffer or of the scratch."""

    peer: int
    start: int
    stop: int
    scratch: bool


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait for what was started: the number counts sends and receives from 0."""

    number: int


@dataclass(frozen=True, slots=True)
class SetAside:
    """Copy a range of the buffer into the scratch."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Put:
    """Copy from the scratch into a range of the buffer."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Combine:
    """Reduce from the scratch into a range of the buffer."""

    start: int
    stop: int
    at: int
    received_first: bool
    """Whether what was received stands on the left."""
    weight: float | None = None
    """By what the received is multiplied before it is added; None: any operation, on what was received."""


@dataclass(frozen=True, slots=True)
class ScaleRange:
    """Multiply a range of the buffer."""

    start: int
    stop: int
    weight: float


Step: TypeAlias = SendRange | Receive | WaitFor | SetAside | Put | Combine | ScaleRange


@dataclass(frozen=True)
class Program:
    """What one rank does in a schedule."""

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


Compiler = Callable[[Schedule, View, Layout, int], Program]


def programs(limit: int = 256) -> Compiler:
    """A `compile_schedule` that remembers the last `limit` programs; whoever runs schedules owns one."""
    return lru_cache(maxsize=limit)(compile_schedule)


def compile_schedule(schedule: Schedule, view: View, layout: Layout, rank: int) -> Program:
    """What `rank` does in a two-sided schedule."""
    rounds = list(schedule(view, layout))
    parts = [part for position, one in enumerate(_ordered(rounds)) for part in _parts(one, position, rank)]
    _match(parts)
    writer = _Writer()
    for part in parts:
        writer.write(part)
    steps = (*writer.steps, *(WaitFor(flight.number) for flight in writer.flights))
    return Program(rank, view.size, layout.count, writer.scratch.highest, steps)


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
    brought: _Part | None = None
    """For a copy or reduce: what it uses."""
    flight: _Flight | None = None
    """For a receive into the scratch: that it is under way."""


def _parts(one: Round, position: int, rank: int) -> Iterable[_Part]:
    """The rank's entries of a round; what it sends stands before what it receives."""
    if one.op is Op.FETCH or (one.op is Op.COPY and bool((one.source == one.target).any())):
        raise UsageError(
            "this schedule reads other ranks' memory (FETCH, or a COPY to itself), which messages cannot do: take a "
            "two-sided algorithm, or run it over shared memory"
        )
    if one.op is Op.COMPUTE:
        return
    mine = np.flatnonzero((one.source == rank) | (one.target == rank))
    columns = (one.source, one.target, one.start, one.stop, one.place)
    keys = list(zip(*(column[mine].tolist() for column in columns), strict=True))
    weights = [None] * len(keys) if one.weight is None else one.weight[mine].tolist()
    if one.op is Op.SEND:
        for key in keys:
            source, target, start, stop, _ = key
            if source == target:
                yield _Part("aside", source, start, stop, key, position)
            elif source == rank:
                yield _Part("send", target, start, stop, key, position)
    mirrored = {(target, source, *rest) for source, target, *rest in keys} if one.op is Op.REDUCE else set()
    for key, weight in zip(keys, weights, strict=True):
        source, target, start, stop, place = key
        if one.op is Op.SCALE:
            yield _Part("scale", source, start, stop, key, position, weight=weight)
        elif target == rank and one.op is not Op.SEND:
            first = source < target and key in mirrored and weight is None
            yield _Part(one.op.value, source, place, place + stop - start, key, position, first, weight)
        elif target == rank != source:
            yield _Part("receive", source, place, place + stop - start, key, position)


def _ordered(rounds: Sequence[Round]) -> Iterable[Round]:
    """Rounds in an order that keeps `after`, those that bring something as early as can be; the same on all ranks."""
    waiting = [len(set(one.after)) for one in rounds]
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for number, one in enumerate(rounds):
        for earlier in set(one.after):
            followers[earlier].append(number)
    ready = [(one.op is not Op.SEND, number) for number, one in enumerate(rounds) if not one.after]
    heapq.heapify(ready)
    while ready:
        _, number = heapq.heappop(ready)
        yield rounds[number]
        for later in followers[number]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, (rounds[later].op is not Op.SEND, later))


def _match(parts: list[_Part]) -> None:
    """Find what each copy and reduce uses, and what can be received straight into its place."""
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
            part.brought = inbox[part.key].popleft()
            between = (position >= part.brought.position) & (position < part.position)
            meddling = between & (start < part.stop) & (stop > part.start)
            part.brought.direct = part.kind == "copy" and part.brought.kind == "receive" and not meddling.any()


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Flight:
    """A send or receive under way that touches a range of the buffer (an empty one if it goes into scratch)."""

    number: int
    start: int
    stop: int
    writes: bool


class _Scratch:
    """Which parts of the scratch are in use."""

    def __init__(self) -> None:
        self.used: list[tuple[int, int]] = []
        self.highest = 0

    def take(self, length: int) -> int:
        """The lowest place that is free."""
        at = 0
        for start, stop in self.used:
            if start - at >= length:
                break
            at = stop
        self.used = sorted([*self.used, (at, at + length)])
        self.highest = max(self.highest, at + length)
        return at

    def free(self, at: int, length: int) -> None:
        """Give it back."""
        self.used.remove((at, at + length))


class _Writer:
    """Turns parts into steps, and waits where a step touches what is under way."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.flights: list[_Flight] = []
        self.scratch = _Scratch()
        self.started = 0

    def write(self, part: _Part) -> None:
        """The steps of one part."""
        if part.kind == "send":
            self._settle(part.start, part.stop, writes=False)
            self._start(SendRange(part.peer, part.start, part.stop), part.start, part.stop, writes=False)
        elif part.kind == "aside":
            self._settle(part.start, part.stop, writes=False)
            part.at = self.scratch.take(part.stop - part.start)
            self.steps.append(SetAside(part.start, part.stop, part.at))
        elif part.kind == "receive":
            self._receive(part)
        elif part.kind == "scale":
            self._settle(part.start, part.stop, writes=True)
            self.steps.append(ScaleRange(part.start, part.stop, 1.0 if part.weight is None else part.weight))
        elif part.brought is not None and not part.brought.direct:
            self._use(part, part.brought)

    def _receive(self, part: _Part) -> None:
        if part.direct:
            self._settle(part.start, part.stop, writes=True)
            self._start(Receive(part.peer, part.start, part.stop, False), part.start, part.stop, writes=True)
        else:
            length = part.stop - part.start
            part.at = self.scratch.take(length)
            part.flight = self._start(Receive(part.peer, part.at, part.at + length, True), 0, 0, writes=True)

    def _use(self, part: _Part, brought: _Part) -> None:
        self._settle(part.start, part.stop, writes=True)
        if brought.flight is not None:
            self._wait(brought.flight)
        if part.kind == "reduce":
            self.steps.append(Combine(part.start, part.stop, brought.at, part.received_first, part.weight))
        else:
            self.steps.append(Put(part.start, part.stop, brought.at))
        self.scratch.free(brought.at, part.stop - part.start)

    def _start(self, step: Step, start: int, stop: int, writes: bool) -> _Flight:
        flight = _Flight(self.started, start, stop, writes)
        self.started += 1
        self.steps.append(step)
        self.flights.append(flight)
        return flight

    def _settle(self, start: int, stop: int, writes: bool) -> None:
        for flight in [one for one in self.flights if one.start < stop and one.stop > start]:
            if writes or flight.writes:
                self._wait(flight)

    def _wait(self, flight: _Flight) -> None:
        self.flights.remove(flight)
        self.steps.append(WaitFor(flight.number))


# -- running ----------------------------------------------------------------------------------------------------------


def run(
    program: Program,
    tensor: Tensor,
    process_group: Any,
    op: Any = dist.ReduceOp.SUM,
    tag: int = 0,
    scratch: Tensor | None = None,
) -> Tensor:
    """Do one rank's part with `tensor` as its buffer, in place; every rank of the group calls this with its program.

    AVG divides the whole buffer by the number of ranks in the end. `scratch`, of the same kind of number, spares the
    allocation of `program.scratch` elements.
    """
    if tensor.numel() != program.count:
        raise UsageError(f"the program is for {program.count} elements, and this tensor has {tensor.numel()}")
    combine = torch_function(op)
    if combine is None:
        raise UsageError(f"{op} cannot be run over messages: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")
    buffer = tensor.detach().contiguous().view(-1)
    if scratch is None or scratch.numel() < program.scratch:
        scratch = torch.empty(program.scratch, dtype=tensor.dtype, device=tensor.device)
    _go(program.steps, buffer, scratch, process_group, combine, tag)
    if op == dist.ReduceOp.AVG:
        buffer.div_(program.size)
    if not tensor.is_contiguous():
        tensor.detach().copy_(buffer.view(tensor.shape))
    return tensor


def _go(
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
                mine, came = buffer[start:stop], scratch[at : at + stop - start]
                if weight is not None:
                    mine.add_(came, alpha=weight)
                    continue
                combine(*((came, mine) if received_first else (mine, came)), out=mine)
            case ScaleRange(start, stop, weight):
                buffer[start:stop].mul_(weight)
            case SetAside(start, stop, at):
                scratch[at : at + stop - start].copy_(buffer[start:stop])
            case Put(start, stop, at):
                buffer[start:stop].copy_(scratch[at : at + stop - start])
