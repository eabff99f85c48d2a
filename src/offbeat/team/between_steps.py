"""Between two steps: write checkpoints and snapshots, admit workers, resume runs."""

from __future__ import annotations

from typing import cast

from offbeat.errors import UsageError
from offbeat.runtime.events.recorder import RECORDER, Mark
from offbeat.runtime.groups.coordinated_group import CoordinatedMembership
from offbeat.strategies.worker.capabilities import Snapshotting
from offbeat.team.context import Workplace


class Boundaries:
    """One worker's side of checkpoints, of the budget, and of resuming."""

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
        """Between two steps: write a checkpoint if due, report progress, and return whether to continue."""
        place = self._place
        if place.stopping:
            return False
        place.redivide()
        if over or self._out_of_steps:
            # Here, not at the end: what the loop does after its budget is spent is not part of a resumable run.
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
        """All workers have met for a report: a checkpoint may be due; without loaders it is written here."""
        place = self._place
        if place.goal.checkpoint_every is None:
            place.memory.consider()
        elif self._snapshotting is not None:
            place.memory.catch_up(place.goal.checkpoint_every, place.step)
        if place.memory.due and not place.holdings.loaders:
            self.checkpoint()

    def checkpoint(self, at_end: bool = False) -> None:
        """Write a checkpoint now, named after the furthest worker's step. Collective, between two steps."""
        place = self._place
        if (recorder := RECORDER.get()) is not None:
            recorder.stamp(int(Mark.CHECKPOINT), 0, 0, place.step)
        with place.stopwatch.spent_on("other"):
            steps = place.group.gather([float(place.step)], "writing a checkpoint")[:, 0].tolist()
            place.watch.check_steps(steps)
            place.memory.save(int(max(steps)), at_end, seed=place.seed)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    @property
    def _snapshotting(self) -> Snapshotting | None:
        """The exchange, if it can be snapshotted now."""
        return self._records if self._records is not None and self._records.snapshots else None

    @property
    def publishes(self) -> bool:
        """Whether this worker publishes complete snapshots."""
        return self._records is not None and self._records.publishes

    def snapshot(self) -> None:
        """Request a snapshot of the run."""
        exchange = self._snapshotting
        if exchange is None:
            raise UsageError(
                "a run of this strategy cannot be recorded while it goes on: its workers exchange in lockstep, or have "
                "state that a snapshot does not cover (elastic, coded, hogwild). Use team.checkpoint(), for which all "
                "workers meet. Snapshots are for server(consistency=ssp(s) or asp), downpour and "
                "gossip(asynchronous=True)."
            )
        exchange.want_snapshot()

    def _record(self) -> bool:
        """Save this worker's part of a snapshot, if one is due. False where there are only checkpoints."""
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

    # -- resuming ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Join a run that has begun, and continue from the checkpoint that the others have written for this."""
        cast("CoordinatedMembership", self._place.group.membership).knock()
        self._place.seed = self._place.memory.recall()["seed"]

    def resume(self) -> None:
        """Load the checkpoint of a resumed run, if that is not done yet."""
        place = self._place
        if place.memory.resuming:
            place.memory.go_back()
            place.reports.go_back()
            if place.group.membership.outside:
                cast("CoordinatedMembership", place.group.membership).come_in()
