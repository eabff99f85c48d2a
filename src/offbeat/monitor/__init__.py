"""From events to verdicts: who waits for whom, whether that can ever end, and who holds everybody up."""

from __future__ import annotations

from offbeat.monitor.blaming import Blame, Late, blame, late_steps
from offbeat.monitor.judging import Judge
from offbeat.monitor.looking import Watch
from offbeat.monitor.reading import Recorded, recorded
from offbeat.monitor.tracing import Held, Staleness, Unfit, held_up, staleness, unfit
from offbeat.monitor.verdicts import EXIT_CODES, LASTING, NAN, STRAGGLER, Verdict

__all__ = [
    "EXIT_CODES",
    "LASTING",
    "NAN",
    "STRAGGLER",
    "Blame",
    "Held",
    "Judge",
    "Late",
    "Recorded",
    "Staleness",
    "Unfit",
    "Verdict",
    "Watch",
    "blame",
    "held_up",
    "late_steps",
    "recorded",
    "staleness",
    "unfit",
]
