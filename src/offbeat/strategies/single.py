"""One process, no exchange: the plain loop that everything else is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from offbeat.errors import StrategyError
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies._base import Traits
from offbeat.strategies.worker.exchange import Exchange, Exchanging


@dataclass(frozen=True)
class Single(Exchanging):
    """One worker, the plain loop; the yardstick for all others."""

    promises = Traits(synchronous=True, exact=True, deterministic=True)
    aliases: ClassVar = {"sequential": "single"}
    examples = ("single", "single + accumulate(4)")
    unplanned = "one worker has nobody to send anything to"

    @property
    def parting(self) -> bool:
        """One worker is always by itself."""
        return True

    def check(self, workers: int) -> None:
        """Refuse more than one worker."""
        super().check(workers)
        if workers != 1:
            raise StrategyError(
                f"{self} is one worker, but {workers} were asked for. Ask for one, or take a strategy that "
                f"exchanges, such as allreduce."
            )

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: nobody to exchange with."""
        return _Alone(group, stopwatch)


class _Alone(Exchange):
    def install(self, model: nn.Module) -> None:
        """Nothing to install."""

    def weigh(self, examples: int, total: int | None) -> None:
        """A batch alone is the whole batch."""

    def suspend(self, held: bool) -> None:
        """Gradients are local anyway."""
