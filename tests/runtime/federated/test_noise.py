"""Noise is normal, repeatable where it follows from a seed and never elsewhere, and shares of it add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from offbeat.runtime.federated import noise
from offbeat.runtime.federated.noise import NoiseSource, SeededNoise, SystemNoise, noise_share


@pytest.mark.parametrize("source", [SeededNoise(3), SystemNoise()], ids=["seeded", "system"])
@pytest.mark.parametrize("size", [1, 2, 131_075])
def test_noise_is_standard_normal(source: NoiseSource, size: int) -> None:
    drawn = source.normal(1, size)
    assert (drawn.shape, drawn.dtype) == ((size,), torch.float64)
    assert bool(drawn.isfinite().all())
    if size > 2:
        assert kstest(drawn.numpy(), "norm").pvalue > 1e-6
        neighbours = torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1]
        assert abs(float(neighbours)) < 0.02


def test_seeded_noise_follows_from_seed_round_and_client() -> None:
    first = SeededNoise(3).normal(5, 1000)
    assert torch.equal(first, SeededNoise(3).normal(5, 1000))
    others = [SeededNoise(4).normal(5, 1000), SeededNoise(3).normal(6, 1000), SeededNoise(3).normal(5, 1000, 0)]
    for other in [*others, SeededNoise(3).normal(5, 1000, 1)]:
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.15


def test_system_noise_never_repeats() -> None:
    source = SystemNoise()
    assert not torch.equal(source.normal(1, 10), source.normal(1, 10))
    assert not source.repeatable
    assert source.rounding_seed(7) != source.rounding_seed(7)
    assert SeededNoise(3).rounding_seed(7) == 7


def test_the_tails_of_system_noise_end_beyond_twelve_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a client's integers have no room for them any more."""
    smallest = iter([np.array([0.0]), np.array([1 - 2.0**-53]), np.array([0.0])])
    monkeypatch.setattr(noise, "_uniform", lambda _count: next(smallest))
    assert float(SystemNoise().normal(1, 1)) == pytest.approx(12.12, abs=0.01)


@pytest.mark.parametrize("source", [SeededNoise(3), SystemNoise()], ids=["seeded", "system"])
def test_shares_of_clients_add_up_to_the_noise_of_a_round(source: NoiseSource) -> None:
    shares = [noise_share(source, 7, client, 50_000, 2.5, sharers=8) for client in range(8)]
    total = torch.stack(shares).sum(dim=0)
    assert float(shares[0].std()) == pytest.approx(2.5 / 8**0.5, rel=0.02)
    assert float(total.std()) == pytest.approx(2.5, rel=0.02)
    assert kstest(total.numpy() / 2.5, "norm").pvalue > 1e-6
