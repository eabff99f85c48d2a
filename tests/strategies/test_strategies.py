"""Strategies as values: what they check, and how they add up."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal

import pytest

import offbeat.strategies
from offbeat.errors import StrategyError
from offbeat.strategies import (
    DDP,
    Accumulate,
    AllReduce,
    Axis,
    Combined,
    Setting,
    Single,
    Strategy,
    Traits,
    aliases,
    combined,
    parse,
)
from offbeat.strategies.language.registry import BUILT_IN


class Mode(StrEnum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True)
class SSP(Setting):
    """Stale synchronous parallel."""

    staleness: int
    """How far the fastest may run ahead."""


@dataclass(frozen=True)
class Push(Strategy):
    """Pushes to a server.

    And says more about it here.
    """

    consistency: SSP | Literal["asp", "bsp"] = "bsp"
    """Who waits
    for whom."""
    mode: Mode = Mode.SAFE
    rate: float | None = None
    """How fast."""

    axis = Axis.EXCHANGE
    traits = Traits(synchronous=True, exact=True, elastic=True)
    aliases: ClassVar = {"bosen": "push(ssp(3))"}

    def refuses(self, other: Strategy) -> str | None:
        return "a server cannot average signs" if isinstance(other, Sign) else None


@dataclass(frozen=True)
class Sign(Strategy):
    """Keeps the signs."""

    axis = Axis.COMPRESSION
    traits = Traits(synchronous=True, deterministic=True)


@dataclass(frozen=True)
class TopK(Strategy):
    """Keeps the largest."""

    share: float
    axis = Axis.COMPRESSION


@dataclass(frozen=True)
class Mesh(Strategy):
    axis = Axis.EXCHANGE
    traits = Traits(synchronous=True, splits_model=True)


# --- the public surface


def test_the_public_names_are_these() -> None:
    classes = {"Strategy", "Setting", "Traits", "Axis", "Combined", "Splitting", "Pipeline", "TensorParallel"}
    classes |= {"Single", "DDP", "AllReduce", "Server", "Coded", "Downpour", "Elastic", "Hogwild", "Accumulate"}
    classes |= {"Gossip", "Random", "Local", "Nesterov", "OuterSGD", "LineSearch", "Sandblaster"}
    classes |= {"BSP", "SSP", "ASP", "DropSlowest", "Deadline"}
    classes |= {"Half", "BFloat", "Quantize", "Sign", "TopK", "Threshold", "RandomK", "LowRank"}
    classes |= {"Exchanging", "Exchange", "Timing", "Pace", "Compressing"}  # what a strategy of one's own is made of
    functions = {"combined", "parse", "parse_built_in", "expand", "available", "aliases", "describe", "overview"}
    assert set(offbeat.strategies.__all__) == classes | functions


def test_the_strategies_and_their_aliases_are_these() -> None:
    served = ["server", "coded", "downpour", "elastic"]
    compressors = ["half", "bfloat", "quantize", "sign", "topk", "threshold", "randomk", "lowrank"]
    assert [cls.name for cls in BUILT_IN] == [
        "single",
        "ddp",
        "allreduce",
        *served,
        "hogwild",
        "gossip",
        "federated",
        "sandblaster",
        "accumulate",
        "local",
        *compressors,
        "pipeline",
        "tensor",
    ]
    assert aliases() == {
        "sequential": "single",
        "gradient_accumulation": "accumulate",
        "zero1": "allreduce(shard=optimizer)",
        "zero2": "allreduce(shard=gradients)",
        "zero3": "allreduce(shard=parameters)",
        "fsdp": "allreduce(shard=parameters)",
        "easgd": "elastic",
        "dpsgd": "gossip",
        "diloco": "local(500, outer=nesterov(0.7, 0.9))",
        "powersgd": "lowrank",
        "fedavg": "federated",
        "fedsgd": "federated(batch=full, algorithm=fedsgd)",
        "fedbuff": "federated(algorithm=fedbuff(10))",
        **{name: f"federated(algorithm={name})" for name in ("fedadagrad", "fedadam", "fedyogi", "scaffold")},
    }


def test_the_values_can_be_had_without_torch() -> None:
    code = (
        "import sys, offbeat.strategies.language.fields, offbeat.protocols.expressions; "
        "assert 'torch' not in sys.modules"
    )
    # The package's list imports the strategies' workers, so its own modules are loaded beside it.
    stub = "import types; p = types.ModuleType('offbeat.strategies'); p.__path__ = [sys.argv[1]]; "
    where = str(Path(offbeat.strategies.__file__).parent)
    program = "import sys; " + stub + "sys.modules['offbeat.strategies'] = p; " + code
    subprocess.run([sys.executable, "-c", program + "; import offbeat.strategies._base", where], check=True)


# --- one strategy


def test_a_strategy_is_named_after_its_class_unless_it_says_otherwise() -> None:
    @dataclass(frozen=True)
    class Other(Strategy):
        name = "else_"
        axis = Axis.WHEN

    @dataclass(frozen=True)
    class Further(Other):
        pass

    assert (DDP.name, Push.name, SSP.name, Other.name, Further.name) == ("ddp", "push", "ssp", "else_", "further")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Accumulate(0), "accumulate: steps is 0, but at least 1 batch"),
        (lambda: Accumulate(-3), "steps is -3"),
        (lambda: Accumulate(2.5), "steps takes int, not 2.5"),
        (lambda: Accumulate(True), "not True. True and False are not numbers"),
        (lambda: Accumulate(2**63), "beyond 64 bits"),
        (lambda: AllReduce(bucket=0.0), "allreduce: bucket is 0.0, but a bucket holds more than 0 MiB"),
        (lambda: DDP(bucket=-1), "ddp: bucket is -1.0"),
        (lambda: DDP(bucket=float("nan")), "not nan. It must be finite"),
        (lambda: DDP(bucket=float("inf")), "not inf. It must be finite"),
        (lambda: DDP(bucket=10**400), "beyond 64 bits"),
        (lambda: DDP(find_unused=1), "find_unused takes bool, not 1"),
        (lambda: Push("tsp"), r"consistency takes ssp\(staleness: int\) \| asp \| bsp, not tsp"),
        (lambda: Push(mode="slow"), r"mode takes fast \| safe, not slow"),
        (lambda: SSP("x" * 500), r"not x{77}\.\.\."),
    ],
)
def test_a_wrong_value_is_refused_when_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make()


def test_values_are_kept_as_their_field_says() -> None:
    assert type(DDP(bucket=50).bucket) is float
    assert Push(mode="fast").mode is Mode.FAST  # pyright: ignore[reportArgumentType]
    assert str(DDP(bucket=50)) == str(DDP(bucket=50.0)) == "ddp(bucket=50.0)"


def test_a_strategy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Accumulate(2).steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_summary_is_the_first_line_of_the_docstring() -> None:
    assert Push.summary() == "Pushes to a server."
    assert Mesh.summary() == ""


@pytest.mark.parametrize("cls", BUILT_IN)
def test_every_strategy_says_in_one_line_what_it_is_and_shows_examples_that_parse(cls: type[Strategy]) -> None:
    assert cls.summary().endswith((".", ";"))
    assert cls.examples
    for example in cls.examples:
        assert cls in [type(part) for part in parse(example).parts()]
        assert str(parse(example)) in (example, f"allreduce + {example}")


# --- classes that their authors have not finished


def _unfinished() -> dict[str, type[Strategy]]:
    class Undecorated(Strategy):
        axis = Axis.WHEN

    @dataclass(frozen=True)
    class Axisless(Strategy):
        pass

    @dataclass(frozen=True)
    class Texty(Strategy):
        path: str = "x"
        axis = Axis.WHEN

    @dataclass(frozen=True)
    class Spaced(Strategy):
        kind: Literal["one bit"] = "one bit"
        axis = Axis.WHEN

    @dataclass(frozen=True)
    class Taken(Strategy):
        parts: int = 1  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
        axis = Axis.WHEN

    @dataclass(frozen=True)
    class Unresolved(Strategy):
        kind: Nowhere = 1  # noqa: F821  # pyright: ignore
        axis = Axis.WHEN

    @dataclass(frozen=True)
    class Twice(Strategy):
        kind: Literal["fast", "other"] | Mode = "fast"
        axis = Axis.WHEN

    @dataclass(frozen=True)
    class Unnamable(Strategy):
        name = "not-a-word"
        axis = Axis.WHEN

    return {cls.__name__: cls for cls in (Undecorated, Axisless, Texty, Spaced, Taken, Unresolved, Twice, Unnamable)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Undecorated", "not a dataclass"),
        ("Axisless", "does not say what it decides"),
        ("Texty", "Texty.path has a type that cannot be written"),
        ("Spaced", "'one bit'"),
        ("Taken", "a field 'parts'"),
        ("Unresolved", "cannot be resolved: name 'Nowhere'"),
        ("Twice", "have the same text"),
        ("Unnamable", "'not-a-word'"),
    ],
)
def test_a_class_that_cannot_be_written_as_text_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        combined(_unfinished()[name]())


# --- sums


def test_a_sum_has_the_same_parts_in_whatever_order_it_is_written() -> None:
    for parts in itertools.permutations([Accumulate(2), DDP(), Sign()]):
        total = parts[0] + parts[1] + parts[2]
        assert total.parts() == (DDP(), Accumulate(2), Sign())
        assert (total.exchange, total.when, total.compressions) == (DDP(), Accumulate(2), (Sign(),))


def test_adding_is_associative_even_before_an_exchange_is_named() -> None:
    for a, b, c in itertools.permutations([Accumulate(2), DDP(), Sign()]):
        assert (a + b) + c == a + (b + c)
        assert str((a + b) + c) == str(a + (b + c))


def test_compressions_keep_their_order() -> None:
    assert (Sign() + TopK(0.1)).compressions == (Sign(), TopK(0.1))
    assert Sign() + TopK(0.1) != TopK(0.1) + Sign()


def test_a_sum_without_an_exchange_is_an_allreduce() -> None:
    assert combined(Accumulate(8)).exchange == AllReduce()
    assert combined(Accumulate(8)) == AllReduce() + Accumulate(8) == Accumulate(8)
    assert Accumulate(8) == AllReduce() + Accumulate(8)
    assert Accumulate(8) != AllReduce(bucket=1.0) + Accumulate(8)
    assert str(Accumulate(8) + Sign()).startswith("allreduce + accumulate(8)")


def test_any_strategy_has_a_normal_form() -> None:
    only = combined(DDP())
    assert (only.exchange, only.when, only.compressions) == (DDP(), None, ())
    assert combined(only) is only
    assert only == DDP()
    assert DDP() == only
    assert only != Single()
    assert only != "ddp"


def test_equal_strategies_hash_equal() -> None:
    groups = [
        [DDP(), DDP(25), combined(DDP()), parse("ddp")],
        [AllReduce(), combined(AllReduce())],
        [Accumulate(2), combined(Accumulate(2)), AllReduce() + Accumulate(2), parse("accumulate(2) + allreduce")],
        [DDP() + Accumulate(2), Accumulate(2) + DDP()],
        [Accumulate(2) + Sign(), AllReduce() + Sign() + Accumulate(2)],
    ]
    for group in groups:
        assert {hash(s) for s in group} == {hash(group[0])}
        assert set(group) == {group[0]}
    assert len({s for group in groups for s in group}) == len(groups)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (DDP(), AllReduce(), "ddp and allreduce cannot be added: each decides the exchange, and a step"),
        (DDP(), DDP(), "each decides the exchange"),
        (Accumulate(2), Accumulate(3), r"accumulate\(2\) and accumulate\(3\) .* decides the when"),
        (Accumulate(2) + DDP(), Single(), "ddp and single"),
    ],
)
def test_two_strategies_of_one_axis_are_refused(one: Strategy, other: Strategy, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        one + other


def test_parts_that_refuse_each_other_are_refused_whoever_says_it() -> None:
    for make in (lambda: Push() + Sign(), lambda: Sign() + Push(), lambda: Accumulate(2) + Sign() + Push()):
        with pytest.raises(StrategyError, match=r"cannot go together: a server cannot average signs\."):
            make()


def test_a_part_cannot_be_put_on_another_axis_by_hand() -> None:
    for make in (
        lambda: Combined(Accumulate(2)),
        lambda: Combined(DDP(), DDP()),
        lambda: Combined(DDP(), None, (DDP(),)),
        lambda: Combined(DDP() + Sign()),
    ):
        with pytest.raises(StrategyError, match="cannot stand there"):
            make()


def test_only_strategies_are_added() -> None:
    with pytest.raises(TypeError):
        DDP() + "accumulate(2)"  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]


def test_a_sum_promises_what_all_of_its_parts_promise() -> None:
    assert (DDP() + Accumulate(2)).traits == Traits(synchronous=True, exact=True, deterministic=True)
    assert (DDP() + Sign()).traits == Traits(synchronous=True, deterministic=True)
    assert (Push() + Accumulate(2)).traits == Traits(synchronous=True, exact=True, elastic=True)
    assert (DDP() + TopK(0.1)).traits == Traits()


def test_a_model_that_one_part_splits_is_split() -> None:
    assert (Mesh() + Accumulate(2)).traits == Traits(synchronous=True, splits_model=True)


def test_a_sum_is_shown_as_python_would_make_it() -> None:
    assert repr(DDP() + Accumulate(2)) == "DDP(bucket=25.0, find_unused=False) + Accumulate(steps=2)"


@pytest.mark.parametrize("strategy", [AllReduce(), DDP(), Accumulate(2), Single(), DDP() + Accumulate(2)])
def test_no_strategy_runs_without_workers(strategy: Strategy) -> None:
    strategy.check(1)
    for workers in (0, -1):
        with pytest.raises(StrategyError, match=f"cannot run with {workers} workers"):
            strategy.check(workers)


def test_single_is_one_worker_in_a_sum_too() -> None:
    AllReduce().check(1000)
    for strategy in (Single(), Single() + Accumulate(2)):
        with pytest.raises(StrategyError, match="one worker, but 2 were asked for"):
            strategy.check(2)
