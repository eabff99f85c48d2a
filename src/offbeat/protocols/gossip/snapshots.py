"""Snapshots of asynchronous gossip: where each worker was cut, which moves were in flight, and whether they balance.

Two workers make a move: the granter makes it at once, the asker makes the opposite when the grant comes. If the grant
is from before the granter's cut and comes after the asker's, it was in flight, and is kept: a run resumed from the
snapshot makes the other half, and the mean of all models is that of the cut.
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
    clock: int  # Steps it had made.
    granted: tuple[tuple[int, int], ...]  # Moves granted to each neighbour, and made here.
    moved: tuple[tuple[int, int], ...]  # Moves granted by each neighbour, and made here.
    under_way: tuple[int, ...] = ()  # Granters whose grants from before their cut came after this worker's cut.
    rests: int = 0  # How often all workers had come to rest together.


def gossip_faults(cuts: Sequence[GossipCut]) -> list[str]:
    """Why these cuts are not a state that the run can have been in; empty: they are one, and the mean is kept."""
    problems: list[str] = []
    rests = {cut.rests for cut in cuts}
    if len(rests) > 1:
        problems.append(f"workers have rested together different numbers of times: {sorted(rests)}")
    moved = {(cut.worker, other): count for cut in cuts for other, count in cut.moved}
    for cut in cuts:
        for asker, granted in cut.granted:
            made = moved.pop((asker, cut.worker), 0)
            late = sum(other.under_way.count(cut.worker) for other in cuts if other.worker == asker)
            if made + late != granted:
                problems.append(
                    f"worker {cut.worker} had granted worker {asker} {granted} moves, of which {made} were made and "
                    f"{late} in flight"
                )
    problems += [f"worker {a} made {n} moves that worker {b} had not granted" for (a, b), n in moved.items() if n]
    return problems


class PairColour(Colour):
    """Which snapshots a worker has been cut by, and which questions were open at the last."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: GossipCut | None = None  # Until everything in flight has come, or a neighbour has died.
        self._recording = Recording(0)
        self._answered: dict[int, int] = {}

    def turn(self, colour: int, cut: GossipCut, questions: Mapping[Name, int], effects: Effects) -> None:
        """Be cut here, with these questions open."""
        self._recording = Recording(colour, dict(counts_of(questions)))
        self.own, self.cut, self._answered = colour, cut, dict.fromkeys(self._recording.expected, 0)
        effects.start(Record(colour))
        self._conclude(effects)

    def answered(self, sender: Name, number: int, move: Payload | None, colour: int, effects: Effects) -> None:
        """A question was decided; a grant from before the granter's cut was in flight if the question was open."""
        if self.cut is None:
            return
        granter = number_of(sender)
        if self._recording.expected.get(granter) != number:
            return
        if move is not None and self._recording.keep(granter, number, colour):
            effects.start(Keep(self.own, None, move))
        self._answered[granter] = number
        self._conclude(effects)

    def miss(self) -> None:
        """Take the colour that was heard without being cut: this worker has no such snapshot."""
        self.act()
        self.cut = None

    def _conclude(self, effects: Effects) -> None:
        if self.cut is not None and self._recording.is_complete(self._answered):
            granters = tuple(granter for granter, _ in self._recording.kept)
            effects.start(Write(self.own, replace(self.cut, under_way=granters)))
            self.cut = None


def number_of(name: Name) -> int:
    """The number in a worker's name."""
    return int(name.rsplit(" ", 1)[-1])


def counts_of(counts: Mapping[Name, int]) -> tuple[tuple[int, int], ...]:
    """Moves by the numbers of the neighbours that they were made with."""
    return tuple(sorted((number_of(name), count) for name, count in counts.items()))
