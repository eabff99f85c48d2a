"""Hogwild!: parameters that all workers of a host have, changed by each without locks and without waiting."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cli_support import write
from own_scripts.running import run_script
from safetensors.torch import load_file
from torch import nn

import offbeat
from offbeat.errors import StrategyError, WorkerError
from offbeat.monitor import recorded, staleness
from offbeat.monitor.history import history_of
from offbeat.run.drive import Result
from offbeat.runtime.events.recorder import Mark
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies import Hogwild, Traits, parse
from offbeat.strategies.hogwild import OPTIMIZERS
from offbeat.tasks.sparse import Sparse
from offbeat.testing import plain_loop
from offbeat.testing._tasks import CurveTask, fingerprint

SCRIPT = """
    import json, sys, time
    from pathlib import Path

    import torch
    from torch import nn
    from torch.optim import LBFGS, SGD, Rprop
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    import offbeat

    case, folder, facts = sys.argv[1], Path(sys.argv[2]), {}
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    y = torch.sin(x.sum(dim=1, keepdim=True))


    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(x, y))


    def until(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)


    def loader(batch):
        return DataLoader(TensorDataset(x, y), batch_size=batch)


    def plain(batch, rate):
        model = nn.Linear(3, 1)
        return model, SGD(model.parameters(), lr=rate, momentum=0.9), loader(batch)


    def gradients(model, optimizer, batch):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()


    def in_turn(team, step):
        for rank in range(team.size):
            team.group.barrier()
            if rank == team.rank:
                step()
        team.group.barrier()


    def one_batch_after_the_other(team, batch=5):
        model, optimizer, batches = team.prepare(*plain(batch, 0.1))
        facts["rates"] = []
        for batch in batches:
            team.group.barrier()
            gradients(model, optimizer, batch)
            in_turn(team, optimizer.step)
            facts["rates"].append(optimizer.param_groups[0]["lr"])
        facts["weights"] = [p.detach().flatten().tolist() for p in model.parameters()]
        facts["examples"] = len(batch[0])


    def one_example_after_the_other(team):
        one_batch_after_the_other(team, batch=1)


    def nobody_waits(team, batches=None, split=True):
        model, optimizer, own = plain(4, 0.1)
        model, optimizer, batches = team.prepare(model, optimizer, own if batches is None else batches, split=split)
        for number, batch in enumerate(batches):
            if team.rank == 0:
                until((folder / "second-has-begun").exists)
            elif number == 0:
                before = model.weight.detach().clone()
                (folder / "second-has-begun").touch()
                until((folder / "first-is-done").exists)
                facts["moved"] = bool((model.weight != before).any())
            gradients(model, optimizer, batch)
            optimizer.step()
        facts["steps"] = team.step
        if team.rank == 0:
            (folder / "first-is-done").touch()
        team.report(done=1.0)


    def nobody_waits_for_a_stream(team):
        nobody_waits(team, DataLoader(Stream(), batch_size=4))


    def nobody_waits_for_parts_of_different_lengths(team):
        nobody_waits(team, [(x[:2], y[:2])] * (3 + 2 * team.rank), split=False)


    def evaluations_are_quiet(team):
        model, optimizer, batches = team.prepare(*plain(4, 0.1))
        facts["seen"] = []
        for epoch in range(2):
            for batch in batches:
                gradients(model, optimizer, batch)
                time.sleep(0.02 * team.rank)
                optimizer.step()
            with team.averaged(model):
                for _ in range(3):
                    facts["seen"].append(model.weight.tolist())
                    time.sleep(0.01)
            team.report(done=1.0)


    def rows_of_a_table(team):
        table = nn.Embedding(1000, 4, sparse=True)
        optimizer = SGD(table.parameters(), lr=1.0)
        rows = torch.arange(8)
        table, optimizer, batches = team.prepare(table, optimizer, DataLoader(TensorDataset(rows), batch_size=4))
        with torch.no_grad():
            before = table.weight.clone()
        team.group.barrier()
        for [batch] in batches:
            optimizer.zero_grad()
            table(batch).sum().backward()
            facts["sparse"] = table.weight.grad.is_sparse
            in_turn(team, optimizer.step)
        facts["changed"] = (table.weight != before).any(dim=1).nonzero().flatten().tolist()
        facts["bytes"] = team.exchange.payload()


    def whole_parameters(team):
        model = nn.Linear(3, 1)
        team.prepare(model, LBFGS(model.parameters()))


    def steps_of_its_own(team):
        model = nn.Linear(3, 1)
        team.prepare(model, Rprop(model.parameters()))


    def a_closure(team):
        model, optimizer, batches = team.prepare(*plain(4, 0.1))
        for batch in batches:
            optimizer.step(lambda: gradients(model, optimizer, batch))


    with offbeat.init() as team:
        globals()[case](team)
    (folder / f"facts-{team.rank}.json").write_text(json.dumps(facts))
"""


def run(launcher: Launcher, folder: Path, case: str, workers: int = 2, **goal: Any) -> tuple[list[Any], Result]:
    """What each worker found out, and the result of the run."""
    script = write(folder / "script.py", SCRIPT)
    goal = {"strategy": "hogwild", "timeout": 60.0, **goal}
    result = run_script(launcher, folder, str(script), case, folder, workers=workers, **goal)
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(workers)], result


def trained_alone(batch: int) -> list[list[float]]:
    """What plain PyTorch makes of the script's data in one pass."""
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    y = torch.sin(x.sum(dim=1, keepdim=True))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, target in zip(x.split(batch), y.split(batch), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


# -- how far steps move ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_worker_is_the_plain_loop_to_the_bit(launcher: Launcher, tmp_path: Path) -> None:
    for strategy in ("hogwild", "single"):
        (tmp_path / strategy).mkdir()
    fits = [
        offbeat.fit(
            CurveTask(str(tmp_path / s), batch=37), s, workers=1, epochs=5, out=tmp_path / "runs", launcher=launcher
        )
        for s in ("hogwild", "single")
    ]
    ours, theirs = (load_file(result.run / MODEL_FILE) for result in fits)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    expected = plain_loop(5, 37)
    assert all(torch.allclose(ours[name], expected[name], atol=1e-6) for name in expected)
    assert (fits[0].staleness, fits[0].bytes_sent) == ({"0": 5}, 0)


@pytest.mark.slow
def test_the_steps_of_all_workers_on_a_batch_move_as_far_as_one_step_on_the_whole(
    launcher: Launcher, tmp_path: Path
) -> None:
    facts, _ = run(launcher, tmp_path, "one_batch_after_the_other")
    assert [fact["examples"] for fact in facts] == [2, 3]
    assert facts[0]["weights"] == facts[1]["weights"]
    for found, expected in zip(facts[0]["weights"], trained_alone(5), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    assert facts[0]["rates"] == [0.1] * 4, "schedulers see the whole rate"


@pytest.mark.slow
def test_a_worker_without_examples_changes_nothing(launcher: Launcher, tmp_path: Path) -> None:
    facts, result = run(launcher, tmp_path, "one_example_after_the_other")
    for found, expected in zip(facts[0]["weights"], trained_alone(1), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    assert sum(result.staleness.values()) == 20, "updates by the one worker that had an example"


@pytest.mark.slow
def test_sparse_gradients_change_only_the_rows_that_they_name(launcher: Launcher, tmp_path: Path) -> None:
    facts, _ = run(launcher, tmp_path, "rows_of_a_table")
    for fact in facts:
        assert fact["sparse"]
        assert fact["changed"] == list(range(8))
        assert fact["bytes"] == 4 * 4 * 4, "four rows of four floats, not the table"


# -- nobody waits ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("nobody_waits", [5, 5]),
        ("nobody_waits_for_a_stream", [5, 5]),
        ("nobody_waits_for_parts_of_different_lengths", [3, 5]),
    ],
)
def test_a_worker_goes_through_all_of_its_data_while_another_stands_still(
    launcher: Launcher, tmp_path: Path, case: str, steps: list[int]
) -> None:
    facts, result = run(launcher, tmp_path, case)
    assert [fact["steps"] for fact in facts] == steps
    assert facts[1]["moved"], "the updates of others are there at once"
    # Worker 1 had begun its first step before worker 0 did all of its own.
    assert result.staleness == {"0": sum(steps) - 1, str(steps[0]): 1}
    assert result.samples == (16 if "different" in case else 20)


@pytest.mark.slow
def test_nobody_steps_during_an_evaluation(launcher: Launcher, tmp_path: Path) -> None:
    facts, _ = run(launcher, tmp_path, "evaluations_are_quiet")
    first, second = facts[0]["seen"][:3], facts[0]["seen"][3:]
    assert facts[0]["seen"] == facts[1]["seen"]
    assert first == [first[0]] * 3
    assert second == [second[0]] * 3
    assert first[0] != second[0]


# -- in a run --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sparse_logistic_regression_is_learned(launcher: Launcher, tmp_path: Path) -> None:
    result = offbeat.fit(Sparse(), "hogwild", workers=2, out=tmp_path, launcher=launcher)
    assert result.reached_target
    assert sum(result.staleness.values()) == 2 * result.steps
    dense = 2 * result.steps * 4000 * 4
    assert 0 < result.bytes_sent < dense / 2


@pytest.mark.slow
def test_updates_of_accumulated_batches_are_counted_once(launcher: Launcher, tmp_path: Path) -> None:
    task = CurveTask(str(tmp_path), examples=32)
    options: Any = {"workers": 2, "epochs": 3, "out": tmp_path / "runs", "launcher": launcher, "watch": True}
    result = offbeat.fit(task, "hogwild + accumulate(2)", **options)
    assert (result.steps, result.samples) == (6, 96)
    assert sum(result.staleness.values()) == 12
    events = recorded(Path(result.run))
    told = staleness(events.stamps)
    assert [one.worker for one in told] == ["worker 0", "worker 1"]
    read = Counter({str(age): 0 for age in result.staleness})
    for one in told:
        read.update({str(age): count for age, count in one.reads.items()})
    assert dict(read) == result.staleness
    steps = [stamp.step for stamp in events.stamps[0] if stamp.mark is Mark.READ]
    assert steps == [2, 4, 6, 8, 10, 12]  # Calls of optimizer.step are counted, those that are held, too.
    assert history_of(events.stamps).size == 2


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 2, "out": tmp_path / "runs", "launcher": launcher}
    task = CurveTask(str(tmp_path), examples=32)
    cut = offbeat.fit(task, "hogwild", steps=30, **options)
    shutil.copy(cut.run / MODEL_FILE, tmp_path)
    again = offbeat.fit(task, "hogwild", steps=60, resume=cut.run, **options)
    assert again.steps == 60
    assert sum(again.staleness.values()) == 120
    model = task.model()
    model.load_state_dict(load_file(tmp_path / MODEL_FILE))
    first_seen = [(tmp_path / f"replica-{rank}").read_text().split()[30] for rank in range(2)]
    assert fingerprint(model) in first_seen, "whoever was first went on from the bits that were there"


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("whole_parameters", "hogwild cannot be used with LBFGS"),
        ("steps_of_its_own", "hogwild cannot be used with Rprop"),
        ("a_closure", r"hogwild cannot be used with optimizer.step\(closure\)"),
    ],
)
def test_what_cannot_be_done_number_by_number_is_refused(
    launcher: Launcher, tmp_path: Path, case: str, words: str
) -> None:
    with pytest.raises((StrategyError, WorkerError), match=words):
        run(launcher, tmp_path, case)


def test_workers_that_share_no_memory_are_refused() -> None:
    apart: Any = SimpleNamespace(size=2, rank=0, direct=SimpleNamespace(shares_memory=False))
    with pytest.raises(StrategyError, match="share memory: on one host, on CPUs"):
        Hogwild().connect(apart, Stopwatch())
    alone: Any = SimpleNamespace(size=1, rank=0)
    Hogwild().connect(alone, Stopwatch())


def test_it_promises_nothing_that_several_unlocked_workers_cannot_keep() -> None:
    traits = parse("hogwild").traits
    assert traits == Traits()


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_steps_of_every_optimizer_that_is_taken_follow_its_learning_rate(kind: Any) -> None:
    """A smaller rate makes steps smaller by the same factor, so that weighing the rate weighs the step."""
    moved: list[torch.Tensor] = []
    for factor in (1.0, 0.5):
        weight = nn.Parameter(torch.tensor([[1.0], [-2.0], [0.5]]))
        optimizer = cast("Any", kind)([weight], lr=1e-3 * factor)
        for _ in range(8):  # The first steps of RAdam are plain ones.
            gradient = torch.tensor([[0.3], [0.1], [-0.2]])
            weight.grad = gradient.to_sparse(1) if kind is torch.optim.SparseAdam else gradient
            optimizer.step()
        moved.append(weight.detach() - torch.tensor([[1.0], [-2.0], [0.5]]))
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-2, atol=1e-6)
