"""`federated(...)` as a value: what it is called, what it refuses, how many rounds a budget is."""

from __future__ import annotations

from pathlib import Path

import pytest
from federated_tasks import Means, Owners

from offbeat.errors import StrategyError, UsageError
from offbeat.run.drive import Result, fit
from offbeat.runtime.run.report import report_lines
from offbeat.strategies import Combined, combined, parse
from offbeat.strategies.federated.strategy import Federated


def federated(text: str) -> Federated:
    exchange = combined(parse(text)).exchange
    assert isinstance(exchange, Federated)
    return exchange


@pytest.mark.parametrize(
    "text",
    [
        "federated",
        "federated(clients=100, fraction=0.1, epochs=5)",
        "federated(data=shards(2), algorithm=fedadam(0.01))",
        "federated(data=quantity(0.5), algorithm=scaffold, sampling=poisson)",
        "federated(algorithm=fedbuff(10), speeds=lognormal(0.8, 20, 1e6), dropout=0.1)",
        "federated(batch=full, over=1.3, deadline=60, fewest=3)",
    ],
)
def test_it_is_written_as_text_and_read_back(text: str) -> None:
    strategy = federated(text)
    assert federated(str(strategy)) == strategy


@pytest.mark.parametrize("name", ["fedavg", "fedsgd", "fedbuff", "fedadam", "fedyogi", "fedadagrad", "scaffold"])
def test_names_that_people_know_stand_for_it(name: str) -> None:
    algorithm = federated(name).algorithm
    assert algorithm.name == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("federated(clients=0)", "1 to 1,000,000 clients"),
        ("federated(clients=100000000)", "1 to 1,000,000 clients"),
        ("federated(fraction=0)", "above 0, at most 1"),
        ("federated(fraction=1.5)", "above 0, at most 1"),
        ("federated(epochs=0)", "one pass"),
        ("federated(batch=0)", "one example"),
        ("federated(batch=half)", "batch"),
        ("federated(over=0.5)", "from 1 to 10"),
        ("federated(deadline=0)", "longer than 0 s"),
        ("federated(fewest=0)", "one update"),
        ("federated(clients=10, fewest=2)", "fraction=0.1 selects 1"),
        ("federated(dropout=1)", "below 1"),
        ("federated(data=dirichlet(0))", "above 0"),
        ("federated(data=shards(0))", "one shard"),
        ("federated(data=quantity(-1))", "above 0"),
        ("federated(sampling=poisson, over=1.3)", "Poisson"),
        ("federated(clients=5, algorithm=fedbuff(6))", "buffer"),
        ("federated(algorithm=fedbuff(2), over=2)", "over cannot go with"),
        ("federated(algorithm=fedbuff(0))", "one update"),
        ("federated(algorithm=fedprox(0))", "more than 0"),
        ("federated(algorithm=fedavg(0))", "longer than 0"),
        ("federated(speeds=lognormal(-1))", "0 or more"),
        ("federated + local(4)", "train on their own"),
        ("federated + accumulate(2)", "train on their own"),
        ("federated + pipeline(2)", "the whole model"),
        ("federated + tensor(2)", "the whole model"),
        ("federated + server", "cannot be added"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    assert words in str(caught.value)


def test_a_budget_in_epochs_is_as_many_rounds_as_see_all_examples_so_often() -> None:
    assert federated("federated(fraction=0.1)").rounds(1) == 10
    assert federated("federated(fraction=0.1, epochs=5)").rounds(1) == 2
    assert federated("federated(fraction=1, epochs=5)").rounds(1) == 1
    assert federated("federated(fraction=0.3)").rounds(3) == 10


def test_several_hosts_are_refused_where_clients_keep_a_state_in_the_runs_folder() -> None:
    whole = combined(parse("federated(algorithm=scaffold)"))
    whole.check_hosts(1)
    with pytest.raises(StrategyError, match="which 2 hosts do not share"):
        whole.check_hosts(2)


@pytest.mark.parametrize("text", ["federated(algorithm=fedprox(0.1))", "federated(epochs=2)", "scaffold"])
def test_an_iterative_task_has_no_gradients_for_an_algorithm(text: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="statistics of all their data"):
        fit(Means(), text, steps=1, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_threads_than_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one thread"):
        fit(Owners(), "federated(clients=4)", steps=1, threads=2, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_sum_alone_is_itself() -> None:
    assert isinstance(combined(parse("federated")), Combined)
    assert str(combined(parse("federated"))) == "federated"


def test_a_report_says_what_clients_would_send_instead_of_what_workers_sent() -> None:
    counts = {"rounds": 3, "updates": 25, "late": 2, "dropped": 0, "refused": 1, "failed_rounds": 1, "clients": 20}
    result = Result("federated", 2, "mine", Path(), federated=counts | {"bytes_up": 1_500_000, "bytes_down": 3_000_000})
    lines = report_lines(result)
    assert not [line for line in lines if line.strip().startswith("sent ")]
    (sent,) = [line for line in lines if "clients would send" in line]
    assert "1.5 MB to the server and receive 3 MB" in sent.replace("3.0 MB", "3 MB")
    (updates,) = [line for line in lines if "clients' updates" in line]
    assert "25 counted, 2 late, 1 refused in 3 rounds of 20 clients; without an update: 1" in updates
