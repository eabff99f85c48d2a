"""One-sided schedules, compiled for one rank into stages: publish blocks, then reduce and copy those of others.

A schedule is compiled over blocks, not elements: its layout has one element per block, and the size of a block is
decided when it runs. So a group compiles each schedule once for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import UsageError
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, View


@dataclass(frozen=True)
class ProgramStage:
    """One rank's work between two signals."""

    publish: tuple[int, ...]
    """Blocks that others will read from this rank."""
    reduce: tuple[tuple[int, tuple[int, ...]], ...]
    """Blocks to reduce, each with the contributing ranks in order."""
    copy: tuple[tuple[int, int, int], ...]
    """Copies: source, block there, block here."""
    weigh: tuple[tuple[int, tuple[tuple[int, float], ...]], ...] = ()
    """Blocks to replace by weighted sums, each with the contributing ranks in order, this one first, and weights."""


_Flags = NDArray[np.bool_]


@dataclass
class _OpenStage:
    published: bool = False
    publish: set[int] = field(default_factory=set[int])
    contributions: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    copies: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    weighted: dict[int, list[tuple[int, float]]] = field(default_factory=dict[int, list[tuple[int, float]]])

    def closed(self) -> ProgramStage:
        reduce = tuple((block, tuple(sorted(ranks))) for block, ranks in sorted(self.contributions.items()))
        copy = tuple((source, block, place) for place, (source, block) in sorted(self.copies.items()))
        weigh = tuple((block, tuple(terms)) for block, terms in sorted(self.weighted.items()))
        return ProgramStage(tuple(sorted(self.publish)), reduce, copy, weigh)


def compile_one_sided(
    schedule: Schedule, view: View, rank: int, blocks: int, root: int = 0
) -> tuple[ProgramStage, ...]:
    """The stages of `rank`; all ranks have the same number."""
    stages = [_OpenStage()]
    changed = np.zeros((view.size, blocks), dtype=bool)
    for each in schedule(view, Layout(blocks, root=root)):
        if each.op is Op.SEND:
            raise UsageError("a schedule with SEND rounds is not one-sided: it runs over point-to-point")
        if each.op is Op.COPY and bool((each.source == each.target).all()):
            if changed.any():
                stages.append(_OpenStage())
            # Published data stays as it is, whatever is written afterwards.
            changed = np.zeros_like(changed)
            stages[-1].published = True
            continue
        if each.op is Op.FETCH and not stages[-1].published and _reads(each, changed):
            stages.append(_OpenStage())
            changed[:] = False
        _note(each, rank, stages[-1], changed)
    return tuple(stage.closed() for stage in stages)


def _reads(fetch: Round, changed: _Flags) -> bool:
    """Whether a fetch reads a block that was written since the last signal."""
    return any(
        bool(changed[source, start:stop].any())
        for source, start, stop in zip(fetch.source, fetch.start, fetch.stop, strict=True)
    )


def _note(each: Round, rank: int, stage: _OpenStage, changed: _Flags) -> None:
    columns = (each.source, each.target, each.start, each.stop, each.place)
    weights: list[float | None] = [None] * len(each.source) if each.weight is None else each.weight.tolist()
    lists = (column.tolist() for column in columns)
    for source, target, start, stop, place, weight in zip(*lists, weights, strict=True):
        shift = place - start
        if each.op is Op.FETCH:
            if source == rank and target != rank:
                stage.publish.update(range(start, stop))
            continue
        changed[target, place : place + stop - start] = True
        if target == rank:
            for block in range(start, stop):
                at = block + shift
                if weight is not None or at in stage.weighted:
                    _weigh(stage, each.op, at, source, 1.0 if weight is None else weight)
                    continue
                if each.op is not Op.REDUCE:
                    stage.copies[at] = (source, block)
                    continue
                if at in stage.copies:  # A copy replaced this rank's block: it is the first of the sum.
                    stage.contributions[at] = [stage.copies.pop(at)[0]]
                stage.contributions.setdefault(at, [rank]).append(source)


def _weigh(stage: _OpenStage, op: Op, block: int, source: int, weight: float) -> None:
    """Note a term of a weighted sum; a block is scaled first, then weighted blocks of others are added."""
    terms = stage.weighted.setdefault(block, [])
    expected = Op.REDUCE if terms else Op.SCALE
    changed = block in stage.contributions or block in stage.copies
    if op is not expected or changed or any(source == earlier for earlier, _ in terms):
        raise UsageError(
            f"this schedule changes block {block} otherwise than by a SCALE and then REDUCEs from other ranks between "
            f"two signals, so it cannot be run through shared memory in one pass: run it over messages"
        )
    terms.append((source, weight))


def even_blocks(count: int, blocks: int) -> list[tuple[int, int]]:
    """Start and stop of each block of a row of `count` elements that is cut evenly."""
    return list(pairwise(Layout(count).blocks(blocks).tolist()))
