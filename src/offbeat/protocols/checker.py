"""Proof, without starting a process, that a schedule does what its collective promises, and what it costs.

Buffers are followed as counts of contributions per rank, piece and contributor; pieces are the ranges between all
boundaries that occur. Each access to a piece is compared with those before it: of two that are not ordered by `after`
and by messages, neither may write. So what is proved for the order of rounds holds for every order that may happen.

A round waits only for rounds with lower numbers (that is checked), and inside a round nobody waits for somebody to use
what was brought: whoever takes rounds in the order of their numbers never waits in a circle. That a sender may go on
only when the receiver has begun is not relied upon for order, so buffering transports are covered too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ScheduleError
from offbeat.protocols.collectives import Algorithm, Collective
from offbeat.protocols.schedule import FloatArray, IntArray, Layout, Op, Round, Schedule, View

Bits = NDArray[np.uint64]
Flags = NDArray[np.bool_]
Counts = NDArray[Any]  # Whole numbers, or, where there are weights, numbers.


@dataclass(frozen=True)
class Cost:
    """What a schedule moves; bytes from a rank to itself are not counted."""

    rounds: int
    hops: int  # Rounds that bring something, along the longest chain of `after`.
    port_bytes: int  # Bytes through the busiest port: the largest of what any rank sends or receives.
    bytes_sent: IntArray  # Bytes that leave each rank.
    bytes_received: IntArray  # Bytes that reach each rank.
    reduced_bytes: IntArray  # Bytes that each rank combines with its own.


@dataclass(frozen=True)
class CheckReport(Cost):
    """Result of checking a correct schedule."""

    lingering: bool  # Whether a rank can be done while its live buffer is still read: it must wait before it writes.


def cost(rounds: Iterable[Round], view: View, layout: Layout) -> Cost:
    """What rounds move, without proof; fast for thousands of ranks."""
    sent, received, reduced = (np.zeros(view.size, dtype=np.int64) for _ in range(3))
    depth: list[int] = []
    for one in rounds:
        brings = one.op in (Op.SEND, Op.FETCH) and len(one.source) > 0
        depth.append(max((depth[number] for number in one.after), default=0) + brings)
        if brings:
            moved = one.lengths * (one.source != one.target)
            sent += _totals(one.source, moved, view.size)
            received += _totals(one.target, moved, view.size)
        elif one.op is Op.REDUCE:
            reduced += _totals(one.target, one.lengths, view.size)
    sent, received, reduced = (total * layout.itemsize for total in (sent, received, reduced))
    port = int(max(sent.max(), received.max()))
    return Cost(len(depth), max(depth, default=0), port, sent, received, reduced)


def _totals(ranks: IntArray, amounts: IntArray, size: int) -> IntArray:
    return np.bincount(ranks, weights=amounts, minlength=size).astype(np.int64)


def check(algorithm: Algorithm | tuple[Schedule, Collective], view: View, layout: Layout) -> CheckReport:
    """Prove that a schedule does what its collective promises; raise a ScheduleError that says where it does not."""
    if isinstance(algorithm, Algorithm):
        schedule, collective = algorithm.schedule, algorithm.collective
    else:
        schedule, collective = algorithm
    return _walked(schedule, collective, view, layout, lambda walk: walk.conclude(collective))


def check_mixing(schedule: Schedule, matrix: FloatArray, view: View, layout: Layout) -> CheckReport:
    """Prove that a schedule leaves rank i with the sum over j of `matrix[i, j]` times what rank j had."""
    return _walked(schedule, Collective.ALL_REDUCE, view, layout, lambda walk: walk.conclude_mixed(matrix))


def _walked(
    schedule: Schedule, collective: Collective, view: View, layout: Layout, conclude: Callable[[_Walk], None]
) -> CheckReport:
    rounds = list(schedule(view, layout))
    for number, one in enumerate(rounds):
        _check_form(number, one, view, layout)
    walk = _Walk(rounds, collective, view, layout)
    for number, one in enumerate(rounds):
        walk.take(number, one)
    conclude(walk)
    return CheckReport(**vars(cost(rounds, view, layout)), lingering=walk.lingering)


def _check_form(number: int, one: Round, view: View, layout: Layout) -> None:
    where = f"round {number} ({one.op})"
    for earlier in one.after:
        if not 0 <= earlier < number:
            raise ScheduleError(f"{where} comes after round {earlier}, which is not earlier: it would wait forever")
    ranks = np.concatenate([one.source, one.target])
    if len(ranks) and (ranks.min() < 0 or ranks.max() >= view.size):
        raise ScheduleError(f"{where} names rank {ranks.max()} or {ranks.min()}, but there are {view.size} ranks")
    wrong = (one.start < 0) | (one.stop > layout.count) | (one.start >= one.stop)
    wrong |= (one.place < 0) | (one.place + one.lengths > layout.count)
    for entry in np.flatnonzero(wrong):
        raise ScheduleError(
            f"{where} moves [{one.start[entry]}, {one.stop[entry]}) to {one.place[entry]} at rank {one.target[entry]}, "
            f"which is not a range inside the buffer of {layout.count}"
        )
    if one.weight is not None and (one.op not in (Op.REDUCE, Op.SCALE) or len(one.weight) != len(one.source)):
        raise ScheduleError(f"{where} has {len(one.weight)} weights: a REDUCE or SCALE may have one for each entry")
    if one.op is Op.SCALE and (one.weight is None or bool((one.source != one.target).any())):
        raise ScheduleError(f"{where} multiplies what a rank has by a weight, so it needs weights and no other rank")
    if one.op is Op.FETCH:
        hosts = view.hosts
        for entry in np.flatnonzero(hosts[one.source] != hosts[one.target]):
            raise ScheduleError(
                f"{where} lets rank {one.target[entry]} read the memory of rank {one.source[entry]} on another host"
            )


@dataclass(frozen=True)
class _Pieces:
    """The buffer cut at every boundary that occurs."""

    cuts: IntArray

    @classmethod
    def of(cls, rounds: list[Round], view: View, layout: Layout) -> _Pieces:
        marks = [np.array([0, layout.count]), layout.blocks(view.size)]
        marks += [ends for one in rounds for ends in (one.start, one.stop, one.place, one.place + one.lengths)]
        cuts = np.unique(np.concatenate(marks))
        moved = [one for one in rounds if (one.place != one.start).any()]
        while moved:
            more = np.unique(np.concatenate([cuts, *(_carried(one, cuts) for one in moved)]))
            if len(more) == len(cuts):
                break
            cuts = more
        return cls(cuts)

    def expand(self, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
        """For each piece of each range: the number of the range, and of the piece."""
        first, last = np.searchsorted(self.cuts, start), np.searchsorted(self.cuts, stop)
        counts = last - first
        entry = np.repeat(np.arange(len(start)), counts)
        offset = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
        return entry, first[entry] + offset

    def named(self, piece: int) -> str:
        return f"[{self.cuts[piece]}, {self.cuts[piece + 1]})"


def _carried(one: Round, cuts: IntArray) -> IntArray:
    # A cut inside a range must be a cut where the range ends up, and the other way round.
    shift = (one.place - one.start)[:, None]
    inside = (cuts > one.start[:, None]) & (cuts < one.stop[:, None])
    back = (cuts > one.place[:, None]) & (cuts < (one.place + one.lengths)[:, None])
    return np.concatenate([(cuts + shift)[inside], (cuts - shift)[back]])


class _Memory:
    """One buffer per rank: what is in each piece, and which parts have read and written it."""

    def __init__(self, size: int, pieces: int, words: int, kind: type[np.int32 | np.float64]) -> None:
        self.counts: Counts = np.zeros((size, pieces, size + 1), dtype=kind)
        self.origin = np.zeros((size, pieces), dtype=np.int64)
        self.origin[:] = np.arange(pieces)
        self.read: Bits = np.zeros((size, pieces, words), dtype=np.uint64)
        self.written: Bits = np.zeros((size, pieces, words), dtype=np.uint64)


class _Walk:
    """The rounds taken one after the other, with what each rank may know at each of them."""

    def __init__(self, rounds: list[Round], collective: Collective, view: View, layout: Layout) -> None:
        self.size, self.layout = view.size, layout
        self.pieces = _Pieces.of(rounds, view, layout)
        self.words = -(-len(rounds) * view.size // 64) + 1
        count = len(self.pieces.cuts) - 1
        kind = np.int32 if all(one.weight is None for one in rounds) else np.float64
        self.live, self.published = (_Memory(view.size, count, self.words, kind) for _ in range(2))
        self.is_published = np.zeros((view.size, count), dtype=np.bool_)
        self.block = np.searchsorted(layout.blocks(view.size), self.pieces.cuts[:-1], side="right") - 1
        self._begin(collective)
        self.done: list[Bits] = []
        self.brought: dict[int, tuple[Counts, IntArray]] = {}
        self.inbox: defaultdict[tuple[int, ...], deque[tuple[int, int, int]]] = defaultdict(deque)
        self.live_reads: list[tuple[IntArray, IntArray]] = []
        self.known: Bits = np.zeros((view.size, self.words), dtype=np.uint64)

    def _begin(self, collective: Collective) -> None:
        # What a rank need not have brought counts as a contribution of nobody, so that its use shows in the end.
        ranks, size, block = np.arange(self.size)[:, None], self.size, self.block[None, :]
        if collective in (Collective.BROADCAST, Collective.SCATTER):
            brings = np.broadcast_to(ranks == self.layout.root, (size, len(self.block)))
        elif collective in (Collective.ALL_GATHER, Collective.GATHER):
            brings = block == ranks
        else:
            brings = np.ones((size, len(self.block)), dtype=np.bool_)
        rank, piece = np.nonzero(brings)
        self.live.counts[rank, piece, rank] = 1
        self.live.counts[..., size] = ~brings

    def bit(self, number: int, ranks: IntArray) -> tuple[IntArray, Bits]:
        """Word and bit of a rank's part of a round."""
        index = number * self.size + ranks
        return index // 64, np.uint64(1) << (index % 64).astype(np.uint64)

    def take(self, number: int, one: Round) -> None:
        """One round: what its parts come after, and what they do."""
        self.number = number
        begun = [self.done[earlier] for earlier in one.after]
        self.known = np.bitwise_or.reduce(begun) if begun else np.zeros((self.size, self.words), dtype=np.uint64)
        if one.op in (Op.SEND, Op.FETCH):
            self._bring(one)
        elif one.op in (Op.REDUCE, Op.COPY):
            own = (one.source == one.target) & (one.op is Op.COPY)
            self._publish(one, np.flatnonzero(own))
            self._use(one, np.flatnonzero(~own))
        elif one.op is Op.SCALE and one.weight is not None:
            self._scale(one, one.weight)
        done = self.known.copy()
        if one.op in (Op.SEND, Op.FETCH):
            np.bitwise_or.at(done, one.target, self.known[one.source])
        parts = one.target if one.op is Op.FETCH else np.concatenate([one.source, one.target])
        word, bit = self.bit(number, parts)
        np.bitwise_or.at(done, (parts, word), bit)
        self.done.append(done)

    def _note(
        self, memory: _Memory, rank: IntArray, piece: IntArray, actor: IntArray, known: Bits, write: bool
    ) -> None:
        """An access to pieces of ranks' buffers by parts of this round; refuse it if it races with an earlier one."""
        before = memory.written[rank, piece]
        if write:
            before = before | memory.read[rank, piece]
        racing = before & ~known
        if racing.any():
            at = int(np.flatnonzero(racing.any(axis=1))[0])
            word = int(np.flatnonzero(racing[at])[0])
            index = word * 64 + (int(racing[at, word]).bit_length() - 1)
            raise ScheduleError(
                f"rank {actor[at]} in round {self.number} {'writes' if write else 'reads'} "
                f"{self.pieces.named(int(piece[at]))} of rank {rank[at]} in a race with rank {index % self.size} in "
                f"round {index // self.size}: neither comes after the other"
            )
        word, bit = self.bit(self.number, actor)
        np.bitwise_or.at(memory.written if write else memory.read, (rank, piece, word), bit)

    def _bring(self, one: Round) -> None:
        entry, piece = self.pieces.expand(one.start, one.stop)
        source, target = one.source[entry], one.target[entry]
        fetches = one.op is Op.FETCH
        copied = self.is_published[source, piece] & fetches
        known = self.known[source] | self.known[target] if fetches else self.known[source]
        actor = target if fetches else source
        counts = np.empty((len(entry), self.size + 1), dtype=self.live.counts.dtype)
        origin = np.empty(len(entry), dtype=np.int64)
        for memory, chosen in ((self.live, np.flatnonzero(~copied)), (self.published, np.flatnonzero(copied))):
            if len(chosen):
                rank, at = source[chosen], piece[chosen]
                self._note(memory, rank, at, actor[chosen], known[chosen], write=False)
                counts[chosen], origin[chosen] = memory.counts[rank, at], memory.origin[rank, at]
        if fetches:
            self.live_reads.append((source[~copied], self.number * self.size + target[~copied]))
        self.brought[self.number] = counts, origin
        ends = np.searchsorted(entry, np.arange(len(one.source) + 1))
        for index, key in enumerate(_keys(one, np.arange(len(one.source)))):
            self.inbox[key].append((self.number, int(ends[index]), int(ends[index + 1])))

    def _publish(self, one: Round, chosen: IntArray) -> None:
        if not len(chosen):
            return
        entry, piece = self.pieces.expand(one.start[chosen], one.stop[chosen])
        rank = one.target[chosen][entry]
        self._note(self.live, rank, piece, rank, self.known[rank], write=False)
        self._note(self.published, rank, piece, rank, self.known[rank], write=True)
        self.published.counts[rank, piece] = self.live.counts[rank, piece]
        self.published.origin[rank, piece] = self.live.origin[rank, piece]
        self.is_published[rank, piece] = True

    def _use(self, one: Round, chosen: IntArray) -> None:
        if not len(chosen):
            return
        counts, origin = self._taken(one, chosen)
        place, lengths, target = one.place[chosen], one.lengths[chosen], one.target[chosen]
        entry, piece = self.pieces.expand(place, place + lengths)
        rank = target[entry]
        self._note(self.live, rank, piece, rank, self.known[rank], write=True)
        if one.op is Op.REDUCE:
            for at in np.flatnonzero(self.live.origin[rank, piece] != origin):
                raise ScheduleError(
                    f"rank {rank[at]} in round {self.number} adds what belongs to "
                    f"{self.pieces.named(int(origin[at]))} to {self.pieces.named(int(piece[at]))}"
                )
            weighed = counts if one.weight is None else counts * one.weight[chosen][entry][:, None]
            np.add.at(self.live.counts, (rank, piece), weighed)
            return
        for at in np.flatnonzero(np.bincount(rank * len(self.block) + piece) > 1):
            raise ScheduleError(
                f"rank {at // len(self.block)} in round {self.number} gets "
                f"{self.pieces.named(int(at) % len(self.block))} "
                f"twice: which copy stays is chance"
            )
        self.live.counts[rank, piece] = counts
        self.live.origin[rank, piece] = origin

    def _scale(self, one: Round, weight: FloatArray) -> None:
        entry, piece = self.pieces.expand(one.start, one.stop)
        rank = one.target[entry]
        self._note(self.live, rank, piece, rank, self.known[rank], write=True)
        np.multiply.at(self.live.counts, (rank, piece), weight[entry][:, None])

    def _taken(self, one: Round, chosen: IntArray) -> tuple[Counts, IntArray]:
        """The messages that entries use up, as one array."""
        taken: list[tuple[int, int, int]] = []
        for key in _keys(one, chosen):
            if not self.inbox[key]:
                raise ScheduleError(
                    f"rank {key[1]} in round {self.number} uses [{key[2]}, {key[3]}) from rank {key[0]} for place "
                    f"{key[4]}, which nobody has brought"
                )
            taken.append(self.inbox[key].popleft())
        numbers, target = np.array([number for number, _, _ in taken]), one.target[chosen]
        word, bit = self.bit(0, numbers * self.size + target)
        for at in np.flatnonzero((self.known[target, word] & bit) == 0):
            raise ScheduleError(
                f"rank {target[at]} in round {self.number} uses [{one.start[chosen[at]]}, {one.stop[chosen[at]]}) from "
                f"rank {one.source[chosen[at]]}, but does not come after round {numbers[at]}, which brings it"
            )
        values = [self.brought[number] for number, _, _ in taken]
        counts = np.concatenate([value[0][low:high] for value, (_, low, high) in zip(values, taken, strict=True)])
        origin = np.concatenate([value[1][low:high] for value, (_, low, high) in zip(values, taken, strict=True)])
        return counts, origin

    @property
    def lingering(self) -> bool:
        """Whether a live buffer may be read after its owner's last part."""
        final = np.bitwise_or.reduce(self.done) if self.done else self.known
        for source, index in self.live_reads:
            word, bit = self.bit(0, index)
            if ((final[source, word] & bit) == 0).any():
                return True
        return False

    def conclude_mixed(self, matrix: FloatArray) -> None:
        """Compare the end with a mixing matrix."""
        self._all_used()
        expected = matrix[:, None, :]
        wrong = np.abs(self.live.counts[..., : self.size] - expected) > 1e-12
        for rank, piece, contributor in np.argwhere(wrong)[:1]:
            raise ScheduleError(
                f"rank {rank} ends with {self.pieces.named(piece)} holding "
                f"{self.live.counts[rank, piece, contributor]} times the contribution of rank {contributor} "
                f"instead of {matrix[rank, contributor]}"
            )

    def _all_used(self) -> None:
        for key, left in self.inbox.items():
            if left:
                raise ScheduleError(
                    f"[{key[2]}, {key[3]}) from rank {key[0]} reaches rank {key[1]} in round {left[0][0]} and is never "
                    f"used"
                )

    def conclude(self, collective: Collective) -> None:
        """Compare the end with the promise."""
        self._all_used()
        expected, origin, matters = self._promise(collective)
        counts = np.minimum(self.live.counts, 1) if collective is Collective.BARRIER else self.live.counts
        wrong = matters[..., None] & (counts != expected)
        for rank, piece, contributor in np.argwhere(wrong)[:1]:
            whose = f"rank {contributor}" if contributor < self.size else "nobody (it was never filled)"
            raise ScheduleError(
                f"rank {rank} ends with {self.pieces.named(piece)} holding the contribution of {whose} "
                f"{counts[rank, piece, contributor]} times instead of {expected[rank, piece, contributor]}"
            )
        for rank, piece in np.argwhere(matters & (self.live.origin != origin))[:1]:
            found = self.pieces.named(int(self.live.origin[rank, piece]))
            raise ScheduleError(
                f"rank {rank} ends with what belongs to {found} in {self.pieces.named(piece)}, where that of "
                f"{self.pieces.named(int(origin[rank, piece]))} should be"
            )

    def _promise(self, collective: Collective) -> tuple[NDArray[np.int32], IntArray, Flags]:
        """For each rank and piece: how often each contribution is in it, where that lay, and whether it matters."""
        size, count = self.size, len(self.block)
        ranks, root = np.arange(size)[:, None], self.layout.root
        expected = np.zeros((size, count, size + 1), dtype=np.int32)
        origin = np.tile(np.arange(count), (size, 1))
        matters = np.ones((size, count), dtype=np.bool_)
        if collective in (Collective.REDUCE, Collective.GATHER):
            matters &= ranks == root
        if collective in (Collective.REDUCE_SCATTER, Collective.SCATTER):
            matters &= self.block == ranks
        if collective is Collective.BARRIER:
            matters &= np.arange(count) == 0
        if collective in (Collective.BROADCAST, Collective.SCATTER):
            expected[:, :, root] = 1
        elif collective in (Collective.ALL_GATHER, Collective.GATHER, Collective.ALL_TO_ALL):
            expected[:, np.arange(count), self.block] = 1
        else:
            expected[:, :, :size] = 1
        if collective is Collective.ALL_TO_ALL and count:
            width = self.layout.count // size
            begin = self.pieces.cuts[:-1] + (ranks - self.block) * width
            origin = np.searchsorted(self.pieces.cuts, begin)
        return expected, origin, matters


def _keys(one: Round, chosen: IntArray) -> Iterable[tuple[int, ...]]:
    columns = (one.source, one.target, one.start, one.stop, one.place)
    return zip(*(column[chosen].tolist() for column in columns), strict=True)
