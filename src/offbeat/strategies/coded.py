"""Gradient coding: several workers compute every slice of a batch, so that exact steps need not wait for stragglers.

*Fractional* repetition: the workers are s + 1 copies of a plain division. Each batch is cut into p / (s + 1) slices,
and s + 1 workers compute each of them. All coefficients are 0 or 1, so that a worker's gradient is that of a mean over
its slice, as any loop computes it.

*Cyclic* repetition: each batch is cut into p slices, and worker k computes slices k to k + s. It sends one combination
of their gradients, and from any p - s of these the servers get the sum of all.

Tandon, Lei, Dimakis and Karampatziakis, "Gradient Coding: Avoiding Stragglers in Distributed Learning" (2017), sections
3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from offbeat.errors import RunError, StrategyError
from offbeat.protocols.coding import code_for
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf, rhythm_of
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies._base import Axis, Strategy, Traits
from offbeat.strategies.servers.driver import ServerDriver
from offbeat.strategies.servers.exchange import PushWorker, ServerExchanging, StepHere
from offbeat.strategies.servers.update import ServerUpdate
from offbeat.strategies.worker.exchange import Exchange


@dataclass(frozen=True)
class Coded(ServerExchanging):
    """Several workers compute every slice of a batch, so that exact steps need not wait for stragglers.

    A step is complete with the answers of any p - s workers: the first answer for every slice counts, and later ones
    are discarded. Servers update their shard with the user's own optimizer, as under `server`. The price is that every
    worker computes s + 1 times as much.
    """

    s: int = 1
    """Stragglers that no step waits for."""
    code: Literal["fractional", "cyclic"] = "fractional"
    """Assignment of slices: copies of a plain division, for which s + 1 must divide the workers, or overlapping."""
    shards: int = 1
    """Number of servers that the parameters are divided over."""
    replicas: int = 0
    """Further copies of every shard: with one, any server may die and nothing is lost."""
    update: ServerUpdate | Callable[..., object] | None = None
    """What a server does with the gradient of a step, in place of the optimizer; see `server`."""

    promises = Traits(exact=True, elastic=True)
    examples = ("coded", "coded(s=2, shards=2)", "coded(code=cyclic)")
    _ranges = (("s", lambda s: s >= 1, "at least one worker is not waited for (else use server)"),)

    def check(self, workers: int) -> None:
        """Refuse numbers of workers for which there is no such code."""
        super().check(workers)
        code_for(workers, self.s, self.code == "cyclic")

    def refuses(self, other: Strategy) -> str | None:
        """A cyclic step has several batches already."""
        if other.axis is Axis.WHEN and self.code == "cyclic":
            return "the loop gets the slices of a cyclic step as separate batches, and the step ends with the last"
        return super().refuses(other)

    @property
    def rule(self) -> Rule:
        """A step is decoded from the answers of all but `s` workers."""
        return Rule(0, coded=self.s, cyclic=self.code == "cyclic", proves=self.program is not None)

    @property
    def program(self) -> ServerUpdate | None:
        """What servers do with a step; None: as the optimizer does."""
        return cast("ServerUpdate | None", self.update)

    def rhythm(self) -> RhythmOf:
        """Push and pull in every step."""
        return rhythm_of(self.rule)

    @property
    def work(self) -> int:
        """Every slice is computed by s + 1 workers."""
        return self.s + 1

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        return (CyclicCodedWorker if self.code == "cyclic" else FractionalCodedWorker)(group, stopwatch, self)


class CyclicCodedWorker(PushWorker):
    """Pushes a combination of the gradients of its slices, as shares of the mean over all examples."""

    takes_microbatches = True

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Coded) -> None:
        super().__init__(group, stopwatch, settings, settings.rhythm()(group.rank))
        code = code_for(group.size, settings.s, cyclic=True)
        self._parts = [(k + group.rank) % group.size for k in range(settings.s + 1)]
        self._coefficients = [float(code.matrix[group.rank, part]) for part in self._parts]
        self._needed = group.size - settings.s
        self._sum = torch.empty(0)
        self._absent: set[int] = set()
        self._slices_done = 0

    def slices(self) -> tuple[Sequence[int], int]:
        """The slice of this worker's rank and those that follow, of one for each worker."""
        return self._parts, self.group.size

    def microbatch(self, within_step: bool) -> None:
        """The coming batch is one of the slices."""
        self.link.within_step = within_step

    def computed(self, driver: ServerDriver) -> StepHere:
        """Add the slice to the combination; with the last slice push it, and pull."""
        queue = driver.queue
        slot = queue.gradient()
        if not self._slices_done:
            self._sum = torch.zeros_like(queue.slots[slot])
            self._absent = queue.absent[slot]
        self._absent = queue.absent[slot] = self._absent & queue.absent[slot]
        if self.examples:
            self._sum.add_(queue.slots[slot], alpha=self._coefficients[self._slices_done] * self.examples)
        self._slices_done += 1
        if self.link.within_step:
            return StepHere()
        if self.total_examples is None:
            raise StrategyError(
                f"{self.strategy} must know how many examples a batch has over all workers, which is not known of a "
                f"stream beforehand. Use a dataset with a length, or code=fractional."
            )
        self._slices_done = 0
        members = self.group.membership.members
        if len(members) < self._needed:
            raise RunError(
                f"{self.group.size - len(members)} workers are gone, and {self.strategy} cannot compute the "
                f"exact gradient from fewer than {self._needed}. Resume from the last checkpoint with --resume; a "
                f"larger s tolerates more failures."
            )
        torch.div(self._sum, max(self.total_examples, 1), out=queue.slots[slot])
        driver.perform(driver.rhythm.computed(self.link.clock).actions, lambda: slot)
        return StepHere()


class FractionalCodedWorker(PushWorker):
    """Pushes the gradient of a slice that other workers compute too."""

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Coded) -> None:
        super().__init__(group, stopwatch, settings, settings.rhythm()(group.rank))
        self._copies = settings.s + 1

    def slices(self) -> tuple[Sequence[int], int]:
        """Workers whose ranks are equal modulo the number of slices have the same slice."""
        count = self.group.size // self._copies
        return [self.group.rank % count], count

    def computed(self, driver: ServerDriver) -> StepHere:
        """Push, and pull the parameters updated by the first answers for all slices."""
        count = self.slices()[1]
        left = {rank % count for rank in self.group.membership.members}
        for slice_ in sorted(set(range(count)) - left):
            raise RunError(
                f"all {self._copies} workers that compute slice {slice_} of every batch are gone, and {self.strategy} "
                f"cannot compute the exact gradient without it. Resume from the last checkpoint with --resume; a "
                f"larger s tolerates more failures."
            )
        slot = driver.queue.gradient() if self.examples else None
        driver.perform(driver.rhythm.computed(self.link.clock).actions, lambda: slot, max(self.examples, 1e-9))
        return StepHere()
