"""`server(update=...)`: its text and values, and runs in which a program takes the optimizer's place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import write
from fault_runs import applied, parameters
from own_scripts.running import same
from torch import Tensor, nn, optim
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import CheckpointError, RunError, StrategyError
from offbeat.protocols.programs.library import recipe_program
from offbeat.protocols.programs.plan import plan_of
from offbeat.protocols.programs.python_text import python_text
from offbeat.protocols.programs.sources import program_from
from offbeat.run.drive import Result, fit
from offbeat.runtime.launch import Launcher
from offbeat.strategies import ASP, Server, parse
from offbeat.strategies.language.parser import expand, parse_built_in
from offbeat.strategies.servers.update import LIBRARY

TEXTS = {
    "server(update=adagrad)": "server(update=adagrad)",
    "server(update=momentum(0.9))": "server(update=momentum)",
    "server(update=momentum(momentum=0.5))": "server(update=momentum(0.5))",
    "server(update=adam(0.8, eps=1e-6), shards=2)": "server(shards=2, update=adam(beta1=0.8, eps=1e-06))",
    "server(update=lambda w,g: w-lr*g)": "server(update=lambda w, g: w - lr * g)",
    "server(update=lambda w, g, s: (w - lr * g / sqrt(s + 1e-10), s + g * g), shards=2) + topk(0.1)": (
        "server(shards=2, update=lambda w, g, s: (w - lr * g / sqrt(s + 1e-10), s + g * g)) + topk(0.1)"
    ),
    "server(update=lambda w, g: (lambda d: where(d > 1, w, w - d))(lr * g))": (
        "server(update=lambda w, g: (lambda d: where(d > 1, w, w - d))(lr * g))"
    ),
    "coded(update=adam)": "coded(update=adam)",
}


@pytest.mark.parametrize("text", TEXTS)
def test_an_update_is_written_in_one_way_and_read_back(text: str) -> None:
    strategy = parse(text)
    assert str(strategy) == TEXTS[text]
    assert parse(str(strategy)) == strategy == parse_built_in(str(strategy))
    assert hash(parse(str(strategy))) == hash(strategy)


@pytest.mark.parametrize("name", LIBRARY)
def test_a_program_of_the_library_written_as_a_lambda_does_the_same(name: str) -> None:
    program = recipe_program(name)
    text = python_text(program.term)
    assert plan_of(program_from(text)).hash == plan_of(program).hash
    assert python_text(program_from(text).term) == text


def test_a_function_a_file_and_a_text_are_the_same_update(tmp_path: Path) -> None:
    file = write(tmp_path / "my own.lam", "# Adagrad\n\\w g s. (w - lr * g / sqrt (s + 1e-10), s + g * g)\n")
    text = "lambda w, g, s: (w - lr * g / sqrt(s + 1e-10), s + g * g)"
    from_text = Server(update=text)  # type: ignore[arg-type]
    assert parse(f"server(update={file})") == from_text == parse(f"server(update={text})")
    traced = Server(update=lambda w, g, s, lr: (w - lr * g / torch.sqrt(s + 1e-10), s + g * g))
    assert str(traced) == "server(update=lambda w, g, s, lr: (w - lr * g / sqrt(s + 1e-10), s + g * g))"
    assert parse(str(traced)) == traced
    assert traced.program is not None
    assert from_text.program is not None
    assert traced.program.plan.hash == from_text.program.plan.hash


def test_updates_can_be_swept() -> None:
    assert [str(one) for one in expand("server(update={sgd, lambda w, g: w - lr * sign(g)})")] == [
        "server(update=sgd)",
        "server(update=lambda w, g: w - lr * sign(g))",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server(update=adagrid)", "Did you mean 'adagrad'"),
        ("server(update=elastic)", "is not the name of an update"),
        ("server(update=adam(rate=3))", "no setting 'rate'"),
        ("server(update=adam(0.9, beta1=0.8))", "beta1 twice"),
        ("server(update=momentum(w))", "momentum takes a number"),
        ("server(update=sgd(1))", "no settings"),
        ("server(update=3)", "update takes lambda"),
        ("server(update=lambda w: w)", "needs"),
        ("server(update=lambda w, g: w - rate * g)", "'rate' is not defined"),
        ("server(update=lambda w, g: norm(w))", "is of type scalar"),
        ("server(update=lambda w, g: __import__('os').system('true'))", "cannot have this"),
        ("server(update=lambda w, g: (lambda x: x(x))(lambda x: x(x)))", "applied to itself"),
        ("server(update=lambda w, g: w + {1, 2})", "is a set"),
        ("server(update=nowhere.lam)", "cannot be read"),
        ("server(shards=2, consistency=asp, update=lambda w, g: w - norm(w) * g)", "under asp shards are at different"),
        ("server(shards=2, consistency=ssp(2), update=lambda w, g: w - norm(lr * g) * g)", "sum `g` alone"),
        ("coded(shards=2, update=clipped_sgd)", "a coded step is decoded shard by shard"),
        ("server(update=clipped_sgd) + pipeline(2)", "each worker has a part of the model only"),
        ("coded(update=clipped_sgd) + tensor(2)", "each worker has a part of the model only"),
        ("server(shards=2, consistency=asp, update=clipped_sgd) + topk(0.1)", "of a compressed one shards get other"),
        ("server(consistency=asp, staleness_scaling=True, update=sgd)", "the update says what is done"),
        ("server(update=lambda w, g: " + "+".join(f"sqrt(w+{n})" for n in range(150)) + ")", "operations per element"),
    ],
)
def test_an_update_that_cannot_be_is_refused_before_a_process_starts(text: str, words: str) -> None:
    with pytest.raises(StrategyError) as refused:
        parse(text)
    assert words in str(refused.value)


def test_a_file_that_an_untrusted_text_names_is_not_read(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.lam", "\\w g. w")
    with pytest.raises(StrategyError, match="is not read here"):
        parse_built_in(f"server(update={file})")


# -- runs --------------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.1),
    "adam": lambda params: optim.Adam(params, lr=0.1),
    "adamw": lambda params: optim.AdamW(params, lr=0.1),
}


class ClippedSGD(optim.SGD):
    """The usual recipe: clip the gradients of the whole model, then step."""

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.5)
        return super().step(closure)


OPTIMIZERS["clipped"] = lambda params: ClippedSGD(params, lr=0.1)


class Bend(offbeat.Task):
    """Learn a sine, with a rate that falls."""

    def __init__(self, name: str = "sgd") -> None:
        self.name = name
        self.global_batch = 10

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def data(self) -> offbeat.Data:
        numbers = torch.linspace(-1, 1, 37).unsqueeze(1)
        points = TensorDataset(numbers, (3 * numbers).sin())
        return offbeat.Data(points, points, points)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        return OPTIMIZERS[self.name](params)

    def schedule(self, optimizer: Optimizer) -> Any:
        return optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        return -sum(float(nn.functional.mse_loss(model(x), y, reduction="sum")) for x, y in data)


Learn = Callable[..., Result]


@pytest.fixture
def learn(launcher: Launcher, tmp_path: Path) -> Learn:
    def run(strategy: str, workers: int = 2, name: str = "sgd", **more: Any) -> Result:
        options: dict[str, Any] = {"steps": 16, "seed": 2, "target": 1e9, "timeout": 60.0, "out": tmp_path / "runs"}
        return fit(Bend(name), strategy, workers=workers, launcher=launcher, **(options | more))

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers"), [("adagrad", 1), *((name, 2) for name in OPTIMIZERS if name != "clipped")]
)
def test_a_program_learns_what_the_optimizer_of_its_name_does(learn: Learn, name: str, workers: int) -> None:
    built_in = learn("server(shards=2)", workers, name)
    program = learn(f"server(shards=2, update={name})", workers)
    same(parameters(built_in), parameters(program), tolerance=1e-5)
    assert [applied(account) for account in program.servers] == [16 * workers] * 2
    assert program.update["program"] == name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "faults"),
    [
        ("server(shards=4, update=clipped_sgd(0.5))", 2, {}),
        ("server(shards=2, replicas=1, update=clipped_sgd(0.5))", 2, {"disturb": "server 1: kill at step 7"}),
        ("server(shards=3, consistency=asp, update=clipped_sgd(0.5))", 1, {}),
    ],
)
def test_clipping_by_a_norm_over_all_shards_is_torchs_clip_grad_norm_over_the_model(
    learn: Learn, strategy: str, workers: int, faults: dict[str, str]
) -> None:
    clipped, program = learn("single", 1, "clipped"), learn(strategy, workers, **faults)
    same(parameters(clipped), parameters(program), tolerance=1e-5)
    assert len(program.died) == len(faults)
    with pytest.raises(AssertionError):
        same(parameters(learn("single", 1)), parameters(program), tolerance=1e-3)


@pytest.mark.slow
def test_a_program_loses_nothing_when_a_primary_is_killed(learn: Learn) -> None:
    strategy = "server(replicas=1, update=adam)"
    plain, killed = learn(strategy), learn(strategy, disturb="server 0: kill at step 7")
    assert killed.died == ["server 0.0"]
    assert applied(killed.servers[0]) == 2 * 16
    same(parameters(plain), parameters(killed), tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("server(consistency=ssp(2), shards=2, update=adagrad)", 2),
        ("server(consistency=ssp(2, eager), replicas=1, update=rmsprop) + topk(0.5)", 2),
        ("server(consistency=asp, update=delay_compensated(0.5))", 2),
        ("server(consistency=asp, update=lambda w, g: w - lr / (1 + staleness) * g)", 2),
        ("server(consistency=drop_slowest(1), shards=2, update=clipped_sgd)", 3),
        ("server(consistency=ssp(2), shards=2, update=lambda w, g, n: (w - lr * g / (0.1 + norm(g)), n + mean(g)))", 2),
        ("server(consistency=deadline(0.5), update=momentum) + accumulate(2)", 2),
        ("coded(update=adam)", 2),
    ],
)
def test_a_program_works_with_every_consistency(learn: Learn, strategy: str, workers: int) -> None:
    result = learn(strategy, workers, steps=24)
    assert not result.refusals
    assert result.score > -18.0, "it has learned something: the score of zeros is about -18.5"


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_push_whose_result_is_nan_is_refused_and_named_and_the_run_goes_on(learn: Learn, consistency: str) -> None:
    update = "lambda w, g, n: (w - lr * g + log(n - 3) * 0 * g, n + 1)"
    result = learn(f"server(consistency={consistency}, update={update})")
    (server,) = result.servers
    assert server["pushes"] == {"applied": 0, "refused": 32}
    assert "new parameters would not be finite" in result.refusals[0]
    assert result.refusals[0].startswith("worker ")


@pytest.mark.slow
def test_a_run_goes_on_with_its_program_and_its_states_and_with_no_other(learn: Learn) -> None:
    strategy = "server(update=adam, shards=2)"
    whole, cut = learn(strategy, 1, steps=9, seed=3), learn(strategy, 1, steps=5, seed=3)
    resumed = learn(strategy, 1, steps=9, resume=cut.run, seed=None)
    same(parameters(whole), parameters(resumed), tolerance=0.0)
    with pytest.raises(CheckpointError, match=r"update=adam.*not.*update=momentum"):
        learn("server(update=momentum, shards=2)", 1, steps=12, resume=cut.run, seed=None)


@pytest.mark.slow
def test_a_workers_own_steps_between_reads_are_those_of_the_servers_also_in_a_resumed_run(learn: Learn) -> None:
    """With one worker, whose own gradients are all there are, it makes no difference when it reads."""
    strategy = "server(consistency=ssp(3), update=adagrad)"
    cut = learn(strategy, 1, steps=6, seed=3)
    resumed = learn(strategy, 1, steps=12, resume=cut.run, seed=None)
    same(parameters(learn("server(update=adagrad)", 1, steps=12, seed=3)), parameters(resumed), tolerance=1e-6)


@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_an_optimizer_with_a_rule_of_its_own_is_refused(learn: Learn, name: str) -> None:
    with pytest.raises(StrategyError, match="nothing but a learning rate"):
        learn("server(update=sgd)", 1, name)


def test_a_task_without_gradients_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises((StrategyError, RunError), match="an update for gradients"):
        fit("offbeat.tasks.mixture", "server(update=sgd)", workers=1, launcher=launcher, out=tmp_path / "runs", steps=2)


def test_under_asp_servers_keep_what_a_program_reads() -> None:
    assert Server(consistency=ASP(), update="delay_compensated").rule.remembers  # type: ignore[arg-type]
    assert not Server(consistency=ASP(), update="adam").rule.remembers  # type: ignore[arg-type]
    assert not Server(update="delay_compensated").rule.remembers  # type: ignore[arg-type]


def test_servers_make_sums_over_all_shards_only_where_there_are_several_and_all_make_steps_together() -> None:
    assert parse("server(shards=2, update=clipped_sgd)").rule.reductions == (("dot",),)  # type: ignore[attr-defined]
    nested = parse("server(shards=2, update=lambda w, g: w - sum(g / norm(w)) * g)")
    assert nested.rule.reductions == (("dot",), ("sum",))  # type: ignore[attr-defined]
    for text in ("server(update=clipped_sgd)", "server(shards=2, update=adam)"):
        assert not parse(text).rule.reductions  # type: ignore[attr-defined]
    assert not parse("server(shards=2, consistency=asp, update=clipped_sgd)").rule.reductions  # type: ignore[attr-defined]
