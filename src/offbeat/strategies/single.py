"""One worker without any exchange: the plain loop that everything else is measured against."""

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
    """One worker, the plain loop; the reference for all others."""

    promises = Traits(synchronous=True, exact=True, deterministic=True)
    aliases: ClassVar = {"sequential": "single"}
    examples = ("single", "single + accumulate(4)")
    unplanned = "a single worker sends nothing"

    @property
    def parting(self) -> bool:
        """A single worker always steps independently."""
        return True

    def check(self, workers: int) -> None:
        """Refuse more than one worker."""
        super().check(workers)
        if workers != 1:
            raise StrategyError(
                f"{self} is one worker, but {workers} were asked for. Ask for one, or use a strategy that exchanges, "
                f"such as allreduce."
            )

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: no exchange."""
        return SingleWorker(group, stopwatch)


class SingleWorker(Exchange):
    """Leaves gradients as they are."""

    def install(self, model: nn.Module) -> None:
        """Nothing to install."""

    def weigh(self, examples: int, total: int | None) -> None:
        """The batch is the whole batch."""

    def suspend(self, held: bool) -> None:
        """Gradients are local anyway."""
