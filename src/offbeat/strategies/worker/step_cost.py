"""What links take, so that the time of a step can be predicted, and why it cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from offbeat.protocols.collectives import Collective
from offbeat.protocols.compression import RowFormat, Shapes, SumMethod
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.schedule import View
from offbeat.runtime.backend import OffbeatGroup, planned_algorithm
from offbeat.runtime.groups.group import DirectGroup, Group
from offbeat.runtime.hosts.link_probe import measured
from offbeat.simulate.predicted_step import Timed
from offbeat.strategies.worker.compression import Compressing

CODED = "what its letters are only its coder knows"


def why_not(group: Group) -> str | None:
    """Why nothing that this group exchanges can be predicted; None if it can."""
    if not isinstance(group, DirectGroup) or not isinstance(group.process_group, OffbeatGroup):
        return "on this device torch's own backend exchanges, by ways of its own"
    return None


def formats(compressions: Sequence[Compressing]) -> list[RowFormat] | None:
    """What the letters are; None if one of the compressors does not say."""
    found = [one.format() for one in compressions]
    return None if None in found else [one for one in found if one is not None]


def as_matrix(nbytes: int) -> Shapes:
    """A model of so many bytes of float32 as one matrix, as square as can be."""
    count = max(1, nbytes // 4)
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    return [(rows, count // rows)]


def planned_sum(nbytes: int, view: View, by: str | None = None) -> Exchanged:
    """A sum of so many bytes of float32, by a named algorithm or by the backend's own."""
    return Exchanged(what="all_reduce", by=by or planned_by(view, nbytes), nbytes=nbytes, itemsize=4)


def planned_by(view: View, nbytes: int) -> str:
    """The algorithm by which the backend will sum a row of so many bytes."""
    return planned_algorithm(Collective.ALL_REDUCE, nbytes, view)


def planned_letters(forms: Sequence[RowFormat], nbytes: int, view: View) -> list[Exchanged]:
    """How what is left of a model of so many bytes is brought together, by what each form says."""
    form, *inner = forms
    shapes = as_matrix(nbytes)
    if form.way(*inner) is SumMethod.REDUCE:
        return [planned_sum(part, view) for part in form.sums(shapes, 4, *inner)]
    lengths = [] if form.fixed else [planned_sum(8 * view.size, view)]
    return [*lengths, _gathered(form.nbytes(shapes, 4, *inner), view)]


def planned_slices(nbytes: int, view: View) -> list[Exchanged]:
    """How everybody comes to have all slices that were updated: in shared memory it is enough that all have done so."""
    if len(set(view.hosts.tolist())) == 1:
        return [planned_sum(4, view)]
    return [_gathered(4 * -(-nbytes // 4 // view.size), view)]


def _gathered(nbytes: int, view: View) -> Exchanged:
    by = planned_algorithm(Collective.ALL_GATHER, nbytes, view)
    return Exchanged(what="all_gather", by=by, nbytes=nbytes)


def trials(group: DirectGroup, most: int, forms: Sequence[RowFormat]) -> tuple[Timed, ...]:
    """What sums take here, and messages, if some are gathered; all workers call this together."""

    def sum_of(size: int) -> Callable[[], object]:
        row = torch.zeros(max(1, size // 4))
        return lambda: group.sum(row, "measuring the links")

    def letters_of(size: int) -> Callable[[], object]:
        row = torch.zeros(size, dtype=torch.uint8)
        return lambda: group.payloads(row, True, "measuring the links")

    found = measured(group, most, sum_of)
    if forms and forms[0].way(*forms[1:]) is SumMethod.GATHER:
        longest = forms[0].nbytes([(most // 4,)], 4, *forms[1:]) if forms[0].fixed else most
        found += measured(group, longest, letters_of)
    return found
