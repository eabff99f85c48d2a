"""Sizes, rates and durations as people write them: `100MB`, `10Gbit`, `50us`; and back."""

from __future__ import annotations

import math
import re

from offbeat.errors import UsageError
from offbeat.limits import BYTES, RATE, SECONDS

SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}  # Bytes per unit.
RATES = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8} | SIZES
"""Bytes per second, per unit."""
DURATIONS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}  # Seconds per unit.
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ]*)\s*")


def parse_size(text: str) -> int:
    """Bytes of a size such as `100MB`, `4KiB` or `4096`."""
    number, unit = _quantity(text, "a size", "4096, 1kB, 100MB or 25MiB")
    size = number * _factor(unit or "B", SIZES, text, "a size", "1kB, 100MB or 25MiB")
    if not math.isfinite(size) or size < 1:
        raise UsageError(f"a size of {text!r} makes no sense: it must be at least 1 byte, such as 1kB or 100MB.")
    if size > BYTES:
        raise UsageError(f"a size of {text!r} is more than {BYTES:,} bytes (1 PiB), the limit.")
    return round(size)


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as `10Gbit` (bits) or `1.25GB/s` (bytes)."""
    what, examples = "a rate", "10Gbit, 100Mbit or 1.25GB/s (bit is bits, B is bytes, per second)"
    number, unit = _quantity(re.sub(r"(/s|ps)\s*$", "", text), what, examples)
    rate = number * _factor(unit, RATES, text, what, examples)
    if not math.isfinite(rate) or rate <= 0:
        raise UsageError(f"a rate of {text!r} would move nothing: give one above 0, such as {examples}.")
    if rate > RATE:
        raise UsageError(f"a rate of {text!r} is more than {RATE:g} bytes per second, the limit.")
    return rate


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `50us`, `2ms` or `0s`."""
    number, unit = _quantity(text, "a duration", "50us, 0.2ms or 1s")
    # Divided by how many make a second, which is exact, so that 50us is what 50e-6 is.
    duration = number / round(1 / _factor(unit, DURATIONS, text, "a duration", "50us, 0.2ms or 1s"))
    if duration > SECONDS:
        raise UsageError(f"a duration of {text!r} is more than {SECONDS:,.0f} s (a year), the limit.")
    return duration


def _quantity(text: str, what: str, examples: str) -> tuple[float, str]:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not {what}: write a number with its unit, such as {examples}.")
    return float(found[1]), found[2].replace("µ", "u")


def _factor(unit: str, units: dict[str, float] | dict[str, int], text: str, what: str, examples: str) -> float:
    """What a unit stands for; case is forgiven where only one unit can be meant (`gbit`, `KB`)."""
    if unit in units:
        return units[unit]
    meant = [factor for name, factor in units.items() if name.lower() == unit.lower()]
    if len(meant) == 1:
        return meant[0]
    known = ", ".join(units)
    said = f"has no unit {unit!r} that is known" if unit else "has no unit"
    raise UsageError(f"{text!r} {said}; {what} is written like {examples}. Units: {known}.")


def size_in_words(size: float) -> str:
    """A size as short as it can be said: `1 kB`, `100 MB`, `25 MiB`."""
    whole = round(size)
    for unit in ("GiB", "MiB", "KiB"):
        # Only what is a round number in binary and is none in decimal is said in binary.
        if whole and whole % SIZES[unit] == 0 and whole % 1000:
            return f"{whole // SIZES[unit]} {unit}"
    unit = next((unit for unit in ("GB", "MB", "kB") if size >= SIZES[unit]), "B")
    return f"{size / SIZES[unit]:.3g} {unit}" if size / SIZES[unit] < 999.5 else f"{size / SIZES[unit]:,.0f} {unit}"


def seconds_in_words(seconds: float) -> str:
    """A duration as short as it can be said: `4.1 us`, `80 ms`, `1,300 s`."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    unit = next((unit for unit in ("s", "ms", "us") if seconds >= 0.9995 * DURATIONS[unit]), "ns")
    return f"{seconds / DURATIONS[unit]:.3g} {unit}" if seconds else "0 s"
