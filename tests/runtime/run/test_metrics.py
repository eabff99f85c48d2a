"""Metrics that all workers agree on, also while some of them die."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from offbeat import init
from offbeat.errors import WaitError
from offbeat.runtime.launch import Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.metrics import Reports
from offbeat.runtime.run.settings import ASSIGNED, Assignment, Goal


def alone(config: Mapping[str, Any], control: Any) -> None:
    """A worker of two, of which the first reports and the second saves."""
    del config
    ASSIGNED.set(Assignment(goal=Goal(strategy="allreduce")))
    model = torch.nn.Linear(2, 1)
    try:
        with init() as team:
            team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            team.report(loss=1.0) if team.rank == 0 else team.checkpoint()
    except WaitError as error:
        control.send({"rank": team.rank, "said": str(error)})


def test_a_report_of_one_worker_alone_is_explained_in_the_users_words(launcher: Launcher, tmp_path: Path) -> None:
    store, said = serve_store(), dict[int, str]()
    roles = [
        Role("worker", rank, f"{__name__}:alone", {}, worker_environment(rank, 2, store.port), tmp_path / f"{rank}", 1)
        for rank in range(2)
    ]
    launcher.run(roles, on_message=lambda _role, message: said.update({message["rank"]: message["said"]}))
    assert any("worker 0 in a report" in one and "writing a checkpoint" in one for one in said.values()), said
    assert all("float64" not in one for one in said.values()), said


class Dwindling:
    """Three equal workers of which one more dies before every exchange; `evaluated` is what each brings as weight."""

    rank = 0

    def __init__(self, evaluated: Sequence[float], values: Sequence[float]) -> None:
        self._others = list(zip(evaluated, values, strict=True))
        self._first = True

    def gather(self, row: Sequence[float], what: str) -> Tensor:
        del what
        mine = torch.tensor([row], dtype=torch.float64)
        if self._first:  # Names and evidence, which are the same on all.
            self._first = False
            return mine.repeat(1 + len(self._others), 1)
        self._others.pop()
        return torch.cat([mine, *(torch.tensor([pair], dtype=torch.float64) for pair in self._others)])


@pytest.mark.parametrize(("own_weight", "mean"), [(30, (30 * 0.5 + 10 * 0.9) / 40), (0, 0.9)])
def test_a_worker_that_dies_within_a_report_counts_with_neither_weight_nor_value(own_weight: int, mean: float) -> None:
    reports = Reports(cast("Any", Dwindling([10, 50], [0.9, 0.1])), *cast("Any", (None, None, None)))
    reports.evaluated = own_weight
    assert reports.mean({"score": 0.5}) == pytest.approx({"score": mean})
