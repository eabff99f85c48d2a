"""Snapshots of gossip without a beat: where each worker was cut, which moves were under way, and whether that balances.

A move is made by two: who grants it makes it at once, who has asked makes the opposite when the grant comes. If the
grant is from before the granter's cut and comes after the asker's, it was under way, and is kept: one who goes on from
the snapshot makes the other half, and the mean of all models is that of the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from offbeat.protocols.machine import Effects, Name, Payload


class GossipCut(Struct, frozen=True, kw_only=True):
    """Where a worker was cut by a snapshot."""

    worker: int
    clock: int
    """Steps it had made."""
    granted: tuple[tuple[int, int], ...]
    """Moves that it had granted to each neighbour, and made itself."""
    moved: tuple[tuple[int, int], ...]
    """Moves that each neighbour had granted, and it had made."""
    under_way: tuple[int, ...] = ()
    """Whose grants from before their cut came after this one's."""
    rests: int = 0
    """How often all had come to rest together."""


def gossip_faults(cuts: Sequence[GossipCut]) -> list[str]:
    """Why these cuts are no state in which the run can have been; empty: they are one, and the mean is kept."""
    found: list[str] = []
    rests = {cut.rests for cut in cuts}
    if len(rests) > 1:
        found.append(f"workers have rested together different numbers of times: {sorted(rests)}")
    moved = {(cut.worker, other): count for cut in cuts for other, count in cut.moved}
    for cut in cuts:
        for asker, granted in cut.granted:
            made = moved.pop((asker, cut.worker), 0)
            late = sum(one.under_way.count(cut.worker) for one in cuts if one.worker == asker)
            if made + late != granted:
                found.append(
                    f"worker {cut.worker} had granted worker {asker} {granted} moves, of which {made} were made and "
                    f"{late} under way"
                )
    found += [f"worker {a} made {n} moves that worker {b} had not granted" for (a, b), n in moved.items() if n]
    return found


class Record(Struct, frozen=True):
    """Work: keep a copy of the row, as it is after all work begun before."""

    colour: int
    """0: it is too late for that; there is nothing to keep."""


class Keep(Struct, frozen=True):
    """Work: keep a move that was under way."""

    colour: int
    move: Payload


class Recorded(Struct, frozen=True):
    """Work: nothing more was under way to this worker; so it was cut."""

    colour: int
    cut: GossipCut


class PairColour:
    """Which snapshots a worker has been cut by, and which questions were open at the last."""

    def __init__(self, name: Name) -> None:
        self.own = 0
        self.heard = 0
        self._name = name
        self._cut: GossipCut | None = None
        self._awaited: dict[Name, int] = {}
        self._under_way: list[int] = []

    def turn(
        self,
        colour: int,
        clock: int,
        rests: int,
        granted: Mapping[Name, int],
        moved: Mapping[Name, int],
        questions: Mapping[Name, int],
        effects: Effects,
    ) -> None:
        """Be cut here, with these counts of moves and these questions open."""
        self.own = colour
        self._awaited, self._under_way = dict(questions), []
        self._cut = GossipCut(
            worker=number_of(self._name), clock=clock, granted=_counts(granted), moved=_counts(moved), rests=rests
        )
        effects.start(Record(colour))
        self._conclude(effects)

    def miss(self, colour: int) -> None:
        """Take the colour without having been cut: there is no such snapshot of this worker."""
        self.own, self._cut = colour, None

    def answered(self, sender: Name, number: int, move: Payload | None, colour: int, effects: Effects) -> None:
        """A question has been decided; a grant from before the granter's cut was under way if it was open at ours."""
        if self._cut is None or self._awaited.get(sender) != number:
            return
        del self._awaited[sender]
        if move is not None and colour < self.own:
            self._under_way.append(number_of(sender))
            effects.start(Keep(self.own, move))
        self._conclude(effects)

    def forget(self, name: Name) -> None:
        """A neighbour has died: what is being recorded is of no use."""
        del name
        self._cut = None

    def _conclude(self, effects: Effects) -> None:
        if self._cut is not None and not self._awaited:
            cut, self._cut = self._cut, None
            effects.start(Recorded(self.own, replace(cut, under_way=tuple(self._under_way))))


def number_of(name: Name) -> int:
    """The number in a worker's name."""
    return int(name.rsplit(" ", 1)[-1])


def _counts(counts: Mapping[Name, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((number_of(name), count) for name, count in counts.items()))
