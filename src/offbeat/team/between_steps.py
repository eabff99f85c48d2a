"""What happens between two steps: checkpoints and snapshots are written, workers admitted, resumed runs go on."""

from __future__ import annotations

from typing import cast

from offbeat.errors import UsageError
from offbeat.runtime.events.recorder import RECORDER, Mark
from offbeat.runtime.groups.coordinated import CoordinatedMembership
from offbeat.strategies.worker.capabilities import Snapshotting
from offbeat.team.context import Workplace


class Boundaries:
    """One worker's side of checkpoints, of the budget, and of going on from a checkpoint."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._records = place.exchange if isinstance(place.exchange, Snapshotting) else None

    @property
    def exhausted(self) -> bool:
        """Whether the budget of steps or epochs is spent."""
        if self._out_of_steps:
            return True
        loader, epochs = self._place.holdings.trained_loader, self._place.goal.epochs
        if epochs is None or loader is None:
            return False
        # An epoch budget is spent only when its last epoch is complete, not at a report in the middle of it.
        return loader.trained_epochs > epochs or (loader.trained_epochs == epochs and loader.complete)

    @property
    def _out_of_steps(self) -> bool:
        steps = self._place.goal.steps
        return steps is not None and self._place.step >= steps

    def cross(self, over: bool) -> bool:
        """Between two steps: write a checkpoint if due, tell the launcher, and say whether to go on."""
        place = self._place
        if place.stopping:
            return False
        place.redivide()
        if over or self._out_of_steps:
            # Here, not at the end: what the loop does after being cut short is not part of the run that may go on.
            self.checkpoint()
            return False
        due = place.memory.due or (not self._record() and place.memory.every(place.goal.checkpoint_every, place.step))
        if place.admitting or due:
            self.checkpoint()
        if place.admitting:
            place.admitting = False
            with place.stopwatch.spent_on("wait"):
                cast("CoordinatedMembership", place.group.membership).admit()
            place.redivide()
        place.reports.tell(place.holdings.epoch)
        return True

    def at_report(self) -> None:
        """All have met for a report: a checkpoint may be due, or be written here if no boundary will come."""
        place = self._place
        if place.goal.checkpoint_every is None:
            place.memory.consider()
        elif self._snapshotting is not None:
            place.memory.catch_up(place.goal.checkpoint_every, place.step)
        if place.memory.due and not place.holdings.loaders:
            self.checkpoint()

    def checkpoint(self, at_end: bool = False) -> None:
        """Write a checkpoint now; all workers call this between two steps."""
        place = self._place
        if (recorder := RECORDER.get()) is not None:
            recorder.stamp(int(Mark.CHECKPOINT), 0, 0, place.step)
        with place.stopwatch.spent_on("other"):
            place.memory.save(self._agreed_step(), at_end, seed=place.seed)

    def _agreed_step(self) -> int:
        """The step that a checkpoint is named after: the furthest, where workers may have done different numbers."""
        place = self._place
        steps = place.group.gather([float(place.step)], "writing a checkpoint")[:, 0].tolist()
        place.watch.check_steps(steps)
        return int(max(steps))

    # -- snapshots ---------------------------------------------------------------------------------------------------

    @property
    def _snapshotting(self) -> Snapshotting | None:
        """The exchange, if the run can be recorded while it goes on."""
        return self._records if self._records is not None and self._records.snapshots else None

    @property
    def publishes(self) -> bool:
        """Whether this worker is to publish snapshots whose parts are all there."""
        return self._records is not None and self._records.publishes

    def snapshot(self) -> None:
        """Have the run recorded while it goes on."""
        exchange = self._snapshotting
        if exchange is None:
            raise UsageError(
                "a run of this strategy cannot be recorded while it goes on: its workers exchange in step, or keep "
                "what a snapshot does not cover (elastic, coded, hogwild). Use team.checkpoint(), for which all "
                "workers meet. Snapshots are for server(consistency=ssp(s) or asp), downpour and "
                "gossip(asynchronous=True)."
            )
        exchange.want_snapshot()

    def _record(self) -> bool:
        """At a boundary: this worker's part of a snapshot, if one is due. False where checkpoints need a meeting."""
        place, exchange = self._place, self._snapshotting
        if exchange is None:
            return False
        if exchange.publishes:
            place.memory.publish_complete()
        if place.group.membership.leads and place.memory.wants_snapshot(place.goal.checkpoint_every, place.step):
            exchange.want_snapshot()
        cut = exchange.cut(place.step)
        if cut is not None:
            with place.stopwatch.spent_on("other"):
                place.memory.cut(cut, step=place.step, seed=place.seed)
        return True

    # -- the way back ------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Be let in by the others, who have begun, and go on from the checkpoint that they have written for this."""
        cast("CoordinatedMembership", self._place.group.membership).knock()
        self._place.seed = self._place.memory.recall()["seed"]

    def resume(self) -> None:
        """Go back to the checkpoint that a resumed run goes on from, if it has not been done yet."""
        place = self._place
        if place.memory.resuming:
            place.memory.go_back()
            place.reports.go_back()
            if place.group.membership.outside:
                cast("CoordinatedMembership", place.group.membership).come_in()
