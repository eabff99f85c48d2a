"""Updates of tasks without gradients as programs: the numbers of Python's, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import parameters
from torch import Tensor

from offbeat.errors import TaskError
from offbeat.run.drive import fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.programs.task_update import programmed_update
from offbeat.tasks.mixture import Mixture


class ProgrammedMixture(Mixture):
    """Expectation-maximization whose M step is three programs; what is counted per component is a column."""

    def statistics(self, params: Mapping[str, Tensor], batch: Any) -> Mapping[str, Tensor]:
        sums = super().statistics(params, batch)
        return {"count": sums["count"].unsqueeze(1), "total": sums["sum"], "square": sums["square"]}

    update = programmed_update(
        weight=r"\count. count / sum count",
        mean=r"\mean_ total count. where (count < 2.3e-308) mean_ (total / count)",
        variance=r"""\variance total square count.
            let middle = total / count in
            max (where (count < 2.3e-308) variance (square / count - middle * middle)) 1e-3""",
    )


def learned(task: Mixture, steps: int = 12) -> Mapping[str, Tensor]:
    (values,) = task.data().train.tensors  # type: ignore[union-attr]
    params = task.initial()
    for _ in range(steps):
        params = task.update(params, task.statistics(params, (values,)))
    return params


def test_a_mixture_of_gaussians_learns_the_same_by_programs() -> None:
    ours, pythons = learned(ProgrammedMixture()), learned(Mixture())
    for name, value in pythons.items():
        assert ours[name].shape == value.shape
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "server(shards=2)"])
def test_a_run_updates_by_programs_on_every_worker(strategy: str, launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"launcher": launcher, "out": tmp_path, "steps": 5, "target": 1e9}
    ours = fit(ProgrammedMixture(examples=400), strategy, workers=2, **options)
    pythons = fit(Mixture(examples=400), strategy, workers=2, **options)
    for name, value in parameters(pythons).items():
        torch.testing.assert_close(parameters(ours)[name], value, rtol=1e-9, atol=1e-9)


VALUES = {"mean": torch.ones(3, 2, dtype=torch.float64), "scale": torch.tensor(2.0)}
SUMS = {
    "total": torch.full((3, 2), 6.0, dtype=torch.float64),
    "count": torch.tensor([[1], [2], [3]]),
    "row": torch.ones(3),
}


def after(**programs: str) -> Mapping[str, Tensor]:
    return programmed_update(**programs)(None, VALUES, SUMS)


def test_what_a_program_takes_is_broadcast_and_a_parameter_without_a_program_stays() -> None:
    new = after(mean=r"\total count scale. scale * total / count")
    assert new["mean"].tolist() == [[12.0, 12.0], [6.0, 6.0], [4.0, 4.0]]
    assert new["scale"] is VALUES["scale"]
    assert after(mean=r"\mean_. mean_ + 1")["mean"].tolist() == [[2.0, 2.0]] * 3


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ({}, "no program"),
        ({"mean": r"\mean_. mean_ +"}, "'mean' is refused: line 1, column 16"),
        ({"mean": "3"}, "not a function of parameters and statistics"),
        ({"mean": r"\mean_. sum mean_"}, "is of type scalar"),
        ({"mean": r"\mean_. lr * mean_"}, "'lr', which only servers have"),
        ({"mean": r"\mean_. rate * mean_"}, "'rate' is not defined"),
        ({"mean": r"\mean_ counts. mean_"}, "'counts', which is neither a parameter nor a statistic .*'count'"),
        ({"means": r"\mean_ count. mean_"}, "'means', which is not a parameter.*'mean'"),
        ({"mean": r"\mean_ row. mean_ * row"}, "must match the size"),
        ({"scale": r"\row. row"}, r"result of shape \(3,\), and the parameter has the shape \(\)"),
        ({"mean": r"\mean_ count. mean_ / (count - 1)"}, "'mean' has no finite result"),
    ],
)
def test_a_program_that_does_not_fit_is_refused_with_the_reason(programs: dict[str, str], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        after(**programs)
