"""Runs of sandblaster on real processes: torch's iterates, dead workers, failing portions, the coordinator's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sandblaster_tasks import Exact, Wide

from offbeat.errors import RunError, StrategyError, WorkerError
from offbeat.run.drive import drive, fit
from offbeat.run.job import Job, target_of
from offbeat.runtime.hosts import Host, Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.runtime.run.report import sandblaster_in_words
from offbeat.runtime.run.result import Result
from offbeat.runtime.run.settings import Goal
from offbeat.simulate.sandblaster.iterations import IterationSetting, PlayedIterations
from offbeat.strategies import parse
from offbeat.tasks.logistic import Logistic
from offbeat.tasks.mixture import Mixture

pytestmark = pytest.mark.slow
STRATEGY = "sandblaster(shards=2, portions=12)"
SUPPORT = Path(__file__).parents[1] / "support"


def weights(result: Result) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in load_file(result.run / MODEL_FILE).values()])


def by_torch(task: Exact, iterations: int) -> torch.Tensor:
    model, (batch,) = task.model(), [task.data().train.tensors]
    solver = torch.optim.LBFGS(
        model.parameters(), max_iter=iterations, max_eval=1000, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        return loss

    solver.step(closure)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize(("workers", "steps"), [(1, 3), (2, 20)])
def test_iterates_are_those_of_torch(workers: int, steps: int, tmp_path: Path, launcher: Launcher) -> None:
    result = fit(Exact(), STRATEGY, workers=workers, steps=steps, out=tmp_path, launcher=launcher)
    figures = result.sandblaster
    assert figures["iterations"] == steps or figures["stopped"]
    assert (weights(result) - by_torch(Exact(), figures["iterations"])).abs().max() < 1e-6
    assert sum(figures["portions"].values()) >= 12 * figures["evaluations"]
    assert result.bytes_sent > 0


def test_iterates_are_the_same_over_hosts(networks: None, tmp_path: Path, launcher: Launcher) -> None:
    hosts = Hosts((Host("a", 1, rate="1Gbit"), Host("b", 1)))
    strategy = "sandblaster(shards=2, replicas=1, portions=12)"  # Copies of a shard are on different hosts.
    apart = fit(Exact(), strategy, hosts=hosts, steps=8, threads=1, out=tmp_path / "apart", launcher=launcher)
    here = fit(Exact(), strategy, workers=2, steps=8, threads=1, out=tmp_path / "here", launcher=launcher)
    assert torch.equal(weights(apart), weights(here))
    assert apart.sandblaster["evaluations"] == here.sandblaster["evaluations"]
    assert set(apart.sandblaster["portions"]) == {"worker 0", "worker 1"}


def test_a_dead_workers_portions_are_handed_out_again(tmp_path: Path, launcher: Launcher) -> None:
    disturbed: dict[str, Any] = {"fault": "kill", "folder": str(tmp_path)}
    result = fit(Exact(**disturbed), STRATEGY, workers=2, steps=8, out=tmp_path / "runs", launcher=launcher)
    assert (tmp_path / "died").exists()
    assert result.steps == 8
    undisturbed = fit(Exact(), STRATEGY, workers=2, steps=8, out=tmp_path / "runs", launcher=launcher)
    assert torch.equal(weights(result), weights(undisturbed))


def test_a_portion_that_always_fails_ends_the_run_with_its_traceback(tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(WorkerError, match="this portion always fails") as caught:
        fit(Exact(fault="raise"), STRATEGY, workers=2, steps=8, out=tmp_path, launcher=launcher)
    assert "sandblaster_tasks.py" in caught.value.remote_traceback


def test_bytes_do_not_depend_on_the_size_of_the_model_and_are_those_of_the_simulated_machines(
    tmp_path: Path, launcher: Launcher
) -> None:
    for features in (100, 100_000):
        task = Exact(examples=24, features=features)
        result = fit(task, STRATEGY, workers=2, steps=6, out=tmp_path, launcher=launcher)
        figures = result.sandblaster
        traffic = sum(figures["coordinator_bytes"].values())
        assert traffic / figures["iterations"] < 20_000
        assert predicted_bytes(figures, features) == pytest.approx(traffic, rel=0.05)
        # A gradient for each portion, not for all that two workers had; and the first parameters.
        least, most = (count + 1 for count in (12 * figures["evaluations"], sum(figures["portions"].values())))
        assert 8 * features * least <= result.bytes_sent <= 8 * features * most + 20_000


def predicted_bytes(figures: dict[str, Any], features: int) -> float:
    """What simulated machines send to and from the coordinator in as many iterations, evaluations and portions."""

    def played(trials: int) -> PlayedIterations:
        setting = IterationSetting(2, 2, 12, 10, 8 * features, [1.0, 1.0], trials)
        return PlayedIterations(setting, figures["iterations"])

    def traffic(run: PlayedIterations) -> int:
        rows = [row for number in range(1, figures["iterations"] + 1) for row in run.cost(number)]
        return sum(row.headers for row in rows if "coordinator" in (row.sender, row.receiver))

    once, twice = played(1), played(2)
    evaluation = (traffic(twice) - traffic(once)) / figures["iterations"]
    return traffic(once) + (figures["evaluations"] - figures["iterations"] - 1) * evaluation


def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path, launcher: Launcher) -> None:
    first = fit(Exact(), STRATEGY, workers=2, steps=4, out=tmp_path, launcher=launcher)
    second = fit(Exact(), resume=first.run, steps=9, launcher=launcher)
    through = fit(Exact(), STRATEGY, workers=1, steps=9, out=tmp_path, launcher=launcher)
    assert torch.equal(weights(second), weights(through))
    names = ("iterations", "evaluations", "gradient")
    assert [second.sandblaster[name] for name in names] == [through.sandblaster[name] for name in names]
    assert second.samples == through.samples


def test_a_run_whose_only_copy_of_a_shard_has_died_names_it_and_is_resumed_to_the_same_bits(
    tmp_path: Path, launcher: Launcher
) -> None:
    options: dict[str, Any] = {"workers": 2, "steps": 6, "out": tmp_path, "launcher": launcher}
    with pytest.raises(RunError, match="shard 1 is lost"):
        fit(Exact(), STRATEGY, checkpoint_every=1, disturb="server 1: kill at step 3", **options)
    (run,) = (path for path in tmp_path.iterdir() if path.name != "latest")
    resumed = fit(Exact(), resume=run, launcher=launcher)
    assert resumed.steps == 6
    assert torch.equal(weights(resumed), weights(fit(Exact(), STRATEGY, **options)))


def test_it_reaches_the_optimum_of_the_bundled_task(tmp_path: Path, launcher: Launcher) -> None:
    result = fit(Logistic(), "sandblaster", workers=2, target=-1e-3, out=tmp_path, launcher=launcher)
    assert result.reached_target
    words = dict(sandblaster_in_words(result))
    assert f"{result.sandblaster['portions']['worker 1']} by worker 1" in words["portions"]
    assert "by workers to shards" in words["sent"]
    assert "to and from the coordinator" in words["sent"]
    assert words["iterations"].startswith(f"{result.steps}, with")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Wide(layer="dropout"), "is random"),
        (Wide(layer="norm"), "which examples are in a batch together"),
        (Exact(features=1), "cannot be spread over 2 shards"),
        (Exact(fault="noise"), "Exact computed the loss .* So the loss is random"),
        (Mixture(), "instead of a gradient"),
    ],
)
def test_what_a_line_search_cannot_follow_is_refused(task: Any, words: str, tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(StrategyError, match=words):
        fit(task, STRATEGY, workers=1, steps=2, out=tmp_path, launcher=launcher)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sandblaster(shards=0)", "1 to 256 shards"),
        ("sandblaster(history=0)", "1 to 100 steps"),
        ("sandblaster(portions=0)", "1 to 100,000 portions"),
        ("sandblaster(tolerance=-1)", "not negative"),
        ("sandblaster(line_search=armijo)", "strong_wolfe"),
        ("sandblaster + topk(0.1)", "slopes that compressed gradients would make wrong"),
        ("sandblaster + local(4)", "on all training data"),
        ("sandblaster + pipeline(2)", "the whole model"),
    ],
)
def test_what_makes_no_sense_is_refused_as_text(text: str, words: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    assert words in str(caught.value)


LOOP = """
import sys
import offbeat, torch
from sandblaster_tasks import Exact

task = Exact()
model, train = task.model(), task.data().train
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=10, line_search_fn="strong_wolfe")
loader = torch.utils.data.DataLoader(train, batch_size=16, shuffle=True)
with offbeat.init() as team:
    model, optimizer, loader = team.prepare(model, optimizer, loader)

    def closure():
        optimizer.zero_grad()
        total = 0.0
        for batch in loader:
            loss = task.loss(model, batch) * len(batch[0]) / len(train)
            loss.backward()
            total += loss.item()
        return total

    for _ in team.epochs(6):
        optimizer.step(closure)
        if team.report(score=-float(task._objective(model, *train.tensors))):
            break
    if team.rank == 0:
        torch.save(model.weight.detach(), sys.argv[1])
"""


def test_a_loop_of_ones_own_makes_the_steps_that_it_makes_alone(tmp_path: Path, launcher: Launcher) -> None:
    script = tmp_path / "loop.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(SUPPORT)!r})\n{LOOP}")

    def run(strategy: str | None, workers: int, name: str, steps: int, resume: Path | None = None) -> Result:
        what = target_of(script, [str(tmp_path / name)])
        goal = Goal(strategy=strategy, steps=steps, seed=1)
        return drive(Job(what, goal, workers, out=tmp_path / "runs", resume=resume), launcher=launcher)

    run(None, 1, "alone.pt", 6)
    figures = run("sandblaster(shards=2, portions=6)", 2, "two.pt", 6).sandblaster
    alone, two = (torch.load(tmp_path / name) for name in ("alone.pt", "two.pt"))
    assert (alone - two).abs().max() < 1e-6
    assert figures["iterations"] > 6
    assert sum(figures["portions"].values()) >= 6 * figures["evaluations"]
    first = run("sandblaster(shards=2, portions=6)", 2, "first.pt", 2)
    second = run("sandblaster(shards=2, portions=6)", 2, "first.pt", 6, first.run)
    assert second.steps == 6
    assert second.score is not None
    assert first.score is not None
    assert second.score > first.score  # It went on from the parameters; the history began anew.


def test_replacements_are_refused(tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(StrategyError, match="--replace"):
        fit(Exact(), STRATEGY, workers=2, steps=2, replace=1, out=tmp_path, launcher=launcher)
