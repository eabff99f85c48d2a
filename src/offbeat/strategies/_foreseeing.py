"""What links take, so that the time of a step can be predicted, and why it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offbeat.protocols.compression import Format, Way
from offbeat.runtime.backend import OffbeatGroup
from offbeat.runtime.group import DirectGroup, Group
from offbeat.runtime.links import measured
from offbeat.simulate.foretelling import Timed
from offbeat.strategies._compressing import Compressing

CODED = "what its letters are only its coder knows"


def why_not(group: Group) -> str | None:
    """Why nothing that this group exchanges can be foretold; None if it can."""
    if not isinstance(group, DirectGroup) or not isinstance(group.process_group, OffbeatGroup):
        return "on this device torch's own backend exchanges, by ways of its own"
    return None


def formats(compressions: Sequence[Compressing]) -> list[Format] | None:
    """What the letters are; None if one of the compressors does not say."""
    found = [one.format() for one in compressions]
    return None if None in found else [one for one in found if one is not None]


def trials(group: DirectGroup, most: int, forms: Sequence[Format]) -> tuple[Timed, ...]:
    """What sums take here, and messages, if some are gathered; all workers call this together."""

    def sum_of(size: int) -> Callable[[], object]:
        row = torch.zeros(max(1, size // 4))
        return lambda: group.sum(row, "measuring the links")

    def letters_of(size: int) -> Callable[[], object]:
        row = torch.zeros(size, dtype=torch.uint8)
        return lambda: group.letters(row, True, "measuring the links")

    found = measured(group, most, sum_of)
    if forms and forms[0].way(*forms[1:]) is Way.GATHER:
        longest = forms[0].nbytes([(most // 4,)], 4, *forms[1:]) if forms[0].fixed else most
        found += measured(group, longest, letters_of)
    return found
