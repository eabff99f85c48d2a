"""From events to verdicts: who waits for whom, whether that can ever end, and which worker holds up the others."""

from __future__ import annotations

from offbeat.monitor.deadlocks import Judge
from offbeat.monitor.history import RecordedRun, has_events, recorded
from offbeat.monitor.live import LiveWatch
from offbeat.monitor.staleness_and_nans import Held, Staleness, Unfit, held_up, staleness, unfit
from offbeat.monitor.stragglers import Blame, LateWorker, blame, late_steps
from offbeat.monitor.verdicts import EXIT_CODES, LASTING, NAN, STRAGGLER, Verdict

__all__ = [
    "EXIT_CODES",
    "LASTING",
    "NAN",
    "STRAGGLER",
    "Blame",
    "Held",
    "Judge",
    "LateWorker",
    "LiveWatch",
    "RecordedRun",
    "Staleness",
    "Unfit",
    "Verdict",
    "blame",
    "has_events",
    "held_up",
    "late_steps",
    "recorded",
    "staleness",
    "unfit",
]
