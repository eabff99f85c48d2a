"""Split models over hosts: stages on different hosts, ways inside one, with the same scores as on one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.run.drive import Result
from offbeat.runtime.hosts import Host, Hosts
from offbeat.runtime.launch import Launcher

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "hosts"),
    [
        ("pipeline(2)", Hosts((Host("a", 1, rate="1Gbit"), Host("b", 1)))),
        ("allreduce + tensor(2)", Hosts((Host("a", 2, rate="1Gbit"), Host("b", 2)))),
    ],
)
def test_split_models_learn_the_same_over_hosts(
    networks: None, launcher: Launcher, tmp_path: Path, strategy: str, hosts: Hosts
) -> None:
    def learned(name: str, **where: Any) -> Result:
        more: dict[str, Any] = {"steps": 4, "seed": 3, "threads": 1, "out": tmp_path / name, "launcher": launcher}
        return offbeat.fit("offbeat.tasks.text", strategy, **more, **where)

    here, apart = learned("here", workers=hosts.workers), learned("apart", hosts=hosts)
    assert here.score is not None
    assert apart.score == pytest.approx(here.score, rel=1e-4)
    assert apart.bytes_sent > 0
    if strategy.startswith("pipeline"):
        prediction = apart.predicted
        # Over a link of 1 Gbit/s, which is known, with the latency that was measured.
        assert prediction["bytes_per_second"] == pytest.approx(125e6)
        assert 1e-6 < prediction["latency_seconds"] < 1
