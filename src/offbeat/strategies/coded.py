"""Every slice of a batch is computed by several workers, so that steps are exact without waiting for the slowest.

The workers are s + 1 copies of a plain division: each batch is cut into p / (s + 1) slices, and s + 1 workers compute
each of them. A step is complete as soon as every slice has been answered once, which any p - s workers see to.

Tandon, Lei, Dimakis and Karampatziakis, "Gradient Coding: Avoiding Stragglers in Distributed Learning" (2017), section
3: fractional repetition. All coefficients of this code are 0 or 1, so that a worker's gradient is that of a mean over
its slice, as any loop computes it. Cyclic codes need the gradients of several parts apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import RunError
from offbeat.protocols.coding import fractional_repetition
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.group import Group
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.strategies._base import Traits, require
from offbeat.strategies._serving import Served
from offbeat.strategies._worker import Exchange, Exchanging


@dataclass(frozen=True)
class Coded(Exchanging):
    """Several workers compute every slice of a batch, so that steps are exact without waiting for the slowest.

    A step is complete with the answers of any p - s workers: the first answer for every slice counts, and what comes
    later is discarded. Servers update their shard with the user's own optimizer, as under `server`. The price is that
    every worker computes s + 1 times as much as without.
    """

    s: int = 1
    """Workers that no step waits for; s + 1 must divide the number of workers."""
    shards: int = 1
    """Server processes that the parameters are divided over."""
    replicas: int = 0
    """Further copies of every shard: with one, any server may die and nothing is lost."""

    traits = Traits(exact=True, elastic=True)
    examples = ("coded", "coded(s=2, shards=2)")

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        require(self.s >= 1, self, "s", self.s, "at least one worker is not waited for (else say server)")
        require(self.shards >= 1, self, "shards", self.shards, "there is at least one server")
        require(self.replicas >= 0, self, "replicas", self.replicas, "a shard has 0 or more further copies")

    def check(self, workers: int) -> None:
        """Refuse numbers of workers that cannot be cut into groups of s + 1."""
        super().check(workers)
        fractional_repetition(workers, self.s)

    def servers(self, workers: int) -> tuple[int, int, Rule]:
        """Shards, further copies of each, and how many answers a step can do without."""
        del workers
        return self.shards, self.replicas, Rule(0, coded=self.s)

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        return _Repeating(group, stopwatch, self)


class _Repeating(Served):
    """Pushes the gradient of a slice that others compute too."""

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Coded) -> None:
        super().__init__(group, stopwatch, settings, Rule(0, coded=settings.s))
        self._copies = settings.s + 1

    def slices(self) -> tuple[int, int]:
        """The workers whose ranks leave the same remainder have the same slice, whoever of them is alive."""
        count = self.group.size // self._copies
        return self.group.rank % count, count

    def exchange(self) -> bool:
        """Push, and pull what the first answers for all slices have made of the parameters."""
        self._all_slices_are_computed()
        slot = self.gradient() if self.examples else None
        self.arrive(self.push(slot, then_pull=True, weight=max(self.examples, 1e-9)))
        return True

    def _all_slices_are_computed(self) -> None:
        count = self.slices()[1]
        left = {rank % count for rank in self.group.members}
        for slice_ in sorted(set(range(count)) - left):
            raise RunError(
                f"all {self._copies} workers that compute slice {slice_} of every batch are gone, and {self.strategy} "
                f"cannot have the exact gradient without it. Go on from the last checkpoint with --resume; a larger s "
                f"outlives more workers."
            )
