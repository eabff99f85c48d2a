"""Every exchange there is keeps the contract of its traits, on real processes."""

from __future__ import annotations

import pytest

from offbeat.runtime.launch import Launcher
from offbeat.strategies import Axis, available, parse
from offbeat.testing import Check, bench, checks_for

pytestmark = pytest.mark.slow

EXCHANGES = [name for name, cls in available().items() if cls.axis is Axis.EXCHANGE]
WORLDS = [
    *((name, 1 if name == "single" else 2) for name in EXCHANGES),
    ("allreduce + accumulate(3)", 2),
    ("ddp + accumulate(3)", 2),
    ("allreduce", 3),
    ("allreduce(shard=optimizer)", 2),
    ("allreduce(shard=optimizer)", 3),
    ("allreduce(gloo)", 2),
    ("allreduce(ring)", 3),
    ("allreduce(auto)", 2),
    ("hogwild", 3),
    ("hogwild + accumulate(3)", 2),
]


@pytest.mark.parametrize(
    ("strategy", "workers", "check"),
    [
        pytest.param(text, workers, check, id=f"{text.replace(' ', '')}-{workers}-{check.name.replace(' ', '_')}")
        for text, workers in WORLDS
        for check in checks_for(parse(text))
        # A real command costs seconds, and how it ends is the exchange's business: once for each is enough.
        if not check.name.startswith("Ctrl-C") or (text, workers) in WORLDS[: len(EXCHANGES)]
    ],
)
def test_the_contract_is_kept(strategy: str, workers: int, check: Check, launcher: Launcher) -> None:
    with bench(parse(strategy), workers, launcher) as place:
        check.run(place)


def test_all_built_in_exchanges_promise_all_that_can_be_checked() -> None:
    for text, _ in WORLDS:
        measures = "auto" in text  # What is fastest may be another algorithm in the next run, with other bits.
        unlocked = "hogwild" in text  # Who comes first is chance.
        assert len(checks_for(parse(text))) == (8 if unlocked else 12 if measures else 14)
