"""What a strategy exchanges, so that its time can be foretold: sums, and letters that are summed or gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from offbeat.protocols.compression import Format, Shapes, Way
from offbeat.protocols.schedule import View
from offbeat.runtime.backend import OffbeatGroup
from offbeat.runtime.group import Group
from offbeat.runtime.links import measured, native
from offbeat.simulate.foretelling import Exchanged, Timed
from offbeat.strategies._compressing import Compressing

CODED = "what its letters are only its coder knows"


def why_not(group: Group) -> str | None:
    """Why nothing that this group exchanges can be foretold; None if it can."""
    if not isinstance(group.process_group, OffbeatGroup):
        return "on this device torch's own backend exchanges, by ways of its own"
    return None


def formats(compressions: Sequence[Compressing]) -> list[Format] | None:
    """What the letters are; None if one of the compressors does not say."""
    found = [one.format() for one in compressions]
    return None if None in found else [one for one in found if one is not None]


def summed(nbytes: int, view: View, by: str | None = None) -> Exchanged:
    """A sum of so many bytes, by a named algorithm or by the backend's own."""
    return Exchanged(what="all_reduce", by=by or native("all_reduce", nbytes, view), nbytes=nbytes)


def gathered(nbytes: int, view: View) -> Exchanged:
    """Letters of so many bytes, from everybody to everybody."""
    return Exchanged(what="all_gather", by=native("all_gather", nbytes, view), nbytes=nbytes)


def letters(forms: Sequence[Format], nbytes: int, view: View) -> list[Exchanged]:
    """How letters of so many bytes are brought together, by what each form says."""
    form, *inner = forms
    if form.way(*inner) is Way.REDUCE:
        return [summed(nbytes // form.exchanges, view)] * form.exchanges
    lengths = [] if form.fixed else [summed(8 * view.size, view)]
    return [*lengths, gathered(nbytes, view)]


def as_matrix(nbytes: int) -> Shapes:
    """A model of so many bytes of float32 as one matrix, as square as can be."""
    count = max(1, nbytes // 4)
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    return [(rows, count // rows)]


def trials(group: Group, most: int, forms: Sequence[Format], by: str | None = None) -> tuple[Timed, ...]:
    """What sums take here, and letters, if some are gathered; all workers call this together."""
    view = group.view

    def sum_of(size: int) -> Callable[[], object]:
        row = torch.zeros(max(1, size // 4))
        return lambda: group.sum(row, "measuring the links")

    def letters_of(size: int) -> Callable[[], object]:
        row = torch.zeros(size, dtype=torch.uint8)
        return lambda: group.letters(row, True, "measuring the links")

    found = measured(group, most, lambda size: summed(size, view, by), sum_of)
    if forms and forms[0].way(*forms[1:]) is Way.GATHER:
        longest = forms[0].nbytes([(most // 4,)], 4, *forms[1:]) if forms[0].fixed else most
        found += measured(group, longest, lambda size: gathered(size, view), letters_of)
    return found
