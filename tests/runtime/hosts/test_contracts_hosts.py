"""The contract is kept between hosts, too: four of them, each a network of its own with one worker."""

from __future__ import annotations

import pytest

from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.strategies import parse
from offbeat.testing import Check, bench, checks_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("networks")]

WORKERS = 4
DEMANDS = {
    "allreduce": (
        "a killed worker is named",
        "exact: workers equal one process",
        "deterministic: a resumed run",
    ),
    "ddp": ("exact: workers equal one process",),
    "server": (
        "a crash is named",
        "exact: workers equal one process",
    ),
}
"""What differs between hosts; the rest is seen on one by `test_contracts`, and all by `offbeat check --hosts`."""


@pytest.mark.parametrize(
    ("strategy", "check"),
    [
        pytest.param(strategy, check, id=f"{strategy}-{check.name.replace(' ', '_')}")
        for strategy, demands in DEMANDS.items()
        for check in checks_for(parse(strategy))
        if check.name.startswith(demands)
    ],
)
def test_the_contract_is_kept_between_four_hosts(strategy: str, check: Check, launcher: Launcher) -> None:
    with bench(parse(strategy), WORKERS, launcher, Hosts.alike(WORKERS, "1Gbit")) as place:
        check.run(place)


def test_every_chosen_check_exists() -> None:
    for strategy, demands in DEMANDS.items():
        names = [check.name for check in checks_for(parse(strategy))]
        assert all(any(name.startswith(demand) for name in names) for demand in demands)
