"""Sums over all shards: an update that uses a norm of the whole gradient waits for every shard's part of it.

Where gradients of a step are summed before they are applied (`bsp`), no worker knows the norm of their mean, and each
shard has only a part of it. So a step has one more phase there. When a shard has all gradients of a step, the step is
*sealed*: what comes later is late. The shard computes the reductions of its part and sends them to the primaries of
the other shards. With those of all shards, each in the same order, the primary puts the totals into its log; with that
entry the update is made. So replicas that hold the same log make the same update, whoever has sent what.

A reduction of what another was used for (a sum of `g / norm g`) takes another round: a level.

A shard that has closed the step answers late parts with the totals: it can be at most one step ahead, as workers read
all shards before they push again. A primary that takes over knows its part, as every replica has computed it, and
sends it again at every tick until the step is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from offbeat.protocols.machine import Effects, Name
from offbeat.protocols.programs.graph import join_reductions
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.messages import ShardPartial, ShardTotals
from offbeat.protocols.servers.pacing import Pacing
from offbeat.protocols.servers.replica.works import Ask, EntryOutcome, ReduceGradients, Update

Reductions = tuple[tuple[str, ...], ...]
"""Operations by level."""


class ReductionToken(Struct, frozen=True):
    """Token of a shard's reductions of one level; its result is their numbers."""

    step: int
    level: int


class StepTotals:
    """The totals of the open step, as the log has them: the same on every replica."""

    def __init__(self, levels: Reductions, shard: int = 0) -> None:
        self.levels, self._shard = levels, shard
        self.sealed: int | None = None  # The step that waits for totals.
        self.refusal = ""  # Why this shard has nothing to sum in it.
        self.begun = 0  # Levels whose reductions have been started here.
        self.known: tuple[ShardTotals, ...] = ()  # Of the sealed step, by level.
        self.last: tuple[ShardTotals, ...] = ()  # Of the step before it.

    @property
    def reason(self) -> str:
        """Why the sealed step has no totals; empty if it has."""
        return next((totals.reason for totals in self.known if totals.reason), "")

    @property
    def complete(self) -> bool:
        """Whether the sealed step can be closed."""
        return self.sealed is not None and (bool(self.reason) or len(self.known) == len(self.levels))

    @property
    def values(self) -> tuple[float, ...]:
        """All totals, in order."""
        return tuple(value for totals in self.known for value in totals.values)

    def may_close(self, pacing: Pacing[Ask], weight: float, settings: msg.Settings, outcome: EntryOutcome) -> bool:
        """Whether the open step is complete and what its update takes of all shards is known; asks for it if not."""
        if not self.levels:
            return pacing.is_complete()
        if self.sealed is None:
            if not pacing.is_complete():
                return False
            reason = "" if weight else f"shard {self._shard} has no usable gradient, so there are no sums over all"
            self.seal(pacing.completed, reason)
        if (level := self.begin()) is not None:
            outcome.works.append(ReduceGradients(level, 1 / weight, settings, len(pacing.clocks), self.values))
        return self.complete

    def given_to(self, update: Update) -> Update:
        """The update of a step, whose gradients were made a mean when they were reduced."""
        if not self.levels:
            return update
        return structs.replace(update, scale=1.0, settings=(), totals=self.values, refused=self.reason)

    def open_step(self, completed: int) -> int:
        """The step that gradients may still count in."""
        return completed + (self.sealed is not None)

    def seal(self, step: int, refusal: str) -> None:
        """Wait for the totals of this step."""
        self.sealed, self.refusal, self.begun, self.known = step, refusal, 0, ()

    def begin(self) -> int | None:
        """The level whose reductions are due and not begun; None if there is none."""
        if self.sealed is None or self.complete or self.refusal or self.begun > len(self.known):
            return None
        self.begun += 1
        return len(self.known)

    def take(self, totals: ShardTotals) -> None:
        """An entry of the log; one that has been there before changes nothing."""
        if totals.step == self.sealed and totals.level == len(self.known) and not self.complete:
            self.known += (totals,)

    def close(self) -> None:
        """The sealed step is closed."""
        self.sealed, self.last, self.known = None, self.known, ()

    def restart(self, last: tuple[ShardTotals, ...] = ()) -> None:
        """Go on from a state."""
        self.sealed, self.known, self.last = None, (), last

    def answer(self, step: int, level: int) -> ShardTotals | None:
        """The totals that another shard still lacks."""
        return next((known for known in (*self.known, *self.last) if (known.step, known.level) == (step, level)), None)


class TotalsExchange:
    """A primary and the other shards' primaries: parts go out, and come in until there are all."""

    def __init__(self, shard: int, totals: StepTotals) -> None:
        self._shard, self._totals = shard, totals
        self._parts: dict[tuple[int, int], dict[int, ShardPartial]] = {}  # By step and level, and shard.
        self._proposed: ShardTotals | None = None

    def forget_proposal(self) -> None:
        """Another primary's log may not have had it."""
        self._proposed = None

    def reduced(self, token: ReductionToken, values: Sequence[float] | None) -> None:
        """Keep the shard's own part, which every replica computes."""
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] >= token.step - 1}
        if values is None:  # No trained parameter here; or a simulation without numbers.
            values = [join_reductions(operation, ()) for operation in self._totals.levels[token.level]]
        self._keep(ShardPartial(self._shard, token.step, token.level, tuple(values)))

    def _keep(self, part: ShardPartial) -> None:
        self._parts.setdefault((part.step, part.level), {})[part.shard] = part

    def _own(self) -> ShardPartial | None:
        """The shard's own part of the level that is due."""
        step, level = self._totals.sealed, len(self._totals.known)
        if step is None:
            return None
        if self._totals.refusal and not self._totals.complete:
            self._keep(ShardPartial(self._shard, step, 0, reason=self._totals.refusal))
        return self._parts.get((step, level), {}).get(self._shard)

    def send(self, view: msg.ClusterView, out: Effects) -> None:
        """Send the shard's own part to the other shards' primaries, again if need be."""
        part = self._own()
        for shard, name in enumerate(view.primaries):
            if part is not None and name and shard != self._shard:
                out.send(name, part)

    def heard(self, sender: Name, part: ShardPartial, completed: int, out: Effects) -> None:
        """Another shard's part: keep it, or answer with the totals if they are known here."""
        known = self._totals.answer(part.step, part.level)
        if known is not None:
            out.send(sender, known)
        elif completed <= part.step <= completed + 1 and self._fits(part):
            self._keep(part)

    def _fits(self, part: ShardPartial) -> bool:
        levels = self._totals.levels
        return part.level < len(levels) and (bool(part.reason) or len(part.values) == len(levels[part.level]))

    def learned(self, totals: ShardTotals) -> ShardTotals | None:
        """ShardTotals from a shard that knows them: to be put into the log, if they are still needed."""
        due = (self._totals.sealed, len(self._totals.known))
        return self._propose(totals) if (totals.step, totals.level) == due else None

    def due(self, shards: Iterable[int], completed: int) -> ShardTotals | None:
        """The totals to put into the log, once all shards' parts are here."""
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] >= completed}
        own, level = self._own(), len(self._totals.known)
        if own is None or self._totals.complete:
            return None
        parts = self._parts[own.step, level]
        reason = next((part.reason for part in parts.values() if part.reason), "")
        if reason:
            return self._propose(ShardTotals(own.step, level, reason=reason))
        if any(shard not in parts for shard in shards):
            return None
        rows = [parts[shard].values for shard in shards]
        operations = self._totals.levels[level]
        values = tuple(join_reductions(operations[k], [row[k] for row in rows]) for k in range(len(operations)))
        return self._propose(ShardTotals(own.step, level, values))

    def _propose(self, totals: ShardTotals) -> ShardTotals | None:
        before = self._proposed
        if before is not None and (before.step, before.level) == (totals.step, totals.level):
            return None  # It is in the log, and will be applied.
        self._proposed = totals
        return totals
