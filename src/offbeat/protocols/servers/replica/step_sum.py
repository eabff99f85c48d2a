"""The open step of a shard under a rule that aggregates: what is held of it, and what it weighs.

A step's gradients are summed, each weighted by its examples, and applied once, over the total weight of what came. A
worker's step counts whole or not at all: parts of it are held, unanswered, until the last one has come; unless they say
that they count by themselves, as microbatches do whose worker may not come to its last one in time.

Where steps are coded, answers are held until they are enough to have the sum of all workers' gradients from; then each
is used by its coefficient in that sum, and those that are not needed are discarded.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import Push, Settings
from offbeat.protocols.servers.pacing import Pacing
from offbeat.protocols.servers.replica.works import AccumulateGradient, Ask, EntryOutcome


@dataclass(frozen=True, slots=True)
class PushedGradient:
    """A push with its numbers, and why they cannot be used; empty: they can."""

    push: Push
    payload: Payload
    unfit: str


class StepSum:
    """What has come of the open step."""

    def __init__(self, rule: Rule, pacing: Pacing[Ask]) -> None:
        self.settings: Settings = ()
        """What the optimizer's groups are set to, as told last."""
        self._rule, self._pacing = rule, pacing
        self._held: dict[int, list[PushedGradient]] = {}
        self._weight = 0.0

    @property
    def empty(self) -> bool:
        """Whether nothing is held or summed up."""
        return not self._held and not self._weight

    def clear(self, held: bool) -> None:
        """Forget the sum, and what is held if that is said."""
        self._weight = 0.0
        if held:
            self._held.clear()

    def holds(self, worker: int, number: int) -> bool:
        """Whether this push is a part that waits for the step's last one, and is not answered yet."""
        return any(part.push.number == number for part in self._held.get(worker, ()))

    def collect(self, part: PushedGradient, outcome: EntryOutcome) -> None:
        """Take a push for the open step; one for another step is answered and left unused."""
        push, step = part.push, self._pacing.completed
        if push.clock < step:
            outcome.settle(push, part.payload, "late")
        elif push.clock > step:
            reason = f"it is for step {push.clock} while step {step} is open: pull before pushing on"
            outcome.settle(push, part.payload, "refused", reason)
        elif push.counts and not push.last:
            self._add([part], outcome)
        else:
            self._held.setdefault(push.worker, []).append(part)
            if push.last:
                self._finish(push, outcome)

    def _finish(self, last: Push, outcome: EntryOutcome) -> None:
        """A worker's step is whole. What is coded is held until there is enough of it; anything else joins the sum."""
        if not self._rule.coded:
            self._add(self._held.pop(last.worker), outcome)
        elif not _unfit(self._held[last.worker]):
            self._pacing.contribute(last.worker)
        self._pacing.finish(last.worker, last.clock + 1)

    def _add(self, parts: list[PushedGradient], outcome: EntryOutcome, factor: float = 1.0) -> None:
        """Parts that belong together join the sum; if any of them is unfit, none is used."""
        last, unfit = parts[-1].push, _unfit(parts)
        weight = factor * last.weight
        for part in parts:
            push = part.push
            if part.payload.nbytes and not unfit:
                outcome.works.append(AccumulateGradient(part.payload, weight, push.start, push.stop, push.absent))
            outcome.settle(push, part.payload, "refused" if unfit else "applied", unfit)
        if not unfit:
            self._weight += weight
            self._pacing.contribute(last.worker)
        self.settings = last.settings or self.settings  # Told once: also with numbers that are not used.

    def close(self, outcome: EntryOutcome) -> float:
        """The open step is complete: what its sum weighs, and go on to the next one."""
        if self._rule.coded:
            self._combine(outcome)
            if self._rule.cyclic and self._weight:
                self._weight = 1.0  # Answers are shares of the mean over all examples; coefficients are not.
        weight, self._weight = self._weight, 0.0
        self._pacing.close()
        return weight

    def give_up_on_the_slow(self, outcome: EntryOutcome) -> None:
        """What is held of steps that were completed without it is late."""
        late = [who for who, parts in self._held.items() if parts[0].push.clock < self._pacing.completed]
        for part in [part for worker in late for part in self._held.pop(worker)]:
            outcome.settle(part.push, part.payload, "late")

    def _combine(self, outcome: EntryOutcome) -> None:
        """A coded step is complete: use what has come, each by its coefficient."""
        coefficients = self._pacing.coefficients()
        for worker, parts in [entry for entry in self._held.items() if entry[1][-1].push.last]:
            del self._held[worker]
            factor = 1.0 if coefficients is None else float(coefficients[worker])
            if _unfit(parts) or (coefficients is not None and factor):
                self._add(parts, outcome, factor)
                continue
            for part in parts:
                if coefficients is None:
                    outcome.settle(part.push, part.payload, "refused", "too many workers are gone for its code")
                else:
                    outcome.settle(part.push, part.payload, "late")

    def leave(self, worker: int, outcome: EntryOutcome) -> None:
        """A worker no longer takes part: what is held of it is left unused."""
        for part in self._held.pop(worker, []):
            outcome.settle(part.push, part.payload, "refused", "its sender does not take part")


def _unfit(parts: list[PushedGradient]) -> str:
    """Why a step in these parts cannot be used; empty if it can."""
    return next((part.unfit for part in parts if part.unfit), "")
