"""One process, no exchange: the plain loop that everything else is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.errors import StrategyError
from offbeat.strategies._base import Axis, Strategy, Traits


@dataclass(frozen=True)
class Single(Strategy):
    """One worker, the plain loop; the yardstick for all others."""

    axis = Axis.EXCHANGE
    traits = Traits(synchronous=True, exact=True, deterministic=True)
    aliases: ClassVar = {"sequential": "single"}
    examples = ("single", "single + accumulate(4)")

    def check(self, workers: int) -> None:
        """Refuse more than one worker."""
        super().check(workers)
        if workers != 1:
            raise StrategyError(
                f"{self} is one worker, but {workers} were asked for. Ask for one, or take a strategy that "
                f"exchanges, such as allreduce."
            )
