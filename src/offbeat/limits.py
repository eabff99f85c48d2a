"""The largest numbers that offbeat takes, all in one place, and the checks that refuse others.

A slip of the keyboard, or a file from a stranger, must not start a million processes or fill the memory: settings types
check their numbers in `__post_init__`, so that the command line, Python and files are refused alike, before anything
starts. Limits are far above what makes sense; what a machine has room for is checked beside them
(`runtime.system.capacity`).
"""

from __future__ import annotations

import math
from typing import Final, cast

from offbeat.errors import UsageError

WORKERS: Final = 1024
"""Processes that train in one run, on all of its hosts together: those are all on one machine."""
SERVERS: Final = 256
"""Server processes beside them."""
THREADS: Final = 1024
"""Threads of one worker."""
WORLD: Final = 65_536
"""Workers that another launcher, such as torchrun, may have started on many machines."""
COUNT: Final = 10**15
"""Steps, epochs and whatever else is only counted; a float still holds it exactly."""
REPLACEMENTS: Final = 10_000
"""Workers that are replaced in one run."""
MERGED: Final = 10_000
"""Batches that are merged into one."""
SECONDS: Final = 366 * 24 * 3600.0
"""The longest that anything may wait or last: a year. Clocks of the system overflow soon after."""
BYTES: Final = 2**50
"""A size of something that is sent."""
RATE: Final = 1e18
"""Bytes per second."""
SEEDS: Final = 1000
"""Runs of each strategy in a league."""
FACTORS: Final = 100
"""Learning rates that a league tries for each strategy."""
SWEEP: Final = 1000
"""Strategies in one league, or that one sweep means."""
REPEATS: Final = 10_000
"""Times that something is measured."""
SIMULATED_RANKS: Final = 65_536
"""Ranks of a simulated collective."""
SIMULATED_STEPS: Final = 100_000_000
"""Steps of all workers together that one simulation may have: 800 MB of times."""
SIMULATED_WORKERS: Final = 1_000_000
"""Workers of a simulation."""
SIMULATED_SERVERS: Final = 10_000
"""Servers of a simulation."""
PORT: Final = 65_535
"""The largest port."""


def whole(name: str, value: object, most: int, least: int = 1, why: str = "") -> None:
    """Refuse what is not a whole number from `least` to `most`; `name` is how it is asked for."""
    if type(value) is not int or value < least:
        raise UsageError(f"{name} {_short(value)} makes no sense: it must be a whole number, {least} or more.")
    if value > most:
        raise UsageError(f"{name} {_short(value)} is more than {most:,}, the limit{f' ({why})' if why else ''}.")


def seconds(name: str, value: object, most: float = SECONDS) -> None:
    """Refuse what is not a number of seconds above 0, or is longer than a year."""
    above_zero(name, value, "a number of seconds above 0")
    if cast("float", value) > most:
        raise UsageError(
            f"{name} {_short(value)} is more than {most:,.0f} seconds ({most / 86400:,.0f} days), the limit."
        )


def above_zero(name: str, value: object, what: str = "a number above 0") -> None:
    """Refuse what is not a finite number above 0."""
    # Compared, not converted: whole numbers may be larger than any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} {_short(value)} makes no sense: it must be {what}.")


def seed(name: str, value: object) -> None:
    """Refuse what is not a whole number of 64 bits."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise UsageError(f"{name} {_short(value)} makes no sense: it must be a whole number that fits into 64 bits.")


def port(name: str, value: object) -> None:
    """Refuse what is not a port, or 0 for any that is free."""
    if type(value) is not int or not 0 <= value <= PORT:
        raise UsageError(f"{name} {_short(value)} makes no sense: ports go up to {PORT}, and 0 takes one that is free.")


def _short(value: object) -> str:
    """A value in a few words: whole numbers that Python refuses to print by their size, others cut."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}…"
