"""How a worker leaves its team: the last checkpoint, the result, the goodbye."""

from __future__ import annotations

import msgspec

from offbeat.runtime.groups.group import StaticMembership
from offbeat.strategies.worker.capabilities import HasNotes, Stale
from offbeat.team.between_steps import Boundaries
from offbeat.team.context import Workplace
from offbeat.team.prepare import Adoption


def leave(work: Workplace, adoption: Adoption, boundaries: Boundaries, failed: bool) -> None:
    """End this worker's part of the run; after a failure only say goodbye."""
    done = False
    try:
        work.disturber.close()
        if not failed:
            work.watch.check(at_end=True)
        if not failed and work.started:
            work.group.membership.leave()
            work.memory.give_back_account()
            if not work.memory.catching_up():
                boundaries.checkpoint(at_end=True)
            _conclude(work)
        done = not failed
    finally:
        if isinstance(membership := work.group.membership, StaticMembership):
            membership.depart(failed=not done)
        adoption.close()
        if work.gauge is not None:
            work.gauge.close()
        publishes = boundaries.publishes
        for part in (work.watch, work.pace, work.exchange, work.memory):
            part.close()
        if publishes:
            work.memory.publish_complete(at_end=True)
        work.group.close()


def _conclude(work: Workplace) -> None:
    exchange, size = work.exchange, work.group.size
    work.reports.mean({})  # The last word on what was the same everywhere, if nothing was ever reported.
    if work.gauge is not None:
        work.gauge.conclude(work.assignment.folder, work.holdings.examples)
    more = {
        "strategy": str(work.strategy),
        "workers": size,
        "seed": work.seed,
        "epochs": work.holdings.epoch,
        "staleness": exchange.staleness(work.step) if isinstance(exchange, Stale) else {"0": work.step},
        "foreseen": None if size == 1 else msgspec.to_builtins(work.pace.foreseen()),
        **(exchange.notes() if isinstance(exchange, HasNotes) else {}),
        **({"warnings": work.watch.warnings} if work.watch.warnings else {}),
        **work.notes,
    }
    work.reports.conclude(more)
