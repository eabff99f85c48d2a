"""Snapshots of gossip without a beat: where each worker was cut, which moves were under way, and whether that balances.

A move is made by two: who grants it makes it at once, who has asked makes the opposite when the grant comes. If the
grant is from before the granter's cut and comes after the asker's, it was under way, and is kept: one who goes on from
the snapshot makes the other half, and the mean of all models is that of the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from offbeat.protocols.colouring import Colour, Keep, Record, Recording, Write
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
    """Why these cuts are not a state in which the run can have been; empty: they are one, and the mean is kept."""
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


class PairColour(Colour):
    """Which snapshots a worker has been cut by, and which questions were open at the last."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: GossipCut | None = None
        """Where it was cut, until everything that was under way has come, or a neighbour has died."""
        self._recording = Recording(0)
        self._answered: dict[int, int] = {}

    def turn(self, colour: int, cut: GossipCut, questions: Mapping[Name, int], effects: Effects) -> None:
        """Be cut here, with these questions open."""
        self._recording = Recording(colour, dict(counts_of(questions)))
        self.own, self.cut, self._answered = colour, cut, dict.fromkeys(self._recording.expected, 0)
        effects.start(Record(colour))
        self._conclude(effects)

    def answered(self, sender: Name, number: int, move: Payload | None, colour: int, effects: Effects) -> None:
        """A question has been decided; a grant from before the granter's cut was under way if it was open at ours."""
        if self.cut is None:
            return
        who = number_of(sender)
        if self._recording.expected.get(who) != number:
            return
        if move is not None and self._recording.keep(who, number, colour):
            effects.start(Keep(self.own, None, move))
        self._answered[who] = number
        self._conclude(effects)

    def miss(self) -> None:
        """Take the colour that was heard without having been cut: there is no such snapshot of this worker."""
        self.act()
        self.cut = None

    def _conclude(self, effects: Effects) -> None:
        if self.cut is not None and self._recording.is_complete(self._answered):
            effects.start(Write(self.own, replace(self.cut, under_way=tuple(who for who, _ in self._recording.kept))))
            self.cut = None


def number_of(name: Name) -> int:
    """The number in a worker's name."""
    return int(name.rsplit(" ", 1)[-1])


def counts_of(counts: Mapping[Name, int]) -> tuple[tuple[int, int], ...]:
    """Moves by the numbers of the neighbours that they were made with."""
    return tuple(sorted((number_of(name), count) for name, count in counts.items()))
