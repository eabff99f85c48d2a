"""Strategies on parameter servers: Downpour, elastic averaging, gradient coding."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import write
from numpy.typing import NDArray
from own_scripts.running import run_script
from safetensors.torch import load_file
from torch import nn

import offbeat
from offbeat.errors import RunError, StrategyError, WorkerError
from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Push, PushRefused
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import AccumulateGradient, Discard, EntryOutcome, Update
from offbeat.run.drive import Result
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies import Coded, Downpour, Elastic, Traits, parse
from offbeat.strategies.elastic import MOVING_RATE
from offbeat.tasks.digits import Digits
from offbeat.testing import plain_loop
from offbeat.testing._tasks import CurveTask

EXAMPLES, BATCH, RATE, MOMENTUM = 24, 4, 0.1, 0.9

SCRIPT = """
    import json, sys, time
    from pathlib import Path

    import torch
    from torch import nn
    from torch.optim import SGD
    from torch.utils.data import DataLoader, TensorDataset

    import offbeat

    case, folder, facts = sys.argv[1], Path(sys.argv[2]), {}
    torch.manual_seed(0)
    x = torch.randn(24, 3)
    y = torch.sin(x.sum(dim=1, keepdim=True))


    def until(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)


    def plain(batch=4, rate=0.1):
        model = nn.Linear(3, 1)
        return model, SGD(model.parameters(), lr=rate, momentum=0.9), DataLoader(TensorDataset(x, y), batch_size=batch)


    def numbers(model):
        return [number for p in model.parameters() for number in p.detach().flatten().tolist()]


    def gradients(model, optimizer, batch):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()


    def steps(team, halved=None, looks=True):
        model, optimizer, batches = team.prepare(*plain())
        facts.update(own=[], servers=[], afterwards=[])
        for number, batch in enumerate(batches):
            if number == halved:
                optimizer.param_groups[0]["lr"] /= 2
            facts["own"].append(numbers(model))
            gradients(model, optimizer, batch)
            optimizer.step()
            if looks:
                with team.averaged(model):
                    facts["servers"].append(numbers(model))
                facts["afterwards"].append(numbers(model))


    def a_rate_that_changes(team):
        steps(team, halved=3)


    def unwatched_steps(team):
        steps(team, looks=False)


    def nobody_waits(team):
        model, optimizer, batches = team.prepare(*plain())
        for number, batch in enumerate(batches):
            if team.rank == 0:
                until((folder / "second-has-begun").exists)
            elif number == 0:
                (folder / "second-has-begun").touch()
                until((folder / "first-is-done").exists)
            gradients(model, optimizer, batch)
            optimizer.step()
        facts["steps"] = team.step
        if team.rank == 0:
            (folder / "first-is-done").touch()
        team.report(done=1.0)


    def springs_alone(team):
        # Nothing is learned, but the workers begin apart from each other.
        model, optimizer, batches = team.prepare(*plain(rate=0.0))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(10.0 * (team.rank + 1))
        for batch in batches:
            gradients(model, optimizer, batch)
            optimizer.step()
        facts["own"] = numbers(model)
        with team.averaged(model):
            facts["servers"] = numbers(model)


    def a_closure(team):
        model, optimizer, batches = team.prepare(*plain())
        for batch in batches:
            optimizer.step(lambda: gradients(model, optimizer, batch))


    def a_group_that_comes_later(team):
        model, _, batches = plain()
        model, optimizer, batches = team.prepare(model, SGD([model.weight], lr=0.1), batches)
        optimizer.add_param_group({"params": [model.bias]})
        for batch in batches:
            gradients(model, optimizer, batch)
            optimizer.step()


    def a_loader_of_its_own(team):
        team.prepare(*plain(), split=False)


    with offbeat.init() as team:
        globals()[case](team)
    (folder / f"facts-{team.rank}.json").write_text(json.dumps(facts))
"""

Row = NDArray[np.float64]


def run(launcher: Launcher, folder: Path, case: str, strategy: str, workers: int) -> tuple[list[Any], Result]:
    """What each worker found out, and the result of the run."""
    script = write(folder / "script.py", SCRIPT)
    goal: dict[str, Any] = {"strategy": strategy, "timeout": 60.0}
    result = run_script(launcher, folder, str(script), case, folder, workers=workers, **goal)
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(workers)], result


class Regression:
    """The script's model, data and gradients, in numpy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(EXAMPLES, 3)
        self.inputs = np.c_[x.double().numpy(), np.ones(EXAMPLES)]
        self.targets = torch.sin(x.sum(dim=1)).double().numpy()
        self.start: Row = torch.cat([p.detach().flatten() for p in nn.Linear(3, 1).parameters()]).double().numpy()
        self.batches = EXAMPLES // BATCH

    def gradient(self, weights: Row, batch: int, rank: int = 0, workers: int = 1) -> Row:
        """On a worker's slice of a batch."""
        size = BATCH // workers
        rows = slice(batch * BATCH + rank * size, batch * BATCH + (rank + 1) * size)
        x, y = self.inputs[rows], self.targets[rows]
        return 2 * x.T @ (x @ weights - y) / size


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-6)


# -- downpour --------------------------------------------------------------------------------------------------------


def rained(
    push: int, fetch: int, rates: list[float], share: float = 1.0, gradient: Any = None
) -> tuple[list[Row], list[Row]]:
    """The algorithm of the paper's appendix for one worker: what it has before each step, and servers after it."""
    task = Regression()
    gradient = gradient or task.gradient
    servers, own = task.start.copy(), task.start.copy()
    squares, velocity, accrued = (np.zeros_like(own) for _ in range(3))
    seen: list[Row] = []
    kept: list[Row] = []
    for step, rate in enumerate(rates, 1):
        seen.append(own.copy())
        g = gradient(own, step - 1)
        accrued = accrued + g
        velocity = MOMENTUM * velocity + g
        own = own - rate * velocity
        if step % push == 0:
            squares = squares + accrued**2
            servers = servers - rate * share * accrued / (np.sqrt(squares) + 1e-10)
            accrued = np.zeros_like(own)
        if step % fetch == 0:
            own = servers.copy()
        kept.append(servers.copy())
    return [*seen, own], kept


@pytest.mark.slow
def test_downpour_with_one_worker_is_plain_adagrad_whatever_its_own_optimizer_is(
    launcher: Launcher, tmp_path: Path
) -> None:
    [facts], _ = run(launcher, tmp_path, "steps", "downpour", 1)
    torch.manual_seed(0)
    x = torch.randn(EXAMPLES, 3)
    y = torch.sin(x.sum(dim=1, keepdim=True))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    plain = []
    for inputs, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
        plain.append([n for p in model.parameters() for n in p.detach().flatten().tolist()])
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    plain.append([n for p in model.parameters() for n in p.detach().flatten().tolist()])
    close(facts["own"], plain[:-1])
    close(facts["servers"], plain[1:])
    assert facts["afterwards"] == facts["servers"]


@pytest.mark.slow
@pytest.mark.parametrize(("push", "fetch", "shards"), [(2, 2, 1), (2, 3, 2), (3, 1, 1), (1, 4, 3)])
def test_downpour_pushes_sums_and_steps_by_itself_between_fetches(
    launcher: Launcher, tmp_path: Path, push: int, fetch: int, shards: int
) -> None:
    strategy = f"downpour(push={push}, fetch={fetch}, shards={shards})"
    [facts], _ = run(launcher, tmp_path, "steps", strategy, 1)
    seen, kept = rained(push, fetch, [RATE] * 6)
    close(facts["own"], seen[:-1])
    close(facts["servers"], kept)
    close(facts["afterwards"], seen[1:])


@pytest.mark.slow
def test_a_rate_that_changes_reaches_the_adagrad_of_the_servers(launcher: Launcher, tmp_path: Path) -> None:
    [facts], _ = run(launcher, tmp_path, "a_rate_that_changes", "downpour(push=2)", 1)
    _, kept = rained(2, 1, [RATE] * 3 + [RATE / 2] * 3)
    close(facts["servers"], kept)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["steps", "unwatched_steps"])
def test_in_a_warm_start_one_worker_trains_and_the_others_have_what_it_learned(
    launcher: Launcher, tmp_path: Path, case: str
) -> None:
    facts, _ = run(launcher, tmp_path, case, "downpour(warm=4)", 3)
    task = Regression()

    def on_one_example(weights: Row, batch: int) -> Row:
        return task.gradient(weights, batch, rank=0, workers=BATCH)  # Of 4 examples the first of 3 workers has one.

    seen, _ = rained(1, 1, [RATE] * 4, share=1 / 3, gradient=on_one_example)
    for fact in facts:
        close(fact["own"][:5], seen)
        assert len(fact["own"]) == 6
    alone, _ = rained(1, 1, [RATE] * 5, share=1 / 3, gradient=on_one_example)
    # Whoever pushes last has everybody's in what it pulls.
    assert max(np.abs(np.array(fact["own"][5]) - alone[5]).max() for fact in facts) > 1e-3, "then all train"


# -- elastic averaging -----------------------------------------------------------------------------------------------


def tied(workers: int, period: int, alpha: float, steps: int = 6) -> tuple[list[list[Row]], list[Row]]:
    """Equations 3 and 4 with momentum: every worker before each step and at the end, and the centre after each."""
    task = Regression()
    centre = task.start.copy()
    own = [task.start.copy() for _ in range(workers)]
    velocity = [np.zeros_like(centre) for _ in range(workers)]
    seen: list[list[Row]] = [[] for _ in range(workers)]
    kept: list[Row] = []
    for step in range(steps):
        gradients = [task.gradient(w, step, rank, workers) for rank, w in enumerate(own)]
        due = step and step % period == 0
        pulls = [alpha * (w - centre) if due else np.zeros_like(w) for w in own]
        for rank in range(workers):
            seen[rank].append(own[rank].copy())
            velocity[rank] = MOMENTUM * velocity[rank] + gradients[rank]
            own[rank] = own[rank] - RATE * velocity[rank] - pulls[rank]
        centre = centre + np.sum(pulls, axis=0)
        kept.append(centre.copy())
    return [[*before, w] for before, w in zip(seen, own, strict=True)], kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "period", "alpha"),
    [
        ("elastic(rho=5.0, period=1, asynchronous=False)", 1, 1, 0.5),
        ("elastic(rho=5.0, period=2)", 1, 2, 0.5),
        ("elastic(rho=3.0, period=1, shards=2, asynchronous=False)", 2, 1, 0.3),
        ("elastic(period=2, asynchronous=False)", 2, 2, MOVING_RATE / 2),
    ],
)
def test_workers_and_centre_move_as_the_paper_says_and_momentum_is_kept(
    launcher: Launcher, tmp_path: Path, strategy: str, workers: int, period: int, alpha: float
) -> None:
    facts, _ = run(launcher, tmp_path, "steps", strategy, workers)
    seen, kept = tied(workers, period, alpha)
    for fact, expected in zip(facts, seen, strict=True):
        close(fact["own"], expected[:-1])
        close(fact["servers"], kept)
        close(fact["afterwards"], expected[1:])


@pytest.mark.slow
def test_looking_at_the_centre_changes_nothing(launcher: Launcher, tmp_path: Path) -> None:
    facts, _ = run(launcher, tmp_path, "unwatched_steps", "elastic(period=2, asynchronous=False)", 2)
    seen, _ = tied(2, 2, MOVING_RATE / 2)
    for fact, expected in zip(facts, seen, strict=True):
        close(fact["own"], expected[:-1])


@pytest.mark.slow
def test_what_the_springs_of_asynchronous_workers_give_the_centre_they_take_from_the_workers(
    launcher: Launcher, tmp_path: Path
) -> None:
    facts, result = run(launcher, tmp_path, "springs_alone", "elastic(period=1)", 2)
    start = Regression().start
    ends = [np.array(fact["own"]) for fact in facts]
    centre = np.array(facts[0]["servers"])
    assert facts[0]["servers"] == facts[1]["servers"]
    np.testing.assert_allclose(ends[0] + ends[1] + centre, 3 * start + 30, rtol=1e-5)
    assert np.abs(ends[0] - ends[1]).max() < 10, "they have come nearer to each other"
    assert np.abs(centre - start).min() > 1, "and the centre to them"
    assert result.servers[0]["pushes"]["applied"] == 2 * 5, "five of each worker"


# -- gradient coding -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "disturb"),
    [
        ("coded", "worker 1: pace 40ms"),
        ("coded(s=3, shards=2)", "any worker: pause 30ms with probability 0.3"),
        ("coded", "worker 2: kill at step 5"),
        ("coded(code=cyclic)", "worker 1: pace 40ms"),
        ("coded(s=2, code=cyclic, shards=2)", "worker 2: kill at step 5"),
    ],
)
def test_coded_steps_are_exact_however_slow_some_workers_are(
    launcher: Launcher, tmp_path: Path, strategy: str, disturb: str
) -> None:
    options: dict[str, Any] = {"out": tmp_path / "runs", "launcher": launcher, "disturb": disturb}
    result = offbeat.fit(CurveTask(str(tmp_path), batch=37), strategy, workers=4, epochs=20, **options)
    found, expected = load_file(result.run / MODEL_FILE), plain_loop(20, 37)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    assert (result.steps, result.samples) == (20, 20 * 37)
    assert result.servers[0]["pushes"]["late"] > 0, "answers that were not waited for"
    assert result.disturbances["fired"] >= 1


@pytest.mark.slow
def test_microbatches_are_pushed_one_by_one_where_a_step_has_a_deadline(launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "runs", "launcher": launcher, "workers": 2, "epochs": 4}
    patient = offbeat.fit(CurveTask(str(tmp_path)), "server(consistency=deadline(60)) + accumulate(3)", **options)
    summed = offbeat.fit(CurveTask(str(tmp_path)), "allreduce + accumulate(3)", **options)
    found, expected = load_file(patient.run / MODEL_FILE), load_file(summed.run / MODEL_FILE)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    assert patient.steps == summed.steps
    assert patient.servers[0]["pushes"]["applied"] > 2 * patient.steps, "more than one push in a step"
    slow = "worker 1: pace 100ms"
    hasty = "server(consistency=deadline(0.02)) + accumulate(3)"
    late = offbeat.fit(CurveTask(str(tmp_path)), hasty, disturb=slow, **options)
    assert late.servers[0]["pushes"]["late"] > 0
    assert late.steps == summed.steps


@pytest.mark.slow
def test_a_coded_run_ends_when_nobody_is_left_for_a_slice(launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "runs", "launcher": launcher}
    options["disturb"] = ("worker 1: kill at step 4", "worker 3: kill at step 4", "worker *: pace 20ms")
    with pytest.raises((RunError, WorkerError)) as found:
        offbeat.fit(CurveTask(str(tmp_path)), "coded", workers=4, epochs=50, **options)
    logs = [path.read_text() for path in tmp_path.glob("runs/*/logs/worker-*.log")]
    told = "\n".join([str(found.value), *logs])
    assert "all 2 workers that compute slice 1 of every batch are gone" in told, told


def test_a_shard_holds_coded_answers_until_they_are_enough_and_discards_the_rest() -> None:
    shard = Shard(Rule(0, coded=1), ClusterView.of(4, 1, 0))
    payloads = [Payload(8, f"gradient {worker}") for worker in range(4)]

    def push(worker: int, clock: int = 0, reason: str = "") -> EntryOutcome:
        message = Push(worker=worker, life=0, number=clock, clock=clock, weight=2.0)
        return shard.apply(PushRefused(message, reason) if reason else message, payloads[worker])

    assert push(0) == push(2) == EntryOutcome(), "both have computed the same slice"
    assert shard._sum.holds(0, 0)
    done = push(1)
    assert done.works[:2] == [AccumulateGradient(payloads[0], 2.0, 0, -1), Discard(payloads[2])]
    assert done.works[2:] == [AccumulateGradient(payloads[1], 2.0, 0, -1), Update(1, 1 / 4.0, (), workers=4)]
    assert [(answer.worker, answer.status) for answer in done.answers] == [(0, "applied"), (2, "late"), (1, "applied")]
    assert shard.minimum == 1
    assert [answer.status for answer in push(3).answers] == ["late"]
    # What is unfit is of no use, so the other answer for that slice is waited for.
    push(0, 1, reason="NaN")
    push(1, 1)
    assert shard.minimum == 1
    done = push(2, 1)
    assert shard.minimum == 2
    assert Counter(answer.status for answer in done.answers) == {"refused": 1, "applied": 2}


# -- all -------------------------------------------------------------------------------------------------------------

BOTH = ["downpour(push=2, fetch=3)", "elastic(period=2)"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", BOTH)
def test_a_worker_goes_through_its_data_while_another_stands_still(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    facts, _ = run(launcher, tmp_path, "nobody_waits", strategy, 2)
    assert [fact["steps"] for fact in facts] == [6, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("downpour(push=2, fetch=3)", 1),
        ("elastic(period=3)", 1),
        ("elastic(period=3, shards=2, asynchronous=False)", 2),
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_never_been_cut(
    launcher: Launcher, tmp_path: Path, strategy: str, workers: int
) -> None:
    """Where no order is left to chance, to the bit; cut between two exchanges, in the middle of an epoch."""
    options: dict[str, Any] = {"workers": workers, "out": tmp_path / "runs", "launcher": launcher}
    task = CurveTask(str(tmp_path))
    whole = load_file(offbeat.fit(task, strategy, steps=11, seed=5, **options).run / MODEL_FILE)
    cut = offbeat.fit(task, strategy, steps=7, seed=5, **options)
    half = load_file(cut.run / MODEL_FILE)
    resumed = load_file(offbeat.fit(task, strategy, steps=11, resume=cut.run, **options).run / MODEL_FILE)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(half[name], resumed[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", BOTH)
def test_asynchronous_runs_go_on_from_a_checkpoint(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    options: dict[str, Any] = {"workers": 2, "out": tmp_path / "runs", "launcher": launcher}
    task = CurveTask(str(tmp_path), examples=32)
    cut = offbeat.fit(task, strategy, steps=30, **options)
    again = offbeat.fit(task, strategy, steps=60, resume=cut.run, **options)
    assert again.steps == 60
    assert cut.score is not None
    assert again.score is not None
    assert again.score > cut.score, "it goes on learning from where it was"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*BOTH, "elastic(period=2, asynchronous=False)", "downpour(warm=12)"])
def test_the_others_go_on_when_a_worker_dies(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    options: dict[str, Any] = {"out": tmp_path / "runs", "launcher": launcher, "disturb": "worker 0: kill at step 7"}
    result = offbeat.fit(CurveTask(str(tmp_path), examples=32), strategy, workers=3, epochs=5, **options)
    assert result.died == ["worker 0"]
    assert result.steps == 20
    assert result.disturbances["fired"] == result.disturbances["asked"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["downpour", "downpour(push=4, fetch=4, warm=20)", "elastic", "elastic(period=8, asynchronous=False)", "coded"],
)
def test_digits_are_learned(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    result = offbeat.fit(Digits(), strategy, workers=2, out=tmp_path, launcher=launcher)
    assert result.reached_target
    model = Digits().model()
    model.load_state_dict(load_file(result.run / MODEL_FILE))
    with torch.no_grad():
        held_out = [(x.unsqueeze(0), y.unsqueeze(0)) for x, y in Digits().data().validation]
        assert Digits().score(model, held_out) == pytest.approx(result.score), "what was judged is what is left"


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("downpour(push=0)", "push is 0, but gradients are pushed"),
        ("downpour(fetch=0)", "fetch is 0, but parameters are fetched"),
        ("downpour(shards=0)", "shards is 0, but there is at least one server"),
        ("downpour(replicas=-1)", "replicas is -1"),
        ("downpour(warm=-1)", "warm is -1, but a warm start takes 0 or more steps"),
        ("elastic(rho=0.0)", "rho is 0.0, but a spring pulls with more than 0"),
        ("elastic(period=0)", "period is 0, but exchanges are at least 1 step apart"),
        ("easgd(shards=0)", "shards is 0"),
        ("easgd(replicas=-1)", "replicas is -1"),
        ("coded(s=0)", "s is 0, but at least one worker is not waited for"),
        ("coded(shards=0)", "shards is 0"),
        ("coded(replicas=-1)", "replicas is -1"),
        ("coded(replicas=256)", "replicas is 256, but each of 257 servers would be a process of its own"),
        ("server(shards=100, replicas=2)", "shards is 100, but each of 300 servers .* at most 256 are started"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        parse(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "case", "words"),
    [
        ("elastic(rho=10.0)", "steps", "alpha = rate \\* rho is 1, and a worker would move .* rho below 10"),
        ("elastic(rho=6.0, asynchronous=False)", "steps", "is 0.6, and 2 workers at once would .* rho below 5"),
        ("elastic", "a_closure", r"elastic cannot be used with optimizer.step\(closure\)"),
        ("downpour", "a_closure", r"downpour cannot be used with optimizer.step\(closure\)"),
        (
            "server",
            "a_group_that_comes_later",
            r"had 1 parameter groups when it was given to prepare\(\), and has 2 now",
        ),
        ("coded", "a_loader_of_its_own", "coded decides which workers compute the same slice .* Omit split=False"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_loop(
    launcher: Launcher, tmp_path: Path, strategy: str, case: str, words: str
) -> None:
    with pytest.raises((StrategyError, WorkerError), match=words):
        run(launcher, tmp_path, case, strategy, 2)


@pytest.mark.parametrize(("workers", "words"), [(3, "3 workers cannot be cut into 2 equal groups"), (1, "tolerate 1")])
def test_workers_that_cannot_be_cut_into_groups_are_refused(workers: int, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        Coded().check(workers)


@pytest.mark.parametrize("strategy", [Downpour(), Elastic(), Coded()], ids=str)
def test_workers_without_servers_are_refused(strategy: Any) -> None:
    alone: Any = SimpleNamespace(size=1, rank=0)
    with pytest.raises(StrategyError, match="needs server processes beside the workers"):
        strategy.connect(alone, Stopwatch())


def test_they_promise_to_outlive_their_workers_and_coded_to_be_exact() -> None:
    assert parse("coded").traits == Traits(exact=True, elastic=True)
    assert parse("downpour").traits == parse("easgd(asynchronous=False)").traits == Traits(elastic=True)
    assert parse("easgd(2.0, 8)") == Elastic(rho=2.0, period=8)
