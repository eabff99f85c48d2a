"""Settings of privacy: their text, and what is refused with the reason."""

from __future__ import annotations

import dataclasses

import pytest

from offbeat.errors import OffbeatWarning, StrategyError
from offbeat.run.job import Job, resolve, target_of
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.run.settings import Goal
from offbeat.strategies import combined, parse
from offbeat.strategies.federated.privacy import Privacy
from offbeat.strategies.federated.strategy import Federated


def rules(text: str) -> Federated:
    exchange = combined(parse(text)).exchange
    assert isinstance(exchange, Federated)
    return exchange


@pytest.mark.parametrize(
    "text",
    [
        "federated(privacy=privacy(epsilon=8.0))",
        "federated(privacy=privacy(epsilon=8.0, delta=1e-06, clip=0.5))",
        "federated(privacy=privacy(noise=1.1))",
        "federated(sampling=poisson, privacy=privacy(noise=1.1, budget=3.0))",
    ],
)
def test_privacy_reads_back_as_it_is_written(text: str) -> None:
    assert str(parse(text)) == text


def test_private_rounds_sample_each_client_independently() -> None:
    assert rules("federated(privacy=privacy(8))").plan().poisson
    assert not rules("federated").plan().poisson
    terms = rules("federated(clients=40, fraction=0.25, privacy=privacy(8, clip=3))").privacy_terms
    assert terms is not None
    assert (terms.expected, terms.clip, terms.limit, terms.noise) == (10, 3, 8, None)


REFUSED = {
    "nothing given": ("privacy", "neither epsilon nor noise"),
    "both given": ("privacy(8, noise=1)", "each follows from the other"),
    "epsilon of 0": ("privacy(0)", "from 0.01 to 100"),
    "negative epsilon": ("privacy(-1)", "from 0.01 to 100"),
    "endless epsilon": ("privacy(1e9)", "from 0.01 to 100"),
    "delta of 0": ("privacy(8, delta=0)", "probability"),
    "delta of 1": ("privacy(8, delta=1)", "probability"),
    "negative delta": ("privacy(8, delta=-0.1)", "probability"),
    "bound of 0": ("privacy(8, clip=0)", "bound is from 1e-6"),
    "negative bound": ("privacy(8, clip=-1)", "bound is from 1e-6"),
    "no noise": ("privacy(noise=0)", "nothing is private"),
    "too much noise": ("privacy(noise=1e6)", "from 0.1 to 10,000"),
    "budget beside epsilon": ("privacy(8, budget=4)", "stops at that anyway"),
    "budget of 0": ("privacy(noise=1, budget=0)", "epsilon from 0.01"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_numbers_that_promise_nothing_are_refused(case: str) -> None:
    text, words = REFUSED[case]
    with pytest.raises(StrategyError, match=words):
        parse(f"federated(privacy={text})")


@pytest.mark.parametrize("name", ["epsilon", "delta", "clip", "noise", "budget"])
def test_nan_is_refused(name: str) -> None:
    known = {"epsilon": 8.0} if name in ("delta", "clip") else {"noise": 1.0} if name == "budget" else {}
    with pytest.raises(StrategyError, match=f"{name} takes .* not nan"):
        Privacy(**known | {name: float("nan")})
    with pytest.raises(StrategyError):
        parse(f"federated(privacy=privacy({name}=nan))")


NOT_COVERED = {
    "uniform sampling": ("sampling=uniform", "sampling=uniform"),
    "a second vector": ("algorithm=scaffold", "second vector"),
    "no rounds": ("algorithm=fedbuff(5)", "which have answered"),
    "rounds that show how many came": ("fewest=3", "how many clients took part"),
    "the quickest clients": ("over=1.3", "depend on their speed"),
}


@pytest.mark.parametrize("case", NOT_COVERED)
def test_what_the_account_does_not_cover_is_refused(case: str) -> None:
    more, words = NOT_COVERED[case]
    with pytest.raises(StrategyError, match=words):
        parse(f"federated(privacy=privacy(8), {more})")


def resolved(task: str, text: str) -> None:
    resolve(Job(target_of(task), Goal(strategy=text), workers=1))


def test_a_delta_above_one_in_the_number_of_clients_is_warned_of() -> None:
    with pytest.warns(OffbeatWarning, match="publishing a client"):
        resolved("offbeat.tasks.digits", "federated(clients=100, privacy=privacy(8, delta=0.02))")


def test_statistics_are_not_clipped_and_not_compressed() -> None:
    with pytest.raises(StrategyError, match="no bound to clip them by is right"):
        resolved("offbeat.tasks.mixture", "federated(privacy=privacy(8))")
    with pytest.raises(StrategyError, match="would never be sent"):
        resolved("offbeat.tasks.mixture", "federated + topk(0.1)")


def test_error_feedback_needs_one_place_for_what_clients_keep() -> None:
    job = Job(target_of("offbeat.tasks.digits"), Goal(strategy="federated + topk(0.1)"), workers=2)
    resolve(job)
    with pytest.raises(StrategyError, match="several hosts do not share"):
        resolve(dataclasses.replace(job, hosts=Hosts.alike(2)))
    free = dataclasses.replace(job.goal, strategy="federated + topk(0.1, feedback=False)")
    resolve(dataclasses.replace(job, hosts=Hosts.alike(2), goal=free))
