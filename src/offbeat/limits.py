"""Upper limits of all numbers that offbeat takes, and the checks that enforce them.

Settings types check their numbers in `__post_init__`, so that the command line, Python and files are refused alike.
Limits are far above sensible values; whether this machine has room is checked in `runtime.system.capacity`.
"""

from __future__ import annotations

import math
from typing import Final, cast

from offbeat.errors import UsageError

WORKERS: Final = 1024
"""Workers of one run, over all of its hosts, which are all on one machine."""
SERVERS: Final = 256
"""Server processes of one run."""
DATA_SERVERS: Final = 64
"""Data servers of one run."""
THREADS: Final = 1024
"""Threads of one worker."""
WORLD: Final = 65_536
"""Workers started by another launcher, such as torchrun, on many machines."""
COUNT: Final = 10**15
"""Steps, epochs and other counts; a float still holds it exactly."""
REPLACEMENTS: Final = 10_000
"""Workers replaced in one run."""
MERGED: Final = 10_000
"""Batches merged into one."""
SECONDS: Final = 366 * 24 * 3600.0
"""Longest wait or duration: a year. System clocks overflow soon after."""
BYTES: Final = 2**50
"""Size of a message or buffer."""
RATE: Final = 1e18
"""Bytes per second."""
SEEDS: Final = 1000
"""Runs of each strategy in a comparison."""
FACTORS: Final = 100
"""Learning-rate factors that a comparison tries for each strategy."""
SWEEP: Final = 1000
"""Strategies in one comparison or one sweep."""
REPEATS: Final = 10_000
"""Repetitions of a measurement."""
SIMULATED_RANKS: Final = 65_536
"""Ranks of a simulated collective."""
SIMULATED_STEPS: Final = 100_000_000
"""Steps of all workers together in one simulation: 800 MB of times."""
SIMULATED_WORKERS: Final = 1_000_000
"""Workers of a simulation."""
EXAMPLES: Final = 2**40
"""Examples of a client of a federation: their sum over all clients fits into 64 bits."""
SIMULATED_SERVERS: Final = 10_000
"""Servers of a simulation."""
PORT: Final = 65_535
"""The largest port."""


def whole(name: str, value: object, most: int, least: int = 1, why: str = "") -> None:
    """Refuse what is not a whole number from `least` to `most`; `name` is the option's."""
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
    """Refuse what is not a port, or 0 for any free one."""
    if type(value) is not int or not 0 <= value <= PORT:
        raise UsageError(f"{name} {_short(value)} makes no sense: ports go up to {PORT}, and 0 picks a free one.")


def _short(value: object) -> str:
    """A value for a message: huge whole numbers by their size in bits, other values truncated."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}…"
