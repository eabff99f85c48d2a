"""Gaussian noise for private sums: from a seed in simulations, from the operating system where privacy is real."""

from __future__ import annotations

import math
import os
import secrets
from abc import ABC, abstractmethod
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.protocols.partition import mixed

SERVER: Final = -1
"""Stands for the server where clients have their numbers."""
_STREAM: Final = 0xC0421  # Which of a seed's streams of random numbers this is; see also `protocols.federated`.
_PIECE: Final = 1 << 16


class NoiseSource(ABC):
    """Draws the noise of a round."""

    repeatable: ClassVar[bool]
    """Whether a round that is repeated gets the same noise, so that it reveals nothing that it did not before."""

    @abstractmethod
    def normal(self, number: int, size: int, whose: int = SERVER) -> Tensor:
        """Standard normal numbers, 64-bit, that the server or a client adds in a round."""

    def rounding_seed(self, usual: int) -> int:
        """The seed by which a client rounds its noisy update; the usual one follows from that of the run."""
        return usual


class SeededNoise(NoiseSource):
    """Noise that follows from a seed: every worker draws the same, and whoever knows the seed can subtract it."""

    repeatable = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, number: int, size: int, whose: int = SERVER) -> Tensor:
        """From (seed, round, client)."""
        generator = np.random.default_rng(mixed(self._seed, _STREAM, number, whose + 1))
        return torch.from_numpy(generator.standard_normal(size))


class SystemNoise(NoiseSource):
    """Noise from the operating system's secure random numbers, which nobody can repeat or predict."""

    repeatable = False

    def normal(self, number: int, size: int, whose: int = SERVER) -> Tensor:
        """Fresh at every call, by the transform of Box and Muller."""
        del number, whose
        values = np.empty(size + size % 2)
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            half = len(piece) // 2
            # With 106 bits, small numbers have as many digits as others: 53 would end the tails at 8.6 deviations.
            radius = np.sqrt(-2 * np.log(_uniform(half) + (1 - _uniform(half)) * 2.0**-53))
            angle = 2 * math.pi * _uniform(half)
            piece[:half], piece[half:] = radius * np.cos(angle), radius * np.sin(angle)
        return torch.from_numpy(values[:size])

    def rounding_seed(self, usual: int) -> int:
        """A secret one."""
        del usual
        return secrets.randbits(64)


def _uniform(count: int) -> NDArray[np.float64]:
    """Secure numbers in [0, 1) with 53 random bits."""
    words = np.frombuffer(os.urandom(8 * count), np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def noise_share(source: NoiseSource, number: int, client: int, size: int, deviation: float, sharers: int) -> Tensor:
    """A client's share of a round's noise: the shares of `sharers` clients add up to noise of this deviation.

    With fewer clients the sum has less noise than promised, so `sharers` is the fewest whose sum is ever revealed.
    """
    return source.normal(number, size, client).mul_(deviation / math.sqrt(sharers))
