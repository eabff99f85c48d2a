"""Privacy under secure aggregation: the noise of clients, what the sum shows, and what is accounted for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from private_tasks import Smooth
from safetensors.torch import load_file
from scipy.stats import binom, norm
from secure_support import Table
from torch import Tensor

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.server import SecureSum
from offbeat.run.drive import fit
from offbeat.runtime.federated.aggregation import ClientUpdate, Selected, UpdateLayout, alone
from offbeat.runtime.federated.noise import NoiseSource, SeededNoise
from offbeat.runtime.federated.privacy import PrivacyTerms
from offbeat.runtime.federated.privacy_accountant import ParticipantAccountant, PrivacyAccountant, calibrated_noise
from offbeat.runtime.federated.private_secure_mean import PrivateSecureMean
from offbeat.runtime.federated.round_scale import RoundScale
from offbeat.runtime.federated.secure_mean import adopt
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.simulate.faults.secure_rounds import Dropout, SecureWorld
from offbeat.strategies import parse

SIZE, CLIP, NOISE = 3000, 2.0, 1.5
LAYOUT = UpdateLayout(SIZE, SIZE, torch.float64)
PLAN = RoundPlan(clients=40, fraction=0.25, poisson=True)
CLIENTS = list(range(10, 20))
SELECTED = Selected(4, CLIENTS, [20.0 + client for client in CLIENTS])
FEWEST = 7


class Silence(NoiseSource):
    """No noise, so that a test sees the sum."""

    repeatable = True

    def normal(self, number: int, size: int, whose: int = -1) -> Tensor:
        return torch.zeros(size, dtype=torch.float64)


def private(source: NoiseSource | None = None, noise: float = NOISE) -> PrivateSecureMean:
    terms = PrivacyTerms(40, 0.25, 1e-3, CLIP, noise, None, participants_known=True)
    mean = PrivateSecureMean(LAYOUT, PLAN, 7, terms, source or SeededNoise(5))
    mean.prepare(10)
    mean.begin(SELECTED)
    return mean


def sent(client: int, length: float = 5.0) -> ClientUpdate:
    row = torch.randn(SIZE, generator=torch.Generator().manual_seed(client), dtype=torch.float64)
    return ClientUpdate(client, row * length / row.norm(), None, 20.0 + client, 0.5, 10)


def summed(clients: Sequence[int], parts: int = 1, source: NoiseSource | None = None) -> PrivateSecureMean:
    """A round over these clients, as worker 0 of several has it in the end."""
    means = [private(source) for _ in range(parts)]
    for position, client in enumerate(clients):
        assert means[position % parts].add(sent(client))
    rows = torch.stack([mean._row.clone() for mean in means]).sum(dim=0)
    for mean in means:
        mean.combine(lambda row, _: row.copy_(rows))
    assert all(torch.equal(mean.mean()[0], means[0].mean()[0]) for mean in means)
    return means[0]


def total(mean: PrivateSecureMean) -> Tensor:
    return mean.mean()[0] * mean.ledger.terms.expected


# -- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [(), (12, 17)])
def test_the_masked_protocol_gives_the_same_integers_bit_for_bit(absent: tuple[int, ...]) -> None:
    simulated = summed([client for client in CLIENTS if client not in absent])
    plan = SecureRound.of(bytes(32), simulated.encoding, len(CLIENTS), fewest=FEWEST, signed=True)
    world = SecureWorld(plan, 1, dict.fromkeys(absent, Dropout(2, before=True)))
    for client, each in world.clients.items():
        each.update = simulated.encode(sent(client))
    outcome = Table(world).play()
    assert isinstance(outcome, SecureSum)
    assert simulated._sum is not None
    assert np.array_equal(simulated._sum, outcome.total)
    deployed = private()
    deployed.receive(outcome.total, outcome.clients)
    assert torch.equal(simulated.mean()[0], deployed.mean()[0])
    assert not simulated.failure


def test_any_number_of_workers_has_the_same_sum() -> None:
    first = summed(CLIENTS)
    for parts in (2, 4):
        other = summed(CLIENTS, parts)
        assert torch.equal(first.mean()[0], other.mean()[0])
        assert (first.updates, first.examples, first.clients) == (other.updates, other.examples, other.clients)


def test_clipped_updates_weigh_the_same_and_only_rounding_is_lost() -> None:
    silent = summed(CLIENTS, source=Silence())
    unit = silent.encoding.bound / silent.encoding.largest
    exact = sum((sent(client, CLIP).update for client in CLIENTS), torch.zeros(SIZE, dtype=torch.float64))
    # Updates are clipped to a millionth less than the bound.
    assert float((total(silent) - exact).abs().max()) < len(CLIENTS) * (unit + 1e-6 * CLIP)
    assert unit < 1e-7 * CLIP
    assert math.isnan(silent.loss)


def test_a_client_never_moves_the_sum_by_more_than_the_bound_and_rounding() -> None:
    without, with_it = summed(CLIENTS[1:], source=Silence()), summed(CLIENTS, source=Silence())
    unit = without.encoding.bound / without.encoding.largest
    assert float((total(with_it) - total(without)).norm()) <= CLIP + unit * math.sqrt(SIZE)


def test_a_client_with_nan_sends_noise_so_that_nobody_sees_it() -> None:
    mean, others = private(), CLIENTS[1:]
    bad = ClientUpdate(CLIENTS[0], torch.full((SIZE,), torch.nan), None, 1.0, 0.5, 9)
    assert not mean.add(bad)
    for client in others:
        assert mean.add(sent(client))
    mean.combine(alone)
    assert (mean.clients, mean.updates, mean.examples) == (tuple(CLIENTS), 9, 90)
    encoded = mean._encoding
    nothing = ClientUpdate(CLIENTS[0], torch.zeros(SIZE), None, 1.0, 0.5, 9)
    assert np.array_equal(mean.encode(bad), mean.encode(nothing))
    assert encoded is mean._encoding
    only = private()
    for client in CLIENTS:
        assert not only.add(ClientUpdate(client, torch.full((SIZE,), torch.inf), None, 1.0, 0.5, 9))
    only.combine(alone)
    assert (only.updates, only.failure, only.moves_always) == (0, "", True)


# -- the noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("came", [7, 10])
def test_the_sum_of_the_fewest_clients_has_the_promised_noise_and_others_have_more(came: int) -> None:
    noisy, silent = summed(CLIENTS[:came]), summed(CLIENTS[:came], source=Silence())
    assert not noisy.failure
    deviation = float((total(noisy) - total(silent)).std())
    assert deviation == pytest.approx(NOISE * CLIP * math.sqrt(came / FEWEST), rel=0.05)


def test_with_fewer_clients_there_is_no_sum() -> None:
    mean = summed(CLIENTS[:6])
    assert "6 of 10 clients sent a masked update, and 7 are needed" in mean.failure
    assert not mean.moves_always
    assert mean.ledger.spent == 4


def test_a_client_adds_no_share_of_noise_to_a_sum_that_fewer_may_reveal() -> None:
    mean = private()
    assert adopt(mean, mean.encoding, 4, FEWEST) == ""
    assert "reveal a sum of 6 clients, and the noise is shared by 7" in adopt(mean, mean.encoding, 4, FEWEST - 1)


def test_a_sum_from_elsewhere_counts_all_and_spends_the_round_once() -> None:
    simulated, server = summed(CLIENTS), private()
    assert simulated._sum is not None
    for _ in range(2):  # As a server that was killed while it closed the round.
        server.begin(SELECTED)
        server.receive(simulated._sum, CLIENTS)
    assert (server.updates, server.failure, server.ledger.spent) == (len(CLIENTS), "", SELECTED.number)
    assert torch.equal(server.mean()[0], simulated.mean()[0])


def test_of_many_clients_two_thirds_are_needed_and_share_the_noise() -> None:
    clients = list(range(400))
    terms = PrivacyTerms(400, 1.0, 1e-3, CLIP, NOISE, None, participants_known=True)
    mean = PrivateSecureMean(
        UpdateLayout(SIZE, SIZE, torch.float32), RoundPlan(clients=400, fraction=1.0), 1, terms, SeededNoise(2)
    )
    mean.prepare(3)
    mean.begin(Selected(1, clients, [1.0] * 400))
    for client in clients[:267]:
        mean.add(ClientUpdate(client, torch.zeros(SIZE), None, 1.0, 0.5, 1))
    mean.combine(alone)
    assert float(mean.mean()[0].std()) * 400 == pytest.approx(NOISE * CLIP, rel=0.05)
    mean.begin(Selected(2, clients, [1.0] * 400))
    for client in clients[:266]:
        mean.add(ClientUpdate(client, torch.zeros(SIZE), None, 1.0, 0.5, 1))
    mean.combine(alone)
    assert "266 of 400 clients sent a masked update, and 267 are needed" in mean.failure


def test_noise_that_would_be_rounded_away_is_refused() -> None:
    terms = PrivacyTerms(1_000_000, 1.0, 1e-8, 1.0, 0.1, None, participants_known=True)
    mean = PrivateSecureMean(
        UpdateLayout(5, 5, torch.float32), RoundPlan(clients=1_000_000, fraction=1.0), 1, terms, SeededNoise(2)
    )
    with pytest.raises(UsageError, match="would be rounded away below 4"):
        mean.prepare(1)


def spectrum(deviation: float, at: NDArray[np.float64], shift: float) -> NDArray[np.complex128]:
    """The characteristic function of update + noise + u - u', both uniform on [0, 1)."""
    return np.exp(1j * shift * at - (deviation * at) ** 2 / 2) * np.sinc(at / (2 * math.pi)) ** 2


@pytest.mark.parametrize("clients", [2, 3, 5])
@pytest.mark.parametrize("deviation", [0.8, 1.0, 1.2])
def test_a_sum_of_rounded_numbers_is_a_rounded_sum_but_for_a_difference_that_vanishes_with_the_noise(
    clients: int, deviation: float
) -> None:
    """The argument by which rounding costs no privacy, where the difference is large enough to be seen."""
    count, shifts = 1024, np.random.default_rng(clients).uniform(0, 1, clients)
    at = 2 * math.pi * np.fft.fftfreq(count)
    repeats = [2 * math.pi * number for number in range(-5, 6)]
    rounded_each = np.prod([sum(spectrum(deviation, at + far, x) for far in repeats) for x in shifts], axis=0)
    rounded_once = sum(np.prod([spectrum(deviation, at + far, x) for x in shifts], axis=0) for far in repeats)
    difference = np.abs(np.fft.fft(rounded_each - rounded_once) / count).sum() / 2
    bound = math.exp(-2 * math.pi**2 * deviation**2 * (clients - 1) / clients)
    assert bound / 1000 < difference < bound <= math.exp(-(math.pi**2) * deviation**2)


def quantized(source: NoiseSource | None = None, noise: float = NOISE) -> PrivateSecureMean:
    terms = PrivacyTerms(40, 0.25, 1e-3, CLIP, noise, None, participants_known=True)
    scale = RoundScale(8, owes=False)
    mean = PrivateSecureMean(LAYOUT, PLAN, 7, terms, source or SeededNoise(5), scale=scale)
    mean.prepare(10)
    mean.begin(SELECTED)
    return mean


def test_quantized_private_updates_have_the_promised_noise_and_the_masked_protocol_sums_the_same_integers() -> None:
    mean, plain = quantized(), private()
    assert mean.encoding.width == 8 + 4
    world = SecureWorld(SecureRound.of(bytes(32), mean.encoding, len(CLIENTS), fewest=FEWEST), 1)
    for client, each in world.clients.items():
        each.update = mean.encode(sent(client))
        assert mean.add(sent(client))
        assert plain.add(sent(client))
    for each in (mean, plain):
        each.combine(alone)
    outcome = Table(world).play()
    assert isinstance(outcome, SecureSum)
    assert np.array_equal(mean._sum, outcome.total)  # type: ignore[arg-type]
    rounding = float((total(mean) - total(plain)).std())
    unit = mean.encoding.bound / mean.encoding.largest
    assert rounding == pytest.approx(unit * math.sqrt(len(CLIENTS) / 6), rel=0.1), "as of so many random roundings"
    assert rounding < 0.1 * NOISE * CLIP
    with pytest.raises(UsageError, match="would be rounded away below 4"):
        quantized(noise=0.1)


# -- the account -----------------------------------------------------------------------------------------------------


def test_with_everybody_in_every_round_the_two_accounts_agree() -> None:
    for noise, rounds in ((2.0, 10), (5.0, 100), (1.0, 1)):
        known, hidden = ParticipantAccountant(noise, 1.0, 1e-5), PrivacyAccountant(noise, 1.0, 1e-5)
        assert known.epsilon(rounds) == pytest.approx(hidden.epsilon(rounds), rel=3e-3)


def test_epsilon_is_the_mean_over_how_often_a_client_takes_part() -> None:
    epsilon = ParticipantAccountant(2.0, 0.2, 1e-3).epsilon(30)

    def delta(epsilon: float) -> float:
        return sum(
            binom.pmf(m, 30, 0.2)
            * (
                norm.cdf(math.sqrt(m) / 4 - epsilon * 2 / math.sqrt(m))
                - math.exp(epsilon) * norm.cdf(-math.sqrt(m) / 4 - epsilon * 2 / math.sqrt(m))
            )
            for m in range(1, 31)
        )

    assert delta(epsilon) <= 1e-3 <= delta(epsilon * 0.999)


def test_known_participants_cost_more_than_hidden_ones_and_the_noise_is_found_for_them() -> None:
    assert ParticipantAccountant(1.0, 0.1, 1e-4).epsilon(0) == 0
    assert ParticipantAccountant(1.0, 0.1, 1e-4).epsilon(50) > PrivacyAccountant(1.0, 0.1, 1e-4).epsilon(50)
    noise = calibrated_noise(8.0, 0.1, 1e-4, 50, participants_known=True)
    assert 7.9 < ParticipantAccountant(noise, 0.1, 1e-4).epsilon(50) <= 8.0
    assert ParticipantAccountant(noise, 0.1, 1e-4).rounds(8.0) >= 50
    rare = ParticipantAccountant(1.0, 1e-4, 1e-3).epsilon(2)
    assert rare == 0, "a client that hardly ever takes part spends nothing beyond delta"


# -- settings and runs -----------------------------------------------------------------------------------------------

TEXT = "federated(clients=12, fraction=0.7, batch=7, dropout=0.1, data=task, secure=True, privacy=privacy({}))"


def test_poisson_rounds_of_too_few_clients_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"selects 5 of 100 clients on average, but fewer than the 3 .* in 0\.12"):
        parse("federated(clients=100, fraction=0.05, secure=True, privacy=privacy(8, delta=1e-3))")
    with pytest.raises(StrategyError, match="with Poisson sampling"):
        parse("federated(clients=100, fraction=0.05, secure=True, sampling=poisson)")
    assert parse("federated(clients=100, fraction=0.1, secure=True, privacy=privacy(8, delta=1e-3))") is not None


@pytest.mark.slow
def test_a_run_has_the_same_bits_with_any_number_of_workers(launcher: Launcher, tmp_path: Path) -> None:
    text = TEXT.format("8, delta=0.01, clip=0.5")
    results = [fit(Smooth(), text, workers=n, steps=6, seed=4, launcher=launcher, out=tmp_path) for n in (1, 2, 4)]
    bits = [load_file(result.run / MODEL_FILE) for result in results]
    assert all(torch.equal(bits[0][name], other[name]) for other in bits[1:] for name in bits[0])
    assert len({(str(r.federated), r.score, r.bytes_sent) for r in results}) == 1
    spent = results[0].federated
    assert 7.9 < spent["epsilon"] <= 8
    assert spent["privacy"]["rounds"] == 6
    longer = fit(Smooth(), text, workers=2, steps=9, resume=results[1].run, launcher=launcher, out=tmp_path)
    assert longer.steps == 6
    assert "privacy budget of epsilon 8 is spent" in longer.federated["stopped"]
