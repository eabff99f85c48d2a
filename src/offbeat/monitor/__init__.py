"""From events to verdicts: who waits for whom, whether that can ever end, and who holds everybody up."""

from __future__ import annotations

from offbeat.monitor.blaming import Blame, blame
from offbeat.monitor.judging import Judge
from offbeat.monitor.looking import Watch
from offbeat.monitor.reading import Recorded, recorded
from offbeat.monitor.verdicts import DEAD, EXIT_CODES, Verdict

__all__ = ["DEAD", "EXIT_CODES", "Blame", "Judge", "Recorded", "Verdict", "Watch", "blame", "recorded"]
