"""Events of a watched pipeline: what a stage computes for which microbatch, and what crosses between stages."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.protocols.pipelines.orders import Work
from offbeat.protocols.pipelines.plan import Crossing
from offbeat.runtime.events.recorder import About, Mark, Recorder
from offbeat.runtime.pipeline.routes import Parcel

GROUP = "pipeline"
"""The group that these events are of."""
_MESSAGES = 1 << 20  # More than there are in a step.
_COMPUTED, _SENT, _RECEIVED = int(Mark.COMPUTED), int(Mark.SENT), int(Mark.RECEIVED)


class StageTrace:
    """Records one stage's events; the workers are given by stage."""

    def __init__(self, recorder: Recorder, workers: Sequence[int]) -> None:
        self._recorder, self._workers = recorder, workers

    def computed(self, work: Work, part: int, microbatch: int, seconds: float) -> None:
        """A computation is over, which took so long."""
        name = self._recorder.name(
            (GROUP, work, part), lambda: About(GROUP, work.value, words=f"of part {part} of the model")
        )
        self._recorder.stamp(_COMPUTED, name, microbatch, self._recorder.steps, round(1e9 * seconds))

    def sent(self, parcel: Parcel) -> None:
        """Something leaves for another stage."""
        self._crosses(_SENT, parcel, self._worker(parcel.crossing.consumer))

    def received(self, parcel: Parcel) -> None:
        """Something from another stage is about to be used."""
        self._crosses(_RECEIVED, parcel, self._worker(parcel.crossing.producer))

    def _worker(self, part: int) -> int:
        return self._workers[part % len(self._workers)]

    def _crosses(self, mark: int, parcel: Parcel, peer: int) -> None:
        crossing: Crossing = parcel.crossing
        name = self._recorder.name(
            (GROUP, mark, crossing), lambda: About(GROUP, "message", peer=peer, words=crossing.brief)
        )
        self._recorder.stamp(mark, name, self._recorder.steps * _MESSAGES + parcel.tag, self._recorder.steps)
