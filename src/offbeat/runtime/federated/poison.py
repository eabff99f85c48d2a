"""Clients that attack, for `--disturb`: what they send, and the labels that they train on.

Everything follows from the seed, the client and the round, so it does not matter which worker plays the client.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import DataError
from offbeat.protocols.disturbances import ROLES, Disturbance, Poison
from offbeat.protocols.partition import Indices, mixed
from offbeat.runtime.federated.local_training import Examples

CHANCE: Final = 0xC0421  # Which of a seed's streams of random numbers these are; see also `protocols.federated`.
NOISE: Final = 0xC0422


class Attackers:
    """The clients that a run's disturbances name, and when they attack.

    Args:
        disturbances: All sentences of the run, in their order: a sentence is known by its number.
        seed: Chances and noise follow from it.
        classes: The number of labels, which is asked for if one is to be flipped.
        tell: Reports an attack by the number of its sentence, for the result.

    """

    def __init__(
        self,
        disturbances: Sequence[Disturbance],
        seed: int,
        classes: Callable[[], int],
        tell: Callable[[int], None],
    ) -> None:
        self._sentences = [
            (number, each.rank, each.action)
            for number, each in enumerate(disturbances)
            if isinstance(each.action, Poison)
        ]
        self._seed, self._tell = seed, tell
        self._classes = lru_cache(classes)
        self._flipping = False

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._sentences)

    def poisons(self, client: int, number: int) -> list[tuple[int, Poison]]:
        """What a client does in a round, with the numbers of the sentences that say so."""
        return [
            (sentence, poison)
            for sentence, rank, poison in self._sentences
            if rank in (None, client) and poison.strikes(self._chance(poison, sentence, client, number))
        ]

    @contextmanager
    def training(self, client: int, number: int) -> Generator[None]:
        """Inside, a client trains: on flipped labels, if it attacks with them."""
        self._flipping = any(poison.kind == "labels" for _, poison in self.poisons(client, number))
        yield
        self._flipping = False

    def examples(self, honest: Examples) -> Examples:
        """A loader of batches that flips the labels of clients that attack with them."""

        def load(indices: Indices) -> Any:
            batch = honest(indices)
            return flipped(batch, self._classes()) if self._flipping else batch

        return load

    def attack(self, update: Tensor, client: int, number: int) -> Tensor:
        """The update that a client sends, changed in place; every attack is counted."""
        for sentence, poison in self.poisons(client, number):
            if poison.kind == "sign":
                update.mul_(-poison.factor)
            elif poison.kind == "noise":
                generator = torch.Generator().manual_seed(mixed(self._seed, NOISE, sentence, client, number))
                noise = torch.randn(update.shape, generator=generator, dtype=update.dtype)
                noise *= poison.factor * float(update.double().square().mean().sqrt())
                update.copy_(noise)
            self._tell(sentence)
        return update

    def _chance(self, poison: Poison, sentence: int, client: int, number: int) -> float:
        if poison.when is None:
            return 0.0
        role = ROLES.index("client")
        return float(np.random.default_rng(mixed(self._seed, CHANCE, role, sentence, client, number)).random())


def flipped(batch: Any, classes: int) -> Any:
    """A batch whose labels are wrong: label l becomes classes - 1 - l.

    Fang et al., "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning" (2020), section 4.1.
    """
    pair: Sequence[Any] = cast("Sequence[Any]", batch) if isinstance(batch, list | tuple) else []
    labels = pair[1] if len(pair) > 1 else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise DataError(
            "poison(labels) flips labels, and a batch of this task is not a pair (inputs, labels) with whole numbers "
            "as labels. Use poison(sign) or poison(noise)."
        )
    return [pair[0], classes - 1 - labels, *pair[2:]]
