"""Threshold sharing of 32-byte secrets: any `threshold` shares give the secret, fewer say nothing about it.

Shamir, "How to Share a Secret" (1979), with plain integers modulo a prime just above 2^256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from offbeat.errors import SecureAggregationError, UsageError

PRIME: Final = 2**256 + 297
"""The smallest prime above 2^256, so that a secret of 32 bytes is one number."""
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33

SecretBytes = Callable[[int], bytes]
"""Draws that many secret random bytes: `secrets.token_bytes`, or a seeded source in tests."""


@dataclass(frozen=True)
class ShamirSharing:
    """Splits secrets over holders, who are numbers from 0, and puts them together again."""

    threshold: int
    """Shares that are needed."""

    def __post_init__(self) -> None:
        """Refuse a threshold below 1."""
        if self.threshold < 1:
            raise UsageError(f"threshold {self.threshold} makes no sense: it takes 1 share or more to get a secret.")

    def split(self, secret: bytes, holders: Sequence[int], random: SecretBytes) -> dict[int, bytes]:
        """The share of each holder."""
        if len(secret) != SECRET_BYTES:
            raise UsageError(f"a secret of {len(secret)} bytes cannot be shared: it must have {SECRET_BYTES}.")
        if len(set(holders)) < max(self.threshold, len(holders)) or min(holders) < 0:
            raise UsageError(
                f"{len(set(holders))} different holders are too few for a threshold of {self.threshold}: the secret "
                f"could never be recovered. Lower the threshold, or add holders."
            )
        # 16 bytes more than the prime has, so that each remainder is equally likely but for 2^-120.
        drawn = (int.from_bytes(random(SHARE_BYTES + 16), "little") % PRIME for _ in range(self.threshold - 1))
        coefficients = [int.from_bytes(secret, "little"), *drawn]
        return {holder: _polynomial(coefficients, holder + 1).to_bytes(SHARE_BYTES, "little") for holder in holders}

    def combine(self, shares: Mapping[int, bytes]) -> bytes:
        """The secret, from the shares of `threshold` holders or more, of which the first are used."""
        value = self._value(shares, 0)
        if value >= 2**256:
            raise SecureAggregationError("the shares of a secret do not fit together: at least one is wrong.")
        return value.to_bytes(SECRET_BYTES, "little")

    def share_of(self, holder: int, shares: Mapping[int, bytes]) -> bytes:
        """The share that a holder must have, by those of others."""
        return self._value(shares, holder + 1).to_bytes(SHARE_BYTES, "little")

    def _value(self, shares: Mapping[int, bytes], place: int) -> int:
        """The value of the polynomial through the first shares."""
        if len(shares) < self.threshold:
            raise SecureAggregationError(
                f"{len(shares)} shares cannot recover a secret whose threshold is {self.threshold}."
            )
        holders = tuple(shares)[: self.threshold]
        factors = _lagrange(tuple(holder + 1 for holder in holders), place)
        numbers = (int.from_bytes(shares[holder], "little") for holder in holders)
        return sum(factor * number for factor, number in zip(factors, numbers, strict=True)) % PRIME


def is_share(value: bytes) -> bool:
    """Whether these bytes can be a share."""
    return len(value) == SHARE_BYTES and int.from_bytes(value, "little") < PRIME


def _polynomial(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


@lru_cache(maxsize=64)
def _lagrange(places: tuple[int, ...], at: int) -> tuple[int, ...]:
    """What the values at some places count for the value at another."""
    factors: list[int] = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * (at - other) % PRIME
                below = below * (place - other) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
