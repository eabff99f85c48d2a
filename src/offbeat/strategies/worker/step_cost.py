"""Exchanges of a step as planned or measured, so that its time can be predicted, or the reason why it cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from offbeat.protocols.collectives import Collective
from offbeat.protocols.compression import RowFormat, Shapes, SumMethod
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.schedule import View
from offbeat.runtime.backend import OffbeatGroup, planned_algorithm
from offbeat.runtime.gradients.slices import LEAST_UNIT, UNITS
from offbeat.runtime.groups.blocks import BY
from offbeat.runtime.groups.group import DirectGroup, Group
from offbeat.runtime.hosts.link_probe import measured
from offbeat.simulate.predicted_step import Step, Timed
from offbeat.strategies.compressors import Compressing


def why_not(group: Group, compressions: Sequence[Compressing] = ()) -> str | None:
    """Why no exchange of this group, or none with these compressors, can be predicted; None if it can."""
    if not isinstance(group, DirectGroup) or not isinstance(group.process_group, OffbeatGroup):
        return "on this device torch's own backend exchanges, in its own way"
    if any(compressor.format() is None for compressor in compressions):
        return "only its coder knows how large its messages are"
    return None


def formats(compressions: Sequence[Compressing]) -> list[RowFormat]:
    """The formats of compressors, as far as they are known."""
    return [form for compressor in compressions if (form := compressor.format()) is not None]


def as_matrix(nbytes: int) -> Shapes:
    """A model of `nbytes` bytes of float32 as one matrix, as square as possible."""
    count = max(1, nbytes // 4)
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    return [(rows, count // rows)]


def planned_sum(nbytes: int, view: View, by: str | None = None) -> Exchanged:
    """A sum of `nbytes` bytes of float32, by a named algorithm or by the backend's choice."""
    return Exchanged(what="all_reduce", by=by or planned_by(view, nbytes), nbytes=nbytes, itemsize=4)


def planned_by(view: View, nbytes: int) -> str:
    """The algorithm by which the backend will sum a row of `nbytes` bytes."""
    return planned_algorithm(Collective.ALL_REDUCE, nbytes, view)


def planned_messages(forms: Sequence[RowFormat], nbytes: int, view: View) -> list[Exchanged]:
    """How a compressed model of `nbytes` bytes is exchanged, as its formats say."""
    form, *inner = forms
    shapes = as_matrix(nbytes)
    if form.way(*inner) is SumMethod.REDUCE:
        return [planned_sum(part, view) for part in form.sums(shapes, 4, *inner)]
    lengths = [] if form.fixed else [planned_sum(8 * view.size, view)]
    return [*lengths, _gathered(form.nbytes(shapes, 4, *inner), view)]


def planned_shards(nbytes: int, view: View, gathered: bool) -> Step:
    """A step of workers that share no memory and keep slices of gradients, and, if `gathered`, of parameters, too.

    Parameters of an unknown model count as units of equal size.
    """
    units = max(1, min(UNITS, nbytes // LEAST_UNIT))
    block = 4 * -(-nbytes // (4 * units * view.size))
    gathers = [Exchanged(what="all_gather", by=BY, nbytes=block, itemsize=4)] * units
    sums = [Exchanged(what="reduce_scatter", by=BY, nbytes=block * view.size, itemsize=4)] * units
    exchanges = (*gathers, *gathers[:-1], *sums) if gathered else (*sums, *gathers)
    hosts = tuple(view.hosts.tolist())
    return Step(hosts=hosts, exchanges=exchanges, beside=True, behind=0 if gathered else units)


def _gathered(nbytes: int, view: View) -> Exchanged:
    by = planned_algorithm(Collective.ALL_GATHER, nbytes, view)
    return Exchanged(what="all_gather", by=by, nbytes=nbytes)


def trials(group: DirectGroup, most: int, forms: Sequence[RowFormat]) -> tuple[Timed, ...]:
    """Measured times of sums, and of gathered messages if there are any. Collective."""
    what = "measuring the links"
    timed = measured(group, most, lambda size: partial(group.sum, torch.zeros(max(1, size // 4)), what))
    if forms and forms[0].way(*forms[1:]) is SumMethod.GATHER:
        longest = forms[0].nbytes([(most // 4,)], 4, *forms[1:]) if forms[0].fixed else most
        empty = partial(torch.zeros, dtype=torch.uint8)
        timed += measured(group, longest, lambda size: partial(group.payloads, empty(size), True, what))
    return timed
