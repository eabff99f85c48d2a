"""Sums of activations in a step of a model whose tensors are shared between ways, to predict the step's time."""

from __future__ import annotations

from offbeat.protocols.exchanges import Exchanged
from offbeat.runtime.groups.group import DirectGroup
from offbeat.simulate.predicted_step import Step, Timed
from offbeat.strategies.worker import step_cost

RECORDED = 3
"""The call of the model in which sums are recorded; the first ones may differ."""
LARGEST = 1 << 20
"""Bytes of the largest sum that is made to measure the links."""


class WayFigures:
    """Records what the ways sum from one call of the model to the next."""

    def __init__(self, ways: DirectGroup) -> None:
        self._ways, self._why_not = ways, step_cost.why_not(ways)
        self._calls = 1  # The one in which the model was cut.
        self._recording = False
        self._exchanges: tuple[Exchanged, ...] = ()
        self._trials: tuple[Timed, ...] = () if self._why_not else step_cost.trials(ways, LARGEST, ())

    def called(self) -> None:
        """The model is called: a batch begins."""
        self._calls += 1
        if self._recording:
            self._exchanges, self._recording = self._ways.sent.recorded(), False
        elif self._calls >= RECORDED and not self._exchanges:
            self._ways.sent.record()
            self._recording = True

    def interrupted(self) -> None:
        """Something else is exchanged before the next batch, such as for an evaluation: record another one."""
        if self._recording:
            self._ways.sent.recorded()
            self._recording = False

    def predicted(self, batches: int) -> Step | str:
        """The sums of a step of so many batches, or why its time cannot be predicted."""
        if self._why_not is not None:
            return self._why_not
        if not self._exchanges:
            return f"sums of activations are recorded in batch {RECORDED}, and it had none or was the last"
        hosts = tuple(self._ways.view.hosts.tolist())
        return Step(hosts=hosts, exchanges=self._exchanges * batches, trials=self._trials)
